"""The command line: `kvlab run`, `table`, `dashboard`, `score`, `list`, `bench`, `analyze` and others. Prints, no more."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlab.cells import Cell
    from kvlab.policies import Policy

EXAMPLES = """examples:
  kvlab run policy=h2o budget.ratio=0.2 task=passkey         one cell
  kvlab run -m policy=full,h2o budget.ratio=0.1,0.2          a sweep, with the comparison at its end
  kvlab table outputs/runs --format latex                    the same table again
  kvlab dashboard                                            the same as one HTML page, with samples
  kvlab reproduce h2o/table2                                 a paper's table, ours beside theirs
  kvlab list policies                                        what there is
  kvlab score longbench pred/my-model                        a benchmark's own output files
  kvlab lm_eval --model kvlab --model_args policy=h2o,ratio=0.2 --tasks piqa    lm-eval-harness drives kvlab
  kvlab bench decode                                         speed against transformers' own cache
  kvlab analyze heads                                        what a model's attention looks like
  kvlab calibrate qaq                                        what a method must know of a model
  kvlab doctor                                               what this machine can run, and why not
"""

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

TABLE_EXAMPLES = """examples:
  kvlab table                              everything in outputs/
  kvlab table 'outputs/runs/*/passkey' --format markdown
  kvlab table outputs/runs --by depth      accuracy at each depth
  kvlab table outputs/runs --base h2o      differences to h2o instead of the full cache
"""

REPRODUCE_EXAMPLES = """KEY=VALUE are settings of `kvlab run`, which replace the table's own. scale=cpu (default) takes minutes
with the embedded model; scale=paper has the paper's models and sizes, from the hub.

examples:
  kvlab reproduce --list                   tables, with what they cost in --format md
  kvlab reproduce kivi/axes                run what isn't finished, then ours beside theirs
  kvlab reproduce h2o/table2 scale=paper --dry-run
  kvlab reproduce h2o/table2 scale=paper runtime.batch_size=4 launcher=slurm launcher.gpus=1
  kvlab reproduce decoquant/table2 --format latex > decoquant.tex
  kvlab reproduce decoquant/table2 --save experiments/decoquant
"""

DASHBOARD_EXAMPLES = """examples:
  kvlab dashboard                          everything in outputs/, to dashboard.html
  kvlab dashboard outputs/demo 'outputs/runs/*/passkey' --output demo.html
  kvlab dashboard --serve                  at http://127.0.0.1:8765/, with new results as they come and all samples
  kvlab dashboard --serve --port 0 --open no
"""

BENCH_EXAMPLES = """examples:
  kvlab bench decode prefill               time of a decode step, and of reading a prompt
  kvlab bench                              all of them: some twenty minutes on two cores
  kvlab bench decode --lengths 1024 --batch 16 --ratio 0.1
  kvlab bench loglik --json > loglik.json
  kvlab bench decode --model path/to/model --device cuda --dtype bfloat16
"""

ANALYZE_EXAMPLES = """examples:
  kvlab analyze                            all of them, on prose that comes with Python
  kvlab analyze sparsity persistence --tokens 2048 --texts 4
  kvlab analyze heads --file my_text.txt --threshold 0.99
  kvlab analyze hash --json > hash.json
  kvlab analyze --model path/to/model --device cuda --dtype bfloat16 --output outputs/mine
"""

CALIBRATE_EXAMPLES = """examples:
  kvlab calibrate qaq                      q_norm of the default model, on prose that comes with Python
  kvlab calibrate qaq --model path/to/model --file my_text.txt --tokens 4096
  kvlab calibrate qaq --model llama-2-7b --device cuda --dtype bfloat16 --texts 8
  kvlab calibrate kvsharer                 which layers may share a cache: 30 texts of 64 tokens
  kvlab calibrate kvsharer -o order=similar -o threshold=0.6
  kvlab calibrate eigen                    bases of keys and values: 8 texts of 512 tokens
  kvlab calibrate eigen --file my_text.txt --texts 128 --tokens 2048 -o basis=kq
  kvlab list artefacts                     what was measured before, and how to use it
