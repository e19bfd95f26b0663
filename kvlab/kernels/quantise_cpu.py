"""The quantiser of groups for processors, compiled by numba: a unit's scales, zeros and packed codes in one pass over it.

No operation may be reordered or fused here: codes, scales and zeros are those of `packed.quantise` to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from kvlab.kernels import packed, workers

SHARED = 2**16
"""Numbers from which on threads share the work; fewer are encoded before a thread wakes."""
NEGATIVE, ONE, NOT_A_NUMBER = 0x8000, 0x3C00, 0x7E00
"""Halves by their bits."""


@intrinsic
def _float_of_bits(context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""
    return types.float32(types.uint32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _bits_of_float(context: Any, number: Any) -> Any:
    """The 32 bits of a float32."""
    return types.uint32(types.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


@njit
def _half_below(number: Any) -> Any:
    """Bits of the largest float16 not above a float32, at least -65504; never those of a negative zero."""
    number = min(max(number, np.float32(-packed.MOST)), np.float32(packed.MOST))
    bits = np.int64(_bits_of_float(number))
    size = bits & 0x7FFFFFFF
    if size < 0x38800000:  # below 2**-14 halves are the multiples of 2**-24
        steps = abs(number) * np.float32(2.0**24)
        half = np.int64(steps)
        exact = np.float32(half) == steps
    else:
        half = (size >> 13) - (112 << 10)
        exact = size & 0x1FFF == 0
    if bits >> 31 == 0:
        return half
    half += 0 if exact else 1
    return half | NEGATIVE if half else half


@njit
def _value(half: Any) -> Any:
    """A finite float16, given by its bits, as float32; multiplying shifts exponents, subnormal numbers' too."""
    return _float_of_bits(np.uint32((half & NEGATIVE) << 16 | (half & 0x7FFF) << 13)) * np.float32(2.0**112)


@njit(error_model="numpy")
def _scale_and_zero(low: Any, high: Any, top: Any) -> tuple[Any, Any]:
    """Bits of both halves of a group with this smallest and largest number. top: the largest code, as float32"""
    if low != low:
        return NOT_A_NUMBER, NOT_A_NUMBER
    zero = _half_below(low)
    scale = _half_below(-((high - _value(zero)) / top))
    return scale ^ NEGATIVE if scale else ONE, zero


@njit
def _extremes(numbers: Any, low: Any, high: Any) -> None:
    """Each channel's smallest and largest number, of (tokens, dim); low is NaN where one is."""
    for c in range(low.shape[0]):
        low[c] = high[c] = numbers[0, c]
    for t in range(1, numbers.shape[0]):
        for c in range(low.shape[0]):
            x = numbers[t, c]
            low[c] = x if x < low[c] or x != x else low[c]
            high[c] = x if x > high[c] else high[c]


@njit
def _pack(codes: Any, bits: int, out: Any) -> None:
    """As `packed.pack`."""
    word, held, byte = np.uint32(0), 0, 0
    for code in codes:
        word |= np.uint32(code) << np.uint32(held)
        held += bits
        while held >= 8:
            out[byte] = np.uint8(word & np.uint32(255))
            word >>= np.uint32(8)
            held -= 8
            byte += 1
    if held:
        out[byte] = np.uint8(word)


@njit(nogil=True, error_model="numpy", cache=True)
def encode(first: int, end: int, units: Any, bits: int, channels: int, code: Any, scale: Any, zero: Any) -> None:
    """Units first to end - 1 of units (n, tokens, dim) float32. scale, zero: float16 as int16"""
    tokens, dim = units.shape[1:]
    low, high = np.empty(dim, np.float32), np.empty(dim, np.float32)
    found = np.empty((tokens, dim), np.uint16)
    top, whole = np.float32(2**bits - 1), np.float32(2.0**23)
    for u in range(first, end):
        numbers = units[u]
        _extremes(numbers, low, high)
        for group in range(scale.shape[1]):
            begin, stop = group * channels, min(dim, (group + 1) * channels)
            least, most = low[begin], high[begin]
            for c in range(begin + 1, stop):
                least = low[c] if low[c] < least or low[c] != low[c] else least
                most = high[c] if high[c] > most else most
            a, b = _scale_and_zero(least, most, top)
            scale[u, group], zero[u, group] = np.int16(a), np.int16(b)
            step, floor = _value(a), _value(b)
            for c in range(begin, stop):  # from here on each channel's scale and zero
                high[c], low[c] = step, floor
        for t in range(tokens):
            for c in range(dim):
                number = (numbers[t, c] - low[c]) / high[c]
                number = number if number > np.float32(0) else np.float32(0)
                number = number if number < top else top
                # From 2**23 on floats are the whole numbers: a sum is rounded to one, halves to even.
                found[t, c] = np.uint16(np.int32(number + whole) - np.int32(whole))
        _pack(found.reshape(-1), bits, code[u])


def quantise(units: Tensor, bits: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `dispatch.Quantise`."""
    if units.dtype == torch.float64:
        return packed.quantise(units, bits, channels)
    assert bits in packed.BITS, bits
    (count, tokens, dim), groups = units.shape, -(-units.shape[2] // channels)
    code = torch.empty(count, packed.packed_bytes(tokens * dim, bits), dtype=torch.uint8, device="cpu")
    scale, zero = (torch.empty(count, groups, dtype=torch.int16, device="cpu") for _ in range(2))
    numbers = units.detach().float().contiguous()
    arguments = (numbers.numpy(), bits, channels, code.numpy(), scale.numpy(), zero.numpy())
    if numbers.numel() < SHARED:
        encode(0, count, *arguments)
    else:
        workers.over_rows(encode, count, arguments)
    return code, scale.view(torch.float16), zero.view(torch.float16)
