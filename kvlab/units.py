"""What a sweep runs at once, one cell or several that share a forward pass: locks, trackers, and a line on each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from tqdm import tqdm

from kvlab.cells import Cell
from kvlab.lockstep import run_together
from kvlab.results import CellBusy, CellStore
from kvlab.runner import CellRun
from kvlab.tracking import make_tracker
from kvlab.workbench import Workbench

Outcome = Literal["ok", "failed", "busy"]
"""How a cell went; `busy`: another process runs it."""


def run_unit(
    unit: Sequence[Cell],
    bench: Workbench,
    force: bool,
    progress: Callable[[int], Any],
    places: Sequence[str],
    quiet: bool = False,
) -> list[Outcome]:
    """Run cells under their locks, together where they are several; how each went.

    force: also what is finished; places: of each among all cells; quiet: don't mention those that another process runs
    """
    outcomes: list[Outcome] = []
    runs: dict[int, CellRun] = {}
    if unit[0].runtime.threads:
        torch.set_num_threads(unit[0].runtime.threads)
    with ExitStack() as locks:
        for number, cell in enumerate(unit):
            try:
                locks.enter_context(CellStore(cell.folder).locked())
            except CellBusy as error:
                outcomes.append("busy")
                if not quiet:
                    say(f"{places[number]} {cell.label}: {error}; left to it")
                continue
            outcomes.append("ok")
            if _to_run(cell, force):
                runs[number] = _new_run(cell, bench, progress)
        if len(runs) > 1:
            say(f"{', '.join(places[number] for number in runs)} read the same prompts, together")
        start = time.perf_counter()
        run_together(list(runs.values()))
    took = f"{time.perf_counter() - start:.0f} s" + (f" together with {len(runs) - 1}" if len(runs) > 1 else "")
    for number, run in runs.items():
        outcomes[number] = _outcome(run, places[number], took)
    return outcomes


def _to_run(cell: Cell, force: bool) -> bool:
    """Whether a cell isn't finished, by another process since this sweep began; what there is is set aside by force."""
    store = CellStore(cell.folder)
    if force:
        store.set_aside()
    return not store.finished(cell.run_id)


def _new_run(cell: Cell, bench: Workbench, progress: Callable[[int], Any]) -> CellRun:
    tracker = make_tracker(cell.tracking, cell.output_dir)
    _say_once(tracker.notice)
    return CellRun(cell, bench, tracker, progress)


def _outcome(run: CellRun, place: str, took: str) -> Outcome:
    """Say how a run went, and how long it took."""
    cell, result = run.cell, run.result
    assert result is not None
    if result["status"] != "ok":
        say(f"{place} {cell.label}: FAILED after {took}: {result['error']}")
        return "failed"
    say(f"{place} {cell.label}: {_headline(result)} ({took})")
    if (size := result["speed"]["batch_size"]) < cell.runtime.batch_size:
        say(f"{place} {cell.label}: memory was enough for batches of {size}: set runtime.batch_size={size}")
    if left_out := run.bench.left_out(cell):
        _say_once(f"{_rows(len(left_out))} of task {cell.task.label} left out (task.bad_rows=stop ends there): {left_out[0]}")
    return "ok"


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number} rows"


def _headline(result: Mapping[str, Any]) -> str:
    metric = result["metrics"][result["main_metric"]]
    error = "" if metric["stderr"] is None else f" ± {metric['stderr']:.3g}"
    return f"{result['main_metric']} {metric['value']:.4g}{error}, kept {result['memory']['kept_fraction']:.0%}"


def say(text: str) -> None:
    """A line on stderr that leaves the progress bar whole."""
    tqdm.write(text, file=sys.stderr)


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text and text not in _said:
        _said.add(text)
        say(text)
