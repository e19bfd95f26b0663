"""`kvlab analyze`: what a model's attention looks like, by the measures that papers on eviction rest on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from kvlab.analyze import report
from kvlab.analyze.base import Analysis, chunks
from kvlab.analyze.hashing import Hashing
from kvlab.analyze.heads import Heads
from kvlab.analyze.heavy_hitters import HeavyHitters
from kvlab.analyze.persistence import Persistence
from kvlab.analyze.report import check_writable
from kvlab.analyze.setup import Setup, load
from kvlab.analyze.sparsity import Sparsity
from kvlab.policies import make_policy
from kvlab.session import attach
from kvlab.shapes import Step

__all__ = ["ANALYSES", "Setup", "check_writable", "load", "read", "run_analyses"]

ANALYSES: dict[str, Callable[[float], Analysis]] = {
    "sparsity": lambda threshold: Sparsity(),
    "heavy_hitters": lambda threshold: HeavyHitters(),
    "persistence": lambda threshold: Persistence(),
    "heads": Heads,
    "hash": lambda threshold: Hashing(),
}
"""name -> analysis, made with the share of attention that a head's set must recover"""


def run_analyses(
    names: Sequence[str], setup: Setup, threshold: float, folder: Path, as_json: bool, show: Callable[[str], None]
) -> None:
    """Read the texts once for these analyses, write their files to the folder, and show what they say."""
    analyses = {name: ANALYSES[name](threshold) for name in names}
    read(setup, list(analyses.values()))
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model": setup.name, "texts": len(setup.texts), "tokens": setup.texts[0].shape[1]}
    about["dtype"] = str(setup.model.dtype).removeprefix("torch.")
    found = {}
    for name, analysis in analyses.items():
        files = report.write_tables(name, analysis, folder)
        if report.can_draw():
            files.append(report.write_picture(name, analysis, folder, setup.label))
        found[name] = report.as_dict(analysis, [*files, folder / f"{name}.json"])
        files.append(report.write_json(name, {**about, "analyses": {name: found[name]}}, folder))
        if not as_json:
            show(report.render(analysis, setup.label, files) + "\n")
    if as_json:
        show(json.dumps({**about, "analyses": found}, indent=1))
    if not report.can_draw():
        print(report.NO_PICTURES, file=sys.stderr)


def read(setup: Setup, analyses: Sequence[Analysis]) -> None:
    """One forward pass of each text under a full cache; all analyses see each layer's queries at once."""

    def watch(step: Step) -> None:
        for analysis in analyses:
            analysis.begin(step, text)
        for chunk in chunks(step):
            for analysis in analyses:
                analysis.see(chunk)
        for analysis in analyses:
            analysis.end(step)
        bar.update()

    with (
        torch.inference_mode(),
        attach(setup.model, make_policy("full"), tokenizer=setup.tokenizer, watch=watch) as session,
        tqdm(total=len(setup.texts) * len(session.plan.layers), unit="layer", disable=None, leave=False) as bar,
    ):
        for text in setup.texts:
            setup.model(text, cache=session.new_cache(), logits_to_keep=1)
