"""Does kvlab with full cache give lm-eval's own numbers? Both answer the same requests, and all answers are compared.

    python experiments/lm_eval_parity.py copa piqa hellaswag arc_easy lambada wikitext --limit 200

Tasks are made from the data folder (KVLAB_DATA_DIR) where it has them, else loaded from the hub. Exits 1 where a log-likelihood
differs by more than 1e-3 (of a whole page: 1e-7 of it) or an accuracy at all. With --keep FILE answers are kept, and the same
command goes on where it stopped. lm-eval adds up a text's log-probabilities in float32; --double has it add them in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvlab.evals.harness.source import find_source, load_leaves, quiet
from kvlab.lm_eval_model import register

TOLERANCE, RELATIVE = 1e-3, 1e-7
"""Of a log-likelihood, whichever is more: a page's is a sum of tens of thousands, in which float32 has such steps."""


def compare(
    name: str,
    limit: int | None,
    model: str = "smollm2-135m",
    max_length: int = 2048,
    batch: int = 8,
    skip: int = 0,
    keep: Path | None = None,
    documents: set[int] | None = None,
    double: bool = False,
) -> dict[str, Any]:
    """Largest and mean difference of log-likelihoods, how many are beyond the tolerance, both sides' metrics, and seconds.

    Both sides answer a few documents in turn, so that an interrupted comparison still says what it saw.

    skip  documents to leave out at the start; documents: the only ones, counted from 0
    keep  file of answers, of which those that are there aren't asked for again; double: lm-eval adds up in float64
    """
    from lm_eval.models.huggingface import HFLM

    leaves = load_leaves(find_source([name], None, None, "skip"), 0)
    rolling = any(leaf.OUTPUT_TYPE == "loglikelihood_rolling" for leaf in leaves.values())
    ours = register()(model=model, batch_size=batch, max_length=max_length, protocol="stream" if rolling else "prompt")
    with quiet():
        theirs = HFLM(pretrained=ours.bench.model, tokenizer=ours.tokenizer, max_length=max_length, batch_size=batch)
        for leaf in leaves.values():
            leaf.build_all_requests(limit=limit)
    sides = [Side(ours), Side(theirs)]
    work = list(_some_documents(leaves, 1 if rolling else 64, skip, documents))
    known = _kept(keep)
    try:
        for leaf, instances in (bar := tqdm(work, desc=name, unit="part", disable=None, leave=False)):
            key = f"{leaf.config.task} {[(one.doc_id, one.idx) for one in instances]} {model} {max_length}{' double' * double}"
            if key not in known:
                known[key] = [sides[0].ask(instances), sides[1].ask(instances, double)]
                if keep is not None:
                    with keep.open("a") as file:
                        print(json.dumps({"asked": key, "answers": known[key]}), file=file)
            for side, found in zip(sides, known[key], strict=True):
                side.take(leaf, instances, found)
            bar.set_postfix_str(f"largest {max(_gaps(sides)):.1e}")
    except KeyboardInterrupt:
        if not sides[0].values:
            raise
    gaps = _gaps(sides)
    aggregate = next(iter(leaves.values())).aggregation()
    metrics = [{key: float(aggregate[key](items)) for key, items in side.values.items()} for side in sides]
    return {
        "task": name,
        "documents": len(next(iter(sides[0].values.values()))),
        "requests": len(gaps),
        "largest": max(gaps),
        "mean": sum(gaps) / len(gaps),
        "beyond": sum(
            gap > max(TOLERANCE, RELATIVE * abs(own)) for gap, own in zip(gaps, sides[1].loglikelihoods, strict=True)
        ),
        "kvlab": metrics[0],
        "lm-eval": metrics[1],
        "kvlab_s": sides[0].seconds,
        "lm_eval_s": sides[1].seconds,
    }


def _kept(file: Path | None) -> dict[str, list[Any]]:
    """Both sides' answers of an earlier run."""
    if file is None or not file.exists():
        return {}
    return {row["asked"]: row["answers"] for row in map(json.loads, file.read_text().splitlines())}


