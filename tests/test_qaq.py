"""QAQ against its slow reference: bits, codes, scales, zeros and outliers to the last bit; storage; whole models."""

import copy
import json
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from conftest import random_ids, shared_model
from kvlab import Budget, attach, make_policy
from kvlab.analyze.setup import pieces
from kvlab.cache.encoded import EncodedStore
from kvlab.cache.voters import Voters
from kvlab.calibrate.qaq import query_norms
from kvlab.cells import Cell
from kvlab.codecs import CodecError, make_codec
from kvlab.codecs.attended import Seen
from kvlab.codecs.qaq import Qaq
from kvlab.evals.texts import embedded_text
from kvlab.kernels import reference
from kvlab.kernels.dispatch import choose
from kvlab.kernels.reference import AttentionRule
from kvlab.rows import RowPlanes
from kvlab.tiny import tiny_model, tiny_tokenizer
from naive_codecs import pack_bits
from naive_qaq import NaiveQaqCache, Settings
from running import kvlab

HEADS, GROUP, DIM = 2, 2, 12


def settings_of(codec):
    """The reference's; what is reckoned anew without an exact copy has the range that its codes could span."""
    return Settings(**asdict(codec), spread="first" if codec.promote else "scale")


class Batch:
    """A store driven as a layer drives it, and a reference for each sequence."""

    def __init__(self, codec, batch=2, dtype=torch.float32, seed=0, kernels="reference", constant=False):
        self.codec, self.dtype, self.constant = codec, dtype, constant
        self.draw = torch.Generator().manual_seed(seed)
        like = torch.zeros(batch, HEADS, 1, DIM, dtype=dtype)
        self.store = EncodedStore.of(codec, like, like, {}, choose(kernels, "cpu", dtype))
        self.naive = [NaiveQaqCache(settings_of(codec)) for _ in range(batch)]
        self.seen = torch.zeros(batch, dtype=torch.long)
        self.rule = AttentionRule(scaling=DIM**-0.5)

    def numbers(self, heads, tokens, spread):
        """Tokens of very different sizes."""
        shape = (len(self.naive), heads, tokens)
        drawn = torch.randn(*shape, DIM, generator=self.draw)
        size = torch.randn(*shape, 1, generator=self.draw)
        return (drawn * (size * spread).exp()).to(self.dtype)

    def come(self, real):
        """Tokens of a batch, (batch, tokens) bool, False for pads: keys, values, queries, positions."""
        tokens = real.shape[1]
        keys, values = (self.numbers(HEADS, tokens, 1.0) for _ in range(2))
        if self.constant:
            keys[:, :, ::3], values[:, 1, ::2] = 0.3, -2.0
        positions = torch.where(real, self.seen[:, None] + real.cumsum(1) - 1, -1)
        self.seen += real.sum(1)
        return keys, values, self.numbers(HEADS * GROUP, tokens, 0.3), positions

    def told(self, kind, keys, values, queries, real):
        for row, naive in enumerate(self.naive):
            some = real[row]
            if some.any():
                yield (
                    row,
                    naive.event(
                        kind,
                        *(
                            part[row][:, some].to(torch.float64 if self.dtype == torch.float64 else torch.float32).numpy()
                            for part in (keys, values, queries)
                        ),
                    ),
                )

    def turn(self, real):
        keys, values, queries, positions = self.come(real)
        self.store.append(keys, values, positions, {})
        last = Voters(queries.unflatten(1, (HEADS, GROUP)), positions).last(self.codec.watches)
        view = self.store.view()
        attention = reference.weights(last.queries, view.keys, last.positions, view.positions, self.rule)
        self.store.observe(Seen(last.queries, last.positions, True, lambda: attention.amax(2)))
        self.store.seal(True, None)
        dict(self.told("turn", keys, values, queries, real))

    def step(self, real):
        """Also compares what comes out."""
        real = real[:, None]
        keys, values, queries, positions = self.come(real)
        rows = None if real.all() else real[:, 0].numpy()
        self.store.reserve(None, rows)
        self.store.insert(keys, values, positions, {}, rows)
        queries_ = queries.unflatten(1, (HEADS, GROUP))
        out, attention = self.store.attend(queries_, positions, self.store.view(), self.rule)
        self.store.observe(Seen(queries_, positions, False, lambda: attention.amax(2)))
        self.store.seal(False, None)
        for row, wanted in self.told("step", keys, values, queries, real):
            torch.testing.assert_close(out[row].flatten(0, 1).double(), torch.from_numpy(wanted).double(), rtol=2e-5, atol=2e-5)

    def check(self):
        """All that is held is what the references hold."""
        for side, name in zip(self.store.sides, ("keys", "values"), strict=True):
            for row, naive in enumerate(self.naive):
                for head, groups in enumerate(getattr(naive, name).groups):
                    assert held(side, row, head) == [stored(group) for group in groups], (name, row, head)

    def widths(self):
        return Counter(
            group.bits for naive in self.naive for side in (naive.keys, naive.values) for row in side.groups for group in row
        )


