"""The results store as the page has it: plain values for JSON. All numbers and their texts are those of `kvlab table`.

The page's data has these parts:

    made, where   when it was read, and from where
    comparisons   title, metric, better, warnings, `sheet` (the table as text), `base`: path of the full cache's cell
    cells         in the order of the sheets' rows: facts, value with interval, differences, provenance, config, and `changed`:
                  samples that came out otherwise than with the full cache, at most `per_cell` of them
    questions     {hash of prompts: {sample id: what was asked}}, each once
    answers       {comparison: {sample id: the full cache's record}}
    analyses      what `kvlab analyze` wrote
    warnings      results that can't be read
"""

from __future__ import annotations

import datetime
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.dashboard.analyses import analysis_files, read_analyses
from kvlab.dashboard.changes import about_question, about_sample, by_id, changed
from kvlab.dashboard.files import Reader, state_of, watched
from kvlab.metrics import Difference, interval
from kvlab.render import comparison_sheet, difference
from kvlab.results import prompts_file, read_records
from kvlab.tables import (
    Comparison,
    Row,
    Samples,
    StoredCell,
    Where,
    compare,
    find_cells,
    having,
    matching,
    places_of,
    read_groups,
    samples_of,
    stored_references,
)

PER_CELL = 50
"""Changed samples of a cell that the page holds at most."""
SAMPLE_BYTES = 6_000_000
"""Bytes of samples that the page holds at most: with more, it holds fewer of each cell."""
_FACTS = (
    *("path", "name", "model", "task", "protocol", "policy", "policy_label", "codec", "share", "budget_label"),
    *("ratio", "tokens", "bytes", "query_aware", "labels", "status", "error", "run_id"),
    *("kept_fraction", "kv_bytes", "kv_bytes_full", "decode_tokens_per_s", "batch_size"),
)
Plain = dict[str, Any]


class Store:
    """Results below folders and globs. What hasn't changed since it was last read isn't computed again."""

    def __init__(self, where: Where) -> None:
        self.places = places_of(where)
        self._known: dict[str, tuple[str, Plain]] = {}
        self._page: tuple[str, Plain] = ("", {})
        self._read_cell = Reader()
        self._lock = threading.Lock()

    def state(self) -> str:
        """Changes whenever a result, its samples or an analysis do. Raises ValueError if there are no results."""
        state = state_of(watched(self.places))
        if state != self._page[0]:
            find_cells(self._with_cells())  # says where there are none
        return state

    def page(self) -> tuple[str, Plain]:
        """What the page shows, and the state that this is of. Raises ValueError if there are no results."""
        with self._lock:
            state = self.state()
            if state != self._page[0]:
                self._page = state, _finite(self._read())
            return self._page

    def samples(self, path: str, start: int, count: int) -> Plain:
        """Changed samples of a cell from number `start` on, with their whole texts. Raises ValueError for no cell."""
        for cells in read_groups(self._with_cells(), self._read_cell)[0].values():
            for cell in cells:
                if cell.facts["path"] == path:
                    base = next((one for one in cells if one.ok and one.is_full), None)
                    return _finite(_changes(cell, base, slice(start, start + count), cut=False))
        raise ValueError(f"{path}: there is no such cell (any more)")

    def _with_cells(self) -> list[Path]:
        """The places without those that hold analyses alone."""
        found = [place for place in self.places if not analysis_files([place]) or any(_results(place))]
        return found or self.places

    def _read(self) -> Plain:
        groups, titles, skipped = read_groups(self._with_cells(), self._read_cell)
        known: dict[str, tuple[str, Plain]] = {}
        for key, cells in groups.items():
            files = [cell.path / name for cell in cells for name in ("result.json", "samples.jsonl")]
            state = state_of(files)
            old = self._known.get(key)
            known[key] = old if old and old[0] == state else (state, _comparison(key, cells))
        self._known = known
        parts = [{**made, "title": titles[key]} for key, (_, made) in known.items()]
        analyses, unread = read_analyses(analysis_files(self.places))
        made = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        about = {"made": made, "where": list(map(str, self.places))}
        return {**about, **_fitted(parts), "analyses": analyses, "warnings": [*skipped, *unread]}


def _results(place: Path) -> Iterator[Path]:
    return (file for start in matching(place) for file in start.rglob("result.json"))


