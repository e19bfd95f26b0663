"""Where lm-eval's tasks come from: local data that task files are generated for, files of the user's own, or lm-eval itself."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvlab.evals.harness.local_tasks import known_tasks, local_tasks
from kvlab.evals.rows import BadRows
from kvlab.hints import did_you_mean
from kvlab.hub import settle_hub
from kvlab.paths import data_dir as data_folder
from kvlab.settings import SettingError

NEEDS = "task=lm_eval needs the package lm-eval: pip install 'kvlab[evals]'"


@dataclass(frozen=True)
class Source:
    """Where tasks are from. names: lm-eval's; folders: of task files; hash: of local data, empty for what lm-eval loads."""

    names: tuple[str, ...]
    folders: tuple[str, ...] = ()
    hash: str = ""
    left_out: tuple[str, ...] = ()


def find_source(names: Sequence[str], data_dir: str | None, include_path: str | None, bad_rows: BadRows) -> Source:
    """Local data where the data folder has it for all tasks, else lm-eval's own. Files of the user's own win over both.

    data_dir  None: the folder that KVLAB_DATA_DIR names, if it is set
    Raises SettingError where the folder's data can't be used.
    """
    own = (include_path,) if include_path else ()
    folder = Path(data_dir) if data_dir else data_folder()
    if not folder or (include_path and data_dir is None):
        return Source(tuple(names), own)
    known = set(known_tasks())
    if not all(name in known for name in names):
        return Source(tuple(names), own)
    local = local_tasks(folder, names, bad_rows)
    return Source(local.names, (str(local.folder), *own), local.hash, local.left_out)


@cache
def load_leaves(source: Source, num_fewshot: int | None) -> dict[str, Any]:
    """lm-eval's task objects by name, loaded once. Raises SettingError for a task that there isn't or that can't be loaded."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise SettingError(NEEDS) from error
    with quiet():
        # lm-eval's own tasks are thousands of files, read only where the given folders lack a task.
        folders = list(source.folders)
        manager = TaskManager(include_path=folders, include_defaults=False) if folders else None
        if manager is None or not all(name in manager.task_index for name in source.names):
            settle_hub()
            manager = TaskManager(include_path=folders or None)
        for name in source.names:
            if name not in manager.task_index:
                hint = did_you_mean(name, manager.all_tasks)
                raise SettingError(f"task.tasks: lm-eval has no task {name!r}{hint}; `kvlab lm_eval ls tasks` lists them")
        try:
            leaves = dict(manager.load(list(source.names))["tasks"])
        except Exception as error:  # whatever datasets, the hub or a task's own code may raise
            reason = " ".join(str(error).split())[:200]
            raise SettingError(
                f"task.tasks={list(source.names)} can't be loaded ({reason}): give local data with task.data_dir, or let "
                "lm-eval load it from the hub (HF_HUB_OFFLINE unset)"
            ) from error
    for leaf in leaves.values():
        default = leaf.get_config("num_fewshot")
        if num_fewshot is not None and default != 0:  # a task that says 0 has reasons, as lm-eval has it
            leaf.set_config(key="num_fewshot", value=num_fewshot)
        elif default is None:
            leaf.set_config(key="num_fewshot", value=0)
    return leaves


PLACES = ("dataset_path", "dataset_name", "dataset_kwargs", "metadata")
"""What a task's settings say of where its data is, which its documents stand for."""


@cache
def asked_hash(source: Source, num_fewshot: int | None, limit: int | None) -> str:
    """Hash of what tasks ask: their settings (prompts, choices, metrics), the documents, and those that examples are from."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, leaf in load_leaves(source, num_fewshot).items():
        settings = {key: value for key, value in leaf.dump_config().items() if key not in PLACES}
        docs = list(leaf.eval_docs)[:limit]
        shots = list(leaf.fewshot_docs()) if leaf.get_config("num_fewshot") else []
        for part in (name, settings, *docs, "examples", *shots):
            hashed.update(json.dumps(part, sort_keys=True, default=_as_text).encode() + b"\n")
    return hashed.hexdigest()


def _as_text(value: Any) -> str:
    """A value that JSON doesn't know; functions by their source, as their addresses differ from run to run."""
    if not callable(value):
        return str(value)
    try:
        return inspect.getsource(value)
    except (TypeError, OSError):
        return str(getattr(value, "__qualname__", type(value)))


def chat_template(tokenizer: Any) -> Callable[..., str]:
    """What renders a conversation. Raises SettingError for a tokenizer without a template."""
    if not getattr(tokenizer, "chat_template", None):
        raise SettingError("task.chat=true, but this model's tokenizer has no chat template: use task.chat=false")

    def render(history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        return tokenizer.apply_chat_template(
            history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    return render


@contextmanager
def quiet() -> Iterator[None]:
    """lm-eval and datasets log and draw bars of their own; kvlab has one bar."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
