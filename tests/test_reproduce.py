"""Papers' tables: every description makes cells, and ours beside theirs says what made-up results are made to say."""

import csv
import dataclasses
import io
import json
import random
import re
import tempfile
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure
from omegaconf import OmegaConf

import made_up
from kvlab.cells import Cell
from kvlab.cli import main
from kvlab.launcher import plain
from kvlab.metrics import Difference, make_metric
from kvlab.parts import GROUPS
from kvlab.paths import experiments_dir
from kvlab.reproduce import find_table, join, list_tables, plan
from kvlab.reproduce.measures import SPEED_WARNING
from kvlab.reproduce.order import order_of
from kvlab.reproduce.outlook import cache_text, planned_lines, weights_text
from kvlab.reproduce.picture import draw
from kvlab.reproduce.published import EXPECTED, table_names
from kvlab.reproduce.report import render_reproduction
from kvlab.reproduce.save import check_place, kept_result, save
from kvlab.settings import SettingError
from running import TINY, kvlab

ROOT = Path(__file__).parent.parent
NAMES = table_names(experiments_dir())
SCALES = [(name, scale.name) for name in NAMES for scale in find_table(name, experiments_dir()).scales]
QUICK = [("kvsharer/perplexity", "cpu")]
CALIBRATED = ("eigen/perplexity", "kvsharer/perplexity")
TOO_LARGE = ("scissorhands/curves",)
"""Five examples for made-up data that has fewer rows, beside a task that has none to lower."""
AMONG_THEMSELVES = ("fastgen/table3", "fastgen/table4", "fastgen/table5")
"""Tables without a full cache, whose methods are compared with one of them."""
FITS_TINY = {
    "think/ruler": ["task.lengths=[600]"],  # its tokenizer makes more tokens of a chain
    "h2o/table2": ["task.num_fewshot=1"],  # made-up data has few rows
    "h2o/table6": ["task.num_fewshot=1"],
    "h2o/table1": ["task.num_fewshot=1"],
    "h2o/table9": ["task.num_fewshot=1"],
    "h2o/table10": ["task.num_fewshot=1"],
    "scissorhands/table3": ["task.num_fewshot=1"],
}
ROWS = """table,model,task,metric,method,budget,value,source
t,big,quiz,acc,full,1.0,80,Table 1
t,big,quiz,acc,good,0.2,79,Table 1
t,big,quiz,acc,bad,0.2,50,Table 1
"""
TABLE = {
    **{"title": "T", "paper": "arXiv 0", "claim": "C", "better": "higher", "full": "full", "tie": 2.0},
    "scales": {
        "cpu": {
            **{"compares": "changes", "differs": "D", "cost": "seconds", "times": {"quiz": 100}},
            "run": ["model=tiny-llama", "task=smoke", "logger=none"],
            "models": {"big": []},
            "tasks": {"quiz": []},
            "methods": {"full": ["policy=full"], "good": ["policy=h2o"], "bad": ["policy=streaming_llm"]},
        }
    },
}


def described(folder, rows=ROWS, **changes):
    """A folder with one table; changes are of its scale or, by the names of TABLE, of the table."""
    (folder / "p").mkdir(exist_ok=True)
    table = {name: changes.pop(name, value) for name, value in TABLE.items() if name != "scales"}
    table["doubts"] = changes.pop("doubts", [])
    table["scales"] = {"cpu": {**TABLE["scales"]["cpu"], **changes}}
    (folder / "p/t.yaml").write_text(yaml.safe_dump(table, sort_keys=False))
    (folder / "p" / EXPECTED).write_text(rows)
    return folder


