"""CORM (Dai et al. 2024, arXiv 2404.15949): a token leaves when none of the last queries found it important.

The rule is the paper's as a note of its first version gives it; no code was released, and the body of the paper was not at
hand. What that leaves open is a setting.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvlab.kernels.contract import Marks, ScanRule
from kvlab.kernels.reference import low_attention
from kvlab.policies.base import Group, Policy, PolicyError, TokenState, register
from kvlab.selection import DEAD, EMPTY, NORMAL, select
from kvlab.shapes import Arrival, Kept, Step

LAST = "last"


@register("corm")
@dataclass(frozen=True)
class CORM(Policy):
    """Drop what none of the last queries gave its share of attention; how much stays depends on the text.

    obs_window     w: how many queries in a row must find a token unimportant
    recent_window  r: the last tokens, which stay (the paper's "256+256" is w + r)
    threshold      a token is important to a query that gives it 1 / t or more, t being the tokens `seen` or those `held`
                   by then, the query's own included
    group          how a KV head's query heads merge, per query: with `max` one head that finds a token important is enough

    Of a turn the last w queries are looked at, and its end decides once. There is no budget to meet: compare results at the
    bytes that are held. A budget, if given, is a cap on each head, beyond which those leave first that have been unimportant
    for longest.
    """

    obs_window: int = 256
    recent_window: int = 256
    threshold: Literal["seen", "held"] = "seen"
    group: Group = "max"

    needs: ClassVar[frozenset[str]] = frozenset({"looks"})
    state: ClassVar[dict[str, TokenState]] = {LAST: TokenState(torch.float32)}
    """Position of the last query that found the token important, of the token before its own if there was none."""
    ragged: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.obs_window < 1:
            raise PolicyError(f"policy.obs_window={self.obs_window}: at least one query must be looked at; use 1 or more")

    def scan_rule(self) -> ScanRule:
        """Positions are stamped on tokens, and expire."""
        marks = Marks(self.obs_window, of=self.threshold)
        return ScanRule(observe="stamps", order="expired", plane=LAST, marks=marks, group=self.group)

    def arrive(self, arrival: Arrival) -> dict[str, Tensor]:
        """As if the query before it had been the last that found it important, so that w queries are looked at."""
        return {LAST: (arrival.positions[:, None] - 1).to(torch.float32)}

    def remember(self, step: Step) -> dict[str, Tensor]:
        """Stamp what each query found important with its position."""
        last = step.state[LAST]
        assert step.looks is not None
        for attention, where in step.looks():
            low, came = low_attention(attention, where, step.positions, self.group, self.threshold)
            stamps = torch.where(came & ~low, where[:, None, None], -1)  # (batch, kv_heads, slots, queries)
            last = torch.maximum(last, stamps.amax(-1).to(last.dtype))
        return {LAST: last}

    def select(self, step: Step) -> Kept:
        """All but what has expired; at most the budget of them, protected ones first, then by their stamp."""
        tiers, last = self.tiers(step), step.state[LAST]
        expired = (step.now[:, None, None] - last >= self.obs_window) & (tiers == NORMAL)
        kept = (tiers > DEAD) & ~expired
        if bool((kept.sum(-1) <= step.budget).all()):
            return kept
        positions = torch.where(kept, step.positions, EMPTY)
        return select(last, positions, torch.where(kept, tiers, EMPTY).to(tiers.dtype), step.budget)
