"""lm-eval's own tasks on a folder of local data: files with the columns that they read, and a YAML for each that names these.

A generated YAML includes lm-eval's own from the installed package and changes only where the data is, so prompts, targets and
metrics are lm-eval's. Nothing is downloaded, and no data set's script is run. Does not import lm-eval.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from kvlab.evals.harness.documents import Convert, Doc, Values
from kvlab.evals.harness.raw_files import Source
from kvlab.evals.harness.recipes import MMLU, RECIPES, Recipe, mmlu_subject
from kvlab.evals.rows import BadRow, BadRows, Row, sorted_out
from kvlab.evals.texts import text_hash
from kvlab.hints import did_you_mean
from kvlab.paths import cache_dir
from kvlab.settings import SettingError

KEPT_APART = 100
"""Rows at the end of a file that has no training file beside it: examples for few-shot prompts, never scored."""
ALIASES = {"lambada": "lambada_openai"}
"""Names that lm-eval has for several tasks, of which the data is one."""


@dataclass(frozen=True)
class LocalTasks:
    """Tasks that lm-eval can run.

    folder    for `lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)`; with the defaults these tasks
              replace lm-eval's of the same names
    names     lm-eval's names for what was asked, in the same order; a group such as mmlu is one name
    left_out  a line on each row that can't be used, naming file and row
    hash      of the rows, whatever folder they are in
    """

    folder: Path
    names: tuple[str, ...]
    left_out: tuple[str, ...]
    hash: str


# ------------------------------------------------------------------------------------------------------------ lm-eval


def own_tasks() -> Path:
    """Folder of lm-eval's own task files. Raises SettingError where it isn't installed."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise SettingError("lm-eval's tasks need the package lm-eval: pip install 'kvlab[evals]'")
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"


def _own_yaml(folder: str, kind: str, name: str) -> Path:
    """lm-eval's YAML of a task or a group. Raises SettingError where its release has none."""
    line = re.compile(rf"""^["']?{kind}["']?: *["']?{re.escape(name)}["']? *$""", re.MULTILINE)
    for path in sorted((own_tasks() / folder).glob("*.yaml")):
        if line.search(path.read_text(encoding="utf-8")):
            return path
    raise SettingError(f"the installed lm-eval has no {kind} {name} in {own_tasks() / folder}; use 0.4.13")


@cache
def mmlu_groups() -> dict[str, tuple[str, ...]]:
    """Tasks of each of lm-eval's four groups of MMLU's subjects: `mmlu_stem` to `mmlu_abstract_algebra` and so on."""
    groups: dict[str, list[str]] = {}
    for path in sorted((own_tasks() / MMLU).glob("mmlu_*.yaml")):
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
        groups.setdefault(held["tag"].removesuffix("_tasks"), []).append(held["task"])
    return {group: tuple(tasks) for group, tasks in groups.items()}


def known_tasks() -> list[str]:
    """All names that `local_tasks` takes."""
    subjects = [task for tasks in mmlu_groups().values() for task in tasks]
    return [*RECIPES, *ALIASES, "mmlu", *mmlu_groups(), *subjects]


# -------------------------------------------------------------------------------------------------------------- tasks


def local_tasks(data_dir: Path, names: Sequence[str], bad_rows: BadRows = "skip") -> LocalTasks:
    """Tasks of lm-eval on the files of a data folder, ready to run offline.

    data_dir  laid out as docs/local_tasks.md says
    names     lm-eval's names: copa, piqa, mmlu, mmlu_anatomy, ...
    bad_rows  rows that can't be used: skip (left out and named) or stop
    Raises SettingError for an unknown name, a task twice, a file that is missing, a bad row under bad_rows=stop, and a file
    without enough good rows.
    """
    folder = Path(data_dir).expanduser().resolve()
    if not folder.is_dir():
        raise SettingError(f"task.data_dir={data_dir}: there is no such folder; give the one that benchmark data is in")
    asked = tuple(ALIASES.get(name, name) for name in names)
    groups = mmlu_groups() if any(name.startswith("mmlu") for name in asked) else {}
    tasks = _flat(asked, groups)
    made = {task: _make(folder, task, bad_rows) for task in tasks}
    written = {f"{task}.yaml": _task_yaml(task, made[task]) for task in tasks}
    for name in asked:
        for group in groups if name == "mmlu" else [name] if name in groups else []:
            written[f"_{group}.yaml"] = _group_yaml(group, groups[group])
        if name == "mmlu":
            written["_mmlu.yaml"] = _group_yaml("mmlu", tuple(groups))
    place = cache_dir() / "lm_tasks" / "tasks" / text_hash(json.dumps(written, sort_keys=True))
    for name, text in written.items():
        _write(place / name, text)
    left_out = tuple(line for task in tasks for line in made[task].left_out)
    return LocalTasks(place, asked, left_out, text_hash("\n".join(f"{task} {made[task].hash}" for task in sorted(tasks))))


