"""The task `helm`: one scenario of HELM's, adapted to prompts, under perturbations, with HELM's metrics and files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from kvlab.evals.base import Finished, Record, Sample, Task, register_task
from kvlab.evals.chat import answer_ids
from kvlab.evals.helm import export
from kvlab.evals.helm.adapter import Adapted, adapt, answer, block, checked, letter, sample_examples
from kvlab.evals.helm.metrics import CALIBRATION, calibration, graded, worst
from kvlab.evals.helm.perturbations import PERTURBATIONS, perturbed
from kvlab.evals.helm.sample import HelmSample
from kvlab.evals.helm.scenarios import find_scenario
from kvlab.evals.helm.sources import Data, load
from kvlab.evals.helm.spec import JOINT, SEPARATE, Adapter, Instance, Method, Scenario
from kvlab.evals.rows import BadRows
from kvlab.hints import did_you_mean
from kvlab.metrics import Metric, make_metric
from kvlab.reading import Reading, Scored
from kvlab.settings import SettingError

NOT_SET = ("stop_sequences",)
"""What of an adapter only the scenario says."""
SURE = 16
"""Outputs of so many tokens at most get a probability, as answers do and summaries don't."""


@register_task("helm")
@dataclass(frozen=True)
class Helm(Task):
    """Scenarios of HELM, each a cell of its own: `task.scenarios=[xsum,copa,mmlu:astronomy]`.

    scenarios      xsum, cnn_dailymail, copa, piqa, boolq, openbookqa, hellaswag, mmlu:SUBJECT, truthfulqa, gsm8k,
                   synthetic_reasoning:MODE (pattern_match, variable_substitution, induction; needs no data)
    perturbations  typos, contractions, expansions, lowercase, mild_mix; typo_share: share of words that `typos` changes
    limit          only so many rows, from the top; train_trial: seeds the choice of few-shot examples
    data_dir       folder of the data (default: KVLAB_DATA_DIR); hub: load it from the hub instead
    context        tokens that prompt and answer may have together; null: what the model can read
    bad_rows       rows that can't be used: skip (left out, counted and reported) or stop
    others         replace what the scenario's adapter has, as HELM's AdapterSpec calls it; null: as the scenario says
    """

    scenarios: tuple[str, ...] = ("synthetic_reasoning",)
    limit: int | None = None
    perturbations: tuple[str, ...] = ()
    typo_share: float = 0.1
    train_trial: int = 0
    method: Method | None = None
    max_train_instances: int | None = None
    max_tokens: int | None = None
    global_prefix: str | None = None
    instructions: str | None = None
    input_prefix: str | None = None
    input_suffix: str | None = None
    reference_prefix: str | None = None
    reference_suffix: str | None = None
    output_prefix: str | None = None
    output_suffix: str | None = None
    instance_prefix: str | None = None
    context: int | None = None
    data_dir: str | None = None
    hub: bool = False
    bad_rows: BadRows = "skip"
    seed: int = 0

    spreads: ClassVar[str] = "scenarios"
    places: ClassVar[tuple[str, ...]] = ("data_dir",)

    def __post_init__(self) -> None:
        if not isinstance(self.scenarios, tuple) or len(self.scenarios) != 1:
            raise SettingError("task.scenarios: give at least one, such as [xsum]; each makes a cell of its own")
        if self.limit == 0:
            raise SettingError("task.limit=0: leave it out, or use at least 1")
        for name in self.perturbations:
            if name not in PERTURBATIONS:
                known = ", ".join(PERTURBATIONS)
                raise SettingError(f"task.perturbations: unknown {name!r}{did_you_mean(name, PERTURBATIONS)}; known: {known}")
        if self.hub and self.data_dir is not None:
            raise SettingError("task.hub=true loads the data from the hub, and task.data_dir names a folder: give one of them")
        if not 0 <= self.typo_share <= 1:
            raise SettingError(f"task.typo_share={self.typo_share}: use a share from 0 to 1")
        checked(self.adapter)

    @property
    def label(self) -> str:
        """The scenario, after 'helm-'."""
        return f"helm-{self.scenario.label.replace(':', '-')}"

    @property
    def reads(self) -> str:
        """The scenario's data."""
        return f"{', '.join(self.scenarios)} (HELM)"

    @property
    def longest(self) -> int | None:
        """What prompts are fitted into."""
        return self.context

    @cached_property
    def scenario(self) -> Scenario:
        """What is run. Raises SettingError if there is no such scenario."""
        return find_scenario(self.scenarios[0])

    @cached_property
    def adapter(self) -> Adapter:
        """The scenario's adapter with what the settings replace. SettingError for a method that it doesn't have."""
        methods = self.scenario.methods
        method: Method = self.method if self.method is not None else next(iter(methods))
        if method not in methods:
            raise SettingError(f"task.method={method}: scenario {self.scenario.label} has {', '.join(methods)}")
        names = [each.name for each in fields(Adapter) if each.name not in NOT_SET]
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(methods[method], **own)

    @cached_property
    def data(self) -> Data:
        """Instances. Raises SettingError, with file and row, where they can't be had."""
        shots = self.adapter.max_train_instances > 0
        return load(self.scenario, self.data_dir, self.hub, self.limit, shots, self.bad_rows, self.seed)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Bad rows, and those whose question doesn't fit the context."""
        return (*self.data.left_out, *self._too_long)

    @cached_property
    def _too_long(self) -> list[str]:
        return []

    def data_hash(self) -> str:
        """Of the files' bytes, or of the hub's rows."""
        return self.data.hash

    def fitted(self, context: int) -> Helm:
        """With the model's context, where the settings give no smaller one."""
        return replace(self, context=min(context, self.context or context))

    # -------------------------------------------------------------------------------------------------- samples

    def samples(self, tokenizer: Any) -> list[Sample]:
        """One for each instance and for each perturbation that changes it, its id then '<id>/<perturbation>'."""
        data = self.data
        if self.adapter.max_train_instances and not data.train:
            raise SettingError(f"scenario {self.scenario.label} has no rows for examples: set task.max_train_instances=0")
        shown = sample_examples(data.train, self.adapter.max_train_instances, self.train_trial)
        found: list[Sample] = []
        self._too_long.clear()
        for instance in data.scored:
            changes = (perturbed(instance, name, self.seed, self.typo_share) for name in self.perturbations)
            try:
                found += [self._sample(tokenizer, each, shown) for each in (instance, *changes) if each is not None]
            except SettingError as error:  # a perturbed version that doesn't fit takes its instance with it
                if self.bad_rows == "stop":
                    raise
                self._too_long.append(str(error))
        if not found:
            raise SettingError(self._too_long[0])
        return found

    def _sample(self, tokenizer: Any, instance: Instance, shown: Sequence[Instance]) -> HelmSample:
        adapter = self.adapter
        asked = block(adapter, instance, answered=False)[0]
        name = instance.id if instance.perturbation is None else f"{instance.id}/{instance.perturbation}"
        texts = [reference.text for reference in instance.references]
        about: dict[str, Any] = {"answers": instance.answers, "where": instance.where, "instance": instance}
        if adapter.method == SEPARATE:
            choices = tuple(answer_ids(tokenizer, text, asked) for text in texts)
            adapted = self._adapted(tokenizer, instance, shown, max(map(len, choices)))
            right = next(place for place, reference in enumerate(instance.references) if reference.correct)
            return HelmSample(name, adapted.prompt, choices=choices, gold_choice=right, adapted=adapted, **about)
        after = adapter.output_prefix.rstrip(" ") or asked
        gold = answer_ids(tokenizer, answer(adapter, instance), after)
        new = adapter.max_tokens
        if adapter.method == JOINT:  # a letter with the space before it, in tokenizers that make two of them
            letters = {letter(adapter, place): text for place, text in enumerate(texts)}
            new = max(new, *(len(answer_ids(tokenizer, each, after)) for each in letters))
            about["mapping"] = letters
        adapted = self._adapted(tokenizer, instance, shown, max(new, len(gold)))
        stop = () if adapter.method == JOINT else adapter.stop_sequences
        return HelmSample(name, adapted.prompt, gold=gold, new_tokens=new, stop=stop, adapted=adapted, **about)

    def _adapted(self, tokenizer: Any, instance: Instance, shown: Sequence[Instance], after: int) -> Adapted:
        """An instance's prompt. Without a passage the instance itself is the question, which the policy sees."""
        found = adapt(self.adapter, shown, instance, tokenizer, after, self.context)
        asks = not instance.context and "summarization" not in self.scenario.tags
        return replace(found, prompt=replace(found.prompt, asks=asks))

    # ----------------------------------------------------------------------------------------------- evaluation

    def grade(self, sample: Sample, output: str) -> dict[str, float]:
        """HELM's metrics of an output, letters replaced by the choices that they stand for; best right answer."""
        text = output.strip()
        if isinstance(sample, HelmSample) and sample.mapping:
            text = sample.mapping.get(text, "")
        return graded(self.scenario.metrics, sample.answers, text)

    def evaluate(self, reading: Reading, samples: Sequence[Sample], tokenizer: Any) -> list[Record]:
        """Choices are scored apart, or an answer is generated; values of perturbed instances end with the perturbation."""
        if self.adapter.method == SEPARATE:
            scored = reading.score_choices([sample.choices for sample in samples])
            records = [_chosen(sample, options, tokenizer) for sample, options in zip(samples, scored, strict=True)]
        else:
            sure = self.metric_names[0] == "exact_match" and self.adapter.max_tokens <= SURE
            before = reading.fork() if sure else None
            records = super().evaluate(reading, samples, tokenizer)
            if before is not None:
                _add_probabilities(before, records, tokenizer)
        for record, sample in zip(records, samples, strict=True):
            assert isinstance(sample, HelmSample)
            if (name := sample.instance.perturbation) is not None:
                record["values"] = {f"{key}/{name}": value for key, value in record["values"].items()}
        return records

    def judge(self, finished: Finished) -> list[Record]:
        """With calibration over all instances, and the worst case over the versions of each."""
        records = [{**record, "values": dict(record["values"])} for record in finished.records]
        values = {record["id"]: record["values"] for record in records}
        first = [record["values"] for record in records if "/" not in record["id"]]
        sure = [each for each in first if "max_prob" in each]
        if sure:
            probs, right = ([each[name] for each in sure] for name in ("max_prob", "exact_match"))
            for each, added in zip(sure, calibration(probs, right), strict=True):
                for name in CALIBRATION:
                    each.pop(name, None)
                each.update(added)
        if self.perturbations:
            for record in records:
                if "/" not in record["id"]:
                    record["values"] |= worst(self._versions(record["id"], values), self.metric_names)
        return records if sure or self.perturbations else finished.records

    def _versions(self, name: str, values: Mapping[str, Mapping[str, float]]) -> list[Mapping[str, float]]:
        """Metrics of an instance and of its perturbed versions, by their plain names."""
        changed = [(each, values[f"{name}/{each}"]) for each in self.perturbations if f"{name}/{each}" in values]
        plain = [{key.removesuffix(f"/{each}"): value for key, value in own.items()} for each, own in changed]
        return [values[name], *plain]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """HELM's metrics of answers, the main one first."""
        return ("exact_match",) if self.adapter.method == SEPARATE else self.scenario.metrics

    def metrics(self, records: Sequence[Record]) -> dict[str, Metric]:
        """The scenario's metrics, the main one first; robustness, perturbed versions, calibration, probabilities."""
        chance = self._chance()
        lower = {name for name, better in CALIBRATION.items() if better == "lower"}
        plain = [*self.metric_names, *CALIBRATION, "max_prob", "gold_logprob"]
        names = [
            *self.metric_names,
            *(f"{name}/{kind}" for kind in ("robustness", *self.perturbations) for name in self.metric_names),
            *plain[len(self.metric_names) :],
        ]
        found = {}
        for name in names:
            there = sum(name in record["values"] for record in records)
            if there:
                better = "lower" if name in lower else "higher"
                guess = chance if name == self.metric_names[0] else None
                some = there < len(records)
                found[name] = make_metric(records, name, "mean", better, chance=guess, some=some)
        return found

    def _chance(self) -> float | None:
        """What guessing among the choices scores."""
        if self.adapter.method not in (SEPARATE, JOINT):
            return self.scenario.chance
        return sum(1 / len(instance.references) for instance in self.data.scored) / len(self.data.scored)

    def export(self, finished: Finished, result: Mapping[str, Any]) -> None:
        """HELM's five files, in `helm/runs/<experiment>/<run>/` of the experiment's folder."""
        shares = {"typos": {"share": self.typo_share}}
        changes = {name: shares.get(name, {}) for name in self.perturbations}
        export.write(self.scenario, self.adapter, self.metric_names, self.train_trial, changes, finished, result)


