"""What the contract tests share: prompts with pads, forward passes, and a look into caches that trusts no report of theirs."""

from __future__ import annotations

import dataclasses
import functools
import gc
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvlab import Budget, attach, make_policy
from kvlab.cache.plan import Plan
from kvlab.tiny import tiny_model, tiny_tokenizer

PAD = 0
UNREACHABLE = Budget(tokens=10_000)
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
"""Options for `generate`: no sampling and no early end."""


@functools.cache
def fresh_model(family, **overrides):
    """A tiny model that is not the one of other tests; no test may change it either."""
    return tiny_model(family, **overrides)


EXACT = {
    "scissorhands": {"drop_share": 0.0},  # one token at each step
    "hyde": {"action": "evict"},  # fading changes attention
    "fastgen": {"members": ("full",)},  # a budget is a cap on what a profile asks for
    "corm": {"obs_window": 10_000, "recent_window": 0},  # and on what attention asks for
}
"""Settings under which a policy holds its budget exactly and attends as the model does; others have tests of their own."""


def policy_for(family, name, **settings):
    """The policy; skips where its own defaults can't go with the family (rolling without rotary positions)."""
    policy = make_policy(name, **{**EXACT.get(name, {}), **settings})
    if policy.rolling and family == "opt":
        pytest.skip(f"{name} is rolling by default, and opt has no rotary positions")
    return policy


@contextmanager
def attached(model, family, name, budget, kernels="auto", **settings):
    """`attach` for a policy by name. A tokenizer is always given, since a policy may want one."""
    policy = policy_for(family, name, **settings)
    with attach(model, policy=policy, budget=budget, tokenizer=tiny_tokenizer(), kernels=kernels) as session:
        yield session


# ------------------------------------------------------------------------------------------------------- prompts


def talk(batch, *counts, seed=0):
    """Pieces of a conversation, (batch, count) each. No id comes twice in it: equal tokens may score equally but for
    rounding, which one computation does not share with another.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([10 + torch.randperm(240, generator=generator)[: sum(counts)] for _ in range(batch)])
    return ids.split(counts, 1)


def rows_of(*lengths, seed=0):
    """One prompt, (1, length), for each length; all different."""
    return [talk(1, length, seed=seed + 100 * number)[0] for number, length in enumerate(lengths)]


def padded(rows, side):
    """A batch of prompts with pads on that side: ids and mask, (batch, longest)."""
    longest = max(row.shape[1] for row in rows)
    ids, mask = [], []
    for row in rows:
        pads = torch.full((1, longest - row.shape[1]), PAD)
        real, unreal = torch.ones_like(row), torch.zeros_like(pads)
        ids.append(torch.cat([pads, row] if side == "left" else [row, pads], 1))
        mask.append(torch.cat([unreal, real] if side == "left" else [real, unreal], 1))
    return torch.cat(ids), torch.cat(mask)


def true_positions(mask):
    """Position of every token, pads not counted: what `generate` gives a model, (batch, tokens)."""
    return (mask.cumsum(1) - 1).clamp(min=0)


# ------------------------------------------------------------------------------------------------- forward passes


class Feed:
    """Calls a model on one cache, piece by piece, with the mask and the positions that `generate` would pass."""

    def __init__(self, model, cache, batch=1):
        self.model, self.cache = model, cache
        self.mask = torch.zeros(batch, 0, dtype=torch.long)

    def __call__(self, ids, mask=None):
        """Logits of these tokens, (batch, tokens, vocab)."""
        self.mask = torch.cat([self.mask, torch.ones_like(ids) if mask is None else mask], 1)
        positions = true_positions(self.mask)[:, -ids.shape[1] :]
        return self.model(ids, attention_mask=self.mask, position_ids=positions, cache=self.cache).logits

    def each(self, ids):
        """The same, one call for each token."""
        return torch.cat([self(token) for token in ids.split(1, 1)], 1)

    def greedy(self, logits, steps):
        """Continue greedily after a call's logits (last token of each row): tokens (batch, steps) and their logits."""
        tokens, seen = [], []
        last = logits
        for _ in range(steps):
            seen.append(last)
            tokens.append(last.argmax(-1, keepdim=True))
            last = self(tokens[-1])[:, -1]
        return torch.cat(tokens, 1), torch.stack(seen, 1)


def stock_cache(model):
    """What the model makes for itself."""
    return DynamicCache(config=model.config)


def tolerance(logits, digits=1e-5):
    """1e-5, scaled to the size of the logits where they are larger than 1: float32 rounds relative to size."""
    return digits * max(1.0, float(logits.abs().max()))


