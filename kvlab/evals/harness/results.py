"""What lm-eval makes of a document's log-likelihoods or output: its filters, values and aggregations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.evals.base import Record
from kvlab.evals.rows import BadRow
from kvlab.metrics import Metric, make_metric


@dataclass(frozen=True)
class Work:
    """One document in lm-eval's terms: its task, itself, its requests, and which request is the right choice."""

    task: Any
    doc: Mapping[str, Any]
    instances: Sequence[Any]
    gold: int | None


def gold_choice(leaf: Any, doc: Mapping[str, Any]) -> int:
    """Number of the request that is the right choice; of several the first. Raises BadRow if it isn't among the choices."""
    choices = leaf.doc_to_choice(doc)
    gold = leaf.doc_to_text(doc) if leaf.multiple_input else leaf.doc_to_target(doc)
    first = gold[0] if isinstance(gold, list) and gold else gold
    if isinstance(first, str) and first in choices:
        return choices.index(first)
    if isinstance(first, int) and not isinstance(first, bool) and 0 <= first < len(choices):
        return first
    raise BadRow(f"the right answer {gold!r} isn't among the choices {choices}")


def document_values(work: Work, record: Record) -> tuple[dict[str, float], dict[str, Any]]:
    """What lm-eval makes of a document's results: numbers, and what only its own aggregation understands."""
    results = [record["output"]] if "output" in record else [tuple(pair) for pair in record["loglikelihoods"]]
    if work.task.OUTPUT_TYPE == "loglikelihood_rolling":
        results = [logprob for logprob, _ in results]
    for instance, result in zip(work.instances, results, strict=True):
        instance.resps, instance.filtered_resps = [result], {}
    for ensemble in work.task._filters:
        ensemble.apply(list(work.instances))
    values: dict[str, float] = {}
    raw: dict[str, Any] = {}
    filters = list(work.instances[0].filtered_resps)
    for key in filters:
        found = work.task.process_results(work.doc, [instance.filtered_resps[key] for instance in work.instances])
        for metric, value in found.items():
            name = metric if len(filters) == 1 else f"{metric}:{key}"
            _add_value(values, raw, name, work.task.aggregation().get(metric), value)
    if "loglikelihoods" in record:
        values |= _of_choices(work, record)
    return values, raw


def _add_value(values: dict[str, float], raw: dict[str, Any], name: str, aggregation: Any, value: Any) -> None:
    how = getattr(aggregation, "__name__", "")
    if how in ("perplexity", "weighted_perplexity"):
        logprob, units = value if isinstance(value, tuple) else (value, 1)
        values[name], values[f"{name}_units"] = -float(logprob), float(units)
    elif how in ("mean", "nanmean") and isinstance(value, int | float):
        values[name] = float(value)
    else:
        raw[name] = json.loads(json.dumps(value, default=lambda item: item.tolist() if hasattr(item, "tolist") else str(item)))


def _of_choices(work: Work, record: Record) -> dict[str, float]:
    """Log-probability of a token of the right answer; the likeliest choice is the record's trace.

    Requests that follow those of the choices (without a question, for acc_mutual_info) are no choices.
    """
    sums = [logprob for logprob, _ in record["loglikelihoods"]]
    if work.task.OUTPUT_TYPE == "multiple_choice":
        sums = sums[: len(work.task.doc_to_choice(work.doc))]
    if len(sums) > 1:
        record["trace"] = [max(range(len(sums)), key=sums.__getitem__)]
        record["choice"] = record["trace"][0]
    gold = work.gold or 0
    return {"gold_logprob": sums[gold] / record["scored_tokens"][gold]}


def aggregated(leaves: Sequence[Any], metric: str, name: str, records: Sequence[Record]) -> Metric:
    """A metric over the documents that have it, of these tasks."""
    leaf = leaves[0]
    better = "higher" if leaf.higher_is_better().get(metric, True) else "lower"
    have = [record for record in records if name in record["values"]]
    if have:
        some = len(have) < len(records)
        if f"{name}_units" in have[0]["values"]:
            return make_metric(records, name, "perplexity", "lower", weight=f"{name}_units", some=some)
        chance = _chance(leaves) if metric.startswith("acc") else None
        return make_metric(records, name, "mean", better, chance=chance, some=some)
    items = [record["raw"][name] for record in records if name in record.get("raw", {})]
    value = float(leaf.aggregation()[metric]([tuple(item) if isinstance(item, list) else item for item in items]))
    return Metric(value, None, len(items), "corpus", better, name)


def _chance(leaves: Sequence[Any]) -> float | None:
    """What guessing scores, where all documents have equally many choices."""
    if any(leaf.OUTPUT_TYPE != "multiple_choice" for leaf in leaves):
        return None
    counts = {len(leaf.doc_to_choice(doc)) for leaf in leaves for doc in list(leaf.eval_docs)[:50]}
    return 1 / counts.pop() if len(counts) == 1 else None
