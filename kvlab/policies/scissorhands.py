"""Scissorhands (Liu et al. 2023, arXiv 2305.17118, sections 3 and 4, Algorithms 1 and 2): drop what was rarely looked at."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from kvlab.budget import apportion, exact_share
from kvlab.kernels.contract import Marks, ScanRule
from kvlab.kernels.reference import low_attention
from kvlab.policies.base import Group, Policy, PolicyError, TokenState, register
from kvlab.shapes import Scores, Step


@register("scissorhands")
@dataclass(frozen=True)
class Scissorhands(Policy):
    """Drop, many at a time, the tokens to which most of the last queries paid less attention than average.

    obs_window     the last w queries that count (w = 400 in the paper)
    recent_window  the last r tokens, which stay
    drop_share     how much of the budget leaves at once, m; 0: one token at each step
    count          Algorithm 2 contradicts itself: `low` drops the tokens with most queries whose attention was low, which
                   spares tokens younger than the window; `high` those with the fewest queries whose attention was not
    threshold      attention is low below 1 / tokens `seen` (the paper's 1 / t) or `held`
    group          how a KV head's query heads merge, per query (the paper has no GQA)
    layers         `persistence` gives a layer a part of the budget proportional to 1 - its persistence ratio, beyond what it
                   protects. The paper gives later layers more and no formula: this one is ours
    persistence    that ratio of each layer, as `kvlab analyze persistence` prints it

    The prompt is part of the paper's stream: use protocol=stream. After a prompt read at once the budget's best tokens stay.
    """

    obs_window: int = 400
    recent_window: int = 10
    drop_share: float = 0.5
    count: Literal["low", "high"] = "low"
    threshold: Literal["seen", "held"] = "seen"
    group: Group = "mean"
    layers: Literal["uniform", "persistence"] = "uniform"
    persistence: tuple[float, ...] = ()

    needs: ClassVar[frozenset[str]] = frozenset({"looks"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.obs_window < 1:
            raise PolicyError("policy.obs_window=0: at least one query must count")
        if not 0 <= self.drop_share <= 1:
            raise PolicyError(f"policy.drop_share={self.drop_share!r}: use a share between 0 and 1")
        if self.layers == "persistence" and not self.persistence:
            raise PolicyError(
                "policy.layers=persistence needs policy.persistence=[...], a ratio for each layer: "
                "kvlab analyze persistence prints it"
            )
        if self.layers == "uniform" and self.persistence:
            raise PolicyError("policy.persistence is of no use with policy.layers=uniform: set policy.layers=persistence")
        if any(not 0 <= ratio <= 1 for ratio in self.persistence):
            raise PolicyError(f"policy.persistence={list(self.persistence)}: use ratios between 0 and 1")

    def token_state(self) -> dict[str, TokenState]:
        """At which of the last queries attention to a token was low (or high): a bit for each."""
        return {"marks": TokenState(torch.uint8, (-(-self.obs_window // 8),))}

    def scan_rule(self) -> ScanRule:
        """Bits are set at each step, and counted when many tokens leave."""
        marks = Marks(self.obs_window, high=self.count == "high", of=self.threshold)
        return ScanRule(observe="marks", order="count", bits="marks", marks=marks, group=self.group)

    def target(self, budget: np.ndarray) -> np.ndarray:
        """What is left of one token more than the budget when m have left, but no protected one."""
        share = exact_share(self.drop_share)
        drop = np.maximum(1, budget * share.numerator // share.denominator)
        protected = np.minimum(budget, self.num_sink + self.recent_window)
        return np.maximum(np.maximum(1, budget + 1 - drop), protected)

    def layer_budget(self, budget: int, num_layers: int, length: int) -> list[int]:
        """Even, or by persistence."""
        if self.layers == "uniform":
            return [budget] * num_layers
        if len(self.persistence) != num_layers:
            raise PolicyError(f"policy.persistence has {len(self.persistence)} ratios, the model {num_layers} layers")
        least = min(budget, self.num_sink + self.recent_window + 1)
        return spread_out([1 - ratio for ratio in self.persistence], budget * num_layers, least, max(length, budget))

    def remember(self, step: Step) -> dict[str, Tensor]:
        """Set the bit of each query that was looked at."""
        marks = _unpacked(step.state["marks"])
        places = marks.shape[-1] - 1  # the last one takes what queries that don't exist would write
        assert step.looks is not None
        for attention, where in step.looks():
            low, came = low_attention(attention, where, step.positions, self.group, self.threshold)
            place = torch.where(where >= 0, where % self.obs_window, places)[:, None, None].expand_as(came)
            marks.scatter_(-1, place, ((low != (self.count == "high")) & came).to(torch.uint8))
        return {"marks": _packed(marks)}

    def score(self, step: Step) -> Scores:
        """How often attention was low, negated, or high."""
        counts = _unpacked(step.state["marks"]).sum(-1).float()
        return counts if self.count == "high" else -counts


def spread_out(weights: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """Whole numbers that sum to `total`, each from `least` to `most`, what lies between proportional to the weights."""
    shares = [float(least)] * len(weights)
    rest = float(total - least * len(weights))
    while rest > 1e-9:
        free = [i for i, share in enumerate(shares) if share < most]
        weight = sum(weights[i] for i in free)
        wanted = {i: shares[i] + (rest * weights[i] / weight if weight else rest / len(free)) for i in free}
        shares = [min(float(most), wanted.get(i, share)) for i, share in enumerate(shares)]
        rest = total - sum(shares)
        if weight and not any(share > most for share in wanted.values()):
            break
    return apportion(shares, total)


def _unpacked(marks: Tensor) -> Tensor:
    """(..., bytes) -> (..., 8 * bytes + 1), each 0 or 1, the last 0."""
    bits = marks[..., None].bitwise_right_shift(torch.arange(8, device=marks.device, dtype=torch.uint8)) & 1
    return torch.nn.functional.pad(bits.flatten(-2), (0, 1))


def _packed(bits: Tensor) -> Tensor:
    """The other way round; what was written to the last place is dropped."""
    weights = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits[..., :-1].unflatten(-1, (-1, 8)) * weights).sum(-1).to(torch.uint8)
