"""All cells of a sweep: checked before anything is loaded, run here or spread over workers, resumed, recorded.

A cell that is finished is skipped, one that was interrupted goes on at its next sample, one that fails is recorded and the
rest is run. `full` at several budgets is one cell.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from kvlab.bundles import bundled
from kvlab.cells import Cell
from kvlab.estimate import Estimate, estimate, together
from kvlab.evals import task_class, task_names
from kvlab.results import CellStore
from kvlab.settings import SettingError
from kvlab.spread import Spread, spread_of
from kvlab.tracking import make_tracker
from kvlab.units import run_unit, say
from kvlab.work import Work
from kvlab.workbench import Workbench


class CellsFailed(Exception):
    """Some cells of a sweep failed; all others were run."""


@dataclass(frozen=True)
class Options:
    """How to run a sweep.

    force: run finished cells again; dry_run: say what would be run; report: called with the sweep's cells at its end;
    modules: the user's own, which workers import too
    """

    force: bool = False
    dry_run: bool = False
    modules: tuple[str, ...] = ()
    report: Callable[[Sequence[Cell]], None] = lambda cells: None


@dataclass
class _Group:
    """Cells of one model. `left`: those to run, with the number of samples that are missing."""

    bench: Workbench
    left: list[tuple[Cell, int]]


def run_sweep(configs: Sequence[DictConfig], options: Options) -> list[float | None]:
    """Run every cell; the main metric of each config, in order. Raises CellsFailed at the end if any failed.

    Raises ValueError before anything is loaded where a cell can't be.
    """
    asked = [_cells(number, configs) for number in range(len(configs))]
    cells = [cell for group in asked for cell in group]
    spread = _spread_over(configs)
    distinct = list({cell.folder: cell for cell in cells}.values())
    if len(distinct) < len(cells):
        why = "full cache has no budget, and batch size and the like change no result"
        say(f"{len(cells)} combinations are {_count(distinct)}: {why}")
    groups = _groups(distinct, options.force)
    if options.dry_run:
        _show_plan(distinct, groups, spread.here)
        return [None] * len(configs)
    _check_places([cell for group in groups for cell, _ in group.left])
    if spread.here:
        failed, busy = _run_groups(distinct, groups, options.force)
    else:
        failed, busy = _run_elsewhere(spread, distinct, groups, options)
    options.report(distinct)
    if failed:
        raise CellsFailed(f"{len(failed)} of {_count(distinct)} failed; error.txt in its folder says where: {failed[0].folder}")
    if busy and spread.waits:
        raise CellsFailed(
            f"{len(busy)} of {_count(distinct)} are left to another process, or to the same command later: {busy[0].folder}"
        )
    return [_main_value(group[0]) for group in asked]


def _spread_over(configs: Sequence[DictConfig]) -> Spread:
    """Where the sweep's cells run, which is the same for all."""
    found = [plain(config).get("launcher") for config in configs]
    if any(settings != found[0] for settings in found):
        raise SettingError("launcher: a sweep has one; give its settings one value each")
    spread = spread_of(found[0])
    spread.check()
    return spread


