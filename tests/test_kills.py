"""Workers of joblib and of submitit, killed at any time: the same command ends with each sample once, and equal results.

KVLAB_KILLS=FILE has the slow test add what it saw to a file: what was killed, what was left, what the same command made of it.
"""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from running import TINY, finished, kvlab, results, sample_lines, start
from test_resume import comparable

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")

SLUGGISH = """
import time
from dataclasses import dataclass

from kvlab import Policy, register


@register("sluggish")
@dataclass(frozen=True)
class Sluggish(Policy):
    '''Takes its time, so that workers are killed in the midst of their cells, and of others' too.'''

    def score(self, step):
        time.sleep(0.004)
        return step.positions.float()
"""
SWEEP = ("run", "-m", *TINY, "policy=full,sluggish", "task.windows=5", "runtime.batch_size=1")
SPREADS = {
    "processes": ("launcher=processes", "launcher.jobs=4"),
    "jobs": ("launcher=slurm", "launcher.cluster=local", "launcher.jobs=4", "launcher.cpus=1"),
}
ROLES = {
    "popen_loky_posix": "a worker of joblib",
    "resource_tracker": "joblib's own process",
    "submitit.core._submit": "a worker of submitit",
    "submitit.local._local": "what waits for a worker of submitit",
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The command, and the results of one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "sluggish.py").write_text(SLUGGISH)
    command = (*SWEEP, "budget.ratio=0.3,0.5,0.7,0.9", "--no-table", "--import", str(folder / "sluggish.py"))
    assert kvlab(*command, f"output_dir={folder / 'out'}") == 0
    return command, {path: comparable(result) for path, result in results(folder / "out").items()}


def processes_of(group):
    """Processes of a group, with what each of them is."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, FileNotFoundError):
            number = int(folder.name)
            if os.getpgid(number) == group and folder.joinpath("stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                line = folder.joinpath("cmdline").read_text()
                known = [role for part, role in ROLES.items() if part in line]
                found[number] = "the command itself" if number == group else (known or ["another"])[0]
    return found


def at_work(group):
    """Workers in the midst of a cell: they hold its lock, and have written some of its samples."""
    found = []
    for number, role in processes_of(group).items():
        with suppress(FileNotFoundError):
            held = [link.readlink() for link in Path(f"/proc/{number}/fd").iterdir()] if role.startswith("a worker") else []
            cells = [file.parent for file in held if file.name == ".lock"]
            found += [number for cell in cells if (cell / "samples.jsonl").exists() and not (cell / "result.json").exists()]
    return found


def wait_until(process, seen, seconds=300):
    """What `seen` gives as soon as that is something; None if the sweep is over before."""
    end = time.monotonic() + seconds
    while not (found := seen()):
        if not process.is_alive():
            return None
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.02)
    return found


def assert_full(folder, alone):
    assert {path: comparable(result) for path, result in results(folder).items()} == alone
    for path, lines in sample_lines(folder).items():
        assert len(lines) == 5, f"{path}: a sample is there twice or not at all"


@pytest.mark.parametrize(("kind", "kills"), [("jobs", 1), ("processes", 1)])
def test_killed_workers_cost_no_sample(kind, kills, sweep, tmp_path):
    """One after the other, each in the midst of a cell; where one is left it may go on with what the others had."""
    command, alone = sweep
    folder = tmp_path / "out"
    given = [part.replace("jobs=4", f"jobs={kills + 1}") for part in (*command, *SPREADS[kind])]
    process = start(folder, *given)
    for _ in range(kills):
        found = wait_until(process, lambda: sample_lines(folder) and at_work(process.pid))
        assert found, folder.with_name("out.log").read_text()
        os.kill(found[0], signal.SIGKILL)
    process.join(300)
    assert process.exitcode is not None, "it waits for those that were killed"
    finished(start(folder, *given), folder)
    assert_full(folder, alone)


# ---------------------------------------------------------------------------------------------------------- ten of a kind


def state(folder):
    """What is in a store, in words."""
    lines = [line for lines in sample_lines(folder).values() for line in lines]
    whole = sum(line.endswith("}") for line in lines)
    return f"{len(results(folder))} cells, {whole} samples" + (f", {len(lines) - whole} half" if whole < len(lines) else "")


def moment(folder, rng):
    """A time to kill at, in words, and whether it has come."""
    if rng.random() < 0.5:
        end = time.monotonic() + (seconds := rng.uniform(0, 15))
        return f"after {seconds:.1f} s", lambda: time.monotonic() > end
    wanted = rng.randint(1, 8)
    lines = sum(map(len, sample_lines(folder).values())) + wanted
    return f"after {wanted} more samples", lambda: sum(map(len, sample_lines(folder).values())) >= lines


def kill_one(folder, given, rng):
    """Start the sweep and kill any of its processes, at times all others with it; a row of the log, or None if it was over."""
    when, come = moment(folder, rng)
    process = start(folder, *given)
    if not wait_until(process, come):
        return None
    number, role = rng.choice(sorted(processes_of(process.pid).items()) or [(process.pid, "the command itself")])
    with suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)
    process.join(60 if rng.random() < 0.5 else 0)
    then = "all others too" if process.is_alive() else f"the command ended with {process.exitcode}"
    for left in processes_of(process.pid):
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
    process.kill()
    process.join()
    return f"| {role} | {when} | {then} | {state(folder)} |"


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPREADS)
def test_ten_kills(kind, sweep, tmp_path):
    """Five in a store, unless the sweep gets to its end between them, then the same command to its end."""
    command, alone = sweep
    given, rng, log, kills = (*command, *SPREADS[kind]), random.Random(kind), [], 0
    while kills < 10:
        folder = tmp_path / str(len(log))
        for _ in range(min(5, 10 - kills)):
            if (row := kill_one(folder, given, rng)) is None:
                break
            log, kills = [*log, row], kills + 1
        before = state(folder)
        finished(start(folder, *given), folder)
        assert_full(folder, alone)
        log.append(
            f"| - | the same command | ended with 0 | {before} became {state(folder)}, each once and as by one process |"
        )
    if "KVLAB_KILLS" in os.environ:
        heading = f"## {' '.join(SPREADS[kind])}: {kills} kills\n\n| killed | when | then | left |\n|---|---|---|---|\n"
        with Path(os.environ["KVLAB_KILLS"]).open("a") as file:
            file.write(heading + "\n".join(log) + "\n\n")
