"""Times kvlab against kvpress: the same model, prompts and settings, each library in its own environment.

python experiments/peers/compare.py --json peers.json

README.md beside this file says what is compared and what differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from serving import METHODS, Job

from kvlab.embedded import ModelUnavailable, fetch_embedded
from kvlab.paths import cache_dir

HERE = Path(__file__).resolve().parent
PEER = ("kvpress==0.5.5", "transformers==5.2.0")
NEVER_EVICTED = ("plain", "full")
SETTLE = 0.2
"""Seconds between two commands, in which the threads of the worker that has just finished go to sleep."""


class PeerError(Exception):
    """The comparison can't go on; the message says why and what helps."""


# ------------------------------------------------------------------------------------------------ the other environment


def requirements() -> list[str]:
    """What is installed for kvpress: the torch that kvlab runs on, and pinned releases."""
    return [f"torch=={torch.__version__.split('+')[0]}", *PEER]


def interpreter(env: Path) -> Path:
    """The Python of an environment. Raises PeerError where there is none."""
    for name in ("bin/python", "Scripts/python.exe"):
        if (env / name).is_file():
            return env / name
    raise PeerError(f"{env} is no virtual environment: give --env one that holds {' '.join(requirements())}, or leave it out")


def peer_python(env: Path | None, pip_flags: str) -> Path:
    """The Python that has kvpress: that of `env`, else of an environment in the cache folder, made on first use."""
    if env is not None:
        return interpreter(env.expanduser())
    folder = cache_dir() / "peers" / "kvpress"
    done = folder / "installed.json"
    if not done.is_file() or json.loads(done.read_text()) != requirements():
        say(f"making an environment in {folder} (once): {' '.join(requirements())}")
        make_environment(folder, shlex.split(pip_flags))
        done.write_text(json.dumps(requirements()))
    return interpreter(folder)


