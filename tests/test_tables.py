"""Comparison tables of made-up results: what is paired with what, what is warned of, and every format read back."""

import csv
import io
import json
import math
import random
import re

import pandas as pd
import pytest

from kvlab.breakdown import breakdown
from kvlab.metrics import Difference, Metric, make_metric
from kvlab.render import difference, number, render, with_error
from kvlab.results import read_records
from kvlab.tables import COLUMNS, compare, find_cells, load_results, read_cells, samples_of

SPECS = {
    "accuracy": {"kind": "mean", "better": "higher", "of": "accuracy", "chance": 0.0},
    "perplexity": {"kind": "perplexity", "better": "lower", "of": "nll", "weight": "tokens"},
}


def questions(right, gold=-1.0, start=0):
    """Samples with 0/1 values, on a grid of depth and length."""
    return [
        {
            "id": f"q{number:03d}",
            "values": {"accuracy": value, "gold_logprob": gold - 0.01 * (number % 5)},
            "trace": [number, value, 7],
            "output": "x",
            "fields": {"length": (500, 1000)[number % 2], "depth": (0.0, 0.5, 1.0)[number % 3]},
        }
        for number, value in enumerate(right, start)
    ]


def texts(shift, n=12, seed=0):
    """Samples with summed losses; the same seed is the same texts."""
    rng = random.Random(seed)
    found = []
    for index in range(n):
        tokens = rng.randint(50, 300)
        nll = tokens * (rng.uniform(2.5, 3.5) + shift * rng.uniform(0.5, 1.5))
        found.append({"id": f"w{index:04d}", "values": {"nll": nll, "tokens": tokens}, "trace": None})
    return found


class Disk:
    """Writes cells below a folder."""

    def __init__(self, root):
        self.root, self.count = root, 0

    def __call__(self, samples, policy="full", ratio=None, metric="accuracy", comparison="aaaa1111bbbb", **changes):
        self.count += 1
        folder = self.root / f"cell{self.count:02d}"
        folder.mkdir(parents=True)
        found = make_metric(samples, **SPECS[metric]) if samples else Metric(math.nan, None, 0, "mean", "higher", "x")
        kept = ratio or 1.0
        result = {
            **{"schema": 1, "run_id": f"run{self.count}", "comparison_id": comparison, "status": "ok", "name": "demo"},
            **{"model": "smollm2-135m", "task": "needle", "protocol": "prompt", "policy": policy, "policy_label": policy},
            **{"codec": [], "share": None, "query_aware": False, "labels": [], "config": {}, "identity": {}},
            "budget": {"ratio": ratio} if ratio else {},
            "budget_label": f"{100 * ratio:g} %" if ratio else "no limit",
            "metrics": {metric: found.as_dict()},
            "main_metric": metric,
            "memory": {"kv_bytes": 54e6 * kept, "kv_bytes_peak": 55e6, "kv_bytes_full": 54e6, "kept_fraction": kept},
            "speed": {"prefill_s": 0.3, "decode_tokens_per_s": 11.0, "policy_ms_per_step": 3.1, "batch_size": 8},
            **changes,
        }
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        return folder

    def failed(self, error, **changes):
        return self([], status="failed", error=error, metrics={}, memory=None, speed=None, **changes)


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path / "outputs")


FULL = [1] * 20 + [0] * 4
HARMED = [0] * 12 + [1] * 8 + [0] * 4


