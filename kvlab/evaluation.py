"""A batch of a cell: attach, read, let the task evaluate, and say what it took in memory and time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from kvlab.cache import Memory, RowMemory
from kvlab.cells import Cell
from kvlab.evals import Record, Sample
from kvlab.measure import PeakMemory, now
from kvlab.piecewise import Piecewise
from kvlab.protocol import Reader
from kvlab.reading import Prompt, Reading
from kvlab.session import Session, attach
from kvlab.workbench import Workbench

PROBE_STEPS = 8
"""Decode steps that are timed in one batch of each cell."""
PART = "kv_bytes."
"""Before the kinds of bytes that make up a record's `kv_bytes`."""


def evaluate(
    cell: Cell, bench: Workbench, batch: Sequence[Sample], peak: PeakMemory | None = None, size: int | None = None
) -> list[Record]:
    """Records of a batch. What each sample is billed for memory and time is its share of the batch.

    peak  where the speed of decoding is to be tried too, which must not count as the cell's memory
    size  most prompts that are read at once (default: the cell's batch size); a sample may have more
    """
    size = size or cell.runtime.batch_size
    with torch.inference_mode(), session_of(cell, bench) as session:
        start = now(bench.model.device)
        torch.manual_seed(cell.seed)
        reader = reader_of(cell, bench, session)
        prompts, new_tokens = prompts_of(batch), new_tokens_of(batch)
        pieces = len(prompts) > size and not (cell.protocol.simulated or batch[0].new_tokens)
        reading = Piecewise.of(reader, prompts, new_tokens, size) if pieces else reader.read(prompts, new_tokens)
        return evaluate_reading(cell, bench, batch, reader, reading, start, peak)


def session_of(cell: Cell, bench: Workbench) -> AbstractContextManager[Session]:
    """The model with what the cell has at work."""
    return attach(bench.model, tokenizer=bench.vocab(cell), kernels=cell.runtime.kernels, **cell.at_work)


def reader_of(cell: Cell, bench: Workbench, session: Session) -> Reader:
    """What reads the cell's batches."""
    return Reader(session, cell.protocol, bench.tokenizer.pad_token_id or 0, cell.runtime.prefill_chunk)


def prompts_of(batch: Sequence[Sample]) -> list[Prompt]:
    """All prompts of a batch, named by their samples."""
    return [replace(p, name=f"{s.id}#{n}" if n else s.id) for s in batch for n, p in enumerate(s.prompts)]


def new_tokens_of(batch: Sequence[Sample]) -> list[int]:
    """How many tokens are to come after each prompt."""
    return [after for sample in batch for after in sample.after_each]


def evaluate_reading(
    cell: Cell,
    bench: Workbench,
    batch: Sequence[Sample],
    reader: Reader,
    reading: Reading,
    start: float,
    peak: PeakMemory | None,
) -> list[Record]:
    """Records of a batch that has been read. start: when that began, as `now` has it; peak: see `evaluate`."""
    device, rows = bench.model.device, len(batch)
    # Rows that end early go on with the batch, so what generation holds is taken before it.
    memory = _memory(reading, batch) if batch[0].new_tokens else None
    heads = _heads(cell, reading, batch) or [{}] * rows
    records = cell.task.evaluate(reading, batch, bench.tokenizer)
    memory = memory or _memory(reading, batch)
    speed = {"prefill_s": reading.prefill_s / rows, "prefill_tokens": reading.prefill_tokens / rows}
    speed["seconds"] = (now(device) - start) / rows
    steps = min(PROBE_STEPS, bench.context - reading.feed.ids.shape[1] - 1)
    if peak is not None and not cell.protocol.simulated and steps > 0:
        peak.pause()
        step, policy = reader.overhead(reading, steps)
        speed |= {"decode_step_s": step, "policy_step_s": policy, "decode_rows": len(reading.last)}
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
    """What each sequence holds."""
    return [held for rows, batch in reading.memories() for held in _shared_out(rows, batch)]


def _shared_out(rows: Sequence[RowMemory], batch: Memory) -> list[dict[str, float]]:
    """The peak and the bookkeeping are known for the batch only and shared out by length."""
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
