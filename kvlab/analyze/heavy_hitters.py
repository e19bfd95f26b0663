"""Whether few tokens receive most attention (H2O: Zhang et al. 2023, arXiv 2306.14048, section 3.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from kvlab.analyze.base import Analysis, Chunk, by_layer, in_text_order, some_layers, text_length, zeros
from kvlab.shapes import Step

TOP = (5, 10, 20)
"""Per cent of the tokens, those with most attention, whose share is told."""
FITTED = 10
"""Per cent of the ranks that the power law is fitted to, from the first on."""
OVERLAP = 20
"""Per cent of the first half's tokens whose lead is followed."""
CURVE = 200
"""Ranks that are written of a curve, at most."""


class HeavyHitters(Analysis):
    """Attention that each token received, summed over queries: how unevenly it is spread, and how early that shows.

    Shares and the power law are of the mean over a layer's heads, the overlap is of each KV head.
    """

    title = "Heavy hitters: tokens ranked by the attention that they received"
    meaning = (
        "exponent, r2: of the power law share = c x rank^-exponent, fitted to the first 10 % of ranks; top N %: share of all "
        "attention on the N % tokens with most; overlap: of the first half's top 20 % by attention up to the text's half, the "
        "share that is still top 20 % at its end (0.2 by chance)."
    )

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []
        self._curves: dict[int, list[np.ndarray]] = {}

    def begin(self, step: Step, text: Tensor) -> None:
        """No attention received yet."""
        self._mass, self._early = (zeros(step.positions) for _ in range(2))

    def see(self, chunk: Chunk) -> None:
        """Add what these queries look at; apart from it, queries of the text's first half."""
        early = chunk.query_positions[0] < text_length(chunk.step) // 2
        self._mass += chunk.merged.sum(2)
        self._early += chunk.merged[:, :, early].sum(2)

    def end(self, step: Step) -> None:
        """Rank the layer's tokens."""
        mass, early = in_text_order(step, self._mass), in_text_order(step, self._early)
        curve = np.sort(mass.mean(0))[::-1]
        curve = curve / curve.sum()
        exponent, r2 = power_law(curve[: at_least_two(len(curve), FITTED)])
        row = {"layer": step.layer_idx, "exponent": exponent, "r2": r2}
        row |= {f"top{share}": float(curve[: max(1, len(curve) * share // 100)].sum()) for share in TOP}
        half = len(curve) // 2
        row["overlap"] = float(np.mean([overlap(now, then) for now, then in zip(early[:, :half], mass[:, :half], strict=True)]))
        self._rows.append(row)
        self._curves.setdefault(step.layer_idx, []).append(curve)

    def tables(self) -> dict[str, pd.DataFrame]:
        """A row for each layer; the sorted curve at logarithmically spaced ranks. Both means over texts."""
        curves = {layer: np.mean(found, 0) for layer, found in self._curves.items()}
        drawn = []
        for layer, curve in curves.items():
            ranks = np.unique(np.geomspace(1, len(curve), CURVE).round().astype(int))
            drawn.append(pd.DataFrame({"layer": layer, "rank": ranks, "share": curve[ranks - 1]}))
        return {"": pd.DataFrame(self._rows).groupby("layer", as_index=False).mean(), "curve": pd.concat(drawn)}

    def summary(self) -> pd.DataFrame:
        """A few layers."""
        return some_layers(self.tables()[""]).rename(columns={f"top{share}": f"top {share} %" for share in TOP})

    def draw(self, figure: Any) -> None:
        """The sorted curves of all layers; beside them shares and overlap by layer."""
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        figure.set_size_inches(11, 4.5)
        left, right = figure.subplots(1, 2)
        rows, curves = self.tables().values()
        shades, depth = colormaps["viridis"], Normalize(0, max(1, len(rows) - 1))
        for layer in rows.layer:
            curve = curves[curves.layer == layer]
            left.loglog(curve["rank"], curve["share"], color=shades(depth(layer)), linewidth=1)
        last = curves["rank"].max()
        left.axvspan(1, at_least_two(last, FITTED), color="black", alpha=0.06, label=f"first {FITTED} %: power law fitted")
        left.set(xlabel="rank of the token", ylabel="share of all attention", xlim=(1, last))
        left.legend(loc="lower left")
        figure.colorbar(ScalarMappable(depth, shades), ax=left, label="layer")
        for share in TOP:
            right.plot(rows.layer, rows[f"top{share}"], marker="o", markersize=3, label=f"attention on the top {share} %")
        right.plot(rows.layer, rows.overlap, color="black", linestyle="--", label="overlap of half-time and final top 20 %")
        by_layer(right, ylabel="share", ylim=(0, 1.02))
        right.legend(loc="lower right", fontsize=8)


def at_least_two(count: int, percent: int) -> int:
    """A part of a count, enough for a line to be fitted."""
    return max(2, count * percent // 100)


def power_law(curve: np.ndarray) -> tuple[float, float]:
    """(exponent, R²) of curve = c x rank^-exponent, by least squares between logarithms."""
    ranks, shares = np.log(np.arange(1, len(curve) + 1)), np.log(curve)
    slope, offset = np.polyfit(ranks, shares, 1)
    rest, total = ((shares - slope * ranks - offset) ** 2).sum(), ((shares - shares.mean()) ** 2).sum()
    return -float(slope), float(1 - rest / total) if total else 1.0


def overlap(now: np.ndarray, then: np.ndarray) -> float:
    """Of the tokens that lead now, the share that leads then, too."""
    count = max(1, len(now) * OVERLAP // 100)
    leading = [set(np.argsort(-mass, kind="stable")[:count].tolist()) for mass in (now, then)]
    return len(leading[0] & leading[1]) / count