def _comparison(key: str, cells: Sequence[StoredCell]) -> Plain:
    """A comparison with its cells, and what the page holds of their samples."""
    item = compare([cell.path for cell in cells], stored_references())[0]
    sheet = comparison_sheet(item)
    by_path = {cell.facts["path"]: cell for cell in cells}
    base = by_path[item.baseline.facts["path"]] if item.baseline else None
    found = [{**_cell(row, by_path[row.facts["path"]], item), "comparison": key} for row in item.rows]
    for cell in found:
        stored = by_path[cell["path"]]
        if stored.ok and stored is not base:
            cell["changed"] = _changes(stored, base, slice(PER_CELL), cut=True)
    return {
        "id": key,
        "metric": item.metric,
        "better": item.better,
        "warnings": item.warnings,
        "base": base and base.facts["path"],
        "sheet": {name: getattr(sheet, name) for name in ("about", "header", "right", "rows", "notes")},
        "cells": found,
    }


def _cell(row: Row, stored: StoredCell, item: Comparison) -> Plain:
    low, high = interval(stored.metric(item.metric) if stored.ok else {})
    return {
        **{name: row.facts[name] for name in _FACTS},
        "label": stored.policy,
        "full": stored.is_full,
        "value": row.value,
        "low": low,
        "high": high,
        "n": row.n,
        "delta": _difference(row.delta, row.n),
        "gold": _difference(row.gold_logprob, row.n),
        "mcnemar_p": row.mcnemar_p,
        "agreement": row.agreement,
        "provenance": stored.result.get("provenance") or {},
        "config": stored.result.get("config") or {},
    }


def _difference(found: Difference | None, n: int | None) -> Plain | None:
    if found is None:
        return None
    return {**found._asdict(), "noise": found.within_noise, "text": difference(found, n)}


def _changes(cell: StoredCell, base: StoredCell | None, which: slice, cut: bool) -> Plain:
    """Changed samples of a cell (all of them where nothing is there to compare with), and what they need to be understood."""
    metric = cell.metric(str(cell.result.get("main_metric")))
    ours = having(metric, samples_of(cell, [])) if metric else {}
    theirs: Samples = having(metric, samples_of(base, [])) if base and metric else {}
    names = changed(metric, theirs, ours) if base else list(ours)
    digest = (cell.result.get("prompts") or {}).get("hash") or ""
    prompts = by_id(read_records(prompts_file(cell.path, digest))[0]) if names[which] else {}
    return {
        "count": len(names),
        "of": len(ours.keys() & theirs.keys()) if base else len(ours),
        "shown": [{"id": name, **about_sample(metric, ours[name], cut)} for name in names[which]],
        "questions": {name: about_question(ours[name], prompts.get(name, {}), cut) for name in names[which]},
        "answers": {name: about_sample(metric, theirs[name], cut) for name in names[which] if name in theirs},
        "prompts": digest,
    }


def _fitted(parts: Sequence[Plain]) -> Plain:
    """Comparisons and cells, with as many samples of each cell as fit into the page; what was asked stands once."""
    limit = PER_CELL
    while True:
        cells, questions, answers = _shared(parts, limit)
        shown = [cell["changed"]["shown"] for cell in cells if "changed" in cell]
        if limit == 1 or len(json.dumps([shown, questions, answers])) <= SAMPLE_BYTES:
            break
        limit //= 2
    comparisons = [{name: value for name, value in part.items() if name != "cells"} for part in parts]
    return {"comparisons": comparisons, "cells": cells, "questions": questions, "answers": answers, "per_cell": limit}


def _shared(parts: Sequence[Plain], limit: int) -> tuple[list[Plain], Plain, Plain]:
    cells: list[Plain] = []
    questions: dict[str, Plain] = {}
    answers: dict[str, Plain] = {}
    for part in parts:
        for cell in part["cells"]:
            if (found := cell.get("changed")) is not None:
                shown = found["shown"][:limit]
                for one in shown:
                    questions.setdefault(found["prompts"] or part["id"], {})[one["id"]] = found["questions"][one["id"]]
                    if one["id"] in found["answers"]:
                        answers.setdefault(part["id"], {})[one["id"]] = found["answers"][one["id"]]
                kept = {name: found[name] for name in ("count", "of")}
                cell = {**cell, "changed": {**kept, "shown": shown, "prompts": found["prompts"] or part["id"]}}
            cells.append(cell)
    return cells, questions, answers


def _finite(value: Any) -> Any:
    """The same without what JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