def make_environment(folder: Path, pip_flags: Sequence[str]) -> None:
    """A fresh virtual environment with the requirements. Raises PeerError with pip's reason."""
    command = [sys.executable, "-m", "venv", "--clear", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise PeerError(
            f"python -m venv can't make {folder} ({reason(made)}): install it (Debian: python3-venv), or give --env"
        )
    command = [str(interpreter(folder)), "-m", "pip", "install", "--quiet", "--no-input", *pip_flags, *requirements()]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        raise PeerError(
            f"pip can't install {' '.join(requirements())} ({reason(installed)}): "
            "let pip reach a package index (--pip-flags), or give --env an environment that holds them"
        )


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """The line of a failed command that says most."""
    return telling_line(f"{done.stdout}\n{done.stderr}")


def telling_line(text: str) -> str:
    """The last line that names an error, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "error" in line.lower()]
    return (named or lines or ["it said nothing"])[-1][:300]


# ------------------------------------------------------------------------------------------------ workers


class Peer:
    """One worker process. It blocks on its standard input until it is asked, so that it is idle while the other works."""

    def __init__(self, name: str, python: Path, script: str, model: Path, threads: int) -> None:
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        count = str(threads)
        offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [str(python), str(HERE / script), str(model), "--threads", count],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | offline | {f"{library}_NUM_THREADS": count for library in ("OMP", "MKL", "NUMBA")},
        )
        self.versions: dict[str, str] = self._answer()

    def ask(self, job: Job) -> dict[str, Any]:
        """Have one job done. The answer may be {"error": ...} or {"unavailable": ...}."""
        assert self.process.stdin is not None
        try:
            print(json.dumps(asdict(job)), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise self._death() from None
        return self._answer()

    def stop(self) -> None:
        """End the worker, busy or not."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._death()
        return json.loads(line)

    def _death(self) -> PeerError:
        code = self.process.wait()
        self.errors.seek(0)
        cause = "killed, maybe for memory: lower --batch" if code in (-9, 137) else telling_line(self.errors.read())
        return PeerError(f"the worker of {self.name} ended with {code} ({cause})")


@dataclass
class Pair:
    """The two workers."""

    theirs: Peer
    ours: Peer

    def both(self, job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
        """Ask one after the other, theirs first."""
        answers = []
        for peer in (self.theirs, self.ours):
            time.sleep(SETTLE)
            answers.append(peer.ask(job))
        return answers[0], answers[1]


# ------------------------------------------------------------------------------------------------ measuring


@dataclass
class Side:
    """What one library did in a row: seconds of every repeat, and its last answer."""

    seconds: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def failure(self) -> str | None:
        """Why there are no times."""
        return self.last.get("unavailable") or self.last.get("error")

    @property
    def median(self) -> float | None:
        """Median seconds."""
        return statistics.median(self.seconds) if self.seconds and not self.failure else None

    def take(self, answer: dict[str, Any], counts: bool) -> None:
        """Note an answer; one of the warm-up doesn't count."""
        if self.failure:
            return
        self.last = answer
        if counts and "seconds" in answer:
            self.seconds.append(answer["seconds"])


@dataclass
class Row:
    """One piece of work, done by both."""

    job: Job
    theirs: Side = field(default_factory=Side)
    ours: Side = field(default_factory=Side)

    @property
    def drift(self) -> float | None:
        """Largest difference between the two libraries' last top logits."""
        pairs = list(zip(self.theirs.last.get("top", ()), self.ours.last.get("top", ()), strict=False))
        return max(abs(a - b) for a, b in pairs) if pairs else None

    @property
    def same_result(self) -> bool:
        """Whether the drift must be rounding: nothing is evicted before the last logits, or the same tokens are."""
        return self.job.do == "prefill" or (self.job.method in (*NEVER_EVICTED, "snapkv") and not self.job.interval)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        sides = {
            name: {**side.last, "seconds": side.seconds} for name, side in (("kvpress", self.theirs), ("kvlab", self.ours))
        }
        return {"job": asdict(self.job), **sides, "top_logit_drift": self.drift}


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Everything to be timed, in the order of the table; jobs that can share a prompt follow each other."""
    common = Job(do="", steps=args.steps, keep=args.keep, window=args.window, kernel=args.kernel, seed=args.seed)
    if "prefill" in args.work:
        for length in args.lengths:
            for method in args.methods:
                yield replace(common, do="prefill", method=method, length=length, batch=args.prefill_batch)
    if "decode" in args.work:
        for method in args.methods:
            for interval in (0,) if method in NEVER_EVICTED else (0, *args.intervals):
                job = replace(common, do="decode", method=method, length=args.prompt, batch=args.batch)
                yield replace(job, interval=interval)


def measure(pair: Pair, job: Job, repeats: int) -> Row:
    """One warm-up each, then theirs, ours, theirs, ours, ..."""
    row = Row(job)
    if job.do == "decode":
        for side, answer in zip((row.theirs, row.ours), pair.both(replace(job, do="prompt")), strict=True):
            side.take(answer, counts=False)
    for repeat in range(repeats + 1):
        theirs, ours = pair.both(job)
        row.theirs.take(theirs, counts=repeat > 0)
        row.ours.take(ours, counts=repeat > 0)
    return row


def measure_all(pair: Pair, work: Sequence[Job], repeats: int, rows: list[Row]) -> None:
    """Fills `rows`, so that what is done is not lost where something later fails."""
    for number, job in enumerate(work, 1):
        say(f"{number} of {len(work)}: {label(job)}, {job.method}")
        rows.append(measure(pair, job, repeats))


# ------------------------------------------------------------------------------------------------ the table


def label(job: Job) -> str:
    """What is done."""
    what = f"{job.batch} × {job.length}"
    if job.do == "prefill":
        return f"prefill {what}"
    evicts = f", evict every {job.interval}" if job.interval else ""
    return f"decode step, {what}{evicts}"


def cells(side: Side, baseline: float | None) -> list[str]:
    """One library's share of a row: seconds with range, times plain, tokens, megabytes."""
    if side.median is None:
        return ["–"] * 4
    times = f"{side.median:.4g} [{min(side.seconds):.4g}, {max(side.seconds):.4g}]"
    against = "–" if baseline is None else f"{side.median / baseline:.2f}"
    return [times, against, f"{side.last['tokens']:.0f}", f"{side.last['kv_bytes'] / 1e6:.1f}"]


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    sides = [f"{name} {what}" for name in ("kvpress", "kvlab") for what in ("s", "× plain", "tokens", "KV MB")]
    lines = ["| " + " | ".join(["work", "method", *sides, "kvlab / kvpress"]) + " |", "|---|---" + "|---:" * 9 + "|"]
    plain = {(row.job.do, row.job.length): row for row in rows if row.job.method == "plain"}
    for row in rows:
        base = plain.get((row.job.do, row.job.length))
        theirs, ours = row.theirs.median, row.ours.median
        ratio = "–" if theirs is None or ours is None else f"{ours / theirs:.2f}"
        line = [label(row.job), row.job.method]
        line += cells(row.theirs, base.theirs.median if base else None) + cells(row.ours, base.ours.median if base else None)
        lines.append("| " + " | ".join([*line, ratio]) + " |")
    return "\n".join(lines)


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know: work that could not be done, and results that differ."""
    found = []
    for row in rows:
        name = f"{label(row.job)}, {row.job.method}"
        for library, side in (("kvpress", row.theirs), ("kvlab", row.ours)):
            if side.failure:
                found.append(f"{name}: not with {library}: {side.failure}")
        if row.same_result and row.drift is not None and row.drift > 0.01:
            found.append(f"{name}: the last logits differ by {row.drift:.3g}, so the two did not compute quite the same")
    return found


def heading(pair: Pair, args: argparse.Namespace) -> str:
    """Versions and settings, one line each."""
    lines = [f"- {peer.name}: " + ", ".join(f"{k} {v}" for k, v in peer.versions.items()) for peer in (pair.theirs, pair.ours)]
    settings = f"keep {args.keep:g}, {args.steps} steps, {args.repeats} repeats (median [range]), snapkv window {args.window}"
    return "\n".join([*lines, f"- {os.cpu_count()} cores; {settings}, kernel {args.kernel}"])


def say(text: str) -> None:
    """Progress, beside the results."""
    print(f"peers: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ the command


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number above 0")
    return int(text)


def share(text: str) -> float:
    """A number between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a share between 0 and 1")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--work", nargs="+", choices=("prefill", "decode"), default=["prefill", "decode"])
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--lengths", nargs="+", type=positive, default=[2048], help="prompt lengths of prefill, such as 2048 4096")
    add("--prefill-batch", type=positive, default=1, help="prompts of prefill")
    add("--prompt", type=positive, default=2048, help="prompt length of decode")
    add("--batch", type=positive, default=8, help="prompts of decode")
    add("--steps", type=positive, default=16, help="tokens that are decoded")
    add("--intervals", nargs="*", type=positive, default=[1, 16], help="decoded tokens between evictions, where there are any")
    add("--keep", type=share, default=0.2, help="share of the prompt that stays")
    add("--window", type=positive, default=64, help="snapkv's last queries that vote")
    add("--kernel", type=positive, default=5, help="snapkv's pooling, an odd number")
    add("--repeats", type=positive, default=5, help="timed runs of each, after one warm-up")
    add("--threads", type=positive, default=os.cpu_count() or 1, help="of torch, in both workers")
    add("--seed", type=int, default=0)
    add("--model", type=Path, help="model folder; default: the embedded model")
    add("--env", type=Path, help="an environment that holds kvpress; default: one in kvlab's cache folder, made on first use")
    add(
        "--pip-flags", default="", help='for that environment, such as "--extra-index-url https://download.pytorch.org/whl/cpu"'
    )
    add("--json", type=Path, metavar="FILE", help="also write every single time there")
    return parser.parse_args(argv)


def start(args: argparse.Namespace, peers: list[Peer]) -> Pair:
    """Both workers, one after the other; whatever was started is in `peers`, to be stopped."""
    python = peer_python(args.env, args.pip_flags)
    model = args.model.expanduser().resolve() if args.model else fetch_embedded()
    if not (model / "config.json").is_file():
        raise PeerError(f"{model} is no model folder: it has no config.json")
    for name, interp in (("kvpress", python), ("kvlab", Path(sys.executable))):
        say(f"{name} loads the model")
        peers.append(Peer(name, interp, f"worker_{name}.py", model, args.threads))
    return Pair(*peers)


def report(pair: Pair, args: argparse.Namespace, rows: Sequence[Row]) -> bool:
    """Print what was measured and write the JSON file; whether nothing went wrong."""
    print(heading(pair, args), table(rows), *[f"- {note}" for note in notes(rows)], sep="\n\n")
    if args.json:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        versions = {peer.name: peer.versions for peer in (pair.theirs, pair.ours)}
        content = {"versions": versions, "cores": os.cpu_count(), "settings": settings, "rows": [row.as_dict() for row in rows]}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return not any("error" in side.last for row in rows for side in (row.theirs, row.ours))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; 0 if all went well, 1 if some work failed, 2 if it could not be done."""
    args = parse(argv)
    peers: list[Peer] = []
    rows: list[Row] = []
    pair: Pair | None = None
    code = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was measured is shown then, too
    try:
        pair = start(args, peers)
        measure_all(pair, list(jobs(args)), args.repeats, rows)
    except (PeerError, ModelUnavailable, OSError) as error:
        say(str(error))
        code = 2
    except KeyboardInterrupt:
        say("stopped")
        code = 130
    finally:
        if pair is not None and rows:
            code = code or int(not report(pair, args, rows))
        for peer in peers:
            peer.stop()
    return code


if __name__ == "__main__":
    sys.exit(main())
