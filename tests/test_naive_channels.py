"""The slow references of ThinK, Eigen Attention and KVSharer, against numbers worked out by hand and identities."""

import itertools
import math

import numpy as np
import pytest

import naive
import naive_eigen
import naive_kvsharer
import naive_think
from naive_codecs import CODECS, NaiveCodecCache, affine_group, attention, pack_bits
from naive_eigen import Basis, NaiveEigenCache, Point
from naive_kvsharer import NaiveSharedStore
from naive_think import NaiveThinkCache

INT4 = CODECS["int4"]
SMALL_KIVI = {"bits": 2, "group": 2, "residual": 4, "key_axis": "channel", "value_axis": "token"}


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def masked(x, channels):
    """x (heads, n, d) with zeros in all channels of a KV head but the chosen."""
    result = np.zeros_like(x)
    for head, some in enumerate(channels):
        result[head][:, some] = x[head][:, some]
    return result


# -------------------------------------------------------------------------------------------------------- think


def test_think_scores_by_hand():
    queries = [[[9, 9], [1, 0], [3, 2]], [[9, 9], [1, 4], [1, 0]]]  # two heads; the last two queries look
    keys = [[1, 2], [3, 0]]
    # mean squares of queries: (5, 2) and (1, 8), so (3, 5) over heads; of keys: (5, 2)
    assert naive_think.channel_scores(queries, keys, 2).tolist() == [15, 10]
    assert naive_think.channel_scores(queries, keys, 9).tolist() == pytest.approx([(91 + 83) / 6 * 5, (85 + 97) / 6 * 2])
    assert naive_think.channel_scores(np.float64(queries), np.float64(keys)).dtype == np.float64
    assert naive_think.channel_scores(queries, keys).dtype == np.float32


@pytest.mark.parametrize(
    ("scores", "drop", "chosen"),
    [
        ([4, 1, 3, 2, 5], 0, [0, 1, 2, 3, 4]),
        ([4, 1, 3, 2, 5], 0.4, [0, 2, 4]),
        ([4, 1, 3, 2, 5], 0.39, [0, 2, 3, 4]),
        ([4, 1, 3, 2, 5], 0.99, [4]),
        ([1, 1, 1, 1], 0.5, [0, 1]),  # of equal ones the later goes first
        ([2, 1, 1, 3], 0.25, [0, 1, 3]),
    ],
)
def test_think_chooses(scores, drop, chosen):
    assert naive_think.chosen_channels(scores, drop) == chosen


def test_think_drops_the_share_as_written():
    assert naive_think.num_dropped(100, 0.29) == 29 and math.floor(100 * 0.29) == 28
    assert naive_think.num_dropped(64, 0.4) == 25


def test_think_stores_by_hand():
    cache = NaiveThinkCache(drop=0.5, recent=1)
    keys = np.array([[[3, 1], [3, 1], [3, 1]], [[1, 2], [1, 2], [1, 2]]])
    cache.event("turn", keys, keys, np.ones((2, 3, 2)))
    assert cache.channels == [[0], [1]]
    assert cache.keys[0].held().tolist() == [[[3, 0], [3, 0], [3, 1]]]
    assert cache.keys[1].held().tolist() == [[[0, 2], [0, 2], [1, 2]]]
    assert np.array_equal(cache.values[1].held()[0], keys[1])
    for expected in ([[3, 0], [3, 0], [3, 1], [5, 7]], [[3, 0], [3, 0], [3, 1], [5, 7], [5, 7]]):  # steps store nothing
        cache.event("step", np.full((2, 1, 2), [5, 7]), np.ones((2, 1, 2)), np.ones((2, 1, 2)))
        assert cache.keys[0].held().tolist() == [expected]
    cache.event("turn", np.full((2, 1, 2), [0, 99]), np.ones((2, 1, 2)), np.ones((2, 1, 2)))  # the choice is fixed
    assert cache.keys[0].held().tolist() == [[[3, 0]] * 3 + [[5, 0]] * 2 + [[0, 99]]]
    counts = cache.counts()
    assert (counts["keys"]["plain"], counts["keys"]["full"]) == (2 * 5 * 1, 2 * 2) and counts["channels"] == {"chosen": 2}
    assert (counts["values"]["plain"], counts["values"]["full"]) == (0, 2 * 6 * 2)