def answered(config, shares, seed=0, n=200, speed=None):
    """A made-up result of a cell, of which so many are right; those that are right stay so as the share grows."""
    cell = Cell.of(plain(config))
    hard = random.Random(seed).sample(range(n), n)
    right = shares[cell.policy.name]
    samples = [
        {"id": f"q{i}", "values": {"acc": float(hard[i] < right * n), "gold": -float(hard[i] >= right * n)}} for i in range(n)
    ]
    for i, sample in enumerate(samples):
        sample["memory"] = {"kv_bytes_full": 80 * (i + 1), "kv_bytes": 100 * right * (i + 1), "kept": 100 * right, "seen": 80}
        sample["speed"], sample["heads"] = {"seconds": 10 * right}, {"profile_s": 2 * right**2}
    found = {
        "acc": make_metric(samples, "acc", "mean", "higher", chance=0.25).as_dict(),
        "gold": make_metric(samples, "gold", "mean", "higher").as_dict(),
    }
    result = {"schema": 1, "status": "ok", **cell.summary(), "metrics": found, "main_metric": "acc", "memory": {}}
    result["speed"] = {"decode_tokens_per_s": speed}
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / "result.json").write_text(json.dumps(result))
    (cell.folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


@cache
def planned():
    """The made-up table's cells, which are below whatever folder the test is in."""
    with tempfile.TemporaryDirectory() as folder:
        table = find_table("p/t", described(Path(folder)))
    return plan(table, table.scale("cpu"))


def joined(tmp_path, monkeypatch, shares, **changes):
    """The made-up table beside made-up results."""
    monkeypatch.chdir(tmp_path)
    table, cells = find_table("p/t", described(tmp_path, **changes)), planned()
    for cell in cells:
        if Cell.of(plain(cell.config)).policy.name in shares:
            answered(cell.config, shares)
    return join(table, table.scale("cpu"), cells)


def one_cell(table, scale):
    """The last model, task and method of a scale."""
    last = {part: dict([list(getattr(scale, part).items())[-1]]) for part in ("models", "tasks", "methods")}
    (cell,) = plan(table, dataclasses.replace(scale, **last))
    return cell


class TestDescriptions:
    @pytest.mark.parametrize(("name", "scale"), SCALES)
    def test_one_cell_of_every_scale_composes_and_its_plan_says_what_it_takes(self, name, scale):
        table = find_table(name, experiments_dir())
        whole = table.scale(scale)
        cell = one_cell(table, whole)
        looks = cell.config.task.name == "hash_correlation"  # at a full cache
        assert looks or cell.config.policy.name != "full" or cell.config.codec or cell.config.share
        lines = planned_lines(table, whole, [cell])
        (model,) = (line for line in lines if line.startswith("model "))
        assert re.search(r": ~\d+\.\d\d GB of weights$", model), "give its size in conf/model_sizes.yaml"
        assert any(line.startswith("data ") for line in lines)
        assert scale == "cpu" or re.search(r"~\d+\.\d\d GB KV per batch of|KV known once calibrated$", lines[-1])

    @pytest.mark.parametrize(
        ("name", "scale"), [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.slow) for one in SCALES]
    )
    def test_all_cells_compose_to_what_they_are_named(self, name, scale):
        table = find_table(name, experiments_dir())
        cells = plan(table, table.scale(scale))
        assert len({cell.key for cell in cells}) == len(cells)
        assert table.used(table.scale(scale)), "a scale that stands for no number"
        for cell in cells:
            assert set(cell.config) <= {*GROUPS, "name", "output_dir", "seed"}
            assert (cell.config.model.get("embedded") is None) == (scale == "paper"), "cpu: the embedded model; paper: not"
        full = [cell for cell in cells if cell.method == table.full]
        plain_full = [cell.config.policy.name == "full" and not cell.config.codec and not cell.config.share for cell in full]
        assert all(plain_full) or name in AMONG_THEMSELVES
        others = {repr(cell.config) for cell in cells if cell.method != table.full}
        assert not others & {repr(cell.config) for cell in full}

    def test_every_number_has_its_place_and_every_paper_its_readme(self):
        for name in NAMES:
            folder = experiments_dir() / name.partition("/")[0]
            text = (folder / "README.md").read_text()
            assert f"kvlab reproduce {name}" in text, "the README must give the command"
            with (folder / EXPECTED).open(newline="") as file:
                tables = {row["table"] for row in csv.DictReader(file)}
            assert tables == {path.stem for path in folder.glob("*.yaml")}, "numbers that no table describes"
        assert {name.partition("/")[0] for name in NAMES} >= {
            "corm",
            "decoquant",
            "eigen",
            "h2o",
            "hashevict",
            "kivi",
            "kvsharer",
            "qaq",
            "think",
        }

    def test_the_wheel_carries_them(self):
        included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
        papers = {f"experiments/{name.partition('/')[0]}" for name in NAMES}
        assert {path for path in included["force-include"] if path.startswith("experiments/")} == papers

    def test_the_index_is_current(self):
        text = (experiments_dir() / "README.md").read_text()
        begin, end = "<!-- begin: kvlab reproduce --list --format md -->\n", "\n<!-- end -->"
        assert text.partition(begin)[2].partition(end)[0] == list_tables("md"), "paste `kvlab reproduce --list --format md`"

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [name for name in NAMES if name not in (*CALIBRATED, *TOO_LARGE)])
    def test_what_a_small_machine_runs_is_planned(self, name, tmp_path, monkeypatch, capsys):
        made_up.everything(tmp_path / "data")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("KVLAB_DATA_DIR", str(tmp_path / "data"))
        tiny = ["model=tiny-llama", "runtime.beyond_context=true", *FITS_TINY.get(name, [])]
        code, out, err = kvlab("reproduce", name, *tiny, "--dry-run", capsys=capsys)
        assert code == 0, err
        assert "to run" in out and "kvlab run" in out


