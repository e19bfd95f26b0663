"""A paper's table as it is described on disk: its numbers (`expected.csv`), and how each scale runs what stands for them."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

from kvlab.hints import did_you_mean
from kvlab.settings import SettingError, build

EXPECTED = "expected.csv"
COLUMNS = ("table", "model", "task", "metric", "method", "budget", "value", "source")
"""Of expected.csv."""
SCALES = ("cpu", "paper")
Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Published:
    """One number of a paper, and where it stands; value: None where that place has none that can be read."""

    table: str
    model: str
    task: str
    metric: str
    method: str
    budget: str
    value: float | None
    source: str


@dataclass(frozen=True)
class Scale:
    """How a table is run on machines of one size.

    models, tasks, methods  what a number's model, task and method are here: settings of `kvlab run`. Numbers of models and
              tasks that aren't named are left out.
    compares  values: the same model, data and measure; changes: the same measure, so losses against the full cache compare;
              order: another measure, so only the order of methods does
    run       settings that all cells have
    metrics   ours by the paper's task, where it isn't the main metric; what there is beside metrics says measures.py
    times     by the paper's task, what ours are multiplied by to be in the paper's unit (1 where nothing is said)
    differs   in what ours differ from the paper's, in words; cost: what running them takes; needs: what must be done before
    """

    name: str
    compares: Literal["values", "changes", "order"]
    models: dict[str, list[str]]
    tasks: dict[str, list[str]]
    methods: dict[str, list[str]]
    differs: str
    cost: str
    run: tuple[str, ...] = ()
    metrics: dict[str, str] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper.

    full    the method that has the full cache, or what else the others are compared with
    better  "higher" or "lower", of the paper's numbers
    tie     numbers of the paper that differ by no more count as equal, since papers give no errors
    doubts  what a reader must know of the paper's numbers
    """

    name: str
    title: str
    paper: str
    claim: str
    better: Literal["higher", "lower"]
    full: str
    tie: float
    scales: tuple[Scale, ...]
    rows: tuple[Published, ...]
    doubts: tuple[str, ...] = ()

    def scale(self, name: str) -> Scale:
        """A scale by its name. Raises SettingError where there is none."""
        known = {scale.name: scale for scale in self.scales}
        if name not in known:
            raise SettingError(f"scale={name}{did_you_mean(name, known)}: {self.name} has {', '.join(known)}")
        return known[name]

    def used(self, scale: Scale) -> list[Published]:
        """The numbers that a scale stands for, in the paper's order."""
        return [
            row for row in self.rows if row.model in scale.models and row.task in scale.tasks and row.method in scale.methods
        ]

    @property
    def numbers(self) -> int:
        """How many rows have a number."""
        return len([row for row in self.rows if row.value is not None])

    def their_full(self, row: Published) -> float | None:
        """What the full cache has in a number's model and task, if that is published."""
        same = [each for each in self.rows if (each.model, each.task, each.method) == (row.model, row.task, self.full)]
        return same[0].value if same else None


def table_names(folder: Path) -> list[str]:
    """All tables below a folder, as `<paper>/<table>`."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in folder.glob("*/*.yaml") if (path.parent / EXPECTED).exists())


def find_table(name: str, folder: Path) -> PaperTable:
    """The table of that name. Raises SettingError where there is none, or where its description is wrong."""
    known = table_names(folder)
    if name not in known:
        raise SettingError(
            f"{name}: there is no such table{did_you_mean(name, known)}; there are: {', '.join(known) or 'none'}"
        )
    return read_table(folder, name)


def read_table(folder: Path, name: str) -> PaperTable:
    """A table from its YAML and the rows of that name in `expected.csv`. SettingError, with the file, for what is wrong."""
    path = folder / f"{name}.yaml"
    try:
        described = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise SettingError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(described, dict) or not isinstance(described.get("scales"), dict):
        raise SettingError(f"{path}: give title, paper, claim, better, full, tie and scales")
    scales = [_scale(path, *item) for item in described["scales"].items()]
    given = {**described, "name": name, "rows": _rows(path.parent / EXPECTED, path.stem), "scales": scales}
    table = build(PaperTable, given, f"{path}: table")
    _check(table, path)
    return table


def _scale(path: Path, name: str, settings: Mapping[str, Any]) -> Scale:
    if name not in SCALES:
        raise SettingError(f"{path}: scale {name}{did_you_mean(name, SCALES)}: use {' or '.join(SCALES)}")
    for part in ("models", "tasks", "methods"):
        named = settings.get(part)
        if not isinstance(named, dict) or not all(isinstance(one, list) for one in named.values()):
            raise SettingError(f"{path}: scale {name}: {part} must give a list of settings for each of the paper's names")
    return build(Scale, {"name": name, **settings}, f"{path}: scale {name}")


def _rows(path: Path, table: str) -> tuple[Published, ...]:
    """The rows of one table. Raises ValueError for a row that isn't whole."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise SettingError(f"{path}: the first line must be {','.join(COLUMNS)}")
        found = []
        for number, row in enumerate(reader, 2):
            if row["table"] != table:
                continue
            if not ((row["value"] == "" or _number(row["value"])) and row["source"] and row["method"]):
                raise SettingError(
                    f"{path}:{number}: a number needs a method, a value (nothing where it can't be read) and its place in the "
                    "paper (source)"
                )
            found.append(Published(**{**row, "value": float(row["value"]) if row["value"] else None}))  # type: ignore[arg-type]
    return tuple(found)


def _number(text: str | None) -> bool:
    try:
        return math.isfinite(float(text or "nan"))
    except ValueError:
        return False


def _check(table: PaperTable, path: Path) -> None:
    """Raises SettingError where description and numbers don't fit each other."""
    keys = [(row.model, row.task, row.method) for row in table.rows]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise SettingError(f"{path.parent / EXPECTED}: two numbers for {', '.join(twice[0])}: give methods names of their own")
    for scale in table.scales:
        for part, names in (("models", scale.models), ("tasks", scale.tasks), ("methods", scale.methods)):
            known: Sequence[str] = sorted({str(getattr(row, part[:-1])) for row in table.rows})
            extra = table.full if part == "methods" else ""  # ours is run even where the paper gives none
            for name in names:
                if name not in (*known, extra):
                    raise SettingError(f"{path}: {part} {name!r}{did_you_mean(name, known)}; {EXPECTED} has {', '.join(known)}")
        if table.full not in scale.methods:
            raise SettingError(f"{path}: scale {scale.name}: methods must say what {table.full!r} is, the full cache")
