"""KVSharer: the search against loops over stock models, what it leaves, and cells that share."""

import itertools
import json
import math
import random

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import naive_kvsharer
from conftest import random_ids, shared_model
from kvlab.analyze.setup import Setup
from kvlab.artefacts import ArtefactError, artefacts, find
from kvlab.budget import BudgetError
from kvlab.calibrate import CALIBRATIONS
from kvlab.calibrate.base import keep
from kvlab.calibrate.kvsharer import distances, mean_caches, ordered, walk
from kvlab.cells import Cell
from kvlab.estimate import estimate
from kvlab.sharing import ShareError, make_share
from kvlab.sharing.kvsharer import dropped
from kvlab.support import check_model, layer_kinds
from kvlab.tiny import tiny_model
from kvlab.workbench import Workbench
from running import TINY, kvlab, results

CALIBRATE = ["calibrate", "kvsharer", "--model", "tiny-llama", "--texts", "3", "--tokens", "20", "-o", "threshold=-1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def setup_of(model, texts=4, tokens=20, name="mine"):
    return Setup(name, model, None, tuple(random_ids(1, tokens, seed) for seed in range(texts)))


# ---------------------------------------------------------------------------------------------- the search, in loops


class Shared(DynamicCache):
    """Stock cache that hands each target what its source has just been given."""

    def __init__(self, pairs):
        super().__init__()
        self.pairs, self.given = pairs, {}

    def update(self, keys, values, layer_idx, *args, **kwargs):
        self.given[layer_idx] = (keys, values)
        while layer_idx in self.pairs:
            layer_idx = self.pairs[layer_idx]
        return self.given[layer_idx]


def stock_hidden(model, texts, pairs):
    return [model.base_model(ids, cache=Shared(pairs)).last_hidden_state.double().flatten() for ids in texts]


def stock_search(model, texts, distance, order, threshold, most):
    """[(target, source)] as Algorithm 1 says, one number at a time where that is affordable."""
    caches = []
    for ids in texts:
        cache = Shared({})
        model.base_model(ids, cache=cache)
        caches.append([[side[0].double().numpy() for side in cache.given[layer]] for layer in range(len(cache.given))])
    layers = range(len(caches[0]))
    mean = [[sum(cache[layer][side] for cache in caches) / len(texts) for side in (0, 1)] for layer in layers]

    def apart(one, other):
        if distance == "flat":
            return math.sqrt(sum(float(x) ** 2 for x in (one - other).ravel()))
        lengths = [math.sqrt(sum(float(x) ** 2 for x in row)) for head in one - other for row in head]
        return sum(lengths) / len(lengths)

    apart_by_pair = {
        (j, i): (apart(mean[i][0], mean[j][0]) + apart(mean[i][1], mean[j][1])) / 2 for j in layers for i in range(j)
    }
    pairs = sorted(apart_by_pair, key=apart_by_pair.get, reverse=order == "dissimilar")
    full = stock_hidden(model, texts, {})
    accepted = {}
    for j, i in pairs:
        if j in accepted or len(accepted) == most:
            continue
        hidden = stock_hidden(model, texts, {**accepted, j: i})
        cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(hidden, full, strict=True)]
        if np.mean(cosines) > threshold:
            accepted[j] = i
    return list(accepted.items())


@pytest.mark.parametrize(
    ("kind", "distance", "order", "threshold"),
    [
        ("llama", "flat", "dissimilar", 0.5),
        ("llama", "tokens", "similar", -1.0),
        pytest.param("llama", "tokens", "dissimilar", 0.6, marks=pytest.mark.slow),
        pytest.param("llama", "flat", "similar", 0.5, marks=pytest.mark.slow),
        pytest.param("opt", "flat", "dissimilar", 0.5, marks=pytest.mark.slow),
        pytest.param("opt", "tokens", "similar", 0.7, marks=pytest.mark.slow),
        pytest.param("gpt_neox", "flat", "dissimilar", 0.4, marks=pytest.mark.slow),
    ],
)
def test_the_search_is_that_of_loops_over_a_stock_model(kind, distance, order, threshold):
    model = tiny_model(kind, num_hidden_layers=6, spread=0.05)
    setup = setup_of(model)
    calibration = CALIBRATIONS["kvsharer"](order=order, distance=distance, threshold=threshold)
    found = calibration.measure(setup)
    wanted = stock_search(model, setup.texts, distance, order, threshold, 3)
    assert found.content["pairs"] == wanted and found.content["layers"] == 6 and wanted
    if threshold == -1.0:
        assert found.content["tried"] == len(wanted) == 3, "all are accepted"


