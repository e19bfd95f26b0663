"""HELM's scenarios that kvlab has: where their rows are, how they are asked and graded.

Adapters are those of HELM's run specs; where HELM has none (COPA, PIQA) its usual ones for multiple choice.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

from kvlab.evals.helm import drafts, files
from kvlab.evals.helm.metrics import MATCHES, ROUGES
from kvlab.evals.helm.spec import (
    GENERATION,
    JOINT,
    SEPARATE,
    Adapter,
    Draft,
    Hub,
    Method,
    Scenario,
    generation,
    joint,
    separate,
)
from kvlab.evals.helm.synthetic import MODES, puzzle
from kvlab.hints import did_you_mean
from kvlab.settings import SettingError

SYNTHETIC = "synthetic_reasoning"

_SENSE = "The following are multiple choice questions (with answers) about common sense."
_HELM = "helm.benchmark.scenarios."


def _summaries(sentences: int, max_tokens: int) -> dict[Method, Adapter]:
    """HELM's adapter of summaries, without examples, as H2O uses it."""
    asked = "1 sentence" if sentences == 1 else f"{sentences} sentences"
    return {
        GENERATION: Adapter(
            input_prefix="###\nArticle: ",
            input_suffix="\n\n",
            output_prefix=f"Summarize the above article in {asked}.\n",
            max_train_instances=0,
            max_tokens=max_tokens,
            stop_sequences=("###",),
        )
    }


def _sense(name: str, description: str, make: Any, **where: Any) -> Scenario:
    """Multiple choice on common sense: choices are scored apart by default, where small models say something."""
    adapters: dict[Method, Adapter] = {SEPARATE: separate(), JOINT: joint("Question", _SENSE)}
    return Scenario(name, description, ("knowledge", "multiple_choice"), make, adapters, MATCHES, **where)


def _summary(name: str, description: str, make: Any, adapters: dict[Method, Adapter], helm_name: str, **where: Any) -> Scenario:
    """Articles and their summaries; helm_name: what HELM calls the data set."""
    lengths = {"sampling_min_length": 50, "sampling_max_length": 150, "doc_max_length": drafts.WORDS}
    where |= {"helm_class": f"{_HELM}summarization_scenario.SummarizationScenario"}
    where |= {"helm_args": {"dataset_name": helm_name, **lengths}}
    return Scenario(name, description, ("summarization",), make, adapters, ROUGES, **where)