def _check_places(cells: Sequence[Cell]) -> None:
    """Whether results can be written, and W&B reached as asked, before anything is loaded."""
    for folder in {cell.output_dir for cell in cells}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f".{os.getpid()}").touch()
            (folder / f".{os.getpid()}").unlink(missing_ok=True)
        except OSError as error:
            raise SettingError(f"output_dir={folder} can't be written ({error.strerror}): give another folder") from error
    for cell in cells:
        there = next(place for place in (cell.folder, *cell.folder.parents) if place.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise SettingError(f"{there} can't be written: let it be, or give another output_dir or name")
    for cell in {repr(cell.tracking): cell for cell in cells}.values():
        make_tracker(cell.tracking, cell.output_dir)


def _cells(number: int, configs: Sequence[DictConfig]) -> list[Cell]:
    """The cells of a config: one, or one for each of a benchmark's tasks."""
    try:
        return [Cell.of(config) for config in _spread(plain(configs[number]))]
    except ValueError as error:
        raise SettingError(f"{_which(number, len(configs))}{error}") from error


def _spread(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A config for each item of the setting that a task `spreads`."""
    task = config.get("task")
    name = task_class(task["name"]).spreads if isinstance(task, dict) and task.get("name") in task_names() else ""
    items = task.get(name) if name and isinstance(task, dict) else None
    if not isinstance(items, list) or len(items) < 2:
        return [config]
    return [{**config, "task": {**task, name: [item]}} for item in dict.fromkeys(items)]  # type: ignore[dict-item]


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed config as plain values, with nothing left to resolve."""
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise SettingError(f"the config can't be resolved: {str(error).splitlines()[0]}") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _which(number: int, total: int) -> str:
    return f"cell {number + 1} of {total}: " if total > 1 else ""


def _groups(cells: Sequence[Cell], force: bool) -> list[_Group]:
    """What is left to do, by model; each cell is checked on its model's outline."""
    groups: dict[str, _Group] = {}
    for number, cell in enumerate(cells):
        store = CellStore(cell.folder)
        if store.finished(cell.run_id) and not force:
            continue
        group = groups.setdefault(repr(cell.model), _Group(Workbench(cell.model), []))
        try:
            group.bench.check(cell)
        except ValueError as error:
            name = f"cell {number + 1} of {len(cells)} ({cell.label}): " if len(cells) > 1 else ""
            raise SettingError(f"{name}{error}") from error
        done = 0 if force else len(store.records())
        group.left.append((cell, max(0, len(group.bench.samples(cell)) - done)))
    for group in groups.values():
        group.left.sort(key=lambda left: not left[0].is_full)  # what others are compared with, and judged against, comes first
    return list(groups.values())


def _run_groups(cells: Sequence[Cell], groups: Sequence[_Group], force: bool) -> tuple[list[Cell], list[Cell]]:
    """Run what is left; the cells that failed, and those that another process runs."""
    left = sum(len(group.left) for group in groups)
    if skipped := len(cells) - left:
        say(f"{skipped} of {_count(cells)} finished before (--force runs them again)")
    failed: list[Cell] = []
    busy: list[Cell] = []
    with tqdm(total=sum(n for group in groups for _, n in group.left), unit="sample", disable=None, leave=False) as bar:
        number = 0
        for group in groups:
            say(f"model {group.bench.spec.name}: {_count(group.left)} to run")
            for unit in bundled([cell for cell, _ in group.left]):
                places = [f"[{number + place}/{left}]" for place in range(1, len(unit) + 1)]
                number += len(unit)
                bar.set_description(f"{places[0]} {unit[0].label}{f' and {len(unit) - 1} more' if len(unit) > 1 else ''}")
                outcomes = list(zip(unit, run_unit(unit, group.bench, force, bar.update, places), strict=True))
                failed += [cell for cell, outcome in outcomes if outcome == "failed"]
                busy += [cell for cell, outcome in outcomes if outcome == "busy"]
            group.bench.release()
    return failed, [cell for cell in busy if not CellStore(cell.folder).finished(cell.run_id)]


def _run_elsewhere(
    spread: Spread, cells: Sequence[Cell], groups: Sequence[_Group], options: Options
) -> tuple[list[Cell], list[Cell]]:
    """Have workers run what is left; the cells that failed, and those that are left."""
    left = [cell for group in groups for cell, _ in group.left]
    if len(left) < len(cells):
        say(f"{len(cells) - len(left)} of {_count(cells)} finished before (--force runs them again)")
    if not left:
        return [], []
    if options.force:
        for cell in left:
            with CellStore(cell.folder).locked():
                CellStore(cell.folder).set_aside()
    work = Work(tuple((cell.config, cell.artefacts) for cell in left), options.modules, time.time())
    say(f"{_count(left)} to run over {spread.where}")
    with _watched(left, sum(n for group in groups for _, n in group.left)):
        notice = spread.run(work, len(left), left[0].output_dir / ".jobs")
    if notice:
        say(notice)
    failed = [cell for cell in left if work.failed(cell)]
    return failed, [cell for cell in left if not work.settled(cell)]


@contextmanager
def _watched(cells: Sequence[Cell], total: int) -> Iterator[None]:
    """A bar of the samples that appear in the store, whoever writes them."""

    def count() -> int:
        return sum(CellStore(cell.folder).count() for cell in cells)

    def follow() -> None:
        while not over.wait(1.0):
            bar.update(count() - before - bar.n)

    before, over = count(), threading.Event()
    with tqdm(total=total, unit="sample", disable=None, leave=False) as bar:
        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _main_value(cell: Cell) -> float | None:
    result = CellStore(cell.folder).result() or {}
    return result.get("metrics", {}).get(result.get("main_metric"), {}).get("value")


def _show_plan(cells: Sequence[Cell], groups: Sequence[_Group], here: bool) -> None:
    """The cells of a sweep, what is left of each, and roughly what it takes. here: where cells share their prompts."""
    left = {cell.folder: (group.bench, n) for group in groups for cell, n in group.left}
    guesses: dict[Path, Estimate] = {}
    for cell in cells:
        if cell.folder not in left:
            print(f"finished  {cell.label}  {cell.folder}")
            continue
        bench, samples = left[cell.folder]
        guesses[cell.folder] = guess = estimate(cell, bench, samples)
        print(f"to run    {cell.label}  {samples} samples  {guess}  {cell.folder}")
    to_run = [[cell for cell, _ in group.left] for group in groups]
    units = [unit for some in to_run for unit in (bundled(some) if here else [[cell] for cell in some])]
    each = [together([guesses[cell.folder] for cell in unit]) for unit in units]
    total = Estimate(max((one.kv_bytes for one in each), default=0), sum(one.seconds for one in each))
    shared = ", prompts that cells share read once" if len(units) < len(left) else ""
    print(f"{_count(cells)}, {len(cells) - len(left)} finished; at most and in all {total}{shared} (rough; nothing was loaded)")


def _count(cells: Sequence[Any]) -> str:
    return "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