def test_a_plan_names_commands_and_what_comes_before(tmp_path):
    table = find_table("p/t", described(tmp_path, needs=["kvlab calibrate qaq"]))
    cells = [*planned(), dataclasses.replace(planned()[0], task="another")]
    lines = planned_lines(table, table.scale("cpu"), cells)
    assert lines[0] == "p/t, scale=cpu: 3 cells for 3 published numbers" and lines[3] == "before    kvlab calibrate qaq"
    assert lines[4:6] == ["model     llama, float32: ~0.00 GB of weights", "data      prose that comes with Python"]
    assert lines[6] == ("big, quiz, full; big, another, full:  kvlab run model=tiny-llama task=smoke logger=none policy=full")


def test_bytes_of_models_on_the_hub_are_known_without_it():
    table = find_table("h2o/table2", experiments_dir())
    cell = one_cell(table, table.scale("paper"))
    assert weights_text(cell) == "facebook/opt-30b, float16: ~59.95 GB of weights"
    # 48 layers x 2 x 7,168 numbers of 2 bytes, of 8 x 2,048 tokens
    assert cache_text(cell) == f"at most ~{48 * 2 * 7168 * 2 * 8 * 2048 / 1e9:.2f} GB KV per batch of 8 x 2,048 tokens"
    other = dataclasses.replace(cell, config=OmegaConf.merge(cell.config, {"model": {"path": "an/other"}}))
    assert "size unknown without the hub" in weights_text(other) and "unknown" in cache_text(other)


