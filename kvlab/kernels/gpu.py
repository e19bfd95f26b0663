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
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlab.kernels import contract
from kvlab.kernels.contract import Arrivals, Decay, Limits, Marks, ScanRule, Slots, check_given
from kvlab.kernels.reference import AttentionRule
from kvlab.shapes import Attention, Keys, Outputs, Positions, Queries, QueryPositions, Scores, Values

STEP_BYTES = 2**22
"""Keys and values of a unit's rows beyond which many tokens are taken one launch after the other, each over the whole GPU;
below, one program takes a unit through all its tokens. A guess: where a launch's cost meets one processor's bandwidth."""
MAX_SPLITS = 64

# The order of contract.OBSERVE, contract.ORDER and contract.GROUPS; constexpr, as kernels may read no other globals.
NOTHING, SUM, LAST, MARKS = (tl.constexpr(place) for place in range(4))
AGE, VALUE, RANKED, COUNT, DISTANCE, DECAYED = (tl.constexpr(place) for place in range(6))
MEAN, ADD, MAX, FIRST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
DEAD, NORMAL, RECENT, SPECIAL, SINK = (tl.constexpr(tier) for tier in range(5))
NONE = tl.constexpr(2**30)  # beyond all slots and positions
INFINITY = tl.constexpr(float("inf"))
BELOW = tl.constexpr(1 - contract.HAIR)
ALL, ENTER, SETTLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # stages of `_scan`


class Bits(NamedTuple):
    """A token's bits: `words` numbers of `size` bits; how many probes they are compared with; details of `Marks`."""

    words: int
    size: int
    probes: int
    ring: int
    high: bool
    of_held: bool


# Names in kernels: HD, VD numbers of a key and of a value; BD, BV those rounded up to powers of two; BM, BN queries and slots
# in a tile. GROUP query heads read each of HEADS KV heads. Tuples, with None for what there isn't: `planes`: keys, values,
# positions, value, special, source, norm, bits of Slots; `new`: the same of Arrivals, and probes; `limits`: limit, target,
# recent, grace; `fade`: slope, floor, sinks, graces, the first two as logarithms; `decay`: slope, floor, power, two weights.
# `no_type_check` keeps import hooks that check types from wrapping what Triton must read.

# ------------------------------------------------------------------------------------------------- tiles of attention


@triton.jit
@no_type_check
def _visible(positions, now, WINDOW: tl.constexpr):
    """Which slots queries see. Shapes broadcast; empty slots and queries that don't exist are at -1."""
    seen = (positions >= 0) & (positions <= now)
    if WINDOW > 0:
        seen = seen & (positions > now - WINDOW)
    return seen


INTERPRETED = tl.constexpr(not isinstance(_visible, triton.JITFunction))


@triton.jit
@no_type_check
def _dot(a, b):
    """a @ b, summed in float32. The interpreter would multiply bfloat16's bits."""
    if INTERPRETED or a.dtype != b.dtype:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


@triton.jit
@no_type_check
def _logits(queries, keys, scaling, SOFTCAP: tl.constexpr):
    """Scaled, capped dot products in float32: (BM, BD) and (BN, BD) give (BM, BN)."""
    x = _dot(queries, tl.trans(keys)) * scaling
    if SOFTCAP > 0:  # tanh by way of exp(-2|x|), so that nothing overflows
        e = tl.exp(-2.0 * tl.abs(x / SOFTCAP))
        size = SOFTCAP * (1.0 - e) / (1.0 + e)
        x = tl.where(x > 0, size, -size)
    return x


@triton.jit
@no_type_check
def _grace(graces, row):
    """A row's grace; what is beyond all positions still is in 32 bits."""
    return tl.minimum(tl.load(graces + row), NONE).to(tl.int32)


@triton.jit
@no_type_check
def _faded(logits, position, now, grace, slope, floor, num_sink):
    """Logits of old tokens, lowered: slots' positions and queries' places broadcast."""
    over = tl.maximum(now - position - grace, 0).to(tl.float32)
    return logits + tl.where(position >= num_sink, tl.maximum(slope * over, floor), 0.0)


