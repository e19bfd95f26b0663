"""A paper's numbers joined with the cells that stand for them, and what that says. Reads results; runs and prints nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab.cells import Cell
from kvlab.launcher import plain
from kvlab.metrics import Z95, Difference, at_chance, compare_records
from kvlab.reproduce.measures import measured
from kvlab.reproduce.order import Order, order_of
from kvlab.reproduce.plan import Planned
from kvlab.reproduce.published import PaperTable, Published, Scale
from kvlab.tables import FEW, StoredCell, error_of, read_cells

Key = tuple[str, str, str]
"""The paper's model, task and method."""


@dataclass(frozen=True)
class Beside:
    """A number of the paper beside ours; what is not known is None.

    their_change  the number minus the full cache's
    value, stderr, n  ours, in the paper's unit; change: minus our full cache's, paired
    words         how far ours is from theirs
    """

    published: Published | None
    planned: Planned
    metric: str
    their_change: float | None
    value: float | None
    stderr: float | None
    n: int | None
    change: Difference | None
    words: str
    path: str


@dataclass(frozen=True)
class Reproduction:
    """A table of a paper at one scale: its numbers beside ours, and whether methods are in the same order."""

    table: PaperTable
    scale: Scale
    rows: Sequence[Beside]
    orders: Sequence[Order]
    warnings: list[str] = field(default_factory=list)


def join(table: PaperTable, scale: Scale, cells: Sequence[Planned]) -> Reproduction:
    """Ours beside theirs, from the results on disk of the planned cells. Raises SettingError for a metric that cells lack."""
    folders = {planned.key: Cell.of(plain(planned.config)).folder for planned in cells}
    stored = _stored(folders)
    theirs = {(row.model, row.task, row.method): row for row in table.used(scale)}
    warnings = [*table.doubts]
    rows: list[Beside] = []
    orders: list[Order] = []
    for model, task in dict.fromkeys((planned.model, planned.task) for planned in cells):
        group = [planned for planned in cells if (planned.model, planned.task) == (model, task)]
        mine = _Group({one.method: stored.get(one.key) for one in group}, scale, task, warnings)
        rows += [_beside(table, scale, one, theirs.get(one.key), mine) for one in group]
        chance = mine.doubts(table.full, task)
        values = {one.method: theirs[one.key].value for one in group if one.key in theirs}
        orders.append(order_of(model, task, values, table.better, table.tie, mine.means, mine.difference, chance))
    return Reproduction(table, scale, rows, orders, list(dict.fromkeys(warnings)))


def _stored(folders: Mapping[Key, Any]) -> dict[Key, StoredCell]:
    found = {key: folder for key, folder in folders.items() if (folder / "result.json").exists()}
    if not found:
        return {}
    by_path = {cell.path.resolve(): cell for cell in read_cells(list(dict.fromkeys(found.values())))[0]}
    return {key: by_path[folder.resolve()] for key, folder in found.items() if folder.resolve() in by_path}