class TestJoin:
    def test_beside_the_papers_numbers(self, tmp_path, monkeypatch):
        found = joined(tmp_path, monkeypatch, {"full": 0.8, "h2o": 0.78, "streaming_llm": 0.6})
        full, good, bad = found.rows
        assert (full.value, bad.value) == (pytest.approx(80), pytest.approx(60))
        assert (good.their_change, bad.their_change) == (-1, -30)
        assert bad.change.value == pytest.approx(-20) and bad.change.low < -20 < bad.change.high < 0
        assert bad.words == "loses about as much as published"
        assert good.words == "published: keeps; here: loses"  # 4 of 200, all in the same direction
        (order,) = found.orders
        assert (order.theirs, order.pairs, order.agree, order.reversed, order.tau) == ("full ≈ good > bad", 2, 2, 0, 1.0)
        assert order.verdict == "agrees: 2 of 2" and not found.warnings

    def test_the_other_way_round(self, tmp_path, monkeypatch):
        found = joined(tmp_path, monkeypatch, {"full": 0.8, "h2o": 0.5, "streaming_llm": 0.8})
        assert found.rows[2].words == "published: loses; here: within noise"
        assert found.orders[0].verdict == "reversed: 0 of 2 agree, 1 reversed, 1 within noise"

    def test_the_same_model_compares_values(self, tmp_path, monkeypatch):
        found = joined(tmp_path, monkeypatch, {"full": 0.8, "h2o": 0.6, "streaming_llm": 0.6}, compares="values")
        assert [row.words for row in found.rows] == [
            "+0: the published number is within our interval",
            "-19: worse than published, outside our interval",
            "+10: better than published, outside our interval",
        ]

    def test_a_full_cache_that_guesses_is_warned_of(self, tmp_path, monkeypatch):
        shares = {"full": 0.25, "h2o": 0.2, "streaming_llm": 0.1}
        found = joined(tmp_path, monkeypatch, shares)
        assert "full cache is at chance on quiz" in found.warnings[0] and "chance" in found.orders[0].verdict
        found = joined(tmp_path, monkeypatch, shares, metrics={"quiz": "gold"})
        assert "full cache's acc is at chance on quiz: only its gold can be read" in found.warnings[0]

    def test_what_is_not_run_is_said(self, tmp_path, monkeypatch):
        found = joined(tmp_path, monkeypatch, {"full": 0.8})
        assert [row.words for row in found.rows[1:]] == ["not run yet"] * 2
        assert found.orders[0].verdict == "no order: fewer than two methods with both numbers"

    def test_how_much_smaller_caches_are(self, tmp_path, monkeypatch):
        shares = {"full": 0.8, "h2o": 0.4, "streaming_llm": 0.2}
        found = joined(tmp_path, monkeypatch, shares, metrics={"quiz": "compression"}, times={})
        assert [row.value for row in found.rows] == pytest.approx([1, 2, 4])
        assert found.rows[2].change == pytest.approx((3, 3, 3, 200))

    @pytest.mark.parametrize("measure, values", [("pruned", [0, 50, 75]), ("seconds", [8, 4, 2]), ("profiling", [16, 8, 4])])
    def test_what_samples_held_and_took(self, measure, values, tmp_path, monkeypatch):
        shares = {"full": 0.8, "h2o": 0.4, "streaming_llm": 0.2}
        found = joined(tmp_path, monkeypatch, shares, metrics={"quiz": measure}, times={})
        assert [row.value for row in found.rows] == pytest.approx(values)
        assert found.orders[0].ours == "bad > good > full", "more is pruned, less time is taken"

    def test_numbers_that_no_place_gives_stay_blank(self, tmp_path, monkeypatch):
        shares = {"full": 0.8, "h2o": 0.6, "streaming_llm": 0.4}
        found = joined(tmp_path, monkeypatch, shares, rows=ROWS.replace(",79,", ",,"))
        assert [row.words for row in found.rows][1:] == ["no published number", "loses about as much as published"]
        assert found.table.numbers == 2 and found.orders[0].theirs == "full > bad"
        blank = ROWS.replace(",80,", ",,").replace(",79,", ",,").replace(",50,Table 1", ',,"Figure 3: curves, not readable"')
        found = joined(tmp_path, monkeypatch, shares, rows=blank)
        assert (found.orders[0].theirs, found.orders[0].ours) == ("", "full > good > bad")
        assert found.orders[0].verdict == "no order: no published numbers"
        text = render_reproduction(found, "md")
        assert "| big | quiz | bad | 0.2 | – | 40.0 ± 3.5 | – |" in text and "published: Figure 3: curves" in text

    def test_speeds_that_differ_by_little_are_noise(self, tmp_path, monkeypatch):
        speeds = {"full": 10.0, "h2o": 10.9, "streaming_llm": 25.0}
        monkeypatch.chdir(tmp_path)
        for cell in planned():
            answered(cell.config, dict.fromkeys(speeds, 0.8), speed=speeds[cell.config.policy.name])
        table = find_table("p/t", described(tmp_path, metrics={"quiz": "decode_tokens_per_s"}, times={}))
        found = join(table, table.scale("cpu"), planned())
        assert [row.value for row in found.rows] == [10.0, 10.9, 25.0] and found.rows[0].n is None
        assert found.rows[1].words == "keeps within noise, as published"
        assert found.rows[2].change[:3] == pytest.approx((15.0, 12.5, 17.5))
        assert found.rows[2].words == "published: loses; here: gains" and found.warnings == [SPEED_WARNING]
        assert "reversed" in found.orders[0].verdict
        assert "Δ ours [± 10 %]" in render_reproduction(found, "md") and "95 %" not in render_reproduction(found, "md")

    def test_another_metric_than_there_is(self, tmp_path, monkeypatch):
        with pytest.raises(SettingError, match="has no 'f1' for quiz; it has acc, gold, compression, pruned"):
            joined(tmp_path, monkeypatch, {"full": 0.8}, metrics={"quiz": "f1"})

    def test_every_format(self, tmp_path, monkeypatch):
        found = joined(tmp_path, monkeypatch, {"full": 0.8, "h2o": 0.78, "streaming_llm": 0.6}, doubts=["Doubtful."])
        for fmt, row in (("md", "| big | quiz | bad |"), ("text", "big    quiz  bad"), ("latex", "big & quiz & bad &")):
            text = render_reproduction(found, fmt)
            assert row in text and "agrees: 2 of 2" in text and "Warning: Doubtful." in text and "Table 1" in text
        rows = list(csv.DictReader(io.StringIO(render_reproduction(found, "csv"))))
        assert [float(row["published"]) for row in rows] == [80, 79, 50]
        assert rows[2]["order"] == "agrees: 2 of 2" and float(rows[2]["change_high"]) < 0


