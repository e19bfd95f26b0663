"""What calibrations leave in the cache folder: names, damage, and which one is found for whom."""

import pytest
import torch

from conftest import shared_model
from kvlab import artefacts
from kvlab.artefacts import ArtefactError, find, save, weights_hash
from kvlab.cells import Cell
from kvlab.sharing.kvsharer import KVSharer
from kvlab.tiny import tiny_model
from running import TINY, kvlab
from test_compose import composed

ABOUT = {
    "model": "mine", "fingerprint": "files", "weights": "w", "dtype": "float32", "texts": 2, "tokens": 20, "text": "t",
    "source": "a book",
}  # fmt: skip
COMMAND = "kvlab calibrate eigen --model mine"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path))
    return tmp_path / "calibration"


def refused(**chosen):
    with pytest.raises(ArtefactError) as caught:
        find("eigen", command=COMMAND, **chosen)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(f"`{COMMAND}`")
    return str(caught.value)


def test_what_is_saved_is_read_again_and_the_newest_comes_first(folder):
    tensors = {"down": torch.arange(6.0).view(2, 3).T, "up": torch.ones(2, dtype=torch.bfloat16)}
    first = save("eigen", ABOUT, {"curve": [1, 0.5], "use": "codec.eigen.artefact=KEY"}, tensors)
    other = save("eigen", {**ABOUT, "basis": "kq"}, {})
    assert len(first.key) == 16 and first.path == folder / f"eigen-{first.key}.json" and other.key != first.key
    (found,) = [one for one in artefacts.artefacts("eigen") if one.key == first.key]
    assert found == first and found.use == f"codec.eigen.artefact={first.key}" and other.settings == {"basis": "kq"}
    assert all(torch.equal(found.tensors()[name], tensor) for name, tensor in tensors.items()) and other.tensors() == {}
    assert save("eigen", ABOUT, {}).key == first.key and artefacts.artefacts("qaq") == []
    first.path.write_text(first.path.read_text().replace('"made": "2', '"made": "3'))
    assert [one.key for one in artefacts.artefacts()] == [first.key, other.key]


def test_the_one_that_fits_is_found(folder):
    assert "there is no eigen artefact in" in refused(fingerprint="files")
    svd = save("eigen", {**ABOUT, "basis": "svd"}, {})
    assert find("eigen", fingerprint="files", basis="svd", command=COMMAND) == svd
    assert find("eigen", weights="w", command=COMMAND) == svd == find("eigen", key=svd.key, command=COMMAND)
    assert "for this model and these settings" in refused(fingerprint="files", basis="kq")
    assert "for this model and these settings" in refused(weights="other")
    longer = save("eigen", {**ABOUT, "basis": "svd", "tokens": 40}, {})
    several = refused(fingerprint="files", basis="svd", setting="codec.eigen.artefact")
    assert all(one.key in several for one in (svd, longer)) and "choose with codec.eigen.artefact=KEY" in several
    assert find("eigen", key=longer.key, fingerprint="files", command=COMMAND) == longer
    unnamed = save("eigen", {**ABOUT, "fingerprint": "", "basis": "kq"}, {})
    assert "for this model" in refused(fingerprint="files", basis="kq"), "whose it is isn't said"
    assert find("eigen", key=unnamed.key, fingerprint="files", command=COMMAND) == unnamed, "weights are checked later"
    assert "the weights can't say" in refused(weights="") and find("eigen", key=svd.key, weights="", command=COMMAND) == svd
    half = save("eigen", {**ABOUT, "weights": "", "basis": "half"}, {})
    assert "for this model" in refused(weights="w", basis="half")
    assert find("eigen", fingerprint="files", basis="half", command=COMMAND) == half
    assert find("eigen", key=half.key, weights="w", command=COMMAND) == half


def test_what_was_chosen_and_does_not_fit_is_refused(folder):
    found = save("eigen", {**ABOUT, "basis": "svd"}, {}, {"down": torch.ones(3)})
    assert "no eigen artefact 0123 in" in refused(key="0123")
    assert "of another model (mine)" in refused(key=found.key, fingerprint="others")
    assert "of another model (mine)" in refused(key=found.key, weights="others")
    assert "made with basis=svd" in refused(key=found.key, basis="kq")
    assert "of version 1, and this kvlab needs 2" in refused(key=found.key, version=2)
    assert "of version 1, and this kvlab needs 2" in refused(weights="w", version=2)
    tensors = found.path.with_suffix(".safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\0")
    assert f"{tensors.name} is damaged" in refused(weights="w")
    with pytest.raises(ArtefactError, match="damaged"):
        found.tensors()
    tensors.unlink()
    assert f"{tensors.name} is missing" in refused(key=found.key)