class TestReading:
    def test_folders_globs_and_cells(self, disk, tmp_path):
        cells = [disk(questions(FULL)), disk(questions(FULL), "h2o", 0.5)]
        root = tmp_path / "outputs"
        assert find_cells(root) == find_cells([root, str(root / "*")]) == find_cells(str(tmp_path / "o*")) == cells
        assert find_cells([cells[1], cells[1] / "result.json"]) == cells[1:]

    def test_relative_and_twice(self, disk, tmp_path, monkeypatch):
        disk(questions(FULL))
        monkeypatch.chdir(tmp_path)
        assert len(find_cells(["outputs", tmp_path / "outputs", "out*/cell*"])) == 1

    def test_nothing_there(self, disk, tmp_path):
        disk(questions(FULL))
        (tmp_path / "empty").mkdir()
        for place in ("empty", "absent", "outputs/x*"):
            with pytest.raises(ValueError, match=rf"no results in .*{re.escape(place)}: run `kvlab run"):
                find_cells([tmp_path / "outputs", tmp_path / place])

    def test_lines_that_are_no_samples_are_left_out_and_said(self, disk, tmp_path):
        path = disk(questions([1, 0, 1])) / "samples.jsonl"
        whole = path.read_bytes()
        lines = whole.split(b"\n")
        for text, ids in (
            (whole[:-20], ["q000", "q001"]),
            (whole.rstrip(b"\n"), ["q000", "q001"]),  # may lack more than the end of its line
            (whole + '{"id": "é'.encode()[:-1], ["q000", "q001", "q002"]),  # torn within a character
            (b"\n".join([lines[0], lines[1][:-9], lines[2], b""]), ["q000", "q002"]),
        ):
            path.write_bytes(text)
            records, broken = read_records(path)
            assert ([record["id"] for record in records], broken) == (ids, 1)

    def test_last_record_of_an_id_counts(self, disk, tmp_path):
        path = disk(questions([1, 0])) / "samples.jsonl"
        path.write_text(path.read_text() + json.dumps(questions([0])[0]) + "\n")
        (cell,), _ = read_cells(path.parent)
        samples = samples_of(cell, [])
        assert {name: sample["values"]["accuracy"] for name, sample in samples.items()} == {"q000": 0, "q001": 0}

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": 2}', '{"schema": 1, "status": "ok"}'])
    def test_broken_results_are_left_out_and_said(self, disk, tmp_path, text):
        disk(questions(FULL))
        broken = disk(questions(FULL), "h2o", 0.5)
        (broken / "result.json").write_text(text)
        comparison = compare(tmp_path / "outputs")[-1]
        assert len(comparison.rows) == 1
        assert any(str(broken / "result.json") in warning for warning in comparison.warnings)
        assert str(broken) in load_results(tmp_path / "outputs").attrs["warnings"][0]
        with pytest.raises(ValueError, match="no readable results: .*cell02"):
            compare(broken)

    def test_another_schema_is_left_out(self, disk, tmp_path):
        disk(questions(FULL))
        disk(questions(FULL), "h2o", 0.5, schema=2)
        (comparison,) = compare(tmp_path / "outputs")
        assert len(comparison.rows) == 1 and "(schema 2, not 1)" in comparison.warnings[0]


class TestLoadResults:
    def test_long_form(self, disk, tmp_path):
        disk(questions(FULL))
        both = {"accuracy": {"value": 0.5, "stderr": 0.1, "n": 24}, "f1": {"value": 0.6, "stderr": None, "n": 24}}
        disk(questions(HARMED), "h2o", 0.2, metrics=both, labels=["grow", "x"], codec=["int8"])
        disk.failed("out of memory", policy="tova", budget={"bytes": 5000})
        frame = load_results(tmp_path / "outputs")
        assert list(frame.columns) == list(COLUMNS)
        assert list(zip(frame.policy, frame.metric.fillna("-"), strict=True)) == [
            *[("full", "accuracy"), ("h2o", "accuracy"), ("h2o", "f1"), ("tova", "-")]
        ]
        row = frame.iloc[2]
        assert (row.value, row.n, row.ratio, row.labels, row.codec, row.kv_bytes) == (0.6, 24, 0.2, "grow, x", "int8", 10.8e6)
        assert pd.isna(row.stderr)
        lost = frame.iloc[3]
        assert (lost.status, lost.error, lost.bytes) == ("failed", "out of memory", 5000)
        assert pd.isna(lost.value) and pd.isna(lost.kv_bytes)
        assert frame.value.dtype == frame.ratio.dtype == float

    def test_what_a_failed_cell_measured_does_not_count(self, disk, tmp_path):
        disk(questions(FULL), "h2o", 0.2, status="failed", error="boom at sample 30")
        frame = load_results(tmp_path / "outputs")
        assert len(frame) == 1 and frame[["metric", "value"]].isna().all(axis=None)
        disk(questions(FULL))
        _, row = compare(tmp_path / "outputs")[0].rows
        assert row.value is row.delta is None


