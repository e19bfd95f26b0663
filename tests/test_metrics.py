"""Statistics against loops, closed forms and published values."""

import json
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from kvlab import metrics
from kvlab.metrics import (
    Difference,
    agreement,
    at_chance,
    compare_records,
    contains,
    exact_match,
    interval,
    make_metric,
    mcnemar,
    normalise,
    paired_difference,
    summarise,
    token_f1,
    wilson,
)


def draw(seed, n):
    """Summed negative log-probabilities and token counts that go with them, of two sides."""
    rng = random.Random(seed)
    tokens = [rng.randint(20, 200) for _ in range(n)]
    base = [t * rng.uniform(2.0, 3.5) for t in tokens]
    return [x + t * rng.gauss(0.05, 0.1) for x, t in zip(base, tokens, strict=True)], base, tokens


class TestInterval:
    @pytest.mark.parametrize(("right", "n"), [(0, 5), (5, 5), (3, 10), (81, 263), (1, 2)])
    def test_wilson_is_where_the_score_test_turns(self, right, n):
        """Its ends are the shares under which the one that was seen lies Z95 standard deviations off."""
        share = right / n
        for end in wilson(share, n):
            assert 0 <= end <= 1
            if end not in (0, 1):
                assert abs(share - end) == pytest.approx(metrics.Z95 * math.sqrt(end * (1 - end) / n))
        assert wilson(1 - share, n) == pytest.approx(tuple(1 - end for end in reversed(wilson(share, n))))

    @pytest.mark.parametrize("values", [[1, 1, 1], [0, 1, 1, 0, 1], [0, 0]])
    def test_proportions_are_known_by_their_spread(self, values):
        records = [{"id": str(number), "values": {"x": value, "y": 0.9 * value}} for number, value in enumerate(values)]
        share = sum(values) / len(values)
        assert interval(make_metric(records, "x", "mean", "higher").as_dict()) == wilson(share, len(values))
        scaled = make_metric(records, "y", "mean", "higher")
        if share:
            reach = metrics.Z95 * scaled.stderr
            assert interval(scaled.as_dict()) == pytest.approx((scaled.value - reach, scaled.value + reach))

    def test_none_without_a_standard_error(self):
        assert interval({}) == interval({"value": 1.0, "stderr": None, "n": 1, "kind": "mean"}) == (None, None)


class TestSummarise:
    def test_mean_in_closed_form(self):
        value, stderr = summarise("mean", [1.0, 2.0, 4.0])
        assert value == pytest.approx(7 / 3)
        assert stderr == pytest.approx(math.sqrt((16 / 9 + 1 / 9 + 25 / 9) / 2 / 3))

    def test_share_of_ones(self):
        value, stderr = summarise("mean", [1] * 15 + [0] * 5)
        assert value == 0.75
        assert stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 19))

    def test_perplexity_of_equal_lengths_is_the_mean_rescaled(self):
        """With equal weights the ratio estimator is a mean, whose error the delta method multiplies by exp(mean)."""
        per_token = [2.0, 2.5, 3.5, 2.25]
        mean, error = summarise("mean", per_token)
        value, stderr = summarise("perplexity", [10 * x for x in per_token], [10] * 4)
        assert value == pytest.approx(math.exp(mean))
        assert stderr == pytest.approx(math.exp(mean) * error)

    def test_perplexity_by_hand(self):
        value, stderr = summarise("perplexity", [4.0, 3.0], [1, 3])  # R = 7/4; residuals 9/4, -9/4
        assert value == pytest.approx(math.exp(1.75))
        assert stderr == pytest.approx(math.exp(1.75) * math.sqrt(2 * 2 * (9 / 4) ** 2) / 4)

    def test_error_is_that_of_repeated_experiments(self):
        """The delta method's error is the spread of the perplexity over many draws of the samples."""
        rng = np.random.default_rng(3)
        values, errors = [], []
        for _ in range(2000):
            tokens = rng.integers(50, 200, size=60)
            value, stderr = summarise("perplexity", tokens * rng.normal(2.5, 0.3, size=60), tokens)
            values.append(value)
            errors.append(stderr)
        assert np.mean(errors) == pytest.approx(np.std(values), rel=0.06)

    def test_one_sample_has_no_error(self):
        assert summarise("mean", [0.3]) == (0.3, None)
        assert summarise("perplexity", [4.0], [2])[1] is None

    @pytest.mark.parametrize(
        ("kind", "values", "weights", "message"),
        [
            ("mean", [], None, "at least one sample"),
            ("median", [1.0], None, "there are: mean, perplexity"),
            ("perplexty", [1.0], [1], "did you mean perplexity"),
            ("perplexity", [1.0], None, "needs weights"),
            ("mean", [1.0], [1.0], "takes no weights"),
            ("perplexity", [1.0, 2.0], [1.0], "2 values and 1 weights"),
            ("perplexity", [1.0, 2.0], [1.0, 0.0], "above 0"),
        ],
    )
    def test_refused(self, kind, values, weights, message):
        with pytest.raises(ValueError, match=message):
            summarise(kind, values, weights)

    def test_overflow_is_inf(self):
        assert summarise("perplexity", [1e6], [1])[0] == math.inf


