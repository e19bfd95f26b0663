"""`kvlab bench`, `analyze` and `calibrate`: what is measured of caches, kernels and a model's attention."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlab.commands.arguments import Add, add_model, add_settings, add_text, check_what, lengths, positive, settings_of, share

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


def register(add: Add) -> None:
    """Add them."""
    bench = add("bench", _bench, "measure what caches and kernels cost and save, against transformers' own", BENCH_EXAMPLES)
    bench.add_argument("what", nargs="*", metavar="WHAT", help="decode, prefill, loglik, choices, codecs, memory, sweep")
    add_model(bench)
    bench.add_argument("--lengths", type=lengths, default=(2048, 4096), help="prompt lengths (default: 2048,4096)")
    bench.add_argument("--batch", type=positive, default=8, help="sequences that are decoded together (default: 8)")
    bench.add_argument("--ratio", type=share, default=0.2, help="the budget's part of the prompt (default: 0.2)")
    bench.add_argument(
        "--repeats", type=positive, default=5, help="of each measurement, for its median (default: 5; sweep: a fifth)"
    )
    bench.add_argument("--threads", type=positive, help="of torch and of the kernels on the CPU (default: all cores)")
    bench.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    _add_analyze(add("analyze", _analyze, "show what a model's attention looks like: tables and pictures", ANALYZE_EXAMPLES))

    calibrate = add("calibrate", _calibrate, "measure what codecs and sharing must know of a model", CALIBRATE_EXAMPLES)
    calibrate.add_argument("what", metavar="WHAT", help="qaq, kvsharer, eigen")
    add_model(calibrate)
    add_text(calibrate, by_default=False)
    add_settings(calibrate, "the measurement's")


def _add_analyze(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what", nargs="*", metavar="WHAT", help="sparsity, heavy_hitters, persistence, heads, hash (default: all)"
    )
    add_model(command)
    add_text(command)
    command.add_argument("--output", metavar="DIR", default="outputs/analyze", help="for files (default: outputs/analyze)")
    command.add_argument(
        "--threshold", type=share, default=0.95, help="heads: attention that a head's set must hold (default: 0.95)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _bench(options: argparse.Namespace) -> int:
    import torch

    from kvlab.bench import BENCHES, load, run_benches

    check_what("bench", options.what, BENCHES)
    if options.threads:
        torch.set_num_threads(options.threads)
    names = ("lengths", "batch", "ratio", "repeats")
    setup = load(options.model, options.device, options.dtype, **{name: getattr(options, name) for name in names})
    run_benches(options.what or list(BENCHES), setup, options.json, print)
    return 0


def _analyze(options: argparse.Namespace) -> int:
    from kvlab.analyze import ANALYSES, check_writable, load, run_analyses

    check_what("analysis", options.what, ANALYSES)
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

    check_what("calibration", [options.what], CALIBRATIONS)
    try:
        settings = {name: yaml.safe_load(value) for name, value in settings_of(options).items()}
    except yaml.YAMLError as error:
        raise ValueError(f"-o {' -o '.join(options.settings)}: a value isn't YAML; quote it, or use a plain word") from error
    calibration = make_calibration(options.what, settings)
    tokens, texts = options.tokens or calibration.tokens, options.texts or calibration.texts
    setup = load(options.model, options.device, options.dtype, file=options.file, tokens=tokens, texts=texts, held_out=True)
    run_calibration(options.what, calibration, setup, print)
    return 0
