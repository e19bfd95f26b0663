"""`kvlab table`, `dashboard` and `score`: results as tables and pages, without a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlab.commands.arguments import Add, add_settings, check_what, port, say, settings_of

TABLE_EXAMPLES = """examples:
  kvlab table                              everything in outputs/
  kvlab table 'outputs/runs/*/passkey' --format markdown
  kvlab table outputs/runs --by depth      accuracy at each depth
  kvlab table outputs/runs --base h2o      differences to h2o instead of the full cache
"""

DASHBOARD_EXAMPLES = """examples:
  kvlab dashboard                          everything in outputs/, to dashboard.html
  kvlab dashboard outputs/demo 'outputs/runs/*/passkey' --output demo.html
  kvlab dashboard --serve                  at http://127.0.0.1:8765/, with new results as they come and all samples
  kvlab dashboard --serve --port 0 --open no
  kvlab dashboard outputs/demo --wandb     also to W&B, into the group of its cells
"""

SCORE_EXAMPLES = """examples:
  kvlab score longbench pred/my-model                    LongBench's own prediction files, also MiniLongBench's
  kvlab score longbench pred_e/my-model -o by=length     by LongBench-E's lengths
  kvlab score alpaca annotations.json                    win rates, also length-controlled
  kvlab score helm outputs/runs                          scenarios against policies, with mean win rates
"""


def register(add: Add) -> None:
    """Add them."""
    table = add("table", _table, "compare results: quality, difference to the full cache, memory, speed", TABLE_EXAMPLES)
    table.add_argument("where", nargs="*", default=["outputs"], help="folders or globs with results (default: outputs)")
    table.add_argument("--format", default="text", choices=["text", "md", "markdown", "csv", "latex"], help="(default: text)")
    table.add_argument("--by", metavar="FIELD[,FIELD]", help="break the main metric down, such as depth or depth,length")
    table.add_argument("--base", metavar="POLICY", help="compare with this policy's cells instead of the full cache's")

    board = add("dashboard", _dashboard, "show results in a browser: one HTML page that needs no network", DASHBOARD_EXAMPLES)
    board.add_argument("where", nargs="*", default=["outputs"], help="folders or globs with results (default: outputs)")
    board.add_argument("--output", metavar="FILE", help="what to write (default: dashboard.html)")
    board.add_argument("--serve", action="store_true", help="serve it on this machine, with new results as they come")
    board.add_argument("--port", type=port, help="to serve at; 0: any that is free (default: 8765)")
    board.add_argument("--wandb", action="store_true", help="upload it to W&B, where the cells are")
    board.add_argument("--open", choices=["yes", "no"], help="open it in a browser (default: yes with --serve, else no)")

    scoring = add("score", _score, "score a benchmark's own output files, without a model", SCORE_EXAMPLES)
    scoring.add_argument("what", metavar="WHAT", help="longbench, alpaca, helm")
    scoring.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders with them")
    add_settings(scoring, "the benchmark's")


def _table(options: argparse.Namespace) -> int:
    from kvlab.breakdown import breakdown
    from kvlab.render import render
    from kvlab.tables import compare, stored_references

    if options.by and options.base:
        raise ValueError("--base compares and --by breaks down: give one of them")
    items = (
        breakdown(options.where, options.by.split(","))
        if options.by
        else compare(options.where, stored_references(), options.base)
    )
    print(render(items, {"markdown": "md"}.get(options.format, options.format)))
    return 0


def _dashboard(options: argparse.Namespace) -> int:
    from kvlab.dashboard import open_page, serve, write_dashboard

    if options.serve:
        if options.output or options.wandb:
            raise ValueError("--serve writes no file: leave out --output and --wandb, or --serve")
        serve(options.where, 8765 if options.port is None else options.port, say, options.open != "no")
        return 0
    if options.port is not None:
        raise ValueError("--port goes with --serve: give both or neither")
    output = Path(options.output or "dashboard.html").expanduser()
    if options.wandb:
        from kvlab.dashboard.upload import upload_dashboard

        print(upload_dashboard(options.where, output))
    else:
        print(write_dashboard(options.where, output))
    if options.open == "yes":
        open_page(output.absolute().as_uri())
    return 0


def _score(options: argparse.Namespace) -> int:
    from kvlab.score import SCORES

    check_what("benchmark", [options.what], SCORES)
    print(SCORES[options.what](options.paths, settings_of(options)))
    return 0
