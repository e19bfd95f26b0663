"""The mask simulations behind H2O's printed lm-eval numbers (Zhang et al. 2023, arXiv 2306.14048; released code).

Nothing is evicted: a whole text is read at once, and each query sees what the mask leaves it. `local` is the code for OPT and
NeoX; `global` the code for LLaMA, which ranks tokens by attention from the whole text, later queries included: an oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlab.kernels.reference import AttentionRule, accumulate_type, capped, masked_softmax
from kvlab.shapes import Keys, Outputs, Positions, Queries, QueryPositions, Values


@dataclass(frozen=True)
class H2OSimulation:
    """Attention under H2O's mask, for each query head alone.

    heavy, recent  parts of the whole text's length, each rounded down as the code does, in binary floating point
    oracle         rank by attention from the whole text
    """

    heavy: float
    recent: float
    oracle: bool = False

    def __call__(
        self,
        queries: Queries,
        keys: Keys,
        values: Values,
        query_positions: QueryPositions,
        positions: Positions,
        rule: AttentionRule,
    ) -> Outputs:
        """Outputs of whole texts, padded anywhere; slots are the texts' own tokens."""
        batch, heads, group, count, _ = queries.shape
        out = values.new_zeros(batch, heads, group, count, values.shape[-1])
        for row in range(batch):
            places = (query_positions[row] >= 0).nonzero()[:, 0]
            order = positions[row, 0].argsort()[positions.shape[-1] - len(places) :]  # by position, empty slots first
            for head in range(heads):
                key, value = keys[row, head, order], values[row, head, order]
                sinks = None if rule.sinks is None else rule.sinks[head]
                out[row, head, :, places] = self._attend(queries[row, head, :, places], key, value, replace(rule, sinks=sinks))
        return out

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Of one KV head: queries (group, tokens, head_dim), keys and values (tokens, dim), sinks (group,)."""
        exact = accumulate_type(queries)
        logits = capped(queries.to(exact) @ keys.to(exact).T * rule.scaling, rule.softcap)
        tokens = logits.shape[-1]
        ones = torch.ones(tokens, tokens, dtype=torch.bool, device=logits.device)
        causal = ones.tril() if rule.window is None else ones.tril().triu(1 - rule.window)
        heavy, recent = int(self.heavy * tokens), int(self.recent * tokens)
        weights = masked_softmax(logits, causal, rule.sinks)
        mask = ones.triu(-recent) | (top_columns(weights, heavy) if self.oracle else running_heavy(weights, heavy))
        return (masked_softmax(logits, mask & causal, rule.sinks) @ values.to(exact)).to(values.dtype)


def top_columns(weights: Tensor, heavy: int) -> Tensor:
    """The `heavy` tokens with most attention from all queries, the same for each query: (heads, 1, tokens).

    weights (heads, tokens, tokens)
    """
    best = weights.sum(1).topk(min(heavy, weights.shape[-1]), dim=-1).indices
    return torch.zeros_like(weights[:, 0], dtype=torch.bool).scatter_(-1, best, True)[:, None]


def running_heavy(weights: Tensor, heavy: int) -> Tensor:
    """Tokens that each query sees as heavy hitters: (heads, tokens, tokens), True to be seen.

    The first `heavy` queries see each other. Each later one adds itself and the heavy - 1 with the largest sum of full
    attention so far; what drops out of these is out for good.
    """
    heads, tokens, _ = weights.shape
    mask = torch.zeros_like(weights, dtype=torch.bool)
    if not heavy:
        return mask
    mask[:, :heavy, :heavy] = True
    total = weights[:, :heavy].sum(1)
    held = torch.zeros(heads, tokens, dtype=torch.bool, device=weights.device)
    held[:, :heavy] = True
    for token in range(heavy, tokens):  # one comes, so one of those held goes: the least
        least = total.masked_fill(~held, float("inf")).argmin(-1, keepdim=True)
        held.scatter_(-1, least, False)
        held[:, token] = True
        mask[:, token] = held
        total = (total + weights[:, token]).masked_fill(~held, 0.0)
    return mask
