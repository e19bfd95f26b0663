"""Whether what mattered goes on to matter (Scissorhands: Liu et al. 2023, arXiv 2305.17118, section 3.3 and Fig. 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvlab.analyze.base import Analysis, Chunk, by_layer, in_text_order, some_layers, text_length
from kvlab.shapes import Step


class Persistence(Analysis):
    """Of the tokens of a text's first half that matter in its second half, the share that had mattered before.

    A token is pivotal at query t, the t-th of the text, if its attention, mean over a KV head's query heads, exceeds 1 / t.
    S1: tokens of the first half that are pivotal at some query of the first half; S2: at some query of the second half.
    Persistence is |S1 and S2| / |S2|, and 1 where S2 is empty: then nothing was missed.
    """

    title = "Persistence of importance: tokens that get more than average attention"
    meaning = (
        "persistence: of the first half's tokens that matter to queries of the second half, the share that mattered to queries "
        "of the first; s1, s2: share of the first half's tokens that matter to queries of the first and of the second half. "
        "If the halves had nothing to do with each other, persistence would be s1."
    )

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []

    def begin(self, step: Step, text: Tensor) -> None:
        """Nothing is pivotal yet."""
        self._first, self._second = (torch.zeros_like(step.positions, dtype=torch.bool) for _ in range(2))

    def see(self, chunk: Chunk) -> None:
        """Note what is pivotal at queries of either half."""
        where = chunk.query_positions
        pivotal = chunk.merged > (1 / (where + 1).to(chunk.merged.dtype))[:, None, :, None]
        early = where[0] < text_length(chunk.step) // 2
        self._first |= pivotal[:, :, early].any(2)
        self._second |= pivotal[:, :, ~early].any(2)

    def end(self, step: Step) -> None:
        """Compare the halves."""
        half = text_length(step) // 2
        first, second = (in_text_order(step, found)[:, :half] for found in (self._first, self._second))
        both, later = (first & second).sum(1), second.sum(1)
        ratio = np.where(later > 0, both / np.maximum(1, later), 1.0)
        shares = {"persistence": ratio.mean(), "s1": first.mean(), "s2": second.mean()}
        self._rows.append({"layer": step.layer_idx, **{name: float(share) for name, share in shares.items()}})

    def tables(self) -> dict[str, pd.DataFrame]:
        """layer, persistence, s1, s2: means over KV heads and texts."""
        return {"": pd.DataFrame(self._rows).groupby("layer", as_index=False).mean()}

    def summary(self) -> pd.DataFrame:
        """A few layers."""
        return some_layers(self.tables()[""])

    def lines(self) -> list[str]:
        """The setting of a policy that all this is for."""
        ratios = ",".join(f"{ratio:.4f}" for ratio in self.tables()[""].persistence)
        return ["for policy=scissorhands policy.layers=persistence:", f"policy.persistence=[{ratios}]"]

    def draw(self, figure: Any) -> None:
        """The three shares by layer."""
        rows = self.tables()[""]
        axis = figure.subplots()
        axis.plot(rows.layer, rows.persistence, color="black", marker="o", markersize=4, label="persistence |S1 ∩ S2| / |S2|")
        axis.plot(rows.layer, rows.s1, linestyle="--", label="|S1|: matter in the first half")
        axis.plot(rows.layer, rows.s2, linestyle="--", label="|S2|: matter in the second half")
        by_layer(axis, ylabel="share (S1, S2: of the first half's tokens)", ylim=(0, 1.02))
        axis.legend(loc="best")
