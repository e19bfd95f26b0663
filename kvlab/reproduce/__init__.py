"""Papers' tables beside ours: which there are, the cells that stand for their numbers, and how both are printed.

A table is described in `experiments/<paper>/<table>.yaml` (docs/reproduce.md). Cells are run by the launcher like any others:
they are resumed, and results of the same cells from other sweeps count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvlab.analyze.report import NO_PICTURES, can_draw
from kvlab.launcher import CellsFailed, Options, run_sweep
from kvlab.paths import experiments_dir
from kvlab.reproduce.join import Reproduction, join
from kvlab.reproduce.outlook import planned_lines
from kvlab.reproduce.plan import Planned, distinct, plan
from kvlab.reproduce.published import PaperTable, find_table, read_table, table_names
from kvlab.reproduce.report import index, render_reproduction
from kvlab.reproduce.save import check_place, kept_result, save
from kvlab.settings import SettingError

__all__ = ["PaperTable", "Planned", "find_table", "index", "join", "list_tables", "plan", "read_table", "reproduce"]


def list_tables(fmt: str = "text", folder: Path | None = None) -> str:
    """All tables with what they cost and what came out: "text" (one name a line), "md", "csv" or "latex"."""
    folder = folder or experiments_dir()
    names = table_names(folder)
    kept = {name: text for name in names if (text := kept_result(folder, name, link=fmt == "md"))}
    return index([read_table(folder, name) for name in names], fmt, kept)


def reproduce(
    name: str,
    overrides: Sequence[str],
    options: Options,
    fmt: str,
    show: Callable[[str], None],
    folder: Path | None = None,
    into: Path | None = None,
) -> None:
    """Run a table's cells and show ours beside theirs; with `options.dry_run` the plan alone.

    overrides  `scale=cpu` (default) or `scale=paper`, and settings of `kvlab run` that replace the table's
    into       a folder to write the table and its picture to as well (`kvlab.reproduce.save`)
    Raises ValueError, in one line, for what can't be; CellsFailed after the table is shown where cells failed.
    """
    table = find_table(name, folder or experiments_dir())
    if into is not None:
        if options.dry_run:
            raise SettingError("--save has nothing to write with --dry-run: leave one out")
        check_place(into)
    scales = [item.removeprefix("scale=") for item in overrides if item.startswith("scale=")]
    scale = table.scale(scales[-1] if scales else "cpu")
    cells = plan(table, scale, [item for item in overrides if not item.startswith("scale=")])
    if options.dry_run:
        show("\n".join(planned_lines(table, scale, cells)))
        if scale.name == "paper":  # whose models and data are on the hub
            return
    failed: CellsFailed | None = None
    try:
        run_sweep(distinct(cells), options)
    except CellsFailed as error:
        failed = error
    if not options.dry_run:
        found = join(table, scale, cells)
        show(render_reproduction(found, fmt))
        if into is not None:
            _save(found, into)
    if failed is not None:
        raise failed


def _save(found: Reproduction, folder: Path) -> None:
    print(f"files: {', '.join(map(str, save(found, folder)))}", file=sys.stderr)
    if not can_draw():
        print(NO_PICTURES, file=sys.stderr)
