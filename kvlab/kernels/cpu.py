"""Kernels for processors: torch's matrix products, and what numba compiles (`compiled.py`) for everything between them.

float32, bfloat16 and float16 come in, float32 goes out. The first use on a machine compiles for some seconds, later ones load
what was compiled from disk.
"""

from __future__ import annotations

import contextlib
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab.kernels import compiled, workers
from kvlab.kernels.contract import GROUPS, HAIR, OBSERVE, ORDER, Arrivals, Decay, Limits, Marks, ScanRule, Slots, check_given
from kvlab.kernels.reference import AttentionRule
from kvlab.shapes import Attention, Keys, Outputs, Positions, Queries, QueryPositions, Scores, Values

LEAST_CHUNK = 16
"""Queries at a time, at least: matrix products of fewer are slow."""


def evict_scan(
    queries: Queries, arrivals: Arrivals, slots: Slots, limits: Limits, attention: AttentionRule, rule: ScanRule
) -> Outputs:
    """See `dispatch.EvictScan`."""
    new = arrivals
    check_given(rule, arrivals, limits)
    batch, heads, group, tokens, head_dim = queries.shape
    rows, value_dim = batch * heads, new.values.shape[-1]
    out = _empty(rows, group, tokens, value_dim)
    planes, offsets, lengths = _slot_arrays(slots)
    arguments = (
        _numbers(queries).reshape(rows, group, tokens, head_dim),
        _numbers(new.keys, slots.keys.dtype).reshape(rows, tokens, head_dim),
        _numbers(new.values, slots.values.dtype).reshape(rows, tokens, value_dim),
        _plane(new.positions, np.int64),  # one type, since each is compiled for by itself
        _plane(None if new.value is None else new.value.expand(batch, heads, tokens).flatten(0, 1), np.float32, 2),
        _plane(new.special, np.bool_, 2),
        _plane(None if new.source is None else new.source.flatten(0, 1), np.int32, 2),
        _plane(None if new.norm is None else new.norm.expand(batch, heads, tokens).flatten(0, 1), np.float32, 2),
        _none(np.uint8, 3) if new.bits is None else _array(new.bits.flatten(0, 1)),
        _none(np.uint8, 4) if new.probes is None else _array(new.probes.flatten(0, 1)),
        planes,
        offsets,
        lengths,
        *_limit_arrays(limits),
        _sinks(attention, heads, group),
        _attention_numbers(attention),
        *_fade(attention),
        slots.widest,
        limits.num_sink,
        limits.before,
        *_rule_numbers(rule),
        rule.coupled,
        out.numpy(),
    )
    workers.over_rows(compiled.scan, batch if rule.coupled else rows, arguments)
    return out.view(batch, heads, group, tokens, value_dim)


