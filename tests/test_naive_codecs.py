"""The slow references of the codecs, against numbers worked out by hand."""

import math

import numpy as np
import pytest

import naive_decoquant
import naive_qaq
from naive_codecs import (
    CODECS,
    HALF_MAX,
    NaiveCodecCache,
    affine_decode,
    affine_group,
    encode_unit,
    half_above,
    half_below,
    int_residual,
    pack_bits,
    sealed,
)
from naive_qaq import NaiveQaqCache, Settings, decode_group, encode_group

ULP, TINY = 2**-10, 2**-24  # of halves from 1 to 2; the smallest half


# ------------------------------------------------------------------------------------------------ the quantiser


@pytest.mark.parametrize(
    ("x", "below", "above"),
    [
        (0, 0, 0),
        (1, 1, 1),
        (1 + ULP / 2, 1, 1 + ULP),
        (1 + ULP * 0.99, 1, 1 + ULP),
        (-1 - ULP / 100, -1 - ULP, -1),
        (1e-9, 0, TINY),
        (-1e-9, -TINY, 0),
        (2049, 2048, 2050),
        (65503, 65472, HALF_MAX),
        (1e6, HALF_MAX, HALF_MAX),
        (-math.inf, -HALF_MAX, -HALF_MAX),
    ],
)
def test_halves_below_and_above(x, below, above):
    assert (half_below(x), half_above(x)) == (below, above)
    assert half_below(x).dtype == half_above(x).dtype == np.float16


def test_halves_are_the_nearest_on_their_side():
    rng = np.random.default_rng(0)
    for x in np.float32(rng.standard_normal(200) * 10.0 ** rng.integers(-7, 4, 200)):
        low, high = half_below(x), half_above(x)
        assert float(low) <= x <= float(high)
        assert high == low or np.nextafter(low, np.float16(np.inf)) == high
    with pytest.raises(ValueError, match="NaN"):
        half_above(math.nan)


@pytest.mark.parametrize(
    ("numbers", "bits", "codes", "scale", "zero"),
    [
        ([0.5, 0.5, 0.5], 2, [0, 0, 0], 1, 0.5),  # constant: nothing to scale
        ([-7], 4, [0], 1, -7),
        ([0, 1, 2, 3], 2, [0, 1, 2, 3], 1, 0),
        ([0, 1.5, 0.5, 2.5, 3], 2, [0, 2, 0, 2, 3], 1, 0),  # halves to even
        ([0, 1, 2, 30], 4, [0, 0, 1, 15], 2, 0),  # one outlier coarsens all
        ([-1, 0, 6], 3, [0, 1, 7], 1, -1),
        ([0, 1], 2, [0, 3], 0.33349609375, 0),  # a third, rounded up
        ([1, 2.2], 1, [0, 1], 1.2001953125, 1),
        ([0, 65535], 16, [0, 65535], 1, 0),
        ([1e6, 2e6], 1, [1, 1], HALF_MAX, HALF_MAX),  # beyond the halves: clamped, not infinite
    ],
)
def test_groups_by_hand(numbers, bits, codes, scale, zero):
    found = affine_group(numbers, bits)
    assert (found[0].tolist(), float(found[1]), float(found[2])) == (codes, scale, zero)


def test_a_constant_that_is_no_half_stays_within_a_step():
    x = np.float32(1 / 3)  # between the halves 0.333251953125 and 0.33349609375
    codes, scale, zero = affine_group([x], 2)
    assert zero == np.float16(0.333251953125) and scale == half_above((x - np.float32(zero)) / np.float32(3))
    assert codes.tolist() == [3]
    assert abs(affine_decode(codes, scale, zero)[0] - x) <= float(scale) / 2


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_errors_are_at_most_half_a_scale(bits, kind):
    rng = np.random.default_rng(0)
    for size, spread, middle in [(1, 1, 0), (5, 1e-3, 100), (32, 10, -3), (7, 300, 0), (16, 1e-6, 0)]:
        x = kind(rng.standard_normal(size) * spread + middle)
        codes, scale, zero = affine_group(x, bits)
        decoded = affine_decode(codes, scale, zero, kind)
        assert decoded.dtype == kind
        assert set(codes) <= set(range(2**bits))
        slack = 4 * np.finfo(kind).eps * max(abs(x)) + float(scale) * 2**bits * np.finfo(kind).eps
        assert max(abs(decoded - x)) <= float(scale) / 2 + slack
        if bits == 16:
            assert max(abs(decoded - x)) <= 1e-5 * (max(x) - float(zero)) + TINY / 2 + slack


