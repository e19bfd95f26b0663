"""Pearson's r of attention with the bits that hash codes share (HashEvict: Liu et al. 2024, arXiv 2412.16187, its motivation).

Codes are signs under the policy's Gaussian projection. The bits that two codes share (their length minus the Hamming distance)
are half of their length and of the inner product of their signs, so r is that of the inner product.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvlab.policies.hashevict import projection
from kvlab.shapes import Attention, Keys, Queries

DRAWN = 64
"""Bits of a projection that are drawn at least, so that shorter codes are the beginning of longer ones everywhere."""


class HashSums:
    """Sums over the causal pairs of one layer of one text, whose queries come some at a time.

    bits   lengths of codes, ascending; each is the beginning of the longest
    seeds  how many projections, drawn from 0, 1, ...
    """

    def __init__(self, keys: Keys, layer_idx: int, group: int, bits: Sequence[int], seeds: int) -> None:
        """keys: of the whole text, of one sequence; group: query heads that share a KV head."""
        self.bits, self.seeds, self._layer = tuple(bits), seeds, layer_idx
        self._keys = [self._signs(keys, seed) for seed in range(seeds)]
        heads = (keys.shape[1], group)
        self._alone = torch.zeros(3, *heads, dtype=torch.float64, device=keys.device)  # pairs, attention, its squares
        # Inner products, their squares, those with attention.
        self._with = torch.zeros(seeds, len(self.bits), *self._alone.shape, dtype=torch.float64, device=keys.device)

    def add(self, queries: Queries, attention: Attention, visible: Tensor) -> None:
        """These queries' pairs; all lengths of codes grow out of each other.

        visible  what each query may look at, which broadcasts to attention's shape
        """
        mask = visible.to(attention.dtype)
        self._alone += torch.stack([_sum(mask.expand_as(attention)), _sum(attention), _sum(attention * attention)])
        for seed, keys in enumerate(self._keys):
            codes = self._signs(queries, seed).flatten(2, 3)
            inner = torch.zeros_like(attention)
            for number, (start, end) in enumerate(pairwise((0, *self.bits))):
                more = codes[..., start:end] @ keys[..., start:end].mT
                inner += more.view_as(attention) * mask
                self._with[seed, number] += torch.stack([_sum(inner), _sum(inner * inner), _sum(inner * attention)])

    def r(self) -> np.ndarray:
        """Mean over query heads: (seeds, bits); 0 for a head whose codes or attention don't vary."""
        pairs, attention, squares = self._alone.cpu().numpy()
        inner, inner_squares, both = np.moveaxis(self._with.cpu().numpy(), 2, 0)
        above = pairs * both - inner * attention
        below = (pairs * inner_squares - inner**2) * (pairs * squares - attention**2)
        return np.where(below > 0, above / np.sqrt(np.maximum(below, 1e-300)), 0.0).mean((2, 3))

    def _signs(self, vectors: Tensor, seed: int) -> Tensor:
        """Codes as 1 and -1: (..., head_dim) -> (..., bits) float32."""
        longest = self.bits[-1]
        matrix = projection(seed, self._layer, vectors.shape[-1], max(longest, DRAWN), vectors.device)[:, :longest]
        return (vectors.to(matrix.dtype) @ matrix > 0).to(matrix.dtype) * 2 - 1


def _sum(pairs: Tensor) -> Tensor:
    """Over queries and keys: (1, kv_heads, group, queries, slots) -> (kv_heads, group) float64."""
    return pairs.sum((-2, -1), dtype=torch.float64)[0]