def test_the_guard_rejects_and_chains_are_followed():
    asked = []

    def similarity(sources):
        asked.append(sources)
        return 0.5 if sources.get(2) == 1 else 0.9

    pairs = [(3, 2), (2, 1), (3, 0), (2, 0), (1, 0)]
    accepted, tried = walk(pairs, similarity, 0.5, 9)
    assert accepted == [((3, 2), 0.9), ((2, 0), 0.9), ((1, 0), 0.9)] and tried == 4, "0.5 isn't above 0.5"
    assert asked == [{3: 2}, {2: 1, 3: 1}, {2: 0, 3: 0}, {1: 0, 2: 0, 3: 0}], "(3, 0) isn't tried: 3 is a target"
    assert [pair for pair, _ in walk(pairs, similarity, 0.5, 2)[0]] == [(3, 2), (2, 0)], "fewer are the first of these"
    assert walk(pairs, lambda sources: 0.4, 0.5, 9) == ([], 5)


@pytest.mark.parametrize("seed", range(20))
def test_distances_orders_and_pairs_are_those_of_the_slow_reference(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layers = 2 * rng.randint(1, 4)
    kinds = [rng.choice("aab") for _ in range(layers)]
    sides = [[torch.randint(-2, 3, (2, 3, 2), generator=generator).double() for _ in range(layers)] for _ in "kv"]
    for distance, order in itertools.product(("flat", "tokens"), ("dissimilar", "similar")):
        slow = naive_kvsharer.distances(*([side.numpy() for side in part] for part in sides), distance)
        found = distances(*sides, kinds, distance)
        assert found == pytest.approx({pair: slow[pair] for pair in found})
        tied = {pair: round(apart, 9) for pair, apart in slow.items()}
        pairs = ordered({pair: tied[pair] for pair in found}, order)
        assert pairs == naive_kvsharer.ordered(tied, order, kinds)
        accepted, _ = walk(pairs, drawn_similarity, 0.5, dropped(0.5, layers))
        assert [pair for pair, _ in accepted] == naive_kvsharer.walk(pairs, drawn_similarity, layers, 0.5)
    assert dropped(seed / 40, layers) == naive_kvsharer.num_shared(seed / 40, layers)


def drawn_similarity(sources):
    """Another number for each map."""
    return random.Random(repr(sorted(sources.items()))).random()


def test_orders():
    apart = {(1, 0): 2.0, (2, 0): 5.0, (2, 1): 2.0, (3, 0): 1.0, (3, 1): 5.0, (3, 2): 1.0}
    assert ordered(apart, "dissimilar") == [(2, 0), (3, 1), (1, 0), (2, 1), (3, 0), (3, 2)]
    assert ordered(apart, "similar") == [(3, 0), (3, 2), (1, 0), (2, 1), (2, 0), (3, 1)]
    drawn = [ordered(apart, "random", seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and sorted(drawn[2]) == sorted(apart)
    assert ordered(dict(reversed(apart.items())), "random", 0) == drawn[0], "however they are given"


def test_layers_of_different_kinds_are_no_pairs():
    model = tiny_model("gemma3", num_hidden_layers=4)
    keys, values = mean_caches(model, random_ids(2, 30))
    assert keys[0].shape == (2, 30, 16), "all tokens, also of a layer whose window is 24"
    assert set(distances(keys, values, layer_kinds(model))) == {(2, 0), (3, 1)}
    keys[3] = keys[3][:1]
    assert set(distances(keys, values, layer_kinds(model))) == {(2, 0)}
    for number, turns in enumerate([1, 1, 0, 1]):  # as SmolLM3's config says
        model.config.no_rope_layers = [*getattr(model.config, "no_rope_layers", [])[:number], turns, *[1] * (3 - number)]
    model.config.layer_types = None
    assert set(distances(keys[:3], values[:3], layer_kinds(model))) == {(1, 0)}


# ------------------------------------------------------------------------------------------------------ what is used


def test_a_number_of_layers_is_rounded_half_up():
    assert [dropped(0.25, layers) for layers in (2, 4, 5, 6, 30, 32)] == [1, 1, 1, 2, 8, 8]
    assert [dropped(share, 100) for share in (0.0, 0.29, 0.285, 0.5)] == [0, 29, 29, 50]


def test_the_first_pairs_of_the_artefact_are_used_and_too_few_are_refused():
    model = tiny_model("llama", num_hidden_layers=6)
    layers = check_model(model)
    calibration = CALIBRATIONS["kvsharer"](threshold=0.5)
    with pytest.raises(ArtefactError, match=r"no kvsharer artefact in .*make one with `kvlab calibrate kvsharer --model NAME`"):
        make_share("kvsharer").layer_map(model, layers)
    measured = calibration.measure(setup_of(model))
    measured.content["pairs"] = [(3, 1), (1, 0)]
    artefact = keep("kvsharer", calibration, setup_of(model), measured)
    assert make_share("kvsharer", drop=0.2).layer_map(model, layers) == {3: 1}
    assert make_share("kvsharer", drop=0.33, artefact=artefact.key).layer_map(model, layers) == {3: 1, 1: 0}
    assert make_share("kvsharer", drop=0.0).layer_map(model, layers) == {}
    with pytest.raises(ShareError, match=r"share.drop=0.08 of 6 layers is none: use 0.083 or more"):
        make_share("kvsharer", drop=0.08).layer_map(model, layers)
    with pytest.raises(ShareError, match=r"drop=0.5 of 6 layers is 3, .* has 2 pairs: use share.drop=0.41 or less, or .* 0.5$"):
        make_share("kvsharer", drop=0.5).layer_map(model, layers)
    with pytest.raises(ArtefactError, match=r"for this model and these settings.*-o order=similar`$"):
        make_share("kvsharer", order="similar").layer_map(model, layers)
    with pytest.raises(ArtefactError, match="of another model"):
        make_share("kvsharer", artefact=artefact.key).layer_map(shared_model("llama"), layers)
    with torch.device("meta"):
        outline = type(model)(model.config)
    assert make_share("kvsharer", drop=0.2, artefact=artefact.key).layer_map(outline, layers) == {3: 1}
    with pytest.raises(ShareError, match="of a model with 6 layers, not 2"):
        make_share("kvsharer", artefact=artefact.key).layer_map(outline, layers[:2])


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"drop": 0.6}, "share.drop=0.6: use a share from 0 to 0.5"), ({"order": "best"}, "one of dissimilar, similar, random")],
)
def test_wrong_settings_say_what_to_change(settings, says):
    with pytest.raises(ShareError, match=says):
        make_share("kvsharer", **settings)


