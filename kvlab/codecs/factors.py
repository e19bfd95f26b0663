"""A block of numbers as the product of a large and a tiny factor, of which the large one rounds well.

A block X (T, D), all heads of a layer side by side, is cut into runs of j channels: A (T * D / j, j) = T_L @ T_S by its
singular value decomposition, the singular values split evenly (Liu et al. 2024, arXiv 2405.12591). What runs have in common,
outlier channels above all, ends up in T_S (j, j); T_L, as (T, D), is rounded to symmetric integers with one step per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.kernels.packed import half_above, pack

VANISHED = 1e-6
"""Singular values up to this share of the largest count as 0."""
PIECE = 1024
"""Tokens that are in float64 at a time."""


def gram(block: Tensor, channels: int) -> Tensor:
    """A^T A of a block (kv_heads, n, dim), (channels, channels) in float64."""
    total = torch.zeros(channels, channels, dtype=torch.float64, device=block.device)
    for piece in block.split(PIECE, 1):
        runs = _runs(piece, channels)
        total += runs.mT @ runs
    return total


def balanced(grams: list[Tensor]) -> tuple[Tensor, Tensor]:
    """For each A^T A (j, j): what A is multiplied by to give T_L, and T_S, both (blocks, j, j) in float64, on the CPU.

    Singular values descend; each row of T_S has its first entry of largest magnitude positive. Vanished ones are 0 in both.
    Raises ValueError for numbers that aren't finite.
    """
    whole = torch.stack(grams).cpu()  # at once, so that a device is waited for once
    if not whole.isfinite().all():
        raise ValueError(
            "codec decoquant can't decompose keys or values that are infinite or NaN: the model's numbers have overflowed; "
            "load it in float32 or bfloat16"
        )
    values, vectors = torch.linalg.eigh(whole)  # ascending
    singular, vectors = values.clamp(min=0).sqrt().flip(-1), vectors.flip(-1)
    peak = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    vectors = torch.where(peak < 0, -vectors, vectors)
    there, root = singular > VANISHED * singular[..., :1], singular.sqrt()
    to_left = vectors * torch.where(there, 1 / root, 0)[..., None, :]
    return to_left, torch.where(there, root, 0)[..., None] * vectors.mT


def symmetric(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes (n, D) of rows (n, D), from 0 to 2**bits - 2 where the middle stands for 0, and steps (n,) in float16."""
    top = 2 ** (bits - 1) - 1
    step = half_above(rows.abs().amax(-1) / top)
    step = torch.where(step == 0, torch.ones_like(step), step)
    codes = (rows / step.to(rows.dtype)[:, None]).round().clamp(-top, top) + top
    return codes.to(torch.uint8), step


def encode_block(block: Tensor, to_left: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Packed codes (n, bytes) and steps (n,) of the tokens of a block (kv_heads, n, dim), given its factor from `balanced`."""
    exact, planes = torch.promote_types(block.dtype, torch.float32), []
    for piece in block.split(PIECE, 1):
        left = (_runs(piece, len(to_left)) @ to_left).to(exact)
        codes, step = symmetric(left.view(piece.shape[1], -1), bits)
        planes.append((pack(codes, bits), step))
    codes, step = (torch.cat(parts) for parts in zip(*planes, strict=True))
    return codes, step


def _runs(piece: Tensor, channels: int) -> Tensor:
    """Heads (kv_heads, n, dim) side by side in runs, (n * D / channels, channels) in float64."""
    return piece.transpose(0, 1).reshape(-1, channels).double()
