"""Runs and sweeps on a tiny model, through the command line: what is recorded, skipped, repeated, and what failures do."""

import json

import pytest
import yaml

from kvlab import load_results
from kvlab.estimate import Estimate, together
from kvlab.results import CellStore
from running import TINY, faulty_policy, kvlab, results, sample_lines

FAULTY = faulty_policy("faulty")


@pytest.fixture(autouse=True)
def own_folder(in_a_folder):
    """All runs are in a folder of their own."""


def test_a_cell_is_recorded_with_everything_that_a_reader_needs(tmp_path):
    assert kvlab("run", *TINY, "policy=h2o", "policy.heavy_share=0.25", "budget.ratio=0.5") == 0
    ((path, result),) = results(tmp_path / "outputs").items()
    assert path.startswith("debug/tiny-llama/perplexity/prompt/h2o_heavy_share=0.25/50pct-")
    assert (result["schema"], result["status"], result["error"]) == (1, "ok", None)
    assert path.endswith(result["run_id"][:8])
    metric = result["metrics"]["perplexity"]
    assert (metric["n"], metric["better"]) == (4, "lower") and metric["value"] > 1 and metric["stderr"] > 0
    memory = result["memory"]
    assert 0.3 < memory["kept_fraction"] < 0.5 and memory["kv_bytes"] < memory["kv_bytes_full"] / 2
    assert memory["kv_bytes"] <= memory["kv_bytes_peak"] and memory["peak_process_bytes"] > 1e6
    assert result["speed"]["prefill_s"] > 0 and result["speed"]["decode_tokens_per_s"] > 0
    assert result["provenance"]["versions"]["transformers"] and result["provenance"]["dtype"] == "torch.float32"
    assert result["query_aware"] is False and result["labels"] == []
    assert (result["prompts"]["samples"], result["prompts"]["tokens"], len(result["prompts"]["hash"])) == (4, 4 * 48, 16)
    config = yaml.safe_load((tmp_path / "outputs" / path / "config.yaml").read_text())
    assert config["policy"]["heavy_share"] == 0.25 and config == result["config"]
    records = [json.loads(line) for line in sample_lines(tmp_path / "outputs")[path]]
    assert sorted(record["id"] for record in records) == [f"w{n:05d}" for n in range(4)]
    assert all(set(record["values"]) >= {"nll", "tokens", "gold_logprob"} and record["trace"] for record in records)


def test_bytes_of_a_cell_are_those_of_its_budget(tmp_path):
    """48 tokens of which 12 may be held, and one more that comes in: 2 layers x 2 heads x (16 + 16) numbers of 4 bytes."""
    assert kvlab("run", *TINY, "policy=tova", "budget=tokens", "budget.tokens=12") == 0
    (result,) = results(tmp_path / "outputs").values()
    with_slack = 13 * 2 * 2 * 32 * 4
    assert result["memory"]["kv_bytes"] == with_slack
    assert result["memory"]["kv_bytes_full"] == 63 * 2 * 2 * 32 * 4  # the last of 64 tokens is never read


def test_full_at_several_budgets_is_one_cell_and_a_sweep_prints_its_table(tmp_path, capsys):
    code, out, err = kvlab("run", "-m", *TINY, "policy=full,h2o", "budget.ratio=0.25,0.5", capsys=capsys)
    assert code == 0, err
    assert len(results(tmp_path / "outputs")) == 3
    assert (
        "[3/3]" in err
        and sum(line.startswith("full ") for line in out.splitlines()) == 1
        and "h2o" in out
        and "Δ to full" in out
    )


