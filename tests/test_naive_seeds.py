"""The slow references of scissorhands, hashevict, hyde, fastgen and corm, against numbers worked out by hand."""

import math

import numpy as np
import pytest

import naive
import naive_seeds
from naive import Segment


def replay(q, k, segments, policy, settings=None, budget=None, **rest):
    """One replay with scaling 1; `segments` as in "p4 s2", all with one budget. Values are unit vectors: out = the weights."""
    q, k = np.asarray(q, dtype=float), np.asarray(k, dtype=float)
    kinds = {"p": "prompt", "s": "step"}
    if isinstance(segments, str):
        segments = [Segment(kinds[part[0]], int(part[1:]), budget) for part in segments.split()]
    length = q.shape[1]
    v = np.broadcast_to(np.eye(length), (k.shape[0], length, length))
    return naive.replay(q, k, v, segments, policy, settings, scaling=1.0, **rest)


def attending(*tables):
    """q (H, T, H * T), k (1, T, H * T): query t of head h attends to key i in proportion to tables[h][t][i]."""
    heads, length = len(tables), len(tables[0])
    q, k = np.zeros((heads, length, heads * length)), np.full((1, length, heads * length), -60.0)
    for h, table in enumerate(tables):
        for t, row in enumerate(table):
            q[h, t, h * length + t] = 1
            for i, share in enumerate(row):
                k[0, i, h * length + t] = math.log(share) if share else -60.0
    return q, k


def last(result):
    """What the first KV head holds in the end."""
    return result.kept[-1][0]


def indifferent(length, keys=None):
    """Queries of zeros, so that attention is even, and keys of one dimension."""
    keys = np.ones(length) if keys is None else np.asarray(keys)
    return np.zeros((1, length, 1)), keys.reshape(1, length, 1)


def test_inputs_attend_as_written():
    q, k = attending([[1], [0.25, 0.75], [0.5, 0.1, 0.4]], [[1], [0.5, 0.5], [0, 0, 1]])
    out = replay(q, k, "p3", "full").out
    assert np.allclose(out[0], [[1, 0, 0], [0.25, 0.75, 0], [0.5, 0.1, 0.4]])
    assert np.allclose(out[1], [[1, 0, 0], [0.5, 0.5, 0], [0, 0, 1]])


@pytest.mark.parametrize("policy", ["scissorhands", "hashevict", "hyde", "fastgen", "corm"])
def test_settings_are_checked(policy):
    with pytest.raises(ValueError, match="no setting"):
        naive.complete_settings(policy, {"heavy_share": 1})


# ------------------------------------------------------------------------------------------------- scissorhands

# Even shares are 1, 1/2, 1/3, 1/4.  Keys that are low at a query: -, 1, 1, 0 2 3.
LOWS = [[1], [0.75, 0.25], [0.5, 0.1, 0.4], [0.1, 0.6, 0.1, 0.2]]


@pytest.mark.parametrize(
    ("settings", "budget", "kept"),
    [
        ({}, 3, [0, 2, 3]),  # low 1, 2, 1, 1 times
        ({}, 2, [2, 3]),
        ({}, 1, [3]),
        ({"count": "high"}, 3, [0, 1, 2]),  # high 3, 1, 1, 0 times
        ({"count": "high"}, 2, [0, 2]),
        ({"count": "high"}, 1, [0]),
        ({"obs_window": 1}, 1, [1]),
        ({"obs_window": 2}, 2, [2, 3]),  # low 1, 1, 1, 1 times
        ({"obs_window": 3}, 3, [0, 2, 3]),  # low 1, 2, 1, 1 times
        ({"obs_window": 2, "count": "high"}, 3, [0, 1, 2]),  # high 1, 1, 1, 0 times
        ({"count": "high", "recent_window": 1}, 2, [0, 3]),
        ({"drop_share": 1.0}, 3, [0, 2, 3]),  # a prompt's end leaves the budget
        ({"layers": "pyramid", "persistence": (0.5, 0.1)}, 3, [0, 2, 3]),
    ],
)
def test_scissorhands_counts(settings, budget, kept):
    q, k = attending(LOWS)
    assert last(replay(q, k, "p4", "scissorhands", {"recent_window": 0, **settings}, budget)) == kept