def decode_attend(
    queries: Queries, slots: Slots, query_positions: QueryPositions, attention: AttentionRule, *, want_weights: bool = False
) -> tuple[Outputs, Attention | None]:
    """See `dispatch.DecodeAttend`."""
    batch, heads, group, count, _ = queries.shape
    out = _empty(batch * heads, group, count, slots.values.shape[-1])
    weights = _empty(batch * heads, group, count, slots.widest if want_weights else 0).zero_()
    planes, offsets, lengths = _slot_arrays(slots)
    arguments = (
        _numbers(queries.flatten(0, 1)),
        *planes[:3],
        offsets,
        lengths,
        query_positions.contiguous().numpy(),
        _sinks(attention, heads, group),
        _attention_numbers(attention),
        *_fade(attention),
        slots.widest,
        out.numpy(),
        weights.numpy(),
    )
    workers.over_rows(compiled.decode, batch * heads, arguments)
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
    """See `dispatch.PrefillStats`; both results in float32.

    A chunk of one KV head's queries at a time, so that what is between two matrix products stays in a core's cache; each
    thread has chunks of its own.
    """
    batch, heads, size, count, _ = queries.shape
    slots = keys.shape[2]
    assert not causal or slots == count, "causal: slots and queries are the same tokens"
    assert attention.fade is None, "nothing may fade: this is for prompts"
    out = _empty(batch, heads, size, count, values.shape[-1])
    parts = min(workers.threads(), -(-count // LEAST_CHUNK))
    chunk = _chunk(size, slots, parts)
    mass = _empty(parts, batch, heads, slots).zero_()
    sinks, numbers = _sinks(attention, heads, size), _attention_numbers(attention)
    merge = -1 if group is None else GROUPS.index(group)

    def work(part: int) -> None:
        scratch, factors = _empty(size * chunk * slots), _empty(size * chunk)
        for b, h in np.ndindex(batch, heads):
            where, slot_positions = query_positions[b].contiguous(), _plane(positions[b, h], np.int64)
            key, value = keys[b, h].float(), values[b, h].float()
            for start in range(part * chunk, count, parts * chunk):
                end = min(count, start + chunk)
                seen = end if causal else _reach(slot_positions, where[start:end])
                rows = size * (end - start)
                logits = scratch[: rows * seen].view(rows, seen)
                torch.mm(queries[b, h, :, start:end].float().reshape(rows, -1), key[:seen].t(), out=logits)
                compiled.softmax_columns(
                    logits.numpy(), slot_positions[:seen], where[start:end].numpy(), start if causal else -1, numbers, sinks[h],
                    merge, mass[part, b, h, :seen].numpy(), factors.numpy(),
                )  # fmt: skip
                mixed = torch.mm(logits, value[:seen]).mul_(factors[:rows, None])
                out[b, h, :, start:end] = mixed.unflatten(0, (size, -1))

    workers.share(work, parts, here=False)
    return out, mass[0] if parts == 1 else mass.sum(0)


def _chunk(group: int, slots: int, threads: int) -> int:
    """Queries at a time: as many as keep their logits in a core's part of the processor's caches."""
    fitting = _cache_bytes() // (4 * group * max(1, slots) * threads)
    return max(LEAST_CHUNK, min(128, fitting // LEAST_CHUNK * LEAST_CHUNK))


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


def _empty(*shape: int) -> Tensor:
    """Whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _numbers(tensor: Tensor, dtype: torch.dtype | None = None) -> np.ndarray:
    """A float tensor as a contiguous array, in another type if given: bfloat16 as uint16, float16 as int16."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if dtype is not None and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    if tensor.dtype != torch.float32:
        tensor = tensor.contiguous().view(torch.uint16 if tensor.dtype == torch.bfloat16 else torch.int16)
    return np.ascontiguousarray(tensor.numpy())


def _slot_arrays(slots: Slots) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """Planes, offsets and lengths. Kernels write into them, so none may be another's copy."""
    if "arrays" not in slots.kept:
        for plane in (slots.value, slots.norm):
            assert plane is None or plane.dtype == torch.float32, "written in place, so this can't be another's copy"
        planes = (
            _numbers(slots.keys), _numbers(slots.values), slots.positions.numpy(), _plane(slots.value, np.float32),
            _plane(slots.special, np.bool_), _plane(slots.source, np.int32), _plane(slots.norm, np.float32),
            _none(np.uint8, 2) if slots.bits is None else slots.bits.numpy(),
        )  # fmt: skip
        slots.kept["arrays"] = planes, slots.offsets.numpy(), slots.lengths.numpy()
    return slots.kept["arrays"]


def _limit_arrays(limits: Limits) -> tuple[np.ndarray, ...]:
    """limit, target, recent, grace: (rows,) each, no grace where there is none."""
    if "arrays" not in limits.kept:
        parts = (limits.limit, limits.target, limits.recent, limits.grace)
        limits.kept["arrays"] = tuple(
            _none(np.int64, 1) if part is None else part.contiguous().view(-1).numpy() for part in parts
        )
    return limits.kept["arrays"]


@functools.cache
def _rule_numbers(rule: ScanRule) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """(observe, order, group), (window, high, of held, share of the bound), (slope, floor, power, two weights)."""
    marks, decay, single = rule.marks or Marks(1), rule.decay or Decay(1, 1, 1, 0, 0), np.float32
    return (
        (OBSERVE.index(rule.observe), ORDER.index(rule.order), GROUPS.index(rule.group)),
        (marks.window, marks.high, marks.of == "held", single(1 - HAIR)),
        (
            single(math.log(decay.rate)), single(decay.floor), single(decay.power), single(decay.value_weight),
            single(decay.norm_weight),
        ),
    )  # fmt: skip


@functools.cache
def _none(kind: Any, dims: int) -> np.ndarray:
    return np.zeros((0,) * dims, dtype=kind)


def _plane(tensor: Tensor | None, kind: Any, dims: int = 1) -> np.ndarray:
    """An optional array; nothing at all stands for None."""
    if tensor is None:
        return _none(kind, dims)
    array = tensor.contiguous().numpy()
    return array if array.dtype == kind else array.astype(kind)


def _array(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.numpy())


def _fade(rule: AttentionRule) -> tuple[tuple[np.float32, np.float32, int], np.ndarray]:
    """(slope, floor, sinks), slope 0 where nothing fades, and the grace of each row."""
    fade = rule.fade
    if fade is None:
        return (np.float32(0), np.float32(0), 0), _none(np.int64, 1)
    numbers = np.float32(math.log(fade.rate)), np.float32(math.log(fade.floor)), fade.num_sink
    return numbers, fade.grace.contiguous().view(-1).numpy()


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
