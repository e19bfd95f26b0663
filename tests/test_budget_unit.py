"""Budgets and plans: what is refused and how, exact decimals, bytes against brute force, whole numbers that sum up."""

import math
import random
import re
import warnings
from dataclasses import dataclass
from fractions import Fraction

import jaxtyping
import numpy as np
import pytest

from kvlab.budget import Budget, BudgetError, LayerGeometry, apportion
from kvlab.cache.plan import Plan
from kvlab.policies import Policy, PolicyError, make_policy
from naive import largest_remainder

ADVICE = re.compile(r"use |give |raise |lower |goes with|needs |takes \d+ bytes")


@pytest.fixture(autouse=True)
def own_checks():
    """What users meet is the code's own checks; the checks of annotations in tests would come first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def refused(make, *words):
    """The call raises a BudgetError of one line that names the setting and says what to change."""
    with pytest.raises(BudgetError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message and message == message.strip()
    assert ADVICE.search(message), message
    for word in words:
        assert word in message
    assert isinstance(caught.value, ValueError)


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("ratio", [0, 0.0, -0.1, 1.0001, 2, math.nan, math.inf, -math.inf, True, False, "0.2", [0.2], 1j])
def test_ratio_that_cannot_be(ratio):
    refused(lambda: Budget(ratio=ratio), "budget.ratio", repr(ratio), "above 0 and at most 1")


@pytest.mark.parametrize("name", ["tokens", "bytes"])
@pytest.mark.parametrize("count", [0, -1, 1.0, 2.5, True, False, "8", math.nan, [8]])
def test_count_that_cannot_be(name, count):
    refused(lambda: Budget(**{name: count}), f"budget.{name}", repr(count), "at least 1")


@pytest.mark.parametrize("given", [("ratio", "tokens"), ("ratio", "bytes"), ("tokens", "bytes"), ("ratio", "tokens", "bytes")])
def test_two_budgets_at_once(given):
    refused(lambda: Budget(**dict.fromkeys(given, 1)), *given)


@pytest.mark.parametrize("of", ["Prompt", "", "all", None, 1])
def test_unknown_whole(of):
    refused(lambda: Budget(ratio=0.2, of=of), "budget.of", repr(of), "'prompt' or 'total'")


@pytest.mark.parametrize("given", [{}, {"tokens": 4}, {"bytes": 4}])
def test_of_total_goes_with_a_ratio(given):
    refused(lambda: Budget(**given, of="total"), "budget.of='total'", "budget.ratio")


def test_of_total_needs_the_new_tokens():
    refused(lambda: Budget(ratio=0.5, of="total").resolve([10], []), "max_new_tokens")


def test_bytes_below_one_token():
    layers = [LayerGeometry(2, 3, 5, None, 4, 2), LayerGeometry(1, 4, 4, 7, 2, 2)]
    one = 2 * (3 * 4 + 5 * 2) + 1 * (4 * 2 + 4 * 2)
    refused(lambda: Budget(bytes=one - 1).resolve([10], layers), f"budget.bytes={one - 1}", f"takes {one} bytes")
    assert Budget(bytes=one).resolve([10, 20], layers) == [1, 1]


def test_budgets_are_values():
    assert Budget(ratio=0.2) == Budget(ratio=0.2, of="prompt") != Budget(ratio=0.2, of="total")
    assert len({Budget(), Budget(), Budget(tokens=1), Budget(bytes=1)}) == 3
    with pytest.raises(AttributeError):
        Budget().tokens = 3


# --------------------------------------------------------------------------------------------------------------- resolve


def test_no_limit():
    assert Budget().resolve([3, 4], []) is None


def test_tokens_are_absolute():
    assert Budget(tokens=7).resolve([3, 400], [], new_tokens=9) == [7, 7]


def test_ratios_are_exact_decimals():
    assert Budget(ratio=0.29).resolve([100], []) == [29]  # 0.29 * 100 is 28.999999999999996
    for percent in range(1, 101):
        lengths = list(range(0, 1001, 7)) + [100, 1000, 123_456_700]
        expected = [max(1, percent * length // 100) for length in lengths]
        assert Budget(ratio=percent / 100).resolve(lengths, []) == expected, percent


def test_small_and_whole_ratios():
    assert Budget(ratio=1e-05).resolve([99_999, 100_000, 200_000, 5], []) == [1, 1, 2, 1]
    assert Budget(ratio=1).resolve([0, 1, 17], []) == [1, 1, 17]
    assert Budget(ratio=1.0).resolve([17], []) == [17]


def test_fractions_without_a_decimal():
    for parts in (3, 6, 7, 9, 11, 13):
        for share in range(1, parts):
            expected = [max(1, share * length // parts) for length in range(0, 500)]
            assert Budget(ratio=share / parts).resolve(range(0, 500), []) == expected, (share, parts)


def test_ratio_of_the_total():
    budget = Budget(ratio=0.5, of="total")
    assert budget.resolve([10, 11, 0], [], new_tokens=7) == [8, 9, 3]
    assert budget.resolve([10], [], new_tokens=0) == [5]
    assert Budget(ratio=0.5).resolve([10], [], new_tokens=1000) == [5]


def test_bytes_of_one_token():
    assert LayerGeometry(3, 8, 16, None, 4, 2).token_bytes == 3 * (8 * 4 + 16 * 2)
    assert LayerGeometry(1, 2, 3).token_bytes == 20


def brute_force(limit, layers):
    """Count up until the next token does not fit, or until no layer takes more: then nothing is limited."""
    tokens = 1
    while True:
        size = 0
        for layer in layers:
            held = tokens + 1 if layer.window is None else min(tokens + 1, layer.window)
            size += held * layer.num_kv_heads * (layer.key_dim * layer.key_itemsize + layer.value_dim * layer.value_itemsize)
        full = all(layer.window is not None and tokens >= layer.window for layer in layers)
        if size > limit or full:
            return None if full else [tokens]
        tokens += 1


@pytest.mark.parametrize("windows", ["none", "some", "all"])
def test_bytes_against_brute_force(windows):
    rng = random.Random(3)
    results = set()
    for _ in range(150):
        layers = []
        for index in range(rng.randint(1, 4)):
            sliding = windows == "all" or (windows == "some" and index % 2 == 0)
            window = rng.randint(1, 60) if sliding else None
            dims = rng.randint(1, 3), rng.randint(1, 6), rng.randint(1, 6)
            layers.append(LayerGeometry(*dims, window, rng.choice([2, 4]), rng.choice([1, 2, 4])))
        one = sum(layer.token_bytes for layer in layers)
        limit = rng.choice([one, 2 * one, rng.randint(one, 100 * one), rng.randint(one, 10 * one), 64 * one])
        tokens = Budget(bytes=limit).resolve([5], layers)
        assert tokens == brute_force(limit, layers), (layers, limit)
        results.update(tokens or [])
    assert len(results) > 15


# ------------------------------------------------------------------------------------------------------------ apportion


def test_apportion_is_the_largest_remainder():
    rng = random.Random(0)
    for _ in range(600):
        weights = [rng.choice([0, 1, 1, 2, 3, 7, rng.randint(1, 40)]) for _ in range(rng.randint(1, 9))]
        weights[rng.randrange(len(weights))] += 1
        total = rng.choice([0, 1, 5, 100, rng.randint(0, 5000)])
        exact = [Fraction(weight * total, sum(weights)) for weight in weights]
        split = apportion([float(share) for share in exact], total)
        assert split == largest_remainder(exact, total), (weights, total)
        assert sum(split) == total
        assert all(isinstance(count, int) for count in split)


def test_apportion_forgives_rounding_errors():
    assert apportion([2.0000000000001, 2.9999999999999, 1.0], 6) == [2, 3, 1]
    assert apportion([0.1 + 0.2, 0.7], 1) == [0, 1]
    thirds = [1 / 3, 1 - 1 / 3 - 1 / 3, 1 / 3]
    assert apportion(thirds, 1) == [1, 0, 0]  # a tie but for rounding goes to the lower index


def test_apportion_wants_shares_that_sum_up():
    for shares, total in (([1.0, 1.0], 5), ([3.0, 3.0], 5)):
        with pytest.raises(AssertionError, match="do not sum"):
            apportion(shares, total)


# ------------------------------------------------------------------------------------------------------------------ plan

LAYERS = (LayerGeometry(2, 4, 4), LayerGeometry(2, 4, 4, window=6), LayerGeometry(2, 4, 4))
ONE = sum(layer.token_bytes for layer in LAYERS)


def plan(policy, budget, **settings):
    return Plan(policy=make_policy(policy, **settings), budget=budget, layers=LAYERS, itemsize=4)


def test_a_fixed_budget_must_hold_what_is_protected():
    settings = {"num_sink": 4, "recent_window": 5}
    refused(
        lambda: plan("streaming_llm", Budget(tokens=8), **settings),
        "8 tokens", "streaming_llm", "num_sink=4", "recent_window=5", "raise the budget or lower",
    )  # fmt: skip
    plan("streaming_llm", Budget(tokens=9), **settings)
    refused(lambda: plan("h2o", Budget(tokens=2), num_sink=3), "num_sink=3")


def test_bytes_must_hold_what_is_protected():
    refused(lambda: plan("knorm", Budget(bytes=3 * ONE), num_sink=4), "3 tokens", "num_sink=4")
    plan("knorm", Budget(bytes=4 * ONE), num_sink=4)
    refused(lambda: plan("knorm", Budget(bytes=ONE - 1)), "budget.bytes")


def test_the_voting_window_is_protected_where_it_votes():
    refused(lambda: plan("snapkv", Budget(tokens=31)), "snapkv", "obs_window=32")
    plan("snapkv", Budget(tokens=32))
    refused(lambda: plan("snapkv", Budget(tokens=33), num_sink=2), "obs_window=32", "num_sink=2")
    refused(lambda: plan("snapkv", Budget(tokens=39), recent_window=40), "recent_window=40")
    plan("tova", Budget(tokens=1))


def test_a_policy_that_holds_all_has_no_budget():
    full = plan("full", Budget(tokens=1), num_sink=8)
    assert full.tokens(np.array([100, 200]), None) is None
    assert plan("h2o", Budget()).tokens(np.array([100]), None) is None


def test_tokens_of_layers_and_sequences():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan("h2o", Budget(ratio=0.25)).tokens(np.array([40, 80]), None).tolist() == [[10, 20]] * 3
        assert plan("h2o", Budget(ratio=0.25, of="total")).tokens(np.array([40]), 40).tolist() == [[20]] * 3
        assert plan("h2o", Budget(bytes=5 * ONE)).tokens(np.array([40, 1]), None).tolist() == [[5, 5]] * 3


@dataclass(frozen=True)
class Crooked(Policy):
    """Gives the layers what it likes."""

    extra: tuple = ()

    def layer_budget(self, budget, num_layers, length):
        return [budget + more for more in self.extra]


def test_layers_must_get_the_budget_in_all():
    def tokens(*extra):
        crooked = Plan(policy=Crooked(extra=extra), budget=Budget(tokens=9), layers=LAYERS, itemsize=4)
        return crooked.tokens(np.array([50]), None)

    assert tokens(3, -3, 0).tolist() == [[12], [6], [9]]
    for extra in ((1, 0, 0), (18, -9), (0, 0, 0, -9), (-1, 0, 0)):
        with pytest.raises(PolicyError, match=r"layer_budget gave .* 3 layers and sum to 27"):
            tokens(*extra)


def test_a_pyramid_for_every_sequence():
    pyramid = plan("pyramidkv", Budget(ratio=0.5), obs_window=4, beta=4)
    tokens = pyramid.tokens(np.array([40, 200, 9]), None)
    assert tokens.shape == (3, 3)
    assert tokens.sum(0).tolist() == [60, 300, 12]
    assert tokens[:, 0].tolist() == pyramid.policy.layer_budget(20, 3, 40)
    assert tokens[:, 1].tolist() == pyramid.policy.layer_budget(100, 3, 200)
    assert tokens[:, 1].tolist() == sorted(tokens[:, 1].tolist(), reverse=True) != [100] * 3
    assert tokens[:, 2].tolist() == [4, 4, 4]


def test_a_ratio_that_cuts_into_what_is_protected_warns():
    short = plan("streaming_llm", Budget(ratio=0.1), num_sink=4, recent_window=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        short.tokens(np.array([70, 200]), None)
    with pytest.warns(UserWarning, match=r"6 tokens.*streaming_llm.*num_sink=4, recent_window=3") as caught:
        assert short.tokens(np.array([200, 60]), None).tolist() == [[20, 6]] * 3
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
