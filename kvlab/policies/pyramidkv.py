"""PyramidKV (Cai et al. 2024, arXiv 2406.02069, section 4): SnapKV with more budget for lower layers."""

from dataclasses import dataclass

from kvlab.budget import apportion
from kvlab.policies.base import PolicyError, register
from kvlab.policies.snapkv import SnapKV


@register("pyramidkv")
@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's votes; the budget falls linearly from the first layer to the last.

    beta  how steep: the last layer gets 1 / beta of the mean budget, beyond the voting window

    The released runner gives PyramidKV a window of 8 where the others have 32; here all have 32.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise PolicyError(f"policy.beta={self.beta}: use a whole number of at least 1")

    def layer_budget(self, budget: int, num_layers: int, length: int) -> list[int]:
        """Linear in depth, within what the prompt has, summing to num_layers * budget."""
        if budget <= self.obs_window or length <= budget or num_layers == 1:
            return [budget] * num_layers
        base = budget - self.obs_window
        low = base / self.beta
        high = 2 * base - low
        if high >= length - self.obs_window:
            high = length - self.obs_window
            low = 2 * base - high
        slope = (high - low) / (num_layers - 1)
        return apportion([self.obs_window + high - layer * slope for layer in range(num_layers)], num_layers * budget)