@pytest.mark.parametrize("side", ["keys", "queries"])
def test_think_is_attention_with_masked_keys_or_queries(side):
    keys, values, queries = drawn(2, 9, 6), drawn(2, 9, 5, seed=1), drawn(4, 9, 6, seed=2)
    cache = NaiveThinkCache(drop=0.5, obs_window=3, recent=0)
    exact = attention(queries[:, :8], keys[:, :8], values[:, :8])[0]
    assert np.allclose(cache.event("turn", keys[:, :8], values[:, :8], queries[:, :8]), exact)  # of what came in
    out = cache.event("turn", keys[:, 8:], values[:, 8:], queries[:, 8:])
    assert all(len(some) == 3 for some in cache.channels) and cache.channels[0] != cache.channels[1]
    step_keys = masked(keys, cache.channels)
    step_keys[:, 8:] = keys[:, 8:]
    if side == "keys":
        assert np.allclose(out, attention(queries[:, 8:], step_keys, values)[0])
    else:  # the newest key is whole, so its logit is of the whole query
        for h in range(4):
            query, mask = queries[h, 8], np.isin(np.arange(6), cache.channels[h // 2])
            logits = [(query * mask) @ keys[h // 2, t] for t in range(8)] + [query @ keys[h // 2, 8]]
            shares = np.exp(np.array(logits) / math.sqrt(6))
            assert np.allclose(cache.weights[h], shares / shares.sum())
            assert np.allclose(out[h, 0], shares / shares.sum() @ values[h // 2])


@pytest.mark.parametrize("codec", [None, INT4, SMALL_KIVI])
def test_think_that_drops_nothing_is_its_codec_alone(codec):
    keys, values, queries = drawn(2, 13, 4), drawn(2, 13, 4, seed=1), drawn(4, 13, 4, seed=2)
    cache = NaiveThinkCache(drop=0, recent=2, codec=codec)
    alone = NaiveCodecCache(**(codec or {**INT4, "residual": 99}))
    start = 0
    for kind, n in [("turn", 7), ("step", 1), ("step", 1), ("turn", 3), ("step", 1)]:
        now = slice(start, start + n)
        out = cache.event(kind, keys[:, now], values[:, now], queries[:, now])
        assert np.array_equal(out, alone.event(kind, keys[:, now], values[:, now], queries[:, now]))
        start += n
    assert np.array_equal(np.concatenate([side.held() for side in cache.keys]), alone.keys.held())
    assert np.array_equal(np.concatenate([side.held() for side in cache.values]), alone.values.held())


def test_think_looks_at_the_whole_turn_and_at_what_is_left():
    keys, queries = drawn(2, 8, 6), drawn(4, 8, 6, seed=1)
    whole, chunked = NaiveThinkCache(obs_window=5), NaiveThinkCache(obs_window=5)
    kept = [[0, 2, 6, 7], [1, 3, 4, 7]]
    whole.event("turn", keys, keys, queries, kept)
    chunked.event("chunk", keys[:, :6], keys[:, :6], queries[:, :6])
    assert chunked.channels is None
    chunked.event("turn", keys[:, 6:], keys[:, 6:], queries[:, 6:], kept)
    assert whole.channels == chunked.channels and whole.positions == chunked.positions == kept
    for kv_head in range(2):
        group = queries[kv_head * 2 : kv_head * 2 + 2]
        expected = (group[:, 3:] ** 2).mean((0, 1)) * (keys[kv_head, kept[kv_head]] ** 2).mean(0)
        assert np.allclose(whole.scores[kv_head], expected) and np.array_equal(whole.scores[kv_head], chunked.scores[kv_head])


def test_think_before_int_by_hand():
    cache = NaiveThinkCache(drop=0.5, codec={**INT4, "group": 2})
    keys = np.array([[[30, 0, 15.3, 1]]])
    cache.event("step", keys, keys, np.ones((1, 1, 4)))  # before there is a choice nothing is encoded
    assert cache.keys[0].num_encoded == cache.values[0].num_encoded == 0
    cache.event("turn", keys, keys, np.full((1, 1, 4), 2))
    assert np.allclose(cache.scores[0], 4 * keys[0, 0] ** 2)  # the turn's own queries look, at all that is held
    codes, scale, zero = affine_group([30, 15.3], 4)  # channels 0 and 2 stand side by side
    assert (codes.tolist(), float(zero)) == ([15, 0], float(np.float16(15.296875)))
    assert cache.keys[0].units[1].codes.tolist() == [[[15, 0]]] and cache.keys[0].units[1].streams == [pack_bits(codes, 4)]
    assert cache.keys[0].held()[0, 1].tolist() == [15 * float(scale) + float(zero), 0, float(zero), 0]
    counts = cache.counts()
    assert [counts["keys"][kind] for kind in ("codes", "scales", "zeros", "code_bytes", "full")] == [4, 2, 2, 2, 0]
    assert [counts["values"][kind] for kind in ("codes", "scales", "zeros", "code_bytes", "full")] == [8, 4, 4, 4, 0]


def test_think_before_kivi_waits_whole_and_groups_what_is_left():
    cache = NaiveThinkCache(drop=0.5, recent=99, codec=SMALL_KIVI)
    x = drawn(1, 7, 4)
    cache.event("turn", x[:, :6], x[:, :6], x[:, :6])
    side = cache.keys[0]
    assert [unit.codes.shape for unit in side.units] == [(1, 2, 2)] * 2 and len(side.full) == 2
    for number, channel in enumerate(side.channels):
        codes, scale, _ = affine_group(x[0, 2:4, channel], 2)
        assert side.units[1].codes[0, :, number].tolist() == codes.tolist() and side.units[1].scales[0, number] == scale
    assert np.array_equal(side.held()[:, 4:], x[:, 4:6])
    with pytest.raises(ValueError, match="together"):
        cache.event("step", x[:, 6:], x[:, 6:], x[:, 6:], [[1, 2, 3, 4, 5, 6]])
    cache.event("step", x[:, :1], x[:, :1], x[:, :1], [[2, 3, 5, 7]])  # the first group leaves whole
    assert cache.keys[0].num_encoded == 2 and len(cache.keys[0].full) == 2


def test_think_and_int_lose_single_tokens():
    x = drawn(1, 6, 4)
    cache = NaiveThinkCache(drop=0.5, codec=INT4)
    cache.event("turn", x[:, :5], x[:, :5], x[:, :5])
    before = cache.keys[0].held()
    out = cache.event("step", x[:, 5:], x[:, 5:], x[:, 5:], [[0, 3, 5]])
    assert out.shape == (1, 1, 4) and cache.weights[0].shape == (1, 6)
    assert np.array_equal(cache.keys[0].held()[:, :2], before[:, [0, 3]]) and cache.positions == [[0, 3, 5]]


# -------------------------------------------------------------------------------------------------------- eigen


def turned(x, position):
    """x (d,) by an angle of its position, in pairs of channels."""
    angle = 0.3 * position
    first, second = x[0::2], x[1::2]
    return np.stack(
        [first * math.cos(angle) - second * math.sin(angle), first * math.sin(angle) + second * math.cos(angle)], 1
    ).ravel()


def placed(x, start=0):
    return np.stack([np.stack([turned(token, start + t) for t, token in enumerate(head)]) for head in x])


def test_eigen_bases_by_hand():
    down, up, sigma = naive_eigen.svd([[3, 0], [0, 4], [0, 0]])
    assert sigma.tolist() == [4, 3] and np.allclose(np.abs(down), [[0, 1], [1, 0]]) and np.array_equal(up, down.T)
    down, _, sigma = naive_eigen.svd([[2, 2, 1]])  # fewer tokens than channels
    assert (
        np.allclose(sigma, [3, 0, 0])
        and np.allclose(down @ down.T, np.eye(3))
        and np.allclose(np.abs(down[:, 0]) * 3, [2, 2, 1])
    )
    # Uncentred: all of a constant is in one direction.
    assert np.allclose(naive_eigen.svd([[1, 1]] * 8)[2], [4, 0])


def test_eigen_keys_share_a_basis_where_the_model_rotates():
    keys, queries = [[[3, 0]], [[0, 4]]], [[[0, 0]], [[0, 9]], [[5, 0]], [[0, 0]]]
    shared = naive_eigen.key_basis(keys, queries, rotary=True)
    assert shared.down.shape == (1, 2, 2) and np.allclose(shared.sigma, [[4, 3]])
    own = naive_eigen.key_basis(keys, queries, rotary=False)  # head 0: (3, 0), (0, 9); head 1: (0, 4), (5, 0)
    assert own.down.shape == (2, 2, 2) and np.allclose(own.sigma, [[9, 3], [5, 4]])
    assert np.allclose(naive_eigen.value_basis(keys).sigma, [[3, 0], [4, 0]])
    kq = naive_eigen.key_basis(keys, queries, rotary=False, basis="kq")  # K Q^T of head 0 is nothing, and of head 1
    assert np.allclose(kq.sigma, 0)
    kq = naive_eigen.key_basis(keys, queries, rotary=True, basis="kq")
    assert np.allclose(kq.sigma, [[36, 15]])


def test_kq_by_hand():
    down, up, sigma = naive_eigen.kq([[10, 0], [0, 1]], [[1, 0], [0, 100]])
    assert np.allclose(sigma, [100, 10])  # the singular values of K Q^T: keys alone would have taken the other direction
    assert np.allclose(np.abs(down), [[0, 0.1], [1, 0]]) and np.allclose(np.abs(up), [[0, 1], [10, 0]])


def test_kq_is_the_best_of_its_rank():
    keys, queries = drawn(40, 6) @ drawn(6, 6, seed=1), drawn(50, 6, seed=2) @ drawn(6, 6, seed=3)
    down, up, sigma = naive_eigen.kq(keys, queries)
    exact = keys @ queries.T
    for r in range(1, 7):
        error = np.linalg.norm(exact - keys @ down[:, :r] @ up[:r] @ queries.T)
        assert error == pytest.approx(np.sqrt((sigma[r:] ** 2).sum()), abs=1e-8)  # Eckart-Young: no rank r does better
        for rows in (keys, np.concatenate([keys, queries])):
            other = naive_eigen.svd(rows)[0][:, :r]
            assert error <= np.linalg.norm(exact - keys @ other @ other.T @ queries.T) + 1e-8


@pytest.mark.parametrize("tokens", [3, 20])
def test_all_directions_are_the_identity(tokens):
    keys, queries, values = drawn(2, tokens, 6), drawn(4, tokens, 6, seed=1), drawn(2, tokens, 6, seed=2)
    bases = [naive_eigen.key_basis(keys, queries, rotary, basis) for rotary in (True, False) for basis in ("svd", "kq")]
    for basis in [*bases, naive_eigen.value_basis(values)]:
        for down, up in zip(basis.down, basis.up, strict=True):
            assert np.allclose(down @ up, np.eye(6))


def test_eigen_ranks_by_hand():
    sigma = [5, 3, 1, 1]  # 0.5, 0.8, 0.9, 1
    assert [naive_eigen.rank(sigma, eps) for eps in (1.0, 0.95, 0.85, 0.7, 0.4)] == [4, 3, 2, 1, 1]
    assert naive_eigen.rank([1, 0, 0], 1.0) == 3 and naive_eigen.rank([1, 1, 1, 1], 0.5) == 1  # a half is not below a half
    bases = Basis(np.zeros((2, 4, 4)), np.zeros((2, 4, 4)), np.array([sigma, [1, 1, 1, 1]]))
    assert naive_eigen.ranks(bases, bases.cut(4), 0.77) == (3, 3)  # plain, not squared: 0.25, 0.5, 0.75


def test_eigen_curve_and_lookup():
    sigma = np.ones((1, 10))
    basis = Basis(np.zeros((1, 10, 10)), np.zeros((1, 10, 10)), sigma)
    asked = []

    def error(r_k, r_v):
        asked.append((r_k, r_v))
        return (10 - r_k) / 100

    points = naive_eigen.curve(basis, basis, error, rotary=True, step="0.04")
    assert [point.eps for point in points][:4] == [1.0, 0.96, 0.92, 0.88] and points[0].r_k == 10
    assert points[-1].r_k == 5 and asked[-1] == (5, 5)  # 4 of 10 is below 0.45
    assert naive_eigen.curve(basis, basis, error, rotary=False)[0].eps == 0.98
    points = [Point(1.0, 10, 10, 0.0), Point(0.98, 9, 8, 0.1), Point(0.96, 8, 7, 0.3), Point(0.94, 7, 6, 0.2)]
    for budget, found in [(0, (1.0, 10, 10)), (0.1, (1.0, 10, 10)), (0.25, (0.98, 9, 8)), (1, (0.94, 7, 6))]:
        assert naive_eigen.lookup(points, budget, 10) == found
    assert naive_eigen.lookup(points, 1, 10, floor=0.7) == (0.98, 9, 8)  # 7 is not above 0.7 of 10
    assert naive_eigen.lookup(points[1:], 0.05, 10, 12) == (1.0, 10, 12)
    assert naive_eigen.relative_error([3, 4], [3, 3]) == 0.2


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("r", [3, 6])
def test_eigen_is_attention_over_projected_tokens(rotary, r):
    keys, queries, values = drawn(2, 9, 6), drawn(4, 9, 6, seed=1), drawn(2, 9, 6, seed=2)
    key_basis, value_basis = naive_eigen.key_basis(keys, queries, rotary).cut(r), naive_eigen.value_basis(values).cut(r)
    cache = NaiveEigenCache(key_basis, value_basis, turned if rotary else None)
    near_keys = np.stack([x @ key_basis.of(h)[0] @ key_basis.of(h)[1] for h, x in enumerate(keys)])
    near_values = np.stack([x @ down @ up for x, down, up in zip(values, value_basis.down, value_basis.up, strict=True)])
    if rotary:
        near_keys, queries = placed(near_keys), placed(queries)
    outputs = [cache.event("turn", keys[:, :6], values[:, :6], queries[:, :6])]
    outputs += [cache.event("step", keys[:, t : t + 1], values[:, t : t + 1], queries[:, t : t + 1]) for t in (6, 7)]
    outputs += [cache.event("turn", keys[:, 8:], values[:, 8:], queries[:, 8:])]
    assert np.allclose(np.concatenate(outputs, axis=1), attention(queries, near_keys, near_values)[0])
    exact = attention(queries, placed(keys) if rotary else keys, values)[0]
    assert np.allclose(np.concatenate(outputs, axis=1), exact) == (r == 6)
    assert cache.counts()["keys"]["full"] == cache.counts()["values"]["full"] == 2 * 9 * r


def test_eigen_rounds_what_it_stores_and_what_it_rotates():
    key_basis, value_basis = (Basis(np.eye(2)[None], np.eye(2)[None], np.ones((1, 2))) for _ in range(2))
    cache = NaiveEigenCache(key_basis, value_basis, lambda x, _: x + 0.4, rounded=np.round)
    cache.event("turn", [[[1.4, 2.6]]], [[[0.4, 0.6]]], [[[0, 0]]])
    assert cache.low_keys[0].held().tolist() == [[[1, 3]]] and cache.dense_keys(0).tolist() == [[1, 3]]
    assert cache.low_values[0].held().tolist() == [[[0, 1]]]


def test_eigen_folds_into_the_output_weights():
    values, w_o = drawn(2, 9, 6), drawn(5, 4 * 6, seed=1)
    basis = naive_eigen.value_basis(values).cut(4)
    low = drawn(4, 4, seed=2)
    outputs = [low[h] @ basis.of(h // 2)[1] for h in range(4)]
    assert np.allclose(naive_eigen.folded(w_o, basis, 4) @ low.ravel(), w_o @ np.concatenate(outputs))


def test_eigen_before_int_encodes_projected_numbers():
    keys, values, queries = drawn(2, 7, 6), drawn(2, 7, 6, seed=1), drawn(2, 7, 6, seed=2)
    key_basis, value_basis = naive_eigen.key_basis(keys, queries, True).cut(4), naive_eigen.value_basis(values).cut(3)
    cache = NaiveEigenCache(key_basis, value_basis, turned, codec=INT4)
    cache.event("turn", keys[:, :6], values[:, :6], queries[:, :6], [[0, 5], [3, 4]])
    codes, scale, zero = affine_group(keys[0, 5] @ key_basis.down[0], 4)
    assert cache.low_keys[0].units[1].codes[0, 0].tolist() == codes.tolist()
    low = codes * float(scale) + float(zero)
    assert np.allclose(cache.dense_keys(0)[1], turned(low @ key_basis.up[0], 5))  # its own position, not its place
    cache.event("step", keys[:, 6:], values[:, 6:], queries[:, 6:])
    assert cache.positions == [[0, 5, 6], [3, 4, 6]] and cache.weights[1].shape == (1, 3)
    assert (cache.counts()["keys"]["codes"], cache.counts()["values"]["codes"]) == (2 * 3 * 4, 2 * 3 * 3)


# ----------------------------------------------------------------------------------------------------- kvsharer


def test_chains_resolve_whatever_their_order():
    pairs = [(5, 3), (3, 1), (4, 3), (1, 0), (7, 6)]
    for some in itertools.permutations(pairs):
        assert naive_kvsharer.resolve(some) == {1: 0, 3: 0, 4: 0, 5: 0, 7: 6}
    assert naive_kvsharer.readers(dict(pairs), 0) == [0, 1, 3, 4, 5] and naive_kvsharer.readers({}, 2) == [2]
    assert naive_kvsharer.holders(dict(pairs), 8) == [0, 2, 6]
    with pytest.raises(ValueError, match="later"):
        naive_kvsharer.resolve({1: 2})
    assert [naive_kvsharer.num_shared(drop, 6) for drop in (0, 0.25, 0.24, 0.5)] == [0, 2, 1, 3]  # 1.5 is 2
    assert naive_kvsharer.num_shared(0.29, 50) == 15 and math.floor(0.29 * 50 + 0.5) == 14  # 14.5, that binary puts below


def test_distances_by_hand():
    keys = [np.zeros((1, 2, 2)), np.array([[[3, 4], [0, 0]]]), np.array([[[3, 4], [5, 12]]])]
    values = [np.zeros((1, 2, 2)), np.zeros((1, 2, 2)), np.array([[[0, 1], [0, 0]]])]
    flat = naive_kvsharer.distances(keys, values)
    assert flat == {(1, 0): 2.5, (2, 0): pytest.approx((math.sqrt(194) + 1) / 2), (2, 1): 7}
    assert naive_kvsharer.distances(keys, values, "tokens") == {(1, 0): 1.25, (2, 0): (9 + 0.5) / 2, (2, 1): (6.5 + 0.5) / 2}
    texts = [[np.array([[[1.0, 2]]])], [np.array([[[3.0, 6]]])]]
    assert np.array_equal(naive_kvsharer.averages(texts)[0], [[[2, 4]]])
    assert (2, 0) not in naive_kvsharer.distances([*keys[:2], np.zeros((2, 2, 2))], [*values[:2], np.zeros((2, 2, 2))])


def test_pairs_in_order():
    apart = {(1, 0): 1, (2, 0): 4, (2, 1): 5, (3, 0): 5, (3, 1): 5, (3, 2): 1}
    assert naive_kvsharer.ordered(apart) == [(2, 1), (3, 0), (3, 1), (2, 0), (1, 0), (3, 2)]
    assert naive_kvsharer.ordered(apart, "similar") == [(1, 0), (3, 2), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert naive_kvsharer.ordered(apart, kinds=["a", "b", "a", "b"]) == [(3, 1), (2, 0)]


def test_the_walk_by_hand():
    tried = []

    def similarity(sources):
        tried.append(sources)
        return 0.5 if sources.get(5) == 3 else 0.9  # not above a threshold of a half

    pairs = [(4, 2), (5, 3), (4, 1), (2, 0), (5, 4), (3, 0), (1, 0)]
    assert naive_kvsharer.walk(pairs, similarity, 6) == [(4, 2), (2, 0), (5, 4)]
    assert tried == [{4: 2}, {4: 2, 5: 3}, {4: 0, 2: 0}, {4: 0, 2: 0, 5: 0}]  # (4, 1): 4 is a target; after three it ends
    assert naive_kvsharer.walk(pairs, lambda _: 0.4, 6) == []
    assert len(naive_kvsharer.walk(pairs, similarity, 4)) == 2
    assert naive_kvsharer.cosine([[3, 4]], [[4, 3]]) == pytest.approx(0.96)
    assert naive_kvsharer.mean_cosine([[1, 0], [3, 4]], [[2, 0], [4, 3]]) == pytest.approx(0.98)


def test_targets_attend_over_their_source():
    queries, keys, values = (
        [drawn(*shape, seed=3 * i + j) for i in range(4)] for j, shape in enumerate([(4, 2, 3), *[(2, 5, 3)] * 2])
    )
    outputs = naive_kvsharer.shared_attention(queries, keys, values, {3: 2, 2: 0})
    for layer, source in enumerate([0, 1, 0, 0]):
        assert np.array_equal(outputs[layer], attention(queries[layer], keys[source], values[source])[0])
    assert np.array_equal(
        naive_kvsharer.shared_attention(queries, keys, values, {}, 1.0)[3], attention(queries[3], keys[3], values[3], 1.0)[0]
    )


def test_readers_are_members_of_the_group():
    parts = [np.array([0, 1, 2, 3]), np.array([10, 11, 12, 13])]  # two KV heads of two
    together = naive_kvsharer.joined(parts, 2)
    assert together.tolist() == [0, 1, 10, 11, 2, 3, 12, 13]
    assert [part.tolist() for part in naive_kvsharer.parted(together, 2, 2)] == [part.tolist() for part in parts]


@pytest.mark.parametrize(
    ("group", "expected"), [("mean", [0.55, 0.7]), ("max", [1, 1.25]), ("sum", [1.1, 1.4]), ("first", [0.5, 0.75])]
)
def test_joint_mass_by_hand(group, expected):
    source = [[[0.25, 0], [0.25, 0.75]]]  # one query head, two queries; not all of a row is needed
    target = [[[0.5, 0.1], [0.1, 0.55]]]
    if group == "max":
        target = [[[0.75, 0.5], [0.1, 0.55]]]
    assert np.allclose(naive_kvsharer.joint_mass([source, target], 1, group), [expected])


def test_a_shared_store_waits_for_its_last_reader():
    """Three tokens, a budget of two: by the source alone the last one leaves, by all its readers the one before it."""
    tokens = 60 * np.eye(3)[None]
    source, target = tokens[:, [0, 1, 0]] / 60, tokens[:, [0, 0, 2]] / 60  # a query looks at the key of its channel
    for queries, mass in [([source], {0: 2, 1: 1}), ([source, target, target], {0: 2, 2: 2 / 3})]:
        store = NaiveSharedStore(2, heavy_share=1.0, scaling=1.0)
        outputs = store.event(tokens, np.eye(3)[None], queries)
        assert store.held == [list(mass)] and store.mass == [pytest.approx(mass)] and store.read == [3]
    assert len(outputs) == 3 and np.allclose(outputs[1][0], [[1, 0, 0], [1, 0, 0], [0, 0, 1]])
    # The token that leaves after this step was read by all; what left before was read by none.
    outputs = store.event(tokens[:, :1], np.array([[[0, 1, 0]]]), [np.zeros((1, 1, 3))] * 3)
    assert np.allclose(outputs, [[1 / 3, 1 / 3, 1 / 3]]) and store.read == [3] and store.held == [[0, 2]]
    store = NaiveSharedStore(2, heavy_share=1.0, scaling=1.0)  # of equal ones the newer stays
    store.event(tokens, np.eye(3)[None], [tokens[:, [0, 1, 2]] / 60])
    assert store.held == [[1, 2]] and store.mass[0][1] == store.mass[0][2] == 1


@pytest.mark.parametrize("group", ["mean", "max", "sum", "first"])
def test_a_shared_store_is_one_layer_of_a_larger_group(group):
    keys, values = drawn(2, 14, 4), drawn(2, 14, 4, seed=1)
    queries = [2 * drawn(4, 14, 4, seed=2 + reader) for reader in range(3)]
    segments = [naive.Segment("prompt", 9, 4), naive.Segment("step", 3, 4), naive.Segment("prompt", 2, 4)]
    joined = naive_kvsharer.joined(queries, 2)
    expected = naive.replay(joined, keys, values, segments, "h2o", {"group": group})
    store, start = NaiveSharedStore(4, group=group, heads=2), 0
    for n in (9, 1, 1, 1, 2):
        now = slice(start, start + n)
        outputs = store.event(keys[:, now], values[:, now], [asked[:, now] for asked in queries])
        start += n
        assert store.held == expected.kept[start - 1]
        for part, out in zip(naive_kvsharer.parted(expected.out[:, now], 2, 3), outputs, strict=True):
            assert np.allclose(part, out)
    alone = naive.replay(queries[0], keys, values, segments, "h2o", {"group": group})
    assert (alone.kept[-1] == expected.kept[-1]) == (group == "first")
