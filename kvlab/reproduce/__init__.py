"""Papers' tables beside ours: which there are, the cells that stand for their numbers, and how both are printed.

A table is described in `experiments/<paper>/<table>.yaml` (docs/reproduce.md). Cells are run by the launcher like any others:
they are resumed, and results of the same cells from other sweeps count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvlab.launcher import CellsFailed, Options, run_sweep
from kvlab.paths import experiments_dir
from kvlab.reproduce.join import join
from kvlab.reproduce.outlook import planned_lines
from kvlab.reproduce.plan import Planned, distinct, plan
from kvlab.reproduce.published import PaperTable, find_table, read_table, table_names
from kvlab.reproduce.report import index, render_reproduction

__all__ = ["PaperTable", "Planned", "find_table", "index", "join", "list_tables", "plan", "read_table", "reproduce"]


def list_tables(fmt: str = "text", folder: Path | None = None) -> str:
    """All tables with what they cost: "text" (one name a line), "md", "csv" or "latex"."""
    folder = folder or experiments_dir()
    return index([read_table(folder, name) for name in table_names(folder)], fmt)


def reproduce(
    name: str, overrides: Sequence[str], options: Options, fmt: str, show: Callable[[str], None], folder: Path | None = None
) -> None:
    """Run a table's cells and show ours beside theirs; with `options.dry_run` the plan alone.

    overrides  `scale=cpu` (default) or `scale=paper`, and settings of `kvlab run` that replace the table's
    Raises ValueError, in one line, for what can't be; CellsFailed after the table is shown where cells failed.
    """
    table = find_table(name, folder or experiments_dir())
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
        show(render_reproduction(join(table, scale, cells), fmt))
    if failed is not None:
        raise failed
