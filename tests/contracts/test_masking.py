"""Eviction equals masking: really evicting gives what full attention gives under a mask that hides the evicted tokens.

The reference is the same model with an attention function of this file, which sees all tokens at once, each query through
a mask of its own for each layer and head. The masks come from what the cache said it held before each call. In float64.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from conftest import random_ids, shared_model
from contracts.helpers import (
    Feed,
    assert_near,
    attached,
    fresh_model,
    layers_of,
    padded,
    policy_for,
    positions_of,
    rows_of,
    windows_of,
)
from kvlab import Budget

PROMPT, TURN = 56, 14
CALLS = [PROMPT, *[1] * 9, TURN, *[1] * 6]
BUDGET = Budget(tokens=40)


class Reference:
    """Masks and places that the reference's attention uses; set for the length of one forward pass."""

    visible: list[Tensor] = []
    """For each layer: which tokens each query sees, (batch, kv_heads, queries, tokens)."""
    places: list[tuple[Tensor, Tensor]] | None = None
    """For each layer, under `rolling`: rank of each query, (batch, kv_heads, queries), and of each token as it sees it."""
    angles: tuple[Tensor, Tensor] | None = None
    """cos and sin by position, (positions, rotary_dim / 2)."""


def masked_attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    """Plain attention, every step written out. query (batch, heads, tokens, dim), key and value (batch, kv_heads, ...)."""
    visible = Reference.visible[module.layer_idx]
    group = query.shape[1] // key.shape[1]
    query = query.unflatten(1, (key.shape[1], group))
    if Reference.places is None:
        logits = torch.einsum("bhgqd,bhkd->bhgqk", query, key)
    else:
        logits = rolled_logits(query, key, *Reference.places[module.layer_idx])
    logits = logits * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible[:, :, None], float("-inf"))
    if s_aux is not None:
        sinks = s_aux.to(logits).view(1, key.shape[1], group, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    output = torch.einsum("bhgqk,bhkd->bhgqd", weights, value).flatten(1, 2)
    return output.transpose(1, 2).contiguous(), None


def rolled_logits(query, key, query_places, key_places):
    """Dot products after moving every query and key from its true position to its place among what is held."""
    cos, sin = Reference.angles
    size = cos.square() + sin.square()  # some rotations scale too
    back = cos / size, -sin / size
    query = turned(turned(query, *back), cos[query_places][:, :, None], sin[query_places][:, :, None])
    key = turned(turned(key, *back)[:, :, None], cos[key_places], sin[key_places])  # (batch, kv_heads, queries, tokens, dim)
    return torch.einsum("bhgqd,bhqkd->bhgqk", query, key)


def turned(states, cos, sin):
    """Rotate the halves of the first dimensions as complex numbers; the other dimensions stay."""
    half = cos.shape[-1]
    a, b, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest.expand(*(a * cos).shape[:-1], -1)], -1)


AttentionInterface.register("contracts_masked", masked_attention)
AttentionMaskInterface.register("contracts_masked", lambda **kwargs: None)


@functools.cache
def reference_model(family):
    return fresh_model(family, dtype=torch.float64, attn_implementation="contracts_masked")


