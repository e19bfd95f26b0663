"""Perplexity of a text: each window is a prompt and a continuation that is scored under eviction.

A policy begins anew at each window, as a cache does. Under `prompt` and `chunked` the window's context is compressed and what
follows is scored; under `stream` eviction acts from the window's first token on and almost all of it is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from kvlab.evals.base import Record, Sample, Task, register_task
from kvlab.evals.chat import start_ids
from kvlab.evals.texts import Text, dataset_text, embedded_text, file_text
from kvlab.metrics import Metric, make_metric
from kvlab.protocol import Protocol
from kvlab.reading import Prompt, Reading
from kvlab.settings import SettingError


@register_task("perplexity")
@dataclass(frozen=True)
class Perplexity(Task):
    """Perplexity of a text, window by window.

    file     a text file (.txt, .md), or a table (.jsonl, .json, .csv, .parquet) with a `column`; without file and dataset,
             prose that comes with Python
    dataset, subset, split, column  a dataset from the hub or a local folder
    windows  how many, one after the other from the text's start
    context, scored  tokens of a window that are read first, and that are scored (512 + 256; under `stream` 1 + 1023)
    """

    file: str | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str = "test"
    column: str = "text"
    windows: int = 16
    context: int | None = None
    scored: int | None = None

    main_metric: ClassVar[str] = "perplexity"
    places: ClassVar[tuple[str, ...]] = ("file",)

    def __post_init__(self) -> None:
        if self.file and self.dataset:
            raise SettingError("task.file and task.dataset exclude each other: give one of them")
        for name in ("windows", "context", "scored"):
            if getattr(self, name) == 0:
                raise SettingError(f"task.{name}=0: use at least 1")

    def resolved(self, protocol: Protocol) -> Perplexity:
        """Windows of 512 + 256 tokens, or of 1 + 1023 where nothing is compressed at once."""
        context, scored = (512, 256) if protocol.compresses else (1, 1023)
        return replace(self, context=self.context or context, scored=self.scored or scored)

    @property
    def reads(self) -> str:
        """The dataset, the file, or Python's prose."""
        named = " ".join(part for part in (self.dataset, self.subset, self.split) if part) if self.dataset else self.file
        return named or "prose that comes with Python"

    @property
    def longest(self) -> int | None:
        """Tokens of a window."""
        return self.context + self.scored if self.context and self.scored else None

    @cached_property
    def _text(self) -> Text:
        if self.dataset:
            return dataset_text(self.dataset, self.subset, self.split, self.column)
        return file_text(self.file, self.column) if self.file else embedded_text()

    def data_hash(self) -> str:
        """Of the text."""
        return self._text.hash

    def samples(self, tokenizer: Any) -> list[Sample]:
        """Windows; the tokenizer's start token, if it has one, comes first in each."""
        assert self.context and self.scored, "resolved() sets both"
        ids = tokenizer(self._text.text, add_special_tokens=False, verbose=False).input_ids
        start, size = start_ids(tokenizer), self.context + self.scored
        fresh = size - len(start)  # tokens of the text in each window
        if fresh <= self.scored - 1:
            raise SettingError(
                f"task.context={self.context}: too short for the {len(start)} tokens that every text begins with"
            )
        if len(ids) < fresh:
            raise SettingError(
                f"the text has {len(ids)} tokens, fewer than a window of {size}: lower task.context and task.scored"
            )
        found = []
        for number in range(min(self.windows, len(ids) // fresh)):
            window = (*start, *ids[number * fresh : (number + 1) * fresh])
            prompt = Prompt(tuple(window[: self.context]), text_len=size)
            found.append(Sample(f"w{number:05d}", prompt, gold=tuple(window[self.context :]), fields={"window": number}))
        return found

    def evaluate(self, reading: Reading, samples: Sequence[Sample], tokenizer: Any) -> list[Record]:
        """Negative log-likelihood (nats) of each window, and the likeliest token in each place."""
        records = []
        for scored in reading.score([sample.gold for sample in samples]):
            tokens = len(scored.ids)
            values = {"nll": -scored.logprob, "tokens": tokens, "gold_logprob": scored.logprob / tokens}
            values["top1"] = sum(a == b for a, b in zip(scored.ids, scored.top1, strict=True)) / tokens
            records.append({"values": values, "trace": scored.top1})
        return records

    def metrics(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Perplexity, and how often the likeliest token is the right one."""
        return {
            "perplexity": make_metric(records, "nll", "perplexity", "lower", weight="tokens"),
            "top1": make_metric(records, "top1", "mean", "higher"),
        }
