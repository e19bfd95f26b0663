"""One cell: attach, read batch by batch, let the task evaluate, record every sample, and sum up.

Samples that an earlier attempt has finished are not repeated. Batches are the same in every attempt. What a result says comes
from the records alone, so an interrupted cell ends with the numbers of an uninterrupted one.
"""

from __future__ import annotations

import datetime
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from kvlab.interrupt import finished_first
from kvlab.measure import PeakMemory, give_back, now, out_of_memory
from kvlab.models import ModelSpec, load_spec, resolve_model
from kvlab.outline import fingerprint
from kvlab.protocol import Reader
from kvlab.reading import Reading
from kvlab.results import SCHEMA, CellStore, StoreError, as_lines, prompts_file, write_whole, writing
from kvlab.session import attach
from kvlab.tracking import Tracker
from kvlab.workbench import Workbench

PROBE_STEPS = 8
"""Decode steps that are timed in one batch of each cell."""
PART = "kv_bytes."
"""Before the kinds of bytes that make up a record's `kv_bytes`."""
LEFT_OUT_LINES = 20
"""Lines on rows left out that a result holds."""
Progress = Callable[[int], None]
"""Called with the number of samples just finished."""


def run_cell(cell: Cell, bench: Workbench, tracker: Tracker, progress: Progress = lambda done: None) -> dict[str, Any]:
    """Run what is left of a cell and write its result, also where it fails. Returns the result."""
    store = CellStore(cell.folder)
    store.start(cell.config)
    for line in store.repair():
        tqdm.write(line, file=sys.stderr)
    tracker.start(cell.summary())
    started = time.time()
    peak = PeakMemory()
    try:
        samples = bench.samples(cell)
        _keep_prompts(cell, bench, samples)
        records = _finish_samples(cell, bench, store, samples, tracker, progress, peak)
        finished = _finished(cell, bench, samples, records)
        if (judged := cell.task.judge(finished)) is not records:
            store.rewrite(judged)
            records = judged
        result = {**cell.summary(), "schema": SCHEMA, "status": "ok", "error": None, **_summed_up(cell, samples, records)}
        result["left_out"] = {"rows": len(bench.left_out(cell)), "why": bench.left_out(cell)[:LEFT_OUT_LINES]}
        result["memory"] |= peak.read()
        finished = replace(finished, records=records)
        result["notes"] = cell.task.notes(finished)
        cell.task.export(finished, result)
        trace = ""
    except (KeyboardInterrupt, SystemExit, StoreError):
        tracker.abandon()
        raise
    except Exception as error:  # whatever a model, a task or a user's policy may raise: recorded, and the sweep goes on
        records, trace = store.records(), traceback.format_exc()
        error_line = _too_little(cell) if out_of_memory(error) else _one_line(error)
        result = {**cell.summary(), "schema": SCHEMA, "status": "failed", "error": error_line, "metrics": {}}
    result["provenance"] = _provenance(cell, bench, started)
    store.finish(result, trace)
    tracker.finish(result, records)
    return result


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


