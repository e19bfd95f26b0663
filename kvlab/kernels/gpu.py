"""Kernels for GPUs, in Triton: the three functions of the processor's back end, with the same arguments and results.

float32, bfloat16 and float16 are read as they are stored; sums are in float32, and softmax weights are not rounded to the
storage's type before they meet the values. Nothing waits for the device: lengths live there, and how often a kernel is
launched depends on shapes alone, so calls can be captured in CUDA graphs. With TRITON_INTERPRET=1 before Triton's first
import, all of it runs on tensors of the processor, slowly, for tests.

What it doesn't know: policies, models, positions' rotation, and which numbers suit a GPU best (tile sizes are guesses that
fit the shared memory of any GPU since 2020). A query that sees nothing at all gets 0, not the mean of all values.
"""

from __future__ import annotations

import functools
import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlab.kernels import contract
from kvlab.kernels.contract import Arrivals, Decay, Limits, Marks, ScanRule, Slots, check_given
from kvlab.kernels.gpu_scan import scan_units
from kvlab.kernels.gpu_tiles import (
    ALL,
    ENTER,
    FIRST,
    INFINITY,
    INTERPRETED,
    MAX,
    MEAN,
    NONE,
    SETTLE,
    Bits,
    attend_tiles,
    denominator,
    load_tile,
    logits_of,
    sink_of,
    splits_of,
    visible,
)
from kvlab.kernels.reference import AttentionRule
from kvlab.shapes import Attention, Keys, Outputs, Positions, Queries, QueryPositions, Scores, Values

STEP_BYTES = 2**22
"""Keys and values of a unit's rows beyond which many tokens are taken one launch after the other, each over the whole GPU;
below, one program takes a unit through all its tokens. A guess: where a launch's cost meets one processor's bandwidth."""

# --------------------------------------------------------------------------------------------- attention over slots


