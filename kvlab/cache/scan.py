"""Decoding of known tokens by a kernel that works on a layer's store in place: what it is given, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.store import SlotStore
from kvlab.kernels.contract import Arrivals, ScanRule, Slots
from kvlab.shapes import Arrival, Probes


def arrivals_of(arrival: Arrival, state: Mapping[str, Tensor], rule: ScanRule, probes: Probes | None) -> Arrivals:
    """New tokens with the state that the rule's kernel looks after."""
    shape = arrival.keys.shape[:3]

    def start(name: str | None) -> Tensor | None:
        found = None if name is None else state.get(name)
        return None if found is None else found.expand(*shape, *found.shape[3:])

    value, norm, bits = map(start, rule.planes)
    return Arrivals(arrival.keys, arrival.values, arrival.positions, value, norm=norm, bits=bits, probes=probes)


def with_source(slots: Slots, new: Arrivals) -> tuple[Slots, Arrivals]:
    """Let a kernel say where each token was before: its slot, or the number of slots + its place among the new ones."""
    total, shape = len(slots.positions), new.keys.shape[:3]
    places = torch.arange(total + shape.numel(), dtype=torch.int32, device=new.keys.device)
    return replace(slots, source=places[:total].clone()), replace(new, source=places[total:].view(shape))


def move_state(store: SlotStore, state: Mapping[str, Tensor], source: Tensor, rule: ScanRule, shape: torch.Size) -> None:
    """State that the kernel knows nothing of follows its tokens. shape: (batch, kv_heads, tokens) of those that arrived."""
    others = {
        name: part.expand(*shape, *part.shape[3:]).flatten(0, 2) for name, part in state.items() if name not in rule.planes
    }
    store.replace_state(others, source, keep=rule.planes)


def lengths_after(lengths: np.ndarray, arrived: np.ndarray, limit: np.ndarray, target: np.ndarray, before: bool) -> np.ndarray:
    """Tokens that rows hold once `arrived` more have come, one by one, each with a decision where it is due.

    All (batch, kv_heads), `arrived` (batch, 1). What kernels do, done on the host, so that nobody need ask the device.
    """
    if target is limit or (target >= limit).all():
        return np.where(arrived > 0, np.minimum(lengths + arrived, limit), lengths)
    for token in range(int(arrived.max(initial=0))):
        comes = token < arrived
        if before:
            lengths = np.where(comes & (lengths >= limit), np.minimum(target, limit - 1), lengths) + comes
        else:
            lengths = np.where(comes & (lengths + 1 > limit), np.minimum(target, limit), lengths + comes)
    return lengths
