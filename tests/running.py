"""What tests of whole runs share: the command line in this process or in one of its own, and its results."""

import json
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

from kvlab.cli import main

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["kvlab.compose", "kvlab.launcher", "kvlab.tiny"])  # what takes long to import, once for all

TINY = ["debug=smoke", "runtime.threads=1"]


def faulty_policy(name):
    """A module's text with a policy that fails when it has to decide. Names are registered once in a process."""
    return f"""
from dataclasses import dataclass
from kvlab.policies import Policy, register

@register("{name}")
@dataclass(frozen=True)
class Faulty(Policy):
    '''Fails when it has to decide.'''

    def score(self, step):
        raise RuntimeError("no score today\\nand a second line")
"""


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


def start(folder, *arguments):
    """`kvlab ...` with this output folder as a process and a group of its own; what it says is added to FOLDER.log."""
    process = FORKS.Process(target=_by_itself, args=(folder, [*arguments, f"output_dir={folder}"]))
    process.start()
    return process


def _by_itself(folder, arguments):
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which may be ignored where tests run in the background
    log = folder.with_name(f"{folder.name}.log").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.chdir(folder.parent)
    try:
        sys.exit(main(arguments))
    finally:
        threading._shutdown()  # as at a program's end: else multiprocessing waits for joblib's workers, and they for work


def finished(process, folder, seconds=300):
    """Wait for a sweep that must end well."""
    process.join(seconds)
    assert process.exitcode == 0, folder.with_name(f"{folder.name}.log").read_text()


def results(folder):
    """result.json of every cell below a folder, by the cell's path."""
    return {
        path.parent.relative_to(folder).as_posix(): json.loads(path.read_text()) for path in Path(folder).rglob("result.json")
    }


def sample_lines(folder):
    """Lines of samples.jsonl of every cell below a folder, by the cell's path."""
    files = Path(folder).rglob("samples.jsonl")
    return {path.parent.relative_to(folder).as_posix(): path.read_text().splitlines() for path in files}
