"""A prompt's end decided as if its tokens had come one by one: which of them a policy's decode steps would have left.

Only for decisions that look at no attention, so that the prompt itself can be read with full attention.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvlab import selection
from kvlab.cache.decide import judge
from kvlab.cache.voters import Voters
from kvlab.kernels.contract import Arrivals, Limits, ScanRule, Slots
from kvlab.kernels.dispatch import EvictScan
from kvlab.kernels.reference import AttentionRule
from kvlab.policies.base import Policy
from kvlab.shapes import Arrival, Kept, Step


def turn_tokens(step: Step, start: Tensor) -> tuple[Tensor, Tensor]:
    """Slots (batch, kv_heads, tokens) of the turn's tokens in order, and their positions (batch, tokens), -1 for none.

    start (batch,): position of each row's first token of the turn
    """
    since = start[:, None, None]
    most = int((step.positions[:, :1] >= since).sum(-1).max())
    index = step.positions.argsort(-1)[..., step.positions.shape[-1] - most :]
    positions = step.positions.gather(-1, index)[:, 0]
    return index, torch.where(positions >= start[:, None], positions, -1)


def replay_by_kernel(
    policy: Policy, rule: ScanRule, scan: EvictScan, step: Step, voters: Voters, start: Tensor, limits: Limits,
    special: Kept | None, attention: AttentionRule,
) -> Kept:  # fmt: skip
    """Which slots would be left. `special`: slots of protected special tokens."""
    index, positions = turn_tokens(step, start)
    old = (step.positions >= 0) & (step.positions < start[:, None, None])
    batch, heads, held = old.shape
    lengths = old.sum(-1)
    width = 1 + max(int(lengths.max()), min(held, int(limits.limit.max())))
    front = (~old).long().argsort(dim=-1, stable=True)  # old tokens first
    front = torch.cat([front, front.new_zeros(batch, heads, max(0, width - held))], -1)[..., :width]
    filled = torch.arange(width, device=front.device) < lengths[..., None]

    def rows(plane: Tensor, where: Tensor) -> Tensor:
        spread = where.view(*where.shape, *[1] * (plane.ndim - 3)).expand(*where.shape, *plane.shape[3:])
        return plane.gather(2, spread)

    states = [None if name is None else step.state[name] for name in rule.planes]
    value, norm, bits = (None if plane is None else rows(plane, front).flatten(0, 2) for plane in states)
    nothing = torch.zeros(batch * heads * width, 0, device=front.device)
    slots = Slots(
        keys=nothing,
        values=nothing,
        positions=torch.where(filled, step.positions.gather(-1, front), -1).flatten().to(torch.int32),
        offsets=torch.arange(batch * heads, device=front.device) * width,
        lengths=lengths.flatten().clone(),
        widest=width,
        value=value,
        norm=norm,
        bits=bits,
        source=front.flatten().to(torch.int32),
        special=None if special is None else special.gather(-1, front).flatten(),
    )
    new_value, new_norm, new_bits = (None if plane is None else rows(plane, index) for plane in states)
    queries = voters.queries[..., -index.shape[-1] :, :]
    keys, values = (rows(plane, index) for plane in (step.keys, step.values))
    empty = torch.zeros(batch, heads, index.shape[-1], 0, device=front.device)
    new = Arrivals(
        keys=empty,
        values=empty,
        positions=positions,
        value=new_value,
        norm=new_norm,
        bits=new_bits,
        probes=policy.probes(queries, Arrival(step.layer_idx, keys, values, positions)) if rule.order == "distance" else None,
        source=index.to(torch.int32),
        special=None if special is None else special.gather(-1, index)[:, 0],
    )
    scan(empty[:, :, None], new, slots, limits, attention, rule)
    stay = (slots.positions >= 0).view(batch, heads, width)
    assert slots.source is not None
    found = torch.zeros(batch, heads, held + 1, dtype=torch.bool, device=front.device)
    where = torch.where(stay, slots.source.view(batch, heads, width).long(), held)
    return found.scatter_(-1, where, True)[..., :held]


def replay_by_steps(
    policy: Policy,
    step: Step,
    voters: Voters,
    start: Tensor,
    window: int | None,
    special_ids: Tensor | None,
    target: np.ndarray,
) -> Kept:
    """The same by the policy's own `score`, one token after the other."""
    index, positions = turn_tokens(step, start)
    kept = (step.positions >= 0) & (step.positions < start[:, None, None])
    queries, keep = voters.queries[..., -index.shape[-1] :, :], torch.from_numpy(target).to(kept.device)
    for place in range(index.shape[-1]):
        slot, now = index[..., place : place + 1], positions[:, place]
        there = (now >= 0)[:, None]
        vector = slot[..., None].expand(-1, -1, -1, step.keys.shape[-1])
        value = slot[..., None].expand(-1, -1, -1, step.values.shape[-1])
        new = positions[:, place : place + 1]
        arriving = Arrival(step.layer_idx, step.keys.gather(2, vector), step.values.gather(2, value), new)
        here = replace(
            step,
            prompt_end=False,
            positions=torch.where(kept, step.positions, -1),
            now=now.clamp(min=0),
            queries=queries[..., place : place + 1, :],
            query_positions=new,
            arriving=arriving,
        )
        over = (kept.sum(-1) >= step.budget) & there
        if over.any():
            scores, tiers = judge(policy, here, window, special_ids)
            room = torch.where(over, torch.minimum(keep, step.budget - 1), step.positions.shape[-1])
            kept &= selection.select(scores, here.positions, tiers, room)
        kept = kept.scatter(-1, slot, kept.gather(-1, slot) | there[..., None])
    return kept
