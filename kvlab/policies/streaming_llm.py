"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453, section 3.2): attention sinks and the most recent tokens."""

from dataclasses import dataclass

from kvlab.kernels.contract import ScanRule
from kvlab.policies.base import Policy, register
from kvlab.shapes import Scores, Step


@register("streaming_llm")
@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep the first `num_sink` tokens and the most recent ones.

    The paper rotates keys by their place in the cache: `rolling=true`. With the default, positions stay true.
    """

    num_sink: int = 4

    def scan_rule(self) -> ScanRule:
        """The oldest leaves."""
        return ScanRule()

    def score(self, step: Step) -> Scores:
        """Newer is better."""
        return step.positions.float()