def _chosen(sample: Sample, options: Sequence[Scored], tokenizer: Any) -> Record:
    """Which choice has the highest log-probability for each token, and how sure that is among them (HELM's softmax)."""
    means = np.array([option.logprob / len(option.ids) for option in options])
    best = np.flatnonzero(means >= means.max()).tolist()
    shares = np.exp(means - means.max())
    values = {
        "exact_match": float(sample.gold_choice in best) / len(best),  # HELM: a tie counts in part
        "max_prob": float(shares.max() / shares.sum()),
        "gold_logprob": float(means[sample.gold_choice]),
    }
    pieces = [_pieces(option.ids, option.logprobs, tokenizer) for option in options]
    return {"values": values, "trace": [best[0]], "choice": best[0], "references": pieces}


def _add_probabilities(before: Reading, records: Sequence[Record], tokenizer: Any) -> None:
    """What the model gave to the tokens of each output, up to where it was cut; where nothing was said, to what ended it."""
    end = tokenizer.eos_token_id or 0
    outputs = [_kept(record["trace"], record["output"], tokenizer) or record["trace"][:1] or [end] for record in records]
    for record, scored in zip(records, before.score(outputs), strict=True):
        record["values"]["max_prob"] = math.exp(min(0.0, scored.logprob))
        record["pieces"] = _pieces(scored.ids, scored.logprobs, tokenizer)


def _kept(ids: Sequence[int], output: str, tokenizer: Any) -> list[int]:
    """The first of these tokens that hold all of a text."""
    ends = (end for end in range(len(ids)) if tokenizer.decode(ids[:end], skip_special_tokens=True).startswith(output))
    return list(ids[: next(ends, len(ids))])


def _pieces(ids: Sequence[int], logprobs: Sequence[float], tokenizer: Any) -> list[list[Any]]:
    """Text and log-probability of each token."""
    return [[tokenizer.decode([token]), logprob] for token, logprob in zip(ids, logprobs, strict=True)]