def test_bits_that_no_codec_has():
    for bits in (0, 9, 17):
        with pytest.raises(ValueError, match="bits"):
            affine_group([1, 2], bits)


@pytest.mark.parametrize(
    ("codes", "bits", "stream"),
    [
        ([5, 1, 7], 3, "cd 01"),  # 101, 001, 111 from the right: 1 1100 1101
        ([1, 2, 3, 4, 5, 6, 7, 0], 3, "d1 58 1f"),  # 0001 1111 0101 1000 1101 0001
        ([3, 0, 1, 2, 3], 2, "93 03"),
        ([1, 0, 0, 0, 0, 0, 0, 0, 1], 1, "01 01"),
        ([0xA, 0x5, 0xF], 4, "5a 0f"),
        ([0x1234], 16, "34 12"),
    ],
)
def test_packing_by_hand(codes, bits, stream):
    assert pack_bits(codes, bits) == bytes.fromhex(stream)


def test_units_by_hand():
    x = np.array([[[0, 10, 5], [3, 13, 5]], [[0, 0, 0], [6, 0, -3]]])  # 2 heads, 2 tokens, 3 channels
    unit = encode_unit(x, 2, "channel", 2)
    assert unit.codes.tolist() == [[[0, 0, 0], [3, 3, 0]], [[0, 0, 3], [3, 0, 0]]]
    assert unit.scales.tolist() == [[1, 1, 1], [2, 1, 1]] and unit.zeros.tolist() == [[0, 10, 5], [0, 0, -3]]
    assert np.array_equal(unit.decoded, x)
    assert unit.streams == [pack_bits([0, 0, 0, 3, 3, 0], 2), pack_bits([0, 0, 3, 3, 0, 0], 2)]  # token by token
    unit = encode_unit(x[:, 1:], 2, "token", 2)  # channels 0 and 1 share a scale, channel 2 is alone
    assert unit.codes.tolist() == [[[0, 3, 0]], [[3, 0, 0]]]
    assert unit.scales.tolist() == [[half_above(10 / 3), 1], [2, 1]] and unit.zeros.tolist() == [[3, 5], [0, -3]]


def test_the_last_group_of_a_token_may_be_shorter():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 1, 80))
    unit = encode_unit(x, 4, "token", 32)
    assert unit.scales.shape == (1, 3)
    assert np.array_equal(unit.codes[0, 0, 64:], affine_group(x[0, 0, 64:], 4)[0])


# ---------------------------------------------------------------------------------------------------- schedules

STEPS = [("step", 1)] * 6


def test_flush_by_hand():
    units = sealed("channel", 2, 4, [("turn", 5), *STEPS])
    assert units == [[(0, 2), (2, 4)], [], [], [(4, 6), (6, 8)], [], [], []]
    assert sealed("channel", 2, 4, [("turn", 11)]) == [[(0, 2), (2, 4), (4, 6), (6, 8)]]
    assert sealed("channel", 2, 4, [("turn", 3), ("turn", 8)]) == [[], [(0, 2), (2, 4), (4, 6), (6, 8)]]


def test_slide_by_hand():
    units = sealed("token", 2, 4, [("turn", 5), *STEPS])
    assert units == [[(t, t + 1)] for t in range(7)]
    assert sealed("token", 2, 4, [("turn", 3), ("step", 1), ("step", 1)]) == [[], [], [(0, 1)]]
    assert sealed("token", 2, 0, [("turn", 2), ("step", 1)]) == [[(0, 1), (1, 2)], [(2, 3)]]


def test_residuals():
    with pytest.raises(ValueError, match="multiple"):
        sealed("channel", 2, 3, [("turn", 5)])
    assert [int_residual("channel", 32, r) for r in (0, 32, 33)] == [32, 32, 64]
    assert [int_residual("token", 32, r) for r in (0, 33)] == [0, 33]


def test_kivi_keeps_the_papers_tokens_in_full():
    kivi = CODECS["kivi2"]
    events = [("turn", 300), ("step", 1)]
    keys = [unit for event in sealed(kivi["key_axis"], 32, kivi["residual"], events) for unit in event]
    values = [unit for event in sealed(kivi["value_axis"], 32, kivi["residual"], events) for unit in event]
    assert (len(keys), keys[-1], len(values)) == (8, (224, 256), 173)


