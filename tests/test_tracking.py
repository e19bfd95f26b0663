"""What W&B is told, read back from the files that it really writes; and that nothing it does disturbs a sweep."""

import json
import os
import shlex
import struct
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

from kvlab import tracking, wandb_runs
from kvlab.tracking import make_tracker, plain, sample_table, summary
from kvlab.wandb_runs import TrackingSettings

OFFLINE = TrackingSettings("wandb", project="kvlab-test", mode="offline", tags=("mine", "h2o", ""), sample_rows=2)

CELL = {
    "run_id": "cell-1",
    "status": "running",
    "error": None,
    "name": "first experiment",
    "model": "tiny-llama",
    "task": "perplexity",
    "protocol": "p" * 70,
    "policy": "h2o",
    "policy_label": "H2O",
    "budget_label": "20 %",
    "config": {"budget": {"fraction": 0.2}, "layers": (1, 2), "limit": float("inf"), "path": Path("a/b"), "seed": np.int64(7)},
}
RESULT = {
    **CELL,
    "status": "done",
    "metrics": {
        "nll": {"value": np.float32(1.5), "stderr": 0.25, "n": 3},
        "perplexity": {"value": float("nan"), "stderr": None, "n": 3},
    },
    "memory": {"peak_bytes": 1024},
    "speed": {"decode": {"tokens_per_second": 12.5}},
}
SAMPLES = [
    {"id": "a", "values": {"nll": 1.0}, "output": "hi", "answers": ["x", "y"], "fields": {"depth": 1, "where": "top"}},
    {"id": "b", "values": {"nll": float("nan"), "em": True}, "output": "ho", "answers": [], "fields": {"where": [1, 2]}},
    {"id": "c", "values": {"nll": 3.0}, "output": "", "answers": ["z"], "fields": {}},
]


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """No key, no settings and no home of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def records(file):
    """The records of a .wandb file: a 7-byte header, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    assert data[:4] in (b":W&B", b"")
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            break  # still being written
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def files_of(folder, run_id="cell-1"):
    return sorted(folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))


def read(file):
    """A run as its file tells it: run record, config, summary, history rows, exit code."""
    for _ in range(100):  # wandb's service writes the last records shortly after `finish` returns
        run = types.SimpleNamespace(config={}, summary={}, history=[], kinds=set(), exit=None)
        for record in records(file):
            _take(run, record, record.WhichOneof("record_type"))
        if run.exit is not None:
            break
        time.sleep(0.05)
    return run


def _take(run, record, kind):
    run.kinds.add(kind)
    if kind == "run":
        run.record = record.run
        run.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    elif kind == "summary":
        run.summary |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update}
    elif kind == "history":
        run.history.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    elif kind == "exit":
        run.exit = record.exit.exit_code


def track(folder, settings=OFFLINE, cell=CELL, result=RESULT, samples=SAMPLES):
    tracker = make_tracker(settings, folder)
    tracker.start(cell)
    tracker.progress(1, 3, {"nll": 1.25})
    tracker.finish(result, samples)
    return tracker


def test_a_cell_is_one_run_with_config_summary_and_samples(tmp_path, capfd):
    tracker = track(tmp_path / "out put")
    assert capfd.readouterr() == ("", ""), "wandb says nothing"
    (file,) = files_of(tmp_path / "out put")
    assert tracker.notice == f"W&B: offline, files in {shlex.quote(str(tmp_path / 'out put' / 'wandb'))}; " + (
        f"`wandb sync {shlex.quote(str(tmp_path / 'out put' / 'wandb'))}/offline-*` uploads them"
    )
    run = read(file)
    assert (run.record.run_id, run.record.project, run.record.run_group) == ("cell-1", "kvlab-test", "first experiment")
    assert run.record.display_name == "H2O 20 % perplexity"
    assert list(run.record.tags) == ["h2o", "perplexity", "tiny-llama", "p" * 64, "20 %", "mine"]
    config = {name: value for name, value in run.config.items() if name != "_wandb"}
    assert config == {"budget": {"fraction": 0.2}, "layers": [1, 2], "limit": "Infinity", "path": "a/b", "seed": 7}
    told = {name: value for name, value in run.summary.items() if not name.startswith(("_", "samples"))}
    assert told == {
        "status": "done",
        "metrics/nll/value": 1.5,
        "metrics/nll/stderr": 0.25,
        "metrics/nll/n": 3,
        "metrics/perplexity/value": "NaN",
        "metrics/perplexity/n": 3,
        "memory/peak_bytes": 1024,
        "speed/decode/tokens_per_second": 12.5,
    }
    assert run.exit == 0
    assert not run.record.HasField("git")
    assert run.kinds.isdisjoint({"stats", "output", "output_raw", "environment", "artifact"})
    table_file = file.parent / "files" / run.history[-1]["samples/path"]
    assert json.loads(table_file.read_text()) == {
        "columns": ["id", "values/nll", "values/em", "output", "answers", "fields/depth", "fields/where"],
        "data": [["a", 1.0, None, "hi", "x | y", 1, "top"], ["b", None, True, "ho", "", None, "[1, 2]"]],
    }
    saved = {path.name for path in (file.parent / "files").rglob("*") if path.is_file()}
    assert saved == {table_file.name}, "no code, requirements or metadata"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "home") == ["out put"], "nothing in the cwd"


