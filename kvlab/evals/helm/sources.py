"""A scenario's instances: those that are scored and those that examples are drawn from, from files, the hub or a seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.evals.helm.scenarios import SYNTHETIC, drawn
from kvlab.evals.helm.spec import Draft, Instance, Scenario
from kvlab.evals.rows import BadRow, BadRows, Row, sorted_out
from kvlab.evals.texts import file_hash, text_hash
from kvlab.hub import settle_hub
from kvlab.paths import data_dir
from kvlab.settings import SettingError

POOL = 100
"""Last rows that are set aside for examples where there is no train file (a fifth of the rows at most)."""
DRAWN = 100
"""Synthetic instances where no limit is given."""
DRAWN_TRAIN = 20
"""Synthetic instances that examples are drawn from."""


@dataclass(frozen=True)
class Data:
    """Instances, a line on each row that can't be used, and the hash of what they are made of."""

    scored: tuple[Instance, ...]
    train: tuple[Instance, ...]
    left_out: tuple[str, ...]
    hash: str


def load(
    scenario: Scenario, folder: str | None, hub: bool, limit: int | None, examples: bool, bad_rows: BadRows, seed: int
) -> Data:
    """The data of a scenario. examples: whether any are needed. SettingError, with file and row, where it can't be used."""
    if scenario.name == SYNTHETIC:
        return _drawn(scenario, limit or DRAWN, seed)
    rows, train, digest = _from_hub(scenario, examples) if hub else _from_files(scenario, folder, examples)
    if examples and train is None:
        aside = min(POOL, len(rows) // 5)
        if not aside:
            raise SettingError(
                f"scenario {scenario.label}: {len(rows)} rows are too few to draw examples from; set task.max_train_instances=0"
            )
        rows, train = rows[:-aside], rows[-aside:]

    def problem(values: Mapping[str, Any]) -> str | None:
        try:
            scenario.make(values, 0)
        except BadRow as error:
            return str(error)
        return None

    good = sorted_out(rows[:limit], problem, bad_rows)
    shown = sorted_out(train, problem, bad_rows) if train else None
    scored = tuple(_instance(scenario.make(row.values, row.number), f"id{row.number}", "test", row.where) for row in good.good)
    others = tuple(
        _instance(scenario.make(row.values, row.number), f"train{row.number}", "train", row.where)
        for row in (shown.good if shown else ())
    )
    return Data(scored, others, (*good.left_out, *(shown.left_out if shown else ())), digest)


def _instance(draft: Draft, name: str, split: str, where: str = "") -> Instance:
    return Instance(name, draft.question, draft.references, draft.context, split, draft.sub_split, where=where)


def _drawn(scenario: Scenario, number: int, seed: int) -> Data:
    scored, train = (
        tuple(_instance(drawn(scenario, seed, split, each), f"{name}{each}", split) for each in range(1, many + 1))
        for split, name, many in (("test", "id", number), ("train", "train", DRAWN_TRAIN))
    )
    return Data(scored, train, (), "")


def _from_files(scenario: Scenario, folder: str | None, examples: bool) -> tuple[list[Row | str], list[Row | str] | None, str]:
    root = _folder(scenario, folder)
    path = root / scenario.file
    if not path.is_file():
        hub = "" if scenario.hub is None else ", or set task.hub=true"
        raise SettingError(f"scenario {scenario.label}: there is no {path}; correct task.data_dir{hub}")
    train = root / scenario.train if scenario.train and examples and (root / scenario.train).is_file() else None
    shown = (scenario.train_rows or scenario.rows)(train, scenario.argument) if train else None
    used = [file for file in dict.fromkeys((path, path.with_name(f"{path.stem}-labels.lst"), train)) if file and file.is_file()]
    return scenario.rows(path, scenario.argument), shown, "".join(map(file_hash, used))


def _folder(scenario: Scenario, folder: str | None) -> Path:
    """Where data is. Raises SettingError where nothing says so."""
    if folder is not None:
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise SettingError(f"task.data_dir={folder}: there is no such folder")
        return root
    try:
        found = data_dir()
    except ValueError as error:
        raise SettingError(str(error)) from None
    if found is None:
        hub = "" if scenario.hub is None else ", or task.hub=true to load it from the hub"
        raise SettingError(f"scenario {scenario.label} needs data: set KVLAB_DATA_DIR or task.data_dir{hub}")
    return found


def _from_hub(scenario: Scenario, examples: bool) -> tuple[list[Row | str], list[Row | str] | None, str]:
    """Rows of a dataset on the hub, through the package `datasets`."""
    where = scenario.hub
    if where is None:
        raise SettingError(f"task.hub=true: where scenario {scenario.label} is on the hub isn't known; set task.data_dir")
    try:
        import datasets
    except ImportError:
        raise SettingError("task.hub=true needs the package datasets: pip install 'kvlab[evals]'") from None

    settle_hub()

    def read(split: str) -> list[Row | str]:
        try:
            rows = datasets.load_dataset(where.dataset, where.config, split=split)
        except (OSError, ValueError, ConnectionError) as error:
            reason = str(error).strip().split("\n")[0]
            raise SettingError(f"{where.dataset} can't be loaded from the hub ({reason}): set task.data_dir") from error
        place = Path(where.dataset) / split
        return [Row(place, number, {k: v for k, v in row.items() if v is not None}) for number, row in enumerate(rows, 1)]

    rows, train = read(where.split), read(where.train) if examples and where.train else None
    values = [row.values for part in (rows, train or []) for row in part if isinstance(row, Row)]
    return rows, train, text_hash(json.dumps(values, default=str, sort_keys=True))
