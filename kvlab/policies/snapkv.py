"""SnapKV (Li et al. 2024, arXiv 2404.14469, section 4): the prompt's last queries vote on what to keep of it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from kvlab.kernels.reference import merge_group
from kvlab.policies.base import Group, Policy, PolicyError, register
from kvlab.shapes import Kept, PerHead, Positions, Scores, Step


@register("snapkv")
@dataclass(frozen=True)
class SnapKV(Policy):
    """At the prompt's end keep what its last queries attend to, pooled over neighbours, and those last tokens.

    obs_window    how many last queries vote; their own tokens are kept
    kernel, pool  pooling of the votes along positions (the released LongBench settings: 7, max)
    group         how a KV head's query heads merge, per query
    after_prompt  `rank`: the budget holds; at each decode step the token with the fewest votes leaves, until those with votes
                  fill half of the budget, and then the oldest of the others;
                  `grow`: decoded tokens are all kept, as published
    """

    obs_window: int = 32
    kernel: int = 7
    pool: Literal["max", "avg"] = "max"
    group: Group = "mean"
    after_prompt: Literal["rank", "grow"] = "rank"

    when: ClassVar[Literal["every_step", "prompt_end"]] = "prompt_end"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    query_aware: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise PolicyError(f"policy.kernel={self.kernel}: use an odd number, so that pooling is centred")
        if self.obs_window < 1:
            raise PolicyError("policy.obs_window=0: at least one query must vote")

    def recent(self, budget: PerHead) -> PerHead:
        """The voting tokens are kept."""
        return budget.new_full(budget.shape, max(self.obs_window, self.recent_window))

    def score(self, step: Step) -> Scores:
        """Votes for each token before the window, pooled over its neighbours among the held tokens."""
        assert step.attention is not None
        votes = merge_group(step.attention, self.group).sum(-2)  # (batch, kv_heads, slots)
        before = (step.positions >= 0) & (step.positions <= step.now[:, None, None] - step.recent[..., None])
        return pool_by_position(votes, step.positions, before, self.kernel, self.pool)


def pool_by_position(scores: Scores, positions: Positions, where: Kept, kernel: int, pool: str) -> Scores:
    """Pool scores over the `kernel` neighbours in order of position, among the slots of `where`; 0 elsewhere.

    Stride 1, centred. A neighbour beyond either end counts as 0 in the average and not at all in the maximum.
    """
    outside = torch.iinfo(positions.dtype).max
    order = positions.masked_fill(~where, outside).argsort(-1)  # `where` first, by position
    absent = float("-inf") if pool == "max" else 0.0
    line = scores.masked_fill(~where, absent).gather(-1, order)
    if pool == "max":
        line = F.max_pool1d(line, kernel, stride=1, padding=kernel // 2)
    else:
        line = F.avg_pool1d(line, kernel, stride=1, padding=kernel // 2)
    return torch.zeros_like(scores).scatter(-1, order, line).masked_fill(~where, 0.0)
