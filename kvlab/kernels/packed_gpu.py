"""Kernels for GPUs, in Triton, that read packed codes: dot products with keys, weighted sums of values.

Each program decodes a tile of tokens at a time, from the bytes that hold its codes, and multiplies in float32. Nothing waits
for the device: lengths live there, and how often a kernel is launched depends on shapes alone.
"""

from __future__ import annotations

import functools
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlab.kernels.gpu_tiles import INTERPRETED, dot, load_tile, splits_of
from kvlab.kernels.packed import Packed, check_fits
from kvlab.shapes import Attention, Outputs, Queries

# Names in kernels: `side`: codes, scale, zero, offsets, lengths of Packed; SIZE bytes and GROUPS scales of a unit of UNIT
# tokens; DIM channels, BD those rounded up to a power of two; BM lines (queries of a row's heads) and BN tokens in a tile.


@triton.jit
@no_type_check
def _decoded(
    side, first, n, inside, BITS: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Tokens n of a row whose first unit this is, decoded: (n, BD) float32, 0 outside."""
    codes, scale, zero = side[0], side[1], side[2]
    d = tl.arange(0, BD)
    real = inside[:, None] & (d < DIM)[None, :]
    unit = (first + n // UNIT)[:, None]
    bit = ((n % UNIT)[:, None] * DIM + d[None, :]) * BITS
    byte = bit // 8
    found = tl.load(codes + unit * SIZE + byte, mask=real, other=0).to(tl.int32)
    if 8 % BITS != 0:  # a code may end in the next byte
        more = tl.load(codes + unit * SIZE + byte + 1, mask=real & (byte + 1 < SIZE), other=0)
        found = found | more.to(tl.int32) << 8
    code = (found >> bit % 8) & ((1 << BITS) - 1)
    group = unit * GROUPS + (d // CHANNELS)[None, :]
    step = tl.load(scale + group, mask=real, other=0.0).to(tl.float32)
    return code.to(tl.float32) * step + tl.load(zero + group, mask=real, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _logits(
    queries, side, out, lines, width, BITS: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BN tokens of one row, BM of its lines. queries (rows * lines, DIM), out (rows * lines, width)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    inside = n < tl.load(side[4] + row) * UNIT
    keys = _decoded(side, tl.load(side[3] + row), n, inside, BITS, UNIT, SIZE, GROUPS, CHANNELS, DIM, BD)
    line = row * lines + m
    found = dot(load_tile(queries, line, m < lines, DIM, BD).to(tl.float32), tl.trans(keys))
    found = tl.where(inside[None, :], found, 0.0)
    tl.store(out + line[:, None] * width + n[None, :], found, mask=(m < lines)[:, None] & (n < width)[None, :])


@triton.jit
@no_type_check
def _mix(
    weights, side, parts, lines, stride, splits, BITS: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr,
    GROUPS: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One share of a row's tokens, BM of its lines. A line's weights begin `stride` after the last's; parts (rows * lines,
    splits, DIM).
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    line = row * lines + m
    first, held = tl.load(side[3] + row), (tl.load(side[4] + row) * UNIT).to(tl.int32)
    share = tl.cdiv(tl.cdiv(held, splits), BN) * BN  # of this row's tokens, so that ragged rows use all programs too
    mixed = tl.zeros((BM, BD), tl.float32)
    for i in range(split * share, tl.minimum(held, (split + 1) * share), BN):
        n = i + tl.arange(0, BN)
        inside = n < held
        values = _decoded(side, first, n, inside, BITS, UNIT, SIZE, GROUPS, CHANNELS, DIM, BD)
        place = weights + line[:, None] * stride + n[None, :]
        mixed += dot(tl.load(place, mask=(m < lines)[:, None] & inside[None, :], other=0.0).to(tl.float32), values)
    d = tl.arange(0, BD)
    place = parts + (line * splits + split)[:, None] * DIM + d[None, :]
    tl.store(place, mixed, mask=(m < lines)[:, None] & (d < DIM)[None, :])


def packed_logits(queries: Queries, packed: Packed) -> Attention:
    """See `dispatch.PackedLogits`."""
    check_fits(queries, packed)
    assert queries.shape[-1] == packed.dim, (queries.shape, packed.dim)
    rows, lines = len(packed.offsets), queries.shape[2] * queries.shape[3]
    out = torch.empty(*queries.shape[:4], packed.tokens, dtype=torch.float32, device=queries.device)
    how = _how(packed, lines)
    grid = (rows, triton.cdiv(packed.tokens, how["BN"]), triton.cdiv(lines, how["BM"]))
    if packed.tokens:
        with torch.cuda.device_of(queries):
            _logits[grid](queries.contiguous(), _side(packed), out, lines, packed.tokens, **how)
    return out


def packed_mix(weights: Attention, packed: Packed) -> Outputs:
    """See `dispatch.PackedMix`."""
    check_fits(weights, packed)
    assert weights.shape[-1] >= packed.tokens, (weights.shape, packed.tokens)
    rows, lines = len(packed.offsets), weights.shape[2] * weights.shape[3]
    flat = weights.flatten(0, 3)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    how = _how(packed, lines)
    blocks = triton.cdiv(lines, how["BM"])
    splits = splits_of(packed.tokens, rows * blocks, weights.device)
    parts = torch.empty(*weights.shape[:4], splits, packed.dim, dtype=torch.float32, device=weights.device)
    with torch.cuda.device_of(weights):
        _mix[(rows, splits, blocks)](flat, _side(packed), parts, lines, flat.stride(0), splits, **how)
    return parts[..., 0, :] if splits == 1 else parts.sum(-2)


def _side(packed: Packed) -> tuple[Tensor, ...]:
    parts = (packed.codes, packed.scale, packed.zero, packed.offsets, packed.lengths)
    return tuple(part.contiguous() for part in parts)


def _how(packed: Packed, lines: int) -> dict[str, Any]:
    """What kernels are compiled for."""
    return {
        "BITS": packed.bits, "UNIT": packed.unit, "SIZE": packed.codes.shape[1], "GROUPS": packed.scale.shape[1],
        "CHANNELS": packed.channels, "DIM": packed.dim, **_tiles(packed.dim, lines),
    }  # fmt: skip


@functools.cache
def _tiles(dim: int, lines: int) -> dict[str, int]:
    """BM: matrix products want 16 at least. BN: a tile of decoded tokens takes 16 KiB at most."""
    padded = max(16, triton.next_power_of_2(dim))
    if INTERPRETED.value:
        return {"BD": padded, "BM": 16, "BN": 64}
    return {"BD": padded, "BM": max(16, min(64, triton.next_power_of_2(lines))), "BN": max(16, min(128, 2**12 // padded))}