def test_broken_files_are_named_and_the_others_are_found(folder, capsys):
    found = save("eigen", ABOUT, {"rank": 3, "use": "codec=eigen"})
    broken = save("eigen", {**ABOUT, "tokens": 40}, {"rank": 4})
    cut = save("eigen", {**ABOUT, "tokens": 60}, {"rank": 4})
    broken.path.write_text(broken.path.read_text().replace('"rank": 4', '"rank": 5'))
    cut.path.write_text(cut.path.read_text()[:-20])
    assert artefacts.artefacts() == [found] and set(artefacts.damaged()) == {broken.path, cut.path}
    assert find("eigen", weights="w", command=COMMAND) == found
    assert "isn't as it was written" in refused(key=broken.key) and "can't be read" in refused(key=cut.key)
    code, out, _ = kvlab("list", "artefacts", capsys=capsys)
    lines = out.splitlines()
    assert code == 0 and lines[0].split("  ")[0] == found.key and len(lines) == 3
    assert "eigen of mine" in lines[0] and "2 texts of 20 tokens, a book; use: codec=eigen" in lines[0]
    assert str(cut.path) in out and "damaged" in lines[1]


def test_a_damaged_one_is_no_choice_where_another_fits(folder):
    found = save("eigen", ABOUT, {}, {"up": torch.ones(2)})
    newest = save("eigen", {**ABOUT, "tokens": 40}, {}, {"up": torch.ones(2)})
    newest.path.write_text(newest.path.read_text().replace('"made": "2', '"made": "3'))
    newest.path.with_suffix(".safetensors").unlink()
    assert find("eigen", weights="w", command=COMMAND) == found
    found.path.with_suffix(".safetensors").unlink()
    assert "is missing: make it anew" in refused(weights="w")


def test_a_cell_made_again_has_the_artefact_that_was_found(folder):
    """Jobs of a sweep may start when several fit."""
    about = {**ABOUT, "fingerprint": "tiny llama", "order": "dissimilar", "threshold": 0.5}
    (config,) = composed("share=kvsharer", *TINY)
    about |= {name: value for name, value in config["share"].items() if name in KVSharer.calibrated_by}
    first = save("kvsharer", about, {}, version=KVSharer.calibrated_version)
    cell = Cell.of(config)
    save("kvsharer", {**about, "tokens": 40}, {}, version=KVSharer.calibrated_version)
    with pytest.raises(ArtefactError, match=r"2 kvsharer artefacts fit, choose with share\.artefact=KEY"):
        Cell.of(config)
    again = Cell.of(config, cell.artefacts)
    assert cell.artefacts == {"share": first.key} and (again.share, again.folder) == (cell.share, cell.folder)


def test_weights_have_one_hash_in_float32_and_bfloat16():
    model = shared_model("llama")
    assert weights_hash(model) == weights_hash(tiny_model("llama", dtype=torch.bfloat16)) != weights_hash(tiny_model("opt"))
    other = tiny_model("llama")
    with torch.no_grad():
        list(other.parameters())[3].flatten()[0] += 1
    assert weights_hash(other) != weights_hash(model)
    assert weights_hash(tiny_model("llama", dtype=torch.float16)) == "", "other numbers, so nothing can be said"
    with torch.device("meta"):
        assert weights_hash(type(model)(model.config)) == "", "there are none"


def test_an_interrupted_write_leaves_what_was_there(folder, monkeypatch):
    found = save("eigen", ABOUT, {"rank": 1}, {"down": torch.ones(3)})

    def stop(path, text):
        raise OSError("disk full")

    monkeypatch.setattr("kvlab.artefacts.write_whole", stop)
    with pytest.raises(OSError, match="disk full"):
        save("eigen", {**ABOUT, "tokens": 40}, {"rank": 2}, {"down": torch.zeros(3)})
    assert artefacts.artefacts() == [found] and artefacts.damaged() == {}
