"""The dashboard's data, page and server, from a small store of real runs; test_dashboard_page.py looks at it in a browser."""

import http.client
import json
import math
import re
import socket
import threading
from pathlib import Path

import pytest

from dashboard_store import MARKUP, make_store
from kvlab.dashboard import Server, Store, render_page, serve, write_dashboard
from kvlab.dashboard import store as store_module
from kvlab.dashboard.changes import CUT, changed, shortened
from kvlab.dashboard.page import as_json, plotly_script
from kvlab.metrics import Z95, make_metric, wilson
from kvlab.results import prompts_file, read_records
from kvlab.tables import compare, read_cell
from running import kvlab, results, sample_lines
from test_tables import Disk, questions

pytest.importorskip("plotly", reason="the page needs plotly: pip install 'kvlab[dashboard]'")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def data(outputs):
    return Store(outputs).page()[1]


# ---------------------------------------------------------------------------------------------------- what the store keeps


def test_what_was_asked_is_kept_once_for_all_cells_of_a_task(outputs):
    files = sorted(outputs.rglob("prompts-*.jsonl"))
    assert [file.parent.name for file in files] == ["perplexity", "prompts"]
    for path, result in results(outputs).items():
        texts = {record["id"]: record for record in read_records(prompts_file(outputs / path, result["prompts"]["hash"]))[0]}
        assert set(texts) == {json.loads(line)["id"] for line in sample_lines(outputs)[path]}
        if result["task"] == "prompts":
            assert MARKUP in texts["<b>one</b>"]["prompt"] and texts["two"]["question"].strip() == "Where?"
            assert texts["two"]["prompt"].endswith(texts["two"]["question"]) and texts["two"]["gold"].strip() == "Oslo"
        else:
            assert texts["w00000"]["prompt"] and texts["w00000"]["gold"] and "question" not in texts["w00000"]


def test_texts_of_prompts_that_are_there_are_left_alone(outputs):
    (file,) = (outputs / "debug" / "tiny-llama" / "perplexity").glob("prompts-*.jsonl")
    before = file.stat().st_mtime_ns
    common = ["run", "debug=smoke", "runtime.threads=1", "runtime.kernels=reference", f"output_dir={outputs}", "--no-table"]
    assert kvlab(*common, "policy=h2o", "budget.ratio=0.3", "--force") == 0
    assert file.stat().st_mtime_ns == before


# ---------------------------------------------------------------------------------------------------------- the data


def test_numbers_are_those_of_the_table(outputs, data):
    comparisons = compare(outputs)
    assert [one["title"] for one in data["comparisons"]] == [one.title for one in comparisons]
    assert len(data["cells"]) == sum(len(one.rows) for one in comparisons) == 10
    rows = [row for one in comparisons for row in one.rows]
    for cell, row in zip(data["cells"], rows, strict=True):
        assert (cell["path"], cell["value"], cell["n"], cell["agreement"]) == (
            row.facts["path"],
            row.value,
            row.n,
            row.agreement,
        )
        right_or_wrong = cell["task"] == "prompts"
        wanted = wilson(row.value, row.n) if right_or_wrong else (row.value - Z95 * row.stderr, row.value + Z95 * row.stderr)
        assert (cell["low"], cell["high"]) == pytest.approx(wanted)
        if row.delta is None:
            assert cell["full"] and cell["delta"] is None
        else:
            assert (cell["delta"]["value"], cell["delta"]["low"], cell["delta"]["noise"]) == (
                *row.delta[:2],
                row.delta.within_noise,
            )
    assert {cell["provenance"]["versions"]["torch"] for cell in data["cells"]} and data["cells"][1]["config"]["policy"]["name"]


def test_samples_that_changed_are_there_with_what_was_asked(data):
    cells = [cell for cell in data["cells"] if not cell["full"]]
    assert all("changed" not in cell for cell in data["cells"] if cell["full"])
    assert {cell["changed"]["of"] for cell in cells} == {3, 4} and any(cell["changed"]["count"] for cell in cells)
    for cell in cells:
        assert len(cell["changed"]["shown"]) == cell["changed"]["count"] <= cell["changed"]["of"]
        for one in cell["changed"]["shown"]:
            base = data["answers"][cell["comparison"]][one["id"]]
            assert data["questions"][cell["changed"]["prompts"]][one["id"]]["prompt"]
            assert one.get("output") != base.get("output") if cell["task"] == "prompts" else one["value"] != base["value"]