class _Group:
    """Our cells of one model and task, by method."""

    def __init__(self, cells: Mapping[str, StoredCell | None], scale: Scale, task: str, warnings: list[str]) -> None:
        self.cells, self.warnings = cells, warnings
        self.times = scale.times.get(task, 1)
        self.ok = {method: cell for method, cell in cells.items() if cell is not None and cell.ok}
        first = next(iter(self.ok.values()), None)
        self.metric = scale.metrics.get(task) or (str(first.result["main_metric"]) if first else "")
        found = {method: measured(cell, self.metric, task, warnings) for method, cell in self.ok.items()}
        self.numbers = {method: number for method, (number, _) in found.items()}
        self.samples = {method: samples for method, (_, samples) in found.items()}
        self._found: dict[tuple[str, str], Difference | None] = {}

    def number(self, method: str) -> Mapping[str, Any]:
        """The metric, or nothing where the cell isn't there or failed."""
        return self.numbers.get(method, {})

    @property
    def means(self) -> dict[str, float]:
        """Values by method, so that higher is better."""
        sign = {method: -1.0 if self.number(method).get("better") == "lower" else 1.0 for method in self.ok}
        return {method: sign[method] * float(self.number(method)["value"]) for method in self.ok}

    def difference(self, method: str, base: str) -> Difference | None:
        """One method's metric minus another's over the samples both have, in the paper's unit."""
        if (method, base) not in self._found:
            self._found[method, base] = self._difference(method, base)
        return self._found[method, base]

    def _difference(self, method: str, base: str) -> Difference | None:
        if method not in self.ok or base not in self.ok:
            return None
        ours, others = self.samples[method], self.samples[base]
        ids = [key for key in others if key in ours]
        try:
            found = compare_records(self.number(method), [ours[key] for key in ids], [others[key] for key in ids])["delta"]
        except ValueError as error:
            self.warnings.append(f"{method} and {base} can't be compared: {error}")
            return None
        return found and _times(found, self.times)

    def doubts(self, full: str, task: str) -> bool:
        """Warn of a full cache that guesses, and of few samples; whether the measure itself is at chance."""
        cell, number = self.ok.get(full), self.number(full)
        if number and number["n"] < FEW:
            self.warnings.append(
                f"{number['n']} samples of {task}: intervals of fewer than {FEW} are too narrow to be believed"
            )
        if at_chance(number):
            self.warnings.append(f"full cache is at chance on {task}: neither differences nor order mean anything there")
            return True
        main = str(cell.result["main_metric"]) if cell else self.metric
        if cell and main != self.metric and at_chance(cell.metric(main)):
            self.warnings.append(f"full cache's {main} is at chance on {task}: only its {self.metric} can be read there")
        return False

    def missing(self, method: str) -> str:
        """Why there is no number."""
        cell = self.cells.get(method)
        return "not run yet" if cell is None else f"failed: {error_of(cell.facts)}"


def _times(found: Difference, factor: int | float) -> Difference:
    low, high = (None if end is None else end * factor for end in (found.low, found.high))
    return Difference(found.value * factor, low, high, found.n)


def _beside(table: PaperTable, scale: Scale, planned: Planned, theirs: Published | None, mine: _Group) -> Beside:
    method = planned.method
    number, cell = mine.number(method), mine.cells.get(method)
    their_value, full = (theirs.value, table.their_full(theirs)) if theirs else (None, None)
    row = Beside(
        published=theirs,
        planned=planned,
        metric=mine.metric,
        their_change=None if their_value is None or full is None or method == table.full else their_value - full,
        value=number["value"] * mine.times if number else None,
        stderr=number["stderr"] * mine.times if number.get("stderr") is not None else None,
        n=number.get("n"),
        change=mine.difference(method, table.full) if method != table.full else None,
        words="",
        path=str(cell.path) if cell else "",
    )
    base = mine.number(table.full).get("value", 0.0) * mine.times
    words = mine.missing(method) if row.value is None else _words(table, scale, row, full, base, number["better"])
    return dataclasses.replace(row, words=words)


def _words(table: PaperTable, scale: Scale, row: Beside, full: float | None, base: float, better: str) -> str:
    """How far ours is from theirs."""
    assert row.value is not None
    if row.published is None:
        return "not in the paper"
    if row.published.value is None:
        return "no published number"
    if scale.compares == "values":
        return _from_theirs(row.value - row.published.value, row.stderr, table.better)
    if row.planned.method == table.full:
        return "what the others are compared with"
    if row.their_change is None or row.change is None:
        return f"no full cache {'published' if row.their_change is None else 'here'} to compare with"
    theirs = _does(row.their_change, table.tie, table.better)
    if row.change.within_noise:
        return "keeps within noise, as published" if theirs == "keeps" else f"published: {theirs}; here: within noise"
    ours = _does(row.change.value, 0.0, better)
    if theirs != ours:
        return f"published: {theirs}; here: {ours}"
    if scale.compares == "order" or not (full and base):
        return f"{ours}, as published"
    ratio = abs(row.change.value / base) / abs(row.their_change / full)
    size = "more than published" if ratio > 2 else "less than published" if ratio < 0.5 else "about as much as published"
    return f"{ours} {size}"


def _from_theirs(off: float, stderr: float | None, better: str) -> str:
    if stderr is None:
        return f"{off:+.3g} from the published number, without an interval"
    if abs(off) <= Z95 * stderr:
        return f"{off:+.3g}: the published number is within our interval"
    return f"{off:+.3g}: {'better' if (off > 0) == (better == 'higher') else 'worse'} than published, outside our interval"


def _does(change: float, tie: float, better: str) -> str:
    if abs(change) <= tie:
        return "keeps"
    return "gains" if (change > 0) == (better == "higher") else "loses"