def test_scissorhands_even_shares_are_not_low():
    """High 3, 2, 1 times."""
    q, k = indifferent(3)
    assert last(replay(q, k, "p3", "scissorhands", {"recent_window": 0, "count": "high"}, 2)) == [0, 1]


def test_scissorhands_protects_ten_tokens_by_default():
    """The first three share the attention of all queries; every other key is low at every query."""
    q, k = attending([[1.0 if i < 3 else 0.01 for i in range(t + 1)] for t in range(13)])
    assert last(replay(q, k, "p13", "scissorhands", None, 10)) == list(range(3, 13))
    assert last(replay(q, k, "p13", "scissorhands", {"recent_window": 9}, 10)) == [2, *range(4, 13)]


@pytest.mark.parametrize(
    ("drop_share", "sizes"),
    [
        (0.5, [1, 2, 3, 4, 3, 4, 3, 4, 3]),
        (0.0, [1, 2, 3, 4, 4, 4, 4, 4, 4]),
        (0.74, [1, 2, 3, 4, 3, 4, 3, 4, 3]),
        (0.75, [1, 2, 3, 4, 2, 3, 4, 2, 3]),
        (1.0, [1, 2, 3, 4, 1, 2, 3, 4, 1]),
    ],
)
def test_scissorhands_drops_several_at_a_step(drop_share, sizes):
    q, k = indifferent(9)
    result = replay(q, k, "s9", "scissorhands", {"drop_share": drop_share, "recent_window": 0}, 4)
    assert [len(kept[0]) for kept in result.kept] == sizes


def test_scissorhands_drops_exact_shares():
    case = naive.Case(*[None] * 3, "scissorhands", {"drop_share": 0.29, "num_sink": 0, "recent_window": 10}, *[None] * 9)
    assert [naive_seeds.scissorhands_stay(case, held, 100, 100) for held in (99, 100, 101, 140)] == [99, 100, 72, 72]
    case.settings.update(num_sink=40, recent_window=40)  # what is protected stays
    assert naive_seeds.scissorhands_stay(case, 101, 100, 100) == 80


@pytest.mark.parametrize(("threshold", "kept"), [("seen", [0, 3]), ("held", [2, 3])])
def test_scissorhands_thresholds(threshold, kept):
    """At 3, of [0, 2, 3]: 0.3, 0.2 and 0.5, to be compared with 1/4 or 1/3."""
    q, k = attending([[1], [0.5, 0.5], [0.45, 0.1, 0.45], [0.3, 0, 0.2, 0.5]])
    settings = {"drop_share": 0.0, "recent_window": 0, "obs_window": 1, "threshold": threshold}
    result = replay(q, k, "s4", "scissorhands", settings, 2)
    assert [kept[0] for kept in result.kept[:3]] == [[0], [0, 1], [0, 2]]
    assert last(result) == kept


def test_scissorhands_held_counts_only_what_has_come():
    """In a prompt, 1 is low at 1, where two keys are held: 0.4 is below 1/2. At 2, both 0 and 1 are."""
    q, k = attending([[1], [0.6, 0.4], [0.3, 0.3, 0.4]])
    for threshold in ("seen", "held"):
        assert last(replay(q, k, "p3", "scissorhands", {"recent_window": 0, "threshold": threshold}, 2)) == [0, 2]


@pytest.mark.parametrize(("group", "kept"), [("mean", [0]), ("max", [1]), ("sum", [2]), ("first", [1])])
def test_scissorhands_merges_the_group_first(group, kept):
    """At query 2: mean 0.55, 0.25, 0.2, max 0.6, 0.4, 0.3, sum 1.1, 0.5, 0.4. The newest that is not below 1/3 stays."""
    q, k = attending([[1], [0.5, 0.5], [0.5, 0.4, 0.1]], [[1], [0.5, 0.5], [0.6, 0.1, 0.3]])
    settings = {"recent_window": 0, "obs_window": 1, "group": group}
    assert last(replay(q, k, "p3", "scissorhands", settings, 1)) == kept


# ---------------------------------------------------------------------------------------------------- hashevict