class TestCompare:
    def test_paired_with_full(self, disk, tmp_path):
        disk(questions(HARMED, gold=-2.0), "h2o", 0.2)
        disk(questions(FULL))
        (comparison,) = compare(tmp_path / "outputs")
        assert comparison.title == "demo · smollm2-135m · needle · prompt"
        full, h2o = comparison.rows
        assert comparison.baseline is full
        assert (full.facts["policy"], full.delta, full.agreement) == ("full", None, None)
        assert (h2o.value, h2o.n) == (pytest.approx(1 / 3), 24)
        assert h2o.delta.value == pytest.approx(-0.5)
        assert h2o.delta.low < -0.5 < h2o.delta.high < 0
        assert h2o.mcnemar_p == pytest.approx(2 / 2**12)
        assert h2o.gold_logprob.value == pytest.approx(-1.0)
        assert h2o.agreement == pytest.approx((12 * 2 / 3 + 12) / 24)
        assert comparison.warnings == []

    def test_pairs_by_id_not_by_line(self, disk, tmp_path):
        disk(questions(FULL))
        disk(questions(FULL)[::-1], "h2o", 0.5)
        delta = compare(tmp_path / "outputs")[0].rows[1].delta
        assert delta == Difference(0.0, 0.0, 0.0, 24)

    def test_perplexity(self, disk, tmp_path):
        disk(texts(0.0), metric="perplexity")
        disk(texts(0.3), "h2o", 0.2, metric="perplexity")
        full, h2o = compare(tmp_path / "outputs")[0].rows
        assert h2o.delta.value == pytest.approx(h2o.value - full.value)
        assert h2o.delta.low > 0
        assert h2o.mcnemar_p is h2o.gold_logprob is h2o.agreement is None

    def test_common_ids(self, disk, tmp_path):
        disk(questions(FULL))
        disk(questions([1] * 24, start=2), "h2o", 0.5)  # q002 to q025; full has q000 to q023
        comparison = compare(tmp_path / "outputs")[0]
        delta = comparison.rows[1].delta
        assert (delta.n, delta.value) == (22, pytest.approx(4 / 22))
        assert "h2o, 50 %: compared on the 22 samples in common (24 here, 24 with the full cache)" in comparison.warnings
        assert "(n = 22)" in render([comparison], "md")

    def test_no_common_ids(self, disk, tmp_path):
        disk(questions(FULL))
        disk(questions(FULL, start=100), "h2o", 0.5)
        comparison = compare(tmp_path / "outputs")[0]
        assert comparison.rows[1].delta is None
        assert "compared on the 0 samples in common" in comparison.warnings[0]

    def test_torn_samples(self, disk, tmp_path):
        disk(questions(FULL))
        path = disk(questions(FULL), "h2o", 0.5) / "samples.jsonl"
        path.write_bytes(path.read_bytes()[:-5])
        comparison = compare(tmp_path / "outputs")[0]
        assert comparison.rows[1].delta.n == 23
        assert any("1 line is no sample" in warning and str(path) in warning for warning in comparison.warnings)

    def test_broken_samples_cost_one_row_only(self, disk, tmp_path):
        disk(questions(FULL))
        (disk(questions(FULL), "a", 0.5) / "samples.jsonl").unlink()
        empty = "".join(json.dumps({"id": sample["id"], "values": {}}) + "\n" for sample in questions(FULL))
        (disk(questions(FULL), "b", 0.5) / "samples.jsonl").write_text(empty)
        disk(questions(FULL), "c", 0.5)
        comparison = compare(tmp_path / "outputs")[0]
        assert [row.delta is None for row in comparison.rows] == [True, True, True, False]
        assert any("samples.jsonl is missing" in warning for warning in comparison.warnings)
        assert any("b, 50 %: no difference" in warning and "no value 'accuracy'" in warning for warning in comparison.warnings)

    def test_order_is_not_by_result(self, disk, tmp_path):
        for policy, ratio in (("tova", 0.2), ("h2o", 0.1), ("h2o", 0.5), ("tova", 0.9), ("adakv", 0.1)):
            disk(questions(HARMED if ratio > 0.3 else FULL), policy, ratio)
        disk(questions(FULL), codec=["int8"])
        disk(questions(FULL))
        rows = compare(tmp_path / "outputs")[0].rows
        assert [(r.facts["policy"], r.facts["codec"], r.facts["ratio"]) for r in rows] == [
            *[("full", "", None), ("full", "int8", None), ("adakv", "", 0.1)],
            *[("h2o", "", 0.5), ("h2o", "", 0.1), ("tova", "", 0.9), ("tova", "", 0.2)],
        ]

    def test_coded_cache_is_no_baseline(self, disk, tmp_path):
        disk(questions(FULL), codec=["int8"])
        disk(questions(FULL), share="pairs")
        assert compare(tmp_path / "outputs")[0].baseline is None


