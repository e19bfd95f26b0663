"""Tiles of attention in Triton: what all kernels for GPUs are made of, and the constants that they share."""

from __future__ import annotations

import functools
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from kvlab.kernels import contract

# The order of contract.OBSERVE, contract.ORDER and contract.GROUPS; constexpr, as kernels may read no other globals.
NOTHING, SUM, LAST, MARKS, STAMPS = (tl.constexpr(place) for place in range(5))
AGE, VALUE, RANKED, EXPIRED, COUNT, DISTANCE, DECAYED = (tl.constexpr(place) for place in range(7))
MEAN, ADD, MAX, FIRST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
DEAD, NORMAL, RECENT, SPECIAL, SINK = (tl.constexpr(tier) for tier in range(5))
NONE = tl.constexpr(2**30)  # beyond all slots and positions
INFINITY = tl.constexpr(float("inf"))
BELOW = tl.constexpr(1 - contract.HAIR)
ALL, ENTER, SETTLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # stages of `scan_units`
MAX_SPLITS = 64


class Bits(NamedTuple):
    """A token's bits: `words` numbers of `size` bits; how many probes they are compared with; details of `Marks`, of which
    `ring` is the window."""

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
def visible(positions, now, WINDOW: tl.constexpr):
    """Which slots queries see. Shapes broadcast; empty slots and queries that don't exist are at -1."""
    seen = (positions >= 0) & (positions <= now)
    if WINDOW > 0:
        seen = seen & (positions > now - WINDOW)
    return seen


INTERPRETED = tl.constexpr(not isinstance(visible, triton.JITFunction))


@triton.jit
@no_type_check
def dot(a, b):
    """a @ b, summed in float32. The interpreter would multiply bfloat16's bits."""
    if INTERPRETED or a.dtype != b.dtype:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


@triton.jit
@no_type_check
def logits_of(queries, keys, scaling, SOFTCAP: tl.constexpr):
    """Scaled, capped dot products in float32: (BM, BD) and (BN, BD) give (BM, BN)."""
    x = dot(queries, tl.trans(keys)) * scaling
    if SOFTCAP > 0:  # tanh by way of exp(-2|x|), so that nothing overflows
        e = tl.exp(-2.0 * tl.abs(x / SOFTCAP))
        size = SOFTCAP * (1.0 - e) / (1.0 + e)
        x = tl.where(x > 0, size, -size)
    return x


@triton.jit
@no_type_check
def grace_of(graces, row):
    """A row's grace; what is beyond all positions still is in 32 bits."""
    return tl.minimum(tl.load(graces + row), NONE).to(tl.int32)


@triton.jit
@no_type_check
def faded(logits, position, now, grace, slope, floor, num_sink):
    """Logits of old tokens, lowered: slots' positions and queries' places broadcast."""
    over = tl.maximum(now - position - grace, 0).to(tl.float32)
    return logits + tl.where(position >= num_sink, tl.maximum(slope * over, floor), 0.0)


@triton.jit
@no_type_check
def mix(weights, values):
    """weights @ values, (BM, BN) float32 and (BN, BV), in float32."""
    if values.dtype == tl.float32:
        mixed = dot(weights, values)
    else:  # two halves of a weight lose little that float32 would keep, and both use matrix units
        high = weights.to(values.dtype)
        low = (weights - high.to(tl.float32)).to(values.dtype)
        mixed = dot(high, values) + dot(low, values)
    return mixed


@triton.jit
@no_type_check
def load_tile(pointer, lines, inside, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Vectors of DIM numbers, one a line; 0 outside. (lines, BLOCK)"""
    d = tl.arange(0, BLOCK)
    return tl.load(pointer + lines[:, None] * DIM + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
@no_type_check
def attend_tiles(
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
        grace = grace_of(fade[3], row)
    for i in range(low, high, BN):
        n = i + tl.arange(0, BN)
        inside = n < high
        position = tl.load(positions + start + n, mask=inside, other=-1).to(tl.int32)
        logits = logits_of(queries, load_tile(keys, start + n, inside, HD, BD), scaling, SOFTCAP)
        if fade is not None:
            logits = faded(logits, position[None, :], now[:, None], grace, fade[0], fade[1], fade[2])
        logits = tl.where(visible(position[None, :], now[:, None], WINDOW), logits, -INFINITY)
        if KEEP:
            tl.store(found + lines[:, None] + n[None, :], logits, mask=real[:, None] & inside[None, :])
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == -INFINITY, 0.0, new_top)
        weights = tl.exp(logits - shift[:, None])
        less = tl.exp(top - shift)
        total = total * less + tl.sum(weights, 1)
        mixed = mixed * less[:, None] + mix(weights, load_tile(values, start + n, inside, VD, BV))
        top = new_top
    return top, total, mixed


@triton.jit
@no_type_check
def denominator(top, total, sink):
    """With a sink, (shift, factor) such that exp(logit - shift) * factor are the weights; a factor of 0 if nothing is seen."""
    most = tl.maximum(top, sink)
    shift = tl.where(most == -INFINITY, 0.0, most)
    whole = total * tl.exp(top - shift) + tl.exp(sink - shift)
    return shift, tl.where(total > 0, 1.0 / tl.where(whole > 0, whole, 1.0), 0.0)


@triton.jit
@no_type_check
def sink_of(sinks, heads, real):
    """The sink's logit of each head, -inf where there is none."""
    logit = tl.where(heads >= 0, -INFINITY, -INFINITY)
    if sinks is not None:
        logit = tl.load(sinks + heads, mask=real, other=-INFINITY)
    return logit.to(tl.float32)


@triton.jit
@no_type_check
def merge_heads(weights, GROUP: tl.constexpr, MERGE: tl.constexpr):
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


# ------------------------------------------------------------------------------------------------------ on the host


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def splits_of(widest: int, programs: int, device: torch.device) -> int:
    """Shares of a row's tokens: enough to keep the GPU busy, none much shorter than 128 slots where rows are full."""
    if INTERPRETED.value:
        return max(1, min(3, triton.cdiv(widest, 16)))
    return max(1, min(MAX_SPLITS, triton.cdiv(4 * _multiprocessors(device), programs), triton.cdiv(widest, 128)))
