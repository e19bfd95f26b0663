"""From scores to survivors: tiers of protection, then score, then recency. The only top-k in kvlab.

Every decision keeps the tokens that are largest by (tier, key, position), so ties go to the newer token. Protection is a
property of this order and not of a score: no score, however large, can push out a sink. Knows no model and no policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.shapes import Kept, PerHead, PerRow, Positions, Scores, Tiers

EMPTY, DEAD, NORMAL, RECENT, SPECIAL, SINK = range(-1, 5)


def assign_tiers(
    positions: Positions,
    now: PerRow,
    *,
    num_sink: int = 0,
    recent: PerHead | None = None,
    special: Kept | None = None,
    window: int | None = None,
) -> Tiers:
    """Tier of every slot: EMPTY < DEAD (left the sliding window) < NORMAL < RECENT < SPECIAL < SINK.

    positions  true positions, -1 for an empty slot; now: position of each row's newest token
    num_sink   the first tokens of a sequence, always kept
    recent     how many of the last tokens each head keeps, the newest included
    special    slots that hold special tokens, where those are protected
    window     sliding window of the layer: what the newest query can't see any more is DEAD, sinks included
    """
    newest = now[:, None, None]
    tiers = torch.full_like(positions, NORMAL, dtype=torch.int8)
    if recent is not None:
        tiers[positions > newest - recent[..., None]] = RECENT
    if special is not None:
        tiers[special] = SPECIAL
    if num_sink:
        tiers[positions < num_sink] = SINK
    if window is not None:
        tiers[positions <= newest - window] = DEAD
    tiers[positions < 0] = EMPTY
    return tiers


def _sort_keys(scores: Tensor, positions: Tensor, tiers: Tensor) -> Tensor:
    """What orders tokens within their tier: the score, or age where the tier alone protects (early sinks first).

    A score that is no number counts as the lowest.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    by_age = torch.where(tiers == SINK, -positions, positions).to(scores.dtype)
    return torch.where(tiers == NORMAL, scores, by_age)


def select(scores: Scores, positions: Positions, tiers: Tiers, budget: PerHead) -> Kept:
    """Mask of the `budget` tokens to keep in each head; all of them where a head holds no more."""
    keys = _sort_keys(scores, positions, tiers)
    order = positions.argsort(dim=-1, stable=True)
    order = order.gather(-1, keys.gather(-1, order).argsort(dim=-1, stable=True))
    order = order.gather(-1, tiers.gather(-1, order).argsort(dim=-1, stable=True))  # worst slot first
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    return (rank >= order.shape[-1] - budget[..., None]) & (positions >= 0)


def victim(scores: Scores, positions: Positions, tiers: Tiers) -> PerHead:
    """Slot of the one token to drop in each head: what `select` would drop for a budget of one less."""
    tiers = tiers.masked_fill(positions < 0, SINK + 1)
    candidate = tiers == tiers.amin(-1, keepdim=True)
    keys = _sort_keys(scores, positions, tiers).masked_fill(~candidate, float("inf"))
    candidate &= keys == keys.amin(-1, keepdim=True)
    return positions.masked_fill(~candidate, torch.iinfo(positions.dtype).max).argmin(-1)