_ALL = (
    _summary(
        "xsum",
        "News articles of the BBC and one sentence on each.",
        drafts.xsum,
        _summaries(1, 64),
        "xsum",
        file="xsum/xsum_0shot.jsonl",
        hub=Hub("EdinburghNLP/xsum", split="test"),
    ),
    _summary(
        "cnn_dailymail",
        "News articles of CNN and the Daily Mail and their highlights.",
        drafts.cnn,
        _summaries(3, 128),
        "cnn-dm",
        file="cnn_dailymail/train_sample.zip",
        rows=files.cnn_rows,
        hub=Hub("abisee/cnn_dailymail", "3.0.0", split="test"),
    ),
    _sense(
        "copa",
        "Which of two sentences is the cause or the effect of a third?",
        drafts.copa,
        file="superglue_copa/val.jsonl",
        train="superglue_copa/train.jsonl",
        hub=Hub("aps/super_glue", "copa"),
        helm_class="kvlab.helm.copa",
    ),
    _sense(
        "piqa",
        "Which of two ways reaches an everyday goal?",
        drafts.piqa,
        file="piqa/valid.jsonl",
        rows=files.piqa_rows,
        hub=Hub("ybisk/piqa"),
        helm_class="kvlab.helm.piqa",
    ),
    Scenario(
        "boolq",
        "Yes-no questions on a passage.",
        ("question_answering",),
        drafts.boolq,
        {GENERATION: generation("Passage", "Answer", 5, 5), JOINT: joint("Passage", ""), SEPARATE: separate()},
        MATCHES,
        file="superglue_boolq/val.jsonl",
        train="superglue_boolq/train.jsonl",
        hub=Hub("aps/super_glue", "boolq"),
        chance=0.5,
        helm_class=f"{_HELM}boolq_scenario.BoolQScenario",
        helm_args={"only_contrast": False},
    ),
    _sense(
        "openbookqa",
        "Questions on elementary science with four choices.",
        drafts.openbookqa,
        file="llm_adapters_commonsense/openbookqa_test.json",
        train="llm_adapters_commonsense/openbookqa_train.json",
        hub=Hub("allenai/openbookqa", "main", split="test"),
        helm_class=f"{_HELM}commonsense_scenario.OpenBookQA",
    ),
    _sense(
        "hellaswag",
        "How does a described scene go on?",
        drafts.hellaswag,
        file="hellaswag/hellaswag.json",
        rows=files.hellaswag_rows,
        hub=Hub("Rowan/hellaswag"),
        helm_class=f"{_HELM}commonsense_scenario.HellaSwagScenario",
    ),
    Scenario(
        "mmlu",
        "Examination questions of a subject with four choices.",
        ("knowledge", "multiple_choice"),
        drafts.mmlu,
        {
            JOINT: joint("Question", "The following are multiple choice questions (with answers) about {}."),
            SEPARATE: separate(),
        },
        MATCHES,
        file="mmlu/mmlu.zip",
        train="mmlu/mmlu.zip",
        rows=files.mmlu_rows,
        train_rows=files.mmlu_examples,
        hub=Hub("cais/mmlu", "{}", split="test", train="dev"),
        helm_class=f"{_HELM}mmlu_scenario.MMLUScenario",
    ),
    Scenario(
        "truthfulqa",
        "Questions that many answer wrongly: the best answer among wrong ones.",
        ("knowledge", "multiple_choice"),
        drafts.truthfulqa,
        {JOINT: joint("Question", ""), SEPARATE: separate()},
        MATCHES,
        file="truthfulqa/TruthfulQA.csv",
        helm_class=f"{_HELM}truthful_qa_scenario.TruthfulQAScenario",
        helm_args={"task": "mc_single"},
    ),
    Scenario(
        "gsm8k",
        "School mathematics in words; the last number of the answer counts.",
        ("reasoning", "math"),
        drafts.gsm8k,
        {GENERATION: generation("Q", "A", 400, 5, stop="\n\n")},
        ("final_number_exact_match", "quasi_prefix_exact_match"),
        file="gsm8k/test.jsonl",
        hub=Hub("openai/gsm8k", "main", split="test"),
        chance=0.0,
        helm_class=f"{_HELM}gsm_scenario.GSM8KScenario",
    ),
    Scenario(
        SYNTHETIC,
        "Patterns of letters and words, drawn from a seed.",
        ("reasoning",),
        drafts.no_row,
        {GENERATION: generation(None, "Answer", 50, 5, instructions="Solve the puzzle.")},
        (*MATCHES, "f1_score"),
        arguments=MODES,
        chance=0.0,
        helm_class=f"{_HELM}synthetic_reasoning_scenario.SyntheticReasoningScenario",
    ),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}
"""By name, without arguments."""


def find_scenario(label: str) -> Scenario:
    """The scenario of a name, or of name:argument. Raises SettingError with near names if there is none."""
    name, _, argument = label.partition(":")
    if name not in SCENARIOS:
        known = ", ".join(SCENARIOS)
        raise SettingError(f"task.scenarios={label}: unknown{did_you_mean(name, SCENARIOS)}; known: {known}")
    scenario = SCENARIOS[name]
    if scenario.arguments:
        argument = argument or scenario.arguments[0]
        if argument not in scenario.arguments:
            raise SettingError(f"task.scenarios={label}: use {name}: and one of {', '.join(scenario.arguments)}")
        return replace(scenario, argument=argument, helm_args={"mode": argument})
    if name != "mmlu":
        if argument:
            raise SettingError(f"task.scenarios={label}: {name} takes no argument")
        return scenario
    if not re.fullmatch(r"[a-z_]+", argument):
        raise SettingError(f"task.scenarios={label}: name a subject, such as mmlu:astronomy")
    asked = scenario.methods[JOINT]
    named = replace(asked, instructions=asked.instructions.format(argument.replace("_", " ")))
    hub = replace(scenario.hub, config=argument) if scenario.hub else None
    methods = {**scenario.methods, JOINT: named}
    return replace(scenario, argument=argument, methods=methods, hub=hub, helm_args={"subject": argument})


def drawn(scenario: Scenario, seed: int, split: str, number: int) -> Draft:
    """A synthetic instance: of seed, split, mode and number alone."""
    return puzzle(scenario.argument, random.Random(f"{seed}/{split}/{scenario.argument}/{number}"))
