"""What each head looks at (FastGen: Ge et al. 2023, arXiv 2310.01801, Fig. 3): the policy's own profile, head by head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvlab.analyze.base import Analysis, Chunk, by_layer, zeros
from kvlab.kernels.reference import accumulate_type
from kvlab.policies.fastgen import FastGen
from kvlab.shapes import Step


class Heads(Analysis):
    """The cheapest of FastGen's sets of tokens that recovers enough of each KV head's attention."""

    title = "Heads: the cheapest set of tokens that recovers a head's attention, by FastGen's profile"
    meaning = (
        "heads: how many KV heads (of all layers and texts) have this as their cheapest set; recovery: the mean share of their "
        "attention that it holds. Sets: special tokens, punctuation, frequent (much looked at), local (near), full (all)."
    )

    def __init__(self, threshold: float) -> None:
        self._policy = FastGen(threshold=threshold)
        self._rows: list[dict[str, Any]] = []
        self._seen: dict[int, int] = {}  # texts of each layer

    def begin(self, step: Step, text: Tensor) -> None:
        """No attention received yet."""
        self._text, self._mass = text, zeros(step.positions)

    def see(self, chunk: Chunk) -> None:
        """The profile asks for the attention that each token received."""
        assert self._policy.group == "mean"
        self._mass += chunk.merged.sum(2)

    def end(self, step: Step) -> None:
        """Show the policy what it would see in a session of its own. It goes through the queries once more."""
        ids = self._text[0].to(step.positions.device)[step.positions.clamp(min=0)].to(torch.int32)  # of an empty slot: any
        nothing = {"kind": torch.zeros_like(step.positions, dtype=torch.uint8)}
        seen = replace(
            step,
            mass=self._mass.to(accumulate_type(step.keys)),
            token_ids=ids,
            state=nothing,
        )
        found = self._policy.profile(replace(seen, state=self._policy.remember(seen)))
        text = self._seen[step.layer_idx] = self._seen.get(step.layer_idx, -1) + 1
        chosen = zip(found["member"][0].tolist(), found["recovery"][0].tolist(), strict=True)
        for head, (member, recovery) in enumerate(chosen):
            row = {"text": text, "layer": step.layer_idx, "head": head}
            self._rows.append({**row, "member": self._policy.members[member], "recovery": recovery})

    def tables(self) -> dict[str, pd.DataFrame]:
        """text, layer, head, member, recovery."""
        return {"": pd.DataFrame(self._rows)}

    def summary(self) -> pd.DataFrame:
        """Heads of each set."""
        members = pd.DataFrame(self._rows).groupby("member").recovery.agg(["size", "mean"])
        members = members.reindex(list(self._policy.members)).fillna({"size": 0})
        counts = members["size"].astype(int)
        shares = counts / counts.sum()
        return pd.DataFrame({"heads": counts, "share": shares, "recovery": members["mean"]}).reset_index(names="set")

    def draw(self, figure: Any) -> None:
        """Which sets the heads of each layer have."""
        rows = pd.DataFrame(self._rows)
        shares = pd.crosstab(rows.layer, rows.member, normalize="index").reindex(
            columns=list(self._policy.members), fill_value=0
        )
        axis = figure.subplots()
        below = 0 * shares.iloc[:, 0]
        for member, colour in zip(shares, ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#bbbbbb"), strict=True):
            axis.bar(shares.index, shares[member], bottom=below, width=0.9, color=colour, label=member)
            below = below + shares[member]
        by_layer(axis, ylabel="share of the layer's KV heads", ylim=(0, 1))
        about = f"cheapest set that holds {self._policy.threshold:.0%}"
        figure.legend(title=about, loc="outside lower center", ncols=3, fontsize=9)
