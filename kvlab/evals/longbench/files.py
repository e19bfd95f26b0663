"""Prediction files in LongBench's own format: read, written, scored, and shown as a table.

A line is {"pred", "answers", "all_classes", "length"}; LongBench v2's has the row, "response", "pred" and "judge".
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock

from kvlab.evals.longbench.data import answers_problem, mini_rows
from kvlab.evals.longbench.metrics import BUCKETS, SCORES, bucket, need, score
from kvlab.evals.rows import Row, numbered, sorted_out
from kvlab.paths import BENCHMARK_FILES
from kvlab.settings import SettingError

Prediction = Mapping[str, Any]


def dataset_of(file: Path) -> str | None:
    """The dataset whose predictions a file holds, by its name; None for another file."""
    name = file.stem.removeprefix("MiniLongBench_").removesuffix("_e")
    return name if name in SCORES and file.suffix in (".jsonl", ".json") else None


def read_predictions(file: Path) -> list[dict[str, Any]]:
    """Predictions of a LongBench or MiniLongBench file. Raises SettingError naming file and row for a bad one."""
    dataset = dataset_of(file)

    def problem(values: Mapping[str, Any]) -> str | None:
        if dataset is None:
            fits = isinstance(values.get("judge"), bool | int)
            return None if fits else "a prediction of LongBench v2 has the field 'judge', true or false"
        for name in ("pred", "answers"):
            if name not in values or (name == "pred" and not isinstance(values[name], str)):
                return f"the field {name!r} is missing or no text; it has: {', '.join(values) or 'nothing'}"
        if not isinstance(values.get("length", 0), int | float):
            return f"'length' is {values['length']!r}, and must be a number"
        return answers_problem(dataset, values)

    mini = file.suffix == ".json" and dataset is not None and isinstance(_json(file), dict)
    rows: Sequence[Row | str] = mini_rows(file) if mini else numbered(file)
    return [dict(row.values) for row in sorted_out(rows, problem, "stop").good]


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return None


def percent(values: Iterable[float]) -> float | None:
    """100 times the mean to two digits, as the benchmark rounds; None of nothing."""
    found = list(values)
    return round(100 * sum(found) / len(found), 2) if found else None


def total(dataset: str, rows: Sequence[Prediction]) -> float | None:
    """A dataset's score in percent."""
    return percent(_scores(dataset, rows))


def by_bucket(dataset: str, rows: Sequence[Prediction]) -> dict[str, float | None]:
    """LongBench-E's scores in percent; None for a bucket without rows. Raises SettingError for rows without `length`."""
    if without := next((n for n, row in enumerate(rows, 1) if row.get("length") is None), None):
        raise SettingError(f"predictions of {dataset}, row {without}: no field 'length', which LongBench-E's scores go by")
    scored = list(zip(_scores(dataset, rows), (bucket(row["length"]) for row in rows), strict=True))
    return {name: percent(value for value, place in scored if place == name) for name in BUCKETS}


def _scores(dataset: str, rows: Sequence[Prediction]) -> list[float]:
    need(dataset)
    return [score(dataset, row["pred"], row["answers"], row.get("all_classes") or ()) for row in rows]


def v2_totals(rows: Sequence[Prediction]) -> dict[str, float | None]:
    """LongBench v2's accuracies in percent to one digit, in all, by difficulty and by length."""

    def accuracy(field: str, value: str) -> float | None:
        found = [float(row["judge"]) for row in rows if not field or row.get(field) == value]
        return round(100 * statistics.fmean(found), 1) if found else None

    places = {"overall": ("", ""), **{name: ("difficulty", name) for name in ("easy", "hard")}}
    places |= {name: ("length", name) for name in ("short", "medium", "long")}
    return {name: accuracy(*place) for name, place in places.items()}


def write_predictions(folder: Path, name: str, rows: Sequence[Prediction]) -> None:
    """Write a dataset's predictions into a model's folder, and score all that are in it anew into result.json.

    Cells of several datasets fill one folder, at once where several processes run; a lock lets them take turns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BENCHMARK_FILES).touch()
    with filelock.FileLock(folder / ".lock"):
        _write(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        _write(folder / "result.json", json.dumps(_result(folder), ensure_ascii=False, indent=4) + "\n")


def _result(folder: Path) -> dict[str, Any]:
    """{dataset: score}, or by LongBench-E's buckets in a folder below pred_e; LongBench v2's accuracies."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.jsonl")):
        rows, dataset = read_predictions(file), dataset_of(file)
        if dataset is None:
            found |= v2_totals(rows)
        else:
            found[dataset] = (by_bucket if folder.parent.name == "pred_e" else total)(dataset, rows)
    return found


def _write(file: Path, text: str) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def score_table(paths: Sequence[str], options: Mapping[str, str]) -> str:
    """A table of the scores of prediction files, given themselves or by their folders.

    options  by=length: LongBench-E's buckets too, as always for files in pred_e/<model>/
    Raises SettingError, in one line that says what to change.
    """
    if wrong := [f"{name}={value}" for name, value in options.items() if (name, value) != ("by", "length")]:
        raise SettingError(f"-o {wrong[0]}: for longbench there is by=length alone")
    files = [file for path in paths for file in _files(Path(path).expanduser())]
    lines = []
    for file in files:
        rows, dataset = read_predictions(file), dataset_of(file)
        if dataset is None:
            lines.append([file.stem, "accuracy", len(rows), *v2_totals(rows).items()])
            continue
        split = bool(options) or file.resolve().parent.parent.name == "pred_e"
        more = by_bucket(dataset, rows).items() if split else ()
        lines.append([dataset, SCORES[dataset].__name__, len(rows), ("score", total(dataset, rows)), *more])
    return _shown(lines)


def _files(path: Path) -> list[Path]:
    """Prediction files of a folder, in the benchmark's order of datasets. Raises SettingError where there are none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SettingError(f"{path}: there is no such file or folder")
    order = list(SCORES)
    found = sorted((f for f in path.iterdir() if dataset_of(f)), key=lambda f: (order.index(str(dataset_of(f))), f.name))
    found = found or sorted(path.glob("*.jsonl"))  # LongBench v2's are called as one likes
    if not found:
        raise SettingError(f"{path} holds no predictions: files are called <dataset>.jsonl or MiniLongBench_<dataset>.json")
    return found


def _shown(lines: Sequence[Sequence[Any]]) -> str:
    names = list(dict.fromkeys(name for line in lines for name, _ in line[3:]))
    table = [["dataset", "metric", "rows", *names]]
    for line in lines:
        values = dict(line[3:])
        table.append([line[0], line[1], str(line[2]), *(_number(values.get(name)) for name in names)])
    scores = [dict(line[3:]).get("score") for line in lines]
    known = [value for value in scores if value is not None]
    if len(known) > 1:
        table.append(["mean of datasets", "", "", f"{statistics.fmean(known):.2f}", *[""] * (len(names) - 1)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = ["<", "<", *">" * (len(widths) - 2)]
    padded = [[f"{cell:{side}{w}}" for cell, side, w in zip(row, sides, widths, strict=True)] for row in table]
    return "\n".join("  ".join(row).rstrip() for row in padded)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
