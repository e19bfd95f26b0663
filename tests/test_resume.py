"""A sweep that is killed and started again ends with the results of an uninterrupted one, and repeats no finished sample."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from kvlab.results import CellStore
from running import TINY, finished, kvlab, results, sample_lines, start

SWEEP = [
    *("run", "-m", *TINY, "runtime.batch_size=2", "--no-table"),
    *("policy=full,h2o,tova,knorm,random", "budget.ratio=0.3,0.6,0.9", "task.windows=9", "task.context=40"),
]  # 13 cells of 9 samples


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert kvlab(*SWEEP, f"output_dir={folder}") == 0
    return folder


def comparable(result):
    """What must not depend on interruptions: everything but times and the memory of the process."""
    kept = {key: result[key] for key in ("run_id", "status", "metrics", "main_metric", "query_aware", "budget", "identity")}
    memory = {key: value for key, value in result["memory"].items() if key not in ("peak_process_bytes", "peak_device_bytes")}
    return kept | {"memory": memory}


def kill_in_the_middle(folder, rng):
    """Start the sweep, kill it a random while after it has begun to write; False if it was finished before that."""
    before = sum(map(len, sample_lines(folder).values()))
    process = start(folder, *SWEEP)
    target = before + rng.randint(1, 14)
    while process.is_alive() and sum(map(len, sample_lines(folder).values())) < target:
        time.sleep(0.005)
    time.sleep(rng.random() * 0.05)
    if not process.is_alive():
        return False
    process.kill()
    process.join()
    return True


def killed_times(folder, kills, seed):
    rng, seen = random.Random(seed), {}
    for _ in range(kills):
        if not kill_in_the_middle(folder, rng):
            break
        now = sample_lines(folder)
        for path, lines in seen.items():
            whole = [line for line in lines if line.endswith("}")]
            assert now[path][: len(whole)] == whole, "a finished sample was written anew"
        seen = now
        yield seen


def check_killed(tmp_path, uninterrupted, kills, seed):
    folder = tmp_path / "out"
    killed = list(killed_times(folder, kills, seed))
    assert len(killed) >= min(kills, 3), "the sweep ended before it could be killed"
    assert len(results(folder)) < 13
    finished(start(folder, *SWEEP), folder)
    wanted, found = results(uninterrupted), results(folder)
    assert len(wanted) == 13 and found.keys() == wanted.keys()
    for path in wanted:
        assert comparable(found[path]) == comparable(wanted[path]), path
    last = killed[-1]
    for path, lines in sample_lines(folder).items():
        ids = [json.loads(line)["id"] for line in lines]
        assert len(ids) == len(set(ids)) == 9, "each sample once"
        assert lines[: len(last.get(path, []))] == last.get(path, []) or not last[path][-1].endswith("}")
    return len(killed)


def test_killed(tmp_path, uninterrupted):
    check_killed(tmp_path, uninterrupted, 1, seed=0)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path, uninterrupted, capsys):
    kills, attempt = 0, 0
    while kills < 20:
        folder = tmp_path / str(attempt)
        folder.mkdir()
        done = check_killed(folder, uninterrupted, min(10, 20 - kills) if kills < 17 else 3, seed=attempt + 1)
        kills, attempt = kills + done, attempt + 1
        with capsys.disabled():
            print(f"killed {done} times and finished with equal results ({kills} kills so far)")


def test_an_interrupted_write_is_cut_off(tmp_path):
    store = CellStore(tmp_path)
    store.append([{"id": "a"}, {"id": "b", "text": "ü"}])
    whole = store.samples_file.read_bytes()
    for torn in (b'{"id": "c', b'{"id": "c"}', b"\xc3"):
        store.samples_file.write_bytes(whole + torn)
        assert [record["id"] for record in store.records()] == ["a", "b"]
        assert store.samples_file.read_bytes() == whole + torn, "reading changes nothing: another process may be writing"
        store.repair()
        assert store.samples_file.read_bytes() == whole
    store.samples_file.write_bytes(whole.replace(b'"a"}', b'"a'))
    assert [record["id"] for record in store.records()] == ["b"]
    store.samples_file.write_bytes(whole)
    store.append([{"id": "c"}])
    assert [record["id"] for record in store.records()] == ["a", "b", "c"]


def test_a_result_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    store = CellStore(tmp_path)
    store.append([])
    store.finish({"status": "ok", "run_id": "x", "value": 1})
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        store.finish({"status": "ok", "run_id": "x", "value": 2})
    monkeypatch.undo()
    assert store.result()["value"] == 1 and store.finished("x") and not store.finished("y")
    store.result_file.write_text('{"status": "ok", "run')
    assert store.result() is None and not store.finished("x")


def test_ctrl_c_says_how_to_go_on(tmp_path):
    process = start(tmp_path / "out", *SWEEP)
    while not sample_lines(tmp_path / "out"):
        time.sleep(0.01)
        assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    last = (tmp_path / "out.log").read_text().strip().splitlines()[-1]
    assert last == "kvlab: interrupted; nothing finished is lost, the same command goes on from here"