class TestSave:
    def test_tables_share_a_file_and_have_their_picture(self, tmp_path, monkeypatch):
        found = joined(tmp_path, monkeypatch, {"full": 0.8, "h2o": 0.78, "streaming_llm": 0.6}, compares="order")
        other = dataclasses.replace(found, table=dataclasses.replace(found.table, name="p/a"))
        folder = tmp_path / "kept" / "p"
        save(other, folder)
        first = save(found, folder)
        assert [path.name for path in first] == ["result.csv", "t.md", "t.tex", "t.png"]
        assert "agrees: 2 of 2" in (folder / "t.md").read_text() and r"\begin{tabular}" in (folder / "t.tex").read_text()
        before = (folder / "result.csv").read_text()
        rows = list(csv.DictReader(io.StringIO(before)))
        assert [row["table"] for row in rows] == ["p/a"] * 3 + ["p/t"] * 3 and "path" not in rows[0]
        assert (folder / "t.png").read_bytes().startswith(b"\x89PNG")
        assert kept_result(folder.parent, "p/t", link=True) == "[2 of 2](p/t.md)"
        assert kept_result(folder.parent, "p/b", link=True) == kept_result(folder.parent, "q/t", link=True) == ""
        save(found, folder)
        assert (folder / "result.csv").read_text() == before
        changed = dataclasses.replace(found, rows=found.rows[:1])
        save(changed, folder)
        assert len((folder / "result.csv").read_text().splitlines()) == 1 + 3 + 1

    def test_better_is_right_and_both_zeros_are_one(self, tmp_path, monkeypatch):
        found = joined(tmp_path, monkeypatch, {"full": 0.8, "h2o": 0.78, "streaming_llm": 0.6}, compares="order")
        figure = Figure()
        draw(dataclasses.replace(found, table=dataclasses.replace(found.table, better="lower")), figure)
        ours, theirs = figure.axes
        assert [label.get_text() for label in ours.get_yticklabels()] == ["good", "bad"]
        assert list(theirs.lines[0].get_xdata()) == [-1, -30]
        assert ours.get_xlim()[0] < ours.get_xlim()[1] and theirs.get_xlim()[0] > theirs.get_xlim()[1]
        zeros = [axis.transData.transform((0, 0))[0] for axis in (ours, theirs)]
        assert zeros[0] == pytest.approx(zeros[1])