def stored(group):
    """What a group of the reference is in storage."""
    codes = pack_bits(group.codes, group.bits) if group.bits else b""
    return (
        group.bits,
        codes,
        float(group.scale),
        float(group.zero),
        {place: float(value) for place, value in group.outliers.items()},
    )


def slots(planes, name, row, head):
    start = int(planes._offsets[row, head])
    return planes.planes[name][start : start + int(planes.lengths[row, head])]


def held(side, row, head):
    """The same of a side's row, walked by hand."""
    codes = {width: iter(slots(part, "code", row, head)) for width, part in side.codes.codes.items()}
    exact = iter(())
    counts = [0] * int(side.codes.lengths[row, head])
    if side.outliers is not None:
        places, values = (slots(side.outliers.items, name, row, head).tolist() for name in ("place", "value"))
        exact, counts = iter(zip(places, values, strict=True)), slots(side.outliers.counts, "count", row, head).tolist()
    found = []
    rows = (slots(side.codes.groups, name, row, head).tolist() for name in ("bits", "scale", "zero"))
    for bits, scale, zero, count in zip(*rows, counts, strict=True):
        code = bytes(next(codes[bits]).tolist()) if bits else b""
        found.append((bits, code, scale, zero, dict(next(exact) for _ in range(count))))
    assert not any(list(rest) for rest in codes.values()) and not list(exact), "nothing is left over"
    return found


def pads(*lengths, left=True):
    """(batch, longest) bool."""
    longest = max(lengths)
    rows = [[False] * (longest - length) + [True] * length for length in lengths]
    return torch.tensor(rows if left else [row[::-1] for row in rows])


def drive(batch, steps=8, second=True):
    """A turn of rows of different lengths, steps in which rows pause, another turn, and more steps."""
    count = len(batch.naive)
    batch.turn(pads(*(17, 5, 9)[:count]))
    batch.check()
    for number in range(steps):
        real = torch.ones(count, dtype=torch.bool)
        real[number % count] = number % 3 != 1 or count == 1
        batch.step(real)
        batch.check()
    if second:
        batch.turn(pads(*(2, 7, 3)[:count], left=False))
        batch.check()
        for paused in (0, count):  # bits of a row that pauses stay what they were at the turn's end
            batch.step(torch.arange(count) != (paused if count > 1 else count))
            batch.check()
    return batch


VARIED = {"bits_min": 0, "bits_max": 5, "error_values": 0.4, "q_norm": 40.0, "outliers": 0.1, "window": 3}


