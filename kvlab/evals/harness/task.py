"""lm-eval-harness in kvlab's loop: its tasks, prompts, filters and metrics; every log-likelihood and output under the policy.

lm-eval builds the requests of each document and turns results into values; what is in between is kvlab's. So a sweep over its
tasks is resumed by document, recorded and compared as any other. `kvlab lm_eval` is the other way round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from kvlab.evals.base import Finished, Record, Sample, register_task
from kvlab.evals.harness.requests import Doc, Encoder, Requests, grouped, windows_of
from kvlab.evals.harness.results import Work, aggregated, document_values, gold_choice
from kvlab.evals.harness.source import Source, asked_hash, chat_template, find_source, load_leaves, quiet
from kvlab.evals.rows import BadRow, BadRows
from kvlab.metrics import Metric, make_metric
from kvlab.protocol import Protocol
from kvlab.reading import Prompt, Reading
from kvlab.settings import SettingError

GOLD_TOKENS = 128
"""Tokens of an answer that is generated whose log-probability is recorded."""
DEFAULT_NEW_TOKENS = 256
"""As lm-eval has it for tasks that don't say."""


@register_task("lm_eval")
@dataclass(frozen=True)
class LmEval(Requests):
    """Tasks of lm-eval-harness by its names; each of `tasks` is a cell of its own, a group such as mmlu is one.

    num_fewshot   examples in front of each question; null: as the task says, else none
    limit         only so many documents of each task, from the top
    data_dir      folder of data files that tasks are made from where it has them (default: KVLAB_DATA_DIR); lm-eval loads
                  others from the hub
    include_path  folder with task files of your own
    chat          put prompts into the model's chat template (lm-eval's apply_chat_template)
    fewshot_as_multiturn  examples as turns of a conversation; null: with chat
    system        system instruction
    max_length    tokens that a text may have, of which more are cut on the left as in lm-eval; null: longer ones are left out
    fewshot_seed  of the choice of examples
    bad_rows      rows that can't be used: skip (left out, counted and reported) or stop
    """

    tasks: tuple[str, ...] = ()
    num_fewshot: int | None = None
    limit: int | None = None
    data_dir: str | None = None
    include_path: str | None = None
    chat: bool = False
    fewshot_as_multiturn: bool | None = None
    system: str | None = None
    max_length: int | None = None
    fewshot_seed: int = 1234
    bad_rows: BadRows = "skip"

    spreads: ClassVar[str] = "tasks"
    places: ClassVar[tuple[str, ...]] = ("data_dir", "include_path")
    packages: ClassVar[tuple[str, ...]] = ("lm_eval", "datasets")

    def __post_init__(self) -> None:
        if not self.tasks or not all(isinstance(name, str) and name for name in self.tasks):
            raise SettingError("task.tasks must be given: lm-eval's names, such as task.tasks=[piqa,copa]")
        if self.limit == 0:
            raise SettingError("task.limit=0: leave it out, or use at least 1")
        if self.fewshot_as_multiturn and not self.chat:
            raise SettingError("task.fewshot_as_multiturn=true needs task.chat=true")

    @property
    def label(self) -> str:
        """The task's name and the number of its examples."""
        shots = "" if self.num_fewshot is None else f" {self.num_fewshot}-shot"
        return "+".join(self.tasks) + shots

    @property
    def reads(self) -> str:
        """lm-eval's names."""
        return f"{', '.join(self.tasks)} (lm-eval)"

    @property
    def longest(self) -> int | None:
        """What texts are cut to."""
        return self.max_length

    @cached_property
    def _source(self) -> Source:
        return find_source(self.tasks, self.data_dir, self.include_path, self.bad_rows)

    @cached_property
    def _leaves(self) -> dict[str, Any]:
        """lm-eval's task objects by name, with this task's number of examples and seed."""
        leaves = load_leaves(self._source, self.num_fewshot)
        for leaf in leaves.values():
            leaf.set_fewshot_seed(seed=self.fewshot_seed)
        return leaves

    @cached_property
    def _bad(self) -> list[str]:
        return list(self._source.left_out)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Bad rows, and documents whose right answer isn't among the choices."""
        return tuple(dict.fromkeys(self._bad))

    def resolved(self, protocol: Protocol) -> LmEval:
        """Refuses whole texts under a protocol that compresses prompts."""
        rolling = [name for name, leaf in self._leaves.items() if leaf.OUTPUT_TYPE == "loglikelihood_rolling"]
        if rolling and protocol.compresses:
            raise SettingError(
                f"task {rolling[0]} scores whole texts, which have no prompt to compress: use protocol=stream (protocol="
                f"{protocol.name} would leave its first token alone)"
            )
        return self

    def data_hash(self) -> str:
        """Of the data folder's files; else, or where task files are your own, of all that lm-eval has loaded."""
        hashed = hashlib.blake2b(self._source.hash.encode(), digest_size=16)
        for name, leaf in self._leaves.items():
            hashed.update(f"{name} {leaf.VERSION} {leaf.get_config('num_fewshot')}".encode())
        if self.include_path or not self._source.hash:
            hashed.update(asked_hash(self._source, self.num_fewshot, self.limit).encode())
        return hashed.hexdigest()

    # -------------------------------------------------------------------------------------------------- samples

    def samples(self, tokenizer: Any) -> list[Sample]:
        """One for each document of each task, its requests tokenised as lm-eval does."""
        encoder = Encoder(tokenizer, self.max_length)
        self._bad[:] = self._source.left_out
        found: list[Sample] = []
        for name, leaf in self._leaves.items():
            for doc_id, instances in self._requests(leaf, tokenizer):
                try:
                    found.append(self._sample(f"{name}/{doc_id:05d}", leaf, instances, encoder))
                except (BadRow, SettingError) as error:
                    row = instances[0].doc.get("kvlab_row")
                    self._bad.append(f"{row or f'{name}, document {doc_id}'}: {error}")
                    if self.bad_rows == "stop":
                        raise SettingError(self._bad[-1]) from error
        if not found:
            raise SettingError(self._bad[0] if self._bad else f"task {self.label} has no documents")
        return found

    def _requests(self, leaf: Any, tokenizer: Any) -> list[tuple[int, list[Any]]]:
        """lm-eval's requests by number of the document."""
        multiturn = self.chat if self.fewshot_as_multiturn is None else self.fewshot_as_multiturn
        leaf.set_fewshot_seed(seed=self.fewshot_seed)
        with quiet():
            leaf.build_all_requests(
                limit=self.limit,
                system_instruction=self.system,
                apply_chat_template=self.chat,
                fewshot_as_multiturn=multiturn,
                chat_template=chat_template(tokenizer) if self.chat else None,
                tokenizer_name=str(getattr(tokenizer, "name_or_path", "")),
            )
        found: dict[int, list[Any]] = {}
        for instance in leaf.instances:
            found.setdefault(instance.doc_id, []).append(instance)
        return [(doc_id, sorted(group, key=lambda instance: instance.idx)) for doc_id, group in found.items()]

    def _sample(self, name: str, leaf: Any, instances: list[Any], encoder: Encoder) -> Doc:
        doc = instances[0].doc
        make = {"generate_until": self._generated, "loglikelihood_rolling": self._rolling}.get(leaf.OUTPUT_TYPE, self._scored)
        settings = make(leaf, instances, encoder)
        gold = gold_choice(leaf, doc) if leaf.OUTPUT_TYPE == "multiple_choice" else 0
        work = Work(leaf, doc, instances, gold)
        fields = {"subtask": name.rpartition("/")[0], "row": doc.get("kvlab_row"), **settings.pop("fields")}
        return Doc(name, where=str(doc.get("kvlab_row") or ""), fields=fields, source=work, **settings)

    def _scored(self, leaf: Any, instances: list[Any], encoder: Encoder) -> dict[str, Any]:
        """Continuations of contexts."""
        pairs, cut = [], 0
        for number, instance in enumerate(instances):
            context, ids = encoder.pair(*instance.args)
            fitted = encoder.fitted(context, ids) if ids else context
            pairs.append((number, fitted, ids))
            cut = max(cut, len(context) - len(fitted))
        (prompt, *others), parts = grouped(pairs)
        return {"prompt": prompt, "others": tuple(others), "parts": parts, "fields": {"cut": cut}}

    def _rolling(self, leaf: Any, instances: list[Any], encoder: Encoder) -> dict[str, Any]:
        """A whole text in windows, each of which begins with an empty cache."""
        windows = encoder.rolling(*instances[0].args)
        prompts, parts = windows_of(windows)
        return {"prompt": prompts[0], "others": prompts[1:], "parts": parts, "fields": {"windows": len(windows)}}

    def _generated(self, leaf: Any, instances: list[Any], encoder: Encoder) -> dict[str, Any]:
        """An answer up to the task's stop strings."""
        context, options = instances[0].args
        if options.get("do_sample") or len(instances) > 1 or instances[0].repeats > 1:
            raise SettingError(f"task {leaf.task_name} samples its answers, and kvlab decodes greedily: choose another task")
        new_tokens = int(options.get("max_gen_toks", options.get("max_new_tokens", DEFAULT_NEW_TOKENS)))
        ids, cut = encoder.before(context, new_tokens)
        until = options.get("until") or []
        target = leaf.doc_to_target(instances[0].doc)
        gold: tuple[int, ...] = ()
        if isinstance(target, str) and target:
            gold = encoder.pair(context, f"{leaf.config.target_delimiter}{target}")[1][:GOLD_TOKENS]
        return {
            "prompt": Prompt(ids, asks=True),
            "gold": gold,
            "answers": (target,) if isinstance(target, str) else tuple(map(str, target)) if isinstance(target, list) else (),
            "new_tokens": new_tokens,
            "stop": (until,) if isinstance(until, str) else tuple(until),
            "fields": {"cut": cut},
        }

    # -------------------------------------------------------------------------------------------------- results

    def evaluate(self, reading: Reading, samples: Sequence[Sample], tokenizer: Any) -> list[Record]:
        """lm-eval's values of each document, and the log-probability of a token of the right answer."""
        records = super().evaluate(reading, samples, tokenizer)
        for record, sample in zip(records, samples, strict=True):
            assert isinstance(sample, Doc)
            values, raw = document_values(sample.source, record)
            record["values"] |= values
            if raw:
                record["raw"] = raw
        return records

    def notes(self, finished: Finished) -> list[str]:
        """Prompts that were cut, and texts that were read in several windows."""
        cut = sum(bool(sample.fields.get("cut")) for sample in finished.samples)
        several = sum(sample.fields.get("windows", 1) > 1 for sample in finished.samples)
        found = [f"prompts of {cut} documents were cut on the left to {self.max_length} tokens"] if cut else []
        if several:
            found.append(f"{several} texts were read in several windows, each of which begins with an empty cache")
        return found

    def metrics(self, records: Sequence[Record]) -> dict[str, Metric]:
        """lm-eval's metrics, those of a group over all its documents; the first of the task comes first."""
        found: dict[str, Metric] = {}
        names = dict.fromkeys(name for record in records for name in (*record["values"], *record.get("raw", ())))
        for leaf in self._leaves.values():
            for name in names:
                metric = name.partition(":")[0]
                if name not in found and metric in leaf.aggregation():
                    having = [other for other in self._leaves.values() if metric in other.aggregation()]
                    found[name] = aggregated(having, metric, name, records)
        if any("gold_logprob" in record["values"] for record in records):
            found["gold_logprob"] = make_metric(records, "gold_logprob", "mean", "higher", some=True)
        return found