@triton.jit
@no_type_check
def _mix(weights, values):
    """weights @ values, (BM, BN) float32 and (BN, BV), in float32."""
    if values.dtype == tl.float32:
        mixed = _dot(weights, values)
    else:  # two halves of a weight lose little that float32 would keep, and both use matrix units
        high = weights.to(values.dtype)
        low = (weights - high.to(tl.float32)).to(values.dtype)
        mixed = _dot(high, values) + _dot(low, values)
    return mixed


@triton.jit
@no_type_check
def _load(pointer, lines, inside, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Vectors of DIM numbers, one a line; 0 outside. (lines, BLOCK)"""
    d = tl.arange(0, BLOCK)
    return tl.load(pointer + lines[:, None] * DIM + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
@no_type_check
def _attend(
    queries, now, keys, values, positions, row, start, low, high, scaling, fade, found, lines, real,
    KEEP: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HD: tl.constexpr, VD: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Online softmax of (BM, BD) queries at `now` over slots start + low ... start + high - 1 of a row.

    Returns the largest logit (-inf if nothing is seen), the sum of exp(logit - largest), and that sum times the values. With
    KEEP logits go to found[lines + slot - start], -inf for what isn't seen.
    """
    top = tl.full((BM,), -INFINITY, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, BV), tl.float32)
    grace = 0
    if fade is not None:
        grace = _grace(fade[3], row)
    for i in range(low, high, BN):
        n = i + tl.arange(0, BN)
        inside = n < high
        position = tl.load(positions + start + n, mask=inside, other=-1).to(tl.int32)
        logits = _logits(queries, _load(keys, start + n, inside, HD, BD), scaling, SOFTCAP)
        if fade is not None:
            logits = _faded(logits, position[None, :], now[:, None], grace, fade[0], fade[1], fade[2])
        logits = tl.where(_visible(position[None, :], now[:, None], WINDOW), logits, -INFINITY)
        if KEEP:
            tl.store(found + lines[:, None] + n[None, :], logits, mask=real[:, None] & inside[None, :])
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == -INFINITY, 0.0, new_top)
        weights = tl.exp(logits - shift[:, None])
        less = tl.exp(top - shift)
        total = total * less + tl.sum(weights, 1)
        mixed = mixed * less[:, None] + _mix(weights, _load(values, start + n, inside, VD, BV))
        top = new_top
    return top, total, mixed


@triton.jit
@no_type_check
def _denominator(top, total, sink):
    """With a sink, (shift, factor) such that exp(logit - shift) * factor are the weights; a factor of 0 if nothing is seen."""
    most = tl.maximum(top, sink)
    shift = tl.where(most == -INFINITY, 0.0, most)
    whole = total * tl.exp(top - shift) + tl.exp(sink - shift)
    return shift, tl.where(total > 0, 1.0 / tl.where(whole > 0, whole, 1.0), 0.0)


@triton.jit
@no_type_check
def _sink(sinks, heads, real):
    """The sink's logit of each head, -inf where there is none."""
    logit = tl.where(heads >= 0, -INFINITY, -INFINITY)
    if sinks is not None:
        logit = tl.load(sinks + heads, mask=real, other=-INFINITY)
    return logit.to(tl.float32)


