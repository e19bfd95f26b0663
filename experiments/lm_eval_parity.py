"""Does kvlab with full cache give lm-eval's own numbers? Both answer the same requests, and all answers are compared.

    python experiments/lm_eval_parity.py copa piqa hellaswag arc_easy lambada wikitext --limit 200

Tasks are made from the data folder (KVLAB_DATA_DIR) where it has them, else loaded from the hub. Exits 1 where a log-likelihood
differs by more than 1e-3 or an accuracy at all.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch

from kvlab.evals.harness.source import find_source, load_leaves, quiet
from kvlab.lm_eval_model import register

TOLERANCE = 1e-3
"""Absolute, of a log-likelihood."""


def compare(
    name: str, limit: int | None, model: str = "smollm2-135m", max_length: int = 2048, batch: int = 8
) -> dict[str, Any]:
    """Largest and mean difference of log-likelihoods, both sides' metrics, and seconds, of one task."""
    from lm_eval.models.huggingface import HFLM

    leaves = load_leaves(find_source([name], None, None, "skip"), 0)
    rolling = any(leaf.OUTPUT_TYPE == "loglikelihood_rolling" for leaf in leaves.values())
    ours = register()(model=model, batch_size=batch, max_length=max_length, protocol="stream" if rolling else "prompt")
    with quiet():
        theirs = HFLM(pretrained=ours.bench.model, tokenizer=ours.tokenizer, max_length=max_length, batch_size=batch)
        for leaf in leaves.values():
            leaf.build_all_requests(limit=limit)
    sides = [_answers(lm, leaves) for lm in (ours, theirs)]
    (mine, my_metrics, my_s), (other, their_metrics, their_s) = sides
    gaps = [abs(a - b) for a, b in zip(mine, other, strict=True)]
    return {
        "task": name,
        "documents": sum(len({instance.doc_id for instance in leaf.instances}) for leaf in leaves.values()),
        "requests": len(gaps),
        "largest": max(gaps),
        "mean": sum(gaps) / len(gaps),
        "largest |logprob|": max(map(abs, other)),
        "kvlab": my_metrics,
        "lm-eval": their_metrics,
        "kvlab_s": my_s,
        "lm_eval_s": their_s,
    }


def _answers(lm: Any, leaves: dict[str, Any]) -> tuple[list[float], dict[str, float], float]:
    """Log-likelihoods of all requests, metrics, and seconds."""
    start, found = time.perf_counter(), []
    values: dict[str, list[Any]] = {}
    for leaf in leaves.values():
        with torch.inference_mode(), quiet():
            answers = getattr(lm, leaf.instances[0].request_type)(leaf.instances, disable_tqdm=True)
        found += [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
        by_doc: dict[int, tuple[Any, list[Any]]] = {}
        for instance, answer in zip(leaf.instances, answers, strict=True):
            by_doc.setdefault(instance.doc_id, (instance.doc, []))[1].append(answer)
        for doc, results in by_doc.values():
            for metric, value in leaf.process_results(doc, results).items():
                values.setdefault(metric, []).append(value)
    aggregate = next(iter(leaves.values())).aggregation()
    return found, {name: float(aggregate[name](items)) for name, items in values.items()}, time.perf_counter() - start


def agrees(row: dict[str, Any]) -> bool:
    """Whether log-likelihoods are within the tolerance and accuracies equal."""
    same = all(row["kvlab"][name] == row["lm-eval"][name] for name in row["kvlab"] if name.startswith("acc"))
    return same and row["largest"] <= TOLERANCE


def main() -> int:
    """Print a table; 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print("| task | documents | requests | largest difference | mean | metrics: kvlab (lm-eval) | kvlab s | lm-eval s |")
    print("|---|---:|---:|---:|---:|---|---:|---:|")
    fine = True
    for name in options.tasks:
        row = compare(name, options.limit, options.model, options.max_length, options.batch)
        both = [f"{metric} {value:.6g} ({row['lm-eval'][metric]:.6g})" for metric, value in row["kvlab"].items()]
        sizes = f"{row['largest']:.1e} | {row['mean']:.1e}"
        seconds = f"{row['kvlab_s']:.0f} | {row['lm_eval_s']:.0f}"
        print(f"| {name} | {row['documents']} | {row['requests']} | {sizes} | {', '.join(both)} | {seconds} |", flush=True)
        fine = fine and agrees(row)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
