"""What numba compiles: attention of one row, one decision, the scan over steps, the softmax of a prefill's chunk.

Threads that call these have rows of their own, and what a row needs stays in a core's cache. Numbers are read as they are
stored (bfloat16 in uint16, float16 in int16); everything is computed in float32. All is in this file, since numba looks at one
file's date when it decides whether to compile again. Loops run over slices that start at 0: from an unknown start numba would
check each index, and nothing would be vectorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

# Sums may be reordered and fused; infinities and NaN mean what they mean.
FAST = {"reassoc", "contract", "arcp", "nsz"}
INFINITY = np.float32(np.inf)
# Places in contract.OBSERVE, contract.ORDER and contract.GROUPS; those that aren't named need no code of their own.
SUM, LAST, MARKS, STAMPS = 1, 2, 3, 4
VALUE, RANKED, EXPIRED, COUNT, DISTANCE, DECAYED = 1, 2, 3, 4, 5, 6
MEAN, MAX, FIRST = 0, 2, 3
DEAD, NORMAL, RECENT, SPECIAL, SINK = range(5)
COLUMNS = 512  # slots whose mass is added up at a time, so that it stays in the innermost cache

# ------------------------------------------------------------------------------------------------------ numbers


@intrinsic
def _float_of_bits(context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""
    return types.float32(types.uint32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _ones(context: Any, bits: Any) -> Any:
    """How many bits of an unsigned number are set."""
    return bits(bits), lambda _, builder, __, args: builder.ctpop(args[0])


def _as_float(number):  # type: ignore[no-untyped-def]  # numba wants the overload's very signature
    """A stored number as float32: float32 itself, bfloat16 kept in uint16, float16 kept in int16."""


@overload(_as_float)
def _as_float_of(number):  # type: ignore[no-untyped-def]
    if number == types.float32:
        return lambda number: number
    if number == types.uint16:
        return lambda number: _float_of_bits(np.uint32(number) << np.uint32(16))

    def from_float16(number):  # type: ignore[no-untyped-def]  # multiplying shifts exponents, subnormal numbers' too
        bits = np.uint32(np.uint16(number))
        sign, size = bits & np.uint32(0x8000), bits & np.uint32(0x7FFF)
        return _float_of_bits(sign << np.uint32(16) | size << np.uint32(13)) * np.float32(2.0**112)

    return from_float16


@njit(fastmath=FAST, inline="always")
def _exp(x: Any) -> Any:
    """e**x for x <= 0, to 2e-7: reduced to half an octave around 1, then a polynomial; vectorised, unlike the library's."""
    x = max(x, np.float32(-87.0))
    octaves = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    rest = x - octaves * np.float32(0.693359375)
    rest = rest + octaves * np.float32(2.12194440e-4)
    result = np.float32(1.9875691500e-4)
    result = result * rest + np.float32(1.3981999507e-3)
    result = result * rest + np.float32(8.3334519073e-3)
    result = result * rest + np.float32(4.1665795894e-2)
    result = result * rest + np.float32(1.6666665459e-1)
    result = result * rest + np.float32(5.0000001201e-1)
    result = result * rest * rest + rest + np.float32(1.0)
    return result * _float_of_bits(np.uint32((np.int32(octaves) + np.int32(127)) << np.int32(23)))


# ---------------------------------------------------------------------------------------------- one row's attention


