"""Sweeps spread over processes and jobs: what a worker takes, what launchers are given. Kills are in test_kills.py."""

import os
import shutil
import signal
import time

import pytest
import torch

from kvlab.cells import Cell
from kvlab.results import CellStore
from kvlab.settings import SettingError
from kvlab.spread import Local, Processes, Slurm, spread_of
from kvlab.work import Work
from running import TINY, kvlab, results, sample_lines
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
    store.append([])
    store.finish({**full.summary(), "status": "ok"})
    assert not work._waits(other, cells)


def test_fewer_processes_go_on_where_one_was_killed(tmp_path):
    def worker(number, of):
        if not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / f"{number} of {of}").touch()

    said = Processes(jobs=2).run(worker, 2, tmp_path)
    assert said is not None and "1 new went on with what was left" in said and (tmp_path / "0 of 1").exists()


def test_a_killed_process_is_said_in_a_line(tmp_path):
    def worker(number, of):
        os.kill(os.getpid(), signal.SIGKILL)

    said = Processes(jobs=2).run(worker, 2, tmp_path)
    assert said is not None and "give the same command" in said


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Programs with the names of SLURM's: sbatch takes what it is given, unless the file that this returns says why not."""
    (tmp_path / "bin").mkdir()
    programs = {"srun": "", "sbatch": '[ -e "$0.no" ] && cat "$0.no" >&2 && exit 1\necho Submitted batch job 17\n'}
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "bin" / "sbatch.no"


no_gpu = pytest.mark.skipif(torch.accelerator.current_accelerator(check_available=True) is not None, reason="has a GPU")


@no_gpu
def test_jobs_with_gpus_are_submitted_where_there_is_none(cluster, tmp_path, capsys):
    sweep = ["run", "-m", *TINY, "policy=full,h2o", f"output_dir={tmp_path}", "--no-table"]
    sweep += ["launcher=slurm", "launcher.gpus=1", "launcher.wait=false"]
    code, _, err = kvlab(*sweep, capsys=capsys)
    assert code == 2 and "give runtime.device=cuda" in err
    code, _, err = kvlab(*sweep, "runtime.device=cuda", capsys=capsys)
    assert (code, results(tmp_path)) == (0, {}) and "look after them with `squeue --jobs=17_0,17_1`" in err
    cluster.write_text("sbatch: error: invalid partition\n")
    code, _, err = kvlab(*sweep, "runtime.device=cuda", capsys=capsys)
    assert code == 2 and "jobs can't be submitted (sbatch: error: invalid partition): correct launcher.partition" in err
    with pytest.raises(SettingError, match="local jobs run on this machine"):
        Slurm(gpus=1, cluster="local").check()


@no_gpu
def test_cells_of_jobs_with_gpus_are_those_that_the_jobs_find():
    """Named alike where they are submitted and where they run: the kind of device is part of what they are."""
    jobs = [*TINY, "policy=h2o", "launcher=slurm", "launcher.gpus=1"]
    found = [Cell.of(config) for device in ("cuda", "auto") for config in composed(*jobs, f"runtime.device={device}")]
    assert [cell.comparison["device"] for cell in found] == ["cuda", "cuda"] and len({cell.run_id for cell in found}) == 1
    with pytest.raises(ValueError, match="torch has no device 'cuda:x' here"):
        Cell.of(composed(*jobs, "runtime.device=cuda:x")[0])


@pytest.mark.skipif(shutil.which("srun") is not None, reason="has SLURM")
def test_wrong_launchers_are_said_where_everything_is_finished(tmp_path, capsys):
    command = ["run", *TINY, "policy=knorm", f"output_dir={tmp_path}", "--no-table"]
    assert kvlab(*command) == 0
    code, _, err = kvlab(*command, "launcher=slurm", "launcher.cluster=slurm", capsys=capsys)
    assert code == 2 and err.splitlines()[-1].startswith("kvlab: launcher=slurm can't be had (Could not detect")
    assert kvlab(*command, "launcher=slurm", "launcher.cluster=local") == 0


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
