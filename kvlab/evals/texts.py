"""Texts to read: English prose that comes with Python, a file of any usual kind, or a column of a dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.evals.haystack import Haystack
from kvlab.hints import did_you_mean
from kvlab.settings import SettingError

TABLES = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of files that hold rows."""


@dataclass(frozen=True)
class Text:
    """A text and the hash of the data it is from."""

    text: str
    hash: str


def embedded_text() -> Text:
    """Prose of Python's language reference, markup stripped. It differs between releases of Python, and so does its hash."""
    prose = Haystack.named("prose")
    return Text(" ".join(prose.sentences), prose.hash)


def file_hash(path: Path) -> str:
    """BLAKE2 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def text_hash(text: str) -> str:
    """BLAKE2 of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def existing_file(value: str, where: str) -> Path:
    """The file that a setting names. Raises SettingError if there is none, or nothing in it."""
    path = Path(value).expanduser()
    if not path.is_file():
        raise SettingError(f"{where}={value}: there is no such file; give a path from {Path.cwd()} or an absolute one")
    if not path.stat().st_size:
        raise SettingError(f"{where}={value}: the file is empty")
    return path


def file_text(value: str, column: str, where: str = "task.file") -> Text:
    """A .txt or .md file as it is; of a .jsonl, .json, .csv or .parquet file a column, its rows a blank line apart.

    Raises SettingError, which names the setting (or option) that the file is from.
    """
    path = existing_file(value, where)
    if path.suffix in TABLES:
        rows = table_rows(path)
        if not any(column in row for row in rows):
            known = dict.fromkeys(name for row in rows for name in row)
            has = f"{did_you_mean(column, known)}; it has: {', '.join(known)}"
            fix = "set task.column" if where == "task.file" else "give one the name, or take a .txt file"
            raise SettingError(f"{path}: no row has a field {column!r}{has}; {fix}")
        text = "\n\n".join(str(row[column]) for row in rows if column in row)
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise SettingError(f"{where}={value}: no UTF-8 text ({error.reason} at byte {error.start}); convert it") from None
    return Text(text, text_hash(text))


def dataset_text(name: str, config: str | None, split: str, column: str) -> Text:
    """A column of a dataset from the hub or a local folder, its rows a blank line apart, through the package `datasets`."""
    try:
        import datasets
    except ImportError:
        raise SettingError(f"task.dataset={name} needs the package datasets: pip install 'kvlab[datasets]'") from None
    try:
        rows: Any = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, ConnectionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise SettingError(f"task.dataset={name} can't be loaded ({reason}): correct it, or give task.file") from error
    if column not in rows.column_names:
        raise SettingError(f"task.dataset={name} has no column {column!r}: set task.column to one of {rows.column_names}")
    text = "\n\n".join(str(value) for value in rows[column] if value)
    return Text(text, text_hash(text))


def table_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl, .json, .csv or .parquet file, without what is empty. Raises SettingError naming file and row."""
    if path.suffix not in TABLES:
        raise SettingError(f"{path}: rows are read from {', '.join(TABLES)}, not from {path.suffix or 'a file without suffix'}")
    rows = list(_json_rows(path)) if path.suffix in (".jsonl", ".json") else _frame_rows(path)
    if not rows:
        raise SettingError(f"{path} has no rows")
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"{path}: no UTF-8 text ({error.reason} at byte {error.start}); convert it") from None
    if path.suffix == ".json":
        rows = _parsed(text, f"{path}")
        if not isinstance(rows, list):
            raise SettingError(f"{path} holds no list of rows: give a JSON list of objects, or one object a line (.jsonl)")
        numbered = list(enumerate(rows, 1))
    else:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        numbered = [(number, _parsed(line, f"{path}, row {number}")) for number, line in lines]
    for number, row in numbered:
        if not isinstance(row, dict):
            raise SettingError(f'{path}, row {number}: no JSON object; each row is one, such as {{"prompt": "..."}}')
        yield row


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingError(f"{where}: no JSON ({error.msg} at column {error.colno}); correct it") from None


def _frame_rows(path: Path) -> list[dict[str, Any]]:
    import pandas

    try:
        # Every cell of a .csv is text as it stands: 007 is not 7, NA is not missing.
        csv = path.suffix == ".csv"
        frame = pandas.read_csv(path, dtype=str, keep_default_na=False) if csv else pandas.read_parquet(path)
    except ImportError:
        raise SettingError(f"{path}: .parquet files need the package pyarrow: pip install pyarrow") from None
    except (ValueError, OSError) as error:
        raise SettingError(f"{path} can't be read: {str(error).splitlines()[0]}") from error
    return [{str(name): _plain_value(value) for name, value in row.items()} for row in frame.to_dict("records")]


def _plain_value(value: Any) -> Any:
    """A cell as JSON would have it; None for an empty one."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return None if value == "" or value != value else value  # NaN differs from itself