class TestMetric:
    RECORDS = ({"id": "a", "values": {"nll": 30.0, "tokens": 10}}, {"id": "b", "values": {"nll": 20.0, "tokens": 10}})

    def test_from_records(self):
        metric = make_metric(self.RECORDS, of="nll", kind="perplexity", better="lower", weight="tokens", chance=500.0)
        assert metric.value == pytest.approx(math.exp(2.5))
        assert json.loads(json.dumps(metric.as_dict())) == {
            **{"value": metric.value, "stderr": metric.stderr, "n": 2, "kind": "perplexity", "better": "lower"},
            **{"of": "nll", "weight": "tokens", "chance": 500.0, "some": False},
        }

    def test_a_value_that_is_not_there(self):
        with pytest.raises(
            ValueError, match=r"sample 'a' has no value 'token' \(did you mean tokens\?\); there are: nll, tokens"
        ):
            make_metric(self.RECORDS, of="nll", kind="perplexity", better="lower", weight="token")

    def test_better_is_checked(self):
        with pytest.raises(ValueError, match="'higher' or 'lower'"):
            make_metric(self.RECORDS, of="nll", kind="mean", better="less")

    @pytest.mark.parametrize(
        ("value", "stderr", "better", "chance", "expected"),
        [
            (0.35, 0.06, "higher", 0.25, True),  # 0.35 - 0.1176 is below chance
            (0.40, 0.06, "higher", 0.25, False),
            (0.10, 0.01, "higher", 0.25, True),  # worse than chance
            (90.0, 4.0, "lower", 100.0, False),
            (93.0, 4.0, "lower", 100.0, True),
            (150.0, 4.0, "lower", 100.0, True),
            (0.0, None, "higher", 0.0, True),
            (0.5, None, "higher", 0.0, False),
            (0.0, 0.0, "higher", None, False),
        ],
    )
    def test_chance(self, value, stderr, better, chance, expected):
        assert at_chance({"value": value, "stderr": stderr, "better": better, "chance": chance}) is expected