class TestWarnings:
    def test_no_baseline(self, disk, tmp_path):
        disk(questions(FULL), "h2o", 0.5)
        (comparison,) = compare(tmp_path / "outputs")
        assert comparison.baseline is None
        assert comparison.warnings == ["there is no full cache to compare with: run policy=full with the same settings"]
        assert re.search(r"\| 0\.83 ± 0\.08 \| – \|", render([comparison], "md"))

    def test_failed_baseline(self, disk, tmp_path):
        disk(questions(FULL), "h2o", 0.5)
        disk.failed("boom")
        assert "the full cache failed: run policy=full" in compare(tmp_path / "outputs")[0].warnings[0]

    def test_two_baselines(self, disk, tmp_path):
        first = disk(questions(FULL))
        disk(questions(HARMED))
        comparison = compare(tmp_path / "outputs")[0]
        assert comparison.rows[0].facts["path"] == str(first)
        assert comparison.rows[1].delta.value == -0.5
        assert f"2 cells have the full cache; differences are from {first}" in comparison.warnings

    @pytest.mark.parametrize(("right", "warned"), [([1, 1] + [0] * 22, True), ([1] * 6 + [0] * 18, False)])
    def test_chance(self, disk, tmp_path, right, warned):
        disk(questions(right))
        disk(questions(FULL), "h2o", 0.5)
        found = compare(tmp_path / "outputs")[0].warnings
        assert found == (["full cache is at chance on this task: differences mean nothing"] if warned else [])

    def test_chance_of_the_full_cache_only(self, disk, tmp_path):
        disk(questions(FULL))
        disk(questions([0] * 24), "h2o", 0.5)
        assert compare(tmp_path / "outputs")[0].warnings == []

    def test_simulated(self, disk, tmp_path):
        disk(questions(FULL))
        disk(questions(FULL), "h2o", 0.5, labels=["grow", "simulated"])
        comparisons = compare(tmp_path / "outputs")
        assert "simulated" in comparisons[0].warnings[0] and "h2o, 50 %" in comparisons[0].warnings[0]
        assert "| grow, simulated |" in render(comparisons, "md")

    def test_references(self, disk, tmp_path):
        disk(questions(FULL))
        near, off = {"aaaa1111bbbb": (0.85, 0.02)}, {"aaaa1111bbbb": (0.9, 0.02)}
        assert compare(tmp_path / "outputs", references=near)[0].warnings == []
        (warning,) = compare(tmp_path / "outputs", references=off)[0].warnings
        assert "full cache has accuracy 0.833333, the reference is 0.9 ± 0.02" in warning
        assert compare(tmp_path / "outputs", references={"other": (0.9, 0.02)})[0].warnings == []


class TestTitles:
    def test_told_apart_by_settings(self, disk, tmp_path):
        for length in (500, 1000):
            for policy in ("full", "h2o"):
                config = {"task": {"name": "needle", "length": length}, "policy": {"name": policy}, "name": "demo"}
                disk(questions(FULL), policy, comparison=f"c{length}", config=config)
        titles = [comparison.title for comparison in compare(tmp_path / "outputs")]
        assert titles == [f"demo · smollm2-135m · needle · prompt · task.length={length}" for length in (500, 1000)]

    def test_what_cells_vary_does_not_tell_apart(self, disk, tmp_path):
        """A setting that differs within a comparison is no property of it."""
        for comparison, depth in (("c1", 1), ("c2", 2)):
            for attempt in (depth, depth + 1):
                disk(questions(FULL), comparison=comparison, config={"seed": depth, "attempt": attempt})
        titles = [comparison.title for comparison in compare(tmp_path / "outputs")]
        assert [title.split(" · ")[4:] for title in titles] == [["seed=1"], ["seed=2"]]

    def test_policies_do_not_tell_apart(self, disk, tmp_path):
        """Not even where each comparison has one cell, so that all its settings are the same."""
        for policy, length in (("h2o", 500), ("tova", 1000)):
            disk(questions(FULL), policy, comparison=policy, config={"policy": {"name": policy}, "task": {"length": length}})
        titles = [comparison.title for comparison in compare(tmp_path / "outputs")]
        assert [title.split(" · ")[4:] for title in titles] == [["task.length=500"], ["task.length=1000"]]

    def test_no_setting_tells(self, disk, tmp_path):
        disk(questions(FULL), comparison="c123456789")
        disk(questions(FULL), comparison="d123456789")
        disk(questions(FULL), comparison="e123456789", task="other")
        titles = [comparison.title.split(" · ")[-1] for comparison in compare(tmp_path / "outputs")]
        assert titles == ["c1234567", "d1234567", "prompt"]


