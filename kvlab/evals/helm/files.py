"""From files to rows, where a data set's file isn't simply a table: labels apart, lists in objects, archives."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path

from kvlab.evals.rows import Row, numbered
from kvlab.settings import SettingError


def piqa_rows(path: Path, argument: str) -> list[Row | str]:
    """Rows, with the labels that stand in a file of their own, a line each."""
    rows, beside = numbered(path), path.with_name(f"{path.stem}-labels.lst")
    if not beside.is_file():
        raise SettingError(f"{beside}: there is no such file; it holds the right choices of {path.name}, one a line")
    labels = beside.read_text().split()
    if len(labels) != len(rows):
        raise SettingError(f"{beside} has {len(labels)} labels for {len(rows)} rows of {path.name}")
    return [
        row if isinstance(row, str) else replace(row, values={**row.values, "label": label})
        for row, label in zip(rows, labels, strict=True)
    ]


def hellaswag_rows(path: Path, argument: str) -> list[Row | str]:
    """The list 'dev' of a JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = data["dev"]
    except (OSError, ValueError, KeyError, TypeError):
        raise SettingError(f"{path}: no JSON object with a list 'dev' of rows") from None
    found = [
        Row(path, n, row) if isinstance(row, dict) else f"{path}, row {n}: no JSON object" for n, row in enumerate(rows, 1)
    ]
    return _some(list(found), path)


def _zipped(path: Path, name: str) -> str:
    """The text of the one file in a zip archive whose name ends so."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = [each for each in archive.namelist() if each.endswith(name)]
            if len(found) != 1:
                raise SettingError(f"{path} holds {len(found)} files {name}, and must hold one")
            return archive.read(found[0]).decode("utf-8")
    except (OSError, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise SettingError(f"{path} can't be read: {error}") from None


def cnn_rows(path: Path, argument: str) -> list[Row | str]:
    """The one table of a zip archive."""
    table = csv.DictReader(io.StringIO(_zipped(path, ".csv"), newline=""))
    rows = [{key: value for key, value in row.items() if key and value} for row in table]
    return _some([Row(path, number, row) for number, row in enumerate(rows, 1)], path)


def mmlu_rows(path: Path, argument: str, split: str = "test") -> list[Row | str]:
    """A subject's table without a header, in a zip archive with a folder for each split."""
    name = f"{argument}_{split}.csv"
    table = csv.reader(io.StringIO(_zipped(path, f"/{split}/{name}"), newline=""))
    found: list[Row | str] = []
    for number, row in enumerate(table, 1):
        if len(row) > 3:
            found.append(Row(path / name, number, {"question": row[0], "choices": row[1:-1], "answer": row[-1]}))
        else:
            wanted = "a question, choices and a letter"
            found.append(f"{path / name}, row {number}: {len(row)} columns, and needed are {wanted}")
    return _some(found, path / name)


def mmlu_examples(path: Path, argument: str) -> list[Row | str]:
    """The same of the split for examples."""
    return mmlu_rows(path, argument, "dev")


def plain_rows(path: Path, argument: str) -> list[Row | str]:
    """Rows of a .jsonl, .json, .csv or .parquet file."""
    return numbered(path)


def _some(rows: list[Row | str], path: Path) -> list[Row | str]:
    if not rows:
        raise SettingError(f"{path} has no rows")
    return rows
