"""CORM on whole models: with a window that is never reached nothing leaves, and what expires is really freed."""

import pytest
import torch

from conftest import shared_model
from contracts.helpers import Feed, kv_and_state, padded, positions_of, rows_of, talk
from kvlab import Budget, attach, make_policy
from kvlab.policies import PolicyError
from kvlab.protocol import Chunked, PromptProtocol, Stream


def read(model, name, stream, **settings):
    """Two prompts of a padded batch, then a text token by token, its last part at once: logits of the text, and the cache."""
    ids, mask = padded(rows_of(44, 31), "left")
    text = talk(2, 40, seed=7)[0]
    with attach(model, make_policy(name, **settings)) as session:
        cache = session.new_cache()
        feed = Feed(model, cache, 2)
        if stream:
            with cache.stepwise():
                feed(ids, mask)
        else:
            feed(ids, mask)
        logits = [feed.each(text[:, :5])]
        with cache.stepwise():
            logits.append(feed(text[:, 5:]))
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("stream", [False, True], ids=["prompt", "stream"])
def test_a_window_that_is_never_reached_is_the_full_cache(family, model, stream):
    expected, full = read(model, "full", stream)
    for window in (100, 2**40):
        logits, cache = read(model, "corm", stream, obs_window=window, recent_window=0)
        assert (logits - expected).abs().max() < 1e-4
        for row in range(2):
            held = [[head[-layer.rule.window :] if layer.rule.window else head for head in heads]
                    for layer, heads in zip(full.layers, positions_of(full, row), strict=True)]  # fmt: skip
            assert positions_of(cache, row) == held


@pytest.mark.parametrize("stream", [False, True], ids=["prompt", "stream"])
def test_less_is_held_with_a_shorter_window(family, model, stream):
    """All heads by themselves; the storages hold no more than that and some room to grow."""
    kept = []
    for window in (100, 12, 3):
        _, cache = read(model, "corm", stream, obs_window=window, recent_window=3)
        memory = cache.memory()
        assert (memory.kv_bytes, memory.state_bytes) == kv_and_state(cache)
        for layer in cache.layers:
            assert (layer.store.capacity <= layer.store.lengths + 16).all()
            assert layer.store.read_lengths().tolist() == layer.store.lengths.tolist()
        kept.append(cache.kept_len)
    assert kept[0].sum() > kept[1].sum() > kept[2].sum()
    assert len(kept[2].unique()) > 1 and kept[2].min() >= 3


@pytest.mark.parametrize("stream", [False, True], ids=["prompt", "stream"])
def test_a_budget_is_a_cap_on_each_head(stream):
    model = shared_model("llama")
    for tokens in (5, 20):
        with attach(model, make_policy("corm", obs_window=9, recent_window=2), Budget(tokens=tokens)) as session:
            cache = session.new_cache()
            feed, (text,) = Feed(model, cache), rows_of(60)
            if stream:
                with cache.stepwise():
                    feed(text)
            else:
                feed(text)
            for token in (3, 4, 5):
                assert int(cache.kept_len.max()) <= tokens
                feed(torch.tensor([[token]]))
        assert tokens == 20 or (cache.kept_len == 5).any()


@pytest.mark.parametrize("window", [0, -1])
def test_windows_that_can_not_be(window):
    with pytest.raises(PolicyError, match=f"policy.obs_window={window}: .*(use 1 or more|whole number)"):
        make_policy("corm", obs_window=window)


def test_a_budget_smaller_than_what_it_protects_is_refused():
    policy, budget = make_policy("corm"), Budget(tokens=100)
    with (
        pytest.raises(ValueError, match="recent_window=256"),
        attach(shared_model("llama"), policy, budget) as session,
    ):
        session.new_cache()


@pytest.mark.parametrize("protocol", [PromptProtocol, Stream, lambda: Chunked(chunk=16)])
def test_every_protocol_is_for_it(protocol):
    protocol().check(make_policy("corm"), Budget())