class TestNumbers:
    @pytest.mark.parametrize(
        ("value", "stderr", "expected"),
        [
            *[(0.7083, 0.0929, "0.71 ± 0.09"), (23.07, 1.23, "23.1 ± 1.2"), (1234.4, 45.0, "1234 ± 45")],
            *[(0.5, None, "0.500"), (1.0, 0.0, "1.00 ± 0.00"), (0.012345, 0.00036, "0.0123 ± 0.0004"), (None, None, "–")],
            *[(2.5e9, 3e8, "2.5e+09 ± 3e+08"), (math.inf, math.nan, "inf ± nan"), (-0.125, 0.1, "-0.12 ± 0.10")],
        ],
    )
    def test_with_error(self, value, stderr, expected):
        assert with_error(value, stderr) == expected

    @pytest.mark.parametrize(
        ("found", "expected"),
        [
            (Difference(-0.04, -0.12, 0.04, 24), "≈ -0.04 [-0.12, +0.04]"),
            (Difference(2.125, 0.9, 3.3, 24), "+2.1 [+0.9, +3.3]"),
            (Difference(0.0, 0.0, 0.0, 24), "≈ +0.00 [+0.00, +0.00]"),
            (Difference(0.15, 0.003, 0.3, 24), "+0.150 [+0.003, +0.300]"),  # an end that is not zero does not read as zero
            (Difference(-0.1, -0.2, -0.0, 24), "≈ -0.10 [-0.20, +0.00]"),
            (Difference(0.25, None, None, 1), "+0.25 (no interval) (n = 1)"),
            (Difference(0.2, 0.1, 0.3, 22), "+0.20 [+0.10, +0.30] (n = 22)"),
            (Difference(math.inf, 0.0, math.nan, 24), "≈ +inf [+0, +nan]"),
            (None, "–"),
        ],
    )
    def test_difference(self, found, expected):
        assert difference(found, 24) == expected

    @pytest.mark.parametrize(
        ("value", "expected"), [(54.43, "54.4"), (1172.0, "1172"), (0.0123, "0.0123"), (0, "0.00"), (None, "–"), (3e7, "3e+07")]
    )
    def test_number(self, value, expected):
        assert number(value) == expected


