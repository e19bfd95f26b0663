"""The scan over steps in Triton: a unit of rows decides and attends, one token after the other."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from kvlab.kernels.gpu_tiles import (
    AGE,
    ALL,
    BELOW,
    COUNT,
    DEAD,
    DECAYED,
    DISTANCE,
    ENTER,
    EXPIRED,
    INFINITY,
    LAST,
    MARKS,
    NONE,
    NORMAL,
    NOTHING,
    RANKED,
    RECENT,
    SETTLE,
    SINK,
    SPECIAL,
    STAMPS,
    SUM,
    VALUE,
    attend_tiles,
    denominator,
    grace_of,
    load_tile,
    merge_heads,
    sink_of,
)

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
        grace = grace_of(graces, first)
        _decayed(by, first, length, now, planes, offsets, last, grace, decay, OBSERVE == LAST, BS)
    else:
        _count_bits(by, tl.load(offsets + first), first, length, t, tokens, planes[7], new[8], ORDER, BITS, BN, min(BW, 16))


@triton.jit
@no_type_check
def _tier(planes, n, inside, position, now, recent, num_sink, WINDOW: tl.constexpr):
    """What protects the tokens in slots n, at these positions, or that they left the window."""
    tier = tl.where(position > now - recent, RECENT, NORMAL)
    if planes[4] is not None:
        special = tl.load(planes[4] + n, mask=inside, other=0) != 0
        tier = tl.where(special, SPECIAL, tier)
    tier = tl.where(position < num_sink, SINK, tier)
    if WINDOW > 0:
        tier = tl.where(position <= now - WINDOW, DEAD, tier)
    return tier


@triton.jit
@no_type_check
def _expired(
    first, length, now, planes, offsets, last, recent, num_sink, OBSERVE: tl.constexpr, WINDOW: tl.constexpr,
    BITS: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """How many of a row's tokens leave whatever it may hold: the lowest in the order of victims."""
    start = tl.load(offsets + first)
    count = tl.zeros((BS,), tl.int32)
    for i in range(0, length, BS):
        n = i + tl.arange(0, BS)
        inside = n < length
        position = tl.load(planes[2] + start + n, mask=inside, other=NONE).to(tl.int32)
        tier = _tier(planes, start + n, inside, position, now, recent, num_sink, WINDOW)
        held = _held_values(first, n, inside, planes[3], offsets, last, OBSERVE == LAST, 1)
        stays = now.to(tl.float32) - held < BITS.ring  # what is no number doesn't
        count += (inside & ((tier == DEAD) | ((tier == NORMAL) & (stays == 0)))).to(tl.int32)
    return tl.sum(count, 0)


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
        key = age
        if ORDER >= COUNT:
            key = tl.load(by + n, mask=inside, other=INFINITY)
        elif ORDER != AGE:
            held = _held_values(first, n, inside, planes[3], offsets, last, OBSERVE == LAST, UNIT)
            ranked = tl.where(held == held, held, -INFINITY)
            if ORDER == RANKED:
                ranked = tl.where(by_value, ranked, tl.where(_finite(held), INFINITY, age))
            key = ranked
        tier = _tier(planes, start + n, inside, position, now, recent, num_sink, WINDOW)
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
    left = length
    if ORDER == EXPIRED:
        left -= _expired(first, length, now, planes, offsets, last, recent, num_sink, OBSERVE, WINDOW, BITS, BS)
    room = tl.where(left > bound, tl.minimum(tl.load(limits[1] + first), bound), left)
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
        merged = merge_heads(weights, GROUP, MERGE)
        if OBSERVE == SUM:
            held = tl.load(planes[3] + start + n, mask=inside, other=0.0)
            tl.store(planes[3] + start + n, held + merged, mask=inside)
        elif OBSERVE == STAMPS:
            low = merged < BELOW / (length if BITS.of_held else now + 1).to(tl.float32)
            held = tl.load(planes[3] + start + n, mask=inside, other=0.0)
            tl.store(planes[3] + start + n, tl.where(low, held, now.to(tl.float32)), mask=inside)
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
def scan_units(
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
                top, total, mixed = attend_tiles(
                    load_tile(queries, line, real, HD, BD), now + tl.zeros((BM,), tl.int32), planes[0], planes[1],
                    planes[2], row, start, 0, tl.where(now >= 0, length, 0), scaling, fade, logits, g * widest, real,
                    OBSERVE != NOTHING, WINDOW, SOFTCAP, HD, VD, BD, BV, BM, BN,
                )  # fmt: skip
                shift, factor = denominator(top, total, sink_of(sinks, (row % HEADS) * GROUP + g, real))
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