def _some_documents(leaves: dict[str, Any], count: int, skip: int, only: set[int] | None) -> Iterator[tuple[Any, list[Any]]]:
    """Requests of each task, all of some documents at a time."""
    for leaf in leaves.values():
        by_doc: dict[int, list[Any]] = {}
        for instance in leaf.instances:
            if only is None or instance.doc_id in only:
                by_doc.setdefault(instance.doc_id, []).append(instance)
        documents = list(by_doc.values())[skip:]
        for start in range(0, len(documents), count):
            yield leaf, [instance for document in documents[start : start + count] for instance in document]


@dataclass
class Side:
    """One of the two that answer: its log-likelihoods, the values of each document, and its seconds."""

    lm: Any
    loglikelihoods: list[float] = field(default_factory=list)
    values: dict[str, list[Any]] = field(default_factory=dict)
    seconds: float = 0.0

    def ask(self, instances: list[Any], double: bool = False) -> list[Any]:
        """The answers to some requests."""
        start = time.perf_counter()
        with torch.inference_mode(), quiet(), _double_sums() if double else nullcontext():
            answers = getattr(self.lm, instances[0].request_type)(instances, disable_tqdm=True)
        self.seconds += time.perf_counter() - start
        return answers

    def take(self, leaf: Any, instances: list[Any], answers: list[Any]) -> None:
        """Remember them."""
        self.loglikelihoods += [answer if isinstance(answer, float) else answer[0] for answer in answers]
        by_doc: dict[int, tuple[Any, list[Any]]] = {}
        for instance, answer in zip(instances, answers, strict=True):
            by_doc.setdefault(instance.doc_id, (instance.doc, []))[1].append(answer)
        for doc, results in by_doc.values():
            for metric, value in leaf.process_results(doc, results).items():
                self.values.setdefault(metric, []).append(value)


@contextmanager
def _double_sums() -> Iterator[None]:
    """Sums of whole vectors are taken in float64, as lm-eval's over the tokens of a text."""
    plain = torch.Tensor.sum

    def exact(vector: torch.Tensor, *how: Any, **named: Any) -> torch.Tensor:
        return plain(vector.double() if not (how or named) and vector.is_floating_point() else vector, *how, **named)

    torch.Tensor.sum = exact  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.sum = plain  # type: ignore[method-assign]


def _gaps(sides: list[Side]) -> list[float]:
    """Differences of the log-likelihoods so far."""
    return [abs(a - b) for a, b in zip(*(side.loglikelihoods for side in sides), strict=True)]


def agrees(row: dict[str, Any]) -> bool:
    """Whether log-likelihoods are within the tolerance and accuracies equal."""
    same = all(row["kvlab"][name] == row["lm-eval"][name] for name in row["kvlab"] if name.startswith("acc"))
    return same and not row["beyond"]


def main() -> int:
    """Print a table; 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--skip", type=int, default=0, help="documents to leave out at the start")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep answers here, and go on from those that are there")
    parser.add_argument("--documents", type=int, nargs="+", metavar="N", help="these alone, counted from 0")
    parser.add_argument("--double", action="store_true", help="let lm-eval add up log-probabilities in float64")
    options = parser.parse_args()
    options.documents = options.documents and set(options.documents)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print("| task | documents | requests | largest difference | mean | metrics: kvlab (lm-eval) | kvlab s | lm-eval s |")
    print("|---|---:|---:|---:|---:|---|---:|---:|")
    fine = True
    for name in options.tasks:
        row = compare(name, **{key: value for key, value in vars(options).items() if key != "tasks"})
        both = [f"{metric} {value:.6g} ({row['lm-eval'][metric]:.6g})" for metric, value in row["kvlab"].items()]
        sizes = f"{row['largest']:.1e} | {row['mean']:.1e}"
        seconds = f"{row['kvlab_s']:.0f} | {row['lm_eval_s']:.0f}"
        print(f"| {name} | {row['documents']} | {row['requests']} | {sizes} | {', '.join(both)} | {seconds} |", flush=True)
        fine = fine and agrees(row)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