def assert_near(actual, expected, digits=1e-5):
    """Largest difference within `tolerance`."""
    worst = float((actual - expected).abs().max())
    assert worst <= tolerance(expected, digits), f"logits differ by {worst:.2e}"


# ------------------------------------------------------------------------------------------------ expected lengths


def windows_of(model):
    """Sliding window of every layer, None for full attention; read from the config alone."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers_of(model)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def layers_of(model):
    return model.config.num_hidden_layers


def kv_heads_of(model):
    return getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads


def token_bytes_of(model, policy):
    """Bytes of one token's key and value in one layer, over all KV heads."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = model.dtype.itemsize
    return kv_heads_of(model) * dim * ((max(4, size) if policy.rolling else size) + size)


def expected_hold(model, policy, budget, seen, held=None):
    """Tokens per head (mean over heads) that each layer must hold after the end of a turn, for one sequence.

    budget  tokens per head, None for no limit; seen: tokens seen; held: tokens there were before eviction, by layer
    """
    held = [seen] * layers_of(model) if held is None else held
    split = [seen] * layers_of(model)
    if policy.evicts and budget is not None:
        split = policy.layer_budget(budget, layers_of(model), seen)
        assert sum(split) == layers_of(model) * budget, "layers' budgets must sum to the whole"
    return [min(b, h, w or b) for b, h, w in zip(split, held, windows_of(model), strict=True)]


def assert_holds(cache, policy, expected, row=0):
    """A sequence holds exactly so many tokens in each layer: in every head, or on average where heads are ragged."""
    kept = cache.kept_len[:, row]  # (layers, kv_heads)
    heads = kept.shape[1]
    if policy.ragged:
        assert kept.sum(1).tolist() == [heads * tokens for tokens in expected]
    else:
        assert kept.tolist() == [[tokens] * heads for tokens in expected]


def assert_true_positions(cache, seen):
    """Kept positions are distinct, ascending and true, and as many as reported. seen: tokens of each sequence."""
    lengths = cache.kept_len.tolist()
    for layer, rows in zip(lengths, cache.kept_positions(), strict=True):
        for counts, heads, total in zip(layer, rows, seen, strict=True):
            for count, head in zip(counts, heads, strict=True):
                assert len(head) == count
                assert head == sorted(set(head))
                assert all(0 <= position < total for position in head)


def positions_of(cache, row):
    """Kept positions of one sequence: [layer][kv_head]."""
    return [layer[row] for layer in cache.kept_positions()]


# ------------------------------------------------------------------------------------------------ what is really held


def tensors_in(root, host=False):
    """All tensors reachable from an object through attributes, fields and containers; models and plans are left out.

    host  include tensors that only lend their memory to an array of counts on the host
    """
    found, seen, queue = [], set(), [root]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, (torch.nn.Module, Plan, ModuleType, type)):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, np.ndarray):
            queue.extend([item.base] if host else [])
        elif isinstance(item, dict):
            queue.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            queue.extend(item)
        elif dataclasses.is_dataclass(item) or type(item).__module__.startswith("kvlab"):
            queue.extend(getattr(item, "__dict__", {}).values())
    return found


def storages(tensors):
    """Bytes of the storages behind tensors, each once: data pointer -> bytes."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.untyped_storage().nbytes()}


@contextmanager
def watched():
    """Yields a function that gives all tensors alive now that were not there before, as far as Python knows them."""
    gc.collect()
    gc.freeze()  # what is there now is looked at no more, which makes looking fast

    def new():
        gc.collect()
        return [item for item in gc.get_objects() if type(item) in (Tensor, torch.nn.Parameter)]

    try:
        yield new
    finally:
        gc.unfreeze()


def kv_and_state(cache, callers=()):
    """Bytes of keys and values and of all else that a cache holds, found by walking it: (kv, state).

    Keys and values are the floating-point tensors with a dimension of heads; parameters of the model and the caller's
    own tensors are nobody's bookkeeping.
    """
    own = storages(t for t in tensors_in(cache) if not of_model(t))
    for pointer in storages(callers):
        own.pop(pointer, None)
    kv = storages(tensor for layer in cache.layers if layer.store for tensor in (layer.store.keys, layer.store.values))
    assert kv.keys() <= own.keys()
    return sum(kv.values()), sum(size for pointer, size in own.items() if pointer not in kv)


def of_model(tensor):
    """Whether it is one of a model's parameters, or a view of one."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter)