class TestPairedDifference:
    def slow(self, kind, ours, base, weights, resamples, seed):
        """The definition, with loops over the same sample numbers."""
        n = len(ours)

        def metric(values, of):
            total = sum(values[i] for i in of)
            return total / len(of) if kind == "mean" else math.exp(total / sum(weights[i] for i in of))

        drawn = np.random.default_rng(seed).integers(0, n, size=(resamples, n)).tolist()
        found = sorted(metric(ours, of) - metric(base, of) for of in drawn)
        ends = []
        for share in (0.025, 0.975):  # linear between order statistics
            place = share * (resamples - 1)
            left = math.floor(place)
            right = min(left + 1, resamples - 1)
            ends.append(found[left] + (place - left) * (found[right] - found[left]))
        return metric(ours, range(n)) - metric(base, range(n)), *ends

    @pytest.mark.parametrize("kind", ["mean", "perplexity"])
    @pytest.mark.parametrize("seed", [0, 7])
    def test_against_loops(self, kind, seed):
        ours, base, tokens = draw(seed, 9)
        weights = (tokens, tokens) if kind == "perplexity" else (None, None)
        got = paired_difference(kind, ours, base, *weights, resamples=400, seed=seed)
        assert got[:3] == pytest.approx(self.slow(kind, ours, base, tokens, 400, seed), rel=1e-9)
        assert got.n == 9

    def test_chunks_change_nothing(self, monkeypatch):
        ours, base, tokens = draw(1, 13)
        whole = paired_difference("perplexity", ours, base, tokens, tokens, resamples=500)
        sizes, inner = [], metrics._differences

        def watched(*args):
            sizes.append(args[-1].size)
            return inner(*args)

        monkeypatch.setattr(metrics, "_CHUNK", 40)  # three resamples at a time, the last chunk smaller
        monkeypatch.setattr(metrics, "_differences", watched)
        assert paired_difference("perplexity", ours, base, tokens, tokens, resamples=500) == whole
        assert max(sizes) <= 40

    def test_interval_is_near_the_normal_one(self):
        rng = np.random.default_rng(5)
        base = rng.normal(size=400)
        ours = base + rng.normal(0.2, 0.5, size=400)
        got = paired_difference("mean", ours, base)
        half = 1.96 * np.std(ours - base, ddof=1) / 20
        assert (got.low, got.high) == pytest.approx((got.value - half, got.value + half), abs=0.006)
        assert not got.within_noise

    def test_pairing_cancels_what_both_sides_share(self):
        hard = np.linspace(0, 100, 50)
        paired = paired_difference("mean", hard + 1 + np.tile([0.1, -0.1], 25), hard)
        assert 0.9 < paired.low < 1 < paired.high < 1.1
        assert paired_difference("mean", hard[::-1] + 1, hard).within_noise  # pairs torn apart

    def test_same_every_time(self):
        ours, base, _ = draw(2, 20)
        assert paired_difference("mean", ours, base) == paired_difference("mean", ours, base)
        assert paired_difference("mean", ours, base) != paired_difference("mean", ours, base, seed=1)

    @pytest.mark.parametrize("kind", ["mean", "perplexity"])
    def test_no_difference_is_exactly_zero(self, kind):
        _, base, tokens = draw(3, 11)
        weights = (tokens, tokens) if kind == "perplexity" else (None, None)
        assert paired_difference(kind, base, base, *weights) == Difference(0.0, 0.0, 0.0, 11)

    def test_equal_sums_of_other_tokens_differ(self):
        assert paired_difference("perplexity", [9.0, 8.0], [9.0, 8.0], [3, 3], [4, 4]).value > 0

    def test_one_sample_has_no_interval(self):
        got = paired_difference("mean", [0.75], [0.5])
        assert got == Difference(0.25, None, None, 1)
        assert got.within_noise

    def test_what_is_no_number_is_noise(self):
        assert paired_difference("mean", [math.nan, 1.0], [0.0, 0.0]).within_noise
        assert paired_difference("perplexity", [1e6, 1e6], [1e6, 2e6], [1, 1], [1, 1]).within_noise

    def test_refused(self):
        with pytest.raises(ValueError, match="2 and 1 samples"):
            paired_difference("mean", [1.0, 2.0], [1.0])
        with pytest.raises(ValueError, match="resamples=0"):
            paired_difference("mean", [1.0, 2.0], [1.0, 3.0], resamples=0)


class TestMcNemar:
    @staticmethod
    def pairs(only_ours, only_base, both=3, neither=2):
        ours = [1] * only_ours + [0] * only_base + [1] * both + [0] * neither
        base = [0] * only_ours + [1] * only_base + [1] * both + [0] * neither
        return ours, base

    @pytest.mark.parametrize(
        ("only_ours", "only_base", "p"),
        [(0, 0, 1.0), (5, 5, 1.0), (1, 0, 1.0), (6, 0, 0.03125), (0, 6, 0.03125), (10, 2, 158 / 4096), (9, 1, 22 / 1024)],
    )
    def test_known(self, only_ours, only_base, p):
        assert mcnemar(*self.pairs(only_ours, only_base)) == pytest.approx(p, rel=1e-9)

    @pytest.mark.parametrize(("only_ours", "only_base"), [(40, 60), (600, 700), (1500, 1400)])
    def test_against_exact_fractions(self, only_ours, only_base):
        n = only_ours + only_base
        tail = sum(math.comb(n, k) for k in range(min(only_ours, only_base) + 1))
        assert mcnemar(*self.pairs(only_ours, only_base)) == pytest.approx(float(min(1, Fraction(2 * tail, 2**n))), rel=1e-8)

    def test_many_samples(self):
        """Near the normal approximation with continuity correction, and no overflow."""
        a, b = 50_500, 49_500
        z = (abs(a - b) - 1) / math.sqrt(a + b)
        assert mcnemar(*self.pairs(a, b)) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=1e-3)
        assert mcnemar(*self.pairs(100_000, 0)) == 0.0

    def test_refused(self):
        with pytest.raises(ValueError, match="0 or 1"):
            mcnemar([0.5, 1], [0, 1])
        with pytest.raises(ValueError, match="1 and 2 samples"):
            mcnemar([1], [0, 1])


