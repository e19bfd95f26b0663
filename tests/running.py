"""What tests of whole runs share: the command line in this process, and its results."""

import json
from pathlib import Path

from kvlab.cli import main

TINY = ["debug=smoke", "runtime.threads=1"]


def kvlab(*arguments, capsys=None):
    """Exit code of `kvlab ...`; with capsys also what it printed on stdout and on stderr."""
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    if capsys is None:
        return code
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def results(folder):
    """result.json of every cell below a folder, by the cell's path."""
    return {
        path.parent.relative_to(folder).as_posix(): json.loads(path.read_text()) for path in Path(folder).rglob("result.json")
    }


def sample_lines(folder):
    """Lines of samples.jsonl of every cell below a folder, by the cell's path."""
    files = Path(folder).rglob("samples.jsonl")
    return {path.parent.relative_to(folder).as_posix(): path.read_text().splitlines() for path in files}
