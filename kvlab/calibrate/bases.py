"""Bases in which keys and values need few numbers, found from what they are on average. Knows no model.

Everything is in float64 and comes from sums of outer products, X^T X of the vectors seen, so that any number of texts takes no
more memory than one. Singular values below about 1e-8 of the largest are lost in this; keys in float32 have none that mean
anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.budget import exact_share

NULL = 1e-4
"""Part of the largest singular value of keys below which KQ-SVD takes a direction for one that keys don't have."""


@dataclass(frozen=True)
class Directions:
    """For each head that has its own (one for all: heads is 1), in order of importance: the first r are the best r.

    down   (heads, dim, dim): vectors times its first r columns are what is held
    up     (heads, dim, dim): what is held times its first r rows are the vectors again, but for what r numbers can't say
    sigma  (heads, dim): singular values, descending
    orthonormal  whether `up` is the transpose of `down`
    """

    down: Tensor
    up: Tensor
    sigma: Tensor
    orthonormal: bool


def outer(vectors: Tensor) -> Tensor:
    """X^T X of vectors (heads, count, dim): (heads, dim, dim) in float64, to be summed over texts."""
    exact = vectors.double()
    return exact.mT @ exact


def svd_bases(sums: Tensor) -> Directions:
    """Right singular vectors of vectors with these sums, (heads, dim, dim), not centred."""
    squares, vectors = (part.flip(-1) for part in torch.linalg.eigh(sums))
    return Directions(vectors, vectors.mT, squares.clamp(min=0).sqrt(), True)


def kq_bases(keys: Tensor, queries: Tensor, count: int) -> Directions:
    """What loses least of the dot products of keys and queries (KQ-SVD, arXiv 2512.05916); both as sums (heads, dim, dim).

    With C_K, C_Q the sums and U S V^T = C_K^(1/2) C_Q^(1/2): down = C_K^(-1/2) U, up = U^T C_K^(1/2), sigma = S, the products'
    own singular values. In down and up C_K is taken per key (of `count`), so that what is held is about 1. Directions that
    keys don't have are held as they are, last of all.
    """
    squares, vectors = torch.linalg.eigh(keys / count)
    scale = squares.clamp(min=0).sqrt()
    there = scale > NULL * scale.amax(-1, keepdim=True)
    left, sigma, _ = torch.linalg.svd(_along(vectors, scale * there) @ root_of(queries))
    scale = torch.where(there, scale, 1)
    return Directions(_along(vectors, 1 / scale) @ left, left.mT @ _along(vectors, scale), sigma * count**0.5, False)


def root_of(sums: Tensor) -> Tensor:
    """Symmetric square root of sums of outer products, (heads, dim, dim)."""
    squares, vectors = torch.linalg.eigh(sums)
    return _along(vectors, squares.clamp(min=0).sqrt())


def _along(vectors: Tensor, scale: Tensor) -> Tensor:
    """What stretches by scale (heads, dim) along these orthonormal directions, the columns of (heads, dim, dim)."""
    return (vectors * scale[..., None, :]) @ vectors.mT


# ------------------------------------------------------------------------------------------------------------- ranks

STEP = 0.02
"""Between two shares that are tried."""


def rank(sigma: Tensor, eps: float) -> int:
    """Directions needed for a share `eps` of the sum of singular values (heads, dim), the most of any head; all for 1."""
    if eps >= 1:
        return sigma.shape[-1]
    shares = (sigma / sigma.sum(-1, keepdim=True)).cumsum(-1)
    return max(1, int((shares < eps).sum(-1).max()))


def candidates(keys: Tensor, values: Tensor, first: float, floor: float) -> list[tuple[float, int, int]]:
    """Shares to be tried, from `first` on in steps, with their ranks of keys and values; while both are above floor * dim."""
    found, dim = [], keys.shape[-1]
    for number in range(round(first / STEP)):
        eps = round(first - STEP * number, 2)
        ranks = rank(keys, eps), rank(values, eps)
        if min(ranks) <= exact_share(floor) * dim:
            break
        found.append((eps, *ranks))
    return found