@triton.jit
@no_type_check
def _attend_part(
    queries, query_positions, keys, values, positions, offsets, lengths, fade, tops, totals, parts, found, scaling, count,
    widest, splits, HEADS: tl.constexpr, GROUP: tl.constexpr, KEEP: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HD: tl.constexpr, VD: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One row, one share of its tokens, BM of its group * count queries: what `_combine` needs of them."""
    row, split = tl.program_id(0), tl.program_id(1)
    lines = GROUP * count
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    real = m < lines
    line = row.to(tl.int64) * lines + m
    now = tl.load(query_positions + (row // HEADS) * count + m % count, mask=real, other=-1).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, splits), BN) * BN  # of this row's length, so that ragged rows use all programs too
    low = split * share
    top, total, mixed = attend_tiles(
        load_tile(queries, line, real, HD, BD), now, keys, values, positions, row, tl.load(offsets + row), low,
        tl.minimum(length, low + share), scaling, fade, found, line * widest, real, KEEP, WINDOW, SOFTCAP, HD, VD, BD, BV, BM,
        BN,
    )  # fmt: skip
    place = line * splits + split
    tl.store(tops + place, top, mask=real)
    tl.store(totals + place, total, mask=real)
    d = tl.arange(0, BV)
    tl.store(parts + place[:, None] * VD + d[None, :], mixed, mask=real[:, None] & (d < VD)[None, :])


@triton.jit
@no_type_check
def _combine(
    tops, totals, parts, found, out, query_positions, lengths, sinks, count, widest, splits, HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEEP: tl.constexpr, VD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One query of one head: the output from all shares, by the first program; a share of its weights, by each."""
    line, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lines = GROUP * count
    row, m = line // lines, line % lines
    now = tl.load(query_positions + (row // HEADS) * count + m % count)
    s = tl.arange(0, BS)
    top_s = tl.load(tops + line * splits + s, mask=s < splits, other=-INFINITY)
    top = tl.max(top_s, 0)
    less = tl.exp(top_s - tl.where(top == -INFINITY, 0.0, top))
    total = tl.sum(tl.load(totals + line * splits + s, mask=s < splits, other=0.0) * less, 0)
    head = (row % HEADS) * GROUP + m // count
    shift, factor = denominator(top, total, sink_of(sinks, head, head >= 0))
    factor = tl.where(now >= 0, factor, 0.0)
    if split == 0:
        part = load_tile(parts, line * splits + s, s < splits, VD, BV)
        mixed = tl.sum(part * less[:, None], 0) * factor * tl.exp(top - shift)
        d = tl.arange(0, BV)
        tl.store(out + line * VD + d, mixed, mask=d < VD)
    if KEEP:
        length = tl.load(lengths + row)
        share = tl.cdiv(widest, splits)
        for i in range(split * share, tl.minimum(widest, (split + 1) * share), BN):
            n = i + tl.arange(0, BN)
            inside = (n < widest) & (n < (split + 1) * share)
            logits = tl.load(found + line * widest + n, mask=inside & (n < length), other=-INFINITY)
            tl.store(found + line * widest + n, tl.exp(logits - shift) * factor, mask=inside)


# ---------------------------------------------------------------------------------------------------------- prefill


@triton.jit
@no_type_check
def _forward(
    queries, query_positions, keys, values, positions, sinks, out, lse, scaling, count, slots, HEADS: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HD: tl.constexpr, VD: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM queries of one head: outputs, and the logarithm of the softmax's denominator."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first, where blocks differ
    head = tl.program_id(1)
    row, g = head // GROUP, head % GROUP
    t = block * BM + tl.arange(0, BM)
    real = t < count
    line = head.to(tl.int64) * count + t
    now = tl.load(query_positions + (row // HEADS) * count + t, mask=real, other=-1).to(tl.int32)
    low, high = 0, slots
    if CAUSAL:  # slots are the queries' own tokens: none after the block's last query, none long before its first
        high = tl.minimum(slots, (block + 1) * BM)
        if WINDOW > 0:
            low = tl.maximum(0, block * BM - WINDOW + 1) // BN * BN
    start = row.to(tl.int64) * slots
    top, total, mixed = attend_tiles(
        load_tile(queries, line, real, HD, BD), now, keys, values, positions, row, start, low, high, scaling, None, lse, line,
        real, False, WINDOW, SOFTCAP, HD, VD, BD, BV, BM, BN,
    )  # fmt: skip
    head_of_group = (row % HEADS) * GROUP + g + tl.zeros((BM,), tl.int32)
    shift, factor = denominator(top, total, sink_of(sinks, head_of_group, real))
    e = tl.arange(0, BV)
    mixed = mixed * (factor * tl.exp(top - shift))[:, None]
    tl.store(out + line[:, None] * VD + e[None, :], mixed, mask=real[:, None] & (e < VD)[None, :])
    tl.store(lse + line, tl.where(factor > 0, shift - tl.log(tl.where(factor > 0, factor, 1.0)), INFINITY), mask=real)


@triton.jit
@no_type_check
def _mass(
    queries, query_positions, keys, positions, lse, mass, scaling, count, slots, HEADS: tl.constexpr, GROUP: tl.constexpr,
    MERGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HD: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BN slots of one row: the attention that they receive from all queries, always added up in the same order."""
    block, row = tl.program_id(0), tl.program_id(1)
    n = block * BN + tl.arange(0, BN)
    place = row.to(tl.int64) * slots + n
    position = tl.load(positions + place, mask=n < slots, other=-1).to(tl.int32)
    key = load_tile(keys, place, n < slots, HD, BD)
    total = tl.zeros((BN,), tl.float32)
    low, high = 0, count
    if CAUSAL:
        low = block * BN // BM * BM
        if WINDOW > 0:
            high = tl.minimum(count, (block + 1) * BN + WINDOW)
    for i in range(low, high, BM):
        t = i + tl.arange(0, BM)
        now = tl.load(query_positions + (row // HEADS) * count + t, mask=t < count, other=-1).to(tl.int32)
        seen = visible(position[None, :], now[:, None], WINDOW)
        merged = tl.zeros((BM, BN), tl.float32)
        for g in range(1 if MERGE == FIRST else GROUP):
            line = (row.to(tl.int64) * GROUP + g) * count + t
            logits = logits_of(load_tile(queries, line, t < count, HD, BD), key, scaling, SOFTCAP)
            scale = tl.load(lse + line, mask=t < count, other=0.0)
            weights = tl.where(seen, tl.exp(logits - scale[:, None]), 0.0)
            merged = tl.maximum(merged, weights) if MERGE == MAX else merged + weights
        total += tl.sum(merged, 0)
    if MERGE == MEAN:
        total = total / GROUP
    tl.store(mass + place, total, mask=n < slots)


# ------------------------------------------------------------------------------------------------------ public calls


@functools.cache
def _dims(head_dim: int, value_dim: int) -> dict[str, int]:
    padded = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    return dict(zip(("HD", "VD", "BD", "BV"), (head_dim, value_dim, *padded), strict=True))


def _tiles(queries: int, dims: dict[str, int], dtype: torch.dtype) -> dict[str, int]:
    """BM: matrix units want 16 at least. BN: a tile of keys or of values takes 16 KiB of shared memory at most."""
    if INTERPRETED.value:
        return {"BM": 16, "BN": 16}
    most = 64 if dtype.itemsize == 2 else 32
    return {
        "BM": max(16, min(most, triton.next_power_of_2(queries))),
        "BN": max(16, min(128, 2**14 // (max(dims["BD"], dims["BV"]) * dtype.itemsize))),
    }


def _sinks(rule: AttentionRule) -> Tensor | None:
    return None if rule.sinks is None else rule.sinks.detach().float().contiguous()


def _fade(rule: AttentionRule) -> tuple[float, float, int, Tensor] | None:
    fade = rule.fade
    return None if fade is None else (math.log(fade.rate), math.log(fade.floor), fade.num_sink, fade.grace.contiguous())


def _decay(decay: Decay | None) -> tuple[float, ...] | None:
    if decay is None:
        return None
    return math.log(decay.rate), *map(float, (decay.floor, decay.power, decay.value_weight, decay.norm_weight))


def _bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.contiguous().view(torch.uint8)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _words(bits: Tensor | None) -> Tensor | None:
    """Four bytes at a time where they come to whole words."""
    return bits if bits is None or bits.shape[-1] % 4 else bits.contiguous().view(torch.int32)


def decode_attend(
    queries: Queries, slots: Slots, query_positions: QueryPositions, attention: AttentionRule, *, want_weights: bool = False
) -> tuple[Outputs, Attention | None]:
    """See `dispatch.DecodeAttend`."""
    batch, heads, group, count, _ = queries.shape
    rows, lines, widest = batch * heads, group * count, slots.widest
    dims = _dims(queries.shape[-1], slots.values.shape[-1])
    queries, query_positions, sinks = queries.contiguous(), query_positions.contiguous(), _sinks(attention)
    tiles = _tiles(lines, dims, slots.keys.dtype)
    blocks = triton.cdiv(lines, tiles["BM"])
    splits = splits_of(widest, rows * blocks, queries.device)
    new = functools.partial(torch.empty, dtype=torch.float32, device=queries.device)
    tops, totals, parts = new(rows, lines, splits), new(rows, lines, splits), new(rows, lines, splits, dims["VD"])
    out = new(batch, heads, group, count, dims["VD"])
    weights = new(batch, heads, group, count, widest) if want_weights else tops
    with torch.cuda.device_of(queries):
        _attend_part[(rows, splits, blocks)](
            queries, query_positions, slots.keys, slots.values, slots.positions, slots.offsets, slots.lengths,
            _fade(attention), tops, totals, parts, weights, float(attention.scaling), count, widest, splits, HEADS=heads,
            GROUP=group, KEEP=want_weights, WINDOW=attention.window or 0, SOFTCAP=float(attention.softcap or 0), **dims,
            **tiles, num_stages=2,
        )  # fmt: skip
        _combine[(rows * lines, splits if want_weights else 1)](
            tops, totals, parts, weights, out, query_positions, slots.lengths, sinks, count, widest, splits, HEADS=heads,
            GROUP=group, KEEP=want_weights, VD=dims["VD"], BV=dims["BV"], BS=triton.next_power_of_2(splits),
            BN=16 if INTERPRETED.value else 512,
        )  # fmt: skip
    return out, weights if want_weights else None


def _bits(rule: ScanRule, words: Tensor | None, arrivals: Arrivals) -> Bits:
    marks, probes = rule.marks or Marks(1), 0 if arrivals.probes is None else arrivals.probes.shape[2]
    held, size = (1, 8) if words is None else (words.shape[-1], 8 * words.element_size())
    return Bits(held, size, probes, min(marks.window, NONE.value), marks.high, marks.of == "held")


def evict_scan(
    queries: Queries, arrivals: Arrivals, slots: Slots, limits: Limits, attention: AttentionRule, rule: ScanRule
) -> Outputs:
    """See `dispatch.EvictScan`."""
    check_given(rule, arrivals, limits)
    batch, heads, group, tokens, _ = queries.shape
    unit, widest = heads if rule.coupled else 1, slots.widest
    units = batch * heads // unit
    dims = _dims(queries.shape[-1], slots.values.shape[-1])
    queries, places, sinks = queries.contiguous(), arrivals.positions.to(torch.int32).contiguous(), _sinks(attention)
    value, norm = (
        None if part is None else part.expand(batch, heads, tokens).contiguous() for part in (arrivals.value, arrivals.norm)
    )
    planes = (
        slots.keys, slots.values, slots.positions, slots.value, _bytes(slots.special), slots.source, slots.norm, slots.bits,
    )  # fmt: skip
    assert all(plane is None or plane.is_contiguous() for plane in planes), "a copy would be changed, not the slots"
    planes = (*planes[:7], _words(slots.bits))
    new = (
        arrivals.keys.contiguous(), arrivals.values.contiguous(), places, value, _bytes(arrivals.special),
        _contiguous(arrivals.source), norm, *(_words(_contiguous(bits)) for bits in (arrivals.bits, arrivals.probes)),
    )  # fmt: skip
    bounds = tuple(map(_contiguous, (limits.limit, limits.target, limits.recent, limits.grace)))
    bits = _bits(rule, planes[7], arrivals)
    how = {
        "OBSERVE": contract.OBSERVE.index(rule.observe), "ORDER": contract.ORDER.index(rule.order),
        "MERGE": contract.GROUPS.index(rule.group), "UNIT": unit, "BITS": bits, "BW": triton.next_power_of_2(bits.words),
    }  # fmt: skip
    scratch = functools.partial(torch.zeros, dtype=torch.float32, device=queries.device)
    last = scratch(units if rule.observe == "last" else 0, widest)
    by = scratch(units if rule.order in ("count", "distance", "decayed") else 0, widest)
    fade, decay = _fade(attention), _decay(rule.decay)
    seen = rule.observe != "nothing"
    bytes_read = unit * widest * (dims["HD"] * slots.keys.element_size() + dims["VD"] * slots.values.element_size())

    def scan(stage: Any, begin: int, end: int, found: Tensor, out: Tensor) -> None:
        with torch.cuda.device_of(queries):
            scan_units[(units,)](
                queries, planes, new, slots.offsets, slots.lengths, bounds, sinks, fade, decay, last, by, found, out,
                float(attention.scaling), begin, end, tokens, limits.num_sink, widest, STAGE=stage.value, HEADS=heads,
                GROUP=group, **how, BEFORE=limits.before, WINDOW=attention.window or 0,
                SOFTCAP=float(attention.softcap or 0), **dims, **_tiles(group, dims, slots.keys.dtype),
                BS=32 if INTERPRETED.value else 1024, num_stages=2,
            )  # fmt: skip

    if dims["HD"] == 0 or (tokens > 1 and bytes_read <= STEP_BYTES):
        assert dims["HD"] > 0 or not seen, "nothing attends, so nothing can be observed"
        out = scratch(batch, heads, group, tokens, dims["VD"])
        scan(ALL, 0, tokens, torch.empty(batch * heads if seen else 0, group, widest, device=queries.device), out)
        return out
    outputs = []
    for t in range(tokens):
        scan(ENTER, t, t + 1, last, last)
        out, weights = decode_attend(queries[..., t : t + 1, :], slots, places[:, t : t + 1], attention, want_weights=seen)
        outputs.append(out)
        if seen or not limits.before:
            scan(SETTLE, t, t + 1, last if weights is None else weights, last)
    return outputs[0] if tokens == 1 else torch.cat(outputs, 3)


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

    Two passes over slots: outputs with each query's denominator, then the weights once more, added up slot by slot.
    """
    assert attention.fade is None, "nothing may fade: this is for prompts"
    batch, heads, size, count, _ = queries.shape
    slots, dims = keys.shape[2], _dims(queries.shape[-1], values.shape[-1])
    queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
    query_positions, positions, sinks = query_positions.contiguous(), positions.contiguous(), _sinks(attention)
    new = functools.partial(torch.empty, dtype=torch.float32, device=queries.device)
    out, lse, mass = new(batch, heads, size, count, dims["VD"]), new(batch, heads, size, count), new(batch, heads, slots)
    tiles = _tiles(count, dims, keys.dtype)
    rule: dict[str, Any] = {
        "HEADS": heads, "GROUP": size, "CAUSAL": causal, "WINDOW": attention.window or 0,
        "SOFTCAP": float(attention.softcap or 0), **tiles, "num_stages": 2,
    }  # fmt: skip
    with torch.cuda.device_of(queries):
        _forward[(triton.cdiv(count, tiles["BM"]), batch * heads * size)](
            queries, query_positions, keys, values, positions, sinks, out, lse, float(attention.scaling), count, slots, **dims,
            **rule,
        )  # fmt: skip
        if group is None:
            return out, mass.zero_()
        _mass[(triton.cdiv(slots, tiles["BN"]), batch * heads)](
            queries, query_positions, keys, positions, lse, mass, float(attention.scaling), count, slots,
            MERGE=contract.GROUPS.index(group), HD=dims["HD"], BD=dims["BD"], **rule,
        )  # fmt: skip
    return out, mass
