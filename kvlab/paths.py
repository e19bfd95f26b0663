"""Where kvlab's folders are: cache, configuration, benchmark data.

Reads the environment at each call and creates nothing. Knows nothing about what lies in the folders.
"""

import os
from pathlib import Path

BENCHMARK_FILES = ".benchmark"
"""A folder with this file in it holds a benchmark's own files: a `result.json` there isn't a cell's."""


def cache_dir() -> Path:
    """Folder for what can be made again: `KVLAB_CACHE_DIR`, else `kvlab` in `XDG_CACHE_HOME`, else `~/.cache/kvlab`."""
    if own := os.environ.get("KVLAB_CACHE_DIR"):
        return Path(own).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "kvlab"
    return Path.home() / ".cache" / "kvlab"


def conf_dir() -> Path:
    """The folder of configuration files: inside an installed package, beside the package in a source checkout.

    Raises ValueError where neither exists.
    """
    return _shipped("conf", "kvlab's conf folder")


def data_dir() -> Path | None:
    """Folder of benchmark data, `KVLAB_DATA_DIR`; None where it's unset.

    Raises ValueError where it names no folder.
    """
    value = os.environ.get("KVLAB_DATA_DIR")
    if not value:
        return None
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise ValueError(f"KVLAB_DATA_DIR names no folder: {folder}; correct it or unset it")
    return folder


def experiments_dir() -> Path:
    """The folder of papers' tables: inside an installed package, beside the package in a source checkout.

    Raises ValueError where neither exists.
    """
    return _shipped("experiments", "the folder of papers' tables")


def _shipped(name: str, what: str) -> Path:
    """A folder that comes with kvlab. what: how messages call it."""
    package = Path(__file__).resolve().parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise ValueError(f"{what} is neither in nor beside {package}: install kvlab again")
