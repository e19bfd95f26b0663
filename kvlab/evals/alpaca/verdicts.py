"""A judge's verdicts on many pairs of outputs: asked for one by one, kept on disk as they come, and read again."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvlab.evals.alpaca.files import Output
from kvlab.evals.alpaca.judges import Judge, Orders, compare
from kvlab.evals.alpaca.win_rates import discrete, win_of

Annotation = dict[str, Any]
"""A verdict as a line of a file: id, key, preference, first, raw (see `judges.Compared`), judge, parameters (of its model)."""

FILE = "annotations.jsonl"
SMALL = 1_000_000_000
"""Parameters below which a judge is no judge."""
BIASED = 0.1
"""Preference for a position that readers are told of."""


@dataclass(frozen=True)
class Pair:
    """A sample's output beside the reference's."""

    id: str
    instruction: str
    dataset: str
    output: str
    reference: Output


def key_of(instruction: str, reference: str, output: str, judge: str) -> str:
    """What a verdict depends on."""
    text = json.dumps([instruction, reference, output, judge])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Annotations:
    """Verdicts on disk, one a line, written as they come, so that an interrupted judging goes on where it was."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._by_key: dict[str, Annotation] = {}
        lines = file.read_bytes().split(b"\n") if file.exists() else [b""]
        self._torn = lines[-1] != b""  # a write was interrupted
        for line in lines[:-1]:
            try:
                row = json.loads(line)
                self._by_key[row["key"]] = row
            except (ValueError, KeyError, TypeError):
                continue

    def get(self, key: str) -> Annotation | None:
        """The verdict with this key."""
        return self._by_key.get(key)

    def add(self, row: Annotation) -> None:
        """Keep a verdict; on disk when this returns."""
        start = b"\n" if self._torn else b""
        with self.file.open("ab") as file:
            file.write(start + json.dumps(row, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._torn = False
        self._by_key[row["key"]] = row


def annotate(folder: Path, pairs: Sequence[Pair], judge: Judge, orders: Orders) -> dict[str, Annotation]:
    """The verdict on each pair, by its id: from the folder's file, else asked for and put there."""
    store = Annotations(folder / FILE)
    left = [pair for pair in pairs if store.get(_key(pair, judge, orders)) is None]
    for pair in tqdm(left, desc=f"judge {judge.name}", unit="pair", disable=None, leave=False):
        verdict = compare(judge, pair.instruction, pair.reference.text, pair.output, orders)
        row = {"id": pair.id, "key": _key(pair, judge, orders), "preference": verdict.preference, "first": verdict.first}
        # The number of parameters loads the judge, and where outputs are equal there is no need to.
        parameters = None if verdict.first is None else judge.parameters
        store.add({**row, "raw": verdict.raw, "judge": judge.identity, "parameters": parameters})
    return stored(folder, pairs, judge, orders)


def stored(folder: Path, pairs: Sequence[Pair], judge: Judge, orders: Orders) -> dict[str, Annotation]:
    """The verdicts that are in the folder's file."""
    store = Annotations(folder / FILE)
    found = {pair.id: store.get(_key(pair, judge, orders)) for pair in pairs}
    return {name: row for name, row in found.items() if row is not None}


def _key(pair: Pair, judge: Judge, orders: Orders) -> str:
    return key_of(pair.instruction, pair.reference.text, pair.output, f"{judge.identity} {orders}")


def values_of(row: Annotation) -> dict[str, float]:
    """A verdict's numbers, none where there is no verdict."""
    win = win_of(row["preference"])
    if win is None:
        return {}
    bias = {} if row["first"] is None else {"position_bias": row["first"]}
    return {"win": win, "win_discrete": discrete(win), **bias}


def doubts(rows: Sequence[Mapping[str, Any]], judge: str, about: str) -> list[str]:
    """What readers must know of a judge: that it is small, loves a position, or gave no verdict. about: policy and budget."""
    found = []
    sizes = [row["parameters"] for row in rows if row["parameters"]]
    if sizes and sizes[0] < SMALL:
        size = f"{sizes[0] / 1e6:.0f}M" if sizes[0] > 1e6 else str(sizes[0])
        found.append(f"mechanics only: the judge {judge} has {size} parameters, too few to tell good answers from bad ones")
    if none := sum(row["preference"] is None for row in rows):
        found.append(f"{about}: no verdict on {none} of {len(rows)} outputs, which are left out of win rates")
    firsts = [row["first"] for row in rows if row["first"] is not None]
    if firsts and abs(bias := statistics.fmean(firsts)) > BIASED:
        found.append(f"{about}: the judge prefers whichever stands {'first' if bias > 0 else 'second'} by {abs(bias):.2f}")
    return found


def annotation_rows(pairs: Sequence[Pair], found: Mapping[str, Annotation], generator: str) -> list[dict[str, Any]]:
    """Verdicts in AlpacaEval's format."""
    return [
        {
            "instruction": pair.instruction,
            "output_1": pair.reference.text,
            "generator_1": pair.reference.generator,
            "dataset": pair.dataset,
            "output_2": pair.output,
            "generator_2": generator,
            "annotator": found[pair.id]["judge"],
            "preference": found[pair.id]["preference"],
            "raw_completion": found[pair.id]["raw"],
        }
        for pair in pairs
    ]
