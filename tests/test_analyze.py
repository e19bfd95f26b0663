"""`kvlab analyze`: each statistic against a plain computation from a stock model's attention matrices; files; mistakes."""

import functools
import json
import re
import sys
import unicodedata
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from conftest import shared_model
from kvlab import Budget, attach, make_policy
from kvlab.analyze import ANALYSES, read
from kvlab.analyze.base import chunks, in_text_order, some_layers
from kvlab.analyze.setup import Setup, pieces
from kvlab.cache import voters
from kvlab.evals.texts import embedded_text
from kvlab.tiny import WINDOW, tiny_model, tiny_tokenizer
from running import kvlab

TOKENIZER = tiny_tokenizer()
LENGTH, TEXTS, THRESHOLD = 50, 2, 0.75
KINDS = ("llama", "opt", "mistral_swa")
"""GQA; as many KV heads as heads; a sliding window that is shorter than the text."""
TINY = ("--model", "tiny-llama", "--tokens", "40")


@functools.cache
def texts(length=LENGTH):
    return tuple(pieces(embedded_text().text, TOKENIZER, length, TEXTS))


def analysed(names=tuple(ANALYSES), kind="llama", length=LENGTH, threshold=THRESHOLD):
    """Analyses that have read the texts."""
    analyses = {name: ANALYSES[name](threshold) for name in names}
    read(Setup("tiny", shared_model(kind), TOKENIZER, texts(length)), list(analyses.values()))
    return analyses


@functools.cache
def tables(kind):
    """All tables: of each analysis and file."""
    return {name: analysis.tables() for name, analysis in analysed(kind=kind).items()}


# ------------------------------------------------------------------------------ what a stock model attends to


@functools.cache
def stock(kind):
    """(text, layer, kv_head) -> attention of its query heads, (group, queries, keys), from the model's own eager code."""
    model, found = tiny_model(kind, attn_implementation="eager"), {}
    for text, ids in enumerate(texts()):
        for layer, attention in enumerate(model(ids, output_attentions=True, use_cache=False).attentions):
            group = attention.shape[1] // kv_heads_of(model)
            for head in range(kv_heads_of(model)):
                found[text, layer, head] = attention[0, head * group : (head + 1) * group].double().numpy()
    return found


def kv_heads_of(model):
    return getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads


@functools.cache
def stock_vectors(kind):
    """(text, layer) -> queries and keys as they attended, (heads, tokens, head_dim)."""
    model, found = tiny_model(kind), {}
    now = {}

    def attention(module, query, key, value, attention_mask, **kwargs):
        found[now["text"], module.layer_idx] = query[0].numpy().copy(), key[0].numpy().copy()
        shared = query.shape[1] // key.shape[1]
        whole = torch.from_numpy(
            np.concatenate([stock(kind)[now["text"], module.layer_idx, head] for head in range(key.shape[1])])
        )
        return (whole.float() @ value[0].repeat_interleave(shared, 0)).transpose(0, 1)[None], None

    AttentionInterface.register("noted", attention)
    try:
        model.set_attn_implementation("noted")
        for text, ids in enumerate(texts()):
            now["text"] = text
            model(ids, use_cache=False)
    finally:
        del AttentionInterface._global_mapping["noted"]
    return found


def sees(kind, query, key):
    return key <= query and (kind != "mistral_swa" or key > query - WINDOW)


def mean_over(rows, *by):
    """{key: mean of values} of ((key, value), ...)."""
    found = {}
    for key, value in rows:
        found.setdefault(key, []).append(value)
    return {key: np.mean(values) for key, values in found.items()}


def test_the_models_differ_in_what_matters():
    assert {kind: kv_heads_of(shared_model(kind)) for kind in KINDS} == {"llama": 2, "opt": 4, "mistral_swa": 2}
    assert LENGTH > 2 * WINDOW