def axes(*indices, dim=4):
    """(1, T, dim): the t-th vector is the unit vector indices[t]; ~i is its negative."""
    vectors = [-np.eye(dim)[~i] if i < 0 else np.eye(dim)[i] for i in indices]
    return np.array(vectors)[None]


BITS = 8
SEED, LAYER = 5, 2
HASH = {"num_sink": 0, "recent_window": 0, "bits": BITS}


def distances():
    """Between codes of unit vectors: in how many columns two rows of the projection have different signs."""
    directions = np.random.default_rng([SEED, LAYER]).standard_normal((4, BITS))
    return [[sum((directions[a, j] > 0) != (directions[b, j] > 0) for j in range(BITS)) for b in range(4)] for a in range(4)]


def test_hashevict_removes_the_farthest():
    """Keys are the axes, the arriving token's query is each of them in turn."""
    table = distances()
    assert len({tuple(sorted(row)) for row in table}) > 1  # or this test tells nothing
    for arriving in range(4):
        q, k = axes(0, 0, 0, 0, arriving), axes(0, 1, 2, 3, ~arriving)
        result = replay(q, k, "s5", "hashevict", HASH, 4, seed=SEED, layer_idx=LAYER)
        farthest = max(range(4), key=lambda i: (table[arriving][i], -i))  # ties go to the newer token
        assert last(result) == sorted({0, 1, 2, 3, 4} - {farthest})
        assert result.read[-1][0] == last(result)  # it left before the attention


def test_hashevict_codes():
    directions = np.array([[1.0, -1.0, 0.5], [1.0, 2.0, 0.0]])
    assert naive_seeds.sign_code(np.array([1.0, 0.0]), directions) == [True, False, True]
    assert naive_seeds.sign_code(np.array([0.0, 1.0]), directions) == [True, True, False]  # 0 is not above 0
    assert naive_seeds.hamming([True, False, True], [True, True, False]) == 2


# An opposite vector has the opposite code, so distances are 0 or BITS.
@pytest.mark.parametrize(("probe", "kept"), [("key", [0, 2, 3]), ("query", [1, 2, 3])])
def test_hashevict_probes(probe, kept):
    q, k = axes(0, 0, 0, ~0), axes(0, ~0, 0, 0)
    assert last(replay(q, k, "s4", "hashevict", {**HASH, "probe": probe}, 3)) == kept


def test_hashevict_averages_over_the_group():
    """Query heads at 0, 0 and opposite of 0; two of three outvote the third, however long it is."""
    one, two = axes(0, 0, 0), axes(0, 0, ~0)
    two[0, 2] *= 9
    k = axes(0, ~0, 0)
    for heads, gone in (((one, one, two), 1), ((two, one, two), 0), ((one, two, one), 1)):
        assert last(replay(np.concatenate(heads), k, "s3", "hashevict", HASH, 2)) == [1 - gone, 2]
    assert last(replay(np.concatenate((one, two)), k, "s3", "hashevict", HASH, 2)) == [1, 2]  # a tie


def test_hashevict_holds_the_budget_and_counts_the_arriving_token_as_recent():
    q, k = axes(0, 0, 0, 0), axes(0, 0, ~0, 0)
    result = replay(q, k, "s4", "hashevict", HASH, 3)
    assert [kept[0] for kept in result.kept] == [[0], [0, 1], [0, 1, 2], [0, 1, 3]]
    assert last(replay(q, k, "s4", "hashevict", {**HASH, "recent_window": 1}, 3)) == [0, 1, 3]
    assert last(replay(q, k, "s4", "hashevict", {**HASH, "recent_window": 2}, 3)) == [1, 2, 3]
    assert last(replay(q, k, "s4", "hashevict", {**HASH, "recent_window": 2, "num_sink": 1}, 3)) == [0, 2, 3]


def test_hashevict_with_a_budget_of_one_or_one_that_shrinks():
    q, k = axes(*[0] * 6), axes(*[0] * 6)
    assert [kept[0] for kept in replay(q, k, "s6", "hashevict", HASH, 1).kept] == [[t] for t in range(6)]
    segments = [Segment("step", 4, 4), Segment("step", 2, 2)]
    assert [kept[0] for kept in replay(q, k, segments, "hashevict", HASH).kept[3:]] == [[0, 1, 2, 3], [3, 4], [4, 5]]
    assert last(replay(q, k, "s6", "hashevict", HASH, None)) == list(range(6))


