"""Whether hash codes tell what is attended to (HashEvict: Liu et al. 2024, arXiv 2412.16187, its motivation)."""

from __future__ import annotations

from typing import Any

import pandas as pd
from torch import Tensor

from kvlab.analyze.base import Analysis, Chunk
from kvlab.hash_codes import HashSums
from kvlab.shapes import Step

BITS = (4, 8, 16, 24, 32, 48, 64)
"""Lengths of codes. Each is the beginning of the longest."""
SEEDS = 3


class Hashing(Analysis):
    """Pearson's r between attention of a query head to a key and the bits that their codes share, over all causal pairs."""

    title = "Hash codes: correlation of attention with the bits that the codes of query and key share"
    meaning = (
        "r: Pearson's, mean over query heads, layers, texts and 3 projections; least, most: of the layers. HashEvict drops the "
        "tokens whose codes share least with the query's."
    )

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []

    def begin(self, step: Step, text: Tensor) -> None:
        """Sums of nothing."""
        self._sums = HashSums(step.keys, step.layer_idx, step.queries.shape[2], BITS, SEEDS)

    def see(self, chunk: Chunk) -> None:
        """Add up these queries' pairs."""
        self._sums.add(chunk.queries, chunk.attention, chunk.visible)

    def end(self, step: Step) -> None:
        """Correlations of the layer."""
        for seed, row in enumerate(self._sums.r()):
            about = {"seed": seed, "layer": step.layer_idx}
            self._rows += [{"bits": bits, **about, "r": float(r)} for bits, r in zip(BITS, row, strict=True)]

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