# ---------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("kind", KINDS)
def test_sparsity(kind):
    counted = {}
    for (_, layer, kv_head), heads in stock(kind).items():
        for number, attention in enumerate(heads):
            small = [
                attention[query, key] < 0.01 * max(attention[query])
                for query in range(LENGTH)
                for key in range(LENGTH)
                if sees(kind, query, key)
            ]
            counted.setdefault((layer, kv_head * len(heads) + number), []).append(np.mean(small))
    rows = tables(kind)["sparsity"][""]
    assert list(rows.columns) == ["layer", "head", "sparsity"] and len(rows) == 2 * 4
    assert rows.sparsity.between(0.05, 0.95).all(), "neither all nor nothing, or the test could not fail"
    for row in rows.itertuples():
        assert row.sparsity == pytest.approx(np.mean(counted[row.layer, row.head]), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_heavy_hitters(kind):
    half, expected, curves = LENGTH // 2, {}, {}
    for text in range(TEXTS):
        for layer in range(2):
            heads = [attention.mean(0) for place, attention in stock(kind).items() if place[:2] == (text, layer)]
            received = sorted((float(sum(head[:, key].sum() for head in heads)) for key in range(LENGTH)), reverse=True)
            curve = np.array(received) / sum(received)
            x, y = np.log([1, 2, 3, 4, 5]), np.log(curve[:5])  # a tenth of 50 ranks
            slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
            same = []
            for head in heads:
                final = sorted(range(half), key=lambda key, head=head: -head[:, key].sum())[: half // 5]
                early = sorted(range(half), key=lambda key, head=head: -head[:half, key].sum())[: half // 5]
                same.append(len(set(final) & set(early)) / (half // 5))
            numbers = [-slope, np.corrcoef(x, y)[0, 1] ** 2, curve[:2].sum(), curve[:5].sum(), curve[:10].sum(), np.mean(same)]
            expected.setdefault(layer, []).append(numbers)
            curves.setdefault(layer, []).append(curve)
    rows, drawn = tables(kind)["heavy_hitters"].values()
    assert list(rows.columns) == ["layer", "exponent", "r2", "top5", "top10", "top20", "overlap"]
    for row in rows.itertuples(index=False):
        assert list(row[1:]) == pytest.approx(list(np.mean(expected[row.layer], 0)), rel=1e-5)
    assert (rows.overlap < 1).any()
    assert list(drawn.columns) == ["layer", "rank", "share"] and drawn.groupby("layer")["rank"].max().tolist() == [LENGTH] * 2
    for row in drawn.itertuples():
        assert row.share == pytest.approx(np.mean(curves[row.layer], 0)[row.rank - 1], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_persistence(kind):
    half, found = LENGTH // 2, {}
    for (_, layer, _), heads in stock(kind).items():
        attention = heads.mean(0)
        first = {i for i in range(half) for t in range(1, half + 1) if attention[t - 1, i] > 1 / t}
        second = {i for i in range(half) for t in range(half + 1, LENGTH + 1) if attention[t - 1, i] > 1 / t}
        found.setdefault(layer, []).append([len(first & second) / len(second), len(first) / half, len(second) / half])
    rows = tables(kind)["persistence"][""]
    assert list(rows.columns) == ["layer", "persistence", "s1", "s2"]
    for row in rows.itertuples(index=False):
        assert list(row[1:]) == pytest.approx(list(np.mean(found[row.layer], 0)), abs=1e-9)
    assert (rows.persistence < 1).all()


def test_persistence_where_the_first_half_is_out_of_sight():
    """Each token sees itself alone: nothing of the first half matters later, so nothing was missed."""
    model = tiny_model("mistral_swa", sliding_window=1)
    analysis = ANALYSES["persistence"](THRESHOLD)
    read(Setup("tiny", model, TOKENIZER, texts()), [analysis])
    rows = analysis.tables()[""]
    assert (rows.s2 == 0).all() and (rows.persistence == 1).all()
    assert rows.s1.tolist() == pytest.approx([24 / 25] * 2), "all but the first, which gets what is average"


def test_the_printed_persistence_can_be_pasted(tmp_path, capsys):
    assert kvlab("analyze", "persistence", *TINY, "--output", str(tmp_path)) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("policy.persistence="))
    ratios = json.loads(line.partition("=")[2])
    assert ratios == pd.read_csv(tmp_path / "persistence.csv").persistence.round(4).tolist() and len(ratios) == 2
    cell = ["model=tiny-llama", "policy=scissorhands", "policy.layers=persistence", line, "protocol=stream", "logger=none"]
    small = ["task.context=1", "task.scored=63", "budget=tokens", "budget.tokens=32", f"output_dir={tmp_path}"]
    assert kvlab("run", "--dry-run", *cell, *small) == 0


def naive_member(attention, ids, threshold):
    """FastGen: (member, recovery) of one KV head, from the mean attention of its heads, (queries, keys)."""
    special = {i for i, token in enumerate(ids) if token in (0, 1, 2)}
    text = {i: TOKENIZER.decode([token]) for i, token in enumerate(ids) if i not in special}
    punct = {i for i, letter in text.items() if unicodedata.category(letter)[0] in "PS"}
    received = attention.sum(0)
    frequent = set(sorted(range(LENGTH), key=lambda key: -received[key])[: LENGTH * 3 // 10])
    sets = {"special": special}
    sets["special+punct"] = special | punct
    sets["special+punct+frequent"] = special | punct | frequent
    for name in [*sets, "special+punct+frequent+local"]:
        columns = sets.get(name, special | punct | frequent)
        near = LENGTH * 3 // 10 if name.endswith("local") else -1
        on_it = [sum(row[key] for key in range(LENGTH) if key in columns or t - key <= near) for t, row in enumerate(attention)]
        if np.mean(on_it) >= threshold:
            return name, np.mean(on_it)
    return "full", 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_heads(kind):
    members = set()
    for threshold in (0.7, 0.75, 0.95):
        rows = analysed(["heads"], kind, threshold=threshold)["heads"].tables()[""]
        assert list(rows.columns) == ["text", "layer", "head", "member", "recovery"]
        found = {(row.text, row.layer, row.head): (row.member, row.recovery) for row in rows.itertuples()}
        assert set(found) == set(stock(kind))
        for place, heads in stock(kind).items():
            member, recovery = naive_member(heads.mean(0), texts()[place[0]][0].tolist(), threshold)
            assert found[place] == (member, pytest.approx(recovery, abs=1e-5))
            members.add(member)
    assert len(members) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_profiled_as_the_policy_does_it(kind):
    rows = iter(tables(kind)["heads"][""].itertuples())
    model, policy = shared_model(kind), make_policy("fastgen", threshold=THRESHOLD)
    with attach(model, policy, Budget(), tokenizer=TOKENIZER) as session:
        for ids in texts():
            cache = session.new_cache()
            model(ids, cache=cache)
            for layer in cache.layers:
                profile = zip(layer.profile["member"][0].tolist(), layer.profile["recovery"][0].tolist(), strict=True)
                for member, recovery in profile:
                    row = next(rows)
                    assert (row.member, row.recovery) == (policy.members[member], pytest.approx(recovery, abs=1e-6))


@pytest.mark.parametrize("kind", KINDS)
def test_hash(kind):
    pairs = [(query, key) for query in range(LENGTH) for key in range(LENGTH) if sees(kind, query, key)]
    query_of, key_of = (list(side) for side in zip(*pairs, strict=True))
    found = {}
    for (text, layer), (queries, keys) in stock_vectors(kind).items():
        group = len(queries) // len(keys)
        for seed in range(3):
            directions = np.random.default_rng([seed, layer]).standard_normal((keys.shape[2], 64))
            for head, vectors in enumerate(queries):
                attention = stock(kind)[text, layer, head // group][head % group][query_of, key_of]
                differ = ((vectors @ directions > 0)[query_of] != (keys[head // group] @ directions > 0)[key_of]).cumsum(1)
                for bits in (4, 8, 16, 24, 32, 48, 64):
                    r = np.corrcoef(attention, bits - differ[:, bits - 1])[0, 1]
                    found.setdefault((bits, seed, layer), []).append(r)
    rows = tables(kind)["hash"][""]
    assert list(rows.columns) == ["bits", "seed", "layer", "r"] and len(rows) == len(found) == 7 * 3 * 2
    for row in rows.itertuples():
        assert row.r == pytest.approx(np.mean(found[row.bits, row.seed, row.layer]), abs=1e-5)
    assert rows.r.nunique() == len(rows)


# --------------------------------------------------------------------------------------------------- in chunks


def assert_same(found, expected):
    for name, parts in expected.items():
        for part, rows in parts.items():
            pd.testing.assert_frame_equal(found[name][part], rows, rtol=1e-6)


def test_chunks_change_nothing(monkeypatch):
    expected = tables("llama")
    sizes = []
    weights = voters.reference.weights
    monkeypatch.setattr(voters, "LOOK_BYTES", 7 * 4 * LENGTH * 4)  # seven queries of four heads; 50 is no multiple of it
    monkeypatch.setattr(voters.reference, "CHUNK", 3)  # which analyses see three by three
    monkeypatch.setattr(
        voters.reference, "weights", lambda queries, *rest: sizes.append(queries.shape[3]) or weights(queries, *rest)
    )
    assert_same({name: analysis.tables() for name, analysis in analysed().items()}, expected)
    assert set(sizes) == {7, 1}


def test_slots_may_stand_in_any_order():
    """A step whose slots are shuffled, an empty one among them, gives the same tables."""
    whole, shuffled = ({name: make(THRESHOLD) for name, make in ANALYSES.items()} for _ in range(2))

    def shuffle(step):
        order = torch.from_numpy(np.random.default_rng(0).permutation(LENGTH + 1))
        grown = {
            "positions": torch.nn.functional.pad(step.positions, (0, 1), value=-1)[..., order],
            "keys": torch.nn.functional.pad(step.keys, (0, 0, 0, 1), value=3.0)[:, :, order],
            "looks": lambda: ((torch.nn.functional.pad(look, (0, 1))[..., order], where) for look, where in step.looks()),
        }
        return replace(step, **grown)

    def watch(step):
        for analyses, seen in ((whole, step), (shuffled, shuffle(step))):
            for analysis in analyses.values():
                analysis.begin(seen, texts()[0])
                for chunk in chunks(seen):
                    analysis.see(chunk)
                analysis.end(seen)

    model = shared_model("llama")
    with attach(model, make_policy("full"), tokenizer=TOKENIZER, watch=watch) as session:
        model(texts()[0], cache=session.new_cache())
    results = [{name: analysis.tables() for name, analysis in analyses.items()} for analyses in (shuffled, whole)]
    assert_same(*results)


def test_values_of_slots_in_the_order_of_the_text():
    step = SimpleNamespace(positions=torch.tensor([[[2, -1, 0, 1], [0, 1, 2, -1]]]), now=torch.tensor([2]))
    found = in_text_order(step, torch.tensor([[[12, 99, 10, 11], [20, 21, 22, 99]]]))
    assert found.tolist() == [[10, 11, 12], [20, 21, 22]]


class Largest(TorchDispatchMode):
    """The most elements that a tensor had which was made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def test_memory_grows_with_the_length_and_not_its_square(monkeypatch):
    length = 400
    monkeypatch.setattr(voters, "LOOK_BYTES", 8 * 4 * length * 4)
    with Largest() as largest:
        analysed(length=length)
    assert 0 < largest.elements < length * length / 2, "a matrix of one head would be twice that"


# ------------------------------------------------------------------------------------------- the command line


def test_every_analysis_writes_its_files_and_says_what_it_found(tmp_path, capsys):
    code, out, err = kvlab("analyze", *TINY, "--texts", "2", "--output", str(tmp_path / "new" / "folder"), capsys=capsys)
    assert (code, err) == (0, "")
    folder = tmp_path / "new" / "folder"
    tables = {"sparsity", "heavy_hitters", "heavy_hitters_curve", "persistence", "heads", "hash"}
    others = {f"{name}{end}" for name in ANALYSES for end in (".png", ".json")}
    assert {path.name for path in folder.iterdir()} == {f"{name}.csv" for name in tables} | others
    assert out.count("tiny-llama, 2 texts of 40 tokens") == len(ANALYSES)
    for path in folder.iterdir():
        assert str(path) in out
        if path.suffix == ".csv":
            assert len(pd.read_csv(path)) and "NaN" not in path.read_text()
        elif path.suffix == ".json":
            (analysis,) = json.loads(path.read_text())["analyses"].values()
            assert len(analysis["rows"]) == len(pd.read_csv(path.with_suffix(".csv"))) and "NaN" not in path.read_text()
        else:
            assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_json_has_the_rows_of_the_files(tmp_path, capsys):
    wanted = ["heads", "persistence", "heads"]
    code, out, _ = kvlab("analyze", *wanted, *TINY, "--json", "--output", str(tmp_path), "--dtype", "float64", capsys=capsys)
    found = json.loads(out)
    assert code == 0 and (found["model"], found["tokens"], found["texts"], found["dtype"]) == ("tiny-llama", 40, 1, "float64")
    assert list(found["analyses"]) == ["heads", "persistence"], "those that were asked for, once"
    for name, analysis in found["analyses"].items():
        rows = pd.read_csv(tmp_path / f"{name}.csv")
        pd.testing.assert_frame_equal(pd.DataFrame(analysis["rows"]), rows, rtol=1e-6, check_dtype=False)
    assert found["analyses"]["persistence"]["lines"][-1].startswith("policy.persistence=[")


def test_the_threshold_is_what_a_set_must_hold(tmp_path):
    members = []
    for threshold in ("0.5", "1"):
        assert kvlab("analyze", "heads", *TINY, "--threshold", threshold, "--output", str(tmp_path)) == 0
        members.append(set(pd.read_csv(tmp_path / "heads.csv").member))
    assert members[1] == {"full"} != members[0]


def test_without_matplotlib_there_are_tables_and_a_hint(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = kvlab("analyze", "hash", "sparsity", *TINY, "--output", str(tmp_path), capsys=capsys)
    assert code == 0 and "files: " in out and ".png" not in out
    assert err.count("\n") == 1 and "pip install 'kvlab[plots]'" in err
    assert {path.name for path in tmp_path.iterdir()} == {"hash.csv", "hash.json", "sparsity.csv", "sparsity.json"}


def test_a_file_is_read_in_pieces_that_begin_as_a_text_does(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("".join(chr(65 + n % 26) for n in range(78)))
    found = pieces((tmp_path / "text.txt").read_text(), TOKENIZER, 40, 2)
    assert [TOKENIZER.decode(ids[0]) for ids in found] == [
        "<s>ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFGHIJKLM",
        "<s>NOPQRSTUVWXYZABCDEFGHIJKLMNOPQRSTUVWXYZ",
    ]
    arguments = ("analyze", "sparsity", *TINY, "--texts", "2", "--output", str(tmp_path / "out"))
    own = kvlab(*arguments, "--file", str(tmp_path / "text.txt"), capsys=capsys)
    assert own[0] == 0 and own[1] != kvlab(*arguments, capsys=capsys)[1]


WRONG = {
    "analysis": (
        ["sparsty"],
        "analysis sparsty: there is no such analysis (did you mean sparsity?); there are sparsity, heavy",
    ),
    "missing file": (["--file", "gone.txt"], "--file=gone.txt: there is no such file"),
    "empty file": (["--file", "empty.txt"], "--file=empty.txt: the file is empty"),
    "no text": (["--file", "binary.txt"], "--file=binary.txt: no UTF-8 text"),
    "table without text": (["--file", "table.csv"], "no row has a field 'text'; it has: title; give one the name"),
    "short file": (["--file", "short.txt"], "the text has 17 tokens, and --texts 1 of --tokens 40 need 39: lower them"),
    "too many texts": (["--texts", "100000"], "and --texts 100000 of --tokens 40 need 3900000"),
    "few tokens": (["--tokens", "19"], "--tokens 19: use at least 20"),
    "many tokens": (["--tokens", "4096"], "--tokens 4096: tiny-llama reads 2048 tokens at most"),
    "threshold": (["--threshold", "1.5"], "'1.5': use a number above 0, at most 1"),
    "model": (["--model", "tiny-lama"], "did you mean tiny-llama"),
    "dtype": (["--dtype", "float8"], "float8"),
    "folder": (["--output", "short.txt/x"], "--output=short.txt/x can't be written"),
    "option": (["--token", "40"], "--token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_command_says_what_to_change(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "empty.txt": b"",
        "short.txt": b"Only a few words.",
        "binary.txt": b"\xff\xfe",
        "table.csv": b"title\na\n",
    }.items():
        (tmp_path / name).write_bytes(content)
    arguments, says = WRONG[case]
    code, out, err = kvlab("analyze", *TINY, *arguments, capsys=capsys)
    lines = err.strip().splitlines()
    assert code == 2 and says in lines[-1] and out == "", err
    assert len(lines) == 1 or lines[0].startswith("usage:"), err
    assert not (tmp_path / "outputs").exists()


def test_a_table_shows_a_few_layers_and_their_mean():
    rows = pd.DataFrame({"layer": range(30), "share": np.arange(30) / 30})
    shown = some_layers(rows)
    assert shown.layer.tolist() == [0, 4, 8, 12, 17, 21, 25, 29, "all"]
    assert shown.share.tolist() == pytest.approx([0, 4 / 30, 8 / 30, 12 / 30, 17 / 30, 21 / 30, 25 / 30, 29 / 30, 14.5 / 30])
    assert some_layers(rows[:2]).layer.tolist() == [0, 1, "all"]


def test_the_help_names_every_analysis(capsys):
    code, out, _ = kvlab("analyze", "--help", capsys=capsys)
    assert code == 0 and all(name in out for name in ANALYSES)
    assert re.search(r"examples:\n  kvlab analyze ", out)
