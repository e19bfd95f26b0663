"""Results of run cells go to Weights & Biases, or nowhere: one W&B run per cell, with config, results and a table of samples.

wandb is optional and imported only when a tracker is made. Nothing that it does ends a run of the sweep.
"""

import configparser
import contextlib
import importlib
import math
import netrc
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import numpy as np

PROGRESS_SECONDS = 5.0  # running means are logged at most this often
TAG_LENGTH, NAME_LENGTH = 64, 128  # W&B refuses longer ones
_TAGGED = ("policy", "task", "model", "protocol", "budget_label")
_UNRECORDED = ("disable_git", "disable_code", "label_disable", "x_disable_meta", "x_disable_stats", "x_disable_machine_info")
_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("silent", "quiet"), True),  # no banners
    **dict.fromkeys(_UNRECORDED, True),  # what ran is in the config and with the results
    **dict.fromkeys(("save_code", "x_save_requirements", "use_dot_wandb", "symlink"), False),
    "console": "off",  # stdout stays ours
    "reinit": "create_new",  # neither takes over nor hands out another run of this process
    "stop_fn": lambda: None,  # the web page's stop button would interrupt the whole sweep for one cell
    "init_timeout": 30.0,  # a dead network costs a cell this long at its start and its end, not forever
    "finish_timeout": 60.0,
}


@dataclass(frozen=True)
class TrackingSettings:
    """Where results go, one `conf/logger/*.yaml`."""

    name: Literal["wandb", "none"]
    project: str = "kvlab"
    entity: str | None = None
    mode: Literal["auto", "online", "offline"] = "auto"  # auto: as WANDB_MODE says, else online where a key is known
    tags: tuple[str, ...] = ()
    sample_rows: int = 200  # rows of the sample table; 0: no table


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
    mode = "none" if settings.name == "none" else _mode(settings)
    if mode in ("none", "disabled"):
        return NoTracker("W&B: disabled by WANDB_MODE" if mode == "disabled" else "")
    try:
        wandb = importlib.import_module("wandb")
        _ = wandb.init  # a folder named wandb in the working directory passes for a package without it
    except Exception as error:  # a broken installation fails in many ways
        why = "not installed" if isinstance(error, (ImportError, AttributeError)) else f"broken ({error!r:.200})"
        return NoTracker(f"W&B: {why}, results aren't tracked; `pip install wandb`, or set logger=none")
    return _WandbTracker(wandb, settings, mode, folder.absolute())


class _WandbTracker:
    def __init__(self, wandb: Any, settings: TrackingSettings, mode: str, folder: Path) -> None:
        self._wandb, self._settings, self._folder, self._offline = wandb, settings, folder, mode == "offline"
        self._run: Any = None
        self._warned: set[tuple[str, type]] = set()
        self.notice = f"W&B: online, project {settings.project}"
        if self._offline:
            files = shlex.quote(str(folder / "wandb"))
            self.notice = f"W&B: offline, files in {files}; `wandb sync {files}/offline-*` uploads them"

    def start(self, cell: Mapping[str, Any]) -> None:
        self.abandon()
        self._guarded("start", self._start, cell)

    def _start(self, cell: Mapping[str, Any]) -> None:
        wandb, run_id = self._wandb, str(cell["run_id"])
        self._folder.mkdir(parents=True, exist_ok=True)
        self._earlier = list(self._folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
        known = wandb.Settings.model_fields  # settings come and go between releases, and unknown ones are refused
        quiet = wandb.Settings(**{name: value for name, value in _SETTINGS.items() if name in known})
        tags = [str(tag or "").strip()[:TAG_LENGTH] for tag in (*map(cell.get, _TAGGED), *self._settings.tags)]
        label = cell.get("policy_label") or cell.get("policy"), cell.get("budget_label"), cell.get("task")
        hooks = sys.exit, sys.excepthook
        try:
            wandb.setup(settings=wandb.Settings(silent=True, quiet=True))  # warnings outside of runs go by global settings
            self._run = wandb.init(
                project=self._settings.project,
                entity=self._settings.entity,
                group=str(cell["name"])[:NAME_LENGTH],
                name=" ".join(str(part) for part in label if part)[:NAME_LENGTH],
                id=run_id,
                resume=None if self._offline else "allow",
                tags=list(dict.fromkeys(filter(None, tags))),
                config=plain(cell.get("config") or {}),
                dir=str(self._folder),
                mode="offline" if self._offline else "online",
                settings=quiet,
            )
        finally:
            sys.exit, sys.excepthook = hooks  # wandb wraps both to learn the exit code, which `finish` tells it
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
            table = self._wandb.Table(columns=columns, data=rows)
            if self._offline:  # else it is an artifact too, staged in the home folder, and outputs copied elsewhere lack it
                table.bind_to_run(self._run, "samples", self._run.step)
            self._run.log({"samples": table})
        self._close(1 if result.get("error") else 0)
        for file in self._earlier:  # attempts that this one replaces: the mark has `wandb sync` pass over them
            file.with_name(f"{file.name}.synced").touch()

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


def _mode(settings: TrackingSettings) -> str:
    """online, offline or disabled, from the settings and the environment; ValueError for online without a key."""
    mode = os.environ.get("WANDB_MODE", "").strip().lower() if settings.mode == "auto" else settings.mode
    if mode not in ("online", "offline", "disabled"):
        return "online" if _key_known() else "offline"
    if mode == "online" and not _key_known():
        raise ValueError("W&B has no key for online mode: run `wandb login`, or set logger.mode=offline or logger=none")
    return mode


def _key_known() -> bool:
    """Whether wandb would find credentials for its server by itself, without asking."""
    known = os.environ.get
    if known("WANDB_API_KEY") or known("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    stored = configparser.ConfigParser(interpolation=None)  # where `wandb login --host` notes the server
    with contextlib.suppress(configparser.Error, netrc.NetrcParseError, OSError, UnicodeDecodeError):  # wandb fails there too
        stored.read(Path(known("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser() / "settings")
        url = known("WANDB_BASE_URL") or stored.get("default", "base_url", fallback="") or "https://api.wandb.ai"
        found = netrc.netrc(Path(known("NETRC") or "~/.netrc").expanduser()).authenticators(urlsplit(url).netloc)
        return bool(found and found[2])
    return False


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
