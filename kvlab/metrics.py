"""Statistics over samples: values with standard errors, paired differences with intervals, agreement, match of replies.

Pure functions: no files, no models. Sampling error is over samples (texts, questions), the only thing that is drawn at random.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvlab.hints import did_you_mean

KINDS = ("mean", "perplexity")
"""mean: mean(values). perplexity: exp(sum(values) / sum(weights)), values being summed negative log-probabilities."""

Z95 = 1.96
"""Standard errors on each side of a 95 % interval."""

Array = npt.NDArray[np.float64]

_CHUNK = 1 << 20  # numbers drawn at once by the bootstrap: some tens of MB
_PUNCTUATION = str.maketrans("", "", string.punctuation + "‘’“”´")


@dataclass(frozen=True)
class Metric:
    """A number over samples, and what it was computed of.

    value, stderr  in the metric's own unit; stderr is None below two samples
    n              samples
    kind           one of KINDS
    better         "higher" or "lower"
    of, weight     names in a sample's `values`
    chance         what guessing scores, if that is known
    some           whether only some samples have it, such as those that aren't perturbed
    """

    value: float
    stderr: float | None
    n: int
    kind: str
    better: str
    of: str
    weight: str | None = None
    chance: float | None = None
    some: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return asdict(self)


class Difference(NamedTuple):
    """Ours minus base over n paired samples, with its 95 % interval (None below two samples)."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def within_noise(self) -> bool:
        """Whether the interval fails to exclude zero; so too where there is none."""
        return self.low is None or self.high is None or not (self.low > 0 or self.high < 0)