@pytest.mark.parametrize("level", ["head", "layer"])
@pytest.mark.parametrize("formula", ["paper", "code"])
@pytest.mark.parametrize("change", [{"dynamic": False}, {}, {"promote": True}], ids=["fixed", "demotes", "promotes"])
def test_equals_the_reference(level, formula, change):
    batch = drive(Batch(Qaq(**VARIED, level=level, formula=formula, **change)))
    assert len(batch.widths()) >= 4, "bits differ"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types(dtype):
    batch = Batch(Qaq(**VARIED, promote=True), dtype=dtype, seed=1)
    drive(batch, steps=2)


@pytest.mark.parametrize("level", ["head", "layer"])
def test_sequences_selected_and_copied(level):
    batch = drive(Batch(Qaq(**VARIED, level=level, promote=True), seed=10), steps=2, second=False)
    other = copy.copy(batch)
    other.store, other.naive = batch.store.copy(), [copy.deepcopy(batch.naive[row]) for row in (1, 0, 1)]
    other.store.select_rows(torch.tensor([1, 0, 1]))
    other.seen = batch.seen[[1, 0, 1]]
    for _ in range(4):
        other.step(torch.ones(3, dtype=torch.bool))
        other.check()
    batch.check()
    batch.step(torch.ones(2, dtype=torch.bool))
    batch.check()


def test_three_rows_from_the_first_token_on():
    batch = Batch(Qaq(**VARIED), batch=3, seed=2)
    for real in ([1, 0, 1], [1, 1, 0], [0, 0, 1], [1, 1, 1], [1, 1, 1]):
        batch.step(torch.tensor(real, dtype=torch.bool))
        batch.check()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"outliers": 0.0},
        {"outliers": 0.0, "bits_min": 0, "bits_max": 2, "level": "layer"},
        {"window": 1, "error_values": 0.3},
        {"bits_min": 3, "bits_max": 8, "error_values": 0.05},
        {"bits_min": 16, "bits_max": 16},
        {"error_keys": 0.0, "error_values": 0.0},
        {"outliers": 0.9, "promote": True, "bits_min": 0},
    ],
    ids=str,
)
def test_settings(settings):
    drive(Batch(Qaq(**settings), seed=3), steps=3)


@pytest.mark.parametrize("promote", [False, True])
def test_constant_groups(promote):
    drive(Batch(Qaq(**VARIED, promote=promote), seed=4, constant=True), steps=3)


