"""Random eviction, the control that any method must beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.policies.base import Policy, register
from kvlab.shapes import Scores, Step

_MASK = 0xFFFFFFFF


@register("random")
@dataclass(frozen=True)
class Random(Policy):
    """Keep random tokens: each token's score is drawn once from (seed, sample id, layer, head, position).

    A counter-based draw depends on nothing else, so batching, resuming and the order of samples change nothing.
    """

    seed: int = 0

    once: ClassVar[bool] = True

    def score(self, step: Step) -> Scores:
        """Uniform in [0, 1), in steps of 2 ** -24 so that float32 holds it exactly."""
        heads = torch.arange(step.positions.shape[1], device=step.positions.device)[None, :, None]
        state = _mix(torch.tensor(self.seed & _MASK, device=step.positions.device))
        if step.sample_ids is not None:
            state = _combine(state, step.sample_ids[:, None, None])
        for part in (torch.full_like(heads, step.layer_idx), heads, step.positions.long()):
            state = _combine(state, part)
        return (state >> 8).float() / 2**24


def _combine(state: Tensor, part: Tensor) -> Tensor:
    return _mix(state ^ _mix((part + 0x9E3779B9) & _MASK))


def _mix(x: Tensor) -> Tensor:
    """Bijective mixing of 32-bit numbers held in int64 (multipliers: C. Wellons' hash-prospector search)."""
    x = x ^ (x >> 16)
    x = _multiply(x, 0x7FEB352D)
    x = x ^ (x >> 15)
    x = _multiply(x, 0x846CA68B)
    return x ^ (x >> 16)


def _multiply(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2 ** 32 without int64 overflow."""
    low, high = x & 0xFFFF, x >> 16
    return (low * factor + (((high * factor) & 0xFFFF) << 16)) & _MASK