def test_analyses_are_found_and_broken_ones_said(outputs, data, tmp_path):
    assert sorted(one["name"] for one in data["analyses"]) == ["hash", "heads", "heavy_hitters", "persistence", "sparsity"]
    assert all(one["rows"] and one["title"] and one["meaning"] for one in data["analyses"])
    assert {one["about"] for one in data["analyses"]} == {"tiny-llama, 1 text of 40 tokens, float32"}
    for name, text in {"heads": "{", "hash": '{"analyses": {"hash": {"rows": 1}}}', "sparsity": '{"other": 1}'}.items():
        (tmp_path / f"{name}.json").write_text(text)
    _, page = Store([outputs / "debug", tmp_path]).page()  # the second holds no cells
    assert page["analyses"] == [] and len(page["cells"]) == 10
    assert len(page["warnings"]) == 2 and all("is left out" in line for line in page["warnings"])
    assert data["warnings"] == []


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path / "outputs")


def test_a_store_without_prompts_or_full_cache_can_be_read(disk, tmp_path):
    disk(questions([1, 0, 1]), "h2o", 0.5)
    _, page = Store(tmp_path / "outputs").page()
    (cell,) = page["cells"]
    assert page["comparisons"][0]["base"] is None and cell["delta"] is None
    assert cell["changed"]["count"] == 3 and page["answers"] == {}
    (asked,) = page["questions"].values()
    assert asked["q000"] == {"fields": {"length": 500, "depth": 0.0}}


def test_failed_cells_and_broken_results_are_shown(disk, tmp_path):
    disk(questions([1, 0, 1]))
    disk.failed("RuntimeError: no", policy="h2o")
    (disk(questions([1]), "tova") / "result.json").write_text("{")
    _, page = Store(tmp_path / "outputs").page()
    assert [(cell["status"], cell["value"] is None) for cell in page["cells"]] == [("ok", False), ("failed", True)]
    assert page["comparisons"][0]["sheet"]["rows"][1][-1] == "failed: RuntimeError: no"
    assert len(page["warnings"]) == 1 and "cell03" in page["warnings"][0]


def test_what_lost_most_comes_first():
    metric = make_metric(questions([1, 0]), "accuracy", "mean", "higher").as_dict()
    base = {one["id"]: one for one in questions([1, 0, 1, 1, 0])}
    ours = {one["id"]: {**one, "output": "y"} for one in questions([1, 1, 0, 1, 0], gold=-1.5)}
    ours["q003"]["values"]["gold_logprob"] = -9.0
    ours["q004"]["output"] = base["q004"]["output"]
    assert changed(metric, base, ours) == ["q002", "q003", "q000", "q001"]
    assert changed({**metric, "better": "lower"}, base, ours)[0] == "q001"


def test_of_a_long_text_the_middle_is_left_out():
    text = "a" * CUT[0] + "b" * 1000 + "c" * CUT[1]
    assert shortened(text) == "a" * CUT[0] + "\n[… 1,000 characters left out …]\n" + "c" * CUT[1]
    assert shortened("short") == "short"


def test_only_what_changed_is_computed_again(disk, tmp_path, monkeypatch):
    for comparison in ("a" * 12, "b" * 12):
        disk(questions([1, 1, 0]), comparison=comparison)
        cell = disk(questions([1, 0, 0]), "h2o", 0.5, comparison=comparison)
    computed, read = [], []
    monkeypatch.setattr(store_module, "compare", lambda where, known: computed.append(len(where)) or compare(where, known))
    monkeypatch.setattr("kvlab.dashboard.files.read_cell", lambda path: read.append(path) or read_cell(path))
    store = Store(tmp_path / "outputs")
    state, first = store.page()
    assert store.page() == (state, first) and computed == [2, 2] and len(read) == 4
    (cell / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions([1, 1, 0])))
    other, second = store.page()
    assert computed == [2, 2, 2] and other != state and len(read) == 4
    assert (first["cells"][3]["delta"]["value"], second["cells"][3]["delta"]["value"]) == (pytest.approx(-1 / 3), 0)
    assert second["cells"][1] == first["cells"][1]


