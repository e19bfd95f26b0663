"""What a task is: samples with prompts, an evaluation of a batch that has been read, and metrics over records.

A task is a frozen dataclass registered by name, like a policy; its fields are its Hydra config. One loop in `runner.py`
drives all of them. Knows no policy and no model; tokenizers are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from kvlab.metrics import Metric, make_metric
from kvlab.protocol import Protocol
from kvlab.reading import Prompt, Reading, Scored
from kvlab.registry import Registry
from kvlab.settings import SettingError

Record = dict[str, Any]
"""What is written about one sample: `values` (numbers), and where there are such: output, answers, trace, fields."""


@dataclass(frozen=True)
class Sample:
    """One sample of a task, ready for the model.

    id       the same in every cell of a task; prompt: what is read before anything is asked of the model
    gold     token ids whose log-probability is recorded, right after the prompt
    choices  token ids of each choice; gold_choice: the right one
    answers  texts that an output is graded against
    new_tokens  most tokens to generate, 0 for none
    stop     strings that end an output
    fields   what tables may break results down by, such as length and depth
    where    file and row that it is from, for messages
    others   further prompts that one sample needs, as where choices stand in front of what is scored; `evaluate` finds
             the prompts of all samples as rows of the reading, in order
    """

    id: str
    prompt: Prompt
    gold: tuple[int, ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()
    gold_choice: int = 0
    answers: tuple[str, ...] = ()
    new_tokens: int = 0
    stop: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    others: tuple[Prompt, ...] = ()

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All that are read."""
        return (self.prompt, *self.others)

    @property
    def after(self) -> int:
        """Most tokens that come after a prompt."""
        return max(len(self.gold), self.new_tokens, max(map(len, self.choices), default=0))

    @property
    def work(self) -> int:
        """Tokens that are scored or generated in all, for estimates."""
        return len(self.gold) + self.new_tokens + sum(map(len, self.choices))

    @property
    def after_each(self) -> tuple[int, ...]:
        """Most tokens that come after each prompt."""
        return (self.after,) * len(self.prompts)

    @property
    def tokens(self) -> int:
        """Most tokens that the model will have seen."""
        return max(len(prompt.ids) for prompt in self.prompts) + self.after


@dataclass(frozen=True)
class Finished:
    """A cell whose samples are all recorded, as its task sees it.

    folder   the cell's own; shared: the experiment's, for files that several cells write to
    about    what result.json says of the cell: run_id, model, policy, policy_label, budget_label, protocol, ...
    samples  in order, and `records` beside them
    full     records by sample id of the full cache's cell, None where there is none yet
    load     a model and its tokenizer by name or path, as `kvlab.load_model` has them; without a name the cell's own
    weights  what tells that model from others of its name
    """

    folder: Path
    shared: Path
    about: Mapping[str, Any]
    samples: Sequence[Sample]
    records: list[Record]
    full: Callable[[], dict[str, Record] | None]
    load: Callable[[str | None], tuple[Any, Any]]
    weights: Callable[[str | None], str]


