"""Determinism: the same seed gives the same; neither batch nor order nor the process's random state matters."""

from dataclasses import fields

import pytest
import torch

from conftest import random_ids
from contracts.helpers import Feed, assert_near, attached, padded, positions_of, talk
from kvlab import Budget, make_policy

THINNED = 4
SMALL = Budget(tokens=40)


def run(session, ids, answer, mask=None, sample_ids=None):
    cache = session.new_cache(sample_ids=sample_ids)
    feed = Feed(session.model, cache, len(ids))
    return torch.cat([feed(ids, mask)[:, -1:], feed.each(answer)], 1), cache


def test_the_same_again(policy_name, family, model):
    ids, answer = talk(2, 90, 4)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.random.get_rng_state()
        with attached(model, family, policy_name, SMALL) as session:
            logits, cache = run(session, ids, answer)
        assert torch.equal(torch.random.get_rng_state(), state), "the process's random state was used"
        results.append((logits, cache.kept_positions()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(
    "sample_ids",
    [
        pytest.param(None, id="none"),
        pytest.param(["a", "b", "c"], id="names", marks=pytest.mark.slow),
        pytest.param([5, 2**40, 7], id="numbers"),
    ],
)
def test_batch_and_order_change_nothing(policy_name, family, model, sample_ids):
    rows, answers = zip(*[talk(1, count, 3, seed=count) for count in (90, 81, 77)], strict=True)

    def batch(session, order):
        ids, mask = padded([rows[row] for row in order], "left")
        chosen = None if sample_ids is None else [sample_ids[row] for row in order]
        return run(session, ids, torch.cat([answers[row] for row in order]), mask, chosen)

    with attached(model, family, policy_name, SMALL) as session:
        alone = [batch(session, [row]) for row in range(3)]
        for order in ([0, 1, 2], [2, 0, 1], [1, 1, 0]):
            logits, cache = batch(session, order)
            for place, row in enumerate(order):
                assert_near(logits[place], alone[row][0][0], 1e-4)
                assert positions_of(cache, place) == positions_of(alone[row][1], 0)


def seeded(request):
    names = request.config.policies_under_test
    found = [name for name in names if "seed" in {field.name for field in fields(make_policy(name))}]
    if not found:
        pytest.skip("none of these policies has a seed")
    return found


def test_seeds_differ(family, model, request):
    ids, answer = random_ids(1, 90), random_ids(1, 3, seed=1)
    for name in seeded(request):
        kept = []
        for seed in (0, 1, 1):
            with attached(model, family, name, Budget(tokens=20), seed=seed) as session:
                kept.append(run(session, ids, answer)[1].kept_positions())
        assert kept[0] != kept[1]
        assert kept[1] == kept[2]


def test_samples_draw_for_themselves(family, model, request):
    """The same prompt twice in a batch: alike under one id or none, not under two; forks and beams keep their sample's."""
    ids, answer = random_ids(1, 90).repeat(2, 1), random_ids(1, 3, seed=1).repeat(2, 1)
    for name in seeded(request):
        if not make_policy(name).once:  # what is drawn belongs to a layer, not to a sample
            continue
        with attached(model, family, name, Budget(tokens=20)) as session:
            for sample_ids, alike in ((None, True), (["a", "a"], True), (["a", "b"], False), ([0, 1], False)):
                _, cache = run(session, ids, answer, sample_ids=sample_ids)
                assert (positions_of(cache, 0) == positions_of(cache, 1)) == alike
            _, expected = run(session, ids[:1], answer[:1], sample_ids=["b"])
            feed = Feed(model, session.new_cache(sample_ids=["a", "b"]), 2)
            feed(ids)
            feed.cache.reorder_cache(torch.tensor([1, 1, 0]))
            feed.mask = feed.mask[[1, 1, 0]]
            feed.cache = feed.cache.fork()
            feed.each(answer[:1].repeat(3, 1))
            assert positions_of(feed.cache, 0) == positions_of(feed.cache, 1) == positions_of(expected, 0)
            assert positions_of(feed.cache, 2) != positions_of(expected, 0)


def test_expanded_prompts_share_their_samples_id(family, model, request):
    ids = random_ids(2, 60)
    for name in seeded(request):
        with attached(model, family, name, Budget(tokens=20)) as session:
            cache = session.new_cache(sample_ids=["a", "b"])
            Feed(model, cache, 4)(ids.repeat_interleave(2, 0))
            assert positions_of(cache, 0) == positions_of(cache, 1)
            with pytest.raises(ValueError, match="2 sample_ids were given for a batch of 3"):
                Feed(model, session.new_cache(sample_ids=["a", "b"]), 3)(random_ids(3, 60))
