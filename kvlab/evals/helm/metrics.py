"""HELM's metrics as pure functions: matches, F1, ROUGE, calibration, the worst case over perturbations.

Matches and F1 follow crfm-helm 0.5's definitions, which differ from `kvlab.metrics` (sets of words, only ASCII punctuation).
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from kvlab.settings import SettingError

BINS = 10
_DROP = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"-?[\d,]+(?:.\d+)?")


def normalised(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_DROP)).split())


def exact_match(gold: str, output: str) -> float:
    """Equal but for space around."""
    return float(bool(output) and gold.strip() == output.strip())


def quasi_exact_match(gold: str, output: str) -> float:
    """Equal once normalised."""
    return float(bool(output) and normalised(gold) == normalised(output))


def prefix_exact_match(gold: str, output: str) -> float:
    """The output begins with the gold answer."""
    return float(bool(output) and output.strip().startswith(gold.strip()))


def quasi_prefix_exact_match(gold: str, output: str) -> float:
    """The output begins with the gold answer, both normalised."""
    return float(bool(output) and normalised(output).startswith(normalised(gold)))


def f1_score(gold: str, output: str) -> float:
    """Harmonic mean of precision and recall over the sets of normalised words; 0 where either is empty."""
    wanted, given = (set(normalised(text).split()) for text in (gold, output))
    return 2 * len(wanted & given) / (len(wanted) + len(given)) if wanted and given else 0.0


def final_number_exact_match(gold: str, output: str) -> float:
    """The last numbers of both are written alike, thousands' commas aside."""
    wanted, given = (next(reversed(_NUMBER.findall(text)), "").replace(",", "") for text in (gold, output))
    return exact_match(wanted, given)


@cache
def _scorer(kind: str) -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise SettingError("HELM's ROUGE needs the package rouge-score: pip install 'kvlab[evals]'") from None
    return RougeScorer([kind], use_stemmer=True)


def rouge(kind: str, gold: str, output: str) -> float:
    """F of rouge-score with its stemmer. kind: rouge1, rouge2, rougeL. SettingError where the package isn't installed."""
    return float(_scorer(kind).score(gold, output)[kind].fmeasure)


METRICS: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "quasi_exact_match": quasi_exact_match,
    "prefix_exact_match": prefix_exact_match,
    "quasi_prefix_exact_match": quasi_prefix_exact_match,
    "f1_score": f1_score,
    "final_number_exact_match": final_number_exact_match,
    "rouge_1": lambda gold, output: rouge("rouge1", gold, output),
    "rouge_2": lambda gold, output: rouge("rouge2", gold, output),
    "rouge_l": lambda gold, output: rouge("rougeL", gold, output),
}
"""Of (gold answer, output), by HELM's name; all are between 0 and 1 and better the higher."""

MATCHES = ("exact_match", "quasi_exact_match", "prefix_exact_match", "quasi_prefix_exact_match")
ROUGES = ("rouge_2", "rouge_1", "rouge_l")


def graded(names: Sequence[str], answers: Sequence[str], output: str) -> dict[str, float]:
    """Each metric of an output, over the right answers the best."""
    return {name: max(METRICS[name](answer, output) for answer in answers) for name in names}


# --------------------------------------------------------------------------------------------------- calibration


def calibration(probs: Sequence[float], correct: Sequence[float]) -> list[dict[str, float]]:
    """What each sample adds to HELM's calibration metrics: the mean over those that have a value is the metric.

    probs    the probability that the model gives to its answer; correct: whether that is right; a share, as of choices
             that are equally likely, counts as wrong, as in HELM
    ece_10_bin  expected calibration error with 10 bins of about as many samples each: a sample adds its probability minus
                its correctness, with the sign that the sum over its bin has; ece_1_bin: all in one bin
    selective_cov_acc_area  area under accuracy against coverage, the surest first, which is a mean of correctness with weights:
                a sample adds what its correctness moves the area by, so that the spread is that of the area
    selective_acc@10        accuracy of the surest tenth, and the next one: only those have the value
    A standard error over these takes bins, signs and ranks as given. Samples that are equally sure keep their order.
    """
    p, c = np.asarray(probs, dtype=np.float64), np.floor(np.asarray(correct, dtype=np.float64))
    if p.shape != c.shape or not len(p):
        raise ValueError(f"calibration of {len(p)} probabilities and {len(c)} answers: give one of each for a sample")
    gap = p - c
    bins = np.searchsorted(_edges(p), p)
    signs = np.array([math.copysign(1.0, gap[bins == own].sum()) for own in bins])
    ranked = np.argsort(-p, kind="stable")
    share = np.empty_like(c)  # n times a sample's weight: 1 / k for each k first samples that it is among
    share[ranked] = np.cumsum((1 / np.arange(1, len(c) + 1))[::-1])[::-1]
    whole = float((share * c).mean())
    area = whole + share * (c - whole)
    found = [
        {"ece_10_bin": ten, "ece_1_bin": one, "selective_cov_acc_area": part}
        for ten, one, part in zip(
            (signs * gap).tolist(), (math.copysign(1.0, gap.sum()) * gap).tolist(), area.tolist(), strict=True
        )
    ]
    for place in ranked[: int(0.1 * len(c)) + 1].tolist():
        found[place]["selective_acc@10"] = float(c[place])
    return found


def _edges(probs: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """Upper ends of bins that hold about as many samples each: halfway between neighbours, equal ends once."""
    parts = np.array_split(np.sort(probs), min(BINS, len(probs)))
    return sorted({float(before[-1] + after[0]) / 2 for before, after in zip(parts[:-1], parts[1:], strict=True)} | {1.0})


CALIBRATION = {"ece_10_bin": "lower", "ece_1_bin": "lower", "selective_cov_acc_area": "higher", "selective_acc@10": "higher"}
"""Calibration metrics, and whether lower or higher is better."""


def worst(versions: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    """The lowest value of each metric over an instance's versions, under '<name>/robustness'."""
    return {f"{name}/robustness": min(version[name] for version in versions) for name in names}