# -------------------------------------------------------------------------------------------------------- cache


def test_a_token_attends_before_it_is_encoded():
    cache = NaiveCodecCache(1, 3, 0, "token", "token")
    keys, values, query = np.zeros((1, 1, 3)), [[[0, 0.25, 1]]], np.zeros((2, 1, 3))  # decoded: 0, 0, 1
    for kind, middle in [("turn", 0.25), ("step", 0.125), ("step", 0.25 / 3)]:
        out = cache.event(kind, keys, values, query)
        assert np.allclose(out, [[[0, middle, 1]]] * 2)
    assert cache.values.held().tolist() == [[[0, 0, 1]] * 3] and cache.values.full_positions == []


def test_queries_of_a_turn_see_no_later_token_and_read_their_kv_head():
    cache = NaiveCodecCache(16, 2, 2, "token", "token", scaling=1.0)
    keys = [[[0, math.log(3)], [0, 0]], [[0, 0], [0, 0]]]
    values = [[[4, 0], [0, 4]], [[8, 0], [0, 8]]]
    out = cache.event("turn", keys, values, np.ones((4, 2, 2)))
    assert np.allclose(out[:2], [[[4, 0], [3, 1]]] * 2) and np.allclose(out[2:], [[[8, 0], [4, 4]]] * 2)


