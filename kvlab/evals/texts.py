"""Texts to read: English prose that comes with Python, a file of any usual kind, or a column of a dataset."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.evals.haystack import Haystack
from kvlab.evals.rows import TABLES, table_rows
from kvlab.hints import did_you_mean
from kvlab.hub import settle_hub
from kvlab.settings import SettingError


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
    if not Path(name).exists():
        settle_hub()
    try:
        rows: Any = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, ConnectionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise SettingError(f"task.dataset={name} can't be loaded ({reason}): correct it, or give task.file") from error
    if column not in rows.column_names:
        raise SettingError(f"task.dataset={name} has no column {column!r}: set task.column to one of {rows.column_names}")
    text = "\n\n".join(str(value) for value in rows[column] if value)
    return Text(text, text_hash(text))
