"""Your own prompts, from a file: answers are generated, graded where the file says what is right, and always recorded."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from kvlab.evals.base import Record, Sample, Task, mean_metrics, register_task
from kvlab.evals.chat import answer_ids, make_prompt, uses_chat
from kvlab.evals.rows import BadRows, Row, Rows, read_rows
from kvlab.evals.texts import existing_file, file_hash
from kvlab.metrics import Metric, contains, exact_match, make_metric, token_f1
from kvlab.settings import SettingError

Values = Mapping[str, Any]
FIELDS = ("prompt", "context", "question", "answer", "answers", "choices", "answer_start", "new_tokens", "id")
"""What a row may have; other fields are left alone."""


@register_task("prompts")
@dataclass(frozen=True)
class Prompts(Task):
    """Prompts of a .jsonl, .json, .csv or .parquet file, one a row.

    A row has `prompt`, or `context` and `question` (the question is held back from compression). It may have `answer` or
    `answers` (graded), `choices` with `answer` as one of them or its number from 0 (scored, nothing generated), `answer_start`
    (words that the answer begins with), `new_tokens`, and `id`.

    new_tokens  longest answer where a row doesn't say
    limit       only so many rows, from the top
    chat        use the chat template; null: where the model has one
    bad_rows    rows that can't be used: skip (left out, counted and reported) or stop
    """

    file: str = "???"
    new_tokens: int = 64
    limit: int | None = None
    chat: bool | None = None
    bad_rows: BadRows = "skip"

    main_metric: ClassVar[str] = "accuracy"
    places: ClassVar[tuple[str, ...]] = ("file",)

    def __post_init__(self) -> None:
        if self.new_tokens == 0:
            raise SettingError("task.new_tokens=0: use at least 1")

    @property
    def reads(self) -> str:
        """The file."""
        return self.file

    @cached_property
    def _path(self) -> Path:
        return existing_file(self.file, "task.file")

    @cached_property
    def _rows(self) -> list[Row]:
        if self.limit == 0:
            raise SettingError("task.limit=0: leave it out, or use at least 1")
        rows = self._read.good
        kinds = [_kind(row.values) for row in rows]
        if odd := next((number for number, kind in enumerate(kinds) if kind != kinds[0]), None):
            first = f"row {rows[0].number} of kind {kinds[0]}"
            raise SettingError(f"{rows[odd].where} is of kind {kinds[odd]}, {first}: use two files")
        names = [_row_id(row) for row in rows]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SettingError(f"{self._path}: two rows have the id {twice!r}; ids must differ")
        return list(rows)

    @cached_property
    def _read(self) -> Rows:
        return read_rows(self._path, _problem, self.bad_rows, self.limit)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Bad rows."""
        return self._read.left_out

    def data_hash(self) -> str:
        """Of the file's bytes."""
        rows = self._rows  # what is wrong with the file is said before anything is loaded
        return file_hash(self._path) if rows else ""

    def samples(self, tokenizer: Any) -> list[Sample]:
        """One for each row."""
        return [self._sample(tokenizer, row) for row in self._rows]

    def _sample(self, tokenizer: Any, place: Row) -> Sample:
        row, name = place.values, _row_id(place)
        chat, start = uses_chat(tokenizer, self.chat), str(row.get("answer_start", ""))
        context, question = (row["prompt"], "") if "prompt" in row else (row["context"], row["question"])
        prompt = make_prompt(tokenizer, context, question, start, chat)
        before = start if start or chat else question or context
        if "choices" in row:
            choices = tuple(answer_ids(tokenizer, str(choice), before) for choice in row["choices"])
            return Sample(name, prompt, choices=choices, gold_choice=_gold_choice(row) or 0, where=place.where)
        answers = _answers(row)
        gold = answer_ids(tokenizer, answers[0], before) if answers else ()
        return Sample(
            id=name,
            prompt=prompt,
            gold=gold,
            answers=answers,
            new_tokens=int(row.get("new_tokens", self.new_tokens)),
            where=place.where,
        )

    def grade(self, sample: Sample, output: str) -> dict[str, float]:
        """Against the answers, where there are some; `words` counts what was written."""
        values = {"words": float(len(output.split()))}
        if sample.answers:
            values["accuracy"] = contains(output, sample.answers)
            values["exact"] = exact_match(output, sample.answers)
            values["f1"] = token_f1(output, sample.answers)
        return values

    def metrics(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Accuracy (the output contains an answer, or the right choice is likeliest), exact match, F1; else length in words."""
        names = ("accuracy", "exact", "f1", "accuracy_by_token", "gold_logprob")
        chance = None
        if self._rows and "choices" in self._rows[0].values:
            guess = sum(1 / len(row.values["choices"]) for row in self._rows) / len(self._rows)
            chance = {"accuracy": guess, "accuracy_by_token": guess}
        return mean_metrics(records, *names, chance=chance) or {"words": make_metric(records, "words", "mean", "higher")}


def _problem(row: Values) -> str | None:
    """What is wrong with a row, if anything. Fields of one's own are left alone unless they look like a misspelt one."""
    for name in row:
        if name not in FIELDS and (close := difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.8)) and close[0] not in row:
            return f"there is no field {name!r} (did you mean {close[0]}?)"
    if ("prompt" in row) == ("context" in row and "question" in row):
        return f"give either 'prompt', or 'context' and 'question'; it has: {', '.join(row)}"
    for name in ("prompt", "context", "question"):
        if name in row and not (isinstance(row[name], str) and row[name].strip()):
            return f"{name!r} must be text that isn't empty"
    if not str(row.get("new_tokens", 1)).isdigit() or not int(row.get("new_tokens", 1)):
        return "'new_tokens' must be a whole number of at least 1"
    if "choices" in row:
        if not isinstance(row["choices"], list) or len(row["choices"]) < 2 or not all(str(c).strip() for c in row["choices"]):
            return "'choices' must be a list of at least two texts"
        if _gold_choice(row) is None:
            return f"'answer' must be one of the choices or its number from 0 to {len(row['choices']) - 1}"
    elif any(not answer.strip() for answer in _answers(row)):
        return "'answer' must be text that isn't empty"
    return None


def _kind(row: Values) -> str:
    return "choices" if "choices" in row else "graded" if _answers(row) else "open (no answer)"


def _row_id(row: Row) -> str:
    return str(row.values.get("id", f"row{row.number:05d}"))


def _answers(row: Values) -> tuple[str, ...]:
    given = row.get("answers", row.get("answer"))
    if given is None:
        return ()
    return tuple(map(str, given)) if isinstance(given, list | tuple) else (str(given),)


def _gold_choice(row: Values) -> int | None:
    """Number of the right choice: the one that `answer` is, else the one that it numbers; None if neither."""
    answer, choices = row.get("answer"), [str(choice) for choice in row["choices"]]
    if str(answer) in choices:
        return choices.index(str(answer))
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    return None
