"""L2-norm policy (Devoto et al. 2024, arXiv 2406.11430): keys of small norm draw attention, so they stay."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvlab.policies.base import Policy, register
from kvlab.shapes import Scores, Step


@register("knorm")
@dataclass(frozen=True)
class KNorm(Policy):
    """Keep the tokens whose cached keys have the smallest L2 norm.

    The released code leaves the first two layers alone; here every layer keeps to the budget. Norms are compared to 14
    bits: in a model's first layer the same token has the same norm everywhere but for rounding, and a tie is a tie.
    """

    once: ClassVar[bool] = True

    def score(self, step: Step) -> Scores:
        """Minus the norm of the cached key."""
        exact = torch.promote_types(step.keys.dtype, torch.float32)
        mantissa, exponent = step.keys.to(exact).norm(dim=-1).frexp()
        return -torch.ldexp((mantissa * 2**14).round() / 2**14, exponent)