@pytest.mark.parametrize(("key_axis", "value_axis"), [("channel", "token"), ("token", "channel"), ("channel", "channel")])
def test_what_is_encoded_stays(key_axis, value_axis):
    rng = np.random.default_rng(0)
    cache = NaiveCodecCache(2, 3, 3, key_axis, value_axis)
    events = [("turn", 5), *STEPS]
    x = np.float32(rng.standard_normal((2, 11, 4)))
    units = {axis: sealed(axis, 3, 3, events) for axis in ("channel", "token")}
    done, seen, before = {"channel": 0, "token": 0}, 0, None
    for i, (kind, n) in enumerate(events):
        cache.event(kind, x[:, seen : seen + n], -x[:, seen : seen + n])
        seen += n
        for side, axis, exact in ((cache.keys, key_axis, x), (cache.values, value_axis, -x)):
            count = max([done[axis], *[stop for _, stop in units[axis][i]]])
            assert side.full_positions == list(range(count, seen))
            assert np.array_equal(side.held()[:, count:], exact[:, count:seen])
            assert side.stored("codes").shape == (2, count, 4)
            assert side.stored("scales").shape == ((2, count // 3, 4) if axis == "channel" else (2, count, 2))
        for axis in done:
            done[axis] = max([done[axis], *[stop for _, stop in units[axis][i]]])
        if before is not None:
            assert np.array_equal(cache.keys.held()[:, : before.shape[1]], before)
        before = cache.keys.held()[:, : cache.keys.num_encoded]
    assert np.max(np.abs(cache.keys.held() - x)) > 0.01


# ---------------------------------------------------------------------------------------------------- decoquant


def test_decoquant_factors_by_hand():
    left, small = naive_decoquant.factors([[3, 4, 6, 8]], 2)  # (1, 2) times (3, 4): one singular value, 5 sqrt(5)
    root = math.sqrt(5 * math.sqrt(5))
    assert np.allclose(small, [[0.6 * root, 0.8 * root], [0, 0]], atol=1e-6)
    assert np.allclose(left, np.outer([1, 2], [root / math.sqrt(5), 0]), atol=1e-6)
    assert np.all(small[1] == 0) and np.all(left[:, 1] == 0)
    left, small = naive_decoquant.factors([[-1, 0, 0, -4]], 2)  # already diagonal: 4 comes first, signs are in T_L
    assert np.allclose(small, [[0, 2], [1, 0]]) and np.allclose(left, [[0, -1], [-2, 0]])

    for smallest, stays in [(1e-4, True), (1e-7, False)]:
        assert np.any(naive_decoquant.factors([[1, 0, 0, smallest]], 2)[1][1]) == stays


@pytest.mark.parametrize("j", [1, 2, 8, 16])
def test_decoquant_factors_multiply_to_the_block(j):
    rng = np.random.default_rng(0)
    block = np.float32(rng.standard_normal((6, 16)) * rng.uniform(0.1, 5, 16))
    left, small = naive_decoquant.factors(block, j)
    assert left.dtype == small.dtype == np.float32
    assert np.max(np.abs((left @ small).reshape(6, 16) - block)) < 1e-5
    gram = small.astype(float) @ small.T
    assert np.allclose(gram, np.diag(np.diag(gram)), atol=1e-4) and np.all(np.diff(np.diag(gram)) <= 0)
    assert all(row[np.argmax(np.abs(row))] > 0 for row in small if np.any(row))


def test_decoquant_quantises_rows_by_hand():
    codes, deltas = naive_decoquant.quantise([[7, -3.5, 0.4, 0.5], [0, 0, 0, 0], [0, -1, 0.4, 0.6]], 4)
    assert codes.tolist() == [[14, 3, 7, 7], [7] * 4, [7, 0, 10, 11]]
    assert deltas.tolist() == [1, 1, half_above(np.float32(1) / np.float32(7))]
    codes, deltas = naive_decoquant.quantise([[3, -1.6, 1.4, 0]], 2)
    assert (codes.tolist(), deltas.tolist()) == ([[2, 0, 1, 1]], [3])
    small = [[1, 1], [0, 0.1]]  # 0.1 is no half
    decoded = naive_decoquant.decode(codes, deltas, small, 2)
    assert np.allclose(decoded, [[3, 3 - 3 * float(np.float16(0.1)), 0, 0]], atol=1e-7, rtol=0)


def test_decoquant_of_one_channel_is_symmetric_rounding_of_tokens():
    block = np.float32([[9, -9, 9, 3], [2, 0, 0, 0]])  # its norm is 16: T_S = 4 exactly
    left, small = naive_decoquant.factors(block, 1)
    assert small.tolist() == [[4]]
    codes, deltas = naive_decoquant.quantise(left.reshape(2, 4), 4)
    plain = [half_above(np.float32(9) / np.float32(7)), half_above(np.float32(2) / np.float32(7))]
    assert (4 * deltas).tolist() == plain
    assert codes.tolist() == [[14, 0, 14, 9], [14, 7, 7, 7]]
    decoded = naive_decoquant.roundtrip(block[None], 4, 1)[0]
    expected = [[code * float(delta) for code in row] for row, delta in zip([[7, -7, 7, 2], [7, 0, 0, 0]], plain, strict=True)]
    assert np.array_equal(decoded, np.float32(expected))


def test_decoquant_puts_heads_side_by_side():
    x = np.arange(12).reshape(2, 2, 3)
    block = naive_decoquant.as_block(x)
    assert block.tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert np.array_equal(naive_decoquant.from_block(block, 2), x)
    with pytest.raises(ValueError, match="divide"):
        naive_decoquant.factors(block, 4)


def test_decoquant_more_bits_less_error():
    rng = np.random.default_rng(0)
    x = np.float32(rng.standard_normal((2, 12, 16)))
    errors = [np.max(np.abs(naive_decoquant.roundtrip(x, bits, 16) - x)) for bits in (2, 4, 8)]
    assert errors[0] > 2 * errors[1] > 8 * errors[2] and errors[2] < 0.1
    assert not np.any(naive_decoquant.roundtrip(np.zeros((1, 2, 16)), 4, 16))


def test_decoquant_blocks_and_bits():
    events = [("turn", 3), *[("step", 1)] * 5, ("turn", 2), ("step", 1)]
    assert naive_decoquant.blocks(4, events) == [(0, 3), None, None, None, (3, 7), None, (7, 10), None]
    codes, deltas, small = 10 * 32 * 4, 10 * 16, 16 * 16 * 16
    assert naive_decoquant.bits_per_element(4, 10, 32) == pytest.approx((codes + deltas + small) / (10 * 32))


# ---------------------------------------------------------------------------------------------------------- qaq


def test_qaq_thresholds():
    assert naive_qaq.thresholds([9, 1, 8, 2, 7, 3, 6, 4, 5, 0], 0.4) == (2, 7)
    assert naive_qaq.thresholds(list(range(10)), 0.39) == (1, 8)
    assert naive_qaq.thresholds(list(range(100)), 0.58)[0] == 29  # 0.58 / 2 * 100 is a little less in binary
    assert naive_qaq.thresholds([3, 3, 3, 1], 0.5) == (3, 3)
    assert naive_qaq.outlier_places([3, 2.9, 3.1, 3], 3, 3) == [1, 2]


def test_qaq_groups_by_hand():
    group = encode_group([0, 100, 1, 3, -50], [1, 4], 2)
    assert (group.codes, group.scale, group.zero, group.outliers) == ([0, 0, 1, 3, 0], 1, 0, {1: 100, 4: -50})
    assert decode_group(group).tolist() == [0, 100, 1, 3, -50]
    group = encode_group([0, 100, 1, 3, -50], [1, 4], 0)
    assert (group.codes, group.zero) == ([], 1.5) and decode_group(group).tolist() == [1.5, 100, 1.5, 1.5, -50]
    assert encode_group([1, 1 + 1.5 * ULP], [], 0).zero == 1 + ULP  # of 1 + 0.75 ULP: the nearest half, not the one below
    assert decode_group(encode_group([4, 5], [0, 1], 2)).tolist() == [4, 5]


def test_qaq_bits_of_values_by_hand():
    paper, code = Settings(bits_min=0, window=1), Settings(bits_min=0, window=1, formula="code")
    # T = 4, S = 1/2: sigma = 3 / (2 * 1/2) = 3
    assert naive_qaq.wanted("values", 2 * math.sqrt(3) * 3 * 2**1.5, 0.5, 4, paper) == pytest.approx(1.5)
    # e = sqrt(3) * 3 / (1/2) = 6 sqrt(3)
    assert naive_qaq.wanted("values", 12 * math.sqrt(3) * 2.5, 0.5, 4, code) == pytest.approx(math.log2(3.5))
    first = [naive_qaq.wanted("values", 5, 0.5, seen, paper) for seen in (1, 2, 3)]
    assert first[0] == first[1] < first[2]
    bits = [naive_qaq.token_bits("values", 6 * math.sqrt(3) * 2**x, 0.5, 0, 4, paper) for x in (-3, 0.5, 1.5, 3.5, 9)]
    assert bits == [0, 1, 2, 4, 4]


def test_qaq_bits_of_keys_by_hand():
    sum_of_logs = math.log(64 / 3 * 9 + 1)  # T = 4, error 3; with this q_norm sigma is 1 and e is sqrt(12)
    paper = Settings(bits_max=8, window=1, q_norm=sum_of_logs)
    code = Settings(bits_max=8, window=1, q_norm=sum_of_logs, formula="code")
    assert naive_qaq.wanted("keys", 2 * math.sqrt(3) * 2**2.5, 0.1, 4, paper) == pytest.approx(2.5)
    assert naive_qaq.wanted("keys", 2 * math.sqrt(12) * 10, 0.1, 4, code) == pytest.approx(math.log2(11))
    assert naive_qaq.wanted("keys", 5, 0, 4, paper) == naive_qaq.wanted("keys", 5, 1, 4, paper) > -math.inf
    assert naive_qaq.token_bits("keys", 2 * math.sqrt(12) * 10, 0.1, 0, 4, code) == 4


def test_qaq_bits_where_the_formula_has_none():
    s = Settings(bits_min=1, bits_max=4, window=3)
    assert naive_qaq.token_bits("values", 1e6, 0, 0, 10, s) == 1
    assert naive_qaq.token_bits("keys", 0, 0.5, 0, 10, s) == 1
    assert [naive_qaq.token_bits("keys", 0, 0, t, 10, s) for t in (7, 8, 9)] == [1, 4, 4]


@pytest.mark.parametrize("formula", ["paper", "code"])
def test_qaq_more_attention_never_fewer_bits(formula):
    s = Settings(bits_min=0, bits_max=8, window=1, formula=formula)
    for spread, seen in [(0.1, 5), (2, 40), (30, 1000)]:
        bits = [naive_qaq.token_bits("values", spread, share, 0, seen, s) for share in np.linspace(0, 1, 60)]
        assert bits == sorted(bits) and bits[0] == 0
    assert bits[-1] > 4


def test_qaq_importance_is_the_largest_recent_weight():
    rows = [np.array([[0.5, 0.5], [0.1, 0.9]]), np.array([[0.2, 0.2, 0.6], [0.8, 0.1, 0.1]])]
    assert naive_qaq.shares(rows, 3, 1, "head").tolist() == [[0.8, 0.9, 0.6]]
    assert naive_qaq.shares(rows, 3, 2, "head").tolist() == [[0.5, 0.5, 0.6], [0.8, 0.9, 0.1]]
    assert naive_qaq.shares(rows, 3, 2, "layer").tolist() == [[0.8, 0.9, 0.6]]
    assert naive_qaq.shares([np.array([[0.1], [0.2], [0.3], [0.4]])], 1, 2, "head").tolist() == [[0.2], [0.4]]


def test_qaq_demotes_what_it_holds():
    error = 7 * 2 / (2 * math.sqrt(3) * 2**2.5)  # 2.5 bits at T = 4 with all of the attention, 1.5 with half of it
    side = naive_qaq.Side("values", Settings(window=1, outliers=0.0, error_values=error))
    side.encode([[[0, 1.3, 7]]], np.ones((1, 4)), 4)
    assert side.held(1).tolist() == [[[0, 1, 7]]]
    side.revise(np.full((1, 4), 0.5), 4)  # 1.3 would be nearer to the second of four steps, 1 is nearer to the first
    assert side.bits().tolist() == [[2]] and side.groups[0][0].codes == [0, 0, 3]


def qaq_story(kind="step", **settings):
    """Bits and decoded values of token 0 after a turn (that looks at it), a step (that looks away), a step (at it again)."""
    error = 7 * math.sqrt(2) / (2 * math.sqrt(3) * 2**2.3)  # 2.3 bits at T = 2, 2.6 at 3, 2.8 at 4, with all of the attention
    cache = NaiveQaqCache(Settings(window=1, outliers=0.0, error_values=error, **settings), scaling=1.0)
    value, at_first, at_second = [0, 3, 7], [[[1, 0]]], [[[0, 1]]]
    cache.event("turn", [[[60, 0], [0, 60]]], [[value, value]], [[[0, 1], [1, 0]]])
    story = [(int(cache.values.bits()[0, 0]), cache.values.held(1)[0, 0].tolist())]
    for query in (at_second, at_first):
        cache.event(kind, [[[0, 0]]], [[value]], query)
        story.append((int(cache.values.bits()[0, 0]), cache.values.held(1)[0, 0].tolist()))
    return story, cache


def test_qaq_demotes_and_promotes():
    assert qaq_story()[0] == qaq_story("turn", dynamic=True)[0] == [(3, [0, 3, 7])] * 3
    assert qaq_story(dynamic=True)[0] == [(3, [0, 3, 7]), (1, [0, 0, 7]), (1, [0, 0, 7])]
    assert qaq_story(dynamic=True, promote=True)[0] == [(3, [0, 3, 7]), (1, [0, 0, 7]), (3, [0, 3, 7])]
    nothing = (0, [3.5, 3.5, 3.5])
    assert qaq_story(dynamic=True, promote=True, bits_min=0)[0][1:] == [nothing, (3, [0, 3, 7])]
    assert qaq_story(dynamic=True, promote=True, bits_min=0, spread="held")[0][1:] == [nothing, nothing]


def test_qaq_attends_to_what_it_holds():
    cache = qaq_story(dynamic=True)[1]
    out = cache.event("step", [[[0, 0]]], [[[7, 7, 7]]], [[[1, 0]]])
    assert np.allclose(out, [[[0, 0, 7]]])


@pytest.mark.parametrize("level", ["head", "layer"])
def test_qaq_levels(level):
    rng = np.random.default_rng(0)
    x = np.float32(rng.standard_normal((2, 12, 8)))
    cache = NaiveQaqCache(Settings(bits_min=8, bits_max=8, outliers=0.1, level=level))
    cache.event("turn", x, 2 * x, rng.standard_normal((4, 12, 8)))
    rows = 2 if level == "head" else 1
    assert cache.keys.bits().shape == (rows, 12)
    outliers = [sum(len(group.outliers) for group in row) for row in cache.keys.groups]
    assert outliers == [2 * math.floor(0.05 * 2 * 12 * 8 / rows)] * rows
    assert 0 < np.max(np.abs(cache.values.held(2) - 2 * x)) < 0.05
    largest = np.unravel_index(np.argmax(x), x.shape)
    assert cache.keys.held(2)[largest] == x[largest]


def test_qaq_newest_tokens_of_a_prompt_have_all_bits():
    rng = np.random.default_rng(0)
    cache = NaiveQaqCache(Settings(q_norm=1e-9, error_values=1e9))
    x = rng.standard_normal((1, 9, 4))
    cache.event("turn", x, x, x)
    cache.event("step", x[:, :1], x[:, :1], x[:, :1])
    assert cache.keys.bits().tolist() == cache.values.bits().tolist() == [[1] * 5 + [4] * 5]