def test_a_folder_with_another_result_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "result.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SettingError, match="isn't of `kvlab reproduce`: give another folder"):
        check_place(tmp_path)


def test_orders_of_lower_is_better_and_ties():
    def difference(a, b):
        return Difference(ours[b] - ours[a], *((-1.0, 1.0) if {a, b} == {"x", "y"} else (2.0, 3.0)), 50)

    ours = {"x": -5.0, "y": -5.5, "z": -9.0}  # minus a perplexity
    order = order_of("m", "t", {"x": 5.0, "y": 6.0, "z": 6.05, "unknown": 1.0}, "lower", 0.1, ours, difference)
    assert (order.theirs, order.ours) == ("x > y ≈ z", "x ≈ y > z")
    assert (order.pairs, order.agree, order.reversed, order.tau) == (2, 1, 0, 0.5)


def test_a_run_and_its_table(tmp_path, monkeypatch, capsys):
    """Two commands: the second finds all cells finished."""
    monkeypatch.chdir(tmp_path)
    run = [*TINY, "runtime.kernels=reference"]
    monkeypatch.setattr("kvlab.reproduce.experiments_dir", lambda: described(tmp_path, run=run, compares="order", times={}))
    assert main(["reproduce", "p/t", "--format", "md"]) == 0
    first = capsys.readouterr().out
    assert "| big | quiz | bad | 0.2 | 50.00 |" in first and "4 samples of quiz" in first
    assert main(["reproduce", "p/t", "--format", "md", "--save", "kept"]) == 0
    again = capsys.readouterr()
    assert again.out == first and "3 of 3 cells finished before" in again.err
    assert "files: kept/result.csv, kept/t.md" in again.err and Path("kept/t.md").read_text() == first


WRONG = {
    "no table": ([], "which table? `kvlab reproduce --list` shows them"),
    "table": (["h2o/tabel2"], "did you mean h2o/table2"),
    "scale": (["h2o/table2", "scale=gpu"], "scale=gpu (did you mean cpu?): h2o/table2 has cpu, paper"),
    "setting": (["kivi/axes", "tsk=needle"], "did you mean task"),
    "no setting": (["kivi/axes", "cpu"], "cpu: settings are KEY=VALUE"),
    "a sweep": (["kivi/axes", "seed=1,2"], "2 cells where one is wanted"),
    "option": (["kivi/axes", "--dry"], "--dry: there is no such option"),
    "saving a plan": (["kivi/axes", "--dry-run", "--save", "x"], "--save has nothing to write with --dry-run"),
    "list of one": (["kivi/axes", "--list"], "leave out the rest"),
}


@pytest.mark.parametrize("arguments, said", WRONG.values(), ids=WRONG.keys())
def test_wrong_commands(arguments, said, capsys):
    code, out, err = kvlab("reproduce", *arguments, capsys=capsys)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"rows": ROWS.replace(",79,", ",few,")}, "expected.csv:3: a number needs a method, a value (nothing where"),
        ({"rows": ROWS.replace("50,Table 1", "50,")}, "expected.csv:4: a number needs"),
        ({"rows": ROWS + ROWS.splitlines()[1]}, "two numbers for big, quiz, full"),
        ({"rows": "a,b\n"}, "the first line must be table,model"),
        ({"tasks": {"quizz": []}}, "tasks 'quizz' (did you mean quiz?)"),
        ({"methods": {"good": []}}, "methods must say what 'full' is"),
        ({"methods": ["full"]}, "methods must give a list of settings"),
        ({"compares": "all"}, "compares='all': use one of values, changes, order"),
        ({"cots": "much"}, "did you mean cost"),
        ({"better": "more"}, "better='more'"),
    ],
)
def test_wrong_descriptions(changes, said, tmp_path):
    with pytest.raises(SettingError) as error:
        find_table("p/t", described(tmp_path, **changes))
    assert said in str(error.value) and "\n" not in str(error.value)
