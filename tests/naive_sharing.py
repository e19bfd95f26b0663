"""Slow references of layers that read another layer's cache, on plain transformers; nothing of kvlab is used here.

`LentCache` is the stock cache, in which a layer is given another's keys and values. `Loop` stands in for attention: one
sequence, lists of tokens for each layer and head, and a decision about a layer's tokens once the last of its readers has
attended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

NAME = "naive_sharing"


class LentCache(DynamicCache):
    """sources: layer -> the layer whose keys and values it is given; its own are thrown away."""

    def __init__(self, model, sources: dict[int, int]) -> None:
        super().__init__(config=model.config)
        self.sources, self.lent = sources, {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """What layer `layer_idx` attends over."""
        found = super().update(key_states, value_states, layer_idx, *args, **kwargs)  # its length is asked for
        self.lent[layer_idx] = found
        return self.lent[self.sources.get(layer_idx, layer_idx)]


def merged(weights: Tensor, group: str) -> Tensor:
    """Query heads of one KV head, (members, ...), as one."""
    return {"mean": weights.mean(0), "sum": weights.sum(0), "max": weights.amax(0), "first": weights[0]}[group]


class Loop:
    """One sequence under a policy, a token after the other.

    rule  "mass": the budget is half heavy hitters, half the newest tokens, at a prompt's end and at each step; "votes": at a
          prompt's end the last 4 queries vote for the others, and nothing leaves later
    late  decide when all readers have attended; False: as soon as the layer itself has, which is wrong
    """

    def __init__(self, sources: dict[int, int], budget: int, rule: str = "mass", group: str = "mean", late: bool = True):
        self.sources, self.budget, self.rule, self.group, self.late = sources, budget, rule, group, late
        self.readers = {layer: 1 + list(sources.values()).count(layer) for layer in range(100) if layer not in sources}
        self.held: dict[int, list[dict[int, list]]] = {}  # layer -> for each KV head: position -> [key, value, mass]
        self.heard: dict[int, list[Tensor]] = {}  # layer -> of each reader so far (kv_heads, group, queries, positions)
        self.seen = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query (heads, tokens, dim), key and value (kv_heads, tokens, dim); (heads, tokens, dim)."""
        source, now = self.sources.get(layer, layer), range(self.seen, self.seen + query.shape[1])
        if source == layer:
            heads = self.held.setdefault(layer, [{} for _ in key])
            for head, tokens in enumerate(heads):
                tokens.update({at: [key[head, i], value[head, i], 0.0] for i, at in enumerate(now)})
            self.heard[layer] = []
        grouped = query.unflatten(0, (len(key), -1))
        weights = torch.zeros(*grouped.shape[:3], now.stop, dtype=query.dtype)
        outputs = torch.zeros_like(grouped)
        for head, tokens in enumerate(self.held[source]):
            for member in range(grouped.shape[1]):
                for i, at in enumerate(now):
                    places = [place for place in tokens if place <= at]
                    if not places:  # only where a decision came too early
                        continue
                    logits = torch.stack([tokens[place][0] @ grouped[head, member, i] for place in places]) * scaling
                    share = logits.softmax(0)
                    weights[head, member, i, places] = share
                    outputs[head, member, i] = share @ torch.stack([tokens[place][1] for place in places])
        self.heard[source].append(weights)
        if len(self.heard[source]) == (self.readers[source] if self.late else 1):
            self.decide(source, torch.cat(self.heard[source], 1))
        return outputs.flatten(0, 1)

    def decide(self, layer: int, weights: Tensor) -> None:
        """weights (kv_heads, members, queries, positions) of all readers."""
        for head, tokens in enumerate(self.held[layer]):
            for place in tokens:
                tokens[place][2] += float(merged(weights[head], self.group)[:, place].sum())
            if len(tokens) <= self.budget or (self.rule == "votes" and self.seen):
                continue
            recent = 4 if self.rule == "votes" else self.budget - self.budget // 2
            newest = sorted(tokens)[-recent:]
            score = {place: tokens[place][2] for place in tokens if place not in newest}
            if self.rule == "votes":
                score = {place: float(merged(weights[head], self.group)[-4:, place].sum()) for place in score}
            best = sorted(score, key=lambda place: (score[place], place))[len(tokens) - self.budget :]
            self.held[layer][head] = {place: tokens[place] for place in sorted([*best, *newest])}

    def positions(self, layers: int) -> list[list[list[int]]]:
        """What is held: [layer][kv_head] -> positions."""
        heads = len(self.held[0])
        return [[sorted(tokens) for tokens in self.held.get(layer, [{}] * heads)] for layer in range(layers)]


class CodedLoop:
    """The same where nothing leaves and each layer's tokens are held by a cache of `naive_codecs`.

    make  -> a new such cache
    """

    def __init__(self, sources: dict[int, int], make) -> None:
        self.sources, self.make, self.caches, self.seen = sources, make, {}, 0
        self.waiting: dict[int, int] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """As of `Loop`."""
        source = self.sources.get(layer, layer)
        if source == layer:
            cache = self.caches.setdefault(layer, self.make())
            cache.keys.insert(key.numpy())
            cache.values.insert(value.numpy())
            self.waiting[layer] = 1 + list(self.sources.values()).count(layer)
        cache = self.caches[source]
        cache.scaling = scaling
        output = torch.from_numpy(cache.attend(query.numpy()))
        self.waiting[source] -= 1
        if not self.waiting[source]:
            cache.keys.seal()
            cache.values.seal()
        return output


@contextmanager
def at_work(model, loop) -> Iterator:
    """Yields a function from new tokens, (1, tokens), to their logits."""

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        output = loop.attend(module.layer_idx, query[0], key[0], value[0], scaling or query.shape[-1] ** -0.5)
        return output[None].transpose(1, 2).contiguous(), None

    def feed(ids: Tensor) -> Tensor:
        positions = torch.arange(loop.seen, loop.seen + ids.shape[1])[None]
        logits = model(ids, position_ids=positions, use_cache=False).logits
        loop.seen += ids.shape[1]
        return logits

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda **kwargs: None)
    former = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield feed
    finally:
        model.set_attn_implementation(former)
