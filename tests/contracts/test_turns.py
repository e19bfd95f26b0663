"""Turns: every prompt on a cache is compressed, positions run on, and neither chunks nor single steps change a result."""

import pytest
import torch

from conftest import random_ids
from contracts.helpers import (
    GREEDY,
    Feed,
    assert_holds,
    assert_near,
    assert_true_positions,
    attached,
    expected_hold,
    layers_of,
    policy_for,
    talk,
    windows_of,
)
from kvlab import Budget, BudgetError

THINNED = 4
TURNS = (80, 30, 40)
BUDGETS = pytest.mark.parametrize("budget", [Budget(ratio=0.5), Budget(tokens=40)], ids=["ratio", "tokens"])


@BUDGETS
def test_every_prompt_is_compressed(policy_name, family, model, budget):
    policy = policy_for(family, policy_name)
    with attached(model, family, policy_name, budget) as session:
        cache = session.new_cache()
        feed = Feed(model, cache, 2)
        seen, held = 0, [0] * layers_of(model)
        for number, count in enumerate(TURNS):
            feed(random_ids(2, count, seed=number))
            seen += count
            tokens = seen // 2 if budget.ratio else 40
            if policy.evicts and not policy.ragged:
                hold = expected_hold(model, policy, tokens, seen, [h + count for h in held])
                assert_holds(cache, policy, hold, row=1)
            bound = expected_hold(model, policy, tokens, seen)
            mean = cache.kept_len.float().mean(2)  # (layers, batch)
            assert all(mean[layer].max() <= most for layer, most in enumerate(bound))
            feed.each(random_ids(2, 3, seed=10 + number))
            seen += 3
            held = [int(layer) for layer in cache.kept_len[:, 1].float().mean(1)]
            if policy.holds_budget_after_prompt and policy.evicts:
                assert all(have <= most for have, most in zip(held, bound, strict=True))
            assert cache.seen_len.tolist() == [seen, seen]
            assert cache.get_seq_length() == seen
            assert_true_positions(cache, [seen, seen])


def test_every_turn_ends_at_the_budget_exactly(policy_name, family, model):
    """After enough tokens, whatever was held before: the budget is used up in every layer."""
    policy = policy_for(family, policy_name)
    with attached(model, family, policy_name, Budget(tokens=40)) as session:
        cache = session.new_cache()
        feed = Feed(model, cache)
        for number in range(3):
            feed(random_ids(1, 110, seed=number))
            assert_holds(cache, policy, expected_hold(model, policy, 40, 110 * (number + 1)))


@BUDGETS
def test_chunks_of_a_turn_change_nothing(policy_name, family, model, budget):
    """Row 1 is padded so far that its first chunk is nothing but pads. Later turns too."""
    prompt, step, second, last = talk(2, 100, 1, 41, 1)
    mask = torch.ones_like(prompt)
    mask[1, :31] = 0
    with attached(model, family, policy_name, budget) as session:
        whole, chunked = session.new_cache(), session.new_cache()
        feed, feed_chunks = Feed(model, whole, 2), Feed(model, chunked, 2)
        for turn, turn_mask in ((prompt, mask), (second, torch.ones_like(second))):
            expected = feed(turn, turn_mask)
            with chunked.turn():
                chunks = [feed_chunks(*chunk) for chunk in zip(turn.split(29, 1), turn_mask.split(29, 1), strict=True)]
            real = turn_mask.bool()
            assert_near(torch.cat(chunks, 1)[real], expected[real])
            assert chunked.kept_positions() == whole.kept_positions()
            assert torch.equal(chunked.kept_len, whole.kept_len)
            step_ids = step if turn is prompt else last
            assert_near(feed_chunks(step_ids), feed(step_ids))
        assert chunked.kept_positions() == whole.kept_positions()


