"""One cell: evaluate it batch by batch, record every sample, and sum up.

Samples that an earlier attempt has finished are not repeated. Batches are the same in every attempt. What a result says comes
from the records alone, so an interrupted cell ends with the numbers of an uninterrupted one.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import kvlab
from kvlab.cells import Cell
from kvlab.evals import Finished, Record, Sample
from kvlab.evals.shown import as_text, prompts_hash
from kvlab.evaluation import PART, evaluate
from kvlab.interrupt import finished_first
from kvlab.measure import PeakMemory, give_back, out_of_memory
from kvlab.models import ModelSpec, load_spec, resolve_model
from kvlab.outline import fingerprint
from kvlab.results import SCHEMA, CellStore, StoreError, as_lines, prompts_file, write_whole, writing
from kvlab.tracking import Tracker
from kvlab.workbench import Workbench

LEFT_OUT_LINES = 20
"""Lines on rows left out that a result holds."""
Progress = Callable[[int], None]
"""Called with the number of samples just finished."""


class CellRun:
    """A cell that is being run. `result` is there once it is over, also where it failed."""

    result: dict[str, Any] | None = None
    peak: PeakMemory
    """Of all cells that are run at once."""
    together = 1
    """How many those are."""
    size: int
    """Rows of a batch: as many as were asked for, or as memory was found to be enough for."""

    def __init__(self, cell: Cell, bench: Workbench, tracker: Tracker, progress: Progress) -> None:
        self.cell, self.bench, self.tracker, self.progress = cell, bench, tracker, progress
        self.store = CellStore(cell.folder)
        self.samples: list[Sample] = []
        self.records: list[Record] = []

    @contextmanager
    def attempt(self, short: list[CellRun] | None = None) -> Iterator[None]:
        """A part of the run, whose error ends it, but for an interruption or a folder that can't be written.

        short  takes the run where memory was too little and it may be tried otherwise
        """
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # whatever a model, a task or a user's policy may raise: recorded, and the sweep goes on
            if short is not None and out_of_memory(error):
                short.append(self)
            else:
                self.fail(error)

    def begin(self, peak: PeakMemory, together: int) -> None:
        """Make the folder and see what is there already."""
        self.started, self.peak, self.together = time.time(), peak, together
        self.store.start(self.cell.config)
        for line in self.store.repair():
            tqdm.write(line, file=sys.stderr)
        self.tracker.start(self.cell.summary())
        with self.attempt():
            self.samples = self.bench.samples(self.cell)
            _keep_prompts(self.cell, self.bench, self.samples)
            self.records = self.store.records()
            self.size = _batch_size(self.cell, self.records)

    def ready(self) -> bool:
        """Load the model, for which Ctrl-C needn't wait and no smaller batch makes room; whether the run can go on."""
        with self.attempt():
            _ = self.bench.model
        return self.result is None

    def left(self, batch: Sequence[Sample]) -> list[Sample]:
        """Those of a batch that are to be evaluated, none once the run is over."""
        done = {record["id"] for record in self.records}
        left = [sample for sample in batch if sample.id not in done]
        return left if self.result is None else []

    @property
    def to_probe(self) -> PeakMemory | None:
        """What `evaluate` wants to know: `peak` as long as the speed of decoding wasn't tried."""
        return None if any("decode_step_s" in record["speed"] for record in self.records) else self.peak

    def add(self, records: list[Record]) -> None:
        """Record finished samples."""
        self.store.append(records)
        self.records += records
        self.tracker.progress(len(self.records), len(self.samples), _running_means(self.records))
        self.progress(len(records))

    def finish(self) -> None:
        """All samples are there: sum up."""
        cell, place = self.cell, {sample.id: number for number, sample in enumerate(self.samples)}
        records = sorted((record for record in self.records if record["id"] in place), key=lambda record: place[record["id"]])
        finished = _finished(cell, self.bench, self.samples, records)
        if (judged := cell.task.judge(finished)) is not records:
            self.store.rewrite(judged)
            records = judged
        result = {**cell.summary(), "schema": SCHEMA, "status": "ok", "error": None}
        result |= _summed_up(cell, self.samples, records)
        left_out = self.bench.left_out(cell)
        result["left_out"] = {"rows": len(left_out), "why": left_out[:LEFT_OUT_LINES]}
        result["memory"] |= self.peak.read()
        finished = replace(finished, records=records)
        result["notes"] = cell.task.notes(finished)
        cell.task.export(finished, result)
        self._end(result, records)

    def fail(self, error: Exception) -> None:
        """The run is over by an error."""
        trace = "".join(traceback.format_exception(error))
        line = _too_little(self.cell) if out_of_memory(error) else _one_line(error)
        result = {**self.cell.summary(), "schema": SCHEMA, "status": "failed", "error": line, "metrics": {}}
        self._end(result, self.store.records(), trace)

    def _end(self, result: dict[str, Any], records: list[Record], trace: str = "") -> None:
        about = {"cells_together": self.together, "samples_bytes": self.store.size()}
        result["provenance"] = {**_provenance(self.cell, self.bench, self.started), **about}
        self.store.finish(result, trace)
        self.result = result
        self.tracker.finish(result, records)


