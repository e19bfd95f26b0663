"""From a row's fields to an instance: one function for each data set, which understands its files and its form on the hub.

Each takes the fields and the row's number, and raises BadRow with what is wrong.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.evals.helm.spec import Draft, Reference
from kvlab.evals.rows import BadRow, missing

Values = Mapping[str, Any]
WORDS = 512
"""Words of an article that HELM keeps."""
_H2O = re.compile(r"###\nArticle: (.*)\n\nSummarize the above article in (\d) sentences?\.\n?", re.DOTALL)
"""A prompt of H2O's file: what stands around the article is the adapter's."""


def _need(values: Values, *names: str) -> None:
    if problem := missing(values, *names):
        raise BadRow(problem)


def _choices(texts: Sequence[Any], right: Any) -> tuple[Reference, ...]:
    """References of a multiple choice. BadRow if there are fewer than two, or the right one isn't among them."""
    options = [str(text).strip() for text in texts]
    if len(options) < 2 or not all(options):
        raise BadRow(f"at least two choices that aren't empty are needed; it has {len(options)}")
    if isinstance(right, str) and right.isdigit():
        right = int(right)
    if isinstance(right, bool) or not isinstance(right, int) or not 0 <= right < len(options):
        raise BadRow(f"the right choice is {right!r}, and must be a number from 0 to {len(options) - 1}")
    return tuple(Reference(option, place == right) for place, option in enumerate(options))


def _among(right: Any, names: Sequence[str]) -> int:
    """The place of the right choice's name. BadRow where it isn't one."""
    if right not in names:
        raise BadRow(f"the right answer {right!r} isn't among the choices: {', '.join(names)}")
    return names.index(right)


def _article(values: Values, number: int, article: str, summary: str) -> Draft:
    """An article with line breaks taken out and cut to 512 words, as HELM does."""
    _need(values, article, summary)
    text, gold = (" ".join(str(values[name]).split()) for name in (article, summary))
    return Draft(" ".join(text.split()[:WORDS]), (Reference(gold, True),))


def xsum(values: Values, number: int) -> Draft:
    """An article and a sentence on it; H2O's file has it in a finished prompt, from which it is taken."""
    if "document" in values:
        return _article(values, number, "document", "summary")
    _need(values, "article", "summary_gt")
    if (match := _H2O.fullmatch(values["article"])) is None:
        raise BadRow("'article' is no prompt of H2O's: '###', 'Article: ...' and 'Summarize the above article in 1 sentence.'")
    return Draft(match[1], (Reference(str(values["summary_gt"]), True),))


def cnn(values: Values, number: int) -> Draft:
    """An article and its highlights."""
    return _article(values, number, "article", "highlights")


def copa(values: Values, number: int) -> Draft:
    """A premise with 'because' or 'therefore', and two clauses."""
    _need(values, "premise", "choice1", "choice2", "question", "label")
    words = {"cause": "because", "effect": "therefore"}
    if values["question"] not in words:
        raise BadRow(f"'question' is {values['question']!r}, and must be cause or effect")
    stem = f"{str(values['premise']).strip().rstrip('.')} {words[values['question']]}"
    texts = [str(values[name]) for name in ("choice1", "choice2")]
    lower = [text[:1].lower() + text[1:] if text[:2] != "I " else text for text in texts]
    return Draft(stem, _choices(lower, values["label"]))


def piqa(values: Values, number: int) -> Draft:
    """A goal and two solutions."""
    _need(values, "goal", "sol1", "sol2", "label")
    return Draft(str(values["goal"]), _choices([values["sol1"], values["sol2"]], values["label"]))


def boolq(values: Values, number: int) -> Draft:
    """A question on a passage, answered by Yes or No."""
    label = "label" if "label" in values else "answer"
    _need(values, "question", "passage", label)
    right = values[label]
    right = {"true": 1, "false": 0}.get(str(right).lower(), right)
    if right not in (0, 1):
        raise BadRow(f"{label!r} is {right!r}, and must be true or false")
    question = str(values["question"]).strip().rstrip("?").capitalize()
    references = (Reference("Yes", bool(right)), Reference("No", not right))
    return Draft(f"Question: {question}?", references, context=f"{values['passage']}\n")


def openbookqa(values: Values, number: int) -> Draft:
    """A question and its choices; LLM-Adapters' file has them in one instruction, from which they are taken."""
    if "question_stem" in values:
        _need(values, "choices", "answerKey")
        choices = values["choices"]
        right = _among(values["answerKey"], list(choices["label"]))
        return Draft(str(values["question_stem"]), _choices(choices["text"], right))
    _need(values, "instruction", "answer")
    parts = re.split(r"\s*\bAnswer(\d): ", values["instruction"].split("\n\nAnswer format")[0])
    stem = parts[0].removeprefix("Please choose the correct answer to the question: ").strip()
    if not stem:
        raise BadRow("'instruction' holds no question")
    right = _among(values["answer"], [f"answer{number}" for number in parts[1::2]])
    return Draft(stem, _choices(parts[2::2], right))


def hellaswag(values: Values, number: int) -> Draft:
    """A scene and its endings."""
    if "ctx" in values:
        _need(values, "activity_label", "endings", "label")
        return Draft(f"{values['activity_label']}: {values['ctx']}", _choices(values["endings"], values["label"]))
    _need(values, "question", "choices", "answer")
    if not isinstance(values["choices"], dict):
        raise BadRow("'choices' must be an object of letters and texts")
    right = _among(values["answer"], list(values["choices"]))
    return Draft(str(values["question"]), _choices(list(values["choices"].values()), right))


def mmlu(values: Values, number: int) -> Draft:
    """A question, its choices, and a letter or a number."""
    _need(values, "question", "choices", "answer")
    right = values["answer"]
    right = _among(right, [chr(65 + place) for place in range(len(values["choices"]))]) if right not in range(9) else right
    return Draft(str(values["question"]), _choices(values["choices"], right))


def truthfulqa(values: Values, number: int) -> Draft:
    """The best answer among the incorrect ones, in an order drawn from the row's number."""
    _need(values, "Question", "Best Answer", "Incorrect Answers")
    wrong = [text for part in str(values["Incorrect Answers"]).split(";") if (text := part.strip())]
    options = [str(values["Best Answer"]).strip(), *wrong]
    order = random.Random(number).sample(range(len(options)), len(options))
    return Draft(str(values["Question"]), _choices([options[place] for place in order], order.index(0)))


def gsm8k(values: Values, number: int) -> Draft:
    """A problem and its solution in steps, ending with the number."""
    _need(values, "question", "answer")
    steps, mark, result = str(values["answer"]).partition("####")
    if not mark or not result.strip():
        raise BadRow("'answer' doesn't end with '#### NUMBER'")
    steps = re.sub(r"<<.*?>>", "", steps).strip().replace("\n", " ")
    return Draft(str(values["question"]), (Reference(f"{steps} The answer is {result.strip()}.", True),))


def no_row(values: Values, number: int) -> Draft:
    """Of synthetic scenarios, whose instances are drawn."""
    raise AssertionError("synthetic instances are drawn, not read")
