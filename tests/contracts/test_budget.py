"""Budget: what is held is what was allowed, what is reported is what is held, and what is evicted is gone."""

import pytest
import torch

from conftest import random_ids, shared_model
from contracts.helpers import (
    Feed,
    assert_holds,
    assert_near,
    assert_true_positions,
    attached,
    expected_hold,
    kv_and_state,
    kv_heads_of,
    layers_of,
    of_model,
    padded,
    policy_for,
    rows_of,
    storages,
    tensors_in,
    token_bytes_of,
    watched,
    windows_of,
)
from kvlab import Budget

THINNED = 4
PROMPT = 90
SPARE = 16
"""Slots that a head may have free while its budget is not reached."""


def assert_reported_is_held(session, cache):
    memory = session.memory(cache)
    assert memory.kv_bytes == kv_and_state(cache)[0]
    return memory


def assert_within(memory, limit, tokens):
    """Held bytes within max(1.02, (B + 1) / B) of `limit`, where the tightest layer may hold B = `tokens`."""
    assert memory.kv_bytes <= max(1.02, (tokens + 1) / tokens) * limit


def bytes_of(model, policy, holds):
    """Bytes of these many tokens per head in each layer, [sequence][layer]."""
    return sum(map(sum, holds)) * token_bytes_of(model, policy)