def test_hashevict_prompts():
    """The prompt is seen in full; its end keeps the newest, or what tokens one by one would have kept."""
    q, k = axes(0, 0, 0, ~0, 0, 0), axes(0, ~0, 0, 0, ~0, 0)
    # One by one: 2 comes and 1 leaves; 3 comes, asks for ~0, and 0 leaves; 4 comes and 2 leaves; 5 comes and 4 leaves.
    steps = replay(q, k, "s6", "hashevict", HASH, 2)
    assert [kept[0] for kept in steps.kept] == [[0], [0, 1], [0, 2], [2, 3], [3, 4], [3, 5]]
    stream = replay(q, k, "p6", "hashevict", HASH, 2)
    assert (stream.read[-1][0], last(stream)) == ([0, 1, 2, 3, 4, 5], [3, 5])
    assert last(replay(q, k, "s2 p4", "hashevict", HASH, 2)) == [3, 5]
    assert last(replay(q, k, "p6", "hashevict", {**HASH, "prompt": "recent"}, 2)) == [4, 5]
    assert last(replay(q, k, "p6", "hashevict", {**HASH, "prompt": "recent", "num_sink": 1}, 2)) == [0, 5]
    q, k = axes(0, 0, ~0, 0), axes(0, ~0, ~0, 0)  # every token asks with its own query: 0 leaves at 2, and 1 at 3
    assert last(replay(q, k, "p4", "hashevict", HASH, 2)) == [2, 3]


def test_hashevict_prompt_after_a_larger_budget():
    q, k = axes(0, 0, 0, ~0, 0, 0), axes(0, ~0, 0, 0, ~0, 0)
    shrinking = [Segment("prompt", 4, None), Segment("prompt", 2, 2)]  # 4 comes: 1 leaves, then 3 and 2: ties go to the newer
    assert last(replay(q, k, shrinking, "hashevict", HASH)) == [3, 5]


def test_hashevict_in_a_window():
    """What left the window goes before the farthest."""
    q, k = axes(*[0] * 5), axes(0, 0, 0, ~0, 0)
    assert last(replay(q, k, "s5", "hashevict", HASH, 3, window=4)) == [1, 2, 4]
    result = replay(q, k, "s5", "hashevict", HASH, None, window=3)
    assert [kept[0] for kept in result.kept[2:]] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]


# --------------------------------------------------------------------------------------------------------- hyde

HYDE = {"action": "evict", "decay": 0.5, "min_decay": 0.0, "window_share": 0.0, "power": 1.0}
MASS = [11 / 6, 5 / 6, 1 / 3]  # of three even queries
NORMS = [1.0, -2.0, 4.0]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [1, 2]),  # 0.194, 0.234, 0.427
        ({"power": 2.0}, [0, 2]),  # 0.150, 0.110, 0.183: the power is of the importance alone
        ({"window_share": 0.5}, [1, 2]),  # 0.388, 0.468, 0.427
        ({"min_decay": 0.9}, [0, 2]),  # 0.698, 0.421, 0.427
        ({"decay": 1.0}, [0, 1]),  # 0.775, 0.468, 0.427
        ({"decay": 1.0, "attention_weight": 0.0}, [1, 2]),
        ({"window_share": 1.0}, [0, 1]),  # no age is above 2
        ({"recent_window": 1, "window_share": 0.5, "min_decay": 0.9}, [0, 2]),
    ],
)
def test_hyde_keeps_by_decayed_importance(settings, kept):
    q, k = indifferent(3, NORMS)
    assert last(replay(q, k, "p3", "hyde", {**HYDE, **settings}, 2)) == kept


def hyde_state(mass, norms, **settings):
    """A case and a state of one KV head that holds everything."""
    q, k = indifferent(len(norms), norms)
    complete = naive.complete_settings("hyde", settings)
    case = naive.Case(q, k, k, "hyde", complete, 1.0, *[None] * 3, 0, 0, None, frozenset(), None)
    return case, naive.State(held=[list(range(len(norms)))], mass=[dict(enumerate(mass))])