class TestRecords:
    @staticmethod
    def record(right, gold=None, trace=None):
        return {"id": "x", "values": {"right": right, **({} if gold is None else {"gold_logprob": gold})}, "trace": trace}

    METRIC = {"kind": "mean", "of": "right"}

    def test_all_fields(self):
        ours = [self.record(1, -2.0, [1, 2]), self.record(0, -3.0, [1, 2]), self.record(0, -3.0, None)]
        base = [self.record(1, -1.0, [1, 3]), self.record(1, -1.0, [1, 2]), self.record(1, None, [4])]
        got = compare_records(self.METRIC, ours, base)
        assert got["delta"].value == pytest.approx(-2 / 3)
        assert got["mcnemar_p"] == pytest.approx(0.5)
        assert (got["gold_logprob"].value, got["gold_logprob"].n) == (-1.5, 2)  # only where both have it
        assert got["agreement"] == pytest.approx(0.75)

    def test_what_is_not_there(self):
        got = compare_records(self.METRIC, [self.record(0.5), self.record(1)], [self.record(1), self.record(1)])
        assert got["delta"].value == -0.25
        assert got["mcnemar_p"] is got["gold_logprob"] is got["agreement"] is None
        assert set(compare_records(self.METRIC, [], []).values()) == {None}


@pytest.mark.parametrize(
    ("trace", "base", "expected"),
    [([], [], 1.0), ([1], [], 0.0), ([], [1, 2], 0.0), ([1, 2, 3, 4], [1, 2, 9, 4], 0.75), ([1, 2], [1, 2, 3, 4], 0.5)],
)
def test_agreement(trace, base, expected):
    assert agreement(trace, base) == expected
    assert agreement(base, trace) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Quick, brown\nfox!", "quick brown fox"),
        ("An apple a day", "apple day"),
        ("“Paris”", "paris"),
        ("theatre", "theatre"),
        ("A.", "a"),  # nothing but an article: kept
        ("+", "+"),
        ("  ", ""),
    ],
)
def test_normalise(text, expected):
    assert normalise(text) == expected


def test_exact_match():
    assert exact_match(" The Eiffel tower. ", ["Louvre", "eiffel tower"]) == 1.0
    assert exact_match("Eiffel", ["eiffel tower"]) == 0.0
    assert exact_match("B", "A") == 0.0
    assert exact_match("A", "A") == 1.0


def test_token_f1():
    assert token_f1("a red red fox", "red fox fox") == pytest.approx(2 / 3)  # red and fox in common, of 3 and 3
    assert token_f1("red fox", ["cat", "the red fox"]) == 1.0
    assert token_f1("one two three", "three four") == pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))
    assert token_f1("", "fox") == token_f1("dog", "fox") == 0.0


@pytest.mark.parametrize(
    ("reply", "answers", "expected"),
    [
        ("It is 42, I think", ["41", "42"], 1.0),
        ("It is 142", "42", 0.0),
        ("It is 421", "42", 0.0),
        ("concatenate", "cat", 0.0),
        ("The cat. The dog.", "the dog", 1.0),
        ("a+b (really)", "a+b", 1.0),
        ("答案是北京市", "北京", 1.0),
        ("", "x", 0.0),
    ],
)
def test_contains(reply, answers, expected):
    assert contains(reply, answers) == expected


def test_answers_are_needed():
    for score in (exact_match, token_f1, contains):
        with pytest.raises(ValueError, match="at least one"):
            score("x", [])
    with pytest.raises(ValueError, match="empty"):
        contains("x", [" "])