@dataclass(frozen=True)
class Task:
    """Base of all tasks. Give `samples` and `metrics`, and `grade` or `evaluate`."""

    name: ClassVar[str] = ""
    main_metric: ClassVar[str] = ""
    spreads: ClassVar[str] = ""
    """A setting that is a list, of which each item makes a cell of its own: the benchmark's tasks."""
    places: ClassVar[tuple[str, ...]] = ()
    """Settings that say where data is, and that `data_hash` stands for in a run's identity: moved data is the same data."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that numbers come from, whose versions results record."""

    @property
    def label(self) -> str:
        """What results call the task."""
        return self.name

    @property
    def reads(self) -> str:
        """The data that samples are made of, in words, and nothing is read to say so."""
        return self.name

    @property
    def longest(self) -> int | None:
        """Most tokens of a sample, where settings say that."""
        return None

    @property
    def needs_full(self) -> bool:
        """Whether samples are judged against the full cache's, so that its cell must be finished first."""
        return False

    def resolved(self, protocol: Protocol) -> Task:
        """The task with settings filled in that depend on the protocol."""
        return self

    def fitted(self, context: int) -> Task:
        """The task for a model that can read so many tokens, where its samples depend on that."""
        return self

    def data_hash(self) -> str:
        """Hash of the data that samples are made of, part of a run's identity. Raises SettingError where it can't be read."""
        return ""

    def samples(self, tokenizer: Any) -> list[Sample]:
        """All samples, the same for the same settings, data and tokenizer."""
        raise NotImplementedError

    @property
    def left_out(self) -> tuple[str, ...]:
        """A line on each row of the data that could not be used; known once `samples` has been called."""
        return ()

    def generation(self, tokenizer: Any) -> dict[str, Any]:
        """Further options of `Reading.generate`, such as `ends` and `min_new_tokens`."""
        return {}

    def grade(self, sample: Sample, output: str) -> dict[str, float]:
        """Values of an output."""
        return {}

    def metrics(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Metrics over all records; `main_metric` names the first to look at."""
        raise NotImplementedError

    def evaluate(self, reading: Reading, samples: Sequence[Sample], tokenizer: Any) -> list[Record]:
        """Records of a batch. The order of what is asked can't matter: everything but generation works on a fork."""
        records: list[Record] = [{"values": {}} for _ in samples]
        if samples[0].choices:
            scored = reading.score_choices([sample.choices for sample in samples])
            for record, sample, options in zip(records, samples, scored, strict=True):
                add_choices(record, sample, options)
        if any(sample.gold for sample in samples):
            scored = reading.score_choices([[sample.gold] if sample.gold else [] for sample in samples])
            for record, golds in zip(records, scored, strict=True):
                for gold in golds:
                    record["values"]["gold_logprob"] = gold.logprob / len(gold.ids)
        if longest := max(sample.new_tokens for sample in samples):
            outputs = reading.generate(longest, tokenizer, samples[0].stop, **self.generation(tokenizer))
            for record, sample, ids in zip(records, samples, outputs, strict=True):
                record["trace"] = ids = ids[: sample.new_tokens]
                record["output"] = until(tokenizer.decode(ids, skip_special_tokens=True), sample.stop)
                record["answers"] = list(sample.answers)
                record["values"] |= self.grade(sample, record["output"])
        return records

    def judge(self, finished: Finished) -> list[Record]:
        """Records with values that can only be given once all samples are there, as by comparing outputs."""
        return finished.records

    def notes(self, finished: Finished) -> list[str]:
        """A line on each thing that readers of the results must know before they believe them."""
        return []

    def export(self, finished: Finished, result: Mapping[str, Any]) -> None:
        """Write the benchmark's own files."""


def until(text: str, stop: Sequence[str]) -> str:
    """A text up to the first of these strings."""
    return text[: min([len(text), *(text.index(end) for end in stop if end and end in text)])]


def add_choices(record: Record, sample: Sample, options: Sequence[Scored]) -> None:
    """Which choice is likeliest, in all and for each token."""
    sums = [option.logprob for option in options]
    means = [option.logprob / len(option.ids) for option in options]
    best, best_mean = (max(range(len(options)), key=values.__getitem__) for values in (sums, means))
    record["values"]["accuracy"] = float(best == sample.gold_choice)
    record["values"]["accuracy_by_token"] = float(best_mean == sample.gold_choice)
    record["values"]["gold_logprob"] = means[sample.gold_choice]
    record["trace"], record["choice"] = [best], best


def mean_metrics(records: Sequence[Record], *names: str, chance: Mapping[str, float] | None = None) -> dict[str, Metric]:
    """Means of those values that the records have."""
    there = [name for name in names if all(name in record["values"] for record in records)]
    levels = chance or {}
    return {name: make_metric(records, name, "mean", "higher", chance=levels.get(name)) for name in there}


# ------------------------------------------------------------------------------------------------------ registry

TASKS: Registry[Task] = Registry("task", "register_task", SettingError, "kvlab.tasks")
TaskType = TypeVar("TaskType", bound=type[Task])


def register_task(name: str) -> Callable[[TaskType], TaskType]:
    """Class decorator: make a task known by `name`. Raises SettingError if another module's task has that name."""

    def add(cls: TaskType) -> TaskType:
        TASKS.add(name, cls)
        return cls

    return add


def task_names() -> list[str]:
    """Names of all registered tasks, those of installed plug-ins (entry-point group `kvlab.tasks`) included."""
    return TASKS.names()


def task_class(name: str) -> type[Task]:
    """The task registered by `name`. Raises SettingError with near names if there is none."""
    return TASKS.find(name)