def test_a_finished_cell_is_skipped_and_force_repeats_it(tmp_path, capsys):
    command = ("run", *TINY, "policy=h2o")
    assert kvlab(*command) == 0
    (path,) = results(tmp_path / "outputs")
    file = tmp_path / "outputs" / path / "result.json"
    before = file.stat().st_mtime_ns
    code, out, err = kvlab(*command, "runtime.batch_size=2", "runtime.prefill_chunk=7", capsys=capsys)  # not its identity
    assert code == 0 and "1 of 1 cell finished before" in err and file.stat().st_mtime_ns == before and "perplexity" in out
    assert kvlab(*command, "--force") == 0
    assert file.stat().st_mtime_ns > before
    assert len(sample_lines(tmp_path / "outputs")[path]) == 4


@pytest.mark.parametrize(
    "change",
    [
        "seed=1",
        "budget.ratio=0.21",
        "policy.heavy_share=0.4",
        "policy.num_sink=1",
        "task.windows=3",
        "task.scored=15",
        "runtime.dtype=bfloat16",
        "model=tiny-opt",
        "protocol=stream",
        "protocol.hold_back=3",
        "policy=tova",
        "name=other",
    ],
)
def test_whatever_changes_numbers_changes_the_path(tmp_path, change):
    assert kvlab("run", *TINY, "policy=h2o", "--no-table") == 0
    assert kvlab("run", *TINY, *([] if change.startswith("policy=") else ["policy=h2o"]), change, "--no-table") == 0
    assert len(results(tmp_path / "outputs")) == 2


def test_other_text_is_another_cell_and_a_moved_file_is_not(tmp_path):
    text = "It was a dark night. The wind blew over the hills and nobody slept well. " * 20
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text)
    for name in ("a", "b"):
        assert kvlab("run", *TINY, f"task.file={name}.txt") == 0
    assert len(results(tmp_path / "outputs")) == 1
    (tmp_path / "b.txt").write_text(text.replace("dark", "wild"))
    assert kvlab("run", *TINY, "task.file=b.txt") == 0
    assert len(results(tmp_path / "outputs")) == 2


def test_batch_size_changes_no_number(tmp_path):
    for size in (1, 3):
        sweep = ("run", "-m", *TINY, "policy=h2o,random,snapkv", "policy.recent_window=0", f"runtime.batch_size={size}")
        assert kvlab(*sweep, f"output_dir=out{size}", "budget.ratio=0.7") == 0
    one, three = results(tmp_path / "out1"), results(tmp_path / "out3")
    assert one.keys() == three.keys() and len(one) == 3
    for path in one:
        assert one[path]["metrics"]["perplexity"]["value"] == pytest.approx(
            three[path]["metrics"]["perplexity"]["value"], rel=1e-4
        )
        assert one[path]["memory"]["kv_bytes"] == three[path]["memory"]["kv_bytes"]


def test_a_failing_cell_is_recorded_and_the_rest_is_run(tmp_path, capsys):
    (tmp_path / "faulty.py").write_text(FAULTY)
    sweep = ("run", "-m", *TINY, "policy=faulty,full,h2o", "--import", "faulty.py")
    code, out, err = kvlab(*sweep, capsys=capsys)
    assert code == 1
    assert "FAILED" in err and err.strip().splitlines()[-1].startswith("kvlab: 1 of 3 cells failed")
    found = {result["policy"]: (path, result) for path, result in results(tmp_path / "outputs").items()}
    assert {name: result["status"] for name, (_, result) in found.items()} == {"faulty": "failed", "full": "ok", "h2o": "ok"}
    path, result = found["faulty"]
    assert result["error"] == "RuntimeError: no score today"
    assert "faulty.py" in (tmp_path / "outputs" / path / "error.txt").read_text()
    assert "failed" in out
    (tmp_path / "faulty.py").write_text(
        FAULTY.replace('raise RuntimeError("no score today\\nand a second line")', "return step.positions.float()")
    )
    assert kvlab(*sweep) == 0, "mended code is another cell"
    assert sum(result["status"] == "ok" for result in results(tmp_path / "outputs").values()) == 3


