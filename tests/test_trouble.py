"""When something goes wrong in a sweep: one line says what and how to go on, nothing finished is lost, and the rest is run."""

import json
import resource
import subprocess
import sys
import time

import huggingface_hub
import numpy as np
import pytest
import torch

from kvlab.hub import settle_hub
from kvlab.measure import out_of_memory
from kvlab.results import CellStore
from running import TINY, kvlab, results, sample_lines

POLICIES = """
import os
import signal
from dataclasses import dataclass

import torch

from kvlab import Policy, register


@register("greedy")
@dataclass(frozen=True)
class Greedy(Policy):
    '''Asks for more memory than there is where a batch has more rows than `rows`.'''

    rows: int = 2

    def score(self, step):
        if len(step.positions) > self.rows:
            torch.empty(1 << 50)
        return step.positions.float()


@register("signalled")
@dataclass(frozen=True)
class Signalled(Policy):
    '''Somebody presses Ctrl-C while it decides.'''

    def score(self, step):
        presses, os.environ["PRESSED"] = int(os.environ["PRESSED"]), "0"
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        return step.positions.float()
"""
RUN = ["run", *TINY, "--no-table"]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Options for policies of one's own: one file for all tests, since a name is one module's."""
    file = tmp_path_factory.mktemp("own") / "own_policies.py"
    file.write_text(POLICIES)
    return ["--import", str(file)]


@pytest.fixture(autouse=True)
def own_folder(in_a_folder):
    """All runs are in a folder of their own."""


def only(folder):
    """Path and result of a store's only cell."""
    ((path, result),) = results(folder).items()
    return folder / path, result


def test_a_folder_in_whose_way_a_file_is_ends_before_anything_is_loaded(tmp_path, capsys):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "debug").write_text("")
    code, _, err = kvlab(*RUN, capsys=capsys)
    assert (code, err) == (2, "kvlab: outputs/debug can't be written: let it be, or give another output_dir or name\n")


def test_a_full_disk_ends_in_a_line_and_the_same_command_goes_on(tmp_path, capsys):
    """The system refuses to let a file grow beyond some bytes, as a full disk does; Hydra's own files are smaller."""
    command = [*RUN, "policy=knorm", "runtime.batch_size=4", "task.windows=24", "task.context=24"]
    assert kvlab(*command, "output_dir=whole") == 0
    folder, wanted = only(tmp_path / "whole")
    size = (folder / "samples.jsonl").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    capsys.readouterr()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 4, before[1]))
        code, _, err = kvlab(*command, capsys=capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    last = err.strip().splitlines()[-1]
    assert code == 1 and last.startswith("kvlab: outputs/") and "can't be written (File too large): make room" in last
    assert "Traceback" not in err and not results(tmp_path / "outputs")
    ((_, begun),) = sample_lines(tmp_path / "outputs").items()
    assert kvlab(*command) == 0
    folder, result = only(tmp_path / "outputs")
    lines = sample_lines(tmp_path / "outputs")[folder.relative_to(tmp_path / "outputs").as_posix()]
    assert result["metrics"] == wanted["metrics"] and 8 < len(begun) < 24 and lines[: len(begun) - 1] == begun[:-1]
    assert not [file for file in (tmp_path / "outputs").rglob(".*") if file.name != ".lock"], "parts of files stay behind"


def test_broken_files_are_set_aside_and_made_again(tmp_path, capsys):
    command = [*RUN, "policy=knorm", "runtime.batch_size=1"]
    assert kvlab(*command) == 0
    folder, wanted = only(tmp_path / "outputs")
    lines = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "samples.jsonl").write_bytes(b"".join([lines[0], b"\xff\x00" + lines[1][9:], *lines[2:]]))
    broken = (folder / "samples.jsonl").read_bytes()
    (folder / "result.json").write_text('["no result"]')
    capsys.readouterr()
    code, _, err = kvlab(*command, capsys=capsys)
    assert code == 0
    assert "result.json can't be read and is made again; what there was is now result.json.broken" in err
    assert "samples.jsonl: 1 line is no sample, to be made again; what there was is now samples.jsonl.broken" in err
    assert (folder / "samples.jsonl.broken").read_bytes() == broken
    assert (folder / "result.json.broken").read_text() == '["no result"]'
    assert only(tmp_path / "outputs")[1]["metrics"] == wanted["metrics"]
    assert (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)[:3] == [lines[0], *lines[2:]]


