"""`kvlab run`, `reproduce` and `lm_eval`: what loads models and evaluates them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.commands.arguments import Add, add_own

if TYPE_CHECKING:
    from kvlab.cells import Cell


RUN_EXAMPLES = """settings (KEY=VALUE; several values with commas make a sweep):
  model=smollm2-135m                       or model=path model.path=<folder, .gguf file or hub id>
  policy=h2o policy.heavy_share=0.5        `kvlab list policies`
  codec=kivi2 codec.kivi2.residual=32      `kvlab list codecs`; settings are below the codec's name
  share=kvsharer share.drop=0.25           `kvlab list shares`; first `kvlab calibrate kvsharer`
  budget.ratio=0.2                         or budget=tokens budget.tokens=128, budget=bytes budget.bytes=1000000, budget=none
  task=perplexity task.windows=16          or passkey, needle, ruler, prompts: `kvlab list tasks`
  protocol=prompt protocol.hold_back=16    or stream, chunked
  runtime.device=cuda runtime.dtype=bfloat16 runtime.batch_size=8
  logger=none                              no W&B
  launcher=processes launcher.jobs=4       cells side by side; or launcher=slurm
  name=my_sweep output_dir=outputs seed=0

examples:
  kvlab run task=perplexity task.file=my_text.txt policy=streaming_llm budget.ratio=0.3
  kvlab run task=prompts task.file=my_prompts.jsonl policy=full,snapkv
  kvlab run -m policy=full,streaming_llm,h2o budget.ratio=0.1,0.2,0.5 task=passkey 'task.lengths=[300,600]'
  kvlab run policy=my_policy --import my_policy.py
  kvlab run experiment=demo --dry-run
  kvlab run --cfg job task=passkey         the composed config
"""

REPRODUCE_EXAMPLES = """KEY=VALUE are settings of `kvlab run`, which replace the table's own. scale=cpu (default) takes minutes
with the embedded model; scale=paper has the paper's models and sizes, from the hub.

examples:
  kvlab reproduce --list                   tables, with what they cost in --format md
  kvlab reproduce kivi/axes                run what isn't finished, then ours beside theirs
  kvlab reproduce h2o/table2 scale=paper --dry-run
  kvlab reproduce h2o/table2 scale=paper runtime.device=cuda launcher=slurm launcher.gpus=1
  kvlab reproduce decoquant/table2 --format latex > decoquant.tex
  kvlab reproduce decoquant/table2 --save experiments/decoquant
"""

LM_EVAL_EXAMPLES = """--model_args are settings of `kvlab run`: model, policy, budget.ratio (or ratio), protocol ...
Everything else is lm-eval's own: `kvlab lm_eval run --help`, `kvlab lm_eval ls tasks`. As a sweep, with results that go on
where they stopped and are compared with the full cache: `kvlab run task=lm_eval`.

examples:
  kvlab lm_eval --model kvlab --model_args policy=h2o,ratio=0.2 --tasks piqa copa --limit 100
  kvlab lm_eval --model kvlab --model_args model=path,model.path=./my-model,policy=snapkv,ratio=0.5 --tasks gsm8k
  kvlab lm_eval --model kvlab --model_args policy=h2o,ratio=0.2,protocol=stream --tasks wikitext
