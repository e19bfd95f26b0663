"""TOVA (Oren et al. 2024, arXiv 2401.06104, section 4): drop what the current query attends to least."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvlab.kernels.contract import ScanRule
from kvlab.kernels.reference import merge_group
from kvlab.policies.base import Policy, register
from kvlab.shapes import Scores, Step


@register("tova")
@dataclass(frozen=True)
class TOVA(Policy):
    """Keep the tokens with the most attention from the last query, averaged over all heads of a layer.

    All KV heads of a layer keep the same tokens. The paper protects neither sinks nor recent tokens.
    """

    coupling: ClassVar[Literal["head", "layer"]] = "layer"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    query_aware: ClassVar[bool] = True

    def scan_rule(self) -> ScanRule:
        """The current step's attention, for all heads together."""
        return ScanRule(observe="last", order="value")

    def score(self, step: Step) -> Scores:
        """Attention of the last query; coupling over the layer averages KV heads too."""
        assert step.attention is not None
        return merge_group(step.attention[..., -1, :], "mean")