def test_a_finished_cell_without_its_samples_is_run_again(tmp_path, capsys):
    command = [*RUN, "policy=knorm", "runtime.batch_size=1"]
    assert kvlab(*command) == 0
    folder, wanted = only(tmp_path / "outputs")
    samples, lines = folder / "samples.jsonl", (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    for left, says in ((lines[:-1], "has changed since its result was made"), (None, "is missing")):
        samples.unlink() if left is None else samples.write_bytes(b"".join(left))
        capsys.readouterr()
        code, _, err = kvlab(*command, capsys=capsys)
        assert code == 0 and f"{says}: what it lacks is run again; the old result is now result.json.broken" in err
        assert only(tmp_path / "outputs")[1]["metrics"] == wanted["metrics"]
        assert samples.read_bytes().splitlines(keepends=True)[: len(left or ())] == (left or [])
    older = json.loads((folder / "result.json").read_text())
    del older["provenance"]["samples_bytes"]
    (folder / "result.json").write_text(json.dumps(older))
    assert kvlab(*command) == 0 and only(tmp_path / "outputs")[1] == older, "results from before say no size"


@pytest.mark.parametrize(("presses", "kept"), [(1, 2), (2, 0)])
def test_ctrl_c_waits_for_the_batch_and_a_second_one_does_not(presses, kept, own, tmp_path, monkeypatch, capfd):
    command = [*RUN, "policy=signalled", "runtime.batch_size=2", *own]
    monkeypatch.setenv("PRESSED", str(presses))
    code, _, err = kvlab(*command, capsys=capfd)
    assert code == 130 and not results(tmp_path / "outputs")
    assert err.count("the running batch is finished first, Ctrl-C again stops at once") == 1
    assert err.endswith("kvlab: interrupted; nothing finished is lost, the same command goes on from here\n")
    begun = [line for lines in sample_lines(tmp_path / "outputs").values() for line in lines]
    assert len(begun) == kept
    assert kvlab(*command) == 0
    folder, _ = only(tmp_path / "outputs")
    after = (folder / "samples.jsonl").read_text().splitlines()
    assert len(after) == 4 and after[:kept] == begun


def test_ctrl_c_waits_for_the_batch_that_cells_share(own, tmp_path, monkeypatch, capfd):
    sweep = ["run", "-m", *TINY, "policy=signalled,knorm", "runtime.batch_size=2", "--no-table", *own]
    monkeypatch.setenv("PRESSED", "1")
    code, _, err = kvlab(*sweep, capsys=capfd)
    begun = sample_lines(tmp_path / "outputs")
    assert code == 130 and err.count("the running batch is finished first") == 1
    assert [len(lines) for lines in begun.values()] == [2, 2] and not results(tmp_path / "outputs")
    assert kvlab(*sweep) == 0
    assert {path: lines[:2] for path, lines in sample_lines(tmp_path / "outputs").items()} == begun
    assert [result["provenance"]["cells_together"] for result in results(tmp_path / "outputs").values()] == [2, 2]


def test_too_little_memory_is_recorded_or_tried_in_smaller_batches(own, tmp_path, capsys):
    command = ["run", "-m", *TINY, "policy=greedy,full", "--no-table", *own]
    code, _, err = kvlab(*command, capsys=capsys)
    found = {result["policy"]: result for result in results(tmp_path / "outputs").values()}
    assert code == 1 and (found["greedy"]["status"], found["full"]["status"]) == ("failed", "ok")
    assert found["greedy"]["error"].startswith("out of memory: set runtime.oom=retry") and found["greedy"]["error"] in err
    code, _, err = kvlab(*command, "runtime.oom=retry", capsys=capsys)
    found = {result["policy"]: result for result in results(tmp_path / "outputs").values()}
    assert code == 0 and (found["greedy"]["speed"]["batch_size"], found["full"]["speed"]["batch_size"]) == (2, 8)
    assert "memory was enough for batches of 2: set runtime.batch_size=2" in err
    assert kvlab(*command, "runtime.batch_size=2", "output_dir=small") == 0
    small = {result["policy"]: result for result in results(tmp_path / "small").values()}
    assert small["greedy"]["metrics"] == found["greedy"]["metrics"]


def test_one_sample_that_is_too_large_is_a_failure_whatever_is_tried(own, tmp_path, capsys):
    command = [*RUN, "policy=greedy", "policy.rows=0", *own, "runtime.oom=retry"]
    code, _, err = kvlab(*command, capsys=capsys)
    assert code == 1 and "out of memory with one sample at a time: set runtime.prefill_chunk" in err
    assert only(tmp_path / "outputs")[1]["status"] == "failed"


def test_what_says_that_memory_was_too_little():
    def fails(act):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            act()
        return caught.value

    assert out_of_memory(fails(lambda: torch.empty(1 << 50)))
    assert out_of_memory(fails(lambda: np.empty(1 << 55)))
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."))
    assert not out_of_memory(fails(lambda: torch.zeros(2) @ torch.zeros(3)))


@pytest.fixture
def no_network(monkeypatch):
    """A proxy that refuses, and nothing that says so."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    huggingface_hub.close_session()
    settle_hub.cache_clear()
    yield
    huggingface_hub.close_session()
    settle_hub.cache_clear()


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (["model=path", "model.path=nobody/nothing"], "run `hf download nobody/nothing` where there is network"),
        pytest.param(["task.dataset=nobody/nothing"], "task.dataset=nobody/nothing can't be loaded", marks=pytest.mark.slow),
        pytest.param(["task=longbench", "task.tasks=[trec]"], "LongBench can't be had from the hub", marks=pytest.mark.slow),
    ],
)
def test_a_hub_out_of_reach_is_said_at_once(setting, says, no_network, monkeypatch, capsys):
    monkeypatch.delenv("KVLAB_DATA_DIR", raising=False)
    start = time.perf_counter()
    code, _, err = kvlab(*RUN, *setting, capsys=capsys)
    assert code == 2 and says in err and err.count("\n") == 1, err
    assert time.perf_counter() - start < 20, "tried again and again"


def test_a_cell_that_another_sweep_runs_is_left_to_it(tmp_path, capsys):
    sweep = ["run", "-m", *TINY, "policy=full,knorm", "--no-table"]
    assert kvlab(*RUN, "policy=knorm") == 0
    folder, _ = only(tmp_path / "outputs")
    store = CellStore(folder)
    store.set_aside()
    with store.locked():
        code, _, err = kvlab(*sweep, capsys=capsys)
    assert code == 1 and "left to it" in err and "1 of 2 cells are left to another process" in err
    assert [result["policy"] for result in results(tmp_path / "outputs").values()] == ["full"]
    assert kvlab(*sweep) == 0 and len(results(tmp_path / "outputs")) == 2


@pytest.mark.slow
def test_two_sweeps_at_once_run_each_sample_once(tmp_path):
    sweep = [sys.executable, "-m", "kvlab.cli", "run", "-m", *TINY, "policy=full,h2o,tova,knorm", "--no-table"]
    sweep += ["budget.ratio=0.3,0.6", "runtime.batch_size=1", "task.windows=9"]
    both = [subprocess.Popen(sweep, cwd=tmp_path, stderr=subprocess.DEVNULL) for _ in range(2)]
    codes = [process.wait(timeout=300) for process in both]
    assert 0 in codes and set(codes) <= {0, 1}
    assert [result["status"] for result in results(tmp_path / "outputs").values()] == ["ok"] * 7
    for lines in sample_lines(tmp_path / "outputs").values():
        ids = [json.loads(line)["id"] for line in lines]
        assert len(ids) == len(set(ids)) == 9
