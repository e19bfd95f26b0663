"""Random eviction, the control that any method must beat."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

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
        positions, samples, heads = step.positions.long(), step.sample_ids, step.positions.shape[1]
        if positions.device.type != "cpu":
            start = _chain(self.seed, samples, step.layer_idx, torch.arange(heads, device=positions.device))
            return (_combine(start, positions) >> 8).float() / 2**24
        names = None if samples is None else tuple(samples.tolist())
        start = _start(self.seed, names, step.layer_idx, heads)
        drawn = _combine(start, positions.numpy()) >> 8  # a few numbers only, which NumPy starts on faster than torch
        return torch.from_numpy(drawn).float() / 2**24


@functools.lru_cache(maxsize=4096)
def _start(seed: int, samples: tuple[int, ...] | None, layer: int, heads: int) -> np.ndarray:
    """What draws of these sequences and of a layer's heads start from: (batch or 1, heads, 1)."""
    return _chain(seed, None if samples is None else np.array(samples), layer, np.arange(heads))


def _chain(seed: int, samples: Any, layer: int, heads: Any) -> Any:
    state: Any = _mix(seed & _MASK)
    if samples is not None:
        state = _combine(state, samples[:, None, None])
    return _combine(_combine(state, layer), heads[None, :, None])


def _combine(state: Any, part: Any) -> Any:
    return _mix(state ^ _mix((part + 0x9E3779B9) & _MASK))


def _mix(x: Any) -> Any:
    """Bijective mixing of 32-bit numbers held in 64 bits (multipliers: C. Wellons' hash-prospector search)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK  # beyond 64 bits a product wraps around, and its low 32 bits are right
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