@pytest.mark.slow
def test_five_hundred_cells_fit_into_the_page(tmp_path):
    """25 tasks of 20 cells, 100 samples each with long prompts and outputs, of which most changed."""
    disk = Disk(tmp_path / "outputs")
    config = {"policy": {"name": "h2o", "heavy_share": 0.5}, "task": {f"setting{n}": "x" * 30 for n in range(20)}}
    for task in range(25):
        folder = tmp_path / "outputs" / "prompts"
        folder.mkdir(exist_ok=True, parents=True)
        for number in range(20):
            samples = [{**one, "output": f"{number} " + "word " * 120} for one in questions([1, 0] * 50)]
            about = {"comparison": f"{task:012d}", "task": f"task{task}", "config": config, "prompts": {"hash": f"{task:x}"}}
            cell = disk(samples, f"policy{number}" if number else "full", 0.5 if number else None, **about)
        lines = [json.dumps({"id": one["id"], "prompt": "A long context. " * 500}) + "\n" for one in samples]
        prompts_file(cell, f"{task:x}").write_text("".join(lines))
    text = write_dashboard(tmp_path / "outputs", tmp_path / "page.html")
    assert "500 cells in 25 comparisons" in text
    size = (tmp_path / "page.html").stat().st_size
    assert len(plotly_script()) < size < 15e6, size
    print(f"{size / 1e6:.1f} MB")


# ---------------------------------------------------------------------------------------------------------- the page


def page_of(**data):
    return render_page({"comparisons": [], "cells": [], **data})


def test_texts_cannot_leave_their_place():
    texts = ["</script><script>alert(1)</script>", "<!-- <script", "{{policy}} {{data}}", '\u2028 & "', MARKUP]
    page = page_of(texts=texts)
    assert page.count("</script") == 3 and "alert(1)</" not in page and "{{policy}}" in page
    inside = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(inside)["texts"] == texts and "<" not in inside
    assert json.loads(as_json(["\ud800"])) == ["?"]


def test_the_page_names_no_other_place_and_allows_none():
    page = page_of()
    own = page.replace(plotly_script(), "")
    assert not re.search(r"https?://|//[a-z]+\.", own) and "default-src 'none'" in own and "connect-src 'none'" in own
    assert "connect-src 'self'" in render_page({}, live=True)
    assert (
        len(re.findall(r"sha256-[A-Za-z0-9+/]{43}=", page)) == 2 and "unsafe-inline'; img" in own and "unsafe-eval" not in own
    )


def test_numbers_that_json_lacks_are_none(disk, tmp_path):
    bad = {"kind": "mean", "better": "higher", "of": "accuracy", "value": math.inf, "stderr": math.nan, "n": 2}
    disk(questions([1, 1]), metrics={"accuracy": bad})
    (cell,) = Store(tmp_path / "outputs").page()[1]["cells"]
    assert cell["value"] is None and cell["low"] is None
    write_dashboard(tmp_path / "outputs", tmp_path / "page.html")


# ------------------------------------------------------------------------------------------------------ the command


