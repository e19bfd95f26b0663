"""Whether hash codes tell what is attended to (HashEvict: Liu et al. 2024, arXiv 2412.16187, its motivation)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvlab.analyze.base import Analysis, Chunk, zeros
from kvlab.policies.hashevict import projection
from kvlab.shapes import Step

BITS = (4, 8, 16, 24, 32, 48, 64)
"""Lengths of codes. Each is the beginning of the longest."""
SEEDS = 3


class Hashing(Analysis):
    """Pearson's r between attention of a query head to a key and the bits that their codes share, over all causal pairs.

    Codes are signs under the policy's Gaussian projection. The bits that two codes share (their length minus the Hamming
    distance) are half of their length and of the inner product of their signs, so r is that of the inner product.
    """

    title = "Hash codes: correlation of attention with the bits that the codes of query and key share"
    meaning = (
        "r: Pearson's, mean over query heads, layers, texts and 3 projections; least, most: of the layers. HashEvict drops the "
        "tokens whose codes share least with the query's."
    )

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []

    def begin(self, step: Step, text: Tensor) -> None:
        """Codes of all keys; sums of nothing."""
        self._keys = [_signs(step.keys, step.layer_idx, seed) for seed in range(SEEDS)]
        heads = step.queries.shape[1:3]
        self._alone = zeros(step.keys, 3, *heads)  # pairs, attention, its squares
        self._with = zeros(step.keys, SEEDS, len(BITS), 3, *heads)  # inner products, their squares, those with attention

    def see(self, chunk: Chunk) -> None:
        """Add up these queries' pairs; all lengths of codes grow out of each other."""
        attention, mask = chunk.attention, chunk.visible.to(chunk.attention.dtype)
        self._alone += torch.stack([_sum(mask.expand_as(attention)), _sum(attention), _sum(attention * attention)])
        for seed, keys in enumerate(self._keys):
            queries = _signs(chunk.queries, chunk.step.layer_idx, seed).flatten(2, 3)
            inner = torch.zeros_like(attention)
            for number, (start, end) in enumerate(pairwise((0, *BITS))):
                more = queries[..., start:end] @ keys[..., start:end].mT
                inner += more.view_as(attention) * mask
                self._with[seed, number] += torch.stack([_sum(inner), _sum(inner * inner), _sum(inner * attention)])

    def end(self, step: Step) -> None:
        """Correlations of the layer."""
        pairs, attention, squares = self._alone.cpu().numpy()
        inner, inner_squares, both = np.moveaxis(self._with.cpu().numpy(), 2, 0)
        above = pairs * both - inner * attention
        below = (pairs * inner_squares - inner**2) * (pairs * squares - attention**2)
        r = np.where(below > 0, above / np.sqrt(np.maximum(below, 1e-300)), 0.0)  # 0 where codes or attention don't vary
        for seed in range(SEEDS):
            for number, bits in enumerate(BITS):
                row = {"bits": bits, "seed": seed, "layer": step.layer_idx}
                self._rows.append({**row, "r": float(r[seed, number].mean())})

    def tables(self) -> dict[str, pd.DataFrame]:
        """bits, seed, layer, r: mean over query heads and texts."""
        return {"": pd.DataFrame(self._rows).groupby(["bits", "seed", "layer"], as_index=False).mean()}

    def _layers(self) -> pd.DataFrame:
        """r of each layer and length of codes: (bits, layers), mean over seeds."""
        return self.tables()[""].pivot_table(index="bits", columns="layer", values="r")

    def summary(self) -> pd.DataFrame:
        """A row for each length of codes."""
        layers = self._layers()
        found = {"r": layers.mean(axis=1), "least": layers.min(axis=1), "most": layers.max(axis=1)}
        return pd.DataFrame(found).reset_index()

    def draw(self, figure: Any) -> None:
        """r against the length of codes: each layer, their mean and range."""
        layers = self._layers()
        axis = figure.subplots()
        axis.fill_between(layers.index, layers.min(axis=1), layers.max(axis=1), alpha=0.15, label="range of layers")
        axis.plot(layers.index, layers.to_numpy(), color="tab:blue", alpha=0.3, linewidth=0.8)
        axis.plot(layers.index, layers.mean(axis=1), color="black", marker="o", markersize=4, label="mean of layers")
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set(xlabel="bits of a code", ylabel="Pearson's r of attention and shared bits", xticks=BITS)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left")


def _signs(vectors: Tensor, layer_idx: int, seed: int) -> Tensor:
    """Codes as 1 and -1: (..., head_dim) -> (..., bits) float32."""
    matrix = projection(seed, layer_idx, vectors.shape[-1], max(BITS), vectors.device)
    return (vectors.to(matrix.dtype) @ matrix > 0).to(matrix.dtype) * 2 - 1


def _sum(pairs: Tensor) -> Tensor:
    """Over queries and keys: (1, kv_heads, group, queries, slots) -> (kv_heads, group) float64."""
    return pairs.sum((-2, -1), dtype=torch.float64)[0]