class TestFormats:
    @pytest.fixture
    def comparisons(self, disk, tmp_path):
        disk(questions(FULL))
        disk(questions(HARMED), "h2o", 0.2, policy_label="h2o heavy_share=0.3 a|b", query_aware=False)
        disk(questions([1] * 19 + [0] * 5), "snapkv", 0.2, query_aware=True)
        disk.failed("out of memory:\n50% & <none> left", policy="tova", policy_label="tova", budget_label="20 %")
        disk(texts(0.0), metric="perplexity", comparison="other", task="perplexity")
        return compare(tmp_path / "outputs")

    @staticmethod
    def cells(line):
        return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]

    def test_markdown(self, comparisons):
        first, second = render(comparisons, "md").split("\n### ")
        lines = [line for line in first.splitlines() if line.startswith("|")]
        header = self.cells(lines[0])
        assert header == [
            *["policy", "budget", "kept %", "KV MB", "× full", "accuracy", "Δ to full [95 %]", "McNemar p"],
            *["Δ gold logp [95 %]", "agree", "prefill s", "decode tok/s", "policy ms", "query-aware", "note"],
        ]
        assert len({len(self.cells(line)) for line in lines}) == 1
        full, h2o, snapkv, tova = (dict(zip(header, self.cells(line), strict=True)) for line in lines[2:])
        assert (full["policy"], full["Δ to full [95 %]"], full["accuracy"]) == ("full", "–", "0.83 ± 0.08")
        assert h2o["policy"] == r"h2o heavy_share=0.3 a\|b"
        assert (h2o["kept %"], h2o["KV MB"], h2o["× full"], h2o["McNemar p"]) == ("20.0", "10.8", "0.20", "<0.001")
        assert re.fullmatch(r"-0\.50 \[-0\.\d\d, -0\.\d\d\]", h2o["Δ to full [95 %]"])
        assert re.fullmatch(r"≈ -0\.04 \[-0\.\d\d, \+0\.\d\d\]", snapkv["Δ to full [95 %]"])
        assert (h2o["query-aware"], snapkv["query-aware"]) == ("no", "yes")
        assert (tova["accuracy"], tova["note"]) == ("failed", "failed: out of memory: 50% & &lt;none> left")
        assert "accuracy, higher is better · n: 24 · batch: 8" in first
        assert "- ≈: the 95 % interval contains 0" in first and "≈" not in second
        assert second.startswith("demo · smollm2-135m · perplexity · prompt\n\nperplexity, lower is better")

    def test_nothing_is_ranked(self, comparisons):
        assert "**" not in render(comparisons, "md") and "textbf" not in render(comparisons, "latex")

    def test_constant_columns_are_said_above(self, disk, tmp_path):
        for policy in ("h2o", "tova"):
            disk(questions(FULL), policy, 0.5, codec=["int8"], labels=["simulated"], query_aware=True)
        text = render(compare(tmp_path / "outputs"), "md")
        assert "codec: int8" in text and "labels: simulated" in text and "query-aware: yes" in text
        assert not {"codec", "labels", "query-aware"} & set(self.cells(next(x for x in text.splitlines() if x.startswith("|"))))

    def test_a_failed_row_keeps_its_codec(self, disk, tmp_path):
        disk(questions(FULL))
        disk.failed("boom", policy="h2o", codec=["int4"])
        assert "| int4 |" in render(compare(tmp_path / "outputs"), "md")

    def test_csv(self, comparisons):
        rows = list(csv.DictReader(io.StringIO(render(comparisons, "csv"))))
        assert [row["policy"] for row in rows] == ["full", "h2o", "snapkv", "tova", "full"]
        assert not any(None in row or None in row.values() for row in rows)  # as many cells as columns
        for text, row in zip(rows[:3], comparisons[0].rows, strict=False):
            assert float(text["value"]) == row.value and float(text["stderr"]) == row.stderr  # unrounded
        h2o = comparisons[0].rows[1]
        delta = [float(rows[1][name]) for name in ("delta", "delta_low", "delta_high", "delta_n")]
        assert delta == list(h2o.delta)
        assert float(rows[1]["gold_logprob_delta"]) == h2o.gold_logprob.value
        assert (rows[1]["delta_within_noise"], rows[2]["delta_within_noise"], rows[0]["delta"]) == ("False", "True", "")
        assert (rows[3]["status"], rows[3]["error"], rows[3]["value"]) == (
            *("failed", "out of memory:\n50% & <none> left", ""),
        )
        assert (rows[4]["metric"], rows[4]["comparison_id"]) == ("perplexity", "other")

    def test_latex(self, comparisons):
        text = render(comparisons, "latex")
        assert text.count(r"\begin{tabular}") == text.count(r"\bottomrule") == text.count(r"\end{tabular}") == 2
        rows = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
        columns = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)[1]
        for row in rows:
            assert row.endswith(r" \\")
            assert len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1
        assert r"h2o heavy\_share=0.3 a\textbar{}b & 20 \%" in rows[1]
        assert r"0.83 $\pm$ 0.08" in rows[0] and "$-0.50$ [$-0." in rows[1] and r"$\approx$ $-0.04$" in rows[2]
        assert r"50\% \& \textless{}none\textgreater{} left" in rows[3]
        assert r"$\Delta$ to full [95 \%]" in text
        assert not re.search(r"(?<!\\)[%#_]", text) and not re.search("[Δ±≈×·–]", text)

    def test_latex_specials(self, disk, tmp_path):
        disk(questions(FULL), policy_label="[x]")
        disk(questions(FULL), "h2o", 0.5, policy_label=r"a\b{c}^~#$")
        text = render(compare(tmp_path / "outputs"), "latex")
        assert "\n{}[x] & " in text  # or it would be the length of the line break before it
        assert r"a\textbackslash{}b\{c\}\textasciicircum{}\textasciitilde{}\#\$" in text

    def test_text_is_aligned(self, comparisons):
        lines = render(comparisons[:1], "text").splitlines()
        top = next(number for number, line in enumerate(lines) if line.startswith("policy "))
        end = lines[top].index("accuracy") + len("accuracy")
        for line in lines[top + 2 : top + 6]:
            assert line[end - 1] != " " and line[end : end + 2] == "  "
        assert "out of memory: 50% & <none> left" in lines[top + 5]

    @pytest.mark.parametrize("fmt", ["md", "latex", "text"])
    def test_warnings_stand_below(self, disk, tmp_path, fmt):
        disk(questions([0] * 24), "h2o", 0.5)
        text = render(compare(tmp_path / "outputs"), fmt)
        assert text.index("Warning: there is no full cache") > text.index("h2o")

    def test_csv_has_warnings_in_a_column(self, disk, tmp_path):
        disk(questions([0] * 24), "h2o", 0.5)
        (row,) = csv.DictReader(io.StringIO(render(compare(tmp_path / "outputs"), "csv")))
        assert row["warnings"].startswith("there is no full cache")

    def test_unknown_format(self, comparisons):
        with pytest.raises(ValueError, match=r"'latx' \(did you mean latex.*\?\); there are: md, csv, latex, text"):
            render(comparisons, "latx")


