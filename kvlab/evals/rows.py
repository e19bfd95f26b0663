"""Rows of a data file, checked one by one: a bad row is left out and named, or ends the run, as the task's `bad_rows` says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvlab.settings import SettingError

TABLES = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of files that hold rows."""
BadRows = Literal["skip", "stop"]
"""What to do with bad rows: leave them out, counted and reported, or end with the first one's problem."""


class BadRow(ValueError):
    """What is wrong with a row."""


@dataclass(frozen=True)
class Row:
    """One row: its file, its number from 1 (of a .jsonl file the line's), and its fields, without what is empty."""

    file: Path
    number: int
    values: Mapping[str, Any]

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.file}, row {self.number}"


@dataclass(frozen=True)
class Rows:
    """Good rows, and a line on each bad one, which names file and row."""

    good: tuple[Row, ...]
    left_out: tuple[str, ...] = ()


def read_rows(
    path: Path, problem: Callable[[Mapping[str, Any]], str | None], bad_rows: BadRows = "skip", limit: int | None = None
) -> Rows:
    """Rows of a .jsonl, .json, .csv or .parquet file.

    problem  what is wrong with a row, if anything
    limit    only so many rows from the top, bad ones counted
    Raises SettingError for a file without rows, for the first bad row under bad_rows=stop, and where all rows are bad.
    """
    return sorted_out(numbered(path)[:limit], problem, bad_rows)


def sorted_out(rows: Sequence[Row | str], problem: Callable[[Mapping[str, Any]], str | None], bad_rows: BadRows) -> Rows:
    """Rows with and without a problem. A text among them says what is wrong with a row that can't be read."""
    good: list[Row] = []
    bad: list[str] = []
    for row in rows:
        if isinstance(row, str):
            bad.append(row)
        elif wrong := problem(row.values):
            bad.append(f"{row.where}: {wrong}")
        else:
            good.append(row)
    if bad and (bad_rows == "stop" or not good):
        more = f" (and {len(bad) - 1} more bad rows)" if len(bad) > 1 else ""
        raise SettingError(bad[0] + more)
    return Rows(tuple(good), tuple(bad))


def table_rows(path: Path) -> list[dict[str, Any]]:
    """Fields of all rows. Raises SettingError naming file and row for one that can't be read, and for a file without rows."""
    rows = sorted_out(numbered(path), lambda values: None, "stop")
    return [dict(row.values) for row in rows.good]


def numbered(path: Path) -> list[Row | str]:
    """Rows of a file; in the place of one that can't be read what is wrong with it. SettingError for a file without rows."""
    if path.suffix not in TABLES:
        raise SettingError(f"{path}: rows are read from {', '.join(TABLES)}, not from {path.suffix or 'a file without suffix'}")
    if not path.is_file():
        raise SettingError(f"{path}: there is no such file")
    rows = list(_json_rows(path)) if path.suffix in (".jsonl", ".json") else _frame_rows(path)
    if not rows:
        raise SettingError(f"{path} has no rows")
    return rows


def missing(values: Mapping[str, Any], *names: str) -> str | None:
    """What to say of the first of these fields that a row lacks or that is empty text."""
    lacks = next((name for name in names if name not in values or values[name] == ""), None)
    return None if lacks is None else f"the field {lacks!r} is missing or empty; it has: {', '.join(values) or 'nothing'}"


def _json_rows(path: Path) -> Iterator[Row | str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"{path}: no UTF-8 text ({error.reason} at byte {error.start}); convert it") from None
    if path.suffix == ".json":
        rows = _parsed(text, f"{path}") if text.strip() else []
        if isinstance(rows, str):
            raise SettingError(rows)
        if not isinstance(rows, list):
            raise SettingError(f"{path} holds no list of rows: give a JSON list of objects, or one object a line (.jsonl)")
        found = list(enumerate(rows, 1))
    else:
        # Not splitlines(): JSON strings may hold other line separators as they are.
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        found = [(number, _parsed(line, f"{path}, row {number}")) for number, line in lines]
    for number, row in found:
        if isinstance(row, dict):
            yield Row(path, number, {name: value for name, value in row.items() if value is not None})
        elif isinstance(row, str) and row.startswith(f"{path}"):
            yield row
        else:
            yield f'{path}, row {number}: no JSON object; each row is one, such as {{"prompt": "..."}}'


def _parsed(text: str, where: str) -> Any:
    """What a JSON text holds; where it is none a text that says so."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return f"{where}: no JSON ({error.msg} at column {error.colno}); correct it"


def _frame_rows(path: Path) -> list[Row | str]:
    import pandas

    try:
        # Every cell of a .csv is text as it stands: 007 is not 7, NA is not missing.
        csv = path.suffix == ".csv"
        frame = pandas.read_csv(path, dtype=str, keep_default_na=False) if csv else pandas.read_parquet(path)
    except ImportError:
        raise SettingError(f"{path}: .parquet files need the package pyarrow: pip install pyarrow") from None
    except (ValueError, OSError) as error:
        raise SettingError(f"{path} can't be read: {str(error).splitlines()[0]}") from error
    plain = [{str(name): _plain_value(value) for name, value in row.items()} for row in frame.to_dict("records")]
    return [Row(path, n, {k: v for k, v in row.items() if v is not None}) for n, row in enumerate(plain, 1)]


def _plain_value(value: Any) -> Any:
    """A cell as JSON would have it; None for an empty one."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return None if value == "" or value != value else value  # NaN differs from itself
