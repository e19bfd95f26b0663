"""Keys or values kept as packed codes of few bits: what kernels are given, and the definition of what they do with it.

A code stands for code * scale + zero of its group, in float32 (float64 for float64 queries and weights), which is not rounded
to the model's type: what attends sees the decoded numbers themselves. Codes are packed least significant bit first, one after
the other; a unit begins on a byte. No back end ever holds more than a block of decoded tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.kernels.reference import accumulate_type
from kvlab.shapes import Attention, Outputs, Queries

BITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
"""Bits that a code may have."""
BLOCK = 256
"""Tokens of a row that are decoded at a time, or one unit where that is longer."""
MOST = 65504.0
"""The largest float16."""


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that so many codes take, the last one's spare bits included."""
    return -(-count * bits // 8)


@dataclass(frozen=True)
class Packed:
    """One side, keys or values, of encoded tokens: all rows end to end. Tokens of a unit were encoded together.

    codes        (units, bytes) uint8: a unit's codes token by token, channel by channel, see `pack`
    scale, zero  (units, groups) float16; channel c is in group c // channels, so groups = ceil(dim / channels)
    offsets      (rows,) int64: first unit of each row; lengths (rows,) int64: its units
    bits         of a code: 1 to 8, or 16
    unit         tokens of a unit: 1 where each token has scales of its own
    dim          channels of a token; channels: how many share a scale
    widest       units of the largest row, on the host

    What is in units that no row uses is never looked at.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    offsets: Tensor
    lengths: Tensor
    bits: int
    unit: int
    dim: int
    channels: int
    widest: int

    def __post_init__(self) -> None:
        assert self.bits in BITS, self.bits
        units, groups = len(self.codes), -(-self.dim // self.channels)
        assert self.codes.dtype == torch.uint8 and self.codes.shape == (units, packed_bytes(self.unit * self.dim, self.bits))
        for part in (self.scale, self.zero):
            assert part.dtype == torch.float16 and part.shape == (units, groups), (part.dtype, part.shape)

    @property
    def tokens(self) -> int:
        """Tokens of the largest row."""
        return self.widest * self.unit


def pack(codes: Tensor, bits: int) -> Tensor:
    """Whole numbers (..., count), each below 2**bits, as bytes (..., ceil(count * bits / 8)) of uint8.

    Number i takes bits [i * bits, (i + 1) * bits); bit k is bit k % 8 of byte k // 8, where 0 is the least significant. Spare
    bits are 0.
    """
    assert bits in BITS, bits
    if bits == 8:
        return codes.to(torch.uint8)
    if bits == 16:
        return codes.to(torch.int32).to(torch.int16).contiguous().view(torch.uint8)  # low byte first, as machines have it
    size = packed_bytes(codes.shape[-1], bits)
    several = 8 // bits if bits in (1, 2, 4) else 8  # codes that end on a byte
    codes = _split(F.pad(codes, (0, -codes.shape[-1] % several)), several)
    if bits in (1, 2, 4):
        parts = [part.to(torch.uint8) << place * bits for place, part in enumerate(codes.unbind(-1))]
        return _joined(parts)
    word = _joined([part.to(torch.int64) << place * bits for place, part in enumerate(codes.unbind(-1))])
    spread = torch.stack([word >> 8 * place & 255 for place in range(bits)], -1)
    return spread.flatten(-2).to(torch.uint8)[..., :size]


def half_below(numbers: Tensor) -> Tensor:
    """The largest float16 not above each number, at least -65504."""
    half = numbers.clamp(-MOST, MOST).half()
    bits = half.view(torch.int16)
    lower = torch.where(bits < 0, bits + 1, torch.where(bits == 0, -32767, bits - 1)).to(torch.int16)
    return torch.where(half > numbers, lower.view(torch.half), half).clamp(min=-MOST)


def half_above(numbers: Tensor) -> Tensor:
    """The smallest float16 not below each number, at most 65504."""
    return -half_below(-numbers)


def quantise(units: Tensor, bits: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `dispatch.Quantise`."""
    assert bits in BITS, bits
    exact = units.to(accumulate_type(units))
    dim, top = units.shape[2], 2**bits - 1
    # A sum with 0 has no negative zero, so that the order of numbers doesn't matter.
    zero = half_below(-_most(-exact, channels)) + 0.0
    # By a tensor: devices multiply by the rounded inverse of a number, which is not the quotient.
    scale = half_above((_most(exact, channels) - zero.to(exact.dtype)) / exact.new_full((), top))
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    low, step = (part.to(exact.dtype).repeat_interleave(channels, -1)[:, None, :dim] for part in (zero, scale))
    codes = ((exact - low) / step).round().clamp(0, top)
    return pack(codes.to(torch.int32).flatten(1), bits), scale, zero


def _most(units: Tensor, channels: int) -> Tensor:
    """The largest number of each group, (n, groups), of units (n, tokens, dim)."""
    most = units.amax(1)
    if channels == 1:
        return most
    spare = -most.shape[1] % channels
    return _split(F.pad(most, (0, spare), value=-math.inf), channels).amax(-1)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers of what `pack` made, (..., bytes) uint8: (..., count) uint8, or int32 for 16 bits."""
    assert bits in BITS and packed.shape[-1] >= packed_bytes(count, bits), (bits, packed.shape, count)
    if bits == 8:
        return packed[..., :count]
    if bits == 16:
        aligned = packed[..., : 2 * count].clone(memory_format=torch.contiguous_format).view(-1)
        return (aligned.view(torch.int16).to(torch.int32) & 0xFFFF).view(*packed.shape[:-1], count)
    mask = 2**bits - 1
    if bits in (1, 2, 4):
        return torch.stack([packed >> place & mask for place in range(0, 8, bits)], -1).flatten(-2)[..., :count]
    whole = F.pad(packed, (0, -packed.shape[-1] % bits))
    word = _joined([part.to(torch.int64) << 8 * place for place, part in enumerate(_split(whole, bits).unbind(-1))])
    return torch.stack([word >> place * bits & mask for place in range(8)], -1).flatten(-2)[..., :count].to(torch.uint8)


def _split(tensor: Tensor, size: int) -> Tensor:
    """(..., n * size) as (..., n, size); n may be 0."""
    return tensor.unflatten(-1, (tensor.shape[-1] // size, size))


def _joined(parts: list[Tensor]) -> Tensor:
    """Numbers of which no two have a bit in common, as one."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole | part
    return whole


def dequantise(packed: Packed, first: int, end: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Units `first` to `end` - 1 of each row, decoded: (rows, (end - first) * unit, dim), 0 beyond a row's end."""
    place = torch.arange(first, end, device=packed.codes.device)
    inside = place < packed.lengths[:, None]
    index = (packed.offsets[:, None] + place).masked_fill(~inside, 0)
    codes = unpack(packed.codes[index], packed.bits, packed.unit * packed.dim).unflatten(-1, (packed.unit, packed.dim))
    scale, zero = (  # of nothing beyond a row's end, so that whatever codes stand there decode to 0
        part[index].masked_fill(~inside[..., None], 0).to(dtype).repeat_interleave(packed.channels, -1)[..., None, : packed.dim]
        for part in (packed.scale, packed.zero)
    )
    return (codes * scale + zero).flatten(1, 2)


def check_fits(tensor: Tensor, packed: Packed) -> None:
    """Kernels would read what isn't there. tensor: (batch, kv_heads, ...)."""
    assert tensor.shape[0] * tensor.shape[1] == len(packed.offsets) == len(packed.lengths), (tensor.shape, packed.offsets.shape)


def packed_logits(queries: Queries, packed: Packed) -> Attention:
    """See `dispatch.PackedLogits`; float64 for float64 queries."""
    check_fits(queries, packed)
    assert queries.shape[-1] == packed.dim, (queries.shape, packed.dim)
    exact = accumulate_type(queries)
    lines = queries.to(exact).flatten(2, 3).flatten(0, 1)
    out = lines.new_empty(*lines.shape[:2], packed.tokens)
    for first, end in _blocks(packed):
        part = slice(first * packed.unit, end * packed.unit)
        out[..., part] = lines @ dequantise(packed, first, end, exact).transpose(-1, -2)
    beyond = torch.arange(packed.tokens, device=out.device) >= (packed.lengths * packed.unit)[:, None, None]
    return out.masked_fill_(beyond, 0).view(*queries.shape[:4], packed.tokens)


def packed_mix(weights: Attention, packed: Packed) -> Outputs:
    """See `dispatch.PackedMix`; float64 for float64 weights."""
    check_fits(weights, packed)
    assert weights.shape[-1] >= packed.tokens, (weights.shape, packed.tokens)
    exact = accumulate_type(weights)
    lines = weights.to(exact).flatten(2, 3).flatten(0, 1)
    out = lines.new_zeros(*lines.shape[:2], packed.dim)
    for first, end in _blocks(packed):
        place = torch.arange(first * packed.unit, end * packed.unit, device=out.device)
        beyond = place >= (packed.lengths * packed.unit)[:, None, None]
        part = lines[..., first * packed.unit : end * packed.unit].masked_fill(beyond, 0)
        out += part @ dequantise(packed, first, end, exact)
    return out.view(*weights.shape[:4], packed.dim)


def _blocks(packed: Packed) -> list[tuple[int, int]]:
    """First and last + 1 of the units that are decoded at a time."""
    size = max(1, BLOCK // packed.unit)
    return [(first, min(packed.widest, first + size)) for first in range(0, packed.widest, size)]
