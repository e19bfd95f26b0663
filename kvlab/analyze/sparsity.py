"""How sparse attention is (H2O: Zhang et al. 2023, arXiv 2306.14048, section 3.1 and Fig. 2)."""

from __future__ import annotations

from typing import Any

import pandas as pd
from torch import Tensor

from kvlab.analyze.base import Analysis, Chunk, by_layer, some_layers, zeros
from kvlab.shapes import Step

SMALL = 0.01
"""Of its row's maximum: what is below counts as nothing."""


class Sparsity(Analysis):
    """Share of entries below 1 % of their row's maximum, of each layer and query head.

    An entry is softmax attention of a query to a token that it may look at: not to later ones, nor to those outside a layer's
    sliding window, which are zero in any model.
    """

    title = "Sparsity: share of attention entries below 1 % of their row's maximum"
    meaning = (
        "mean: over a layer's query heads; least, most: its least and most sparse head. At 0.95 a query hardly looks at 95 % "
        "of the tokens before it."
    )

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []

    def begin(self, step: Step, text: Tensor) -> None:
        """Nothing counted yet."""
        kv_heads, group = step.queries.shape[1:3]
        self._small, self._seen = (zeros(step.queries, kv_heads, group) for _ in range(2))

    def see(self, chunk: Chunk) -> None:
        """Count entries, and small ones."""
        attention = chunk.attention
        small = (attention < SMALL * attention.amax(-1, keepdim=True)) & chunk.visible
        self._small += small.sum((0, -1, -2))
        self._seen += chunk.visible.sum((0, -1, -2))

    def end(self, step: Step) -> None:
        """A row for each query head."""
        shares = (self._small / self._seen).flatten().tolist()
        self._rows += [{"layer": step.layer_idx, "head": head, "sparsity": share} for head, share in enumerate(shares)]

    def tables(self) -> dict[str, pd.DataFrame]:
        """layer, head, sparsity: mean over texts."""
        return {"": pd.DataFrame(self._rows).groupby(["layer", "head"], as_index=False).mean()}

    def summary(self) -> pd.DataFrame:
        """Heads of a few layers."""
        heads = self.tables()[""].groupby("layer").sparsity
        return some_layers(pd.DataFrame({"mean": heads.mean(), "least": heads.min(), "most": heads.max()}).reset_index())

    def draw(self, figure: Any) -> None:
        """Sparsity by layer: a dot for each head, a line through their means."""
        heads = self.tables()[""]
        mean = heads.groupby("layer").sparsity.mean()
        axis = figure.subplots()
        axis.scatter(heads.layer, heads.sparsity, s=14, alpha=0.5, color="tab:blue", label="query heads")
        axis.plot(mean.index, mean, color="black", marker="o", markersize=3, label="mean of a layer")
        by_layer(axis, ylabel="share below 1 % of the row's maximum", ylim=(0, 1.02))
        axis.legend(loc="lower right")
