"""LongBench (Bai et al. 2023, arXiv 2308.14508), LongBench-E, MiniLongBench and LongBench v2 (arXiv 2412.15204).

Prompts, truncation, chat, output lengths, scoring and files are the benchmark's; docs/longbench.md says what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from kvlab.evals.base import Finished, Record, Sample, Task, mean_metrics, register_task
from kvlab.evals.chat import answer_ids, uses_chat
from kvlab.evals.longbench.data import (
    LENGTHS,
    PROMPTS,
    Version,
    check_dataset,
    folder_of,
    from_table,
    problem_of,
    read_rows_of,
    rows_file,
    v2_template,
)
from kvlab.evals.longbench.files import write_predictions
from kvlab.evals.longbench.metrics import BUCKETS, bucket, letter, need, score
from kvlab.evals.longbench.prompts import OWN_V2_TEMPLATE, Filled, fill, fill_mini, fill_v2, to_prompt, without_middle
from kvlab.evals.rows import BadRows, Row, Rows, sorted_out
from kvlab.evals.texts import file_hash
from kvlab.metrics import Metric, make_metric
from kvlab.settings import SettingError

NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
"""Datasets whose prompts stay out of the chat template: examples, or code, that are to be gone on with."""
GOLD_TOKENS = 64
"""Most tokens of an answer whose log-probability is recorded."""
_LABELS = {"v1": "longbench", "e": "longbench_e", "mini": "minilongbench", "v2": "longbench_v2"}
_OUTPUT = {"v1": "pred", "e": "pred_e", "mini": "pred_mini", "v2": "pred_v2"}
_V2_PARTS = {"difficulty": ("easy", "hard"), "length": ("short", "medium", "long")}


@register_task("longbench")
@dataclass(frozen=True)
class LongBench(Task):
    """Long documents: questions, summaries, few-shot examples, retrieval, code; each dataset is a cell of its own.

    tasks        datasets of v1, e and mini; nothing for v2
    version      v1, e (LongBench-E: scores by length), mini (MiniLongBench's files), v2 (multiple choice)
    data_dir     folder with the files, or with longbench/, minilongbench/, longbench_v2/; null: KVLAB_DATA_DIR
    prompt_file  dataset2prompt.json (v2: 0shot.txt) where it isn't with the data
    max_length   tokens of a prompt before the chat template; of longer ones the middle is taken out
    new_tokens   longest output; null: as the benchmark says
    chat         null: as the benchmark, where the model has a template; true: for every dataset; false: for none
    limit        only so many rows, from the top
    bad_rows     rows that can't be used: skip (left out, counted and reported) or stop
    """

    tasks: tuple[str, ...] = ()
    version: Version = "v1"
    data_dir: str | None = None
    prompt_file: str | None = None
    max_length: int = 3500
    new_tokens: int | None = None
    chat: bool | None = None
    limit: int | None = None
    bad_rows: BadRows = "skip"

    main_metric: ClassVar[str] = "score"
    spreads: ClassVar[str] = "tasks"
    places: ClassVar[tuple[str, ...]] = ("data_dir", "prompt_file")
    packages: ClassVar[tuple[str, ...]] = ("rouge", "jieba", "rapidfuzz")

    def __post_init__(self) -> None:
        if self.version == "v2" and self.tasks:
            raise SettingError("task.tasks: LongBench v2 is one dataset; leave it out with task.version=v2")
        if self.version != "v2" and not self.tasks:
            raise SettingError("task.tasks must be given: one dataset or more, such as task.tasks=[trec,qasper]")
        if self.version == "mini" and self.prompt_file is not None:
            raise SettingError("task.prompt_file: MiniLongBench's prompts are whole; leave it out with task.version=mini")
        for name in self.tasks:
            check_dataset(self.version, name)
        if self.max_length < 2:
            raise SettingError(f"task.max_length={self.max_length}: use at least 2")
        if self.new_tokens == 0 or self.limit == 0:
            raise SettingError("task.new_tokens and task.limit: use at least 1, or leave them out")

    @property
    def label(self) -> str:
        """Version and dataset. LongBench v2 without the benchmark's template says so."""
        if self.version != "v2":
            return f"{_LABELS[self.version]}-{'+'.join(self.tasks)}"
        return _LABELS["v2"] + ("-own_wording" if self._template == OWN_V2_TEMPLATE else "")

    @property
    def reads(self) -> str:
        """The version and its datasets."""
        return f"{', '.join(self.tasks) or 'all'} ({_LABELS[self.version]})"

    @property
    def longest(self) -> int | None:
        """What the middle is taken out for, without the answer."""
        return self.max_length

    # -------------------------------------------------------------------------------------------------------- data

    @property
    def _dataset(self) -> str:
        if self.version == "v2":
            return "v2"
        if len(self.tasks) > 1:
            raise SettingError("task.tasks: a cell has one dataset; `kvlab run` makes one of each")
        return self.tasks[0]

    @cached_property
    def _folder(self) -> Path | None:
        return folder_of(self.version, self.data_dir)

    @cached_property
    def _file(self) -> Path:
        return rows_file(self.version, self._dataset, self._folder)

    @cached_property
    def _template(self) -> str:
        """Empty for MiniLongBench, whose prompts are whole."""
        if self.version == "mini":
            return ""
        if self.version == "v2":
            return v2_template(self._folder, self.prompt_file) or OWN_V2_TEMPLATE
        found = from_table(PROMPTS, self._dataset, self._folder, self.prompt_file)
        if not isinstance(found, str) or "{context}" not in found:
            place = self.prompt_file or self._folder or "no folder"
            raise SettingError(
                f"there is no template of {self._dataset} with {{context}} in {place}: put LongBench's config/{PROMPTS} and "
                f"{LENGTHS} with the data (task.data_dir), or set task.prompt_file"
            )
        return found

    @cached_property
    def _new_tokens(self) -> int:
        if self.new_tokens is not None:
            return self.new_tokens
        found = 128 if self.version == "v2" else from_table(LENGTHS, self._dataset, self._folder)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise SettingError(
                f"nothing says how long outputs of {self._dataset} are: put LongBench's config/{LENGTHS} with the data "
                "(task.data_dir), or set task.new_tokens"
            )
        return found

    @cached_property
    def _read(self) -> Rows:
        rows = read_rows_of(self.version, self._file)[: self.limit]

        def problem(values: Mapping[str, Any]) -> str | None:
            return problem_of(self.version, self._dataset, self._template, values)

        return sorted_out(rows, problem, self.bad_rows)

    @cached_property
    def _rows(self) -> dict[str, Row]:
        found: dict[str, Row] = {}
        for row in self._read.good:
            name = str(row.values.get("_id", row.values.get("id", f"row{row.number:05d}")))
            if name in found:
                raise SettingError(f"{row.where}: its id {name!r} is that of row {found[name].number} too; ids must differ")
            found[name] = row
        return found

    @property
    def left_out(self) -> tuple[str, ...]:
        """Bad rows."""
        return self._read.left_out

    def data_hash(self) -> str:
        """Of the rows' file, the template and the output's length; what is wrong with them is said here."""
        if self.version != "v2":
            need(self._dataset)
        parts = (file_hash(self._file) if self._rows else "", self._template, self._new_tokens)
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    # ----------------------------------------------------------------------------------------------------- samples

    def samples(self, tokenizer: Any) -> list[Sample]:
        """One for each row."""
        chat = uses_chat(tokenizer, self.chat) and (self.chat is True or self._dataset not in NO_CHAT)
        return [self._sample(tokenizer, name, row, chat) for name, row in self._rows.items()]

    def _sample(self, tokenizer: Any, name: str, row: Row, chat: bool) -> Sample:
        values = row.values
        middle = without_middle(tokenizer, self._filled(values), self.max_length, at_once=self.version == "v2")
        answers = (values["answer"],) if self.version == "v2" else tuple(values["answers"])
        gold = f"The correct answer is ({answers[0]})" if self.version == "v2" else next(a for a in answers if a.strip())
        # A template's end takes no space, nor does Chinese.
        before = "" if chat or not middle.filled.text[-1:].isascii() else middle.filled.text[-16:]
        fields = {key: values[key] for key in ("length", "domain", "difficulty") if key in values}
        if self.version == "e":
            fields["bucket"] = bucket(values["length"])
        return Sample(
            id=name,
            prompt=to_prompt(tokenizer, middle.filled, chat),
            gold=answer_ids(tokenizer, gold, before)[:GOLD_TOKENS],
            answers=answers,
            new_tokens=self._new_tokens,
            fields={**fields, "tokens": middle.tokens, "truncated": middle.cut},
            where=row.where,
        )

    def _filled(self, values: Mapping[str, Any]) -> Filled:
        if self.version == "mini":
            return fill_mini(self._dataset, values)
        return fill_v2(self._template, values) if self.version == "v2" else fill(self._template, values)

    def generation(self, tokenizer: Any) -> dict[str, Any]:
        """samsum ends at a line's end, which can't be its first token, or models go on with another dialogue."""
        if self._dataset != "samsum":
            return {}
        return {"min_new_tokens": 1, "ends": tokenizer("\n", add_special_tokens=False).input_ids[-1:]}

    # ----------------------------------------------------------------------------------------------------- results

    def grade(self, sample: Sample, output: str) -> dict[str, float]:
        """The score, 0 to 1, and the same under the name of the row's part, where a version gives scores by parts."""
        fields = sample.fields
        if self.version == "v2":
            chosen = letter(output.strip())
            right = float(chosen == sample.answers[0])
            parts = {f"score_{fields[key]}": right for key, known in _V2_PARTS.items() if fields.get(key) in known}
            return {"score": right, **parts, "answered": float(chosen is not None)}
        found = score(self._dataset, output, sample.answers, self._rows[sample.id].values.get("all_classes") or ())
        return {"score": found, **({f"score_{fields['bucket']}": found} if "bucket" in fields else {})}

    def metrics(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Score, the log-probability of a token of the first answer, and scores by length (and difficulty)."""
        v2 = self.version == "v2"
        found = mean_metrics(records, "score", "gold_logprob", "answered", chance={"score": 0.25} if v2 else None)
        parts = [part for known in _V2_PARTS.values() for part in known] if v2 else BUCKETS
        for name in (f"score_{part}" for part in parts):
            if any(name in record["values"] for record in records):
                found[name] = make_metric(records, name, "mean", "higher", chance=0.25 if v2 else None, some=True)
        return found

    def export(self, finished: Finished, result: Mapping[str, Any]) -> None:
        """The benchmark's prediction file, and result.json over all datasets of the same model, policy and settings."""
        about = finished.about
        alike = {key: value for key, value in about["identity"].items() if key != "data"}
        alike["task"] = {key: value for key, value in alike["task"].items() if key != "tasks"}
        mark = hashlib.blake2b(json.dumps(alike, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()
        name = "--".join(str(about[key]) for key in ("model", "policy", "budget_label")).replace(" %", "pct")
        folder = finished.shared / "longbench" / _OUTPUT[self.version] / f"{_plain(name)}-{mark}"
        predict = self._v2_prediction if self.version == "v2" else self._prediction
        write_predictions(folder, self._dataset, [predict(record) for record in finished.records])

    def _prediction(self, record: Record) -> dict[str, Any]:
        values = self._rows[record["id"]].values
        length = {"length": values["length"]} if "length" in values else {}
        return {"pred": record["output"], "answers": values["answers"], "all_classes": values.get("all_classes"), **length}

    def _v2_prediction(self, record: Record) -> dict[str, Any]:
        values = self._rows[record["id"]].values
        response = record["output"].strip()
        chosen = letter(response)
        found = {**values, "context": values["context"][:1000], "response": response}
        return {"_id": record["id"], **found, "pred": chosen, "judge": chosen == values["answer"]}


def _plain(name: str) -> str:
    return "".join(char if char.isalnum() or char in "._=+-" else "_" for char in name)
