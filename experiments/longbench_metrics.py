"""kvlab's LongBench metrics beside the benchmark's own, on the predictions that come with MiniLongBench.

python experiments/longbench_metrics.py METRICS.PY DATA    METRICS.PY: LongBench/metrics.py of github.com/THUDM/LongBench
                                                          DATA: a folder with MiniLongBench_<dataset>.json files

The benchmark's code needs the packages fuzzywuzzy and python-Levenshtein, which kvlab doesn't: `pip install --target DIR
fuzzywuzzy python-Levenshtein` and `--packages DIR`. Exits 1 if any row differs by more than 1e-12.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlab.evals.longbench.files import read_predictions
from kvlab.evals.longbench.metrics import FIRST_LINE, SCORES, score

THEIRS = {
    "qa_f1": "qa_f1_score",
    "qa_f1_zh": "qa_f1_zh_score",
    "rouge": "rouge_score",
    "rouge_zh": "rouge_zh_score",
    "classification": "classification_score",
    "count": "count_score",
    "retrieval": "retrieval_score",
    "retrieval_zh": "retrieval_zh_score",
    "code_similarity": "code_sim_score",
}
"""What the benchmark calls each metric."""


def load(path: str) -> Any:
    """The benchmark's metrics as a module."""
    spec = importlib.util.spec_from_file_location("longbench_published", path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def published(module: Any, dataset: str, prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    """A prediction's score by the benchmark's metrics, put together as its eval.py does."""
    if dataset in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric = getattr(module, THEIRS[SCORES[dataset].__name__])
    return max(0.0, *(metric(prediction, answer, all_classes=classes) for answer in answers))


def main() -> int:
    """Print both figures of each dataset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics")
    parser.add_argument("data")
    parser.add_argument("--packages", help="folder with fuzzywuzzy and python-Levenshtein")
    options = parser.parse_args()
    if options.packages:
        sys.path.append(options.packages)
    theirs, differing = load(options.metrics), 0
    print(f"{'dataset':<22}{'metric':<17}{'rows':>5}{'kvlab':>9}{'LongBench':>11}{'rows that differ':>18}")
    for dataset, metric in SCORES.items():
        rows = read_predictions(Path(options.data) / f"MiniLongBench_{dataset}.json")
        asked = [(row["pred"], row["answers"], row.get("all_classes") or ()) for row in rows]
        ours = [score(dataset, *one) for one in asked]
        other = [published(theirs, dataset, *one) for one in asked]
        differ = sum(abs(a - b) > 1e-12 for a, b in zip(ours, other, strict=True))
        differing += differ
        means = [round(100 * sum(values) / len(values), 2) for values in (ours, other)]
        print(f"{dataset:<22}{metric.__name__:<17}{len(rows):>5}{means[0]:>9.2f}{means[1]:>11.2f}{differ:>18}")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
