"""Padding: a padded row of a batch gives what its prompt gives alone. Pads take no slot, get no score, are never a sink."""

import pytest
import torch

from conftest import random_ids
from contracts.helpers import (
    GREEDY,
    PAD,
    Feed,
    assert_near,
    assert_true_positions,
    attached,
    padded,
    policy_for,
    positions_of,
    rows_of,
    talk,
    windows_of,
)
from kvlab import Budget

THINNED = 4
LENGTHS = (120, 113, 108)
STEPS = 5
BUDGETS = pytest.mark.parametrize("budget", [Budget(ratio=0.3), Budget(tokens=40)], ids=["ratio", "tokens"])


def alone(session, row):
    """One prompt by itself: greedy tokens, logits, cache."""
    cache = session.new_cache()
    feed = Feed(session.model, cache)
    tokens, logits = feed.greedy(feed(row)[:, -1], STEPS)
    return tokens[0], logits[0], cache


def assert_rows_equal(cache, tokens, logits, singles):
    for row, (single_tokens, single_logits, single) in enumerate(singles):
        assert tokens[row].tolist() == single_tokens[: len(tokens[row])].tolist()
        assert_near(logits[row], single_logits[: len(logits[row])], 1e-4)
        assert torch.equal(cache.kept_len[:, row], single.kept_len[:, 0])
        assert positions_of(cache, row) == positions_of(single, 0)
        assert cache.seen_len[row] == single.seen_len[0]


@pytest.mark.filterwarnings("ignore:a budget of")
@BUDGETS
def test_padded_rows_equal_their_prompts_alone(policy_name, family, model, budget):
    rows = rows_of(*LENGTHS)
    with attached(model, family, policy_name, budget) as session:
        singles = [alone(session, row) for row in rows]
        for side in ("left", "right"):
            ids, mask = padded(rows, side)
            cache = session.new_cache()
            feed = Feed(model, cache, len(rows))
            prompt = feed(ids, mask)
            last = torch.stack([logits[real.bool()][-1] for logits, real in zip(prompt, mask, strict=True)])
            tokens, logits = feed.greedy(last, STEPS)
            assert_rows_equal(cache, tokens, logits, singles)
            assert_true_positions(cache, [length + STEPS for length in LENGTHS])


@pytest.mark.filterwarnings("ignore:a budget of")
@BUDGETS
def test_plain_generate_on_a_left_padded_batch(policy_name, family, model, budget):
    rows = rows_of(*LENGTHS)
    ids, mask = padded(rows, "left")
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": STEPS}
    with attached(model, family, policy_name, budget) as session:
        cache = session.new_cache()
        batch = model.generate(ids, attention_mask=mask, cache=cache, **options)
        for row, prompt in enumerate(rows):
            single = session.new_cache()
            expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), cache=single, **options)
            assert batch.sequences[row, ids.shape[1] :].tolist() == expected.sequences[0, prompt.shape[1] :].tolist()
            assert_near(torch.stack(batch.logits)[:, row], torch.stack(expected.logits)[:, 0], 1e-4)
            assert torch.equal(cache.kept_len[:, row], single.kept_len[:, 0])
            assert positions_of(cache, row) == positions_of(single, 0)


def test_what_stands_in_a_pad_changes_nothing(policy_name, family, model):
    ids, mask = padded(rows_of(90, 60), "left")
    with attached(model, family, policy_name, Budget(tokens=40)) as session:
        kept, logits = [], []
        for pad in (PAD, 77):
            cache = session.new_cache()
            feed = Feed(model, cache, 2)
            feed(ids.masked_fill(mask == 0, pad), mask)
            logits.append(feed(random_ids(2, 1, seed=1)))
            kept.append(cache.kept_positions())
    assert kept[0] == kept[1]
    assert torch.equal(*logits)


def test_pads_are_never_sinks(policy_name, family, model):
    policy = policy_for(family, policy_name, num_sink=4)
    ids, mask = padded(rows_of(90, 60), "left")
    with attached(model, family, policy_name, Budget(tokens=40), num_sink=4) as session:
        cache = session.new_cache()
        feed = Feed(model, cache, 2)
        feed(ids, mask)
        feed.each(random_ids(2, 3, seed=1))
        for layer, window in zip(cache.kept_positions(), windows_of(model), strict=True):
            if window is None:
                assert all(head[: policy.num_sink] == [0, 1, 2, 3] for row in layer for head in row)


def test_a_turn_with_pads_amid_the_conversation(policy_name, family, model):
    """Second prompts of different lengths, padded on either side, and steps in which one row has nothing to say."""
    talks = [talk(1, 100, 1, 21, 1), talk(1, 97, 1, 34, 1, seed=1)]
    first, steps, second, last_steps = zip(*talks, strict=True)
    quiet = torch.tensor([[1], [0]])
    with attached(model, family, policy_name, Budget(tokens=40)) as session:
        singles = []
        for row in range(2):
            cache = session.new_cache()
            feed = Feed(model, cache)
            feed(first[row])
            if quiet[row]:
                feed(steps[row])
            logits = feed(second[row])[0]
            singles.append((logits, feed(last_steps[row])[0, -1], cache))
        for side in ("left", "right"):
            cache = session.new_cache()
            feed = Feed(model, cache, 2)
            feed(*padded(first, side))
            feed(torch.cat(steps), quiet)
            ids, mask = padded(second, side)
            logits = feed(ids, mask)
            last = feed(torch.cat(last_steps))
            for row, (expected, expected_last, single) in enumerate(singles):
                assert_near(logits[row][mask[row].bool()], expected, 1e-4)
                assert_near(last[row, -1], expected_last, 1e-4)
                assert positions_of(cache, row) == positions_of(single, 0)