def test_nothing_is_evicted_before_a_turn_ends(policy_name, family, model):
    with attached(model, family, policy_name, Budget(tokens=40)) as session:
        cache = session.new_cache()
        feed = Feed(model, cache)
        with cache.turn():
            for number, seen in enumerate((30, 60, 90)):
                feed(random_ids(1, 30, seed=number))
                assert set(cache.kept_len.flatten().tolist()) == {seen}
        policy = policy_for(family, policy_name)
        assert_holds(cache, policy, expected_hold(model, policy, 40, 90))
        with cache.turn():  # one token, declared a turn
            feed(random_ids(1, 1, seed=9))
        assert_true_positions(cache, [91])


def test_steps_in_one_call_equal_one_token_calls_after_a_prompt(policy_name, family, model):
    prompt, steps, second, more = talk(2, 90, 9, 20, 9)
    mask = torch.ones_like(prompt)
    mask[1, :15] = 0
    with attached(model, family, policy_name, Budget(tokens=40)) as session:
        one, many = session.new_cache(), session.new_cache()
        feed, feed_many = Feed(model, one, 2), Feed(model, many, 2)
        for turn, turn_mask, tokens in ((prompt, mask, steps), (second, None, more)):
            feed(turn, turn_mask)
            feed_many(turn, turn_mask)
            expected = feed.each(tokens)
            with many.stepwise():
                actual = torch.cat([feed_many(tokens[:, :6]), feed_many(tokens[:, 6:])], 1)
            assert_near(actual, expected)
            assert many.kept_positions() == one.kept_positions()


@pytest.mark.parametrize("budget", [Budget(tokens=40), Budget(ratio=0.75)], ids=["tokens", "ratio"])
def test_steps_from_the_first_token_on(policy_name, family, model, budget):
    policy = policy_for(family, policy_name)
    (ids,), tokens = talk(2, 56), 40 if budget.tokens else 42
    with attached(model, family, policy_name, budget) as session:
        if policy.evicts and policy.when == "prompt_end":
            cache = session.new_cache(known_len=56)
            with pytest.raises(ValueError, match=f"{policy_name} decides at a prompt's end"), cache.stepwise():
                Feed(model, cache, 2)(ids)
            return
        if policy.evicts and budget.ratio:
            with pytest.raises(BudgetError, match="known_len"), session.new_cache().stepwise() as cache:
                Feed(model, cache, 2)(ids)
        one, many = session.new_cache(known_len=56), session.new_cache(known_len=[56, 56])
        feed, feed_many = Feed(model, one, 2), Feed(model, many, 2)
        expected = []
        with one.stepwise():
            for count, token in enumerate(ids.split(1, 1), start=1):
                expected.append(feed(token))
                if policy.evicts and not policy.ragged:
                    split = policy.layer_budget(tokens, layers_of(model), count)
                    most = [min(count, b, w or b) for b, w in zip(split, windows_of(model), strict=True)]
                    assert all(int(one.kept_len[layer].max()) <= limit for layer, limit in enumerate(most))
        with many.stepwise():
            actual = torch.cat([feed_many(piece) for piece in ids.split([25, 1, 30], 1)], 1)
        assert_near(actual, torch.cat(expected, 1))
        assert many.kept_positions() == one.kept_positions()


def test_second_turn_through_plain_generate(policy_name, family, model):
    """`generate` given everything said so far and a used cache goes on where the cache stands."""
    first, second = talk(2, 80, 25)
    with attached(model, family, policy_name, Budget(tokens=40)) as session:
        cache, manual = session.new_cache(), session.new_cache()
        said = model.generate(first, attention_mask=torch.ones_like(first), cache=cache, max_new_tokens=4, **GREEDY)
        both = torch.cat([said, second], 1)
        said = model.generate(both, attention_mask=torch.ones_like(both), cache=cache, max_new_tokens=4, **GREEDY)
        feed = Feed(model, manual, 2)
        feed(first)
        feed.each(both[:, 80:83])
        tokens, _ = feed.greedy(feed(both[:, 83:])[:, -1], 4)
        assert said[:, both.shape[1] :].tolist() == tokens.tolist()
        assert cache.seen_len.tolist() == [both.shape[1] + 3] * 2
