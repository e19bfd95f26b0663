"""Rows of the raw files of a data folder, each reader one of the layouts that benchmarks come in.

A source is what a reader makes of a path below the data folder: called with the folder it gives the rows, numbered from 1, and
in the place of a row that can't be read a line on what is wrong with it. All raise SettingError for a file that isn't there.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvlab.evals.rows import Row, numbered
from kvlab.settings import SettingError

Source = Callable[[Path], list[Row | str]]


def table(name: str) -> Source:
    """A .jsonl or .json file of objects."""
    return lambda folder: numbered(_there(folder, name))


def table_in(name: str, key: str) -> Source:
    """The list of objects that a .json file holds under a key."""

    def rows(folder: Path) -> list[Row | str]:
        path = _there(folder, name)
        try:
            held = json.loads(_text(path))
        except json.JSONDecodeError as error:
            raise SettingError(f"{path}: no JSON ({error}); correct it") from None
        listed = held.get(key) if isinstance(held, dict) else None
        if not isinstance(listed, list) or not listed:
            raise SettingError(f"{path} has no rows: it must be a JSON object that holds a list under {key!r}")
        return [_object(path, number, row) for number, row in enumerate(listed, 1)]

    return rows


def _object(path: Path, number: int, row: object) -> Row | str:
    if not isinstance(row, dict):
        return f"{path}, row {number}: no JSON object"
    return Row(path, number, {name: value for name, value in row.items() if value is not None})


def table_with_labels(name: str, labels: str) -> Source:
    """A .jsonl file whose labels stand in a file of their own, one a line; they become the field `label`."""

    def rows(folder: Path) -> list[Row | str]:
        found = numbered(_there(folder, name))
        path = _there(folder, labels)
        lines = _text(path).split()
        if len(lines) != len(found):
            raise SettingError(f"{path} has {len(lines)} labels, {folder / name} {len(found)} rows: they must be as many")
        pairs = zip(found, lines, strict=True)
        return [
            row if isinstance(row, str) else Row(row.file, row.number, {**row.values, "label": label}) for row, label in pairs
        ]

    return rows


def zipped_csv(name: str, member: str, columns: tuple[str, ...]) -> Source:
    """A .csv file without a header in a .zip file, in whatever folder there; `member` is how its path ends."""

    def rows(folder: Path) -> list[Row | str]:
        path = _there(folder, name)
        try:
            with zipfile.ZipFile(path) as archive:
                inside = [entry for entry in archive.namelist() if f"/{entry}".endswith(f"/{member}")]
                text = archive.read(inside[0]).decode("utf-8") if inside else None
            cells = list(csv.reader(io.StringIO(text or ""), strict=True))
        except (zipfile.BadZipFile, UnicodeDecodeError, csv.Error) as error:
            raise SettingError(f"{path}, {member}, can't be read: {error}") from None
        if text is None:
            raise SettingError(f"{path} holds no file {member}")
        place = path / inside[0]
        found = [_csv_row(place, number, row, columns) for number, row in enumerate(cells, 1)]
        if not found:
            raise SettingError(f"{place} has no rows")
        return found

    return rows


def _csv_row(place: Path, number: int, cells: list[str], columns: tuple[str, ...]) -> Row | str:
    if len(cells) != len(columns):
        return f"{place}, row {number}: {len(cells)} cells, not {len(columns)} ({', '.join(columns)})"
    return Row(place, number, dict(zip(columns, cells, strict=True)))


def wiki_pages(name: str) -> Source:
    """Articles of a WikiText file as the field `page`, cut where a line is a title, ` = Title = `; numbered by that line.

    Lines of formulas may look like titles; where lm-eval's data set is cut they count, so they do here.
    """

    def rows(folder: Path) -> list[Row | str]:
        path = _there(folder, name)
        lines = _text(path).split("\n")
        titles = [place for place, line in enumerate(lines) if _is_title(line)]
        if not titles:
            raise SettingError(f"{path} has no titles: a line such as ' = Title = ' begins an article")
        ends = [*titles[1:], len(lines)]
        pages = ["\n".join(lines[start:end]) for start, end in zip(titles, ends, strict=True)]
        return [Row(path, start + 1, {"page": page}) for start, page in zip(titles, pages, strict=True)]

    return rows


def _is_title(line: str) -> bool:
    """Whether a line is ` = Title = ` and not ` = = Section = = `: one sign at each end, apart from the words."""
    words = line.split()
    return len(words) > 2 and words[0] == words[-1] == "=" and "=" not in (words[1], words[-2])


def _there(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise SettingError(f"{path}: there is no such file; put it there, or name another folder (task.data_dir)")
    return path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"{path}: no UTF-8 text ({error.reason} at byte {error.start}); convert it") from None
