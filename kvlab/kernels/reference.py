"""Attention between queries and slots, in plain torch: the definition that every faster back end must equal.

A query sees a slot if the slot's position is neither empty, later than its own, nor outside its sliding window. Inputs of
any float type; softmax and sums in float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.kernels.contract import HAIR
from kvlab.shapes import Attention, Keys, Outputs, PerHead, Positions, Queries, QueryPositions, Scores, Values

CHUNK = 64
"""Queries per pass where weights are needed: small enough for a processor's cache at a few thousand slots."""
MASKED_CHUNK = 512
"""Queries per pass where only a boolean mask must be built, fewer where that would take more than MASK_BYTES."""
MASK_BYTES = 2**26


@dataclass(frozen=True)
class Fade:
    """Old tokens lose influence on the softmax: the logarithm of max(floor, rate ** max(0, age - grace)) is added to their
    logits, after scaling and soft-cap. Sinks, the first `num_sink` tokens of a sequence, keep theirs.

    rate, floor  in (0, 1]; grace: age in tokens up to which nothing fades, (batch, kv_heads)
    """

    rate: float
    floor: float
    num_sink: int
    grace: PerHead

    def bias(self, query_positions: QueryPositions, positions: Positions) -> Tensor:
        """What is added to logits: (batch, kv_heads, queries, slots)."""
        age = query_positions[:, None, :, None] - positions[:, :, None]
        faded = (age - self.grace[..., None, None]).clamp(min=0).double() * math.log(self.rate)
        return faded.clamp(min=math.log(self.floor)).masked_fill(positions[:, :, None] < self.num_sink, 0.0)


@dataclass(frozen=True)
class AttentionRule:
    """What a model asks of attention besides queries, keys and values.

    scaling  factor on the dot products
    window   sliding window in tokens, the query's own included; None for full attention
    softcap  logits become softcap * tanh(logits / softcap)
    sinks    a logit for each query head that only enlarges the softmax's denominator, shape (kv_heads, group)
    fade     how old tokens lose influence, the policy's wish and not the model's
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    fade: Fade | None = None

    @property
    def fused(self) -> bool:
        """Whether torch's fused attention can do it."""
        return self.softcap is None and self.sinks is None and self.fade is None


