"""Answers to instructions, compared by a judge with those of a reference: win rates in the manner of AlpacaEval.

The default reference is the same model with its full cache, as in FastGen's experiments (Ge et al. 2024, arXiv 2310.01801): a
policy that changes nothing wins half of the comparisons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from kvlab.evals.alpaca import length_control as lc
from kvlab.evals.alpaca.endpoint import EndpointJudge
from kvlab.evals.alpaca.files import Output, read_outputs, safe, write_json, write_leaderboard
from kvlab.evals.alpaca.judges import Judge, LocalJudge, Orders
from kvlab.evals.alpaca.verdicts import Pair, annotate, annotation_rows, doubts, stored, values_of
from kvlab.evals.alpaca.win_rates import win_rates
from kvlab.evals.base import Finished, Record, Sample, Task, register_task
from kvlab.evals.chat import make_prompt, uses_chat
from kvlab.evals.rows import BadRows, Row, Rows, missing, read_rows
from kvlab.evals.texts import existing_file, file_hash, text_hash
from kvlab.metrics import Metric, make_metric
from kvlab.paths import data_dir
from kvlab.settings import SettingError

INSTRUCTIONS = "model_outputs_text_davinci_003.json"
"""In <data folder>/alpaca_eval: of AlpacaEval's own files the smallest that has all of its 805 instructions."""
BIAS = "position_bias"


