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
        norm = torch.linalg.vector_norm(step.keys, dim=-1, dtype=exact)
        whole, dropped = (torch.int32, 10) if exact == torch.float32 else (torch.int64, 39)  # of 24 and 53 bits
        rounded = norm.view(whole).add_(1 << (dropped - 1)).bitwise_and_(-1 << dropped)
        return -rounded.view(exact)
