"""Policies one by one: the registry, settings, and scores and budgets against plain Python."""

import dataclasses
import itertools
import math
import random
import typing
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import jaxtyping
import numpy as np
import pytest
import torch

from kvlab.policies import Policy, PolicyError, base, import_modules, make_policy, policy_class, policy_names, register
from kvlab.policies.snapkv import pool_by_position
from kvlab.selection import DEAD, EMPTY, NORMAL, RECENT, SINK, SPECIAL
from kvlab.shapes import Step
from naive import largest_remainder

SHIPPED = ["adakv", "full", "h2o", "knorm", "pyramidkv", "random", "snapkv", "streaming_llm", "tova"]
SNAPS = ["adakv", "pyramidkv", "snapkv"]


@pytest.fixture
def own_checks():
    """What users meet is the code's own checks; the checks of annotations in tests would come first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(base.POLICIES, "classes", dict(base.POLICIES.classes))


def refused(make, *words):
    """The call raises a PolicyError of one line that says these things."""
    with pytest.raises(PolicyError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


# --------------------------------------------------------------------------------------------------------------- registry


def test_what_ships():
    assert set(SHIPPED) <= set(policy_names())
    assert policy_names() == sorted(policy_names())
    for name in SHIPPED:
        assert policy_class(name).name == name == make_policy(name).name


@pytest.mark.parametrize("wrong, near", [("h20", "h2o"), ("H2O", None), ("snap_kv", "snapkv"), ("pyramid_kv", "pyramidkv")])
def test_unknown_policies(wrong, near):
    message = refused(lambda: make_policy(wrong), f"unknown policy {wrong!r}", "known: ", *SHIPPED)
    assert (f"did you mean {near}" in message) == (near is not None)
    refused(lambda: policy_class(wrong), f"unknown policy {wrong!r}")


def test_unknown_settings():
    refused(lambda: make_policy("snapkv", obs_windw=3), "'obs_windw'", "did you mean obs_window", "it has: ", "kernel")
    refused(lambda: make_policy("h2o", heavy=0.3), "h2o", "'heavy'", "heavy_share")
    message = refused(lambda: make_policy("tova", zzz=1), "it has: num_sink, recent_window, keep_special, rolling")
    assert "did you mean" not in message


@pytest.mark.parametrize("name", SHIPPED)
def test_declarations_are_no_settings(name):
    for declared in ("evicts", "when", "phase", "coupling", "needs", "state", "query_aware", "ragged"):
        refused(lambda declared=declared: make_policy(name, **{declared: True}), f"no setting {declared!r}")


def test_group_and_window_are_settings_where_they_matter_only():
    refused(lambda: make_policy("tova", group="max"), "no setting 'group'")
    refused(lambda: make_policy("h2o", obs_window=4), "no setting 'obs_window'")
    assert (make_policy("tova").group, make_policy("tova").obs_window) == ("mean", 1)
    assert make_policy("h2o", group="max").group == "max"


def test_register(registry):
    @register("mine")
    @dataclass(frozen=True)
    class Mine(Policy):
        strength: int = 3

    assert Mine.name == "mine" and "mine" in policy_names()
    assert make_policy("mine", strength=5) == Mine(strength=5)

    @register("mine")  # the same module again, as when a notebook cell runs twice
    @dataclass(frozen=True)
    class Again(Policy):
        pass

    assert policy_class("mine") is Again


def test_a_taken_name(registry):
    @dataclass(frozen=True)
    class Other(Policy):
        pass

    refused(lambda: register("h2o")(Other), "'h2o' is taken", "kvlab.policies.h2o", "another name")
    assert policy_class("h2o") is not Other


def test_what_is_no_frozen_dataclass(registry, own_checks):
    class Plain(Policy):
        pass

    class Thawed:
        pass

    refused(lambda: register("plain")(Plain), "'plain'", "@dataclass(frozen=True)")
    refused(lambda: register("thawed")(dataclass(Thawed)), "'thawed'", "@dataclass(frozen=True)")
    assert not {"plain", "thawed"} & set(policy_names())


def test_needs_and_state_that_cannot_be(registry):
    @dataclass(frozen=True)
    class Greedy(Policy):
        needs: ClassVar[frozenset[str]] = frozenset({"mass", "gradients"})

    @dataclass(frozen=True)
    class Thief(Policy):
        state: ClassVar[dict] = {"mass": base.TokenState(torch.float32)}

    refused(lambda: register("greedy")(Greedy), "'greedy'", "gradients", "attention, looks, mass, token_ids")
    refused(lambda: register("thief")(Thief), "'thief'", "mass", "choose another")
    assert not {"greedy", "thief"} & set(policy_names())


@pytest.mark.parametrize("ratios", [(0.9, 0.5), (1.0, 1.0, 0.2), (1.0, 1.0, 1.0), (0.99, 0.98, 0.97, 0.5), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize(("budget", "length"), [(50, 100), (30, 1000), (5, 40), (100, 100), (20, 21)])
def test_scissorhands_spreads_a_budget_by_persistence(ratios, budget, length):
    policy = make_policy("scissorhands", layers="persistence", persistence=ratios)
    found = policy.layer_budget(budget, len(ratios), length)
    assert sum(found) == budget * len(ratios)
    least, most = min(budget, 11), max(length, budget)
    assert all(least <= layer <= most for layer in found)
    spread = [1 - ratio for ratio in ratios]
    if len(set(spread)) == 1:
        assert set(found) == {budget}
        return
    free = [layer for layer, share in enumerate(found) if least < share < most]  # beyond what all have, as their weights are
    for one, other in itertools.combinations(free, 2):
        expected = spread[one] * (found[other] - least)
        assert abs(spread[other] * (found[one] - least) - expected) <= 1  # rounding


def test_scissorhands_refuses_ratios_that_do_nothing_or_do_not_fit():
    refused(lambda: make_policy("scissorhands", persistence=(0.9,)), "layers=persistence")
    refused(lambda: make_policy("scissorhands", layers="persistence"), "kvlab analyze persistence")
    refused(lambda: make_policy("scissorhands", layers="persistence", persistence=(1.5,)), "between 0 and 1")
    policy = make_policy("scissorhands", layers="persistence", persistence=(0.9,))
    refused(lambda: policy.layer_budget(20, 2, 100), "1 ratios", "2 layers")


def test_scissorhands_never_drops_what_it_protects():
    policy = make_policy("scissorhands")
    assert policy.target(np.array([[12, 40, 100]])).tolist() == [[10, 21, 51]]
    assert make_policy("scissorhands", num_sink=4, recent_window=4).target(np.array([[8]])).tolist() == [[8]]


def test_a_policy_without_score(registry):
    @register("scoreless")
    @dataclass(frozen=True)
    class Scoreless(Policy):
        pass

    with pytest.raises(NotImplementedError, match="scoreless has no score"):
        make_policy("scoreless").score(make_step([[[0]]]))


SOURCE = """
from dataclasses import dataclass
from kvlab.policies import Policy, register

