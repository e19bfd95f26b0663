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
import shutil
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


class StoreError(OSError):
    """A cell's folder can't be written: what is there stays, and the sweep ends, since no other cell could be either."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises StoreError, in one line that says how to go on, where a write fails."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{folder} can't be written ({error.strerror or error}): make room, or let it be written; nothing finished is "
            "lost, and the same command goes on from here"
        ) from error


class CellStore:
    """The folder of one cell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.result_file, self.samples_file = folder / "result.json", folder / "samples.jsonl"

    def result(self) -> dict[str, Any] | None:
        """What result.json holds, None if there is none that can be read."""
        try:
            result = json.loads(self.result_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return result if isinstance(result, dict) else None

    def finished(self, run_id: str) -> bool:
        """Whether the cell is done, with a result of this identity and the samples that it was computed from."""
        result = self.result()
        return result is not None and result.get("run_id") == run_id and result.get("status") == "ok" and self._fits(result)

    def size(self) -> int | None:
        """Bytes of the samples' file, None where there is none: what a result says of it, and is checked by."""
        return self.samples_file.stat().st_size if self.samples_file.exists() else None

    def _fits(self, result: Mapping[str, Any]) -> bool:
        """Whether the samples' file is the one of a finished cell's result. Older results don't say its size."""
        known = (result.get("provenance") or {}).get("samples_bytes")
        return self.size() is not None if known is None else self.size() == known

    def records(self) -> list[Record]:
        """All finished samples."""
        return read_records(self.samples_file)[0]

    def count(self) -> int:
        """How many samples are finished, without reading them."""
        return self.samples_file.read_bytes().count(b"\n") if self.samples_file.exists() else 0

    def repair(self) -> list[str]:
        """Make files whole that aren't; a line on each whose content was lost, which stays as *.broken. Only under the lock.

        A last line without its end is what an interrupted write leaves behind, and no more than cut off.
        """
        said = []
        with writing(self.folder):
            if self.result_file.exists() and self.result() is None:
                aside = _broken(self.result_file)
                self.result_file.replace(aside)
                said.append(f"{self.result_file} can't be read and is made again; what there was is now {aside.name}")
            elif (result := self.result()) and result.get("status") == "ok" and not self._fits(result):
                aside = _broken(self.result_file)
                self.result_file.replace(aside)  # a result must not outlive its samples
                what = "is missing" if self.size() is None else "has changed since its result was made"
                said.append(f"{self.samples_file} {what}: what it lacks is run again; the old result is now {aside.name}")
            records, broken = read_records(self.samples_file)
            torn = self.samples_file.exists() and self.samples_file.read_bytes()[-1:] not in (b"", b"\n")
            if lost := broken - torn:
                aside = _broken(self.samples_file)
                shutil.copyfile(self.samples_file, aside)
                lines = "1 line is" if lost == 1 else f"{lost} lines are"
                said.append(f"{self.samples_file}: {lines} no sample, to be made again; what there was is now {aside.name}")
            if broken:
                write_whole(self.samples_file, as_lines(records))
        return said

    def append(self, records: Sequence[Record]) -> None:
        """Add finished samples; on disk when this returns."""
        with writing(self.folder), self.samples_file.open("ab") as file:
            file.write(as_lines(records).encode())
            file.flush()
            os.fsync(file.fileno())

    def rewrite(self, records: Sequence[Record]) -> None:
        """Put these in the place of all finished samples."""
        with writing(self.folder):
            write_whole(self.samples_file, as_lines(records))

    def start(self, config: Mapping[str, Any]) -> None:
        """Make the folder, with the config that was asked for."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))

    def finish(self, result: Mapping[str, Any], traceback: str = "") -> None:
        """Write the result, and the traceback of a failure."""
        with writing(self.folder):
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
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.folder / ".lock")
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:  # an OSError too
                raise CellBusy(f"another process runs {self.folder}") from None
        try:
            yield
        finally:
            lock.release()


def _broken(file: Path) -> Path:
    return file.with_name(f"{file.name}.broken")


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
