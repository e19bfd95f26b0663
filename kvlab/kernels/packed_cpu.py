"""Kernels for processors that read packed codes, compiled by numba: dot products with keys, weighted sums of values.

A block of a row's tokens is unpacked into a buffer that stays in a core's innermost cache, and everything is computed from
there. Where the tokens of a unit share scales, these go into the query, or into the sum of the unit's tokens, so that a code
takes part as the number it is; where each token has its own, the block is decoded in the buffer. Each thread has rows of its
own. All that is compiled is in this file, since numba looks at one file's date when it decides whether to compile again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from kvlab.kernels import workers
from kvlab.kernels.packed import Packed, check_fits
from kvlab.shapes import Attention, Outputs, Queries

FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be reordered and fused; infinities and NaN mean what they mean."""
TOKENS = 32
"""Tokens of a block: a multiple of 8, so that it begins on a byte whatever the bits and dims."""


@intrinsic
def _float_of_bits(context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""
    return types.float32(types.uint32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@njit(fastmath=FAST, inline="always")
def _half(number: Any) -> Any:
    """A float16 kept in int16, as float32; multiplying shifts exponents, subnormal numbers' too."""
    bits = np.uint32(np.uint16(number))
    sign, size = (bits & np.uint32(0x8000)) << np.uint32(16), (bits & np.uint32(0x7FFF)) << np.uint32(13)
    if size >= np.uint32(0x0F800000):  # infinity, NaN
        return _float_of_bits(sign | size | np.uint32(0x7F800000))
    return _float_of_bits(sign | size) * np.float32(2.0**112)


@njit(fastmath=FAST)
def _unpack(stream: Any, bits: int, out: Any) -> None:
    """The first codes, of less than 8 bits, of a stream of bytes. out (count,) uint8"""
    count = out.shape[0]
    mask, done = np.uint8((1 << bits) - 1), 0
    if bits == 4:
        done = count // 2 * 2
        for i in range(count // 2):
            byte = stream[i]
            out[2 * i] = byte & np.uint8(15)
            out[2 * i + 1] = byte >> np.uint8(4)
    elif bits == 2:
        done = count // 4 * 4
        for i in range(count // 4):
            byte = stream[i]
            out[4 * i] = byte & np.uint8(3)
            out[4 * i + 1] = (byte >> np.uint8(2)) & np.uint8(3)
            out[4 * i + 2] = (byte >> np.uint8(4)) & np.uint8(3)
            out[4 * i + 3] = byte >> np.uint8(6)
    else:
        done = count // 8 * 8
        for i in range(count // 8):
            word = np.uint64(0)
            for j in range(bits):
                word |= np.uint64(stream[bits * i + j]) << np.uint64(8 * j)
            for j in range(8):
                out[8 * i + j] = np.uint8(word >> np.uint64(bits * j)) & mask
    for i in range(done, count):  # the last byte may be the stream's last
        first, shift = i * bits // 8, i * bits % 8
        word32 = np.int32(stream[first])
        if shift + bits > 8:
            word32 |= np.int32(stream[first + 1]) << 8
        out[i] = np.uint8(word32 >> shift) & mask


@njit(fastmath=FAST)
def _small(stream: Any, bits: int, scratch: Any) -> Any:
    """A stream's first codes, of 8 bits at most, one a byte: as many as scratch (count,) uint8 has room for."""
    if bits == 8:
        return stream[: scratch.shape[0]]
    _unpack(stream, bits, scratch)
    return scratch


@njit(fastmath=FAST)
def _numbers(stream: Any, bits: int, scratch: Any, out: Any) -> None:
    """A stream's first codes as float32. out (count,); scratch (>= count,) uint8"""
    if bits == 16:
        for i in range(out.shape[0]):
            out[i] = np.float32(np.int32(stream[2 * i]) | np.int32(stream[2 * i + 1]) << 8)
        return
    codes = _small(stream, bits, scratch[: out.shape[0]])
    for i in range(out.shape[0]):
        out[i] = np.float32(np.int32(codes[i]))


@njit(fastmath=FAST)
def _spread(numbers: Any, channels: int, out: Any) -> None:
    """Each channel's number, from one for each group."""
    if channels == 1:
        for j in range(out.shape[0]):
            out[j] = _half(numbers[j])
        return
    for group in range(numbers.shape[0]):
        out[group * channels : (group + 1) * channels] = _half(numbers[group])


@njit(fastmath=FAST)
def _decode(codes: Any, scale: Any, zero: Any, bits: int, channels: int, scratch: Any, out: Any) -> None:
    """Units of one token each, decoded. codes (tokens, bytes), out (tokens, dim); scratch (>= tokens * dim,) uint8"""
    tokens, dim = out.shape
    whole = 8 * codes.shape[1] == dim * bits  # no spare bits between tokens
    if bits < 16 and whole:
        small, line = _small(codes.reshape(-1), bits, scratch[: tokens * dim]), out.reshape(-1)
        for i in range(tokens):
            for group in range(scale.shape[1]):
                a, b = _half(scale[i, group]), _half(zero[i, group])
                part = slice(i * dim + group * channels, i * dim + min(dim, (group + 1) * channels))
                given, decoded = small[part], line[part]
                for j in range(given.shape[0]):
                    decoded[j] = np.float32(np.int32(given[j])) * a + b
        return
    for i in range(tokens):
        _numbers(codes[i], bits, scratch, out[i])
        for group in range(scale.shape[1]):
            a, b = _half(scale[i, group]), _half(zero[i, group])
            decoded = out[i, group * channels : (group + 1) * channels]
            for j in range(decoded.shape[0]):
                decoded[j] = decoded[j] * a + b


@njit(fastmath=FAST)
def _dots(query: Any, keys: Any, start: Any, out: Any) -> None:
    """out[g, i] = start[g] + query[g] . keys[i]; four keys at a time, so that a query is loaded once for them."""
    lines, dim = query.shape
    count = keys.shape[0]
    for block in range(count // 4):
        i = 4 * block
        a, b, c, d = keys[i], keys[i + 1], keys[i + 2], keys[i + 3]
        for g in range(lines):
            s0 = s1 = s2 = s3 = np.float32(0)
            for j in range(dim):
                x = query[g, j]
                s0 += x * a[j]
                s1 += x * b[j]
                s2 += x * c[j]
                s3 += x * d[j]
            s = start[g]
            out[g, i], out[g, i + 1], out[g, i + 2], out[g, i + 3] = s + s0, s + s1, s + s2, s + s3
    for i in range(count // 4 * 4, count):
        for g in range(lines):
            s = np.float32(0)
            for j in range(dim):
                s += query[g, j] * keys[i, j]
            out[g, i] = start[g] + s


@njit(fastmath=FAST)
def _add(weights: Any, values: Any, out: Any) -> None:
    """out[g] += sum over i of weights[g, i] * values[i]."""
    lines, dim = out.shape
    count = values.shape[0]
    for block in range(count // 4):
        i = 4 * block
        a, b, c, d = values[i], values[i + 1], values[i + 2], values[i + 3]
        for g in range(lines):
            w0, w1, w2, w3 = weights[g, i], weights[g, i + 1], weights[g, i + 2], weights[g, i + 3]
            for j in range(dim):
                out[g, j] += w0 * a[j] + w1 * b[j] + w2 * c[j] + w3 * d[j]
    for i in range(count // 4 * 4, count):
        for g in range(lines):
            for j in range(dim):
                out[g, j] += weights[g, i] * values[i, j]


@njit(nogil=True, fastmath=FAST, cache=True)
def logits(
    first_row: int, end_row: int, queries: Any, codes: Any, scale: Any, zero: Any, offsets: Any, lengths: Any, bits: int,
    unit: int, channels: int, out: Any,
) -> None:  # fmt: skip
    """Rows first_row to end_row - 1. queries (rows, lines, dim), out (rows, lines, tokens)."""
    lines, dim = queries.shape[1:]
    buffer, scratch = np.empty((TOKENS, dim), np.float32), np.empty(TOKENS * dim, np.uint8)
    steps, floors = np.empty(dim, np.float32), np.empty(dim, np.float32)
    folded, start = np.empty((lines, dim), np.float32), np.zeros(lines, np.float32)
    for row in range(first_row, end_row):
        query, found, count = queries[row], out[row], lengths[row]
        held = slice(offsets[row], offsets[row] + count)
        code, step, floor = codes[held], scale[held], zero[held]
        found[:, count * unit :] = np.float32(0)
        if unit == 1:
            for t in range(0, count, TOKENS):
                part = slice(t, min(count, t + TOKENS))
                block = buffer[: part.stop - t]
                _decode(code[part], step[part], floor[part], bits, channels, scratch, block)
                _dots(query, block, start, found[:, part])
            continue
        for u in range(count):
            _spread(step[u], channels, steps)
            _spread(floor[u], channels, floors)
            for g in range(lines):
                s = np.float32(0)
                for j in range(dim):
                    folded[g, j] = query[g, j] * steps[j]
                    s += query[g, j] * floors[j]
                start[g] = s
            for t in range(0, unit, TOKENS):
                block = buffer[: min(TOKENS, unit - t)]
                _numbers(code[u, t * dim * bits // 8 :], bits, scratch, block.reshape(-1))
                _dots(folded, block, start, found[:, u * unit + t : u * unit + t + block.shape[0]])


@njit(nogil=True, fastmath=FAST, cache=True)
def mix(
    first_row: int, end_row: int, weights: Any, codes: Any, scale: Any, zero: Any, offsets: Any, lengths: Any, bits: int,
    unit: int, channels: int, out: Any,
) -> None:  # fmt: skip
    """Rows first_row to end_row - 1. weights (rows, lines, >= tokens), out (rows, lines, dim)."""
    lines, dim = out.shape[1:]
    buffer, scratch = np.empty((TOKENS, dim), np.float32), np.empty(TOKENS * dim, np.uint8)
    steps, floors = np.empty(dim, np.float32), np.empty(dim, np.float32)
    mixed = np.empty((lines, dim), np.float32)
    for row in range(first_row, end_row):
        weight, result, count = weights[row], out[row], lengths[row]
        held = slice(offsets[row], offsets[row] + count)
        code, step, floor = codes[held], scale[held], zero[held]
        result[:] = np.float32(0)
        if unit == 1:
            for t in range(0, count, TOKENS):
                part = slice(t, min(count, t + TOKENS))
                block = buffer[: part.stop - t]
                _decode(code[part], step[part], floor[part], bits, channels, scratch, block)
                _add(weight[:, part], block, result)
            continue
        for u in range(count):
            _spread(step[u], channels, steps)
            _spread(floor[u], channels, floors)
            mixed[:] = np.float32(0)
            for t in range(0, unit, TOKENS):
                block = buffer[: min(TOKENS, unit - t)]
                _numbers(code[u, t * dim * bits // 8 :], bits, scratch, block.reshape(-1))
                _add(weight[:, u * unit + t : u * unit + t + block.shape[0]], block, mixed)
            for g in range(lines):
                total = np.float32(0)
                for i in range(u * unit, (u + 1) * unit):
                    total += weight[g, i]
                for j in range(dim):
                    result[g, j] += mixed[g, j] * steps[j] + total * floors[j]


def packed_logits(queries: Queries, packed: Packed) -> Attention:
    """See `dispatch.PackedLogits`."""
    check_fits(queries, packed)
    assert queries.shape[-1] == packed.dim, (queries.shape, packed.dim)
    lines = _lines(queries)
    out = torch.empty(*lines.shape[:2], packed.tokens, dtype=torch.float32, device="cpu")
    workers.over_rows(logits, len(lines), (lines.numpy(), *_arrays(packed), out.numpy()))
    return out.view(*queries.shape[:4], packed.tokens)


def packed_mix(weights: Attention, packed: Packed) -> Outputs:
    """See `dispatch.PackedMix`."""
    check_fits(weights, packed)
    assert weights.shape[-1] >= packed.tokens, (weights.shape, packed.tokens)
    lines = _lines(weights)
    out = torch.empty(*lines.shape[:2], packed.dim, dtype=torch.float32, device="cpu")
    workers.over_rows(mix, len(lines), (lines.numpy(), *_arrays(packed), out.numpy()))
    return out.view(*weights.shape[:4], packed.dim)


def _lines(tensor: Tensor) -> Tensor:
    """(batch, kv_heads, group, queries, numbers) as (rows, lines, numbers) of float32, without gaps."""
    return tensor.detach().flatten(2, 3).flatten(0, 1).float().contiguous()


def _arrays(packed: Packed) -> tuple[Any, ...]:
    """What both kernels read; float16 as int16."""
    codes, *halves = (part.contiguous() for part in (packed.codes, packed.scale, packed.zero))
    numbers = (packed.offsets.numpy(), packed.lengths.numpy(), packed.bits, packed.unit, packed.channels)
    return codes.numpy(), *(part.view(torch.int16).numpy() for part in halves), *numbers