def summarise(kind: str, values: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> tuple[float, float | None]:
    """Value and standard error of one metric over samples.

    mean        mean of values; stderr is std(ddof=1) / sqrt(n)
    perplexity  exp(R), R = sum(values) / sum(weights): a ratio of sums over samples, which are the units drawn. Delta method:
                stderr = exp(R) * se(R), se(R)^2 = n / (n - 1) * sum((values - R * weights)^2) / sum(weights)^2.
    The standard error is None below two samples. Raises ValueError without samples, or if weights don't fit the kind.
    """
    x, w = _arrays(kind, values, weights)
    n = len(x)
    value = float(_statistic(kind, x.sum(), w.sum()))
    if n < 2:
        return value, None
    ratio = x.sum() / w.sum()
    error = math.sqrt(n / (n - 1) * float(np.square(x - ratio * w).sum())) / float(w.sum())
    return value, error if kind == "mean" else value * error


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a proportion of n samples (Wilson 1927): within 0 and 1, and not of no width where all are alike."""
    square = Z95**2 / n
    centre, reach = share + square / 2, Z95 * math.sqrt(share * (1 - share) / n + square / (4 * n))
    low, high = (centre - reach) / (1 + square), (centre + reach) / (1 + square)
    return low if share > 0 else 0.0, high if share < 1 else 1.0  # exactly, whatever is rounded


def interval(metric: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """95 % interval of a metric (Metric.as_dict): Wilson's where samples are right or wrong, else Z95 standard errors.

    Means of numbers from 0 to 1 vary as much as these allow only where each is 0 or 1, which is how proportions are known.
    (None, None) without a standard error.
    """
    value, stderr, n = (metric.get(name) for name in ("value", "stderr", "n"))
    if value is None or stderr is None or n is None:
        return None, None
    within = metric.get("kind") == "mean" and 0 <= value <= 1
    if within and math.isclose(stderr**2 * (n - 1), value * (1 - value), rel_tol=1e-6, abs_tol=1e-12):
        return wilson(float(value), n)
    return value - Z95 * stderr, value + Z95 * stderr


def make_metric(
    records: Sequence[Mapping[str, Any]],
    of: str,
    kind: str,
    better: str,
    weight: str | None = None,
    chance: float | None = None,
    some: bool = False,
) -> Metric:
    """The metric over sample records, each with its numbers in `values`. ValueError where a sample lacks one.

    some  only those samples count that have it; ValueError where none has
    """
    if better not in ("higher", "lower"):
        raise ValueError(f"metric of {of!r}: better={better!r}, use 'higher' or 'lower'")
    if some:
        records = [record for record in records if of in (record.get("values") or {})]
    weights = None if weight is None else column(records, weight)
    value, stderr = summarise(kind, column(records, of), weights)
    return Metric(value, stderr, len(records), kind, better, of, weight, chance, some)


def column(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """One number of each sample, in order. ValueError names the first sample that has none."""
    found: list[float] = []
    for record in records:
        values = record.get("values") or {}
        if values.get(name) is None:
            known = ", ".join(values) or "none"
            hint = did_you_mean(name, values)
            raise ValueError(f"sample {record.get('id')!r} has no value {name!r}{hint}; there are: {known}")
        found.append(float(values[name]))
    return found


def paired_difference(
    kind: str,
    ours: npt.ArrayLike,
    base: npt.ArrayLike,
    our_weights: npt.ArrayLike | None = None,
    base_weights: npt.ArrayLike | None = None,
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> Difference:
    """Ours minus base, both over the same samples in the same order, with a percentile bootstrap's 95 % interval.

    Each resample draws n sample numbers with replacement and takes both sides' metric over them, so what makes a sample hard
    for both cancels. The seed is fixed: equal inputs give equal tables. Below about 10 samples such intervals are too narrow.
    Raises ValueError if the two sides differ in length or the weights don't fit the kind.
    """
    x, w = _arrays(kind, ours, our_weights)
    y, v = _arrays(kind, base, base_weights)
    if len(x) != len(y):
        raise ValueError(f"paired difference of {len(x)} and {len(y)} samples: give the same samples in the same order")
    if resamples < 1:
        raise ValueError(f"resamples={resamples}: use at least 1")
    n = len(x)
    value = float(_differences(kind, x, w, y, v, np.arange(n)))
    if n < 2:
        return Difference(value, None, None, n)
    if np.array_equal(x, y) and np.array_equal(w, v):
        return Difference(0.0, 0.0, 0.0, n)
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // n)  # drawn in chunks, so that memory stays bounded
    sizes = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    found = [_differences(kind, x, w, y, v, rng.integers(0, n, size=(size, n))) for size in sizes]
    with np.errstate(invalid="ignore"):
        low, high = np.quantile(np.concatenate(found), [0.025, 0.975])
    return Difference(value, float(low), float(high), n)


def mcnemar(ours: npt.ArrayLike, base: npt.ArrayLike) -> float:
    """Exact two-sided McNemar test of paired 0/1 values: a binomial over the samples that only one side got right.

    1.0 where no sample tells the two apart. Raises ValueError for other values than 0 and 1, or different lengths.
    """
    x, y = np.asarray(ours, dtype=float), np.asarray(base, dtype=float)
    if x.shape != y.shape:
        raise ValueError(f"McNemar test of {x.size} and {y.size} samples: give the same samples in the same order")
    if not np.isin(np.concatenate([x, y]), (0.0, 1.0)).all():
        raise ValueError("McNemar test: values must be 0 or 1; use paired_difference for others")
    only_ours, only_base = int((x > y).sum()), int((x < y).sum())
    n = only_ours + only_base
    # 2 * P(X <= fewer), X ~ Binomial(n, 1/2). In logs: the coefficients overflow from n = 1030 on.
    terms = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
        for k in range(min(only_ours, only_base) + 1)
    ]
    return min(1.0, 2 * math.fsum(math.exp(term) for term in terms))


def agreement(trace: Sequence[int], base_trace: Sequence[int]) -> float:
    """Share of the positions of the longer of two traces at which both hold the same token; 1.0 if both are empty."""
    longer = max(len(trace), len(base_trace))
    return sum(a == b for a, b in zip(trace, base_trace, strict=False)) / longer if longer else 1.0


def compare_records(
    metric: Mapping[str, Any], ours: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Ours against base, from the records of the same samples in the same order; what can't be said is None.

    metric  its `kind`, `of` and `weight` (of Metric.as_dict)
    Gives `delta` (Difference), `mcnemar_p` (if all values are 0 or 1), `gold_logprob` (Difference of mean log-probability per
    gold token, over the samples that both have it for) and `agreement` (mean over traces). ValueError as in `column`.
    """
    found: dict[str, Any] = dict.fromkeys(("delta", "mcnemar_p", "gold_logprob", "agreement"))
    if not ours:
        return found
    kind, of, weight = metric["kind"], metric["of"], metric.get("weight")
    x, y = column(ours, of), column(base, of)
    found["delta"] = paired_difference(kind, x, y, *((column(side, weight) if weight else None) for side in (ours, base)))
    if kind == "mean" and {*x, *y} <= {0.0, 1.0}:
        found["mcnemar_p"] = mcnemar(x, y)
    pairs = list(zip(ours, base, strict=True))
    gold = [pair for pair in pairs if all(side["values"].get("gold_logprob") is not None for side in pair)]
    if gold:
        found["gold_logprob"] = paired_difference("mean", *(column(side, "gold_logprob") for side in zip(*gold, strict=True)))
    traces = [(a["trace"], b["trace"]) for a, b in pairs if a.get("trace") is not None and b.get("trace") is not None]
    if traces:
        found["agreement"] = sum(agreement(*pair) for pair in traces) / len(traces)
    return found


def at_chance(metric: Mapping[str, Any]) -> bool:
    """Whether a metric's 95 % interval reaches what guessing scores, or lies on its bad side; no if chance is unknown."""
    chance, value = metric.get("chance"), metric.get("value")
    if chance is None or value is None:
        return False
    sign = -1 if metric.get("better") == "lower" else 1
    return bool(sign * (value - chance) - Z95 * (metric.get("stderr") or 0.0) <= 0)


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces (as SQuAD's scorer). Never empty for a text that isn't.

    An answer that is all article or punctuation ("A", "+") stays, or any reply would match it or none.
    """
    lower = text.lower()
    bare = lower.translate(_PUNCTUATION)
    forms = (re.sub(r"\b(a|an|the)\b", " ", bare), bare, lower)
    return next((" ".join(form.split()) for form in forms if form.strip()), "")


def exact_match(reply: str, answers: str | Sequence[str]) -> float:
    """1.0 if the normalised reply equals a normalised answer, else 0.0."""
    given = normalise(reply)
    return float(any(given == normalise(answer) for answer in _answers(answers)))


def token_f1(reply: str, answers: str | Sequence[str]) -> float:
    """Harmonic mean of precision and recall over normalised words, each counted as often as it occurs; best answer."""
    return max(_f1(normalise(reply).split(), normalise(answer).split()) for answer in _answers(answers))


def contains(reply: str, answers: str | Sequence[str]) -> float:
    """1.0 if an answer occurs in the reply, both normalised, else 0.0.

    Not within a longer word or number: "17" does not contain "7". Scripts without spaces are searched as they are.
    """
    given = normalise(reply)
    wanted = [normalise(answer) for answer in _answers(answers)]
    if not all(wanted):
        raise ValueError("an answer is empty: any reply would contain it")
    return float(any(re.search(rf"{_edge(w[0], '<')}{re.escape(w)}{_edge(w[-1], '')}", given) for w in wanted))


def _arrays(kind: str, values: npt.ArrayLike, weights: npt.ArrayLike | None) -> tuple[Array, Array]:
    """Values and weights as float64 vectors; a mean is a ratio of sums whose weights are ones."""
    if kind not in KINDS:
        raise ValueError(f"metric kind {kind!r}{did_you_mean(kind, KINDS)}; there are: {', '.join(KINDS)}")
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not len(x):
        raise ValueError(f"metric of kind {kind!r}: give one number for each sample, and at least one sample")
    if (weights is None) != (kind == "mean"):
        raise ValueError("perplexity needs weights (tokens of each sample)" if weights is None else "a mean takes no weights")
    w = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=np.float64)
    if w.shape != x.shape:
        raise ValueError(f"{len(x)} values and {w.size} weights: give one weight for each sample")
    if not (w > 0).all():
        raise ValueError("weights must be above 0: leave out samples without tokens")
    return x, w


def _statistic(kind: str, sums: Array, weights: Array) -> Array:
    """The metric from sums over samples, elementwise. What is too large for a float is inf, without a warning."""
    with np.errstate(over="ignore"):
        return sums / weights if kind == "mean" else np.exp(sums / weights)


def _differences(kind: str, x: Array, w: Array, y: Array, v: Array, drawn: npt.NDArray[np.int64]) -> Array:
    """Ours minus base for each row of drawn sample numbers (resamples, n)."""
    if kind == "mean":
        return np.asarray((x - y)[drawn].mean(axis=-1))
    ours, base = (_statistic(kind, a[drawn].sum(axis=-1), b[drawn].sum(axis=-1)) for a, b in ((x, w), (y, v)))
    with np.errstate(invalid="ignore"):  # inf - inf: no number, and said to be within noise
        return ours - base


def _answers(answers: str | Sequence[str]) -> Sequence[str]:
    answers = [answers] if isinstance(answers, str) else answers
    if not answers:
        raise ValueError("a reply is compared with no answers: give at least one")
    return answers


def _f1(given: list[str], wanted: list[str]) -> float:
    common = sum((Counter(given) & Counter(wanted)).values())
    if not given or not wanted:
        return float(given == wanted)
    return 2 * common / (len(given) + len(wanted))


def _edge(char: str, side: str) -> str:
    """A pattern: no letter or digit goes on at this side ('<' before, '' after) of an answer that has one at its end."""
    return f"(?{side}![a-z0-9])" if char.isascii() and char.isalnum() else ""