def _finish_samples(
    cell: Cell,
    bench: Workbench,
    store: CellStore,
    samples: Sequence[Sample],
    tracker: Tracker,
    progress: Progress,
    peak: PeakMemory,
) -> list[Record]:
    records = store.records()
    done = {record["id"] for record in records}
    size = _batch_size(cell, records) if cell.runtime.oom == "retry" else cell.runtime.batch_size
    waiting = batches(samples, size)
    while waiting:
        batch = [sample for sample in waiting.pop(0) if sample.id not in done]
        if not batch:
            continue
        probed = any("decode_step_s" in record["speed"] for record in records)
        _ = bench.model  # loaded here: nothing waits for it, and smaller batches don't help where it is too large
        with finished_first():
            new = _evaluate(cell, bench, batch, size, None if probed else peak)
            if new is not None:
                store.append(new)
        if new is None:
            size = max(1, min(size, sum(len(sample.prompts) for sample in batch)) // 2)
            waiting = [part for one in (batch, *waiting) for part in batches(one, size)]
            continue
        records += new
        tracker.progress(len(records), len(samples), _running_means(records))
        progress(len(batch))
    place = {sample.id: number for number, sample in enumerate(samples)}
    return sorted((record for record in records if record["id"] in place), key=lambda record: place[record["id"]])


def _evaluate(cell: Cell, bench: Workbench, batch: Sequence[Sample], size: int, peak: PeakMemory | None) -> list[Record] | None:
    """Records of a batch; None where there was too little memory for it and `runtime.oom` has smaller ones tried."""
    try:
        records = evaluate(cell, bench, batch, peak)
        if size < cell.runtime.batch_size:
            records = [{**record, "speed": {**record["speed"], "batch_size": size}} for record in records]
        return records
    except Exception as error:
        if cell.runtime.oom != "retry" or len(batch) == 1 or not out_of_memory(error):
            raise
    give_back()  # only here, where nothing holds the error, and it the batch's tensors
    return None


def _batch_size(cell: Cell, records: Sequence[Record]) -> int:
    """What was asked for, or as few rows as memory was found to be enough for."""
    return min([cell.runtime.batch_size, *(record["speed"].get("batch_size", cell.runtime.batch_size) for record in records)])


def batches(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Samples in batches, the longest first, so that rows of a batch are about as long and too little memory shows early.

    Rows of a batch generate equally many tokens at most up to the same strings, since they go on together. A sample with
    several prompts takes as many rows. Prompts of one token, which is read after the compressed part, have none and aren't put
    beside others.
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


def evaluate(cell: Cell, bench: Workbench, batch: Sequence[Sample], peak: PeakMemory | None = None) -> list[Record]:
    """Records of a batch. What each sample is billed for memory and time is its share of the batch.

    peak  where the speed of decoding is to be tried too, which must not count as the cell's memory
    """
    model, rows = bench.model, len(batch)
    with (
        torch.inference_mode(),
        attach(model, tokenizer=bench.vocab(cell), kernels=cell.runtime.kernels, **cell.at_work) as session,
    ):
        start = now(model.device)
        torch.manual_seed(cell.seed)
        reader = Reader(session, cell.protocol, bench.tokenizer.pad_token_id or 0, cell.runtime.prefill_chunk)
        prompts = [replace(p, name=f"{s.id}#{n}" if n else s.id) for s in batch for n, p in enumerate(s.prompts)]
        reading = reader.read(prompts, new_tokens=[after for sample in batch for after in sample.after_each])
        speed = {"prefill_s": reading.prefill_s / rows, "prefill_tokens": reading.prefill_tokens / rows}
        # Rows that end early go on with the batch, so what generation holds is taken before it.
        memory = _memory(reading, batch) if batch[0].new_tokens else None
        heads = _heads(cell, reading, batch) or [{}] * rows
        records = cell.task.evaluate(reading, batch, bench.tokenizer)
        memory = memory or _memory(reading, batch)
        speed["seconds"] = (now(model.device) - start) / rows
        if (
            peak is not None
            and not cell.protocol.simulated
            and (steps := min(PROBE_STEPS, bench.context - reading.feed.ids.shape[1] - 1)) > 0
        ):
            peak.pause()
            step, policy = reader.overhead(reading, steps)
            speed |= {"decode_step_s": step, "policy_step_s": policy, "decode_rows": len(prompts)}
            peak.go_on()
    return [
        {
            "id": sample.id,
            **record,
            **by_head,
            "fields": dict(sample.fields),
            "query_aware": cell.protocol.query_aware(sample.prompt),
            "memory": held,
            "speed": speed,
        }
        for sample, record, held, by_head in zip(batch, records, memory, heads, strict=True)
    ]


def _heads(cell: Cell, reading: Reading, batch: Sequence[Sample]) -> list[dict[str, Any]]:
    """Where heads may hold different numbers of tokens: what each holds once a sample's (first) prompt was read, and why."""
    if not cell.policy.ragged or cell.protocol.simulated:
        return []
    seconds, held = reading.feed.cache.profile_cost
    rows = len(reading.last)
    cost = {"profile_s": seconds / rows, "profile_bytes": held // rows} if held else {}
    heads = reading.feed.cache.heads_by_row()
    return [{"heads": heads[rows[0]] | cost} for rows in _rows_of(batch)]


def _rows_of(batch: Sequence[Sample]) -> list[range]:
    """The rows that each sample's prompts are in a reading."""
    ends = list(itertools.accumulate(len(sample.prompts) for sample in batch))
    return [range(end - len(sample.prompts), end) for end, sample in zip(ends, batch, strict=True)]


def _memory(reading: Reading, batch: Sequence[Sample]) -> list[dict[str, float]]:
    """What a sequence of each sample holds, the mean where it has several."""
    found = _memory_by_row(reading)
    return [{name: statistics.fmean(found[row][name] for row in rows) for name in found[0]} for rows in _rows_of(batch)]


def _memory_by_row(reading: Reading) -> list[dict[str, float]]:
    """What each sequence holds. The peak and the bookkeeping are known for the batch only and shared out by length."""
    rows, batch = reading.memory()
    whole = sum(row.kv_bytes_full for row in rows) or 1
    shares = [row.kv_bytes_full / whole for row in rows]
    parts = {f"{PART}{kind}": size / (batch.kv_bytes or 1) for kind, size in batch.parts.items()}
    return [
        {
            "kv_bytes": row.kv_bytes,
            "kv_bytes_peak": max(row.kv_bytes, round(batch.kv_bytes_peak * share)),
            "kv_bytes_full": row.kv_bytes_full,
            "state_bytes": round(batch.state_bytes * share),
            "offload_bytes": round(batch.offload_bytes * share),
            **{part: round(row.kv_bytes * size) for part, size in parts.items()},
            "kept": row.kept,
            "seen": row.seen,
        }
        for row, share in zip(rows, shares, strict=True)
    ]


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
