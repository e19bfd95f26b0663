"""Results of run cells go to Weights & Biases, or nowhere: one W&B run per cell, with config, results and a table of samples.

wandb is optional and imported only when a tracker is made. Nothing that it does ends a run of the sweep.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvlab.wandb_runs import NAME_LENGTH, TAG_LENGTH, NotTracked, RunFolder, TrackingSettings, pass_over, run_folder

PROGRESS_SECONDS = 5.0  # running means are logged at most this often
_TAGGED = ("policy", "task", "model", "protocol", "budget_label")


class Tracker(Protocol):
    """Receives what one process measures, cell after cell: `start`, any number of `progress`, then `finish` or `abandon`."""

    notice: str  # one line for the user on where results go; empty where there is nothing to say

    def start(self, cell: Mapping[str, Any]) -> None:
        """A cell begins: its run_id, name, model, task, protocol, policy, policy_label, budget_label and config."""

    def progress(self, done: int, total: int, values: Mapping[str, float]) -> None:
        """Running means after `done` of `total` samples; most calls are dropped, so call as often as you like."""

    def finish(self, result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """The cell is over: status, error, metrics, memory and speed, and its samples."""

    def abandon(self) -> None:
        """The cell was interrupted; a later `start` with the same run_id takes its place."""


@dataclass
class NoTracker:
    """Tracks nothing."""

    notice: str = ""

    def start(self, *_: object, **__: object) -> None:
        """Do nothing, as all the others."""

    progress = finish = abandon = start


def make_tracker(settings: TrackingSettings, folder: Path) -> Tracker:
    """The tracker for these settings, with W&B's files in `folder`/wandb; ValueError for online mode without a key."""
    try:
        place = run_folder(settings, folder)
    except NotTracked as why:
        return NoTracker(str(why))
    return _WandbTracker(place)


class _WandbTracker:
    def __init__(self, place: RunFolder) -> None:
        self._place, self._settings, self.notice = place, place.settings, place.notice
        self._run: Any = None
        self._warned: set[tuple[str, type]] = set()

    def start(self, cell: Mapping[str, Any]) -> None:
        self.abandon()
        self._guarded("start", self._start, cell)

    def _start(self, cell: Mapping[str, Any]) -> None:
        run_id = str(cell["run_id"])
        self._earlier = self._place.attempts(run_id)
        tags = [str(tag or "").strip()[:TAG_LENGTH] for tag in (*map(cell.get, _TAGGED), *self._settings.tags)]
        label = cell.get("policy_label") or cell.get("policy"), cell.get("budget_label"), cell.get("task")
        self._run = self._place.open(
            run_id,
            group=str(cell["name"])[:NAME_LENGTH],
            job_type="cell",
            name=" ".join(str(part) for part in label if part)[:NAME_LENGTH],
            tags=list(dict.fromkeys(filter(None, tags))),
            config=plain(cell.get("config") or {}),
        )
        self._run.define_metric("progress/*", step_metric="progress/done", summary="none")
        self._next_log = 0.0

    def progress(self, done: int, total: int, values: Mapping[str, float]) -> None:
        if self._run is not None and time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + PROGRESS_SECONDS
            row = {f"progress/{name}": value for name, value in plain(values).items() if isinstance(value, (int, float))}
            self._guarded("progress", self._run.log, {**row, "progress/done": done, "progress/total": total})

    def finish(self, result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        self._guarded("finish", self._finish, result, samples)

    def _finish(self, result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        self._run.summary.update(summary(result))
        columns, rows = sample_table(samples[: self._settings.sample_rows])
        if rows:
            table = self._place.wandb.Table(columns=columns, data=rows)
            self._place.log(self._run, {"samples": table})
        self._close(1 if result.get("error") else 0)
        pass_over(self._earlier)

    def abandon(self) -> None:
        self._guarded("finish", self._close, 255)  # W&B's own code for Ctrl-C

    def _close(self, code: int) -> None:
        self._run.finish(code)
        self._run = None

    def _guarded(self, step: str, act: Callable[..., object], *given: object) -> None:
        """Do it, if a run is open or to be opened; where it fails, say so once and go on without tracking this cell."""
        if self._run is None and step != "start":
            return
        try:
            act(*given)
        except Exception as error:
            if (step, type(error)) not in self._warned:
                self._warned.add((step, type(error)))
                why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
                print(f"W&B: {step} failed, this cell isn't tracked any further: {why}", file=sys.stderr)
            with contextlib.suppress(Exception):  # what is left of the run, if anything
                self._close(1)
            self._run = None


def plain(value: Any) -> Any:
    """The value in JSON's terms: text for what JSON doesn't know, W&B's names (NaN, Infinity) for what isn't finite."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """The results as flat names: metrics/accuracy/value, memory/peak_bytes, status, ...; without what is None."""
    flat, left = {}, [(name, result.get(name)) for name in ("status", "error", "metrics", "memory", "speed")]
    for name, value in left:  # grows by what is found inside
        if isinstance(value, Mapping):
            left += [(f"{name}/{key}", item) for key, item in value.items()]
        elif value is not None:
            flat[name] = plain(value)
    return flat


def sample_table(samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows: id, values/*, output, answers (one string), fields/*; None where a sample lacks one."""
    rows = []
    for sample in samples:
        nested = {f"{part}/{k}": v for part in ("values", "fields") for k, v in (sample.get(part) or {}).items()}
        answers = sample.get("answers")
        joined = " | ".join(map(str, answers)) if isinstance(answers, (list, tuple)) else answers
        rows.append({"id": sample.get("id"), "output": sample.get("output"), "answers": joined, **nested})
    order = ("id", "values", "output", "answers", "fields")
    columns = sorted(dict.fromkeys(name for row in rows for name in row), key=lambda name: order.index(name.split("/")[0]))
    table = [_column([row.get(name) for row in rows]) for name in columns]
    return columns, [list(row) for row in zip(*table, strict=True)]


def _column(values: list[Any]) -> list[Any]:
    """A column of one type, as W&B wants it: numbers or truth values where all are, else text; None stays."""
    values = [value.item() if isinstance(value, np.generic) else value for value in values]
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return [value if value is not None and math.isfinite(value) else None for value in values]
    return values if kinds <= {bool} else [value if value is None else str(value) for value in values]
