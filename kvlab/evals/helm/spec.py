"""What a HELM run is made of: instances with references, an adapter that makes prompts of them, and a scenario around both.

In the manner of HELM (Liang et al. 2022, arXiv 2211.09110); names and defaults are those of crfm-helm 0.5, so that its tools
read what `export.py` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvlab.evals.helm.files import plain_rows
from kvlab.evals.rows import Row

Method = Literal["generation", "multiple_choice_joint", "multiple_choice_separate_original"]
GENERATION: Method = "generation"
JOINT: Method = "multiple_choice_joint"
SEPARATE: Method = "multiple_choice_separate_original"
CORRECT = "correct"
"""HELM's tag of a right reference."""


@dataclass(frozen=True)
class Reference:
    """A possible answer, and whether it's right."""

    text: str
    correct: bool = False


@dataclass(frozen=True)
class Instance:
    """One example: an input, whose last part may be a question on the rest, and references.

    id            the same for the perturbed versions of an instance
    context       what stands in front of the question, with what separates the two; empty where nothing is a question
    split         train or test, as HELM has them; sub_split: a finer one, where there is
    perturbation  what was done to the input
    where         file and row, for messages
    """

    id: str
    question: str
    references: tuple[Reference, ...]
    context: str = ""
    split: str = "test"
    sub_split: str | None = None
    perturbation: str | None = None
    where: str = ""

    @property
    def text(self) -> str:
        """The whole input."""
        return self.context + self.question

    @property
    def answers(self) -> tuple[str, ...]:
        """Texts of the right references, at least one."""
        return tuple(reference.text for reference in self.references if reference.correct)


@dataclass(frozen=True)
class Adapter:
    """How instances become prompts: HELM's AdapterSpec, the fields that are used here. Decoding is greedy."""

    method: Method = GENERATION
    global_prefix: str = ""
    instructions: str = ""
    input_prefix: str = "Input: "
    input_suffix: str = "\n"
    reference_prefix: str = "A. "
    reference_suffix: str = "\n"
    output_prefix: str = "Output: "
    output_suffix: str = "\n"
    instance_prefix: str = "\n"
    max_train_instances: int = 5
    max_tokens: int = 100
    stop_sequences: tuple[str, ...] = ()


def generation(
    noun: str | None, output: str | None, max_tokens: int, shots: int, stop: str = "\n", instructions: str = ""
) -> Adapter:
    """HELM's usual adapter of open questions: 'NOUN: input', a line 'OUTPUT: answer'. A line break ends instructions."""
    return Adapter(
        instructions=instructions and instructions + "\n",
        input_prefix=f"{noun}: " if noun else "",
        output_prefix=f"{output}: " if output else "",
        max_train_instances=shots,
        max_tokens=max_tokens,
        stop_sequences=(stop,),
    )


def joint(noun: str, instructions: str, shots: int = 5) -> Adapter:
    """HELM's usual adapter of questions whose choices stand in the prompt under letters; a letter is generated."""
    return Adapter(
        method=JOINT,
        instructions=instructions and instructions + "\n",
        input_prefix=f"{noun}: ",
        output_prefix="Answer: ",
        max_train_instances=shots,
        max_tokens=1,
        stop_sequences=("\n",),
    )


def separate() -> Adapter:
    """HELM's adapter that scores each choice as what follows the input."""
    return Adapter(
        method=SEPARATE,
        input_prefix="",
        input_suffix="",
        output_prefix=" ",
        output_suffix="",
        max_train_instances=0,
        max_tokens=0,
    )


@dataclass(frozen=True)
class Draft:
    """An instance without its place in the data: what a scenario makes of a row."""

    question: str
    references: tuple[Reference, ...]
    context: str = ""
    sub_split: str | None = None


@dataclass(frozen=True)
class Hub:
    """Where a scenario's data is on the hub: dataset, config, the split that is scored, the split for examples."""

    dataset: str
    config: str | None = None
    split: str = "validation"
    train: str | None = "train"


@dataclass(frozen=True)
class Scenario:
    """Where instances come from, how they are asked and graded.

    make         the instance of a row's fields; raises BadRow. The number tells rows apart where something is drawn
    rows         rows of a file, given the argument; train_rows: of the train file, where they are read otherwise
    file, train  below the data folder, `{}` for the argument; train: rows for examples, else some are set aside
    methods      adapters by method, the default one first
    metrics      of generated answers, HELM's names, the main one first; chance: what guessing scores on it, where known
    helm_class, helm_args  HELM's scenario that this one follows, for the files; description, tags likewise
    """

    name: str
    description: str
    tags: tuple[str, ...]
    make: Callable[[Mapping[str, Any], int], Draft]
    methods: Mapping[Method, Adapter]
    metrics: tuple[str, ...]
    file: str = ""
    train: str | None = None
    rows: Callable[[Path, str], list[Row | str]] = plain_rows
    train_rows: Callable[[Path, str], list[Row | str]] | None = None
    hub: Hub | None = None
    argument: str = ""
    arguments: tuple[str, ...] = ()
    chance: float | None = None
    helm_class: str = ""
    helm_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and argument, as HELM writes runs."""
        return f"{self.name}:{self.argument}" if self.argument else self.name