def test_two_cells_in_one_process_are_two_runs(tmp_path):
    tracker = make_tracker(OFFLINE, tmp_path)
    for number, error in ((1, None), (2, "out of memory")):
        tracker.start({**CELL, "run_id": f"cell-{number}", "config": {"number": number}})
        tracker.finish({**RESULT, "error": error, "metrics": {"m": {"value": number}}}, [])
    runs = [read(*files_of(tmp_path, f"cell-{number}")) for number in (1, 2)]
    assert [run.config["number"] for run in runs] == [1, 2]
    assert [run.summary["metrics/m/value"] for run in runs] == [1, 2]
    assert [run.exit for run in runs] == [0, 1], "a cell with an error counts as failed"
    assert runs[1].summary["error"] == "out of memory"
    assert not any("samples" in name for run in runs for row in run.history for name in row)


def test_an_interrupted_cell_runs_again_and_only_the_last_attempt_is_uploaded(tmp_path):
    tracker = make_tracker(OFFLINE, tmp_path)
    tracker.start(CELL)
    tracker.progress(1, 3, {"nll": 1.0})
    tracker.abandon()
    tracker.abandon()
    tracker.finish(RESULT, SAMPLES)  # of no run: nothing happens
    (first,) = files_of(tmp_path)
    assert (read(first).exit, "status" in read(first).summary) == (255, False)
    track(tmp_path)
    (second,) = set(files_of(tmp_path)) - {first}
    assert read(second).summary["status"] == "done"
    command = [Path(sys.executable).with_name("wandb"), "sync", "--dry-run", *tmp_path.glob("wandb/offline-*")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Would sync 1 run(s)" in done.stderr and second.name in done.stderr, done.stderr
    assert second.parent.name in done.stderr and f"{first.parent.name}/" not in done.stderr


def test_progress_is_throttled_and_finite(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now[0])
    tracker = make_tracker(OFFLINE, tmp_path)
    tracker.progress(0, 9, {"nll": 1.0})  # before any start
    tracker.start(CELL)
    for done in range(1, 7):
        tracker.progress(done, 9, {"nll": done / 2, "bad": float("nan")})
        now[0] += 2.0
    tracker.finish({**RESULT, "metrics": {}}, [])
    run = read(*files_of(tmp_path))
    rows = [{name: value for name, value in row.items() if not name.startswith("_")} for row in run.history]
    assert rows == [{"progress/nll": done / 2, "progress/done": done, "progress/total": 9} for done in (1, 4)]
    assert not [name for name in run.summary if name.startswith("progress")]


@pytest.mark.parametrize("step", ["init", "log", "finish", "Table"])
def test_what_fails_inside_wandb_is_said_once_and_ends_nothing(tmp_path, monkeypatch, capfd, step):
    import wandb

    def fail(*_, **__):
        raise RuntimeError("no\nroom")

    tracker = make_tracker(OFFLINE, tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(*((wandb, step) if step in ("init", "Table") else (wandb.Run, step)), fail)
        for number in (1, 2):
            tracker.start({**CELL, "run_id": f"{step}-{number}"})
            tracker.progress(1, 3, {"nll": 1.0})
            tracker.finish(RESULT, SAMPLES)
    said = capfd.readouterr().err.splitlines()
    assert said and all("RuntimeError: no room" in line and line.startswith("W&B: ") for line in said)
    assert len(said) == len(set(said)) <= 2
    tracker.start({**CELL, "run_id": "cell-3"})
    tracker.finish(RESULT, SAMPLES)
    assert read(*files_of(tmp_path, "cell-3")).summary["status"] == "done", "the next cell is tracked again"


def test_results_that_wandb_cannot_take_end_nothing(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    track(tmp_path / "file")  # no folder can be made here
    track(tmp_path, cell={"run_id": "no name"})
    tracker = make_tracker(OFFLINE, tmp_path)
    tracker.start(CELL)
    tracker.progress(1, 2, {"nll": "text"})
    tracker.finish(RESULT, [{"id": 1, "fields": "text"}])
    assert [line.split(" failed")[0] for line in capfd.readouterr().err.splitlines()] == ["W&B: start"] * 2 + ["W&B: finish"]


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from kvlab.tracking import make_tracker
from kvlab.wandb_runs import TrackingSettings
assert "wandb" not in sys.modules, "importing kvlab.tracking imports wandb"
hooks = sys.exit, sys.excepthook, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
tracker = make_tracker(TrackingSettings("wandb", mode="offline"), Path("out"))
cell = {"run_id": "a", "name": "e", "config": {}}
tracker.start(cell)
now = sys.exit, sys.excepthook, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
assert now == hooks, (hooks, now)
print("mine", flush=True)
"""
KILL = """
import wandb
wandb.setup()._connection._proc._process.kill()
time.sleep(0.2)
tracker.progress(1, 2, {"m": 1.0})
tracker.finish({"status": "done"}, [{"id": 1}])
tracker.start(cell)
tracker.finish({"status": "done"}, [])
"""


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("raise SystemError('mine')", 1), (KILL + "sys.exit(4)", 4)])
def test_exit_codes_stay_the_programs_own(tmp_path, end, code):
    env = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # a service of its own
    command = [sys.executable, "-c", PROGRAM + end]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, env=env)
    assert done.returncode == code, done.stderr
    assert done.stdout == "mine\n"
    (file,) = files_of(tmp_path / "out", "a")[:1]
    assert b"mine" not in file.read_bytes(), "what the program prints stays its own"
    if code == 3:
        assert done.stderr == "", "no banner, no warning"
    if code == 4:
        lines = done.stderr.split("Exception ignored in atexit")[0].splitlines()  # wandb's own goodbye fails, past our reach
        assert lines and all(line.startswith("W&B: ") for line in lines), done.stderr


def test_without_the_package_nothing_is_tracked_and_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = track(tmp_path)
    tracker.abandon()
    assert tracker.notice == "W&B: not installed, results aren't tracked; `pip install wandb`, or set logger=none"
    assert not list(tmp_path.glob("wandb"))
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))  # a folder of that name in the cwd
    assert make_tracker(OFFLINE, tmp_path).notice == tracker.notice
    monkeypatch.setattr(wandb_runs.importlib, "import_module", lambda name: 1 / 0)
    assert "broken (ZeroDivisionError('division by zero'))" in make_tracker(OFFLINE, tmp_path).notice


def test_none_tracks_nothing_and_says_nothing(tmp_path):
    tracker = track(tmp_path, TrackingSettings("none"))
    tracker.abandon()
    assert tracker.notice == "" and not list(tmp_path.glob("wandb"))


NETRC = "machine {} login user password " + "k" * 40


@pytest.mark.parametrize(
    ("mode", "env", "host", "notice"),
    [
        ("auto", {}, None, "W&B: offline"),
        ("auto", {"WANDB_API_KEY": "k" * 40}, None, "W&B: online, project kvlab"),
        ("auto", {}, "api.wandb.ai", "W&B: online"),
        ("auto", {}, "elsewhere.org", "W&B: offline"),
        ("auto", {"WANDB_BASE_URL": "https://elsewhere.org"}, "elsewhere.org", "W&B: online"),
        ("auto", {"WANDB_BASE_URL": "https://elsewhere.org"}, "api.wandb.ai", "W&B: offline"),
        ("auto", {"WANDB_CONFIG_DIR": "conf"}, "stored.org", "W&B: online"),
        ("auto", {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, None, "W&B: offline"),
        ("auto", {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "disabled"}, None, "W&B: disabled by WANDB_MODE"),
        ("auto", {"WANDB_MODE": "online"}, "api.wandb.ai", "W&B: online"),
        ("auto", {"WANDB_MODE": "online"}, None, None),
        ("online", {}, None, None),
        ("online", {"WANDB_API_KEY": "k" * 40}, None, "W&B: online"),
        ("offline", {"WANDB_API_KEY": "k" * 40}, "api.wandb.ai", "W&B: offline"),
    ],
)
@pytest.mark.parametrize("place", ["home", "NETRC"])
def test_the_mode_follows_the_environment(tmp_path, monkeypatch, mode, env, host, notice, place):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for folder in ("home", "conf"):
        (tmp_path / folder).mkdir()
    (tmp_path / "conf" / "settings").write_text("[default]\nbase_url = https://stored.org\n")
    if host:
        file = tmp_path / "home" / ".netrc" if place == "home" else tmp_path / "keys"
        file.write_text(NETRC.format(host))
        file.chmod(0o600)
        if place == "NETRC":
            monkeypatch.setenv("NETRC", str(file))
    settings = TrackingSettings("wandb", mode=mode)
    if notice is None:
        with pytest.raises(ValueError, match="`wandb login`, or set logger.mode=offline or logger=none") as caught:
            make_tracker(settings, tmp_path)
        assert "\n" not in str(caught.value)
    else:
        assert make_tracker(settings, tmp_path).notice.startswith(notice)


def test_a_broken_netrc_is_no_key(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("machine api.wandb.ai nonsense")
    monkeypatch.setenv("NETRC", str(tmp_path / "keys"))
    assert make_tracker(TrackingSettings("wandb"), tmp_path).notice.startswith("W&B: offline")


def test_online_asks_to_resume_and_gives_every_setting(tmp_path, monkeypatch):
    import wandb

    seen = {}
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(wandb, "init", lambda **given: seen.update(given))
    make_tracker(TrackingSettings("wandb", entity="team"), tmp_path).start(CELL)
    assert (seen["mode"], seen["resume"], seen["entity"], seen["id"]) == ("online", "allow", "team", "cell-1")
    settings = seen["settings"]
    assert {name: getattr(settings, name) for name in wandb_runs.SETTINGS} == wandb_runs.SETTINGS, "this wandb knows them all"


def test_values_are_plain():
    given = {1: (np.float64("nan"), -np.inf, None, True, np.bool_(False), {3}), "path": Path("x"), "dtype": np.dtype("int8")}
    assert plain(given) == {"1": ["NaN", "-Infinity", None, True, False, [3]], "path": "x", "dtype": "int8"}
    assert summary({"status": "done", "metrics": {}, "memory": None}) == {"status": "done"}
    assert sample_table([]) == ([], [])


def test_the_run_of_a_cell_holds_its_config_and_its_final_metrics(tmp_path):
    """Through the command line: what W&B has is what result.json has."""
    from running import TINY, kvlab, results

    sweep = ["run", "-m", *TINY, "logger=wandb", "logger.mode=offline", "policy=full,h2o", "name=tracked", "--no-table"]
    assert kvlab(*sweep) == 0
    found = results(tmp_path / "outputs")
    assert len(found) == 2
    for result in found.values():
        (file,) = files_of(tmp_path / "outputs", result["run_id"])
        run = read(file)
        assert {name: value for name, value in run.config.items() if name != "_wandb"} == result["config"]
        assert run.record.run_group == "tracked" and {result["policy"], "perplexity", "tiny-llama"} <= set(run.record.tags)
        metric = result["metrics"]["perplexity"]
        assert run.summary["metrics/perplexity/value"] == pytest.approx(metric["value"])
        assert run.summary["metrics/perplexity/stderr"] == pytest.approx(metric["stderr"])
        assert run.summary["memory/kv_bytes"] == result["memory"]["kv_bytes"]
        assert run.summary["status"] == "ok" and run.exit == 0
        table = json.loads((file.parent / "files" / run.history[-1]["samples/path"]).read_text())
        assert sorted(row[0] for row in table["data"]) == [f"w{number:05d}" for number in range(4)]