"""


def register(add: Add) -> None:
    """Add them."""
    running = add("run", _run, "run a cell, or a sweep of cells", RUN_EXAMPLES)
    running.usage = "kvlab run [options] [KEY=VALUE ...]"  # these and Hydra's own options are passed on in their order
    running.add_argument("-m", "--multirun", action="store_true", help="sweep over comma-separated values (always on)")
    running.add_argument("--force", action="store_true", help="run finished cells again")
    running.add_argument("--dry-run", action="store_true", help="show the cells, estimated bytes and time; load nothing")
    running.add_argument("--no-table", action="store_true", help="don't print the comparison at the end")
    add_own(running)

    papers = add("reproduce", _reproduce, "run a paper's table, and print ours beside theirs", REPRODUCE_EXAMPLES)
    papers.usage = "kvlab reproduce [options] TABLE [KEY=VALUE ...]"
    papers.add_argument("table", nargs="?", metavar="TABLE", help="such as h2o/table2")
    papers.add_argument("--list", action="store_true", help="which tables there are")
    papers.add_argument("--dry-run", action="store_true", help="show the cells and their commands; load nothing")
    papers.add_argument("--force", action="store_true", help="run finished cells again")
    papers.add_argument("--save", metavar="DIR", type=Path, help="also write CSV, Markdown, LaTeX and a picture to this folder")
    papers.add_argument("--format", default="text", choices=["text", "md", "markdown", "csv", "latex"], help="(default: text)")

    harness = add("lm_eval", _lm_eval, "run lm-eval-harness with kvlab as a model", LM_EVAL_EXAMPLES)
    harness.usage = "kvlab lm_eval --model kvlab --model_args KEY=VALUE,... --tasks TASK ... [lm-eval's own options]"
    harness.add_argument("--data_dir", help="folder of data files that tasks are made from (default: KVLAB_DATA_DIR)")


def _run(options: argparse.Namespace) -> int:
    from kvlab.compose import run_hydra
    from kvlab.launcher import CellsFailed, Options, run_sweep
    from kvlab.policies import import_modules

    import_modules(options.modules)

    def report(cells: Sequence[Cell]) -> None:
        if not options.no_table:
            _report(cells)
        _upload(cells)

    chosen = Options(options.force, options.dry_run, tuple(options.modules), report)
    try:
        run_hydra(options.rest, lambda configs: run_sweep(configs, chosen), options.config_dir)
    except CellsFailed as failed:
        print(f"kvlab: {failed}", file=sys.stderr)
        return 1
    return 0


def _report(cells: Sequence[Cell]) -> None:
    """The comparison at the end of a sweep."""
    from kvlab.render import render
    from kvlab.tables import compare, stored_references

    if found := _results(cells):
        print(render(compare(found, stored_references()), "text"))


def _results(cells: Sequence[Cell]) -> list[Path]:
    """Folders with results of these cells, and of the full caches of earlier sweeps that they are compared with."""
    fulls = [path for cell in cells for path in cell.full_cache_results()]
    return list(dict.fromkeys([*fulls, *(cell.folder for cell in cells if (cell.folder / "result.json").exists())]))


def _upload(cells: Sequence[Cell]) -> None:
    """The dashboard's page to W&B, for each experiment that asks for it; what goes wrong there ends nothing."""
    from kvlab.dashboard.upload import upload_dashboard

    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        if cell.tracking.name == "wandb" and cell.tracking.figures:
            groups.setdefault((cell.name, str(cell.output_dir), repr(cell.tracking)), []).append(cell)
    for (name, folder, _), group in groups.items():
        if found := _results(group):
            try:
                print(upload_dashboard(found, Path(folder, name, "dashboard.html"), group[0].tracking, Path(folder)))
            except (ValueError, OSError) as error:
                print(f"kvlab: no figures went to W&B: {error}", file=sys.stderr)


def _reproduce(options: argparse.Namespace) -> int:
    from kvlab.launcher import CellsFailed, Options
    from kvlab.reproduce import list_tables, reproduce

    fmt = {"markdown": "md"}.get(options.format, options.format)
    if wrong := next((argument for argument in options.rest if argument.startswith("-")), None):
        raise ValueError(f"{wrong}: there is no such option; `kvlab reproduce --help` lists them, settings are KEY=VALUE")
    if options.list:
        if options.table or options.rest or options.save:
            raise ValueError("--list shows all tables: leave out the rest")
        print(list_tables(fmt))
        return 0
    if options.table is None:
        raise ValueError("which table? `kvlab reproduce --list` shows them")
    try:
        reproduce(options.table, options.rest, Options(options.force, options.dry_run), fmt, print, into=options.save)
    except CellsFailed as failed:
        print(f"kvlab: {failed}", file=sys.stderr)
        return 1
    return 0


def _lm_eval(options: argparse.Namespace) -> int:
    from kvlab.lm_eval_model import run_lm_eval

    run_lm_eval(options.rest, options.data_dir)
    return 0
