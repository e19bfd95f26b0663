"""The results store: one folder per cell, whose path says what was run and whose hash is its identity.

    <output_dir>/<name>/<model>/<task>/<protocol>/<policy>/<budget>-<hash>/
        config.yaml     what was asked for
        samples.jsonl   one line per finished sample; what a later attempt goes on from
        result.json     metrics, memory, speed, provenance; written when the cell is finished or has failed
        error.txt       the traceback of a failed cell
    <output_dir>/<name>/<model>/<task>/
        prompts-<hash>.jsonl    what was asked, as text: once for all cells that ask the same

Files appear whole or not at all; samples are appended batch by batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import yaml  # type: ignore[import-untyped]

from kvlab.files import write_whole

SCHEMA = 1
"""Layout of result.json."""

Record = dict[str, Any]


class CellBusy(ValueError):
    """Another process runs this cell."""


class CellStore:
    """The folder of one cell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.result_file, self.samples_file = folder / "result.json", folder / "samples.jsonl"

    def result(self) -> dict[str, Any] | None:
        """What result.json holds, None if there is none that can be read."""
        try:
            return json.loads(self.result_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def finished(self, run_id: str) -> bool:
        """Whether the cell is done, with a result of this identity."""
        result = self.result()
        return result is not None and result.get("status") == "ok" and result.get("run_id") == run_id

    def records(self) -> list[Record]:
        """All finished samples."""
        return read_records(self.samples_file)[0]

    def count(self) -> int:
        """How many samples are finished, without reading them."""
        return self.samples_file.read_bytes().count(b"\n") if self.samples_file.exists() else 0

    def repair(self) -> None:
        """Drop lines that an interrupted write left behind, so that later ones stand alone. Only under the lock."""
        records, broken = read_records(self.samples_file)
        if broken:
            write_whole(self.samples_file, as_lines(records))

    def append(self, records: Sequence[Record]) -> None:
        """Add finished samples; on disk when this returns."""
        with self.samples_file.open("ab") as file:
            file.write(as_lines(records).encode())
            file.flush()
            os.fsync(file.fileno())

    def rewrite(self, records: Sequence[Record]) -> None:
        """Put these in the place of all finished samples."""
        write_whole(self.samples_file, as_lines(records))

    def start(self, config: Mapping[str, Any]) -> None:
        """Make the folder, with the config that was asked for."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))

    def finish(self, result: Mapping[str, Any], traceback: str = "") -> None:
        """Write the result, and the traceback of a failure."""
        if traceback:
            write_whole(self.folder / "error.txt", traceback)
        else:
            (self.folder / "error.txt").unlink(missing_ok=True)
        write_whole(self.result_file, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        if result["status"] == "ok":
            for name in ("samples.jsonl", "result.json"):
                (self.folder / f"previous.{name}").unlink(missing_ok=True)

    def set_aside(self) -> None:
        """Begin anew; what there is stays as previous.* until the cell is finished again."""
        for name in ("samples.jsonl", "result.json"):  # in this order: a result must not outlive its samples
            if (self.folder / name).exists():
                (self.folder / name).replace(self.folder / f"previous.{name}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Raises CellBusy if another process runs this cell."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise CellBusy(f"another process runs {self.folder}") from None
        try:
            yield
        finally:
            lock.release()


def prompts_file(cell: Path, digest: str) -> Path:
    """Texts of the prompts of a cell's folder, by the hash that its result has of them. Older stores have none."""
    return cell.resolve().parents[2] / f"prompts-{digest}.jsonl"


def read_records(file: Path) -> tuple[list[Record], int]:
    """Samples of a file, and how many lines are none: an interrupted write leaves a part of one."""
    records: list[Record] = []
    lines = file.read_bytes().split(b"\n") if file.exists() else [b""]
    broken = int(lines[-1] != b"")  # a line without its end may lack more
    for line in lines[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and "id" in record:
            records.append(record)
        else:
            broken += 1
    return records, broken


def as_lines(records: Iterable[Record]) -> str:
    """Samples as they stand in a file."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