def accumulate_type(tensor: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything below."""
    return torch.promote_types(tensor.dtype, torch.float32)


def visible(query_positions: QueryPositions, positions: Positions, window: int | None) -> Tensor:
    """Which slots each query sees: (batch, kv_heads, queries, slots). A query that sees none gets all, so as to stay finite."""
    query, slot = query_positions[:, None, :, None], positions[:, :, None, :]
    mask = (slot >= 0) & (slot <= query)
    if window is not None:
        mask &= slot > query - window
    return mask | ~mask.any(-1, keepdim=True)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap), or the logits as they are."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def masked_softmax(logits: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis where `mask` is set. logits (..., heads, queries, keys); sinks (..., heads): logits that only
    enlarge the denominator.
    """
    logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return logits.softmax(-1)
    column = sinks.to(logits.dtype)[..., None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1]


def weights(
    queries: Queries, keys: Keys, query_positions: QueryPositions, positions: Positions, rule: AttentionRule
) -> Attention:
    """Softmax attention weights; rows of queries that don't exist (position -1) are zero."""
    exact = accumulate_type(queries)
    group, count = queries.shape[2:4]
    logits = queries.to(exact).flatten(2, 3) @ keys.to(exact).transpose(-1, -2) * rule.scaling
    return weights_of(logits.unflatten(2, (group, count)), query_positions, positions, rule)


def weights_of(logits: Attention, query_positions: QueryPositions, positions: Positions, rule: AttentionRule) -> Attention:
    """`weights`, from scaled dot products (batch, kv_heads, group, queries, slots)."""
    logits = capped(logits, rule.softcap)
    if rule.fade is not None:
        logits = logits + rule.fade.bias(query_positions, positions)[:, :, None].to(logits.dtype)
    mask = visible(query_positions, positions, rule.window)[:, :, None]
    probabilities = masked_softmax(logits, mask, rule.sinks)
    return probabilities * (query_positions >= 0)[:, None, None, :, None]


def attend(
    queries: Queries,
    keys: Keys,
    values: Values,
    query_positions: QueryPositions,
    positions: Positions,
    rule: AttentionRule,
    *,
    all_visible: bool = False,
    causal: bool = False,
) -> Outputs:
    """Attention output alone.

    all_visible  the caller knows that every query sees every slot
    causal       the caller knows that slots and queries are the same tokens in the same order, none missing
    """
    if not rule.fused:
        return attend_with_mass(queries, keys, values, query_positions, positions, rule, group=None, causal=causal)[0]
    values = values.to(keys.dtype)
    if causal and (rule.window is None or queries.shape[3] <= rule.window):
        return _causal(queries, keys, values, rule.scaling)
    batch, kv_heads, group, count, _ = queries.shape
    fitting = MASK_BYTES // max(1, batch * kv_heads * group * keys.shape[2])
    size = count if all_visible else min(MASKED_CHUNK, max(16, fitting))
    outputs = []
    for part, where in _chunks(queries, query_positions, size):
        group, count = part.shape[2:4]
        mask = None
        if not all_visible:
            mask = visible(where, positions, rule.window)[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
        # A KV head's query heads are just more queries for SDPA, so keys and values are never repeated.
        flat = F.scaled_dot_product_attention(part.flatten(2, 3), keys, values, attn_mask=mask, scale=rule.scaling)
        outputs.append(flat.unflatten(2, (group, count)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 3)


def _causal(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Plain causal attention of a text over itself, by torch's fused kernel."""
    group = queries.shape[2]
    fused_gqa = group > 1 and not (keys.is_cuda and keys.dtype == torch.float32)
    if group > 1 and not fused_gqa:  # no fused CUDA kernel groups float32 heads, and the plain one needs length^2 memory
        keys, values = (tensor.repeat_interleave(group, 1) for tensor in (keys, values))
    flat = F.scaled_dot_product_attention(
        queries.flatten(1, 2), keys, values, is_causal=True, scale=scaling, enable_gqa=fused_gqa
    )
    return flat.unflatten(1, queries.shape[1:3])


def attend_with_mass(
    queries: Queries,
    keys: Keys,
    values: Values,
    query_positions: QueryPositions,
    positions: Positions,
    rule: AttentionRule,
    *,
    group: str | None,
    causal: bool = False,
) -> tuple[Outputs, Scores]:
    """Attention output, and the attention that each slot received: merged over a group by the rule, summed over queries.

    One pass in chunks of queries, so nothing of size queries x slots exists. With `group=None`
    nothing is counted and the mass is zero.
    `causal` as in `attend`: slots after a chunk's last query are then not even read.
    """
    exact = accumulate_type(queries)
    keys, values = keys.to(exact), values.to(exact)
    mass = torch.zeros(positions.shape, dtype=exact, device=keys.device)
    outputs, end = [], 0
    for part, where in _chunks(queries, query_positions, CHUNK):
        end = end + part.shape[3] if causal else keys.shape[2]
        attention = weights(part, keys[:, :, :end], where, positions[:, :, :end], rule)
        flat = attention.flatten(2, 3) @ values[:, :, :end]
        outputs.append(flat.unflatten(2, attention.shape[2:4]))
        if group is not None:
            mass[:, :, :end] += merge_group(attention, group).sum(2)
    return torch.cat(outputs, 3).to(queries.dtype), mass


def merge_group(attention: Tensor, group: str) -> Tensor:
    """Merge the query heads of each KV head: (batch, kv_heads, group, ...) -> (batch, kv_heads, ...)."""
    if group in ("mean", "sum"):
        # One head after the other: a reduction could add up equal heads in another order, and so break ties.
        total = functools.reduce(torch.add, attention.unbind(2))
        return total / attention.shape[2] if group == "mean" else total
    if group == "max":
        return attention.amax(2)
    assert group == "first", group
    return attention[:, :, 0]


def low_attention(
    attention: Attention, query_positions: QueryPositions, positions: Positions, group: str, of: str
) -> tuple[Tensor, Tensor]:
    """Where attention, merged over a group, is low as `Marks` says, and which tokens were there to be looked at.

    Both bool, (batch, kv_heads, slots, queries). of: 1 / tokens `seen` or `held` is the bound.
    """
    came = (positions[..., None] <= query_positions[:, None, None]) & (positions >= 0)[..., None]
    number = came.sum(2, keepdim=True) if of == "held" else query_positions[:, None, None] + 1
    bound = (1 - HAIR) / number.clamp(min=1).to(attention.dtype)
    return merge_group(attention, group).transpose(-1, -2) < bound, came


def _chunks(queries: Tensor, query_positions: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(queries.split(size, 3), query_positions.split(size, 1), strict=True))
