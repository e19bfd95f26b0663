"""Judges of two outputs: a local model's two label probabilities, and what both orders of the outputs add up to.

A judge is asked which of two outputs stands out, the first or the second, and answers with the probability of the second. The
wording of the question is ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch

from kvlab.evals.chat import answer_ids, make_prompt, uses_chat
from kvlab.settings import SettingError

QUESTION = """Below are an instruction and two answers to it. Decide which answer a careful reader would find more helpful.

## Instruction
{instruction}

## Answer 1
{first}

## Answer 2
{second}

## Task
Say only the number of the more helpful answer, 1 or 2."""
ANSWER_START = "The more helpful answer is number"
LABELS = ("1", "2")
WORDING = hashlib.blake2b(f"{QUESTION}{ANSWER_START}".encode(), digest_size=4).hexdigest()
"""Changes with the question, so that old verdicts aren't taken for new ones."""

Orders = Literal["both", "one"]


@dataclass(frozen=True)
class Verdict:
    """The probability that the second output is the better one, None where the judge gave none; and what the judge said."""

    second: float | None
    raw: Any


class Judge(Protocol):
    """Compares two outputs.

    name  of its model, for messages
    """

    name: str

    @property
    def identity(self) -> str:
        """What its verdicts depend on, known before it is asked."""

    @property
    def parameters(self) -> int | None:
        """Of its model; None where that isn't known."""

    def ask(self, instruction: str, first: str, second: str) -> Verdict:
        """Which is better. Raises SettingError where the judge can't be asked at all."""


@dataclass(frozen=True)
class Compared:
    """A model's output against a reference's.

    preference  in [1, 2], 2: the model's is better; the mean over the orders that were asked. None where a verdict is missing
    first       preference for whichever stood first minus 0.5, the mean over the same orders; None where nothing was asked
    raw         what the judge said, order by order: `reference_first` and `model_first`
    """

    preference: float | None
    first: float | None
    raw: dict[str, Any]


def compare(judge: Judge, instruction: str, reference: str, output: str, orders: Orders = "both") -> Compared:
    """Ask a judge in both orders, or in the one that the instruction's hash says. Equal outputs are a tie, without asking."""
    if output == reference:
        return Compared(1.5, None, {"equal": True})
    asked = [model_first(instruction), not model_first(instruction)][: 2 if orders == "both" else 1]
    wins: list[float] = []
    firsts: list[float] = []
    raw: dict[str, Any] = {}
    for ours_first in asked:
        pair = (output, reference) if ours_first else (reference, output)
        verdict = judge.ask(instruction, *pair)
        raw["model_first" if ours_first else "reference_first"] = verdict.raw
        if verdict.second is not None:
            wins.append(1 - verdict.second if ours_first else verdict.second)
            firsts.append(0.5 - verdict.second)
    if len(wins) < len(asked):  # one order alone would count the judge's love of a position
        return Compared(None, None, raw)
    return Compared(1 + sum(wins) / len(wins), sum(firsts) / len(firsts), raw)


def model_first(instruction: str) -> bool:
    """Whether the model's output stands first when the judge is first asked: a coin thrown by the instruction's hash."""
    return hashlib.blake2b(instruction.encode(), digest_size=1).digest()[0] % 2 == 1


def question(instruction: str, first: str, second: str) -> str:
    """What a judge is asked, without the start of its answer."""
    return QUESTION.format(instruction=instruction.strip(), first=first.strip(), second=second.strip())


class LocalJudge:
    """A local causal model: one forward pass of the question, then the softmax over its two labels.

    load  gives the model, unpatched, and its tokenizer, when the judge is first asked
    name  for the record, with what tells its weights from others of that name
    """

    def __init__(self, load: Callable[[], tuple[Any, Any]], name: str, weights: str = "") -> None:
        self._load, self.name, self.weights = load, name, weights

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        return self._load()

    @property
    def identity(self) -> str:
        """The model, its weights and the wording."""
        return " ".join(filter(None, ("local", self.name, self.weights, WORDING)))

    @property
    def parameters(self) -> int | None:
        """Of the model."""
        return sum(weight.numel() for weight in self._loaded[0].parameters())

    @cached_property
    def _labels(self) -> tuple[tuple[int, ...], int, int]:
        """What both labels begin with (some tokenizers have a token for a space), and the tokens that tell them apart."""
        one, two = (answer_ids(self._loaded[1], label, ANSWER_START) for label in LABELS)
        same = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
        if same is None:
            raise SettingError(
                f"judge {self.name}: its tokenizer has no tokens that tell 1 from 2; use another task.judge_model"
            )
        return tuple(one[:same]), one[same], two[same]

    def prompt(self, instruction: str, first: str, second: str) -> tuple[int, ...]:
        """Token ids of the question, up to where the label is to come."""
        tokenizer, asked = self._loaded[1], question(instruction, first, second)
        if uses_chat(tokenizer, None):
            ids = make_prompt(tokenizer, asked, "", ANSWER_START, chat=True).ids
        else:
            ids = make_prompt(tokenizer, asked + "\n\n", "", ANSWER_START).ids
        return (*ids, *self._labels[0])

    def ask(self, instruction: str, first: str, second: str) -> Verdict:
        """One forward pass. No verdict where the question is longer than the model's context."""
        model, ids = self._loaded[0], self.prompt(instruction, first, second)
        context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if context and len(ids) > context:
            return Verdict(None, f"the question has {len(ids)} tokens, the judge's context {context}")
        with torch.inference_mode():
            logits = model(torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1).logits[0, -1]
            logprobs = logits.double().log_softmax(-1)
        one, two = (float(logprobs[label].exp()) for label in self._labels[1:])
        return Verdict(float((logprobs[self._labels[2]] - logprobs[self._labels[1]]).sigmoid()), {"1": one, "2": two})
