"""One decision: what a policy is shown, and what selection makes of its scores. Knows no policy by name, no storage."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab import selection
from kvlab.kernels.reference import merge_group
from kvlab.policies.base import RANK, SCORE, Policy, PolicyError
from kvlab.shapes import Scores, Step, Tiers


def judge(policy: Policy, step: Step, window: int | None, special_ids: Tensor | None) -> tuple[Scores, Tiers]:
    """Scores and protection tiers of every slot. Raises PolicyError if the policy's scores have the wrong shape."""
    special = None
    if special_ids is not None and step.token_ids is not None:
        special = torch.isin(step.token_ids, special_ids)
    tiers = selection.assign_tiers(
        step.positions, step.now, num_sink=policy.num_sink, recent=step.recent, special=special, window=window
    )
    if policy.when == "prompt_end" and not step.prompt_end:
        return _between_turns(step), tiers
    scores = step.state[SCORE] if policy.once else policy.score(step)
    if scores.shape != step.positions.shape:
        found, wanted = tuple(scores.shape), tuple(step.positions.shape)
        raise PolicyError(f"policy {policy.name}: score() gave shape {found}; return (batch, kv_heads, slots) = {wanted}")
    if policy.coupling == "layer":  # heads of such a layer hold the same tokens in the same slots
        scores = scores.float() if not scores.is_floating_point() else scores
        scores = merge_group(scores[:, None], "mean").expand_as(scores)
    return scores, tiers


def _between_turns(step: Step) -> Scores:
    """Scores for a policy that has its say at a turn's end only: what it scored lowest there goes first.

    Half of the budget stays with what was scored; from there on the oldest of the others leaves.
    """
    by_age = step.positions.float()
    rank = step.state.get(RANK)
    if rank is None:
        return by_age
    scored = rank.isfinite() & (step.positions >= 0)
    enough = scored.sum(-1) > step.budget // 2
    return torch.where(enough[..., None], rank, by_age.to(rank.dtype).masked_fill(scored, float("inf")))
