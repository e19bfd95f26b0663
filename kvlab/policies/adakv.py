"""Ada-KV (Feng et al. 2024, arXiv 2407.11550, section 4): SnapKV with a budget for each head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.budget import apportion, exact_share
from kvlab.policies.base import PolicyError, register
from kvlab.policies.snapkv import SnapKV
from kvlab.selection import NORMAL, RECENT
from kvlab.shapes import PerHead, Scores, Step, Tiers


@register("adakv")
@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV's votes; heads of a layer share its budget by how many of the layer's best tokens are theirs.

    alpha  share of the budget that stays even over heads, so that no head starves (the released runs use 0.2)

    Heads hold different numbers of tokens; the cache is ragged, so what a head gives up is really freed.
    """

    alpha: float = 0.2

    ragged: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise PolicyError(f"policy.alpha={self.alpha!r}: use a share between 0 and 1")

    def head_budget(self, step: Step, scores: Scores, tiers: Tiers) -> PerHead:
        """Split each layer's budget over its heads; what is protected anyway comes off the top."""
        budgets = step.budget.clone()
        held = (step.positions >= 0).sum(-1)  # (batch, kv_heads)
        protected = (tiers >= RECENT).sum(-1)
        for row in range(len(budgets)):
            base = (step.budget[row] - protected[row]).tolist()
            if min(base) > 0 and bool((held[row] > step.budget[row]).any()):
                shares = self._split(scores[row], step.positions[row], tiers[row] == NORMAL, base)
                split = (protected[row] + torch.tensor(shares, device=budgets.device)).tolist()
                budgets[row] = torch.tensor(_fill(split, held[row].tolist()), device=budgets.device)
        return budgets

    def _split(self, scores: Tensor, positions: Tensor, normal: Tensor, base: list[int]) -> list[int]:
        """Unprotected tokens of one layer's heads, summing to those of `base`. scores, ...: (kv_heads, slots)."""
        heads, slots = scores.shape
        head_of = torch.arange(heads, device=scores.device).repeat_interleave(slots)
        order = positions.flatten().argsort(dim=-1, descending=True, stable=True)  # newer first, then the lower head
        best_first = scores.flatten()[order].argsort(dim=-1, descending=True, stable=True)
        order = order[best_first]
        order = order[normal.flatten()[order]][: sum(base)]
        if len(order) < sum(base):  # fewer tokens than places, so all can be kept
            return base
        counts = head_of[order].bincount(minlength=heads).tolist()
        alpha = exact_share(self.alpha)
        shares = [float((1 - alpha) * count + alpha * even) for count, even in zip(counts, base, strict=True)]
        return apportion(shares, sum(base))


def _fill(budgets: list[int], held: list[int]) -> list[int]:
    """Hand places that a head can't fill to the first heads that can; the sum stays."""
    budgets = list(budgets)
    spare = min(
        sum(max(0, budget - has) for budget, has in zip(budgets, held, strict=True)),
        sum(max(0, has - budget) for budget, has in zip(budgets, held, strict=True)),
    )
    to_take, to_give = spare, spare
    for head, (budget, has) in enumerate(zip(budgets, held, strict=True)):
        taken = min(to_take, max(0, budget - has))
        given = min(to_give, max(0, has - budget))
        budgets[head] += given - taken
        to_take, to_give = to_take - taken, to_give - given
    return budgets