def test_hyde_scores():
    case, state = hyde_state(MASS, NORMS, decay=0.5, window_share=0.34, min_decay=0.3, power=2.0)
    state.given_budget = 3
    scores = naive_seeds.hyde_scores(case, state, 0, 2)  # W = floor(1.02) = 1
    shares = [0.7 + 0.3 / 4, 0.7 * 5 / 11 + 0.3 / 2, 0.7 * 2 / 11 + 0.3]
    assert scores == pytest.approx({0: 0.5 * shares[0] ** 2, 1: shares[1] ** 2, 2: shares[2] ** 2})
    scores = naive_seeds.hyde_scores(case, state, 0, 9)  # ages 9, 8, 7
    assert scores == pytest.approx({i: 0.3 * share**2 for i, share in enumerate(shares)})
    case, state = hyde_state([0.0] * 3, [0.0] * 3)
    state.given_budget = 3
    assert naive_seeds.hyde_scores(case, state, 0, 2) == {0: 0.0, 1: 0.0, 2: 0.0}


def test_hyde_grace_is_exact_and_at_least_the_recent_window():
    case, _ = hyde_state(MASS, NORMS, decay=0.5, window_share=0.29, min_decay=0.0)
    assert [naive_seeds.hyde_decay(case, age, 100) for age in (0, 28, 29, 30, 31)] == [1, 1, 1, 0.5, 0.25]
    case, _ = hyde_state(MASS, NORMS, decay=0.5, window_share=0.29, min_decay=0.1, recent_window=3)
    assert [naive_seeds.hyde_decay(case, age, 10) for age in (2, 3, 4, 5, 9)] == [1, 1, 0.5, 0.25, 0.1]


FADE = {"action": "fade", "decay": 0.5, "window_share": 0.0}


@pytest.mark.parametrize(
    ("settings", "budget", "weights"),
    [
        ({}, 4, [1 / 7, 2 / 7, 4 / 7]),  # 1/4, 1/2, 1
        ({"action": "fade+evict"}, 4, [1 / 7, 2 / 7, 4 / 7]),
        ({"action": "evict"}, 4, [1 / 3] * 3),
        ({}, None, [1 / 3] * 3),
        ({"num_sink": 1}, 4, [2 / 5, 1 / 5, 2 / 5]),
        ({"min_decay": 0.5}, 4, [1 / 4, 1 / 4, 1 / 2]),
        ({"window_share": 0.25}, 4, [1 / 5, 2 / 5, 2 / 5]),
        ({"window_share": 0.25}, 3, [1 / 7, 2 / 7, 4 / 7]),
        ({"recent_window": 1}, 4, [1 / 5, 2 / 5, 2 / 5]),
    ],
)
def test_hyde_fades_at_steps(settings, budget, weights):
    q, k = indifferent(3)
    result = replay(q, k, "p2 s1", "hyde", {**FADE, **settings}, budget)
    assert np.allclose(result.out[0, 1], [1 / 2, 1 / 2, 0])  # inside a prompt nothing fades
    assert np.allclose(result.out[0, 2], weights)


def test_hyde_fades_after_the_softcap_and_leaves_the_sink_alone():
    q, k = indifferent(3)
    q[:] = 50.0
    result = replay(q, k, "p2 s1", "hyde", FADE, 4, softcap=1e-9, sinks=np.array([0.0]))  # all logits become 0
    assert np.allclose(result.out[0, 2], [0.25 / 2.75, 0.5 / 2.75, 1 / 2.75])


def test_hyde_sums_the_faded_attention():
    """Masses after the step: 1.643, 0.786, 0.571 faded, or 1.833, 0.833, 0.333; times 1/4, 1/2, 1."""
    q, k = indifferent(3)
    settings = {**HYDE, "attention_weight": 1.0, "norm_weight": 0.0}
    assert last(replay(q, k, "p2 s1", "hyde", {**settings, "action": "fade+evict"}, 2)) == [0, 2]
    assert last(replay(q, k, "p2 s1", "hyde", settings, 2)) == [0, 1]


