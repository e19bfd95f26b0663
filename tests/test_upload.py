"""The dashboard's page on W&B: read back from the files that wandb really writes offline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.dashboard.upload import settings_of
from running import TINY, kvlab
from test_tracking import read, records

pytest.importorskip("plotly", reason="the page needs plotly: pip install 'kvlab[dashboard]'")
LOGGER = ["logger=wandb", "logger.mode=offline", "logger.project=mine", "logger.figures=true"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of a sweep whose figures went to W&B, offline; it is the current one, and nothing of the user's is known."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
            patch.delenv(name)
        patch.setenv("HOME", str(folder / "home"))
        patch.chdir(folder)
        sweep = ["run", "-m", *TINY, "runtime.kernels=reference", *LOGGER, "policy=full,h2o", "name=a/b", "--no-table"]
        assert kvlab(*sweep) == 0
        yield folder


def uploads(folder):
    return sorted((folder / "outputs").glob("wandb/offline-run-*/run-figures-*.wandb"))


def artefact_of(file):
    (found,) = [one.artifact for one in records(file) if one.WhichOneof("record_type") == "artifact"]
    return found


def test_a_sweeps_figures_are_an_artefact_of_its_group(swept):
    page = swept / "outputs" / "a" / "b" / "dashboard.html"
    (file,) = uploads(swept)
    run = read(file)
    assert (run.record.run_group, run.record.job_type, run.record.project) == ("a/b", "figures", "mine")
    assert run.exit == 0 and run.summary["cells"] == 2
    logged = {name: value for row in run.history for name, value in row.items()}
    assert (file.parent / "files" / logged["dashboard/path"]).read_bytes() == page.read_bytes(), (
        "wandb adds nothing to the page"
    )
    table = json.loads((file.parent / "files" / logged["comparison/path"]).read_text())
    rows = {row["policy"]: row for row in (dict(zip(table["columns"], row, strict=True)) for row in table["data"])}
    assert rows["full"]["delta"] is None and rows["h2o"]["delta_low"] <= rows["h2o"]["delta"] <= rows["h2o"]["delta_high"]
    assert rows["h2o"]["metric"] == "perplexity" and rows["h2o"]["ratio"] == 0.2 and rows["h2o"]["kv_bytes"] > 0
    artefact = artefact_of(file)
    assert (artefact.type, artefact.name) == ("figures", "figures-a-b")
    held = {one.path: one.local_path for one in artefact.manifest.contents}
    assert set(held) == {"dashboard.html", "tables.md", "tables.csv"}
    assert all(path.startswith(str(file.parent)) for path in held.values()), "nothing is staged elsewhere"


def test_the_same_by_hand_takes_its_place(swept, capsys):
    (swept / "outputs" / "a" / "hash.json").write_text('{"analyses": {"hash": {"rows": []}}}')
    (swept / "outputs" / "a" / "hash.png").write_bytes(b"a picture")
    earlier = uploads(swept)
    code, out, err = kvlab("dashboard", "outputs/a", "--wandb", "--output", "outputs/page.html", capsys=capsys)
    assert code == 0 and "`wandb sync " in out, err
    (file,) = set(uploads(swept)) - set(earlier)
    run = read(file).record
    assert (run.run_group, run.project, len(earlier)) == ("a/b", "mine", 1), "it goes where the cells are"
    assert "0-hash.png" in {one.path for one in artefact_of(file).manifest.contents}
    command = [Path(sys.executable).with_name("wandb"), "sync", "--dry-run", *(one.parent for one in (*earlier, file))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Would sync 1 run(s)" in done.stderr and file.name in done.stderr, done.stderr


def test_what_fails_is_one_line_and_the_page_is_written(swept, monkeypatch, capsys):
    import wandb

    def fail(*_, **__):
        raise RuntimeError("no\nroom")

    command = ["dashboard", "outputs/a", "--wandb", "--output", "page.html"]
    with monkeypatch.context() as broken:
        broken.setattr(wandb.Run, "log_artifact", fail)
        code, _, err = kvlab(*command, capsys=capsys)
        assert code == 1 and err == "kvlab: W&B: page.html is written and not uploaded; RuntimeError: no room\n"
        assert (swept / "page.html").stat().st_size > 1_000_000
        broken.setattr(wandb, "init", fail)
        again = ["run", *TINY, "runtime.kernels=reference", *LOGGER, "name=a/b", "--no-table"]  # finished before
        code, _, err = kvlab(*again, capsys=capsys)
        assert code == 0 and "kvlab: no figures went to W&B: W&B: " in err, "a sweep doesn't fail for it"
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, err = kvlab(*command, capsys=capsys)
    assert code == 2 and "page.html is written and not uploaded; W&B: not installed" in err
    code, _, err = kvlab("dashboard", "outputs/a", "--wandb", "--serve", capsys=capsys)
    assert code == 2 and "leave out --output and --wandb, or --serve" in err


def test_figures_go_where_the_cells_are_if_they_agree():
    mine = {"name": "wandb", "project": "mine", "entity": "team"}
    assert [settings_of([mine, {"name": "none"}, {}]).project, settings_of([mine]).entity] == ["mine", "team"]
    assert settings_of([mine, {**mine, "entity": None}]).project == settings_of([]).project == "kvlab"