@njit(fastmath=FAST)
def _dots(query: Any, keys: Any, out: Any) -> None:
    """out[g, i] = query[g] . keys[i]; four keys at a time, so that a query is loaded once for them."""
    group, dim = query.shape
    count = keys.shape[0]
    for block in range(count // 4):
        i = 4 * block
        a, b, c, d = keys[i], keys[i + 1], keys[i + 2], keys[i + 3]
        for g in range(group):
            s0 = s1 = s2 = s3 = np.float32(0)
            for j in range(dim):
                x = query[g, j]
                s0 += x * _as_float(a[j])
                s1 += x * _as_float(b[j])
                s2 += x * _as_float(c[j])
                s3 += x * _as_float(d[j])
            out[g, i], out[g, i + 1], out[g, i + 2], out[g, i + 3] = s0, s1, s2, s3
    for i in range(count // 4 * 4, count):
        for g in range(group):
            s = np.float32(0)
            for j in range(dim):
                s += query[g, j] * _as_float(keys[i, j])
            out[g, i] = s


@njit(fastmath=FAST)
def _mix(weights: Any, values: Any, out: Any) -> None:
    """out[g] = sum over i of weights[g, i] * values[i]."""
    group, dim = out.shape
    count = values.shape[0]
    out[:] = np.float32(0)
    for block in range(count // 4):
        i = 4 * block
        a, b, c, d = values[i], values[i + 1], values[i + 2], values[i + 3]
        for g in range(group):
            w0, w1, w2, w3 = weights[g, i], weights[g, i + 1], weights[g, i + 2], weights[g, i + 3]
            for j in range(dim):
                new = w0 * _as_float(a[j]) + w1 * _as_float(b[j]) + w2 * _as_float(c[j]) + w3 * _as_float(d[j])
                out[g, j] += new
    for i in range(count // 4 * 4, count):
        for g in range(group):
            for j in range(dim):
                out[g, j] += weights[g, i] * _as_float(values[i, j])


@njit(fastmath=FAST)
def _largest(numbers: Any) -> Any:
    """The largest of some numbers; eight maxima at a time, as one alone would wait for each comparison."""
    a = b = c = d = e = f = g = h = -INFINITY
    count = numbers.shape[0]
    for block in range(count // 8):
        i = 8 * block
        a, b, c, d = max(a, numbers[i]), max(b, numbers[i + 1]), max(c, numbers[i + 2]), max(d, numbers[i + 3])
        e, f, g, h = max(e, numbers[i + 4]), max(f, numbers[i + 5]), max(g, numbers[i + 6]), max(h, numbers[i + 7])
    for i in range(count // 8 * 8, count):
        a = max(a, numbers[i])
    return max(max(max(a, b), max(c, d)), max(max(e, f), max(g, h)))


@njit(fastmath=FAST)
def _cap(logits: Any, scale: Any, softcap: Any) -> None:
    """Scaled logits x become softcap * tanh(x / softcap), by way of exp(-2|x|) so that nothing overflows; -inf stays."""
    for i in range(logits.shape[0]):
        x = logits[i] * scale / softcap
        e = _exp(np.float32(-2) * abs(x))
        size = softcap * (np.float32(1) - e) / (np.float32(1) + e)
        capped = size if x > 0 else -size
        logits[i] = capped if logits[i] > -INFINITY else logits[i]


@njit(fastmath=FAST)
def _exponentials(logits: Any, scale: Any, softcap: Any, sink: Any) -> Any:
    """One query head's logits, unscaled, become softmax weights but for the factor that is returned.

    sink: a logit that only enlarges the denominator, -inf for none. A logit of -inf becomes 0.
    """
    if softcap > 0:
        _cap(logits, scale, softcap)
        scale = np.float32(1)
    top = max(_largest(logits) * scale, sink)
    total = flaws = np.float32(0)
    for i in range(logits.shape[0]):
        x = logits[i] * scale - top
        flaws += np.float32(0) if logits[i] == logits[i] else np.float32(1)
        e = _exp(x)
        e = e if x > np.float32(-87) else np.float32(0)  # what vanishes must tie; float32 goes no further
        logits[i] = e
        total += e
    if sink > -INFINITY:
        total += _exp(sink - top)
    if flaws > 0:  # a model that has gone wrong must not look well
        return np.float32(np.nan)
    return np.float32(1) / total if total > 0 else np.float32(0)


@njit(fastmath=FAST)
def _fade(logits: Any, positions: Any, now: int, scale: Any, softcap: Any, fade: Any, grace: int) -> None:
    """Raw logits are scaled and capped, and those of old tokens lowered."""
    slope, floor, num_sink = fade
    if softcap > 0:
        _cap(logits, scale, softcap)
        scale = np.float32(1)
    for i in range(logits.shape[0]):
        over = max(now - positions[i] - grace, 0)
        lost = max(slope * np.float32(over), floor)
        logits[i] = logits[i] * scale + (lost if positions[i] >= num_sink else np.float32(0))


@njit(fastmath=FAST)
def _attend(
    query: Any, keys: Any, values: Any, positions: Any, start: int, count: int, now: int, numbers: Any, sinks: Any, fade: Any,
    grace: int, out: Any, weights: Any,
) -> None:  # fmt: skip
    """One row: attention of query (group, dim) over its first `count` slots; out (group, dim), weights (group, >= count)."""
    scale, softcap, window = numbers
    end = start + count
    _dots(query, keys[start:end], weights)
    places = positions[start:end]
    for i in range(count):
        position = places[i]
        if position > now or (window > 0 and position <= now - window):
            for g in range(query.shape[0]):
                weights[g, i] = -INFINITY
    for g in range(query.shape[0]):
        row = weights[g, :count]
        if fade[0] < 0:
            _fade(row, places, now, scale, softcap, fade, grace)
            factor = _exponentials(row, np.float32(1), np.float32(0), sinks[g])
        else:
            factor = _exponentials(row, scale, softcap, sinks[g])
        for i in range(count):
            row[i] *= factor
    _mix(weights, values[start:end], out)


@njit(fastmath=FAST)
def _merge(weights: Any, count: int, how: int, share: Any, out: Any) -> None:
    """out[i] += share * (query heads' weights of slot i, merged)."""
    group = weights.shape[0]
    if how == MAX:
        for i in range(count):
            most = weights[0, i]
            for g in range(1, group):
                most = max(most, weights[g, i])
            out[i] += share * most
    elif how == FIRST:
        for i in range(count):
            out[i] += share * weights[0, i]
    else:
        factor = share / np.float32(group) if how == MEAN else share
        for g in range(group):
            for i in range(count):
                out[i] += factor * weights[g, i]


# ----------------------------------------------------------------------------------------------- one row's decision


@njit
def _sort_values(value: Any, positions: Any, order: int, limit: int, out: Any) -> None:
    """What orders a row's unprotected tokens, lowest first. value, positions: of the row's tokens."""
    count = positions.shape[0]
    by_value = order in (VALUE, EXPIRED)
    if order == RANKED:
        finite = 0
        for i in range(count):
            finite += np.isfinite(value[i])
        by_value = finite > limit // 2
    for i in range(count):
        if by_value:
            out[i] = value[i] if not np.isnan(value[i]) else -INFINITY
        elif order == RANKED and np.isfinite(value[i]):
            out[i] = INFINITY
        else:
            out[i] = positions[i]


@njit
def _count_bits(bits: Any, sign: Any, out: Any) -> None:
    """out[i] = sign * how many bits of slot i are set."""
    for i in range(bits.shape[0]):
        total = np.int64(0)
        for j in range(bits.shape[1]):
            total += np.int64(_ones(bits[i, j]))
        out[i] = sign * np.float32(total)


@njit(fastmath=FAST)
def _differences(bits: Any, probe: Any, out: Any) -> None:
    """out[i] -= in how many bits slot i differs from the probe."""
    if bits.shape[1] == 1:
        column, wanted = bits[:, 0], probe[0]
        for i in range(column.shape[0]):
            out[i] -= np.float32(np.int32(_ones(column[i] ^ wanted)))
        return
    for i in range(bits.shape[0]):
        total = np.int32(0)
        for j in range(bits.shape[1]):
            total += np.int32(_ones(bits[i, j] ^ probe[j]))
        out[i] -= np.float32(total)


@njit
def _nearness(bits: Any, probes: Any, out: Any) -> None:
    """out[i] = minus the distances of slot i's bits from all probes; several bytes at once where they come to whole words."""
    out[:] = np.float32(0)
    count = bits.shape[1]
    for p in range(probes.shape[0]):
        if count % 8 == 0:
            _differences(bits.view(np.uint64), probes[p].view(np.uint64), out)
        elif count % 4 == 0:
            _differences(bits.view(np.uint32), probes[p].view(np.uint32), out)
        elif count % 2 == 0:
            _differences(bits.view(np.uint16), probes[p].view(np.uint16), out)
        else:
            _differences(bits, probes[p], out)


@njit
def _decayed(value: Any, norm: Any, positions: Any, now: int, grace: int, decay: Any, out: Any) -> None:
    """What is left of each slot's importance at its age."""
    slope, floor, power, value_weight, norm_weight = decay
    most_value, most_norm = np.float32(0), np.float32(0)
    for i in range(positions.shape[0]):  # NaN is above nothing
        most_value = value[i] if value[i] > most_value else most_value
        most_norm = norm[i] if norm[i] > most_norm else most_norm
    by_value = value_weight / most_value if most_value > 0 else np.float32(0)
    by_norm = norm_weight / most_norm if most_norm > 0 else np.float32(0)
    for i in range(positions.shape[0]):
        over = max(now - positions[i] - grace, 0)
        influence = max(np.exp(slope * np.float32(over)), floor)
        left = influence * (by_value * value[i] + by_norm * norm[i]) ** power
        out[i] = left if not np.isnan(left) else -INFINITY


@njit
def _merge_to_compare(weights: Any, held: int, now: int, merge: int, marks: Any, merged: Any) -> Any:
    """merged[i] = this query's attention to slot i; returns the bound below which it is low."""
    merged[:held] = np.float32(0)
    _merge(weights, held, merge, np.float32(1), merged)
    return marks[3] / np.float32(held if marks[2] else now + 1)


@njit
def _stamp(weights: Any, held: int, now: int, merge: int, marks: Any, merged: Any, value: Any) -> None:
    """Slots to which this query's attention was not low get its position."""
    bound = _merge_to_compare(weights, held, now, merge, marks, merged)
    for i in range(held):
        if not merged[i] < bound:
            value[i] = np.float32(now)


@njit
def _mark(weights: Any, held: int, now: int, merge: int, marks: Any, merged: Any, bits: Any) -> None:
    """A bit of each slot: whether this query's attention was low."""
    window, high = marks[0], marks[1]
    bound = _merge_to_compare(weights, held, now, merge, marks, merged)
    place = now % window
    byte, bit = place >> 3, np.uint8(1 << (place & 7))
    for i in range(held):
        if (merged[i] < bound) != high:
            bits[i, byte] |= bit
        else:
            bits[i, byte] &= ~bit


@njit(fastmath=FAST)
def _unprotected(by: Any, positions: Any, now: int, recent: int, num_sink: int, masked: Any) -> int:
    """The victim among a row's unprotected tokens, where none is dead or special, -1 if all are; loops without branches.

    masked: scratch
    """
    count = positions.shape[0]
    for i in range(count):
        free = positions[i] >= num_sink and positions[i] <= now - recent
        masked[i] = -by[i] if free else -INFINITY
    worst = _largest(masked[:count])
    if worst == -INFINITY:
        return -1
    oldest = np.int32(2**31 - 1)
    for i in range(count):
        oldest = min(oldest, positions[i] if masked[i] == worst else np.int32(2**31 - 1))
    for i in range(count):
        if positions[i] == oldest:
            return i
    return -1


@njit
def _tier(position: int, special: bool, now: int, window: int, recent: int, num_sink: int) -> int:
    """What protects a token, or that it left the window."""
    if window > 0 and position <= now - window:
        return DEAD
    if position < num_sink:
        return SINK
    if special:
        return SPECIAL
    return RECENT if position > now - recent else NORMAL


@njit
def _victim(by: Any, positions: Any, special: Any, now: int, window: int, recent: int, num_sink: int, masked: Any) -> int:
    """Which of a row's tokens leaves: the lowest by tier of protection, then by `by`, then the oldest. masked: scratch."""
    if window == 0 and special.size == 0:
        found = _unprotected(by, positions, now, recent, num_sink, masked)
        if found >= 0:
            return found
    best, best_tier, best_key, best_position = 0, SINK + 1, INFINITY, 0
    for i in range(positions.shape[0]):
        position = positions[i]
        tier = _tier(position, special.size > 0 and special[i], now, window, recent, num_sink)
        key = by[i] if tier == NORMAL else np.float32(-position if tier == SINK else position)
        if tier > best_tier:
            continue
        if tier < best_tier or key < best_key or (key == best_key and position < best_position):
            best, best_tier, best_key, best_position = i, tier, key, position
    return best


@njit
def _expired(
    value: Any, positions: Any, special: Any, now: int, window: int, recent: int, num_sink: int, span: int
) -> int:  # fmt: skip
    """How many of a row's tokens leave whatever it may hold: the lowest in the order of victims."""
    count = 0
    for i in range(positions.shape[0]):
        tier = _tier(positions[i], special.size > 0 and special[i], now, window, recent, num_sink)
        behind = not np.float32(now) - value[i] < np.float32(span)  # what is no number is
        count += tier == DEAD or (tier == NORMAL and behind)
    return count


@njit
def _drop(planes: Any, start: int, slot: int, last: int) -> None:
    """Remove a row's token: its last one moves into the gap."""
    keys, values, positions, value, special, source, norm, bits = planes
    gap, end = start + slot, start + last
    if gap != end:
        keys[gap] = keys[end]
        values[gap] = values[end]
        positions[gap] = positions[end]
        if value.size > 0:
            value[gap] = value[end]
        if special.size > 0:
            special[gap] = special[end]
        if source.size > 0:
            source[gap] = source[end]
        if norm.size > 0:
            norm[gap] = norm[end]
        if bits.size > 0:
            bits[gap] = bits[end]
    positions[end] = -1


@njit
def _drop_to(
    room: Any, planes: Any, offsets: Any, lengths: Any, first: int, rows: int, now: int, window: int, limits: Any, order: int,
    high: bool, decay: Any, probes: Any, shared: Any, by: Any,
) -> None:  # fmt: skip
    """Let tokens of a unit's rows leave until each holds `room` at most; all rows drop the same slots.

    shared: the rows' common values; of size 0 where the only row's own are to be read
    """
    positions, value, special, norm, bits = planes[2], planes[3], planes[4], planes[6], planes[7]
    limit, recent, num_sink, grace = limits
    start, scored = offsets[first], False
    keys, masked = by[0], by[1]
    while lengths[first] > room:
        count = lengths[first]
        places = positions[start : start + count]
        if order == RANKED or not scored:  # the others judge all at once
            held = value[start : start + count] if shared.size == 0 and value.size > 0 else shared
            if order == COUNT:
                _count_bits(bits[start : start + count], np.float32(1 if high else -1), keys)
            elif order == DISTANCE:
                _nearness(bits[start : start + count], probes, keys)
            elif order == DECAYED:
                _decayed(held, norm[start : start + count], places, now, grace[first], decay, keys)
            else:
                _sort_values(held, places, order, limit[first], keys)
            scored = True
        slot = _victim(keys, places, special[start : start + count], now, window, recent[first], num_sink, masked)
        keys[slot] = keys[count - 1]
        if shared.size > 0:
            shared[slot] = shared[count - 1]
        for row in range(first, first + rows):
            _drop(planes, offsets[row], slot, count - 1)
            lengths[row] = count - 1


@njit
def _mean_value(value: Any, offsets: Any, first: int, rows: int, count: int, out: Any) -> None:
    """out[i] = mean over rows of their slot i's value."""
    out[:count] = np.float32(0)
    for row in range(first, first + rows):
        held = value[offsets[row] : offsets[row] + count]
        for i in range(count):
            out[i] += held[i] / np.float32(rows)


@njit(inline="always")
def _make_room(
    bound: int, target: int, planes: Any, offsets: Any, lengths: Any, first: int, rows: int, now: int, window: int,
    limits: Any, order: int, marks: Any, decay: Any, probes: Any, mean_of_plane: bool, shared: Any, by: Any,
) -> None:  # fmt: skip
    """Let tokens of a unit's rows leave that may not stay; if then more than `bound` are left, down to `target`."""
    held = lengths[first]
    if order == EXPIRED:
        part = slice(offsets[first], offsets[first] + held)
        value = planes[3][part] if shared.size == 0 else shared
        held -= _expired(value, planes[2][part], planes[4][part], now, window, limits[1][first], limits[2], marks[0])
    room = held if held <= bound else min(target, bound)
    if room >= lengths[first]:
        return
    if mean_of_plane:
        _mean_value(planes[3], offsets, first, rows, lengths[first], shared)
    _drop_to(room, planes, offsets, lengths, first, rows, now, window, limits, order, marks[1], decay, probes, shared, by)


# -------------------------------------------------------------------------------------------------------- the scan


@njit(nogil=True, fastmath=FAST, cache=True)
def scan(
    first_unit: int, end_unit: int,
    queries: Any, new_keys: Any, new_values: Any, new_positions: Any, new_value: Any, new_special: Any, new_source: Any,
    new_norm: Any, new_bits: Any, probes: Any, planes: Any, offsets: Any, lengths: Any, limit: Any, target: Any, recent: Any,
    grace: Any, sinks: Any, numbers: Any, fade: Any, fade_grace: Any, widest: int, num_sink: int, before: bool, rule: Any,
    marks: Any, decay: Any, coupled: bool, out: Any,
) -> None:  # fmt: skip
    """Units first_unit to end_unit - 1. queries, out (rows, group, tokens, dim); new_... (rows, tokens, ...).

    probes (rows, probes, tokens, bytes). Without dims nothing attends.
    """
    rows, group, tokens, dim = queries.shape
    sequences = new_positions.shape[0]
    heads = rows // sequences
    unit = heads if coupled else 1
    observe, order, merge = rule
    for u in range(first_unit, end_unit):
        keys, values, positions, value, special, source, norm, bits = planes
        window = numbers[2]
        limits = (limit, recent, num_sink, grace)
        query = np.empty((group, dim), np.float32)
        mixed = np.empty((group, out.shape[3]), np.float32)
        weights = np.empty((group, widest), np.float32)
        by = np.empty((2, widest), np.float32)
        merged = np.empty(widest if observe in (MARKS, STAMPS) else 0, np.float32)
        probe = np.empty((probes.shape[1], probes.shape[3]), np.uint8)
        mean_of_plane = unit > 1 and value.size > 0 and observe != LAST
        shared = np.zeros(widest if observe == LAST or mean_of_plane else 0, np.float32)
        first = u * unit
        for t in range(tokens):
            now = new_positions[first // heads, t]
            if now < 0:  # a pad
                for row in range(first, first + unit):
                    out[row, :, t] = np.float32(0)
                continue
            for p in range(probe.shape[0]):
                probe[p] = probes[first, p, t]
            if before:
                _make_room(
                    limit[first] - 1, target[first], planes, offsets, lengths, first, unit, now, window, limits, order, marks,
                    decay, probe, mean_of_plane, shared, by,
                )  # fmt: skip
            if observe == LAST:
                shared[: lengths[first] + 1] = np.float32(0)
            for row in range(first, first + unit):
                start = offsets[row]
                place = start + lengths[row]
                keys[place] = new_keys[row, t]
                values[place] = new_values[row, t]
                positions[place] = now
                if value.size > 0:
                    value[place] = new_value[row, t] if new_value.size > 0 else np.float32(0)
                if special.size > 0:
                    special[place] = new_special[row // heads, t] if new_special.size > 0 else False
                if source.size > 0:
                    source[place] = new_source[row, t] if new_source.size > 0 else -1
                if norm.size > 0:
                    norm[place] = new_norm[row, t] if new_norm.size > 0 else np.float32(0)
                if bits.size > 0:
                    if new_bits.size > 0:
                        bits[place] = new_bits[row, t]
                    else:
                        bits[place] = np.uint8(0)
                lengths[row] += 1
                if dim == 0:
                    out[row, :, t] = np.float32(0)
                    continue
                for g in range(group):
                    for j in range(dim):
                        query[g, j] = _as_float(queries[row, g, t, j])
                _attend(
                    query, keys, values, positions, start, lengths[row], now, numbers, sinks[row % heads], fade,
                    fade_grace[row] if fade_grace.size > 0 else 0, mixed, weights,
                )  # fmt: skip
                out[row, :, t] = mixed
                if observe == SUM:
                    _merge(weights, lengths[row], merge, np.float32(1), value[start:])
                elif observe == STAMPS:
                    _stamp(weights, lengths[row], now, merge, marks, merged, value[start:])
                elif observe == MARKS:
                    _mark(weights, lengths[row], now, merge, marks, merged, bits[start:])
                elif observe == LAST:
                    _merge(weights, lengths[row], merge, np.float32(1) / np.float32(unit), shared)
            if not before:
                _make_room(
                    limit[first], target[first], planes, offsets, lengths, first, unit, now, window, limits, order, marks,
                    decay, probe, mean_of_plane, shared, by,
                )  # fmt: skip


# --------------------------------------------------------------------------------------------- attention over slots


@njit(nogil=True, fastmath=FAST, cache=True)
def decode(
    first_row: int, end_row: int,
    queries: Any, keys: Any, values: Any, positions: Any, offsets: Any, lengths: Any, query_positions: Any, sinks: Any,
    numbers: Any, fade: Any, fade_grace: Any, widest: int, out: Any, weights: Any,
) -> None:  # fmt: skip
    """Rows first_row to end_row - 1. queries, out (rows, group, queries, dim).

    weights (rows, group, queries, widest), or of size 0 if nobody asks.
    """
    rows, group, count, dim = queries.shape
    heads = rows // query_positions.shape[0]
    for row in range(first_row, end_row):
        query = np.empty((group, dim), np.float32)
        mixed = np.empty((group, out.shape[3]), np.float32)
        found = np.empty((group, widest), np.float32)
        for t in range(count):
            now = query_positions[row // heads, t]
            if now < 0:
                out[row, :, t] = np.float32(0)
                continue
            for g in range(group):
                for j in range(dim):
                    query[g, j] = _as_float(queries[row, g, t, j])
            held = lengths[row]
            grace = fade_grace[row] if fade_grace.size > 0 else 0
            _attend(
                query, keys, values, positions, offsets[row], held, now, numbers, sinks[row % heads], fade, grace, mixed, found
            )  # fmt: skip
            out[row, :, t] = mixed
            if weights.size > 0:
                weights[row, :, t, :held] = found[:, :held]


# --------------------------------------------------------------------------------------------------------- prefill


@njit(fastmath=FAST)
def _hide(logits: Any, positions: Any, now: int, window: int) -> None:
    """-inf for the slots that a query at `now` doesn't see."""
    for j in range(logits.shape[0]):
        seen = positions[j] >= 0 and positions[j] <= now and (window <= 0 or positions[j] > now - window)
        logits[j] = logits[j] if seen else -INFINITY


@njit(fastmath=FAST)
def _add_columns(weights: Any, factors: Any, count: int, how: int, mass: Any) -> None:
    """mass[j] += weights of slot j, merged over query heads for each of `count` queries. weights (group * queries, slots)."""
    group = weights.shape[0] // count
    if how == MAX:
        for i in range(count):
            for j in range(mass.shape[0]):
                most = weights[i, j] * factors[i]
                for g in range(1, group):
                    most = max(most, weights[g * count + i, j] * factors[g * count + i])
                mass[j] += most
        return
    share = np.float32(1) / np.float32(group) if how == MEAN else np.float32(1)
    for r in range(count if how == FIRST else weights.shape[0]):
        factor = factors[r] * share
        row = weights[r]
        for j in range(mass.shape[0]):
            mass[j] += row[j] * factor


@njit(nogil=True, fastmath=FAST, cache=True)
def softmax_columns(
    logits: Any, positions: Any, query_positions: Any, before: int, numbers: Any, sinks: Any, merge: int, mass: Any,
    factors: Any,
) -> None:  # fmt: skip
    """Logits (group * queries, slots) of one KV head become softmax weights but for `factors`; mass (slots,) is added to.

    merge: how query heads merge, -1 if nobody asks for mass
    before: how many slots come before the first query's own, where slots and queries are the same tokens in order; else -1.
    """
    rows, slots = logits.shape
    count = query_positions.shape[0]
    scale, softcap, window = numbers
    for r in range(rows):
        now, start, end = query_positions[r % count], 0, slots
        if before >= 0:
            end = before + r % count + 1
            start = max(0, end - window) if window > 0 else 0
        else:
            _hide(logits[r], positions, now, window)
        logits[r, :start] = np.float32(0)
        logits[r, end:] = np.float32(0)
        if now < 0:
            logits[r] = np.float32(0)
            factors[r] = np.float32(0)
        else:
            factors[r] = _exponentials(logits[r, start:end], scale, softcap, sinks[r // count])
    if merge < 0:
        return
    for block in range((slots + COLUMNS - 1) // COLUMNS):
        part = slice(block * COLUMNS, min(slots, (block + 1) * COLUMNS))
        _add_columns(logits[:, part], factors, count, merge, mass[part])