def test_hyde_that_only_fades_holds_everything_or_the_window():
    q, k = indifferent(6)
    assert last(replay(q, k, "p4 s2", "hyde", FADE, 2)) == list(range(6))
    result = replay(q, k, "p4 s2", "hyde", {**FADE, "window_share": 0.5}, 2, window=3)  # W = 1
    assert [result.kept[t][0] for t in (3, 4, 5)] == [[1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert np.allclose(result.out[0, 4, 2:5], [1 / 5, 2 / 5, 2 / 5])
    result = replay(q, k, "p4 s2", "hyde", {**FADE, "window_share": 0.5}, 9, window=2)  # of all of the budget: W = 4
    assert np.allclose(result.out[0, 5, 4:], [1 / 2, 1 / 2])
    result = replay(q, k, "p4 s2", "hyde", {**FADE, "window_share": 0.34}, 4, window=3)  # W = 1
    assert np.allclose(result.out[0, 5, 3:], [1 / 5, 2 / 5, 2 / 5])


# ------------------------------------------------------------------------------------------------------ fastgen

# 0 is special and 2 is punctuation. A prompt of four loses, with "special": 0, 0.1, 0.2, 0.3; with "special+punct":
# 0, 0.1, 0.1, 0.2; 0 is the most frequent as well; with the last two tokens of each query, too: 0, 0, 0, 0.1.
FOCUS = [[1], [0.9, 0.1], [0.8, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]]
MARKS = {"special": frozenset({0}), "punctuation": frozenset({2})}
QUARTERS = {"local_share": 0.25, "frequent_share": 0.25}


@pytest.mark.parametrize(
    ("settings", "profile", "kept"),
    [
        ({"threshold": 0.84}, 0, [0]),  # loses 0.15
        ({"threshold": 0.86}, 1, [0, 2]),  # loses 0.1
        ({"threshold": 0.91}, 3, [0, 2, 3]),  # loses 0.1, then 0.025
        ({"threshold": 0.98}, 4, [0, 1, 2, 3]),
        ({"threshold": 1.0}, 4, [0, 1, 2, 3]),
        ({"threshold": 0.84, "recovery": "l1"}, 3, [0, 2, 3]),  # 0.3, 0.2, 0.2, 0.05
        ({"threshold": 0.79, "recovery": "l1"}, 1, [0, 2]),
        ({"threshold": 0.69, "recovery": "l1"}, 0, [0]),
        ({"threshold": 1.0, "members": ("special", "punct")}, 1, [2]),  # none is good enough: the last
        ({"threshold": 0.6, "members": ("punct", "local")}, 1, [2, 3]),  # 0.9 lost, then 0.8 / 4 + 0.8 / 4
        ({"threshold": 0.84, "recent_window": 2}, 0, [0, 2, 3]),
        ({"threshold": 0.84, "members": ("local", "special"), "num_sink": 2}, 1, [0, 1]),
        ({"threshold": 0.8, "members": ("frequent", "full"), "frequent_share": 0.5}, 0, [0, 1]),  # 1 has 0.3, 2 has 0.2
    ],
)
def test_fastgen_profiles(settings, profile, kept):
    q, k = attending(FOCUS)
    result = replay(q, k, "p4", "fastgen", {**QUARTERS, **settings}, **MARKS)
    assert (result.profile, last(result)) == ([profile], kept)


def test_fastgen_takes_the_mean_over_the_heads_whatever_the_group_merges():
    """Heads lose 0.15 and 0 with "special"."""
    q, k = attending(FOCUS, [[1]] * 4)
    for group in ("mean", "max", "sum", "first"):
        assert replay(q, k, "p4", "fastgen", {**QUARTERS, "threshold": 0.92, "group": group}, **MARKS).profile == [0]
        assert replay(q, k, "p4", "fastgen", {**QUARTERS, "threshold": 0.93, "group": group}, **MARKS).profile == [1]


def test_fastgen_profiles_each_kv_head_once():
    """The second KV head attends to itself alone in the prompt; what comes later changes nothing."""
    q, k = attending(FOCUS, [[0] * t + [1] for t in range(4)])
    k = np.concatenate([k, k])
    settings = {**QUARTERS, "members": ("special", "local", "full"), "threshold": 0.8}
    result = replay(q, k, "p4", "fastgen", settings, **MARKS)
    assert (result.profile, result.kept[-1]) == ([0, 1], [[0], [2, 3]])
    result = replay(q, k, "p2 p2", "fastgen", {**settings, "threshold": 0.9}, **MARKS)
    assert (result.profile, result.kept[-1]) == ([0, 1], [[0], [2, 3]])
    result = replay(q, k, "p1 p3", "fastgen", settings, **MARKS)
    assert (result.profile, result.kept[-1]) == ([0, 0], [[0], [0]])
    assert replay(q, k, "p4", "h2o", None, 4).profile is None


def test_fastgen_frequent_tokens_are_those_of_the_prompts_end():
    """2 gets most in the end: queries 0 and 1 lose everything, though 0 was the most frequent then."""
    q, k = attending([[1], [1, 0], [0, 0, 1], [0, 0, 1, 0], [0, 0, 1, 0]])
    settings = {"members": ("frequent", "full"), "frequent_share": 0.2}
    assert replay(q, k, "p5", "fastgen", {**settings, "threshold": 0.59}).profile == [0]
    assert replay(q, k, "p5", "fastgen", {**settings, "threshold": 0.61}).profile == [1]
    q, k = attending([[1], [0, 1], [0, 0, 1]])  # all masses are 1: the newer
    assert last(replay(q, k, "p3", "fastgen", {"members": ("frequent",), "frequent_share": 0.34})) == [2]


def test_fastgen_at_steps():
    """The sets are those of each step, of what is still held; nothing comes back."""
    q, k = indifferent(9)
    local = {"members": ("local",), "local_share": 0.4}  # the newest 1 + floor(0.4 L)
    result = replay(q, k, "p4 s5", "fastgen", local)
    assert [kept[0] for kept in result.kept[3:]] == [[2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [4, 5, 6, 7], [5, 6, 7, 8]]
    assert result.read[4][0] == [2, 3, 4]
    growing = replay(q, k, "p4 s1 p4", "fastgen", {"members": ("local",), "local_share": 0.8})  # 0 left at the prompt's end
    assert [growing.kept[t][0] for t in (3, 4, 8)] == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8]]
    q, k = indifferent(7)
    special = replay(q, k, "p4 s3", "fastgen", {"members": ("special",)}, special=frozenset({5}))
    assert [kept[0] for kept in special.kept[3:]] == [[], [], [5], [5]]
    assert special.read[5][0] == [5]
    assert special.read[6][0] == [5, 6]


def test_fastgen_frequent_at_steps_counts_the_steps_own_attention():
    """floor(0.3 L) of the mass so far: 1 of 4 to 6 tokens, 2 of 7."""
    first = [[1], [0, 1], [0, 0, 1], [0, 0, 0, 1]]  # then 3 is kept, with a mass of 1
    for then, kept in (([0, 0, 0, 0, 1], [4]), ([0, 0, 0, 0.6, 0.4], [3])):
        q, k = attending([*first, then])
        assert last(replay(q, k, "p4 s1", "fastgen", {"members": ("frequent",)})) == kept
    q, k = attending([*first, [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1]])
    result = replay(q, k, "p4 s3", "fastgen", {"members": ("frequent",)})
    assert [kept[0] for kept in result.kept[3:]] == [[3], [3], [3], [3, 6]]
    assert naive_seeds.floor_share(0.29, 100) == 29


@pytest.mark.parametrize(
    ("budget", "settings", "kept"),
    [
        (6, {}, [0, 1, 2, 3, 4, 5]),
        (5, {}, [0, 1, 2, 3, 4]),  # 5 has the least mass
        (4, {}, [1, 2, 3, 4]),  # 1 and 4 are special, 2 is punctuation; 3 has more than 0
        (3, {}, [1, 2, 4]),
        (2, {}, [1, 4]),  # special counts before punctuation
        (1, {}, [1]),  # more mass than 4
        (1, {"keep_special": True}, [4]),  # newer, for the tier's own order counts
        (2, {"recent_window": 1}, [1, 5]),
        (2, {"keep_special": True, "recent_window": 2}, [1, 4]),
        (3, {"keep_special": True, "recent_window": 1}, [1, 4, 5]),
        (2, {"num_sink": 1, "recent_window": 1}, [0, 5]),
    ],
)
def test_fastgen_caps(budget, settings, kept):
    """Masses: 1.7, 0.8, 0.5, 2.5, 0.4, 0.1."""
    q, k = attending([[1], [0.3, 0.7], [0.4, 0.1, 0.5], [0, 0, 0, 1], [0, 0, 0, 0.6, 0.4], [0, 0, 0, 0.9, 0, 0.1]])
    settings = {"members": ("full",), **settings}
    marks = {"special": frozenset({1, 4}), "punctuation": frozenset({2, 4})}
    assert last(replay(q, k, "p6", "fastgen", settings, budget, **marks)) == kept


def test_fastgen_never_keeps_what_left_the_window():
    q, k = indifferent(6)
    settings = {"members": ("full",), "num_sink": 1, "keep_special": True}
    result = replay(q, k, "p4 s2", "fastgen", settings, window=3, special=frozenset({1}))
    assert [kept[0] for kept in result.kept[3:]] == [[1, 2, 3], [2, 3, 4], [3, 4, 5]]
    result = replay(q, k, "p4 s2", "fastgen", {"members": ("special+local",), "local_share": 0.0}, window=3, special={0, 1})
    assert [kept[0] for kept in result.kept[3:]] == [[1, 3], [4], [5]]


@pytest.mark.parametrize("segments", ["s4", "p0 s4", "s1 p3"])
def test_fastgen_refuses_streams_before_a_prompt(segments):
    q, k = indifferent(4)
    with pytest.raises(ValueError, match="prompt's end"):
        replay(q, k, segments, "fastgen", None, 3)


# --------------------------------------------------------------------------------------------------------- corm


@pytest.mark.parametrize(
    ("segments", "settings", "kept"),
    [
        # Keys that are important at a query: 0, 0, 0 2, 1.
        ("p4", {"obs_window": 1}, [1]),
        ("p4", {"obs_window": 2}, [0, 1, 2, 3]),  # two queries haven't looked at 3 yet
        ("p4", {"obs_window": 1, "recent_window": 2}, [1, 2, 3]),
        ("p4", {"obs_window": 1, "num_sink": 1}, [0, 1]),
        ("p4", {"obs_window": 5}, [0, 1, 2, 3]),
        ("p3", {"obs_window": 2}, [0, 2]),
        ("s4", {"obs_window": 2}, [0, 2, 3]),  # 1 leaves before the query comes that would look at it
        ("s4", {"obs_window": 1}, [0, 2, 3]),  # 1 leaves at once; without it the others get 1/4, 1/4, 1/2 of the last query
        ("s4", {"obs_window": 1, "threshold": "held"}, [3]),  # 5/9, 4/9 of the third query, then 1/3, 2/3 of the last
        ("p3 s1", {"obs_window": 1}, [0, 2, 3]),
        ("p2 p2", {"obs_window": 1}, [0, 2, 3]),
    ],
)
def test_corm(segments, settings, kept):
    q, k = attending(LOWS)
    length = sum(int(part[1:]) for part in segments.split())
    result = replay(q[:, :length], k[:, :length], segments, "corm", {"recent_window": 0, **settings})
    assert last(result) == kept


@pytest.mark.parametrize(("group", "kept"), [("max", [0, 1]), ("mean", [0]), ("first", [0]), ("sum", [0, 1])])
def test_corm_over_a_group(group, kept):
    q, k = attending([[1], [1, 0]], [[1], [0.1, 0.9]])
    if group == "sum":
        q, k = attending([[1], [0.7, 0.3]], [[1], [0.7, 0.3]])
    assert last(replay(q, k, "p2", "corm", {"obs_window": 1, "recent_window": 0, "group": group})) == kept


@pytest.mark.parametrize(("budget", "settings", "kept"), [
    (3, {}, [1, 2, 3]),  # the last queries that looked at them, or one before they came: 2, 3, 2, 2
    (2, {}, [1, 3]),
    (1, {}, [1]),
    (2, {"num_sink": 1}, [0, 1]),
    (2, {"recent_window": 1}, [1, 3]),
    (2, {"obs_window": 1}, [1]),
])  # fmt: skip
def test_corm_caps(budget, settings, kept):
    q, k = attending(LOWS)
    assert last(replay(q, k, "p4", "corm", {"recent_window": 0, "obs_window": 400, **settings}, budget)) == kept
