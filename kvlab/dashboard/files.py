"""Files that the page is made of: whether any has changed, in one walk that opens none, and cells read once while they stay."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvlab.dashboard.analyses import NAMES
from kvlab.tables import StoredCell, matching, read_cell

WATCHED = {"result.json", "samples.jsonl", *(f"{name}.json" for name in NAMES)}
"""Names of files that bear on the page."""


def watched(places: Iterable[Path]) -> list[Path]:
    """Files at or below the given folders and globs that bear on the page, sorted."""
    return sorted({file for place in places for start in matching(place) for file in _below(start)})


def _below(start: Path) -> Iterator[Path]:
    if not start.is_dir():
        yield from (start.with_name(name) for name in WATCHED)
    for folder, _, names in os.walk(start):
        yield from (Path(folder, name) for name in WATCHED.intersection(names))


def state_of(files: Iterable[Path]) -> str:
    """Hash of files' names, sizes and times."""
    known = []
    for file in files:
        try:
            stat = file.stat()
            known.append((str(file), stat.st_size, stat.st_mtime_ns))
        except OSError:
            known.append((str(file), -1, 0))
    return hashlib.blake2b(repr(known).encode(), digest_size=12).hexdigest()


class Reader:
    """Reads cells as `kvlab.tables.read_cell`, each anew only where its result has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[str, StoredCell]] = {}

    def __call__(self, path: Path) -> StoredCell:
        """The cell of a folder. Raises as `read_cell`."""
        state = state_of([path / "result.json"])
        if self._known.get(path, ("",))[0] != state:
            self._known[path] = state, read_cell(path)
        return self._known[path][1]