class TestBreakdown:
    def test_pivot(self, disk, tmp_path):
        disk(questions([1, 0] * 12))
        disk(questions([1] * 12 + [0] * 12), "h2o", 0.2)
        (found,) = breakdown(tmp_path / "outputs", ["depth", "length"])
        assert list(found.columns) == [500, 1000]
        assert [(facts["policy"], keys) for facts, keys, _ in found.rows] == [
            (policy, (depth,)) for policy in ("full", "h2o") for depth in (0.0, 0.5, 1.0)
        ]
        for facts, (depth,), values in found.rows:
            for length, (value, stderr, n) in values.items():
                right = [1, 0] * 12 if facts["policy"] == "full" else [1] * 12 + [0] * 12
                here = [
                    *(r for i, r in enumerate(right) if (0.0, 0.5, 1.0)[i % 3] == depth and (500, 1000)[i % 2] == length),
                ]
                mean = sum(here) / len(here)
                error = math.sqrt(sum((x - mean) ** 2 for x in here) / (len(here) - 1) / len(here))
                assert (value, stderr, n) == (pytest.approx(mean), pytest.approx(error), 4)

    def test_text(self, disk, tmp_path):
        disk(questions([1, 0] * 12))
        disk.failed("boom", policy="h2o")
        text = render(breakdown(tmp_path / "outputs", "length"), "md")
        assert "| policy | budget | length=500 | length=1000 |" in text
        assert "| full | no limit | 1.00 ± 0.00 | 0.00 ± 0.00 |" in text
        assert "accuracy, higher is better · n: 12 a place" in text
        assert "- Warning: h2o, no limit: failed: boom" in text

    def test_csv(self, disk, tmp_path):
        disk(questions([1, 0] * 12))
        rows = list(csv.DictReader(io.StringIO(render(breakdown(tmp_path / "outputs", ["depth", "length"]), "csv"))))
        assert [(row["field.depth"], row["field.length"]) for row in rows] == [
            (depth, length) for depth in ("0.0", "0.5", "1.0") for length in ("500", "1000")
        ]
        assert [float(row["value"]) for row in rows] == [1, 0] * 3
        assert {row["n"] for row in rows} == {"4"}

    def test_perplexity_is_of_sums(self, disk, tmp_path):
        samples = [{**sample, "fields": {"part": "ab"[i % 2]}} for i, sample in enumerate(texts(0.0))]
        disk(samples, metric="perplexity")
        (found,) = breakdown(tmp_path / "outputs", "part")
        half = [sample["values"] for sample in samples[::2]]
        expected = math.exp(sum(v["nll"] for v in half) / sum(v["tokens"] for v in half))
        assert found.rows[0][2]["a"][0] == pytest.approx(expected)

    def test_unknown_field(self, disk, tmp_path):
        disk(questions(FULL))
        with pytest.raises(ValueError, match=r"no field 'lenght' \(did you mean length\?\); there are: depth, length"):
            breakdown(tmp_path / "outputs", ["depth", "lenght"])
        with pytest.raises(ValueError, match="no fields: give at least one"):
            breakdown(tmp_path / "outputs", [])

    def test_samples_without_a_field_are_counted(self, disk, tmp_path):
        samples = questions([1, 0] * 12)
        samples[3]["fields"] = {"depth": None, "length": 500}
        del samples[4]["fields"]
        disk(samples)
        disk(texts(0.0), metric="perplexity", comparison="other", task="perplexity")
        (grid,) = breakdown(tmp_path / "outputs", ["depth", "length"])  # nothing of the comparison that has no such fields
        assert sum(n for _, _, values in grid.rows for _, _, n in values.values()) == 22
        assert grid.warnings == ["full, no limit: 2 samples without depth or length are left out"]


