"""How many tokens the rows of one layer may hold, on the host and on the device. Follows from a budget and the policy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvlab.kernels.contract import Limits
from kvlab.kernels.reference import Fade
from kvlab.policies.base import Policy

UNLIMITED = 2**40
"""More tokens than any row will ever hold."""


class RowLimits:
    """All (batch, kv_heads) tokens; the arrays are never changed in place.

    budget  what the layer was given
    limit   what rows may hold after a decision: the budget, unless the policy lets nothing leave; a sliding-window layer holds
            its window at most
    target  tokens that a decision at a step leaves
    room    slots that rows may have: one more than the limit where a new token comes in before one leaves
    device  the same on the device, for policies and kernels; fade: how old tokens lose influence on attention, if they do
    """

    def __init__(self, policy: Policy, budget: np.ndarray, window: int | None, device: torch.device) -> None:
        self.budget = budget
        most = UNLIMITED if window is None else window
        self.limit = np.minimum(budget, most) if policy.drops else np.full_like(budget, most)
        before = policy.phase == "before_attention"
        left = policy.target(budget)  # parts of a budget are parts of all of it, also where a window cuts it short
        self.target = self.limit if left is budget else np.minimum(left, self.limit)
        self.room = self.limit + (not before)
        tokens, limit, target = (torch.from_numpy(np.array(part)).to(device) for part in (self.budget, self.limit, self.target))
        grace = policy.grace(tokens)
        self.device = Limits(limit, target, policy.recent(limit), policy.num_sink, before, grace)
        self.fade: Fade | None = None
        if policy.fades is not None and (self.budget < UNLIMITED).any():
            assert grace is not None, "a policy that fades says when that begins"
            self.fade = Fade(*policy.fades, policy.num_sink, grace)

    @property
    def none(self) -> bool:
        """Whether no row is under a budget."""
        return bool((self.budget >= UNLIMITED).all())

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept on the device."""
        kept = (self.device.limit, self.device.target, self.device.recent, self.device.grace)
        return [part for part in kept if part is not None]


def unlimited(shape: tuple[int, ...]) -> np.ndarray:
    """No budget for any row."""
    return np.full(shape, UNLIMITED, dtype=np.int64)