@register_task("alpaca")
@dataclass(frozen=True)
class Alpaca(Task):
    """Instructions answered under a policy, and judged against a reference.

    file       instructions in AlpacaEval's format, .json or .jsonl; null: its 805 in the data folder
    data_dir   data folder; null: KVLAB_DATA_DIR
    limit      only so many instructions, from the top
    new_tokens longest answer
    chat       use the chat template; null: where the model has one
    reference  full: the same model's full cache; or a file of outputs in AlpacaEval's format, matched by instruction
    judged_by  local (a model here), openai (any OpenAI-compatible endpoint), none (outputs are only written)
    judge_model  local: name or path, null: the cell's own model; openai: the endpoint's name of it
    judge_url    of the endpoint, up to and without /chat/completions
    judge_key    environment variable that holds its key; judge_timeout (seconds) and judge_retries: of each request
    orders     both: each pair is judged in both orders, and the mean counts; one: in an order drawn for each instruction
    length_controlled  also the win rate at equal lengths
    bad_rows   rows that can't be used: skip (left out, counted and reported) or stop
    """

    file: str | None = None
    data_dir: str | None = None
    limit: int | None = None
    new_tokens: int = 256
    chat: bool | None = None
    reference: str = "full"
    judged_by: Literal["local", "openai", "none"] = "local"
    judge_model: str | None = None
    judge_url: str | None = None
    judge_key: str = "OPENAI_API_KEY"
    judge_timeout: float = 60.0
    judge_retries: int = 5
    orders: Orders = "both"
    length_controlled: bool = True
    bad_rows: BadRows = "skip"

    main_metric: ClassVar[str] = "win_rate"
    places: ClassVar[tuple[str, ...]] = ("file", "data_dir", "reference", "judge_key", "judge_timeout", "judge_retries")

    def __post_init__(self) -> None:
        for name in ("limit", "new_tokens"):
            if getattr(self, name) == 0:
                raise SettingError(f"task.{name}=0: use at least 1")
        if self.judged_by == "openai" and not (self.judge_url and self.judge_model):
            raise SettingError("task.judged_by=openai needs task.judge_url and task.judge_model")
        if self.judge_url and self.judged_by != "openai":
            raise SettingError(
                f"task.judge_url is of an endpoint, and task.judged_by={self.judged_by}: use task.judged_by=openai"
            )
        if self.judge_model and self.judged_by == "none":
            raise SettingError("task.judge_model is of a judge, and task.judged_by=none asks for none: leave it out")
        if self.judge_url and not self.judge_url.startswith(("http://", "https://")):
            raise SettingError(f"task.judge_url={self.judge_url}: give an address such as http://localhost:8000/v1")
        if self.judge_timeout <= 0:
            raise SettingError(f"task.judge_timeout={self.judge_timeout}: use seconds above 0")

    @property
    def reads(self) -> str:
        """The file of instructions."""
        return self.file or "AlpacaEval's instructions"

    # ---------------------------------------------------------------------------------------------------- data

    @cached_property
    def _folder(self) -> Path | None:
        if self.data_dir is None:
            return data_dir()
        folder = Path(self.data_dir).expanduser()
        if not folder.is_dir():
            raise SettingError(f"task.data_dir={self.data_dir}: there is no such folder")
        return folder

    @cached_property
    def _path(self) -> Path:
        if self.file is not None:
            return existing_file(self.file, "task.file")
        if self._folder is None:
            raise SettingError(
                "task alpaca needs instructions: give task.file, or set KVLAB_DATA_DIR to a folder with alpaca_eval"
            )
        return existing_file(str(self._folder / "alpaca_eval" / INSTRUCTIONS), "task.file")

    @cached_property
    def _outputs(self) -> dict[str, Output] | None:
        """The reference's outputs by instruction, where they are a file's."""
        return None if self.reference == "full" else read_outputs(existing_file(self.reference, "task.reference"))

    @cached_property
    def _rows(self) -> Rows:
        return read_rows(self._path, self._problem, self.bad_rows, self.limit)

    def _problem(self, row: Mapping[str, Any]) -> str | None:
        if wrong := missing(row, "instruction"):
            return wrong
        if not isinstance(row["instruction"], str) or not row["instruction"].strip():
            return "'instruction' must be text that isn't empty"
        if self._outputs is not None and row["instruction"] not in self._outputs:
            return f"task.reference={self.reference} has no output for this instruction"
        return None

    @cached_property
    def _by_id(self) -> dict[str, Row]:
        return {f"{row.number:05d}": row for row in self._rows.good}

    @cached_property
    def _difficulty(self) -> dict[str, float]:
        """By instruction; nothing unless all of them are known."""
        path = lc.data_file(self._folder, "difficulty") if self._controls else None
        if path is None:
            return {}
        known = lc.read_difficulties(path)
        texts = [row.values["instruction"] for row in self._rows.good]
        return {text: known[text] for text in texts} if all(text in known for text in texts) else {}

    @cached_property
    def _gamed(self) -> lc.Gamed | None:
        path = lc.data_file(self._folder, "gamed") if self._difficulty else None
        return lc.read_gamed(path) if path else None

    @property
    def _controls(self) -> bool:
        return self.length_controlled and self.judged_by != "none"

    @property
    def left_out(self) -> tuple[str, ...]:
        """Bad rows."""
        return self._rows.left_out

    def data_hash(self) -> str:
        """Of the instructions' file, the reference's, and what lengths are controlled with."""
        if self._controls:
            lc.need_sklearn()
        rows = len(self._rows.good)  # what is wrong with the files is said before anything is loaded
        reference = "full" if self._outputs is None else file_hash(existing_file(self.reference, "task.reference"))
        gamed = None if self._gamed is None else lc.data_file(self._folder, "gamed")
        parts = [file_hash(self._path), reference, repr(sorted(self._difficulty.items())), gamed and file_hash(gamed), rows]
        return text_hash(repr(parts))

    def samples(self, tokenizer: Any) -> list[Sample]:
        """One for each instruction."""
        chat = uses_chat(tokenizer, self.chat)
        return [
            Sample(
                id=name,
                prompt=make_prompt(tokenizer, row.values["instruction"], chat=chat),
                new_tokens=self.new_tokens,
                fields={"dataset": _dataset(row.values)},
                where=row.where,
            )
            for name, row in self._by_id.items()
        ]

    def grade(self, sample: Sample, output: str) -> dict[str, float]:
        """Length in words and, as AlpacaEval has it, in characters."""
        return {"words": float(len(output.split())), "length": float(len(output))}

    # ------------------------------------------------------------------------------------------------- judging

    def judge(self, finished: Finished) -> list[Record]:
        """Records with what the judge thought of each output. Verdicts that are on disk are not asked for again."""
        if self.judged_by == "none":
            return finished.records
        judged = [{**record, "values": _unjudged(record["values"])} for record in finished.records]
        if self._against_itself(finished):
            for record in judged:
                record["values"] |= {"win": 0.5, "win_discrete": 0.5}
        else:
            found = annotate(finished.folder, self._pairs(finished), self._judge_of(finished), self.orders)
            for record in judged:
                record["values"] |= values_of(found[record["id"]])
        if (control := self._control(finished, judged)) is not None:
            for record, value in zip(judged, control.values, strict=True):
                record["values"][control.name] = float(value)
        return judged

    @property
    def needs_full(self) -> bool:
        """Where outputs are compared with the full cache's."""
        return self._outputs is None

    def _against_itself(self, finished: Finished) -> bool:
        about = finished.about
        return self.reference == "full" and about["policy"] == "full" and not about.get("codec") and not about.get("share")

    def _judge_of(self, finished: Finished) -> Judge:
        if self.judged_by == "openai":
            assert self.judge_url and self.judge_model
            return EndpointJudge(self.judge_url, self.judge_model, self.judge_key, self.judge_timeout, self.judge_retries)
        name = self.judge_model or str(finished.about["model"])
        return LocalJudge(lambda: finished.load(self.judge_model), name, finished.weights(self.judge_model))

    def _pairs(self, finished: Finished) -> list[Pair]:
        """Each record's output beside the reference's."""
        full: dict[str, Record] = {}
        if self._outputs is None:
            full = finished.full() or {}
            if not full:
                raise SettingError(
                    "task.reference=full: there is no full cache to compare with: run policy=full with the same settings "
                    "first, or along: policy=full,h2o"
                )
        pairs = []
        for record in finished.records:
            row = self._by_id[record["id"]].values
            if self._outputs is not None:
                reference = self._outputs[row["instruction"]]
            elif "output" in full.get(record["id"], {}):
                reference = Output(full[record["id"]]["output"], f"{finished.about['model']}--full")
            else:
                raise SettingError(f"the full cache's cell has no output for sample {record['id']}: run it again (--force)")
            pairs.append(Pair(record["id"], row["instruction"], _dataset(row), record["output"], reference))
        return pairs

    def _control(self, finished: Finished, judged: Sequence[Record]) -> lc.LengthControl | None:
        """Length control over judged records; None where it isn't wanted, or too few have a verdict."""
        wins = [record["values"].get("win") for record in judged]
        if not self._controls or sum(win is not None for win in wins) < lc.LEAST:
            return None
        texts = [self._by_id[record["id"]].values["instruction"] for record in judged]
        difficulty = [self._difficulty[text] for text in texts] if self._difficulty else None
        if self._against_itself(finished):
            return lc.by_construction(len(wins), lc.variant(difficulty, self._gamed))
        theirs, ours = zip(*((len(pair.reference.text), len(pair.output)) for pair in self._pairs(finished)), strict=True)
        return lc.length_control(wins, theirs, ours, difficulty, self._gamed)

    # ------------------------------------------------------------------------------------------------- results

    def metrics(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Win rates as shares, over outputs that there is a verdict on; preference for the first position; lengths."""
        names = {"win_rate": "win", "discrete_win_rate": "win_discrete", **{name: name for name in (*lc.VARIANTS, BIAS)}}
        there = {name: of for name, of in names.items() if any(of in record["values"] for record in records)}
        found = {name: make_metric(records, of, "mean", "higher", some=True) for name, of in there.items()}
        return found | {name: make_metric(records, name, "mean", "higher") for name in ("words", "length")}

    def notes(self, finished: Finished) -> list[str]:
        """What readers must know of the judge, and of a length-controlled win rate that says nothing."""
        if self.judged_by == "none" or self._against_itself(finished):
            return []
        judge, about = self._judge_of(finished), finished.about
        rows = list(stored(finished.folder, self._pairs(finished), judge, self.orders).values())
        place = f"{about['policy_label']}, {about['budget_label']}"
        control = self._control(finished, finished.records)
        empty = control is not None and not any(control.weights)
        why = f"{place}: the length-controlled win rate is 50 % for want of data: the fit's penalty left no weights"
        return [*doubts(rows, judge.name, place), *([why] if empty else [])]

    def export(self, finished: Finished, result: Mapping[str, Any]) -> None:
        """AlpacaEval's files, in <experiment>/alpaca/<model>--<policy>--<budget>-<run>."""
        about = finished.about
        generator = f"{about['model']}--{about['policy_label']}--{about['budget_label']}"
        folder = finished.shared / "alpaca" / f"{safe(generator)}-{about['run_id'][:8]}"
        outputs = []
        for record in finished.records:
            row = self._by_id[record["id"]].values
            start = {"instruction": row["instruction"], "output": record["output"]}
            outputs.append({**start, "generator": generator, "dataset": _dataset(row)})
        write_json(folder / "model_outputs.json", outputs)
        if self.judged_by == "none" or self._against_itself(finished):
            return
        pairs = self._pairs(finished)
        found = stored(finished.folder, pairs, self._judge_of(finished), self.orders)
        write_json(folder / "annotations.json", annotation_rows(pairs, found, generator))
        preferences = [found[pair.id]["preference"] for pair in pairs]
        if any(preference is not None for preference in preferences):
            control, lengths = self._control(finished, finished.records), [len(pair.output) for pair in pairs]
            write_leaderboard(folder / "leaderboard.csv", generator, win_rates(preferences), lengths, control)


def _dataset(row: Mapping[str, Any]) -> str:
    return str(row.get("dataset", "?"))


def _unjudged(values: Mapping[str, float]) -> dict[str, float]:
    """Numbers of a sample without those that an earlier judging gave."""
    return {name: value for name, value in values.items() if name not in ("win", "win_discrete", BIAS, *lc.VARIANTS)}