@triton.jit
@no_type_check
def _merge(weights, GROUP: tl.constexpr, MERGE: tl.constexpr):
    """Query heads' weights (BM, ...) merged; lines beyond GROUP hold 0."""
    if MERGE == MAX:
        merged = tl.max(weights, 0)
    elif MERGE == FIRST:
        merged = tl.sum(tl.where(tl.arange(0, weights.shape[0])[:, None] == 0, weights, 0.0), 0)
    else:
        merged = tl.sum(weights, 0)
        if MERGE == MEAN:
            merged = merged / GROUP
    return merged


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
    top, total, mixed = _attend(
        _load(queries, line, real, HD, BD), now, keys, values, positions, row, tl.load(offsets + row), low,
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
    shift, factor = _denominator(top, total, _sink(sinks, head, head >= 0))
    factor = tl.where(now >= 0, factor, 0.0)
    if split == 0:
        part = _load(parts, line * splits + s, s < splits, VD, BV)
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


# ---------------------------------------------------------------------------------------------- a unit's decisions


@triton.jit
@no_type_check
def _finite(x):
    return (x == x) & (tl.abs(x) < INFINITY)


@triton.jit
@no_type_check
def _held_values(first, n, inside, value, offsets, last, LAST_VALUE: tl.constexpr, UNIT: tl.constexpr):
    """The values that decide, of slots n of a unit: the mean over its rows."""
    held = tl.zeros(n.shape, tl.float32)
    if LAST_VALUE:
        held = tl.load(last + n, mask=inside, other=0.0)
    elif value is not None:
        for i in range(UNIT):
            held += tl.load(value + tl.load(offsets + first + i) + n, mask=inside, other=0.0).to(tl.float32) / UNIT
    return held


@triton.jit
@no_type_check
def _ones(words):
    """How many bits of each word are set; int32, or bytes."""
    x = words.to(tl.int32)
    x = (x & 0x55555555) + ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


@triton.jit
@no_type_check
def _count_bits(
    by, start, first, length, t, tokens, bits, probes, ORDER: tl.constexpr, BITS: tl.constexpr, BN: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Into `by`: how many bits of each slot are set (negated if fewer are better), or minus the distances from all probes."""
    for i in range(0, length, BN):
        n = i + tl.arange(0, BN)
        total = tl.zeros((BN,), tl.int32)
        for j in range(0, BITS.words, WIDE):
            w = j + tl.arange(0, WIDE)
            there = (n < length)[:, None] & (w < BITS.words)[None, :]
            held = tl.load(bits + (start + n)[:, None] * BITS.words + w[None, :], mask=there, other=0)
            if ORDER == COUNT:
                total += tl.sum(_ones(held), 1)
            else:
                for p in range(BITS.probes):
                    line = (first.to(tl.int64) * BITS.probes + p) * tokens + t
                    probe = tl.load(probes + line * BITS.words + w, mask=w < BITS.words, other=0)
                    total += tl.sum(_ones(held ^ probe[None, :]), 1)
        if ORDER == DISTANCE or not BITS.high:
            total = -total
        tl.store(by + n, total.to(tl.float32), mask=n < length)


@triton.jit
@no_type_check
def _weight(weight, most):
    """What makes a number a weighted part of the row's largest, 0 where none is above 0."""
    most = tl.max(most, 0)
    return tl.where(most > 0, weight / tl.where(most > 0, most, 1.0), 0.0)


@triton.jit
@no_type_check
def _decayed(by, first, length, now, planes, offsets, last, grace, decay, LAST_VALUE: tl.constexpr, BS: tl.constexpr):
    """Into `by`: what is left of each slot's importance at its age; -inf if that is no number."""
    start = tl.load(offsets + first)
    most, most_norm = tl.zeros((BS,), tl.float32), tl.zeros((BS,), tl.float32)
    for i in range(0, length, BS):
        n = i + tl.arange(0, BS)
        held = _held_values(first, n, n < length, planes[3], offsets, last, LAST_VALUE, 1)
        norm = tl.load(planes[6] + start + n, mask=n < length, other=0.0)
        most, most_norm = tl.where(held > most, held, most), tl.where(norm > most_norm, norm, most_norm)  # not by NaN
    by_value, by_norm = _weight(decay[3], most), _weight(decay[4], most_norm)
    for i in range(0, length, BS):
        n = i + tl.arange(0, BS)
        held = _held_values(first, n, n < length, planes[3], offsets, last, LAST_VALUE, 1)
        norm = tl.load(planes[6] + start + n, mask=n < length, other=0.0)
        position = tl.load(planes[2] + start + n, mask=n < length, other=0).to(tl.int32)
        influence = tl.maximum(tl.exp(decay[0] * tl.maximum(now - position - grace, 0).to(tl.float32)), decay[1])
        importance = by_value * held + by_norm * norm
        power = tl.exp(decay[2] * tl.log(tl.where(importance == 0, 1.0, importance)))
        left = influence * tl.where((importance == 0) & (decay[2] > 0), 0.0, power)
        tl.store(by + n, tl.where(left == left, left, -INFINITY), mask=n < length)


@triton.jit
@no_type_check
def _score(
    by, first, length, now, t, tokens, planes, new, offsets, last, graces, decay, OBSERVE: tl.constexpr, ORDER: tl.constexpr,
    BITS: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """What orders a unit's tokens until the decision is over."""
    if ORDER == DECAYED:
        grace = _grace(graces, first)
        _decayed(by, first, length, now, planes, offsets, last, grace, decay, OBSERVE == LAST, BS)
    else:
        _count_bits(by, tl.load(offsets + first), first, length, t, tokens, planes[7], new[8], ORDER, BITS, BN, min(BW, 16))


@triton.jit
@no_type_check
def _victim(
    first, length, now, planes, offsets, last, by, limit, recent, num_sink, OBSERVE: tl.constexpr, ORDER: tl.constexpr,
    UNIT: tl.constexpr, WINDOW: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Which slot of a unit leaves: the lowest by tier of protection, then by key, then the oldest."""
    start = tl.load(offsets + first)
    by_value = ORDER == VALUE
    if ORDER == RANKED:
        finite = tl.zeros((BS,), tl.int32)
        for i in range(0, length, BS):
            n = i + tl.arange(0, BS)
            held = _held_values(first, n, n < length, planes[3], offsets, last, OBSERVE == LAST, UNIT)
            finite += ((n < length) & _finite(held)).to(tl.int32)
        by_value = tl.sum(finite, 0) > limit // 2
    # Each lane keeps the best of the slots that it meets; lanes are compared once, at the end.
    best_tier = tl.full((BS,), SINK + 1, tl.int32)
    best_key = tl.full((BS,), INFINITY, tl.float32)
    best_position = tl.full((BS,), NONE, tl.int32)
    best_slot = tl.full((BS,), NONE, tl.int32)
    for i in range(0, length, BS):
        n = i + tl.arange(0, BS)
        inside = n < length
        position = tl.load(planes[2] + start + n, mask=inside, other=NONE).to(tl.int32)
        age = position.to(tl.float32)
        tier = tl.full((BS,), NORMAL, tl.int32)
        key = age
        if ORDER >= COUNT:
            key = tl.load(by + n, mask=inside, other=INFINITY)
        elif ORDER != AGE:
            held = _held_values(first, n, inside, planes[3], offsets, last, OBSERVE == LAST, UNIT)
            ranked = tl.where(held == held, held, -INFINITY)
            if ORDER == RANKED:
                ranked = tl.where(by_value, ranked, tl.where(_finite(held), INFINITY, age))
            key = ranked
        kept = position > now - recent
        tier = tl.where(kept, RECENT, tier)
        if planes[4] is not None:
            special = tl.load(planes[4] + start + n, mask=inside, other=0) != 0
            tier = tl.where(special, SPECIAL, tier)
        tier = tl.where(position < num_sink, SINK, tier)
        if WINDOW > 0:
            tier = tl.where(position <= now - WINDOW, DEAD, tier)
        key = tl.where(tier == NORMAL, key, tl.where(tier == SINK, -age, age))
        tier = tl.where(inside, tier, SINK + 1)
        older = (key < best_key) | ((key == best_key) & (position < best_position))
        better = (tier < best_tier) | ((tier == best_tier) & older)
        best_tier = tl.where(better, tier, best_tier)
        best_key = tl.where(better, key, best_key)
        best_position = tl.where(better, position, best_position)
        best_slot = tl.where(better, n, best_slot)
    chosen = best_tier == tl.min(best_tier, 0)
    chosen = chosen & (best_key == tl.min(tl.where(chosen, best_key, INFINITY), 0))
    chosen = chosen & (best_position == tl.min(tl.where(chosen, best_position, NONE), 0))
    return tl.min(tl.where(chosen, best_slot, NONE), 0)


@triton.jit
@no_type_check
def _move_vector(pointer, gap, end, DIM: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    tl.store(pointer + gap * DIM + d, tl.load(pointer + end * DIM + d, mask=d < DIM), mask=d < DIM)


@triton.jit
@no_type_check
def _make_room(
    length, first, now, t, tokens, planes, new, offsets, last, by, limits, decay, num_sink, BEFORE: tl.constexpr,
    OBSERVE: tl.constexpr, ORDER: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr, BITS: tl.constexpr, HD: tl.constexpr,
    VD: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """If a unit holds too much, tokens leave: all its rows drop the slot that the first one drops. Returns the length.

    A row's last token moves into the gap. Barriers are where one thread's writes meet another's reads.
    """
    limit, recent = tl.load(limits[0] + first), tl.load(limits[2] + first)
    bound = limit - 1 if BEFORE else limit
    room = tl.where(length > bound, tl.minimum(tl.load(limits[1] + first), bound), NONE)
    if ORDER >= COUNT:  # noqa: SIM102 - constants alone, so that code is left out while compiling
        if length > room:
            _score(
                by, first, length, now, t, tokens, planes, new, offsets, last, limits[3], decay, OBSERVE, ORDER, BITS, BW, BN,
                BS,
            )  # fmt: skip
            tl.debug_barrier()
    while length > room:
        slot = _victim(first, length, now, planes, offsets, last, by, limit, recent, num_sink, OBSERVE, ORDER, UNIT, WINDOW, BS)
        tl.debug_barrier()
        for i in range(UNIT):
            row = first + i
            gap, end = tl.load(offsets + row) + slot, tl.load(offsets + row) + length - 1
            _move_vector(planes[0], gap, end, HD, BD)
            _move_vector(planes[1], gap, end, VD, BV)
            for plane in tl.static_range(2, 7):
                if planes[plane] is not None:
                    tl.store(planes[plane] + gap, tl.load(planes[plane] + end))
            if planes[7] is not None:
                _move_vector(planes[7], gap, end, BITS.words, BW)
        if OBSERVE == LAST:
            tl.store(last + slot, tl.load(last + length - 1))
        if ORDER >= COUNT:
            tl.store(by + slot, tl.load(by + length - 1))
        tl.debug_barrier()
        for i in range(UNIT):
            row = first + i
            tl.store(planes[2] + tl.load(offsets + row) + length - 1, -1)
        tl.debug_barrier()
        length = length - 1
    return length


@triton.jit
@no_type_check
def _insert(
    row, length, t, tokens, sequence, now, planes, new, offsets, BITS: tl.constexpr, HD: tl.constexpr, VD: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Token t comes into the row's first free slot."""
    place = tl.load(offsets + row) + length
    line = row.to(tl.int64) * tokens + t
    d, e = tl.arange(0, BD), tl.arange(0, BV)
    tl.store(planes[0] + place * HD + d, tl.load(new[0] + line * HD + d, mask=d < HD), mask=d < HD)
    tl.store(planes[1] + place * VD + e, tl.load(new[1] + line * VD + e, mask=e < VD), mask=e < VD)
    tl.store(planes[2] + place, now)
    if planes[3] is not None:
        value = 0.0
        if new[3] is not None:
            value = tl.load(new[3] + line)
        tl.store(planes[3] + place, value)
    if planes[4] is not None:
        special = 0
        if new[4] is not None:
            special = tl.load(new[4] + sequence * tokens + t)
        tl.store(planes[4] + place, special)
    if planes[5] is not None:
        source = -1
        if new[5] is not None:
            source = tl.load(new[5] + line)
        tl.store(planes[5] + place, source)
    if planes[6] is not None:
        norm = 0.0
        if new[6] is not None:
            norm = tl.load(new[6] + line)
        tl.store(planes[6] + place, norm)
    if planes[7] is not None:
        w = tl.arange(0, BW)
        bits = tl.zeros((BW,), tl.int32)
        if new[7] is not None:
            bits = tl.load(new[7] + line * BITS.words + w, mask=w < BITS.words, other=0).to(tl.int32)
        tl.store(planes[7] + place * BITS.words + w, bits, mask=w < BITS.words)


@triton.jit
@no_type_check
def _observe(
    found, start, length, now, begun, shift, factor, planes, last, widest, LOGITS: tl.constexpr, GROUP: tl.constexpr,
    OBSERVE: tl.constexpr, MERGE: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A row's weights (group, widest), or logits with LOGITS, change its tokens' values or bits. `begun`: not the unit's first
    row."""
    g = tl.arange(0, BM)
    for i in range(0, length, BN):
        n = i + tl.arange(0, BN)
        inside = n < length
        there = (g < GROUP)[:, None] & inside[None, :]
        weights = tl.load(found + g[:, None] * widest + n[None, :], mask=there, other=-INFINITY if LOGITS else 0.0)
        if LOGITS:
            weights = tl.exp(weights - shift[:, None]) * factor[:, None]
        merged = _merge(weights, GROUP, MERGE)
        if OBSERVE == SUM:
            held = tl.load(planes[3] + start + n, mask=inside, other=0.0)
            tl.store(planes[3] + start + n, held + merged, mask=inside)
        elif OBSERVE == MARKS:
            place = now % BITS.ring
            word = planes[7] + (start + n) * BITS.words + place // BITS.size
            low = merged < BELOW / (length if BITS.of_held else now + 1).to(tl.float32)
            held = tl.load(word, mask=inside, other=0).to(tl.int32)
            bit = (held * 0 + 1) << (place % BITS.size)
            tl.store(word, tl.where(low != BITS.high, held | bit, held & ~bit), mask=inside)
        else:
            held = tl.where(begun, tl.load(last + n, mask=inside, other=0.0), 0.0)
            tl.store(last + n, held + merged / UNIT, mask=inside)


@triton.jit(do_not_specialize=["begin", "end"])  # or each step of a call would be compiled
@no_type_check
def _scan(
    queries, planes, new, offsets, lengths, limits, sinks, fade, decay, last, by, found, out, scaling, begin, end, tokens,
    num_sink, widest, STAGE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, BEFORE: tl.constexpr,
    OBSERVE: tl.constexpr, ORDER: tl.constexpr, MERGE: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BITS: tl.constexpr, HD: tl.constexpr, VD: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """One unit, tokens begin ... end - 1, one after the other.

    STAGE: a token makes room and comes in (ENTER); what other kernels left in `found`, the weights of its attention, changes
    values and lets tokens leave (SETTLE); or all of that with the attention in between (ALL), logits in `found`.
    last, by (units, widest), found (rows, group, widest): touched only by rules that need them. by: what orders tokens in the
    orders from COUNT on. Without key dims nothing attends.
    """
    unit = tl.program_id(0)
    first = unit * UNIT
    last += unit.to(tl.int64) * widest
    by += unit.to(tl.int64) * widest
    g, e = tl.arange(0, BM), tl.arange(0, BV)
    real = g < GROUP
    length = tl.load(lengths + first).to(tl.int32)
    for t in range(begin, end):
        now = tl.load(new[2] + (first // HEADS) * tokens + t)
        if STAGE != SETTLE:  # noqa: SIM102 - constants alone, so that code is left out while compiling
            if now >= 0:
                if BEFORE:
                    length = _make_room(
                        length, first, now, t, tokens, planes, new, offsets, last, by, limits, decay, num_sink, True,
                        OBSERVE, ORDER, UNIT, WINDOW, BITS, HD, VD, BD, BV, BW, BN, BS,
                    )  # fmt: skip
                for i in range(UNIT):
                    row = first + i
                    _insert(row, length, t, tokens, first // HEADS, now, planes, new, offsets, BITS, HD, VD, BD, BV, BW)
                length = length + 1
                tl.debug_barrier()
        for i in range(UNIT):
            row = first + i
            start = tl.load(offsets + row)
            logits = found + row.to(tl.int64) * GROUP * widest
            shift, factor = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
            if STAGE == ALL and HD > 0:
                line = (row.to(tl.int64) * GROUP + g) * tokens + t
                top, total, mixed = _attend(
                    _load(queries, line, real, HD, BD), now + tl.zeros((BM,), tl.int32), planes[0], planes[1],
                    planes[2], row, start, 0, tl.where(now >= 0, length, 0), scaling, fade, logits, g * widest, real,
                    OBSERVE != NOTHING, WINDOW, SOFTCAP, HD, VD, BD, BV, BM, BN,
                )  # fmt: skip
                shift, factor = _denominator(top, total, _sink(sinks, (row % HEADS) * GROUP + g, real))
                mixed = mixed * (factor * tl.exp(top - shift))[:, None]
                tl.store(out + line[:, None] * VD + e[None, :], mixed, mask=real[:, None] & (e < VD)[None, :])
            if STAGE != ENTER and OBSERVE != NOTHING:  # noqa: SIM102
                if now >= 0:
                    tl.debug_barrier()
                    _observe(
                        logits, start, length, now, row > first, shift, factor, planes, last, widest, STAGE == ALL, GROUP,
                        OBSERVE, MERGE, UNIT, BITS, BM, BN,
                    )  # fmt: skip
                    tl.debug_barrier()
        if STAGE != ENTER and not BEFORE:  # noqa: SIM102
            if now >= 0:
                length = _make_room(
                    length, first, now, t, tokens, planes, new, offsets, last, by, limits, decay, num_sink, False, OBSERVE,
                    ORDER, UNIT, WINDOW, BITS, HD, VD, BD, BV, BW, BN, BS,
                )  # fmt: skip
    tl.debug_barrier()
    for i in range(UNIT):
        row = first + i
        tl.store(lengths + row, length.to(tl.int64))


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
    top, total, mixed = _attend(
        _load(queries, line, real, HD, BD), now, keys, values, positions, row, start, low, high, scaling, None, lse, line,
        real, False, WINDOW, SOFTCAP, HD, VD, BD, BV, BM, BN,
    )  # fmt: skip
    head_of_group = (row % HEADS) * GROUP + g + tl.zeros((BM,), tl.int32)
    shift, factor = _denominator(top, total, _sink(sinks, head_of_group, real))
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
    key = _load(keys, place, n < slots, HD, BD)
    total = tl.zeros((BN,), tl.float32)
    low, high = 0, count
    if CAUSAL:
        low = block * BN // BM * BM
        if WINDOW > 0:
            high = tl.minimum(count, (block + 1) * BN + WINDOW)
    for i in range(low, high, BM):
        t = i + tl.arange(0, BM)
        now = tl.load(query_positions + (row // HEADS) * count + t, mask=t < count, other=-1).to(tl.int32)
        seen = _visible(position[None, :], now[:, None], WINDOW)
        merged = tl.zeros((BM, BN), tl.float32)
        for g in range(1 if MERGE == FIRST else GROUP):
            line = (row.to(tl.int64) * GROUP + g) * count + t
            logits = _logits(_load(queries, line, t < count, HD, BD), key, scaling, SOFTCAP)
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


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _splits(widest: int, programs: int, device: torch.device) -> int:
    """Shares of a row's tokens: enough to keep the GPU busy, none much shorter than 128 slots where rows are full."""
    if INTERPRETED.value:
        return min(3, triton.cdiv(widest, 16))
    return max(1, min(MAX_SPLITS, triton.cdiv(4 * _multiprocessors(device), programs), triton.cdiv(widest, 128)))


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
    splits = _splits(widest, rows * blocks, queries.device)
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
    return Bits(held, size, probes, marks.window, marks.high, marks.of == "held")


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
            _scan[(units,)](
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