# ------------------------------------------------------------------------------------------------------------- cells


def test_calibrate_then_run_then_compare(folder, capsys):
    code, out, err = kvlab(*CALIBRATE, capsys=capsys)
    (artefact,) = artefacts()
    assert (code, err) == (0, "") and f"share=kvsharer share.artefact={artefact.key}" in out
    assert artefact.about["source"] == "the end of prose that comes with Python" and artefact.content["pairs"] == [[1, 0]]
    run = ["run", *TINY, "share=none,kvsharer", "policy=full,h2o", "budget.ratio=0.5"]
    code, out, err = kvlab(*run, capsys=capsys)
    assert code == 0 and "h2o + kvsharer 25 % 50 %, perplexity" in err
    found = results("outputs")
    shared = {path: result for path, result in found.items() if result["share"]}
    assert len(found) == 4 and sorted(path.split("/")[4] for path in shared) == ["full+kvsharer_25pct", "h2o+kvsharer_25pct"]
    for result in shared.values():
        assert result["share"] == "kvsharer 25 %"
        assert result["identity"]["share"] == {"name": "kvsharer", "artefact": artefact.key}
    held = {result["policy"]: result["memory"] for result in shared.values()}
    assert held["full"]["kv_bytes"] == held["full"]["kv_bytes_full"] / 2, "one of two layers"
    plain = {result["policy"]: result["memory"] for result in found.values() if not result["share"]}
    assert held["h2o"]["kv_bytes"] == plain["h2o"]["kv_bytes"] / 2
    header, rows = next(
        (line, out.splitlines()[number + 2 : number + 6]) for number, line in enumerate(out.splitlines()) if "sharing" in line
    )
    assert "Δ to full" in header and sum("kvsharer 25 %" in row for row in rows) == 2