def test_compiled_kernels_read_the_same():
    drive(Batch(Qaq(**VARIED), kernels="cpu", seed=5), steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", ["head", "layer"])
@pytest.mark.parametrize("change", [{"dynamic": False}, {}, {"promote": True}], ids=["fixed", "demotes", "promotes"])
def test_equals_the_reference_at_length(seed, level, change):
    draw = np.random.default_rng(seed)
    settings = {
        "bits_min": int(draw.integers(0, 3)),
        "bits_max": int(draw.integers(3, 9)),
        "error_values": float(draw.choice([0.03, 0.3, 1.0])),
        "q_norm": float(draw.choice([10, 100, 1000])),
        "window": int(draw.integers(1, 7)),
        "outliers": float(draw.choice([0.0, 0.01, 0.2])),
        "formula": str(draw.choice(["paper", "code"])),
    }
    drive(
        Batch(Qaq(**settings, level=level, **change), batch=3, seed=100 + seed, kernels=("reference", "cpu")[seed % 2]),
        steps=20,
    )


# ------------------------------------------------------------------------------------------------------ storage


def reachable(thing, seen=None):
    """All tensors that an object holds, each storage once."""
    seen = {} if seen is None else seen
    if isinstance(thing, torch.Tensor):
        seen[thing.untyped_storage().data_ptr(), thing.device] = thing.untyped_storage().nbytes()
    elif isinstance(thing, dict):
        for part in thing.values():
            reachable(part, seen)
    elif isinstance(thing, list | tuple):
        for part in thing:
            reachable(part, seen)
    elif type(thing).__module__.startswith("kvlab.") and hasattr(thing, "__dict__") and not isinstance(thing, Qaq):
        hidden = (
            ("_device_lengths", "_device_offsets", "_dense_index", "kernels") if isinstance(thing, RowPlanes) else ("kernels",)
        )
        reachable({name: part for name, part in vars(thing).items() if name not in hidden}, seen)
    return seen


@pytest.mark.parametrize("change", [{"dynamic": False}, {}, {"promote": True}, {"outliers": 0.0, "level": "layer"}], ids=str)
def test_bytes_are_those_of_all_storages(change):
    batch = drive(Batch(Qaq(**VARIED | change)), steps=2, second=False)
    level = batch.codec.level
    store = batch.store
    total = sum(sum(reachable(side).values()) for side in store.sides)
    assert store.kv_bytes + store.offload_bytes == total == store.row_bytes.sum() + store.offload_bytes
    numbers = int(batch.seen.sum()) * HEADS
    at_least = 2 * numbers * (DIM * 4) + 2 * 4 * (numbers if level == "head" else numbers // HEADS)
    assert (at_least <= store.offload_bytes < 3 * at_least) if batch.codec.promote else store.offload_bytes == 0


def test_bytes_by_the_formula():
    batch = Batch(Qaq(**VARIED, dynamic=False), batch=1)
    batch.turn(pads(40))
    keys, values = batch.store.sides
    groups = 40 * HEADS
    for side in (keys, values):
        bits = np.concatenate([[bits for bits, *_ in held(side, 0, head)] for head in range(HEADS)])
        outliers = int(side.outliers.counts.planes["count"].sum())
        parts = side.bytes_by_part
        assert parts["codes"] == sum(-(-DIM * width // 8) for width in bits.tolist())
        assert parts["scales"] == parts["zeros"] == 2 * groups
        assert (parts["outliers"], parts["outlier_indices"]) == (4 * outliers, 2 * outliers)
        assert parts["bookkeeping"] == 2 * groups + HEADS * 2 * 4 + 8  # widths and counts; thresholds; tokens seen
        assert parts["full_precision"] == 0


def test_outliers_are_the_tails():
    batch = Batch(Qaq(outliers=0.1), batch=1)
    batch.turn(pads(30))
    k = 30 * DIM // 20
    for side, naive in zip(batch.store.sides, (batch.naive[0].keys, batch.naive[0].values), strict=True):
        for head in range(HEADS):
            exact = np.stack(naive.exact[head])
            order = exact.flatten().argsort()
            tails = {*order[:k].tolist(), *order[-k:].tolist()}
            found = {t * DIM + place for t, group in enumerate(held(side, 0, head)) for place in group[4]}
            assert found == tails
            decoded = side.dense()[0, head].numpy().flatten()
            assert (decoded[list(tails)] == exact.flatten()[list(tails)]).all()


@pytest.mark.parametrize("promote", [False, True])
def test_only_what_gets_other_bits_is_touched(promote):
    batch = Batch(Qaq(**VARIED, promote=promote), seed=6)
    batch.turn(pads(20, 12))
    changes = Counter()
    for _ in range(10):
        before = [[held(side, row, head) for row in range(2) for head in range(HEADS)] for side in batch.store.sides]
        batch.step(torch.ones(2, dtype=torch.bool))
        after = [[held(side, row, head) for row in range(2) for head in range(HEADS)] for side in batch.store.sides]
        for old_side, new_side in zip(before, after, strict=True):
            for old_row, new_row in zip(old_side, new_side, strict=True):
                for old, new in zip(old_row, new_row[:-1], strict=True):
                    changes[np.sign(new[0] - old[0])] += 1
                    assert (old == new) == (old[0] == new[0]) and old[4] == new[4]
    assert changes[-1] and changes[0] and bool(changes[1]) == promote


def test_promotion_is_from_the_exact_copy():
    """What has just got more bits is as near to the exact numbers as if it had never had fewer."""
    batch = Batch(Qaq(**VARIED | {"outliers": 0.0}, promote=True), batch=1, seed=7)
    batch.turn(pads(20))
    values, naive, raised = batch.store.sides[1], batch.naive[0].values, 0
    for _ in range(15):
        before = [held(values, 0, head) for head in range(HEADS)]
        batch.step(torch.ones(1, dtype=torch.bool))
        for head in range(HEADS):
            for t, (old, new) in enumerate(zip(before[head], held(values, 0, head), strict=False)):
                if new[0] > old[0]:
                    error = np.abs(values.dense()[0, head, t].numpy() - naive.exact[head][t]).max()
                    assert error <= new[2] / 2 * 1.001
                    raised += old[0] > 0
    assert raised


@pytest.mark.parametrize("formula", ["paper", "code"])
def test_more_attention_never_fewer_bits(formula):
    codec = Qaq(bits_min=0, bits_max=8, formula=formula, error_values=0.3)
    share = torch.linspace(0, 1, 60)
    same = torch.full((60,), 30)
    bits = codec.bits(torch.full((60,), 3.0), share, same, same < 0)
    assert bits.tolist() == sorted(bits.tolist()) and bits[0] == 0 and bits[-1] > 3
    none = Qaq(error_values=0.0, formula=formula).bits(torch.tensor([3.0, 3.0, 0.0]), share[[0, 1, 1]], same[:3], same[:3] < 0)
    assert none.tolist() == [1, 4, 1]
    paper, code = (
        Qaq(bits_min=0, bits_max=8, formula=formula).bits(share * 20, None, same, same < 0) for formula in ("paper", "code")
    )
    assert (code <= paper).sum() >= 55 and (code < paper).any()


def test_tokens_leave_in_order():
    """What is left is what the others would be, had these never been looked at."""
    batch = Batch(Qaq(**VARIED, promote=True), seed=8)
    batch.turn(pads(20, 12))
    store, view = batch.store, batch.store.view()
    kept = torch.rand(view.positions.shape, generator=batch.draw) < 0.6
    kept &= view.positions >= 0
    before = [[held(side, row, head) for row in range(2) for head in range(HEADS)] for side in store.sides]
    weights = store.sides[1].attended.largest().split(store.lengths.ravel().tolist())
    store.keep(kept, view, None)
    for side, rows in zip(store.sides, before, strict=True):
        for (row, head), old in zip(np.ndindex(2, HEADS), rows, strict=True):
            inside = kept[row, head].nonzero()[:, 0].tolist()
            assert held(side, row, head) == [old[slot] for slot in inside]
    left = store.sides[1].attended.largest().split(store.lengths.ravel().tolist())
    for part, old, mask in zip(left, weights, kept.flatten(0, 1), strict=True):
        assert part.equal(old[mask[: len(old)]])
    assert (store.sides[0].exact.lengths == store.lengths).all()


# --------------------------------------------------------------------------------------------------- whole models


def run(codec, ids, mask=None, steps=6, more=None, kind="llama", policy="full", settings=None, budget=None):
    """Logits of a prompt and of steps, and the cache."""
    model = shared_model(kind)
    mask = torch.ones_like(ids) if mask is None else mask
    more = random_ids(len(ids), steps, seed=9) if more is None else more
    with attach(model, make_policy(policy, **settings or {}), budget, codec=codec, kernels="reference") as session:
        cache = session.new_cache()
        found = [model(ids, attention_mask=mask, cache=cache, **places(mask)).logits[:, -1:]]
        for number in range(steps):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            now = {name: part[:, -1:] for name, part in places(mask).items()}
            found.append(model(more[:, number : number + 1], attention_mask=mask, cache=cache, **now).logits)
    return torch.cat(found, 1), cache


def places(mask):
    """Positions that pads don't shift."""
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


MODEL = make_codec("qaq", bits_min=0, error_values=0.3, q_norm=30.0)


@pytest.mark.parametrize("level", ["head", "layer"])
def test_sixteen_bits_are_nearly_the_full_cache(level):
    ids = random_ids(2, 40)
    full, _ = run((), ids)
    found, _ = run(make_codec("qaq", bits_min=16, bits_max=16, outliers=0.0, level=level), ids)
    torch.testing.assert_close(found, full, rtol=0, atol=2e-3)
    few, _ = run(make_codec("qaq", bits_max=1, level=level), ids)
    assert (few - full).abs().max() > 0.1


@pytest.mark.parametrize(
    "codec", [MODEL, make_codec("qaq", bits_min=0, error_values=0.3, level="layer", promote=True)], ids=["head", "layer"]
)
def test_a_padded_batch_is_each_prompt_alone(codec):
    ids, mask = random_ids(3, 30), torch.ones(3, 30, dtype=torch.long)
    lengths = (30, 19, 4)
    for row, length in enumerate(lengths):
        mask[row, : 30 - length] = 0
    more = random_ids(3, 6, seed=9)
    together, cache = run(codec, ids, mask, more=more)
    for row, length in enumerate(lengths):
        logits, alone = run(codec, ids[row : row + 1, 30 - length :], more=more[row : row + 1])
        torch.testing.assert_close(together[row], logits[0], rtol=1e-4, atol=1e-4)
        for many, one in zip(cache.layers, alone.layers, strict=True):
            for side, single in zip(many.store.sides, one.store.sides, strict=True):
                for head in range(side.codes.lengths.shape[1]):
                    bits = [[group[0] for group in held(part, which, head)] for part, which in ((side, row), (single, 0))]
                    assert bits[0] == bits[1]


def test_forks_and_rows_are_independent():
    model, ids = shared_model("llama"), random_ids(2, 24)
    codec = make_codec("qaq", bits_min=0, error_values=0.3, q_norm=30.0, promote=True)
    with attach(model, make_policy("full"), codec=codec, kernels="reference") as session:
        cache = session.new_cache()
        model(ids, cache=cache)
        before = snapshot(cache)
        fork = cache.fork()
        fork.reorder_cache(torch.tensor([1, 0, 1]))
        token = random_ids(3, 1, seed=4)
        found = model(token, cache=fork).logits
        assert snapshot(cache) == before
        wanted = model(token[:2].flip(0), cache=cache).logits
        torch.testing.assert_close(found[:2].flip(0), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            model(token, cache=fork).logits[:2].flip(0),
            model(token[:2].flip(0), cache=cache).logits,
            rtol=1e-4,
            atol=1e-4,
        )


def snapshot(cache):
    return [
        [held(side, row, head) for row, head in np.ndindex(*side.codes.lengths.shape)]
        for layer in cache.layers
        for side in layer.store.sides
    ]


@pytest.mark.parametrize("kind", ["opt", "gemma3", "mistral_swa"])
def test_other_models(kind):
    """Sixteen bits are the full cache, also where tokens leave a sliding window."""
    ids = random_ids(2, 60)
    full, _ = run((), ids, kind=kind, steps=20)
    found, cache = run(make_codec("qaq", bits_min=16, bits_max=16), ids, kind=kind, steps=20)
    torch.testing.assert_close(found, full, rtol=0, atol=5e-3)
    for layer in cache.layers:
        if layer.rule.window is not None:
            assert layer.store.lengths.max() < layer.rule.window + 16


def test_policies_that_fit_and_that_do_not():
    codec, budget = make_codec("qaq"), Budget(ratio=0.5)
    found, cache = run(
        codec, random_ids(2, 40), policy="snapkv", budget=budget, settings={"after_prompt": "grow", "obs_window": 4}
    )
    assert found.isfinite().all() and (cache.kept_len == 20 + 6).all()
    cases = {"h2o": {}, "snapkv": {}, "adakv": {"after_prompt": "grow"}}
    for policy, settings in cases.items():
        joint = make_codec("qaq", level="layer" if policy == "adakv" else "head")
        with pytest.raises(CodecError, match="level=head" if policy == "adakv" else "codec=int4"):
            joint.check_policy(make_policy(policy, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits_max": 9}, "0 to 8 in this order, or both 16"),
        ({"bits_min": 5}, "0 to 8 in this order"),
        ({"bits_max": 16}, "or both 16"),
        ({"window": 0}, "window=0: use at least 1"),
        ({"q_norm": 0.0}, "q_norm above 0"),
        ({"error_keys": -1.0}, "at least 0"),
        ({"outliers": 1.0}, "below 1"),
        ({"promote": True, "dynamic": False}, "dynamic=true"),
        ({"level": "token"}, "one of head, layer"),
        ({"formula": "released"}, "one of paper, code"),
    ],
)
def test_settings_that_can_not_be(settings, message):
    with pytest.raises(CodecError, match=message):
        make_codec("qaq", **settings)


def test_results_say_that_there_is_a_copy():
    config = {
        "model": {"name": "tiny-llama", "tiny": "llama"}, "policy": {"name": "full"}, "task": {"name": "perplexity"},
        "protocol": {"name": "prompt"}, "logger": {"name": "none"}, "name": "x",
    }  # fmt: skip
    for promote, labels in ((True, ["copy on the CPU"]), (False, [])):
        assert Cell.of({**config, "codec": {"qaq": {"name": "qaq", "promote": promote}}}).labels == labels


# ----------------------------------------------------------------------------------------------------- calibration

CALIBRATE = ("calibrate", "qaq", "--model", "tiny-llama", "--tokens", "40")


def stock_norms(model, ids):
    """Squared lengths of the queries that a model's attention gets, layer by layer."""
    found = {}

    def noted(module, query, key, value, attention_mask, **kwargs):
        found[module.layer_idx] = [float((vector.double() ** 2).sum()) for head in query[0] for vector in head]
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("noted", noted)
    try:
        model.set_attn_implementation("noted")
        model(ids, use_cache=False)
    finally:
        del AttentionInterface._global_mapping["noted"]
    return [found[layer] for layer in sorted(found)]


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_query_lengths_are_those_of_the_stock_model(kind):
    texts = [random_ids(1, 20), random_ids(1, 20, seed=1)]
    found = query_norms(shared_model(kind), texts)
    parts = [stock_norms(tiny_model(kind), ids) for ids in texts]
    wanted = np.array([[*first, *second] for first, second in zip(*parts, strict=True)])
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_calibrate_says_what_to_use_and_keeps_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path))
    code, out, err = kvlab(*CALIBRATE, capsys=capsys)
    assert (code, err) == (0, "")
    (file,) = (tmp_path / "calibration").iterdir()
    content = json.loads(file.read_text())
    ids = pieces(embedded_text().text, tiny_tokenizer(), 40, 1, from_end=True)[0]
    norms = sorted(norm for layer in stock_norms(tiny_model("llama"), ids) for norm in layer)
    place = 0.9 * (len(norms) - 1)
    decile = norms[int(place)] + (place % 1) * (norms[int(place) + 1] - norms[int(place)])
    assert content["content"]["q_norm"] == pytest.approx(decile, rel=1e-3)
    assert f"codec.qaq.q_norm={content['content']['q_norm']}" in out and str(file) in out
    assert make_codec("qaq", q_norm=content["content"]["q_norm"]).label.startswith("qaq q_norm=")
    kvlab(*CALIBRATE)
    assert len(list(file.parent.iterdir())) == 1, "the same again"
    kvlab(*CALIBRATE, "--texts", "2")
    assert len(list(file.parent.iterdir())) == 2, "another text"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qag"], "calibration qag: there is no such calibration (did you mean qaq?); there are eigen, kvsharer, qaq"),
        (["qaq", "--file", "gone.txt"], "--file=gone.txt"),
    ],
)
def test_calibrations_that_can_not_be(arguments, message, capsys):
    code, out, err = kvlab("calibrate", *arguments, "--model", "tiny-llama", capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err
