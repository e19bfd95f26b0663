"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def part_of(path: Path) -> Path:
    """Where to write what is to replace `path`: beside it, another name for each process."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers and later attempts see all of it or what was there before."""
    part = part_of(path)
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