def test_a_cell_knows_its_artefact_before_any_model_is_loaded(monkeypatch):
    config = {
        "model": {"name": "tiny-llama", "tiny": "llama"}, "policy": {"name": "full"}, "name": "x",
        "task": {"name": "perplexity", "context": 48, "scored": 16}, "protocol": {"name": "prompt"},
        "logger": {"name": "none"}, "share": {"name": "kvsharer"},
    }  # fmt: skip
    with pytest.raises(ArtefactError, match=r"make one with `kvlab calibrate kvsharer --model tiny-llama`$"):
        Cell.of(config)
    kvlab(*CALIBRATE)
    first = Cell.of(config)
    assert not first.is_full and first.label == "full + kvsharer 25 %, perplexity" and first.at_work["share"] == first.share
    bench = Workbench(first.model)
    guesses = [estimate(Cell.of({**config, **change}), bench, 4) for change in ({}, {"share": {}}, {"budget": {"bytes": 9000}})]
    assert guesses[0].kv_bytes == guesses[1].kv_bytes / 2 and guesses[0].seconds == pytest.approx(guesses[1].seconds, rel=0.5)
    bench.check(Cell.of({**config, "policy": {"name": "h2o"}, "budget": {"bytes": 300}}))
    with pytest.raises(BudgetError, match="takes 512 bytes"):
        bench.check(Cell.of({**config, "policy": {"name": "h2o"}, "budget": {"bytes": 300}, "share": {}}))
    kvlab(*CALIBRATE, "-o", "distance=tokens")
    with pytest.raises(ArtefactError, match=r"2 kvsharer artefacts fit, choose with share.artefact=KEY") as several:
        Cell.of(config)
    assert all(one.key in str(several.value) and "distance=tokens" in str(several.value) for one in artefacts())
    cells = [Cell.of({**config, "share": {"name": "kvsharer", "artefact": one.key}}) for one in artefacts()]
    assert cells[0].run_id != cells[1].run_id and first.run_id in [cell.run_id for cell in cells]
    assert cells[0].share_label == f"kvsharer 25 % {artefacts()[0].key[:8]}"
    with pytest.raises(ArtefactError, match="of another model"):
        Cell.of({**config, "model": {"name": "tiny-opt", "tiny": "opt"}, "share": {**cells[0].config["share"]}})
    with pytest.raises(ShareError, match="protocol h2o_local holds nothing to share"):
        Cell.of({**config, "protocol": {"name": "h2o_local"}, "share": cells[0].config["share"]})


def test_lm_eval_arguments_take_it():
    pytest.importorskip("lm_eval")
    from kvlab.lm_eval_model import cell_of

    kvlab(*CALIBRATE)
    cell = cell_of({"model": "tiny-llama", "policy": "h2o", "share": "kvsharer", "share.drop": 0.5})
    assert cell.share.drop == 0.5 and cell.share.artefact == artefacts()[0].key


def test_the_artefact_is_json_of_its_own_kind():
    kvlab(*CALIBRATE)
    (one,) = artefacts("kvsharer")
    assert json.loads(one.path.read_text())["content"] == one.content and not one.path.with_suffix(".safetensors").exists()
    assert one.about["threshold"] == -1 and one.about["order"] == "dissimilar" and one.about["fingerprint"] == "tiny llama"
    assert find("kvsharer", fingerprint="tiny llama", order="dissimilar", command="").key == one.key