@pytest.mark.parametrize("kind", ["tokens", pytest.param("ratio", marks=pytest.mark.slow), "bytes"])
def test_held_bytes(policy_name, family, model, kind):
    policy = policy_for(family, policy_name)
    one = token_bytes_of(model, policy)
    tokens, budget = 45, Budget(tokens=45)
    if kind == "ratio":
        budget = Budget(ratio=0.5)
    elif kind == "bytes":  # what 45 tokens take, windows counted as such, and not quite enough for one more
        budget = Budget(bytes=sum(min(45, w or 45) for w in windows_of(model)) * one + one // 2)
    if kind == "bytes" and all(windows_of(model)):
        tokens = max(windows_of(model))
    with attached(model, family, policy_name, budget) as session:
        cache = session.new_cache()
        feed = Feed(model, cache, 2)
        prompt, token = random_ids(2, PROMPT), random_ids(2, 1, seed=1)
        feed(prompt)
        hold = expected_hold(model, policy, tokens, PROMPT)
        for row in range(2):
            assert_holds(cache, policy, hold, row)
        memory = assert_reported_is_held(session, cache)
        assert_within(memory, bytes_of(model, policy, [hold, hold]), min(hold))
        if kind == "bytes" and policy.evicts:
            assert_within(memory, 2 * budget.bytes, min(hold))
        for _ in range(4):
            feed(token)
            memory = assert_reported_is_held(session, cache)
            if policy.evicts and policy.holds_budget_after_prompt:
                for row in range(2):
                    assert_holds(cache, policy, hold, row)
                assert_within(memory, bytes_of(model, policy, [hold, hold]), min(hold))
        assert_true_positions(cache, [PROMPT + 4] * 2)


def assert_reported_state_is_held(session, pieces, masks=(None,)):
    """After each call, `state_bytes` are the bytes of all tensors that the cache holds besides keys and values.

    The current call's token ids are the caller's own.
    """
    cache = session.new_cache()
    feed = Feed(session.model, cache, len(pieces[0]))
    for ids, mask in zip(pieces, [*masks, *[None] * (len(pieces) - len(masks))], strict=True):
        feed(ids, mask)
        assert session.memory(cache).state_bytes == kv_and_state(cache, [ids])[1]


@pytest.mark.parametrize("side", ["unpadded", "left"])
def test_held_state(policy_name, family, model, side):
    ids, mask = (random_ids(2, PROMPT), None) if side == "unpadded" else padded(rows_of(PROMPT, 61), side)
    with attached(model, family, policy_name, Budget(tokens=45)) as session:
        steps = [random_ids(2, count, seed=count) for count in (1, 2, 30, 1)]
        assert_reported_state_is_held(session, [ids, *steps], [mask])


def test_held_state_under_rolling():
    with attached(shared_model("llama"), "llama", "streaming_llm", Budget(tokens=45), rolling=True) as session:
        assert_reported_state_is_held(session, [random_ids(2, count, seed=count) for count in (PROMPT, 1, 30, 1)])


def test_report_in_full(policy_name, family, model):
    policy = policy_for(family, policy_name)
    one = token_bytes_of(model, policy)
    with attached(model, family, policy_name, Budget(tokens=40)) as session:
        cache = session.new_cache()
        assert session.memory(cache).kv_bytes == 0
        feed = Feed(model, cache, 2)
        feed(*padded(rows_of(PROMPT, 61), "left"))
        memory = session.memory(cache)
        hold = [expected_hold(model, policy, 40, length) for length in (PROMPT, 61)]
        assert memory.kept_len.shape == (layers_of(model), 2, kv_heads_of(model))
        assert torch.equal(memory.kept_len, cache.kept_len)
        assert memory.kept_fraction == pytest.approx(sum(map(sum, hold)) / (layers_of(model) * (PROMPT + 61)))
        full = sum(min(length, w or length) for length in (PROMPT, 61) for w in windows_of(model))
        assert memory.kv_bytes_full == full * one
        # The prompt's last layer is held in full just before it is evicted; the layers before it are evicted already.
        assert memory.kv_bytes_peak >= (PROMPT + 61 + sum(sum(row[:-1]) for row in hold)) * one
        assert memory.kv_bytes_peak >= memory.kv_bytes
        assert memory.kv_bytes_peak <= layers_of(model) * (PROMPT + 61) * one
        assert cache.seen_len.tolist() == [PROMPT, 61]
        assert cache.get_seq_length() == PROMPT


def test_evicted_memory_is_released(policy_name, family, model):
    """After each call, whatever it left alive belongs to the cache, and keys and values there are those of the store."""
    policy = policy_for(family, policy_name)
    pieces = [random_ids(2, count, seed=count) for count in (PROMPT, 1, 30, 2)]
    with attached(model, family, policy_name, Budget(tokens=40)) as session:
        cache = session.new_cache()
        feed = Feed(model, cache, 2)

        def strays(new):
            alive = storages(new())
            own = storages([*tensors_in(cache, host=True), *tensors_in(cache.plan.vocab), feed.mask])
            return [size for pointer, size in alive.items() if pointer not in own]

        def copies():
            held = storages(tensor for layer in cache.layers for tensor in (layer.store.keys, layer.store.values))
            held |= storages(part for layer in cache.layers for part in layer.profile.values())  # one number a head
            wide = storages(t for t in tensors_in(cache) if t.is_floating_point() and t.ndim > 1 and not of_model(t))
            return [] if policy.rolling else [size for pointer, size in wide.items() if pointer not in held]

        with watched() as new:
            for ids in pieces:
                feed(ids)
                assert strays(new) == copies() == []
            assert len(new()) > 2 * layers_of(model)  # the cache itself is seen
            cache.reset()
            assert strays(new) == []
            assert session.memory(cache).kv_bytes == session.memory(cache).state_bytes == 0


def test_a_huge_budget_allocates_nothing_extra(policy_name, family, model):
    policy = policy_for(family, policy_name)
    with attached(model, family, policy_name, Budget(tokens=10**9)) as session:
        cache = session.new_cache()
        feed = Feed(model, cache)
        for ids, spare in ((random_ids(1, PROMPT), 1), (random_ids(1, 1, seed=1), SPARE), (random_ids(1, 30, seed=2), 1)):
            feed(ids)
            held = [min(int(cache.seen_len), w or 10**9) + spare for w in windows_of(model)]
            assert session.memory(cache).kv_bytes <= sum(held) * token_bytes_of(model, policy)
        assert cache.kept_len[:, 0, 0].tolist() == expected_hold(model, policy, None, PROMPT + 31)


@pytest.mark.filterwarnings("ignore:a budget of")
def test_ratio_is_of_each_rows_own_tokens(policy_name, family, model):
    policy = policy_for(family, policy_name)
    lengths = (120, 78, 9)
    with attached(model, family, policy_name, Budget(ratio=0.55)) as session:
        for side in ("left", "right"):
            cache = session.new_cache()
            Feed(model, cache, 3)(*padded(rows_of(*lengths), side))
            for row, (length, tokens) in enumerate(zip(lengths, (66, 42, 4), strict=True)):
                assert_holds(cache, policy, expected_hold(model, policy, tokens, length), row)
            assert_reported_is_held(session, cache)


def test_ratio_of_the_total(policy_name, family, model):
    policy = policy_for(family, policy_name)
    with attached(model, family, policy_name, Budget(ratio=0.5, of="total")) as session:
        cache = session.new_cache(max_new_tokens=22)
        Feed(model, cache)(random_ids(1, PROMPT))
        assert_holds(cache, policy, expected_hold(model, policy, (PROMPT + 22) // 2, PROMPT))


def test_a_prompt_shorter_than_the_budget_is_kept_whole(policy_name, family, model):
    policy = policy_for(family, policy_name)
    with attached(model, family, policy_name, Budget(tokens=40)) as session:
        cache = session.new_cache()
        feed = Feed(model, cache)
        feed(random_ids(1, 35))
        assert_holds(cache, policy, [min(35, w or 35) for w in windows_of(model)])
        for step in range(1, 9):  # grows to the budget, then stays there
            feed(random_ids(1, 1, seed=step))
            tokens = 35 + step if not (policy.evicts and policy.holds_budget_after_prompt) else min(40, 35 + step)
            held = cache.kept_len[:, 0].float().mean(1).tolist()
            assert sum(held) == sum(min(tokens, w or tokens) for w in windows_of(model))


@pytest.mark.parametrize("settings", [{"num_sink": 3}, {"num_sink": 2, "recent_window": 7}])
def test_protected_tokens_are_always_kept(policy_name, family, model, settings):
    """Sinks and the recent window, in every layer and head and after every step; a sliding window comes before sinks."""
    policy = policy_for(family, policy_name, **settings)
    with attached(model, family, policy_name, Budget(tokens=40), **settings) as session:
        cache = session.new_cache()
        feed = Feed(model, cache, 2)
        feed(*padded(rows_of(PROMPT, 70), "left"))
        for step in range(4):
            for layer, window in zip(cache.kept_positions(), windows_of(model), strict=True):
                for seen, heads in zip((PROMPT + step, 70 + step), layer, strict=True):
                    protected = set(range(seen - policy.recent_window, seen))
                    if window is None:
                        protected |= set(range(policy.num_sink))
                    assert all(protected <= set(head) for head in heads)
                    assert window is None or all(min(head) > seen - 1 - window for head in heads)
            feed(random_ids(2, 1, seed=step))


def test_sessions_without_a_limit_hold_everything(policy_name, family, model):
    ids = random_ids(1, 60)
    with attached(model, family, policy_name, None) as session:
        cache = session.new_cache()
        logits = Feed(model, cache)(ids)
        assert cache.kept_len[:, 0, 0].tolist() == [min(60, w or 60) for w in windows_of(model)]
    assert_near(logits, model(ids, use_cache=False).logits)
