"""Sweeps spread over processes and jobs: what a worker takes, what launchers are given. Kills are in test_kills.py."""

import os
import shutil
import signal
import time

import pytest
import torch

from kvlab.cells import Cell
from kvlab.launcher import Work
from kvlab.results import CellStore
from kvlab.settings import SettingError
from kvlab.spread import Local, Processes, Slurm, spread_of
from running import TINY, sample_lines
from test_compose import composed


def test_work_begins_elsewhere_and_leaves_nothing(tmp_path):
    """Two workers one after the other, in this process."""
    cells = [Cell.of(config) for config in composed(*TINY, "policy=h2o", f"output_dir={tmp_path}")]
    work = Work(tuple((cell.config, {}) for cell in cells), (), time.time())
    work(1, 2)
    assert all(work.settled(cell) for cell in cells)
    before = sample_lines(tmp_path)
    work(0, 2)
    assert sample_lines(tmp_path) == before


def test_failed_cells_are_tried_once_a_sweep(tmp_path):
    (config,) = composed(*TINY, "policy=h2o", f"output_dir={tmp_path}")
    cell = Cell.of(config)
    store, work = CellStore(cell.folder), Work(((cell.config, {}),), (), time.time() - 60)
    store.start(cell.config)
    started = {"provenance": {"started": "2020-01-01T00:00:00+00:00"}}
    store.finish({**cell.summary(), "status": "failed", **started})
    assert not work.settled(cell), "it failed before this sweep"
    now = {"provenance": {"started": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())}}
    store.finish({**cell.summary(), "status": "failed", **now})
    assert work.settled(cell) and work.failed(cell)


@pytest.mark.parametrize("reference", ["full", "file"])
def test_cells_that_are_judged_against_the_full_cache_wait_for_it(reference, tmp_path, monkeypatch):
    configs = composed(*TINY, "policy=full,h2o", f"output_dir={tmp_path}")
    full, other = cells = [Cell.of(config) for config in configs]
    store, work = CellStore(full.folder), Work(((full.config, {}), (other.config, {})), (), time.time() - 60)
    monkeypatch.setattr(type(other.task), "needs_full", reference == "full")
    assert work._waits(other, cells) == (reference == "full")
    assert not work._waits(full, cells)
    store.start(full.config)
    store.finish({**full.summary(), "status": "failed", "provenance": {"started": "2020-01-01T00:00:00+00:00"}})
    assert work._waits(other, cells) == (reference == "full"), "it failed in an earlier sweep, and is run again"
    store.finish({**full.summary(), "status": "ok"})
    assert not work._waits(other, cells)


def test_a_killed_process_is_said_in_a_line(tmp_path):
    def worker(number, of):
        os.kill(os.getpid(), signal.SIGKILL)

    said = Processes(jobs=2).run(worker, 2, tmp_path)
    assert said is not None and "give the same command" in said


@pytest.mark.skipif(torch.accelerator.current_accelerator(check_available=True) is not None, reason="has a GPU")
def test_jobs_on_gpus_are_not_started_where_there_is_none():
    """Their cells would be other cells: the kind of device is part of what they are."""
    with pytest.raises(SettingError, match="give the command on a node with a GPU"):
        Slurm(gpus=1).check()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, Local()),
        ({"name": "processes", "jobs": 3}, Processes(jobs=3)),
        ({"name": "slurm", "setup": ["module load cuda"], "options": {"account": "nlp"}}, None),
    ],
)
def test_launchers_are_built_from_settings(settings, expected):
    found = spread_of(settings)
    if expected is not None:
        assert found == expected
        return
    assert isinstance(found, Slurm)
    assert found.where == ("slurm jobs" if shutil.which("srun") else "local jobs, since there is no SLURM here")
    given = found._parameters("slurm")
    assert given["slurm_setup"] == ["module load cuda"] and given["slurm_additional_parameters"] == {"account": "nlp"}
    assert set(found._parameters("local")) == {"timeout_min", "cpus_per_task", "gpus_per_node", "name"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "processes", "jobs": 0}, "launcher.jobs=0: use at least 1"),
        ({"name": "slurm", "cluster": "pbs"}, "cluster"),
        ({"name": "slurm", "options": 3}, "launcher.options=3: use names and values"),
        ({"name": "process"}, "did you mean processes"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(SettingError, match=message):
        spread_of(settings)