@register("{name}")
@dataclass(frozen=True)
class New(Policy):
    pass
"""


def test_import_modules(registry, tmp_path, monkeypatch):
    (tmp_path / "policies_of_a_user.py").write_text(SOURCE.format(name="users"))
    monkeypatch.syspath_prepend(tmp_path)
    import_modules(["policies_of_a_user"])
    assert "users" in policy_names()
    refused(lambda: import_modules(["policies_of_nobody"]), "--import policies_of_nobody", "PYTHONPATH")


def test_plug_ins(registry, tmp_path, monkeypatch):
    (tmp_path / "policies_of_a_plug_in.py").write_text(SOURCE.format(name="plugged"))
    (tmp_path / "plugged-1.0.dist-info").mkdir()
    (tmp_path / "plugged-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (tmp_path / "plugged-1.0.dist-info" / "entry_points.txt").write_text("[kvlab.policies]\nany = policies_of_a_plug_in\n")
    assert "plugged" not in policy_names()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(base.POLICIES, "plugins_loaded", False)
    assert "plugged" in policy_names()


# --------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("name", SHIPPED)
def test_policies_are_values(name):
    one, same, other = make_policy(name), make_policy(name), make_policy(name, num_sink=7)
    assert one == same and hash(one) == hash(same) and one is not same
    assert one != other and len({one, same, other}) == 2
    for field in dataclasses.fields(one):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, field.name, getattr(one, field.name))


WRONG = {
    int: ([True, False, -1, 1.0, "3", None, [1]], "whole number of at least 0"),
    float: ([True, "0.5", None, 1j, [0.5]], "use a number"),
    bool: ([0, 1, "true", None], "true or false"),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_wrong_values(name, own_checks):
    kinds = set()
    for field in dataclasses.fields(policy_class(name)):
        kind = typing.get_type_hints(policy_class(name))[field.name]
        values, advice = WRONG.get(kind, (["median", None, 3, True, ["max"]], "use one of "))
        kinds.add(advice)
        for value in values:
            refused(lambda f=field.name, v=value: make_policy(name, **{f: v}), f"policy.{field.name}={value!r}", advice)
    assert len(kinds) == {"h2o": 4, "snapkv": 3, "pyramidkv": 3, "adakv": 4}.get(name, 2)


@dataclass(frozen=True)
class Settings(Policy):
    """One setting of each kind."""

    count: int = 1
    share: float = 0.5
    flag: bool = False
    how: Literal["one", "two"] = "one"
    free: object = None
    held: ClassVar[int] = -5
    derived: int = dataclasses.field(init=False, default=-1)


def test_right_values():
    policy = Settings(count=0, share=2, flag=True, how="two", free=[1], num_sink=10**9)
    assert (policy.count, policy.share, policy.flag, policy.how) == (0, 2, True, "two")
    assert Settings(share=-1e9).share == -1e9
    with pytest.raises(PolicyError, match="one, two"):
        Settings(how="three")
    with pytest.raises(PolicyError, match="policy.count=-1"):
        Settings(count=-1)


@pytest.mark.parametrize(
    "name, setting, values",
    [
        ("h2o", "heavy_share", [-0.01, 1.01, math.nan, math.inf]),
        ("adakv", "alpha", [-0.01, 1.01, math.nan, math.inf]),
        ("snapkv", "kernel", [0, 2, 8]),
        ("adakv", "kernel", [0, 2, 8]),
        ("snapkv", "obs_window", [0]),
        ("pyramidkv", "obs_window", [0]),
        ("pyramidkv", "beta", [0]),
    ],
)
def test_values_out_of_range(name, setting, values):
    for value in values:
        refused(lambda value=value: make_policy(name, **{setting: value}), f"policy.{setting}={value!r}")


def test_ends_of_ranges():
    for share in (0.0, 1.0):
        assert make_policy("h2o", heavy_share=share).heavy_share == share
        assert make_policy("adakv", alpha=share).alpha == share
    assert make_policy("snapkv", kernel=1, obs_window=1).kernel == 1
    assert make_policy("pyramidkv", beta=1).beta == 1


def test_defaults_of_the_papers():
    assert make_policy("streaming_llm").num_sink == 4
    assert make_policy("h2o").heavy_share == 0.5
    for name in SNAPS:
        policy = make_policy(name)
        assert (policy.obs_window, policy.kernel, policy.pool, policy.after_prompt) == (32, 7, "max", "rank")
    assert make_policy("pyramidkv").beta == 20 and make_policy("adakv").alpha == 0.2


def test_what_holds_the_budget_after_the_prompt():
    for name in SHIPPED:
        assert make_policy(name).holds_budget_after_prompt
    for name in SNAPS:
        assert not make_policy(name, after_prompt="grow").holds_budget_after_prompt


# ------------------------------------------------------------------------------------------------------------------ steps


def make_step(positions, *, now=None, budget=4, recent=0, keys=None, sample_ids=None, layer_idx=0, **given):
    """A decision with these positions, (batch, kv_heads, slots); the rest is filled in."""
    positions = torch.as_tensor(positions)
    batch, heads, slots = positions.shape
    now = positions.amax((1, 2)) if now is None else torch.as_tensor(now)
    nothing = torch.zeros(batch, heads, slots, 2)

    def per_head(value):
        return torch.as_tensor(value).expand(batch, heads)

    return Step(
        layer_idx=layer_idx,
        num_layers=4,
        prompt_end=True,
        positions=positions,
        now=now,
        budget=per_head(budget),
        recent=per_head(recent),
        queries=torch.zeros(batch, heads, 1, 1, 2),
        query_positions=now[:, None],
        keys=nothing if keys is None else keys,
        values=nothing,
        sample_ids=None if sample_ids is None else torch.as_tensor(sample_ids),
        **given,
    )


def draw_positions(rng, shape, longest):
    """Distinct positions in any order for each row, some slots empty."""
    rows = np.full(shape, -1)
    for row in np.ndindex(*shape[:2]):
        count = rng.randint(0, shape[2])
        rows[row][rng.sample(range(shape[2]), count)] = rng.sample(range(longest), count)
    return torch.from_numpy(rows)


# ----------------------------------------------------------------------------------------------------------------- random


def plain_mix(x):
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def plain_draw(seed, *parts):
    """The draw for (sample,) layer, head, position, in whole numbers of any size."""
    state = plain_mix(seed % 2**32)
    for part in parts:
        state = plain_mix(state ^ plain_mix((part + 0x9E3779B9) % 2**32))
    return (state >> 8) / 2**24


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32 - 1, 2**32 + 5])
def test_random_scores_are_the_hash(seed, dtype):
    rng = random.Random(seed)
    far = [0, 1, 2, 65535, 65536, 10**6, 2**31 - 1]
    for layer_idx, sample_ids in ((0, None), (3, [7]), (79, [0]), (1, [2**32 - 1])):
        rows = [far + [rng.randrange(2**31) for _ in range(25)] for _ in range(3)]
        step = make_step(torch.tensor([rows], dtype=dtype), layer_idx=layer_idx, sample_ids=sample_ids)
        scores = make_policy("random", seed=seed).score(step)
        sample = sample_ids or []
        expected = [[[plain_draw(seed, *sample, layer_idx, head, p) for p in row] for head, row in enumerate(rows)]]
        assert scores.dtype == torch.float32
        assert scores.tolist() == expected


def test_random_scores_depend_on_nothing_else():
    policy = make_policy("random", seed=3)
    alone = [policy.score(make_step([[[5, 9, 2]] * 2], sample_ids=[sample])) for sample in (4, 8)]
    together = policy.score(make_step([[[5, 9, 2]] * 2, [[2, -1, 5]] * 2], sample_ids=[4, 8]))
    assert torch.equal(together[0], alone[0][0])
    assert torch.equal(together[1][:, [2, 0]], alone[1][0][:, [0, 2]])
    assert torch.equal(policy.score(make_step([[[5, 9, 2]] * 2], sample_ids=[4], now=[900], budget=2, recent=1)), alone[0])


def scores_of(positions, **given):
    return make_policy("random", seed=given.pop("seed", 0)).score(make_step(positions, **given)).double().flatten()


def streams():
    """Draws along each thing that they depend on."""
    one = torch.zeros(1, 1, 1, dtype=torch.long)
    yield "positions", scores_of(torch.arange(16384)[None, None])
    yield "heads", scores_of(torch.zeros(1, 16384, 1, dtype=torch.long))
    yield "samples", scores_of(torch.zeros(16384, 1, 1, dtype=torch.long), sample_ids=torch.arange(16384))
    yield "layers", torch.cat([scores_of(one, layer_idx=layer) for layer in range(0, 8192, 8)])
    yield "seeds", torch.cat([scores_of(one, seed=seed) for seed in range(1024)])
    yield "rows", scores_of(torch.arange(64)[None, None].expand(1, 256, -1))


def chi_square(draws, bins):
    counts = torch.histc(draws, bins=bins, min=0, max=1)
    expected = len(draws) / bins
    return float(((counts - expected) ** 2 / expected).sum())


def test_random_scores_are_uniform():
    for name, draws in streams():
        assert float(draws.min()) >= 0 and float(draws.max()) < 1, name
        assert torch.equal(draws * 2**24, (draws * 2**24).round()), name
        # 63 degrees of freedom: outside this range once in 100 000 times, below as well as above
        assert 24 < chi_square(draws, 64) < 120, name
        if len(draws) > 10_000:
            neighbours = (draws[:-1] * 16).floor() * 16 + (draws[1:] * 16).floor()
            assert 165 < chi_square((neighbours + 0.5) / 256, 256) < 365, name


# ------------------------------------------------------------------------------------------------------------------ scores


def naive_pool(scores, positions, where, kernel, pool):
    """One row: walk the chosen slots by position, look kernel // 2 to either side."""
    line = sorted((s for s in range(len(scores)) if where[s]), key=lambda s: positions[s])
    result = [0.0] * len(scores)
    for place, slot in enumerate(line):
        near = [scores[s] for s in line[max(0, place - kernel // 2) : place + kernel // 2 + 1]]
        result[slot] = max(near) if pool == "max" else math.fsum(near) / kernel
    return result


@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pooling_by_position(pool, dtype):
    rng = random.Random(1)
    for _ in range(60):
        shape = rng.randint(1, 2), rng.randint(1, 3), rng.randint(1, 12)
        positions = draw_positions(rng, shape, longest=1000).to(dtype)
        scores = torch.tensor([rng.choice([-2.0, 0.0, 0.5, rng.gauss(0, 1)]) for _ in range(math.prod(shape))]).view(shape)
        where = (positions >= 0) & (torch.tensor([rng.random() < 0.8 for _ in range(math.prod(shape))]).view(shape))
        for kernel in (1, 3, 5, 7, 31):
            pooled = pool_by_position(scores, positions, where, kernel, pool)
            for b, h in np.ndindex(*shape[:2]):
                row = [tensor[b, h].tolist() for tensor in (scores, positions, where)]
                np.testing.assert_allclose(pooled[b, h].numpy(), naive_pool(*row, kernel, pool), rtol=0, atol=1e-6)


def test_votes():
    """Merged over the group for each query, summed over queries, the window left out, pooled."""
    rng = random.Random(2)
    merge = {"mean": np.mean, "max": np.max, "sum": np.sum, "first": lambda heads: heads[0]}
    generator = torch.Generator().manual_seed(0)
    for how, function in merge.items():
        for name in SNAPS:
            positions = draw_positions(rng, (2, 2, 10), longest=20)
            attention = torch.rand(2, 2, 3, 4, 10, generator=generator)
            policy = make_policy(name, obs_window=4, kernel=3, group=how)
            recent = torch.tensor([[4, 6], [4, 4]])
            step = make_step(positions, now=[19, 15], recent=recent, attention=attention)
            scores = policy.score(step)
            for b, h in np.ndindex(2, 2):
                votes = [sum(function(attention[b, h, :, q, s].numpy()) for q in range(4)) for s in range(10)]
                limit = int(step.now[b] - recent[b, h])
                where = [0 <= position <= limit for position in positions[b, h].tolist()]
                expected = naive_pool(votes, positions[b, h].tolist(), where, 3, "max")
                np.testing.assert_allclose(scores[b, h].numpy(), expected, rtol=0, atol=1e-5)


def test_simple_scores():
    positions = torch.tensor([[[4, 0, -1, 7], [1, 2, 3, 0]]])
    keys = torch.randn(1, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    mass = torch.rand(1, 2, 4, generator=torch.Generator().manual_seed(1))
    attention = torch.rand(1, 2, 3, 2, 4, generator=torch.Generator().manual_seed(2))
    step = make_step(positions, keys=keys, mass=mass, attention=attention)
    for name in ("full", "streaming_llm"):
        assert torch.equal(make_policy(name).score(step), positions.float())
    assert torch.equal(make_policy("h2o").score(step), mass)
    norms = [[-math.sqrt(sum(x * x for x in token)) for token in head] for head in keys[0].tolist()]
    np.testing.assert_allclose(make_policy("knorm").score(step)[0].numpy(), norms, rtol=2**-14)
    last = attention[0, :, :, -1].double().mean(1)  # the cache averages over KV heads: coupling="layer"
    np.testing.assert_allclose(make_policy("tova").score(step)[0].numpy(), last.numpy(), rtol=1e-6)


def test_norms_of_bfloat16_keys_are_float32():
    keys = torch.ones(1, 1, 2, 256, dtype=torch.bfloat16)
    keys[0, 0, 1] += 2**-7  # norms 16 and 16.125, the same in bfloat16 but for luck
    scores = make_policy("knorm").score(make_step([[[0, 1]]], keys=keys))
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(scores[0, 0].numpy(), [-16, -16.125], rtol=1e-6)


# ----------------------------------------------------------------------------------------------------------------- budgets


def test_recent_tokens():
    budgets = torch.arange(1, 301).view(1, -1)
    for percent in (0, 1, 10, 29, 50, 58, 70, 99, 100):
        recent = make_policy("h2o", heavy_share=percent / 100).recent(budgets)[0].tolist()
        assert recent == [budget - percent * budget // 100 for budget in range(1, 301)]
    assert make_policy("h2o", heavy_share=1.0, recent_window=5).recent(torch.tensor([[3, 40]])).tolist() == [[5, 5]]
    for name in ("full", "knorm", "random", "streaming_llm", "tova"):
        assert make_policy(name, recent_window=3).recent(torch.tensor([[9, 8]])).tolist() == [[3, 3]]
    for name in SNAPS:
        assert make_policy(name, recent_window=3, obs_window=6).recent(torch.tensor([[9, 8]])).tolist() == [[6, 6]]
        assert make_policy(name, recent_window=8, obs_window=6).recent(torch.tensor([[9, 8]])).tolist() == [[8, 8]]


def test_only_the_pyramid_tells_layers_apart():
    for name in set(SHIPPED) - {"pyramidkv"}:
        assert make_policy(name).layer_budget(100, 3, 1000) == [100, 100, 100]


@pytest.mark.parametrize("obs_window", [1, 8, 32])
def test_pyramid(obs_window):
    rng = random.Random(obs_window)
    kinds = set()
    for _ in range(500):
        beta, layers = rng.choice([1, 2, 3, 7, 20, 100]), rng.randint(1, 80)
        budget = rng.choice([rng.randint(1, 64), rng.randint(1, 5000)])
        length = rng.choice([budget, budget + 1, rng.randint(1, 2 * budget), rng.randint(1, 100_000)])
        split = make_policy("pyramidkv", beta=beta, obs_window=obs_window).layer_budget(budget, layers, length)
        assert len(split) == layers and sum(split) == layers * budget
        assert split == sorted(split, reverse=True)
        if budget <= obs_window or length <= budget or layers == 1:
            kinds.add("flat")
            assert split == [budget] * layers
            continue
        assert obs_window <= split[-1] and split[0] <= length  # within what the prompt has
        base_budget = budget - obs_window
        high = 2 * base_budget - Fraction(base_budget, beta)
        kinds.add("capped" if high >= length - obs_window else "steep")
        high = min(high, Fraction(length - obs_window))
        step = 2 * (high - base_budget) / (layers - 1)
        shares = [obs_window + high - layer * step for layer in range(layers)]
        assert split == largest_remainder(shares, layers * budget)
        if high < length - obs_window:
            assert abs(split[-1] - obs_window - base_budget / beta) < 1
    assert kinds == {"flat", "capped", "steep"}


# One row of an Ada-KV decision: tiers, scores and positions of every head's slots.


def draw_row(rng, heads, slots, protected, scores):
    """Heads with these numbers of protected tokens; some slots dead or empty."""
    positions, tiers = np.full((heads, slots), -1), np.full((heads, slots), EMPTY)
    for head in range(heads):
        positions[head] = rng.sample(range(slots), slots)
        for slot in range(slots):
            kind = rng.random()
            tiers[head, slot] = EMPTY if kind < 0.1 else DEAD if kind < 0.15 else NORMAL
        chosen = rng.sample(range(slots), protected[head])
        for slot in chosen:
            tiers[head, slot] = rng.choice([RECENT, SPECIAL, SINK])
        positions[head][tiers[head] == EMPTY] = -1
    return positions, tiers, [[rng.choice(scores) for _ in range(slots)] for _ in range(heads)]


def naive_head_budget(positions, tiers, scores, budget, alpha):
    """Shares of what is left beyond the protected tokens, by who owns the layer's best tokens."""
    heads = range(len(positions))
    protected = [sum(tier >= RECENT for tier in tiers[h]) for h in heads]
    bases = [budget - count for count in protected]
    held = [sum(position >= 0 for position in positions[h]) for h in heads]
    if min(bases) <= 0 or max(held) <= budget:
        return [budget for _ in heads]
    pool = [(-scores[h][s], -positions[h][s], h) for h in heads for s in range(len(positions[h])) if tiers[h][s] == NORMAL]
    extra = bases
    if len(pool) >= sum(bases):
        winners = [h for _, _, h in sorted(pool)[: sum(bases)]]
        alpha = Fraction(str(alpha))
        extra = largest_remainder([(1 - alpha) * winners.count(h) + alpha * bases[h] for h in heads], sum(bases))
    budgets = [protected[h] + extra[h] for h in heads]
    for giver in heads:  # what a head can't fill goes to the first that can
        for taker in heads:
            while budgets[giver] > held[giver] and budgets[taker] < held[taker]:
                budgets[giver] -= 1
                budgets[taker] += 1
    return budgets


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.29, 0.5, 1.0])
def test_head_budgets(alpha):
    rng = random.Random(5)
    split = 0
    for _ in range(150):
        batch, heads, slots = rng.randint(1, 2), rng.randint(1, 5), rng.randint(4, 16)
        budget, protected = rng.randint(1, slots + 1), rng.randint(0, 3)
        scores = rng.choice([[0.0, 1.0, 2.0], [rng.random() for _ in range(30)]])
        rows = [draw_row(rng, heads, slots, [protected] * heads, scores) for _ in range(batch)]
        positions, tiers, scored = (torch.tensor(np.array([row[part] for row in rows])) for part in range(3))
        step = make_step(positions, now=[slots - 1] * batch, budget=budget, recent=0)
        got = make_policy("adakv", alpha=alpha).head_budget(step, scored.float(), tiers.to(torch.int8))
        assert not got.is_floating_point() and got.shape == (batch, heads)
        for b in range(batch):
            row = got[b].tolist()
            scores32 = scored[b].float().tolist()
            assert row == naive_head_budget(positions[b].tolist(), tiers[b].tolist(), scores32, budget, alpha)
            assert sum(row) == heads * budget
            if budget > protected:
                even = protected + math.floor(Fraction(str(alpha)) * (budget - protected))
                held = (positions[b] >= 0).sum(-1).tolist()
                assert all(share >= min(even, has) for share, has in zip(row, held, strict=True))
                assert max(row) <= protected + heads * (budget - protected)
            split += len(set(row)) > 1
    assert (split > 20) == (alpha < 1)
    assert step.budget.tolist() == [[budget] * heads] * batch  # the step is left alone


def test_head_budgets_sum_up_where_heads_protect_different_numbers():
    """Special tokens that came while decoding: a head of small budget could not keep them all, another could."""
    rng = random.Random(6)
    for _ in range(40):
        heads, slots, budget = rng.randint(2, 4), 16, rng.randint(5, 10)
        protected = [rng.randint(0, 4) for _ in range(heads)]
        positions, tiers, scores = draw_row(rng, heads, slots, protected, [rng.random() for _ in range(30)])
        step = make_step([positions.tolist()], now=[slots - 1], budget=budget)
        scored, tier = torch.tensor([scores]), torch.tensor(np.array([tiers])).to(torch.int8)
        got = make_policy("adakv").head_budget(step, scored, tier)[0].tolist()
        assert sum(got) == int(step.budget.sum()), (protected, budget, got)
        assert all(count >= least for count, least in zip(got, protected, strict=True))