def _flat(asked: Sequence[str], groups: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Single tasks of tasks and groups. Raises SettingError for names that aren't known, and for a task that comes twice."""
    if not asked:
        raise SettingError(f"task.tasks is empty; name some of: {_listed()}")
    found: dict[str, str] = {}
    for name in asked:
        subjects = [task for tasks in groups.values() for task in tasks]
        inside = tuple(subjects) if name == "mmlu" else groups.get(name, (name,))
        for task in inside:
            if task not in RECIPES and task not in subjects:
                raise SettingError(
                    f"there is no local data for a task {task!r}{did_you_mean(task, known_tasks())}; there is for: {_listed()}"
                )
            if task in found:
                first = "" if found[task] == name else f" (it is in {found[task]} and in {name})"
                raise SettingError(f"task.tasks names {task} twice{first}: leave one out")
            found[task] = name
    return list(found)


def _listed() -> str:
    return ", ".join([*RECIPES, *ALIASES, "mmlu", *mmlu_groups(), "mmlu_<subject>"])


# --------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class _Made:
    """A task's files by split, the recipe that made them, what was left out, and the hash of what they hold."""

    recipe: Recipe
    files: Mapping[str, Path]
    left_out: tuple[str, ...]
    hash: str


def _make(folder: Path, task: str, bad_rows: BadRows) -> _Made:
    """Write a task's rows."""
    recipe = RECIPES[task] if task in RECIPES else mmlu_subject(task.removeprefix("mmlu_"))
    docs, left_out = _docs(folder, recipe.scored, recipe.convert, bad_rows)
    splits = {recipe.split: docs}
    if recipe.shots is not None:
        shots, more = _docs(folder, recipe.shots, recipe.convert, bad_rows)
        splits, left_out = {**splits, str(recipe.shot_split): shots}, (*left_out, *more)
    elif recipe.shot_split is not None:
        apart = max(1, min(KEPT_APART, len(docs) // 5))
        if len(docs) < 2:
            raise SettingError(f"the data of {task} in {folder} has one row; it needs two or more, as the last are kept apart")
        splits = {recipe.split: docs[:-apart], recipe.shot_split: docs[-apart:]}
    texts = {split: "".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in rows) for split, rows in splits.items()}
    digest = text_hash(json.dumps([texts, dict(recipe.changes)], sort_keys=True))
    files = {split: cache_dir() / "lm_tasks" / "data" / task / digest / f"{split}.jsonl" for split in texts}
    for split, text in texts.items():
        _write(files[split], text)
    return _Made(recipe, files, left_out, digest)


def _docs(folder: Path, source: Source, convert: Convert, bad_rows: BadRows) -> tuple[list[Doc], tuple[str, ...]]:
    """Documents of all good rows, each with the row that it is from, and a line on each bad row."""
    rows = sorted_out(source(folder), partial(_problem, convert), bad_rows)
    return [{**convert(row.values), "kvlab_row": _place(row)} for row in rows.good], rows.left_out


def _problem(convert: Convert, values: Values) -> str | None:
    try:
        convert(values)
    except BadRow as problem:
        return str(problem)
    return None


def _place(row: Row) -> str:
    return f"{row.file.name}:{row.number}"


# -------------------------------------------------------------------------------------------------------------- files


def _task_yaml(task: str, made: _Made) -> str:
    """lm-eval's own task with other data.

    Tags are left out, as they would stand for lm-eval's other tasks too. `fewshot_split` stays what it is: where it is unset,
    lm-eval draws one example more than it uses, and setting it would change which examples a seed gives.
    """
    recipe = made.recipe
    splits = {f"{kind}_split": name if name in made.files else None for kind, name in SPLITS.items()}
    changes = {
        "include": str(_own_yaml(recipe.folder, "task", task)),
        "task": task,
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: str(path) for split, path in made.files.items()},
            "cache_dir": str(cache_dir() / "lm_tasks" / "datasets"),
        },
        **splits,
        **recipe.changes,
    }
    return str(yaml.safe_dump(changes, sort_keys=False, allow_unicode=True, width=1000))


SPLITS = {"training": "train", "validation": "validation", "test": "test"}
"""What lm-eval's setting calls a split, and what its tasks call it."""


def _group_yaml(group: str, members: Sequence[str]) -> str:
    """lm-eval's own group with these members."""
    changes = {"include": str(_own_yaml(MMLU, "group", group)), "group": group, "task": list(members)}
    return str(yaml.safe_dump(changes, sort_keys=False))


def _write(path: Path, text: str) -> None:
    """Write a file whose path has a hash of what it holds, at once or not at all; one that is there and whole stays."""
    data = text.encode("utf-8")
    if path.is_file() and path.stat().st_size == len(data):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)