def test_a_cell_that_failed_is_run_again(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("not now")

    monkeypatch.setattr("kvlab.runner.evaluate", fail)
    assert kvlab("run", *TINY, "--no-table") == 1
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert kvlab("run", *TINY, "--no-table") == 0
    (result,) = results(tmp_path / "outputs").values()
    assert result["status"] == "ok" and not list((tmp_path / "outputs").rglob("error.txt"))


def test_a_dry_run_shows_the_plan_loads_nothing_and_writes_nothing(tmp_path, capsys, monkeypatch):
    assert kvlab("run", *TINY, "policy=full", "--no-table") == 0
    before = sorted((tmp_path / "outputs").rglob("*"))
    monkeypatch.setattr("kvlab.workbench.load_spec", lambda spec: pytest.fail("loads a model"))
    code, out, err = kvlab("run", "-m", *TINY, "policy=full,h2o", "budget.ratio=0.2,0.5", "--dry-run", capsys=capsys)
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["finished", "to", "to"]
    assert "4 samples" in out and "MB KV" in out and "3 cells, 1 finished" in out
    assert "prompts that cells share read once" in out
    code, out, _ = kvlab("run", "-m", *TINY, "policy=h2o,tova", "runtime.share_prefill=false", "--dry-run", capsys=capsys)
    assert code == 0 and "read once" not in out
    assert sorted((tmp_path / "outputs").rglob("*")) == before


def test_what_cells_share_is_estimated_once():
    alone = Estimate(10, 3.0, 2.0)
    assert together([alone]) == alone
    assert together([alone, Estimate(5, 2.5, 0.5)]) == Estimate(15, 5.0, 2.0), "the second lacks fewer samples"


def test_the_composed_config_can_be_seen(tmp_path, capsys):
    code, out, _ = kvlab("run", "--cfg", "job", "policy=h2o", "task=passkey", capsys=capsys)
    config = yaml.safe_load(out)
    assert code == 0 and config["policy"]["heavy_share"] == 0.5 and config["task"]["kind"] == "passkey"
    assert not (tmp_path / "outputs").exists()


def test_results_come_as_a_frame(tmp_path):
    assert kvlab("run", "-m", *TINY, "policy=full,h2o") == 0
    frame = load_results(tmp_path / "outputs")
    assert set(frame[frame.metric == "perplexity"].policy) == {"full", "h2o"}
    assert (frame[frame.policy == "h2o"].kept_fraction < 0.5).all()
    assert frame[frame.policy == "h2o"].ratio.unique().tolist() == [0.2]


@pytest.mark.parametrize("protocol", ["prompt", "stream", "chunked"])
@pytest.mark.parametrize("kind", ["passkey", "multiquery", "variables", "common_words", "frequent_words", "key_value"])
def test_every_kind_of_needle_runs_under_every_protocol(tmp_path, protocol, kind):
    grid = ["task.lengths=[700]", "task.depths=[0.2,0.8]", "task.n=1", "task.new_tokens=4", "task.needles=1"]
    common = ["model=tiny-llama", "logger=none", f"task.kind={kind}", f"protocol={protocol}", "runtime.threads=1"]
    assert kvlab("run", "task=needle", *grid, *common, "policy=streaming_llm", "budget.ratio=0.1", "--no-table") == 0
    (result,) = results(tmp_path / "outputs").values()
    assert result["task"] == kind and result["metrics"]["accuracy"]["n"] == 2
    assert result["metrics"]["gold_logprob"]["value"] < 0
    assert 0.09 < result["memory"]["kept_fraction"] < 0.11


def test_two_processes_do_not_run_one_cell_at_once(tmp_path, capsys):
    assert kvlab("run", *TINY, "policy=h2o", "--no-table") == 0
    (path,) = results(tmp_path / "outputs")
    store = CellStore(tmp_path / "outputs" / path)
    store.set_aside()
    with store.locked():
        code, _, err = kvlab("run", *TINY, "policy=h2o", "--no-table", capsys=capsys)
    assert code == 1 and "1 of 1 cell are left to another process" in err and not store.result_file.exists()


def test_what_force_repeats_is_kept_until_it_is_done_again(tmp_path, monkeypatch):
    command = ("run", *TINY, "policy=h2o", "--no-table")
    assert kvlab(*command) == 0
    (path,) = results(tmp_path / "outputs")
    folder = tmp_path / "outputs" / path
    before = (folder / "result.json").read_text(), (folder / "samples.jsonl").read_text()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvlab.runner.evaluate", interrupt)
    assert kvlab(*command, "--force") == 130
    assert before == ((folder / "previous.result.json").read_text(), (folder / "previous.samples.jsonl").read_text())
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert kvlab(*command) == 0
    assert (folder / "result.json").exists() and not list(folder.glob("previous.*"))


def test_changed_code_of_your_own_is_another_cell(tmp_path):
    for score in ("step.positions.float()", "-step.positions.float()"):
        text = FAULTY.replace('raise RuntimeError("no score today\\nand a second line")', f"return {score}")
        (tmp_path / "mine.py").write_text(text.replace("faulty", "changing"))
        assert kvlab("run", *TINY, "policy=changing", "--import", "mine.py", "--no-table") == 0
    values = [result["metrics"]["perplexity"]["value"] for result in results(tmp_path / "outputs").values()]
    assert len(values) == 2 and values[0] != values[1]


def test_a_budget_of_the_total_is_each_rows_own(tmp_path):
    rows = [{"prompt": "word " * 30, "answer": "x", "new_tokens": n, "id": str(n)} for n in (2, 60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["model=tiny-llama", "logger=none", "task=prompts", "task.file=rows.jsonl", "runtime.threads=1", "--no-table"]
    for size in (1, 2):
        budget = [
            "policy=streaming_llm",
            "budget.of=total",
            "budget.ratio=0.5",
            f"runtime.batch_size={size}",
            f"output_dir=o{size}",
        ]
        assert kvlab("run", *common, *budget) == 0
    one, two = (
        {
            record["id"]: record["memory"]["kept"]
            for record in map(json.loads, next(iter(sample_lines(tmp_path / f"o{size}").values())))
        }
        for size in (1, 2)
    )
    assert one == two and one["60"] > one["2"]


def test_a_line_that_an_interrupted_write_left_behind_is_made_again(tmp_path):
    command = ("run", *TINY, "policy=h2o", "runtime.batch_size=1", "--no-table")
    assert kvlab(*command) == 0
    ((path, before),) = results(tmp_path / "outputs").items()
    folder = tmp_path / "outputs" / path
    (folder / "result.json").unlink()
    lines = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "samples.jsonl").write_bytes(lines[0] + lines[1] + lines[2][:40])
    assert kvlab(*command) == 0
    after = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert after[:2] == lines[:2] and [json.loads(line)["id"] for line in after] == [json.loads(line)["id"] for line in lines]
    assert results(tmp_path / "outputs")[path]["metrics"] == before["metrics"]


def test_a_sweep_is_compared_with_the_full_cache_of_an_earlier_one(tmp_path, capsys):
    assert kvlab("run", *TINY, "policy=full", "--no-table") == 0
    code, out, _ = kvlab("run", *TINY, "policy=h2o", capsys=capsys)
    rows = [line.split()[0] for line in out.splitlines() if line.startswith(("full ", "h2o "))]
    assert code == 0 and rows == ["full", "h2o"] and "there is no full cache" not in out
    assert "4 samples: intervals of fewer than 10 are too narrow" in out


def test_a_held_budget_never_exceeds_its_peak(tmp_path):
    assert kvlab("run", *TINY, "policy=full", "--no-table") == 0
    for lines in sample_lines(tmp_path / "outputs").values():
        memory = [json.loads(line)["memory"] for line in lines]
        assert all(record["kv_bytes"] <= record["kv_bytes_peak"] for record in memory)