"""


SCORE_EXAMPLES = """examples:
  kvlab score longbench pred/my-model                    LongBench's own prediction files, also MiniLongBench's
  kvlab score longbench pred_e/my-model -o by=length     by LongBench-E's lengths
  kvlab score alpaca annotations.json                    win rates, also length-controlled
  kvlab score helm outputs/runs                          scenarios against policies, with mean win rates
"""

LM_EVAL_EXAMPLES = """--model_args are settings of `kvlab run`: model, policy, budget.ratio (or ratio), protocol ...
Everything else is lm-eval's own: `kvlab lm_eval run --help`, `kvlab lm_eval ls tasks`. As a sweep, with results that go on
where they stopped and are compared with the full cache: `kvlab run task=lm_eval`.

examples:
  kvlab lm_eval --model kvlab --model_args policy=h2o,ratio=0.2 --tasks piqa copa --limit 100
  kvlab lm_eval --model kvlab --model_args model=path,model.path=./my-model,policy=snapkv,ratio=0.5 --tasks gsm8k
  kvlab lm_eval --model kvlab --model_args policy=h2o,ratio=0.2,protocol=stream --tasks wikitext
"""


LISTS = ("policies", "codecs", "shares", "compositions", "models", "tasks", "experiments", "artefacts")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 where something failed, 2 for a command that can't be."""
    if "OMP_WAIT_POLICY" not in os.environ:  # before torch loads OpenMP: its threads must soon leave cores to the kernels
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    options, rest = _parser().parse_known_args(arguments)
    if rest and not options.takes_rest:
        way = f" (settings: -o {rest[0]})" if hasattr(options, "settings") and re.match(r"\w+=", rest[0]) else ""
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}{way}")
    options.rest = rest
    try:
        return options.run(options)
    except ValueError as error:  # a user's mistake: one line that says what to change
        if "KVLAB_DEBUG" in os.environ:
            raise
        print(f"kvlab: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `kvlab table | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that can't be read
        if "KVLAB_DEBUG" in os.environ:
            raise
        print(f"kvlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        same = "the same command without --force" if getattr(options, "force", False) else "the same command"
        print(f"kvlab: interrupted; nothing finished is lost, {same} goes on from here", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlab",
        description="Study what KV-cache eviction and compression do to language models.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, epilog: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=epilog,
            formatter_class=parser.formatter_class,
            allow_abbrev=False,
        )
        command.set_defaults(run=run, parser=command, takes_rest=name in ("run", "lm_eval", "reproduce"))
        return command

    running = add("run", _run, "run a cell, or a sweep of cells", RUN_EXAMPLES)
    running.usage = "kvlab run [options] [KEY=VALUE ...]"  # these and Hydra's own options are passed on in their order
    running.add_argument("-m", "--multirun", action="store_true", help="sweep over comma-separated values (always on)")
    running.add_argument("--force", action="store_true", help="run finished cells again")
    running.add_argument("--dry-run", action="store_true", help="show the cells, estimated bytes and time; load nothing")
    running.add_argument("--no-table", action="store_true", help="don't print the comparison at the end")
    _add_own(running)

    table = add("table", _table, "compare results: quality, difference to the full cache, memory, speed", TABLE_EXAMPLES)
    table.add_argument("where", nargs="*", default=["outputs"], help="folders or globs with results (default: outputs)")
    table.add_argument("--format", default="text", choices=["text", "md", "markdown", "csv", "latex"], help="(default: text)")
    table.add_argument("--by", metavar="FIELD[,FIELD]", help="break the main metric down, such as depth or depth,length")

    table.add_argument("--base", metavar="POLICY", help="compare with this policy's cells instead of the full cache's")

    papers = add("reproduce", _reproduce, "run a paper's table, and print ours beside theirs", REPRODUCE_EXAMPLES)
    papers.usage = "kvlab reproduce [options] TABLE [KEY=VALUE ...]"
    papers.add_argument("table", nargs="?", metavar="TABLE", help="such as h2o/table2")
    papers.add_argument("--list", action="store_true", help="which tables there are")
    papers.add_argument("--dry-run", action="store_true", help="show the cells and their commands; load nothing")
    papers.add_argument("--force", action="store_true", help="run finished cells again")
    papers.add_argument("--save", metavar="DIR", type=Path, help="also write CSV, Markdown, LaTeX and a picture to this folder")
    papers.add_argument("--format", default="text", choices=["text", "md", "markdown", "csv", "latex"], help="(default: text)")

    board = add("dashboard", _dashboard, "show results in a browser: one HTML page that needs no network", DASHBOARD_EXAMPLES)
    board.add_argument("where", nargs="*", default=["outputs"], help="folders or globs with results (default: outputs)")
    board.add_argument("--output", metavar="FILE", help="what to write (default: dashboard.html)")
    board.add_argument("--serve", action="store_true", help="serve it on this machine, with new results as they come")
    board.add_argument("--port", type=_port, help="to serve at; 0: any that is free (default: 8765)")
    board.add_argument("--open", choices=["yes", "no"], help="open it in a browser (default: yes with --serve, else no)")

    scoring = add("score", _score, "score a benchmark's own output files, without a model", SCORE_EXAMPLES)
    scoring.add_argument("what", metavar="WHAT", help="longbench, alpaca, helm")
    scoring.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders with them")
    _add_settings(scoring, "the benchmark's")

    listing = add("list", _list, "list what there is, one name a line")
    listing.add_argument("what", choices=LISTS)
    listing.add_argument("--markdown", action="store_true", help="print a Markdown table, as in the README")
    _add_own(listing)

    bench = add("bench", _bench, "measure what caches and kernels cost and save, against transformers' own", BENCH_EXAMPLES)
    bench.add_argument("what", nargs="*", metavar="WHAT", help="decode, prefill, loglik, choices, codecs, memory, sweep")
    _add_model(bench)
    bench.add_argument("--lengths", type=_lengths, default=(2048, 4096), help="prompt lengths (default: 2048,4096)")
    bench.add_argument("--batch", type=_positive, default=8, help="sequences that are decoded together (default: 8)")
    bench.add_argument("--ratio", type=_share, default=0.2, help="the budget's part of the prompt (default: 0.2)")
    bench.add_argument(
        "--repeats", type=_positive, default=5, help="of each measurement, for its median (default: 5; sweep: a fifth)"
    )
    bench.add_argument("--threads", type=_positive, help="of torch and of the kernels on the CPU (default: all cores)")
    bench.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    _add_analyze(add("analyze", _analyze, "show what a model's attention looks like: tables and pictures", ANALYZE_EXAMPLES))

    calibrate = add("calibrate", _calibrate, "measure what codecs and sharing must know of a model", CALIBRATE_EXAMPLES)
    calibrate.add_argument("what", metavar="WHAT", help="qaq, kvsharer, eigen")
    _add_model(calibrate)
    _add_text(calibrate, by_default=False)
    _add_settings(calibrate, "the measurement's")

    harness = add("lm_eval", _lm_eval, "run lm-eval-harness with kvlab as a model", LM_EVAL_EXAMPLES)
    harness.usage = "kvlab lm_eval --model kvlab --model_args KEY=VALUE,... --tasks TASK ... [lm-eval's own options]"
    harness.add_argument("--data_dir", help="folder of data files that tasks are made from (default: KVLAB_DATA_DIR)")

    add("doctor", _doctor, "say what this machine can run, and why not")
    return parser


def _add_analyze(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what", nargs="*", metavar="WHAT", help="sparsity, heavy_hitters, persistence, heads, hash (default: all)"
    )
    _add_model(command)
    _add_text(command)
    command.add_argument("--output", metavar="DIR", default="outputs/analyze", help="for files (default: outputs/analyze)")
    command.add_argument(
        "--threshold", type=_share, default=0.95, help="heads: attention that a head's set must hold (default: 0.95)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _add_text(command: argparse.ArgumentParser, *, by_default: bool = True) -> None:
    tokens, texts = (1024, 1) if by_default else (None, None)
    said = ("1024", "1") if by_default else ("as the method says", "as the method says")
    command.add_argument("--file", help="a text, or a table with a column `text` (default: prose that comes with Python)")
    command.add_argument("--tokens", type=_positive, default=tokens, help=f"of each text (default: {said[0]})")
    command.add_argument(
        "--texts", type=_positive, default=texts, help=f"pieces that are cut from the text (default: {said[1]})"
    )


def _add_settings(command: argparse.ArgumentParser, whose: str) -> None:
    command.add_argument("-o", dest="settings", action="append", default=[], metavar="NAME=VALUE", help=f"an option of {whose}")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", default="smollm2-135m", help="a configured name, a folder or a hub id (default: smollm2-135m)"
    )
    command.add_argument("--device", help="cpu, cuda (default: as the model says)")
    command.add_argument("--dtype", help="float32, bfloat16, float16 (default: as the model says)")


def _add_own(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config-dir", metavar="DIR", help="your own config files: DIR/model/x.yaml is model=x")
    command.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import your policies and tasks (.py file)",
    )


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from kvlab import __version__

        print(f"kvlab {__version__}")
        parser.exit()


def _run(options: argparse.Namespace) -> int:
    from kvlab.compose import run_hydra
    from kvlab.launcher import CellsFailed, Options, run_sweep
    from kvlab.policies import import_modules

    import_modules(options.modules)
    chosen = Options(options.force, options.dry_run, tuple(options.modules))
    if not options.no_table:
        chosen = replace(chosen, report=_report)
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

    fulls = [path for cell in cells for path in cell.full_cache_results()]  # also those of earlier sweeps
    found = list(dict.fromkeys([*fulls, *(cell.folder for cell in cells if (cell.folder / "result.json").exists())]))
    if found:
        print(render(compare(found, stored_references()), "text"))


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


def _dashboard(options: argparse.Namespace) -> int:
    from kvlab.dashboard import open_page, serve, write_dashboard

    if options.serve:
        if options.output:
            raise ValueError("--serve writes no file: leave out --output, or --serve")
        serve(options.where, 8765 if options.port is None else options.port, _say, options.open != "no")
        return 0
    if options.port is not None:
        raise ValueError("--port goes with --serve: give both or neither")
    output = Path(options.output or "dashboard.html").expanduser()
    print(write_dashboard(options.where, output))
    if options.open == "yes":
        open_page(output.absolute().as_uri())
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _score(options: argparse.Namespace) -> int:
    from kvlab.score import SCORES

    _check_what("benchmark", [options.what], SCORES)
    print(SCORES[options.what](options.paths, _settings(options)))
    return 0


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """What `-o` gives. Raises ValueError where one isn't NAME=VALUE."""
    if wrong := next((setting for setting in options.settings if "=" not in setting), None):
        raise ValueError(f"-o {wrong}: use NAME=VALUE")
    return dict(setting.split("=", 1) for setting in options.settings)


def _list(options: argparse.Namespace) -> int:
    from kvlab.policies import import_modules

    import_modules(options.modules)
    if options.what == "policies" and options.markdown:
        from kvlab.policies import policy_class, policy_names

        print(policy_table([policy_class(name) for name in policy_names()]))
        return 0
    if options.what == "compositions":
        from kvlab.compositions import tables

        print(tables())
        return 0
    rows = _artefacts() if options.what == "artefacts" else _described(options.what, options.config_dir)
    if rows:
        print(_markdown([options.what, "what it is"], rows) if options.markdown else _columns(rows))
    return 0


def _described(what: str, own: str | None) -> list[tuple[str, str]]:
    """Choices of a config group with a line on each: a docstring's, a model's description, or a file's first comment."""
    from kvlab.choices import REGISTERED, choices

    group = {"policies": "policy"}.get(what, what.removesuffix("s"))
    found = choices(group, own)
    return [(name, summary(REGISTERED[group][1](name)) if path is None else _about(path)) for name, path in found.items()]


def _artefacts() -> list[tuple[str, str]]:
    """What calibrations have left, the newest first; then files that are damaged."""
    from kvlab.artefacts import artefacts, damaged

    found = [
        (one.key, f"{one.kind} of {one.about['model']}, {one.made[:10]}, {one.origin}; use: {one.use}") for one in artefacts()
    ]
    return [*found, *((path.stem, f"damaged: {fault}; delete {path}") for path, fault in damaged().items())]


def _about(path: Path) -> str:
    text = path.read_text()
    described = re.search(r"^description: (.*)$", text, re.M)
    comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#") and "@package" not in line]
    return described[1] if described else comments[0] if comments else ""


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number of at least 1")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number from 0 to 65535")
    return int(text)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _share(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number above 0, at most 1")
    return ratio


def _bench(options: argparse.Namespace) -> int:
    import torch

    from kvlab.bench import BENCHES, load, run_benches

    _check_what("bench", options.what, BENCHES)
    if options.threads:
        torch.set_num_threads(options.threads)
    names = ("lengths", "batch", "ratio", "repeats")
    setup = load(options.model, options.device, options.dtype, **{name: getattr(options, name) for name in names})
    run_benches(options.what or list(BENCHES), setup, options.json, print)
    return 0


def _analyze(options: argparse.Namespace) -> int:
    from kvlab.analyze import ANALYSES, check_writable, load, run_analyses

    _check_what("analysis", options.what, ANALYSES)
    folder = Path(options.output).expanduser()
    check_writable(folder)
    given = {name: getattr(options, name) for name in ("file", "tokens", "texts")}
    setup = load(options.model, options.device, options.dtype, **given)
    run_analyses(options.what or list(ANALYSES), setup, options.threshold, folder, options.json, print)
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    import yaml  # type: ignore[import-untyped]

    from kvlab.analyze import load
    from kvlab.calibrate import CALIBRATIONS, make_calibration, run_calibration

    _check_what("calibration", [options.what], CALIBRATIONS)
    try:
        settings = {name: yaml.safe_load(value) for name, value in _settings(options).items()}
    except yaml.YAMLError as error:
        raise ValueError(f"-o {' -o '.join(options.settings)}: a value isn't YAML; quote it, or use a plain word") from error
    calibration = make_calibration(options.what, settings)
    tokens, texts = options.tokens or calibration.tokens, options.texts or calibration.texts
    setup = load(options.model, options.device, options.dtype, file=options.file, tokens=tokens, texts=texts, held_out=True)
    run_calibration(options.what, calibration, setup, print)
    return 0


def _check_what(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a name that isn't known."""
    from kvlab.hints import did_you_mean

    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"{kind} {name}: there is no such {kind}{hint}; there are {', '.join(known)}")


def _lm_eval(options: argparse.Namespace) -> int:
    from kvlab.lm_eval_model import run_lm_eval

    run_lm_eval(options.rest, options.data_dir)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from kvlab.doctor import checks

    found = checks()
    width = max(len(check.name) for check in found)
    for check in found:
        print(f"{check.mark:<4}  {check.name:<{width}}  {check.text}")
    return int(any(check.failed for check in found))


def policy_table(classes: Sequence[type[Policy]]) -> str:
    """Markdown table of policies, from what they declare."""
    rows = []
    for cls in classes:
        decides = "never" if not cls.evicts else "each step" if cls.when == "every_step" else "prompt end"
        scope = "layer" if cls.coupling == "layer" else "head, ragged" if cls.ragged else "head"
        needs = ", ".join(sorted(cls.needs)) or "nothing"
        question = "yes" if cls.query_aware else "no"
        rows.append((f"`{cls.name}`", summary(cls), decides, scope, needs, question, _source(cls)))
    head = ["policy", "what it keeps", "decides", "per", "needs", "last query steers it", "source"]
    return _markdown(head, rows)


def summary(cls: type) -> str:
    """First line of a class's docstring."""
    return (cls.__doc__ or "").strip().split("\n")[0]


def _source(cls: type) -> str:
    """Link to the paper that the policy's module names, if any."""
    found = re.search(r"arXiv (\d{4}\.\d{5})", sys.modules[cls.__module__].__doc__ or "")
    return f"[{found[1]}](https://arxiv.org/abs/{found[1]})" if found else ""


def _columns(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