def run_batch(run: CellRun, batch: Sequence[Sample]) -> None:
    """Evaluate what is left of a batch, in smaller ones where memory is too little and `runtime.oom` has these tried."""
    waiting = batches(run.left(batch), run.size)
    while waiting and run.ready():
        part = waiting.pop(0)
        with run.attempt():
            with finished_first():
                records = _records(run, part)
                if records is not None:
                    run.add(records)
            if records is None:
                run.size = max(1, _rows(run, part) // 2)
                waiting = [smaller for one in (part, *waiting) for smaller in batches(one, run.size)]


def _records(run: CellRun, batch: Sequence[Sample]) -> list[Record] | None:
    """Records of a batch; None where memory was too little for it and smaller ones are to be tried."""
    asked = run.cell.runtime
    try:
        records = evaluate(run.cell, run.bench, batch, run.to_probe, run.size)
        if run.size < asked.batch_size:
            records = [{**record, "speed": {**record["speed"], "batch_size": run.size}} for record in records]
        return records
    except Exception as error:
        if asked.oom != "retry" or _rows(run, batch) == 1 or not out_of_memory(error):
            raise
    give_back()  # only here, where nothing holds the error, and it the batch's tensors
    return None


def _rows(run: CellRun, batch: Sequence[Sample]) -> int:
    """How many prompts of a batch are read at once."""
    return min(run.size, sum(len(sample.prompts) for sample in batch))


def _batch_size(cell: Cell, records: Sequence[Record]) -> int:
    """What was asked for, or as few rows as memory was found to be enough for, where that is tried."""
    asked = cell.runtime.batch_size
    found = [record["speed"].get("batch_size", asked) for record in records] if cell.runtime.oom == "retry" else []
    return min([asked, *found])


def end_run(run: CellRun) -> None:
    """Sum up a run that hasn't failed."""
    if run.result is None:
        with run.attempt():
            run.finish()


def _finished(cell: Cell, bench: Workbench, samples: Sequence[Sample], records: list[Record]) -> Finished:
    def full() -> dict[str, Record] | None:
        folders = [cell.folder] if cell.is_full else cell.full_cache_results()
        return {record["id"]: record for record in CellStore(folders[0]).records()} if folders else None

    def spec(name: str | None) -> ModelSpec:
        return bench.spec if name is None else resolve_model(name)

    def load(name: str | None) -> tuple[Any, Any]:
        return (bench.model, bench.tokenizer) if spec(name) == bench.spec else load_spec(spec(name))

    about = {**cell.summary(), "git_commit": git_commit()}
    shared = cell.output_dir / cell.name
    return Finished(cell.folder, shared, about, samples, records, full, load, lambda name: fingerprint(spec(name)))


def _keep_prompts(cell: Cell, bench: Workbench, samples: Sequence[Sample]) -> None:
    """Write what is asked, as text, where no cell before has."""
    file = prompts_file(cell.folder, prompts_hash(samples))
    if not file.exists():
        with writing(file.parent):
            write_whole(file, as_lines(as_text(sample, bench.tokenizer) for sample in samples))


def batches(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Samples in batches, the longest first, so that rows of a batch are about as long and too little memory shows early.

    Rows of a batch generate equally many tokens at most up to the same strings, since they go on together. A sample with
    several prompts takes as many rows, and one that has more than a batch is a batch by itself, of which `evaluate` reads some
    at a time. Prompts of one token, which is read after the compressed part, have none and aren't put beside others.
    """
    found: list[list[Sample]] = []
    rows = 0
    for sample in sorted(samples, key=lambda sample: (-sample.new_tokens, sample.stop, -len(sample.prompt.ids))):
        rows += len(sample.prompts)
        if not found or rows > size or _alike(found[-1][0]) != _alike(sample):
            found.append([])
            rows = len(sample.prompts)
        found[-1].append(sample)
    return found


def _alike(sample: Sample) -> tuple[int, tuple[str, ...], bool]:
    return sample.new_tokens, sample.stop, len(sample.prompt.ids) == 1


# ---------------------------------------------------------------------------------------------------- summing up


def _summed_up(cell: Cell, samples: Sequence[Sample], records: Sequence[Record]) -> dict[str, Any]:
    """Metrics, memory and speed of a finished cell, from its records alone."""
    metrics = {name: metric.as_dict() for name, metric in cell.task.metrics(records).items()}
    if not metrics:
        raise ValueError(f"task {cell.task.name} gave no metrics")
    main = cell.task.main_metric if cell.task.main_metric in metrics else next(iter(metrics))
    held = [record["memory"] for record in records]
    names = ("kv_bytes", "kv_bytes_peak", "kv_bytes_full", "state_bytes", "offload_bytes")
    memory: dict[str, Any] = {name: statistics.fmean(one.get(name, 0) for one in held) for name in names}
    parts = sorted({name for one in held for name in one if name.startswith(PART)})
    memory["parts"] = {name.removeprefix(PART): statistics.fmean(one.get(name, 0) for one in held) for name in parts}
    seen = sum(record["memory"]["seen"] for record in records)
    memory["kept_fraction"] = sum(record["memory"]["kept"] for record in records) / seen if seen else 1.0
    return {
        "main_metric": main,
        "metrics": metrics,
        "memory": memory,
        "speed": _speed(cell, [record["speed"] for record in records]),
        "query_aware": any(record["query_aware"] for record in records),
        "prompts": {
            "samples": len(samples),
            "tokens": sum(len(prompt.ids) for sample in samples for prompt in sample.prompts),
            "hash": prompts_hash(samples),
        },
    }


def _speed(cell: Cell, speeds: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """prefill_s: of one prompt's share of its batch. Decoding was probed on one batch: median of a few steps."""
    prefill_s, tokens = (sum(speed[name] for speed in speeds) for name in ("prefill_s", "prefill_tokens"))
    probe = next((speed for speed in speeds if "decode_step_s" in speed), None)
    return {
        "prefill_s": prefill_s / len(speeds),
        "prefill_tokens_per_s": tokens / prefill_s if tokens else None,
        "decode_tokens_per_s": probe["decode_rows"] / probe["decode_step_s"] if probe else None,
        "policy_ms_per_step": 1000 * probe["policy_step_s"] if probe else None,
        "seconds": sum(speed["seconds"] for speed in speeds),
        "batch_size": min(speed.get("batch_size", cell.runtime.batch_size) for speed in speeds),
    }


def _running_means(records: Sequence[Record]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record["values"].items():
            values.setdefault(name, []).append(value)
    return {name: statistics.fmean(found) for name, found in values.items()}


def _one_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0] or "no message"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _too_little(cell: Cell) -> str:
    if cell.runtime.oom == "retry" or cell.runtime.batch_size == 1:
        return "out of memory with one sample at a time: set runtime.prefill_chunk, or use shorter prompts or a smaller model"
    return "out of memory: set runtime.oom=retry (smaller batches), lower runtime.batch_size, or set runtime.prefill_chunk"


def _provenance(cell: Cell, bench: Workbench, started: float) -> dict[str, Any]:
    device = bench.model.device if "model" in vars(bench) else torch.device("cpu")
    return {
        "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(timespec="seconds"),
        "wall_s": round(time.time() - started, 2),
        "seed": cell.seed,
        "versions": _versions("torch", "transformers", "numpy", "hydra-core", *cell.task.packages),
        "python": platform.python_version(),
        "kvlab": kvlab.__version__,
        "git_commit": git_commit(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        "dtype": str(bench.model.dtype) if "model" in vars(bench) else None,
        "hub_commit": getattr(bench.model.config, "_commit_hash", None) if "model" in vars(bench) else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _versions(*names: str) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@cache
def git_commit() -> str | None:
    """Commit of kvlab's own source, with '+' if it was changed since; None if kvlab isn't run from a checkout."""
    root = Path(kvlab.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        run = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12", "--match=-"]
        return subprocess.run(run, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
