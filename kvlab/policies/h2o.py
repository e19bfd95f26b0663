"""H2O, the Heavy-Hitter Oracle (Zhang et al. 2023, arXiv 2306.14048, section 4 and Algorithm 1)."""

from dataclasses import dataclass
from typing import ClassVar

from kvlab.budget import exact_share
from kvlab.kernels.contract import ScanRule
from kvlab.policies.base import Group, Policy, PolicyError, register
from kvlab.shapes import PerHead, Scores, Step


@register("h2o")
@dataclass(frozen=True)
class H2O(Policy):
    """Keep the tokens that received most attention so far, and the most recent ones.

    heavy_share  share of the budget for heavy hitters; the rest is the recent window (paper: half and half)
    group        how a KV head's query heads merge, per query (the paper has no GQA; llama-recipes takes `first`)

    The score is a running sum of softmax attention over the held tokens, as text and figures have it (the printed
    Algorithm 1 scores the current step alone). An evicted token is forgotten; survivors carry their sum on.
    """

    heavy_share: float = 0.5
    group: Group = "mean"

    needs: ClassVar[frozenset[str]] = frozenset({"mass"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.heavy_share <= 1:
            raise PolicyError(f"policy.heavy_share={self.heavy_share!r}: use a share between 0 and 1")

    def recent(self, budget: PerHead) -> PerHead:
        """The budget less its heavy hitters, floor(heavy_share * budget)."""
        share = exact_share(self.heavy_share)
        heavy = budget * share.numerator // share.denominator
        return (budget - heavy).clamp(min=self.recent_window)

    def scan_rule(self) -> ScanRule:
        """A running sum."""
        return ScanRule(observe="sum", order="value", plane="mass", group=self.group)

    def score(self, step: Step) -> Scores:
        """Attention received so far."""
        assert step.mass is not None
        return step.mass