def test_the_command_writes_a_page(outputs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = kvlab("dashboard", str(outputs), capsys=capsys)
    assert (code, err) == (0, "") and re.fullmatch(r"dashboard.html: 10 cells in 2 comparisons, \d\.\d MB\n", out)
    assert (tmp_path / "dashboard.html").read_text().startswith("<!doctype html>")
    code, out, _ = kvlab("dashboard", "--help", capsys=capsys)
    assert code == 0 and "kvlab dashboard --serve" in out


def test_serving_waits_for_the_first_result_of_a_sweep_that_has_begun(disk, tmp_path):
    cell = disk(questions([1, 0, 1]))
    (cell / "config.yaml").write_text("")
    result, said = (cell / "result.json").read_text(), []
    (cell / "result.json").unlink()

    def show(text):
        said.append(text)
        if len(said) == 2:
            raise KeyboardInterrupt
        (cell / "result.json").write_text(result)  # the sweep's first cell is finished while this waits

    with pytest.raises(KeyboardInterrupt):
        serve(tmp_path / "outputs", 0, show)
    assert "waits for the first one, Ctrl+C ends it" in said[0] and "shows 1 cells" in said[1]


def test_mistakes_are_said_in_one_line(outputs, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, says in (
            ([str(tmp_path / "empty")], "no results in"),
            (["--serve", str(tmp_path / "empty")], "no results in"),
            (["--output", str(tmp_path / "file" / "x.html"), str(outputs)], "x.html can't be written"),
            (["--output", str(tmp_path / "empty"), str(outputs)], "empty can't be written: give another file"),
            (["--serve", "--open", "no", "--port", port, str(outputs)], f"--port {port} is taken: give another one"),
            (["--port", "80"], "--port goes with --serve"),
            (["--serve", "--port", "70000"], "use a number from 0 to 65535"),
            (["--serve", "--output", "x.html"], "--serve writes no file"),
        ):
            code, out, err = kvlab("dashboard", *arguments, capsys=capsys)
            assert (code, out) == (2, "") and says in err.strip().splitlines()[-1], (arguments, err)
    monkeypatch.setattr("kvlab.dashboard.page.importlib.util.find_spec", lambda name: None)
    code, _, err = kvlab("dashboard", str(outputs), capsys=capsys)
    assert code == 2 and err == "kvlab: the dashboard needs plotly, which isn't installed: pip install 'kvlab[dashboard]'\n"


# ------------------------------------------------------------------------------------------------------- the server


@pytest.fixture
def served(disk, tmp_path):
    disk(questions([1] * 60))
    cell = disk([{**one, "output": "y"} for one in questions([0] * 60)], "h2o", 0.5)
    with Server(Store(tmp_path / "outputs"), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server, cell
        server.shutdown()
        thread.join()


def get(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer, answer.read().decode()


def test_the_server_sends_what_is_new_and_only_that(served, disk):
    server, _ = served
    assert server.server_address[0] == "127.0.0.1"
    answer, page = get(server, "/")
    assert answer.status == 200 and 'data-live="yes"' in page
    answer, text = get(server, "/data.json")
    tag, data = answer.headers["ETag"], json.loads(text)
    assert len(data["cells"]) == 2 and f'"{data["state"]}"' == tag
    answer, text = get(server, "/data.json", **{"If-None-Match": tag})
    assert (answer.status, text) == (304, "")
    disk(questions([1] * 60), "tova", 0.5)
    answer, text = get(server, "/data.json", **{"If-None-Match": tag})
    assert answer.status == 200 and len(json.loads(text)["cells"]) == 3 and answer.headers["ETag"] != tag


def test_the_server_has_the_samples_that_the_page_lacks(served):
    server, cell = served
    _, text = get(server, "/data.json")
    assert [len(one["changed"]["shown"]) for one in json.loads(text)["cells"][1:]] == [50]
    answer, text = get(server, f"/samples.json?cell={cell}&start=50")
    assert answer.status == 200 and len(json.loads(text)["shown"]) == 10
    for path, says in (
        (f"/samples.json?cell={Path(__file__).parent}", "no such cell"),
        ("/samples.json", "no such cell"),
        ("/x", "nothing here"),
    ):
        answer, text = get(server, path)
        assert answer.status == 404 and says in text


def test_the_server_answers_this_machine_alone(served):
    server, _ = served
    answer, _ = get(server, "/data.json", Host="evil.example:80")
    assert answer.status == 403
    for host in ("localhost:1", "localhost", "127.0.0.1"):  # without a port: at port 80
        assert get(server, "/data.json", Host=host)[0].status == 200


def test_a_result_that_goes_while_it_is_read_ends_in_one_line(served, monkeypatch):
    """A run with --force sets results aside between the server's listing and its reading."""
    server, cell = served
    listed = store_module.find_cells
    monkeypatch.setattr("kvlab.tables.find_cells", lambda where: [*listed(where), cell / "gone"])
    answer, text = get(server, "/data.json")
    assert answer.status == 503 and "the store changes just now" in text and "\n" not in text
