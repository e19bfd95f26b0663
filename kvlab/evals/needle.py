"""Retrieval from generated contexts: passkey, needles, variables, words, records, over a grid of lengths and depths.

In the manner of needle-in-a-haystack tests and of RULER (Hsieh et al. 2024, arXiv 2404.06654); texts and wording are ours, made
by `puzzles.py`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from kvlab.evals.base import Record, Sample, Task, mean_metrics, register_task
from kvlab.evals.chat import answer_ids, make_prompt, uses_chat
from kvlab.evals.haystack import Haystack
from kvlab.evals.puzzles import KINDS, make_puzzle, recall
from kvlab.hints import did_you_mean
from kvlab.metrics import Metric
from kvlab.settings import SettingError


@register_task("needle")
@dataclass(frozen=True)
class Needle(Task):
    """Find what is hidden in a long context, at every depth and length of a grid.

    kind      passkey, needle, multikey, multivalue, multiquery, variables, common_words, frequent_words, key_value
    lengths   tokens of the whole prompt; depths: where the needle stands, 0 (start) to 1 (end)
    n         samples at each length and depth
    needles   keys, values, queries or hops, for the kinds that have several
    haystack  noise, prose, or folder (`folder` holds .txt files)
    chat      use the chat template; null: where the model has one
    """

    kind: str = "passkey"
    lengths: tuple[int, ...] = (500,)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    n: int = 5
    needles: int = 4
    haystack: Literal["noise", "prose", "folder"] = "noise"
    folder: str | None = None
    new_tokens: int | None = None
    chat: bool | None = None
    seed: int = 0

    main_metric: ClassVar[str] = "accuracy"
    places: ClassVar[tuple[str, ...]] = ("folder",)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingError(f"task.kind={self.kind}{did_you_mean(self.kind, KINDS)}: use one of {', '.join(KINDS)}")
        if not self.lengths or not self.depths or not self.n:
            raise SettingError("task.lengths, task.depths and task.n: give at least one each")
        if (self.haystack == "folder") != (self.folder is not None):
            raise SettingError("task.haystack=folder and task.folder=PATH go together: give both or neither")
        if self.folder is not None and not Path(self.folder).expanduser().is_dir():
            raise SettingError(f"task.folder={self.folder}: there is no such folder")

    @property
    def label(self) -> str:
        """The kind of needle."""
        return self.kind

    @property
    def reads(self) -> str:
        """Made up, in a haystack."""
        return f"{self.kind} in {self.folder or self.haystack}, made up"

    @property
    def longest(self) -> int | None:
        """Tokens of the longest prompt."""
        return max(self.lengths)

    @cached_property
    def _haystack(self) -> Haystack:
        if self.folder is not None:
            return Haystack.from_folder(Path(self.folder).expanduser())
        return Haystack.named(self.haystack)

    def data_hash(self) -> str:
        """Of the haystack."""
        return self._haystack.hash

    def samples(self, tokenizer: Any) -> list[Sample]:
        """`n` puzzles at each place of the grid, each drawn from the seed, its place and its number alone."""
        places = [(length, depth) for length in self.lengths for depth in self.depths]
        return [self._sample(tokenizer, number, *place) for number in range(self.n) for place in places]

    def _sample(self, tokenizer: Any, number: int, length: int, depth: float) -> Sample:
        chat = uses_chat(tokenizer, self.chat)
        around = len(make_prompt(tokenizer, "a", "b", chat=chat).ids) - 2

        def count(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False).input_ids)

        key = f"{self.seed}/{self.kind}/{length}/{depth}/{number}"
        rng = random.Random(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big"))
        puzzle = make_puzzle(
            self.kind,
            length=max(1, length - around),
            depth=float(depth),
            rng=rng,
            count=count,
            haystack=self._haystack,
            needles=self.needles,
        )
        prompt = make_prompt(tokenizer, puzzle.context, puzzle.question, puzzle.answer_start, chat)
        gold = answer_ids(tokenizer, ", ".join(puzzle.answers), puzzle.answer_start)
        return Sample(
            id=f"{length}-{depth:g}-{number:04d}",
            prompt=prompt,
            gold=gold,
            answers=puzzle.answers,
            new_tokens=self.new_tokens or 8 * (len(gold) // 8 + 2),  # in steps of 8, so that batches hold like samples
            fields={"length": length, "depth": puzzle.depth},
        )

    def grade(self, sample: Sample, output: str) -> dict[str, float]:
        """Share of the answers that the output holds, and whether it holds all."""
        found = recall(output, sample.answers)
        return {"accuracy": float(found == 1), "recall": found}

    def metrics(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Accuracy (all answers found), recall, and the log-probability of a token of the right answer."""
        return mean_metrics(records, "accuracy", "recall", "gold_logprob", chance={"accuracy": 0.0, "recall": 0.0})