def test_another_policy_can_be_the_base(disk, tmp_path):
    for policy, right in (("full", [1, 1, 1, 1]), ("streaming_llm", [0, 0, 1, 0]), ("h2o", [1, 0, 1, 1])):
        disk(questions(right * 3), policy, 0.2 if policy != "full" else None)
    (found,) = compare(tmp_path, base="streaming_llm")
    assert found.base == "streaming_llm" and found.baseline.facts["policy"] == "streaming_llm"
    by_policy = {row.facts["policy"]: row for row in found.rows}
    assert by_policy["streaming_llm"].delta is None
    assert by_policy["h2o"].delta.value == pytest.approx(0.5) and by_policy["full"].delta.value == pytest.approx(0.75)
    assert "Δ to streaming_llm" in render([found]) and not found.warnings
    assert [row.delta for row in compare(tmp_path, base="full")[0].rows] == [row.delta for row in compare(tmp_path)[0].rows]
    with pytest.raises(ValueError, match=r"--base 'h2': no cell has this policy \(did you mean h2o\?\)"):
        compare(tmp_path, base="h2")


def test_a_base_of_several_budgets_is_compared_at_equal_ones(disk, tmp_path):
    """As h2o and local attention at 20 % and 50 %: never one policy's 20 % with the other's 50 %."""
    disk(questions([1, 0] * 6))
    for policy, half, fifth in (("h2o", [1, 1], [1, 0]), ("streaming_llm", [0, 1], [0, 0])):
        for ratio, right in ((0.5, half), (0.2, fifth)):
            disk(questions(right * 6), policy, ratio)
    disk(questions([1, 1] * 6), "streaming_llm", 0.1)
    (found,) = compare(tmp_path, base="h2o")
    deltas = {(row.facts["policy"], row.facts["ratio"]): row.delta and row.delta.value for row in found.rows}
    assert deltas["streaming_llm", 0.5] == deltas["streaming_llm", 0.2] == pytest.approx(-0.5)
    assert [value for key, value in deltas.items() if key[0] != "streaming_llm" or key[1] == 0.1] == [None] * 4
    told = "h2o has 2 budgets, so differences are to its cell of the same budget; there is none for: full"
    assert found.warnings[0].startswith(told) and "streaming_llm, 10 %" in found.warnings[0]


def test_a_base_leaves_the_other_warnings(disk, tmp_path):
    disk(questions([1, 0, 0, 0]))
    disk(questions([1, 1, 1, 0]), "h2o", 0.5)
    (found,) = compare(tmp_path, base="h2o")
    assert [warning.partition(":")[0] for warning in found.warnings] == ["4 samples", "full cache is at chance on this task"]


def test_a_metric_of_some_samples_is_broken_down_over_those(disk, tmp_path):
    samples = questions([1, 0, 1, 1])
    for place, sample in enumerate(samples):
        sample["fields"] = {"part": "ab"[place // 2]}
    cell = disk(samples)
    result = json.loads((cell / "result.json").read_text())
    result["metrics"][result["main_metric"]]["some"] = True
    (cell / "result.json").write_text(json.dumps(result))
    name = result["metrics"][result["main_metric"]]["of"]
    lines = [json.loads(line) for line in (cell / "samples.jsonl").read_text().splitlines()]
    del lines[3]["values"][name]
    (cell / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (grid,) = breakdown(tmp_path, "part")
    assert not grid.warnings and {key: n for _, _, found in grid.rows for key, (_, _, n) in found.items()} == {"a": 2, "b": 1}
