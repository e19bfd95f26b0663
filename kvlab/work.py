"""What each of several workers of a sweep does, in a process or a job of its own."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.cells import Cell
from kvlab.policies import import_modules
from kvlab.results import CellStore
from kvlab.units import run_unit
from kvlab.workbench import Workbench


@dataclass(frozen=True)
class Work:
    """What each of several workers does: walk over all cells, and run those that nobody runs.

    configs  of the cells, with the artefacts that were found: when a job starts, others may fit too
    modules  the user's own; since: when the sweep began, so that failures before it are tried again
    """

    configs: tuple[tuple[dict[str, Any], dict[str, str]], ...]
    modules: tuple[str, ...]
    since: float

    def __call__(self, number: int, of: int) -> None:
        """Worker `number` of so many; each begins elsewhere. Ends when nothing is left that nobody runs."""
        import_modules(self.modules)
        cells = [Cell.of(config, artefacts) for config, artefacts in self.configs]
        start = number * len(cells) // of
        order, benches = [*cells[start:], *cells[:start]], dict[str, Workbench]()
        while left := [cell for cell in order if not self.settled(cell)]:
            waiting = [cell for cell in left if self._waits(cell, cells)]
            ran = [self._ran(cell, benches, len(cells)) for cell in left if cell not in waiting and not self.settled(cell)]
            if not any(ran):
                if not waiting:
                    return
                time.sleep(1.0)

    def _ran(self, cell: Cell, benches: dict[str, Workbench], total: int) -> bool:
        """Run a cell; False if another worker does."""
        bench = benches.get(repr(cell.model))
        if bench is None:  # one model at a time
            for other in benches.values():
                other.release()
            benches.clear()
            bench = benches[repr(cell.model)] = Workbench(cell.model)
        bench.check(cell)
        return run_unit([cell], bench, False, lambda done: None, [f"[of {total}]"], quiet=True) != ["busy"]

    def _waits(self, cell: Cell, cells: Sequence[Cell]) -> bool:
        """Whether a cell is judged against a full cache's answers that aren't all there yet, but will be by this sweep."""
        if cell.is_full or not cell.task.needs_full:
            return False
        fulls = [other for other in cells if other.is_full and other.comparison_id == cell.comparison_id]
        return any(not self.settled(full) for full in fulls)

    def settled(self, cell: Cell) -> bool:
        """Whether a cell is finished, or failed in this sweep."""
        return CellStore(cell.folder).finished(cell.run_id) or self.failed(cell)

    def failed(self, cell: Cell) -> bool:
        """Whether a cell failed since the sweep began."""
        result = CellStore(cell.folder).result() or {}
        when = result.get("provenance", {}).get("started")
        if result.get("status") != "failed" or when is None:
            return False
        return datetime.datetime.fromisoformat(when).timestamp() >= int(self.since)
