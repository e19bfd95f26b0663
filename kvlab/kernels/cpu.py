"""Kernels for processors: torch's matrix products, and what numba compiles (`compiled.py`) for everything between them.

float32, bfloat16 and float16 come in, float32 goes out. The first use on a machine compiles for some seconds, later ones load
what was compiled from disk.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from kvlab.kernels import compiled
from kvlab.kernels.contract import GROUPS, OBSERVE, ORDER, Arrivals, Limits, ScanRule, Slots
from kvlab.kernels.reference import AttentionRule
from kvlab.shapes import Attention, Keys, Outputs, Positions, Queries, QueryPositions, Scores, Values


def evict_scan(
    queries: Queries, arrivals: Arrivals, slots: Slots, limits: Limits, attention: AttentionRule, rule: ScanRule
) -> Outputs:
    """Replay decoding over known tokens: each comes in, attends, and lets tokens leave. `slots` is changed in place.

    Returns attention outputs in float32; those of pads are 0. Every row has room for what it will hold.
    """
    new = arrivals
    batch, heads, group, tokens, _ = queries.shape
    out = torch.empty(batch * heads, group, tokens, new.values.shape[-1])
    stored = slots.keys.dtype
    planes = (
        _numbers(slots.keys), _numbers(slots.values), slots.positions.numpy(), _plane(slots.value, np.float32),
        _plane(slots.special, np.bool_), _plane(slots.source, np.int32),
    )  # fmt: skip
    _threads()
    compiled.scan(
        _numbers(queries.flatten(0, 1)),
        _numbers(new.keys.to(stored).flatten(0, 1)),
        _numbers(new.values.to(slots.values.dtype).flatten(0, 1)),
        new.positions.to(torch.int32).contiguous().numpy(),
        _plane(None if new.value is None else new.value.expand(batch, heads, tokens).flatten(0, 1), np.float32, 2),
        _plane(new.special, np.bool_, 2),
        _plane(None if new.source is None else new.source.flatten(0, 1), np.int32, 2),
        planes,
        slots.offsets.numpy(),
        slots.lengths.numpy(),
        *(part.contiguous().view(-1).numpy() for part in (limits.limit, limits.target, limits.recent)),
        _sinks(attention, heads, group),
        _attention_numbers(attention),
        slots.widest,
        limits.num_sink,
        limits.before,
        (OBSERVE.index(rule.observe), ORDER.index(rule.order), GROUPS.index(rule.group)),
        rule.coupled,
        out.numpy(),
    )
    return out.unflatten(0, (batch, heads))


def decode_attend(
    queries: Queries, slots: Slots, query_positions: QueryPositions, attention: AttentionRule, *, want_weights: bool = False
) -> tuple[Outputs, Attention | None]:
    """Attention of one or a few queries over slots, which aren't changed.

    Returns outputs, and if wanted the attention that each slot got, (batch, kv_heads, group, queries, widest), 0 beyond a
    row's end; both in float32, and 0 for queries that don't exist (position -1).
    """
    batch, heads, group, count, _ = queries.shape
    out = torch.empty(batch * heads, group, count, slots.values.shape[-1])
    weights = torch.zeros(batch * heads, group, count, slots.widest if want_weights else 0)
    _threads()
    compiled.decode(
        _numbers(queries.flatten(0, 1)),
        _numbers(slots.keys),
        _numbers(slots.values),
        slots.positions.numpy(),
        slots.offsets.numpy(),
        slots.lengths.numpy(),
        query_positions.contiguous().numpy(),
        _sinks(attention, heads, group),
        _attention_numbers(attention),
        slots.widest,
        out.numpy(),
        weights.numpy(),
    )
    return out.unflatten(0, (batch, heads)), weights.unflatten(0, (batch, heads)) if want_weights else None


def prefill_stats(
    queries: Queries,
    keys: Keys,
    values: Values,
    query_positions: QueryPositions,
    positions: Positions,
    attention: AttentionRule,
    *,
    group: str | None,
    causal: bool = False,
) -> tuple[Outputs, Scores]:
    """As `reference.attend_with_mass`: outputs, and the attention that each slot received (0 if `group` is None). Both in float32.

    One KV head after the other and a chunk of queries at a time, so that what is between two matrix products stays in cache.
    """
    batch, heads, size, count, _ = queries.shape
    slots = keys.shape[2]
    mass = torch.zeros(batch, heads, slots)
    out = torch.empty(batch, heads, size, count, values.shape[-1])
    chunk = _chunk(size, slots)
    scratch, factors = torch.empty(size * chunk * slots), torch.empty(size * chunk)
    sinks, numbers, merge = (
        _sinks(attention, heads, size),
        _attention_numbers(attention),
        -1 if group is None else GROUPS.index(group),
    )
    _threads()
    for b in range(batch):
        where = query_positions[b].contiguous()
        for h in range(heads):
            key, value, slot_positions = keys[b, h].float(), values[b, h].float(), positions[b, h].contiguous().numpy()
            for start in range(0, count, chunk):
                end = min(count, start + chunk)
                seen = end if causal else _reach(slot_positions, where[start:end])
                rows = size * (end - start)
                logits = scratch[: rows * seen].view(rows, seen)
                torch.mm(queries[b, h, :, start:end].float().reshape(rows, -1), key[:seen].t(), out=logits)
                compiled.softmax_columns(
                    logits.numpy(), slot_positions[:seen], where[start:end].numpy(), start if causal else -1, numbers, sinks[h],
                    merge, mass[b, h, :seen].numpy(), factors.numpy(),
                )  # fmt: skip
                mixed = torch.mm(logits, value[:seen]).mul_(factors[:rows, None])
                out[b, h, :, start:end] = mixed.unflatten(0, (size, -1))
    return out, mass


def _chunk(group: int, slots: int) -> int:
    """Queries at a time: as many as keep their logits in the processor's caches, so that each is read from there."""
    fitting = _cache_bytes() // (4 * group * max(1, slots))
    return max(16, min(256, fitting // 16 * 16))


def _reach(positions: np.ndarray, query_positions: Tensor) -> int:
    """How many slots from the first one on the queries can see any of."""
    seen = (positions <= int(query_positions.max())).nonzero()[0]
    return int(seen[-1]) + 1 if len(seen) else 1


@functools.cache
def _cache_bytes() -> int:
    """A quarter of the cache that cores share, or twice a core's own where that is more; 4 MiB where neither is known."""
    sizes = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        with contextlib.suppress(OSError, ValueError):
            sizes[int((index / "level").read_text())] = 1024 * int((index / "size").read_text().strip().removesuffix("K"))
    return max(2 * sizes.get(2, 0), sizes.get(3, 0) // 4, 2**22)


def _numbers(tensor: Tensor) -> np.ndarray:
    """The storage of a float tensor as an array: bfloat16 as uint16, float16 as int16."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    return tensor.view(torch.uint16 if tensor.dtype == torch.bfloat16 else torch.int16).numpy()


@functools.cache
def _none(kind: Any, dims: int) -> np.ndarray:
    return np.zeros((0,) * dims, dtype=kind)


def _plane(tensor: Tensor | None, kind: Any, dims: int = 1) -> np.ndarray:
    """An optional array; nothing at all stands for None."""
    if tensor is None:
        return _none(kind, dims)
    array = tensor.contiguous().numpy()
    return array if array.dtype == kind else array.astype(kind)


def _sinks(rule: AttentionRule, heads: int, group: int) -> np.ndarray:
    if rule.sinks is None:
        return _no_sinks(heads, group)
    return rule.sinks.detach().float().contiguous().numpy()


@functools.cache
def _no_sinks(heads: int, group: int) -> np.ndarray:
    return np.full((heads, group), -np.inf, dtype=np.float32)


def _attention_numbers(rule: AttentionRule) -> tuple[np.float32, np.float32, int]:
    """Scaling, soft-cap (0: none), window (0: none)."""
    return np.float32(rule.scaling), np.float32(rule.softcap or 0), rule.window or 0


def _threads() -> None:
    """As many threads as torch has."""
    _start_threads()
    wanted = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if numba.get_num_threads() != wanted:
        numba.set_num_threads(wanted)


@functools.cache
def _start_threads() -> None:
    """Let numba's threads sleep between kernels: they would spin, and take cores from torch's. OpenMP asks when it loads."""
    chosen = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = chosen or "passive"
    try:
        numba.set_num_threads(numba.get_num_threads())
    finally:
        if chosen is None:
            del os.environ["OMP_WAIT_POLICY"]