def reference_logits(family, ids, visible, places=None):
    """One pass over all tokens of one sequence. visible: as in `Reference`."""
    model = reference_model(family)
    Reference.visible, Reference.places = visible, places
    if places is not None:
        embedding = next(m for m in model.modules() if hasattr(m, "inv_freq"))
        cos, sin = (t[0] for t in embedding(torch.zeros(1, dtype=torch.float64), torch.arange(ids.shape[1])[None]))
        half = embedding.inv_freq.shape[-1]
        Reference.angles = cos[:, :half], sin[:, :half]
    try:
        return model(ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits
    finally:
        Reference.visible, Reference.places, Reference.angles = [], None, None


def recorded_run(session, batch, first, first_mask, rest):
    """Run prompt, steps, a turn, steps. Returns logits of each call and, for each call, what was held before and after."""
    cache = session.new_cache()
    feed = Feed(session.model, cache, batch)
    logits, held = [feed(first, first_mask)], [cache.kept_positions()]
    for piece in rest:
        logits.append(feed(piece))
        held.append(cache.kept_positions())
    return logits, held


def masks_for(model, policy, calls, held, row):
    """What each query of one sequence sees, and where things stand under `rolling`: visible and places for each layer.

    calls  tokens of each call; held: what was held after each call, [call][layer][row][kv_head] -> positions
    """
    total, visible, places = sum(calls), [], []
    for layer, window in enumerate(windows_of(model)):
        heads = len(held[0][layer][row])
        sees = torch.zeros(1, heads, total, total, dtype=torch.bool)
        rank_of_query = torch.zeros(1, heads, total, dtype=torch.long)
        rank_of_key = torch.zeros(1, heads, total, total, dtype=torch.long)
        start = 0
        for call, count in enumerate(calls):
            for head in range(heads):
                before = held[call - 1][layer][row][head] if call else []
                if count == 1 and policy.phase == "before_attention":  # the victim has left before the token attends
                    before = [position for position in before if position in held[call][layer][row][head]]
                present = torch.tensor([*before, *range(start, start + count)])
                rank_of_key[0, head, start : start + count, present] = torch.arange(len(present))
                for query in range(start, start + count):
                    seen = present[present <= query]
                    rank_of_query[0, head, query] = len(seen) - 1
                    if window is not None:
                        seen = seen[seen > query - window]
                    sees[0, head, query, seen] = True
            start += count
        visible.append(sees)
        places.append((rank_of_query, rank_of_key))
    return visible, places


def assert_equals_masking(family, policy_name, budget=BUDGET, **settings):
    model = shared_model(family, torch.float64)
    rows = rows_of(PROMPT, PROMPT - 7)
    first, first_mask = padded(rows, "left")
    rest = random_ids(2, sum(CALLS[1:]), seed=5).split(CALLS[1:], 1)
    policy = policy_for(family, policy_name, **settings)
    with attached(model, family, policy_name, budget, **settings) as session:
        logits, held = recorded_run(session, 2, first, first_mask, rest)
    for row, prompt in enumerate(rows):
        ids = torch.cat([prompt, *[piece[row : row + 1] for piece in rest]], 1)
        calls = [prompt.shape[1], *CALLS[1:]]
        visible, places = masks_for(model, policy, calls, held, row)
        if policy.evicts:  # else there is nothing to see
            full = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
            assert any(bool((full & ~sees).any()) for sees in visible)
        expected = reference_logits(family, ids, visible, places if policy.rolling else None)[0]
        actual = torch.cat([logits[0][row][first_mask[row].bool()], *[part[row] for part in logits[1:]]])
        worst = (actual - expected).abs().amax(-1)
        assert worst.max() <= 1e-9, f"row {row}, token {int(worst.argmax())}: logits differ by {worst.max():.2e}"


def test_evicting_equals_hiding(policy_name, family):
    assert_equals_masking(family, policy_name)


ROLLING = [pytest.param(f, marks=pytest.mark.slow) if f != "llama" else f for f in ("llama", "gpt_neox", "gpt_oss")]


@pytest.mark.parametrize("family_", ROLLING)
def test_rolling_equals_hiding_and_moving_up(family_):
    assert_equals_masking(family_, "streaming_llm", Budget(tokens=24), rolling=True)


def test_reference_without_hiding_is_the_stock_model(family):
    """The reference itself: with causal masks (and windows) it is the model as transformers has it."""
    model = shared_model(family, torch.float64)
    ids = random_ids(1, 60)
    causal = torch.ones(60, 60).tril().bool()
    visible = [causal if w is None else causal & ~torch.ones(60, 60).tril(-w).bool() for w in windows_of(model)]
    actual = reference_logits(family, ids, [mask[None, None] for mask in visible])
    assert len(visible) == layers_of(model)
    # transformers' own eager attention, which is all that some families have, takes the softmax in float32.
    assert_near(actual, model(ids, use_cache=False).logits, 1e-9 if type(model)._supports_sdpa else 1e-6)


def test_heads_of_a_coupled_layer_keep_the_same(family, model, request):
    names = [name for name in request.config.policies_under_test if policy_for(family, name).coupling == "layer"]
    if not names:
        pytest.skip("none of these policies decides for a whole layer")
    for name in names:
        with attached(model, family, name, Budget(tokens=20)) as session:
            cache = session.new_cache()
            feed = Feed(session.model, cache)
            feed(random_ids(1, 100))
            for token in random_ids(1, 3, seed=1).split(1, 1):
                assert all(head == heads[0] for heads in positions_of(cache, 0) for head in heads)
                feed(token)
