"""LongBench's metrics (Bai et al. 2023, arXiv 2308.14508): one prediction against its answers, 0 to 1.

They give what the benchmark's published `metrics.py` gives, oddities included: `experiments/longbench_metrics.py` runs both.
Pure functions of texts; the packages rouge, jieba and rapidfuzz are imported where they are needed.
"""

from __future__ import annotations

import logging
import re
import string
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from kvlab.settings import SettingError

Score = Callable[[str, str, Sequence[str]], float]
"""A prediction, one answer, and the classes of a classification task."""

FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
"""Datasets of which only a prediction's first line counts: few-shot prompts, which models go on writing."""
BUCKETS = ("0-4k", "4-8k", "8k+")
"""LongBench-E's lengths, in words (characters of Chinese)."""

# Chinese punctuation as the benchmark has it; neither the fullwidth full stop nor some brackets are among it.
_ZH_RANGES = """FF01-FF0D FF0F FF1A-FF20 FF3B-FF40 FF5B-FF64 3001-3003 300B-3011 3014-301F 3030 303E-303F 2013-2014 2018-2019
    201B-201F 2026-2027 FE4F"""


def _characters(ranges: str) -> str:
    ends = [[int(end, 16) for end in part.split("-")] for part in ranges.split()]
    return "".join(chr(code) for end in ends for code in range(end[0], end[-1] + 1))


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ZH_PUNCTUATION = str.maketrans("", "", string.punctuation + _characters(_ZH_RANGES))


def _package(name: str) -> Any:
    """Raises SettingError where it isn't installed."""
    try:
        return import_module(name)
    except ImportError:
        raise SettingError(f"LongBench's metrics need the package {name}: pip install 'kvlab[evals]'") from None


@cache
def _jieba() -> Any:
    jieba = _package("jieba")
    jieba.setLogLevel(logging.WARNING)  # it tells of loading its dictionary
    return jieba


# ---------------------------------------------------------------------------------------------------- words of answers


def qa_f1(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 over words in lower case, without punctuation and articles (as SQuAD's)."""
    return f1(_words(prediction), _words(answer))


def qa_f1_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 over jieba's words in lower case, without punctuation."""
    return f1(_words_zh(prediction), _words_zh(answer))


def f1(given: Sequence[str], wanted: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of two bags of words; 0 without one in common."""
    common = sum((Counter(given) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(given), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _words_zh(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_ZH_PUNCTUATION).split()) for word in _jieba().cut(text, cut_all=False))
    return [word for word in words if word]


# ---------------------------------------------------------------------------------------------------------- summaries


class _Rouge(threading.Thread):
    """The package `rouge` on a thread of its own.

    It follows a common subsequence by recursion and fails on long sentences, which scores 0. How long depends on how deep
    the stack is; a new thread's is about as deep as the benchmark's script is there, wherever it is called from.
    """

    def __init__(self, prediction: str, answer: str) -> None:
        super().__init__(daemon=True)
        self.scorer, self.texts = _package("rouge").Rouge(metrics=["rouge-l"]), (prediction, answer)
        self.found = 0.0

    def run(self) -> None:
        """ROUGE-L's F, or 0 where the package fails, as for empty texts."""
        try:
            self.found = self.scorer.get_scores([self.texts[0]], [self.texts[1]], avg=True)["rouge-l"]["f"]
        except Exception:  # whatever it is, as in the benchmark
            self.found = 0.0


def rouge(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F of ROUGE-L over sentences as the package rouge has it; 0 for a text without any."""
    thread = _Rouge(prediction, answer)
    thread.start()
    thread.join()
    return float(thread.found)


def rouge_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """The same over jieba's words."""
    return rouge(*(" ".join(_jieba().cut(text, cut_all=False)) for text in (prediction, answer)))


# ------------------------------------------------------------------------------------------ classes, numbers and code


def classification(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """1 / (classes that the prediction names) if the answer is one of them, else 0.

    A class that is a part of the answer's name doesn't count, except right behind one that doesn't count either: the
    published loop takes names out of the list that it goes through, and so passes over the next.
    """
    named = [name for name in classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in answer and named[place] != answer:
            named.remove(named[place])
        place += 1
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Part of the prediction's numbers that are the answer; 0 without numbers."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Part of the prediction's numbers that are the paragraph's. Raises ValueError for an answer without one."""
    return count(prediction, paragraph(answer, "Paragraph "))


def retrieval_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """The same where paragraphs are numbered in Chinese."""
    return count(prediction, paragraph(answer, "段落"))


def paragraph(answer: str, word: str) -> str:
    """The number of a paragraph. Raises ValueError for an answer that names none."""
    found = re.search(rf"{word}(\d+)", answer)
    if found is None:
        raise ValueError(f"the answer {answer!r} must name a paragraph, such as {word}3")
    return found[1]


def code_similarity(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Likeness of the first line without '`', '#' and '//' to the answer, in hundredths.

    By insertions and deletions, rounded: what fuzzywuzzy gives with python-Levenshtein. Without that package it falls back on
    difflib, whose figures differ.
    """
    indel = _package("rapidfuzz").distance.Indel
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * indel.normalized_similarity(line, answer)) / 100


# ------------------------------------------------------------------------------------------------------------ datasets

SCORES: dict[str, Score] = {
    "narrativeqa": qa_f1,
    "qasper": qa_f1,
    "multifieldqa_en": qa_f1,
    "multifieldqa_zh": qa_f1_zh,
    "hotpotqa": qa_f1,
    "2wikimqa": qa_f1,
    "musique": qa_f1,
    "dureader": rouge_zh,
    "gov_report": rouge,
    "qmsum": rouge,
    "multi_news": rouge,
    "vcsum": rouge_zh,
    "trec": classification,
    "triviaqa": qa_f1,
    "samsum": rouge,
    "lsht": classification,
    "passage_count": count,
    "passage_retrieval_en": retrieval,
    "passage_retrieval_zh": retrieval_zh,
    "lcc": code_similarity,
    "repobench-p": code_similarity,
}
"""The metric of each dataset."""

_PACKAGES: dict[Score, tuple[str, ...]] = {
    qa_f1_zh: ("jieba",),
    rouge: ("rouge",),
    rouge_zh: ("rouge", "jieba"),
    code_similarity: ("rapidfuzz",),
}


def score(dataset: str, prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """A prediction's best score over the answers. Raises ValueError for an answer that the metric can't read."""
    if dataset in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return max((SCORES[dataset](prediction, answer, classes) for answer in answers), default=0.0)


def bucket(length: float) -> str:
    """LongBench-E's bucket of a row's `length`."""
    return BUCKETS[(length >= 4000) + (length >= 8000)]


def need(dataset: str) -> tuple[str, ...]:
    """Packages that a dataset's metric needs. Raises SettingError for one that isn't installed."""
    names = _PACKAGES.get(SCORES[dataset], ())
    for name in names:
        _package(name)
    return names


def letter(response: str) -> str | None:
    """LongBench v2: the choice that a response says is right, in the benchmark's wording; None if there is none."""
    plain = response.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", plain) or re.search(r"The correct answer is ([A-D])", plain)
    return found[1] if found else None
