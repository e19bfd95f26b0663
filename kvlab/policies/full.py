"""Full cache: nothing is evicted. The reference that every policy is compared with."""

from dataclasses import dataclass
from typing import ClassVar

from kvlab.kernels.contract import ScanRule
from kvlab.policies.base import Policy, register
from kvlab.shapes import Scores, Step


@register("full")
@dataclass(frozen=True)
class Full(Policy):
    """Keep every token, whatever the budget; a sliding-window layer still holds its window only."""

    evicts: ClassVar[bool] = False

    def scan_rule(self) -> ScanRule:
        """The oldest leaves."""
        return ScanRule()

    def score(self, step: Step) -> Scores:
        """Newer is better: only a sliding window makes a token leave."""
        return step.positions.float()
