"""Eigen Attention: bases against what stock models compute, the cache against a stock one that is projected by hand."""

import functools
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import naive_eigen
from conftest import random_ids, shared_model
from contracts.helpers import PAD, Feed, assert_near, padded, rows_of, stock_cache, storages, talk, tensors_in
from kvlab import Budget, attach, make_policy
from kvlab.analyze.setup import Setup
from kvlab.artefacts import ArtefactError
from kvlab.cache.layer import KVLayer
from kvlab.calibrate import make_calibration, run_calibration
from kvlab.calibrate.bases import candidates, kq_bases, outer, rank, svd_bases
from kvlab.calibrate.eigen import curves_of, errors_of, sums_of
from kvlab.calibrate.layers import decoder_layers
from kvlab.codecs import CodecError, make_codec
from kvlab.codecs.eigen import Point, Projected, within
from kvlab.support import rotates
from kvlab.tiny import tiny_families, tiny_model, tiny_tokenizer
from running import TINY, kvlab, results

SLOW = pytest.mark.slow
TEXTS = (random_ids(1, 48, seed=5), random_ids(1, 48, seed=6))


def models(*fast):
    """All families, these on each push."""
    return pytest.mark.parametrize("tiny", [f if f in fast else pytest.param(f, marks=SLOW) for f in tiny_families()])


@functools.cache
def directions(tiny, basis):
    """What calibration finds of each layer."""
    model = shared_model(tiny)
    return [sums.directions(basis, rotates(model)) for sums in sums_of(model, TEXTS, rotates(model))]


def projected(tiny, keys=16, values=16, basis="svd", layers=None):
    """A codec that holds so many numbers; of 16, and in all layers or these."""
    found = {index: layer.first(keys, values) for index, layer in enumerate(directions(tiny, basis))}
    return Projected(rotates(shared_model(tiny)), {index: found[index] for index in layers or found})


@contextmanager
def session_of(tiny, codec, policy="full", budget=None, dtype=torch.float32, **settings):
    model = shared_model(tiny) if dtype == torch.float32 else shared_model(tiny, dtype)
    made = make_policy(policy, **settings)
    with attach(model, made, budget, codec=codec, tokenizer=tiny_tokenizer()) as session:
        yield session


def read(feed, prompt, more):
    """Logits of a prompt and of tokens decoded after it."""
    return torch.cat([feed(prompt), feed.each(more)], 1)


# --------------------------------------------------------------------------------------------------------- what bases are


def test_bases_are_those_of_the_vectors_stacked():
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(2, 300, 8, generator=generator) * torch.logspace(0, -5, 8) @ torch.randn(8, 8, generator=generator)
    left, sigma, right = torch.linalg.svd(mixed.double(), full_matrices=False)
    found = svd_bases(outer(mixed[:, :100]) + outer(mixed[:, 100:]))
    torch.testing.assert_close(found.sigma, sigma, rtol=1e-5, atol=0)
    torch.testing.assert_close((found.down.mT @ right.mT).abs(), torch.eye(8).double().expand(2, 8, 8), rtol=0, atol=1e-4)


@pytest.mark.parametrize("basis", ["svd", "kq"])
def test_products_lose_least_by_kq(basis):
    generator = torch.Generator().manual_seed(1)
    keys, queries = (torch.randn(1, 200, 8, generator=generator) @ torch.randn(8, 8, generator=generator) for _ in range(2))
    exact = (queries.double() @ keys.double().mT)[0]
    found = kq_bases(outer(keys), outer(queries), 200) if basis == "kq" else svd_bases(outer(keys) + outer(queries))
    torch.testing.assert_close(found.down @ found.up, torch.eye(8).double()[None], rtol=0, atol=1e-9)
    sigma = torch.linalg.svdvals(exact)
    for count in range(1, 9):
        near = (queries.double() @ ((keys.double() @ found.down[..., :count]) @ found.up[:, :count]).mT)[0]
        lost, least = float((near - exact).norm()), float(sigma[count:].norm())
        assert lost == pytest.approx(least, abs=1e-9 * float(sigma[0])) if basis == "kq" else lost >= least - 1e-6


def test_directions_that_keys_do_not_have_are_held_as_they_are():
    generator = torch.Generator().manual_seed(2)
    flat = torch.randn(1, 50, 5, generator=generator).double() @ torch.randn(5, 8, generator=generator).double()
    found = kq_bases(outer(flat), outer(torch.randn(1, 50, 8, generator=generator)), 50)
    other = torch.randn(3, 8, generator=generator).double()
    torch.testing.assert_close(other @ found.down[0] @ found.up[0], other, rtol=0, atol=1e-9)
    five = flat @ found.down[..., :5] @ found.up[:, :5]
    torch.testing.assert_close(five, flat, rtol=0, atol=1e-9)


def test_ranks_are_counted_below_the_share():
    sigma = torch.tensor([[4.0, 3, 2, 1], [7, 2, 1, 0]])  # shares .4 .7 .9 1 and .7 .9 1 1
    assert [rank(sigma, eps) for eps in (1.0, 0.95, 0.75, 0.5, 0.3)] == [4, 3, 2, 1, 1]
    assert candidates(sigma, sigma, 1.0, 0.45)[0] == (1.0, 4, 4)
    tried = candidates(sigma, torch.tensor([[1.0, 1, 1, 1]]), 0.98, 0.45)
    assert tried[0] == (0.98, 3, 3) and tried[-1][1:] == (2, 2) and tried[-1][0] > 0.7, "a rank of 1 is below the floor"
    steps = [eps for eps, *_ in tried]
    assert steps == [round(0.98 - 0.02 * number, 2) for number in range(len(steps))]


@pytest.mark.parametrize("tiny", ["llama", "opt"])
def test_bases_and_ranks_are_those_of_the_reference(tiny):
    model = shared_model(tiny)
    queries, keys, values = (states.transpose(0, 1).numpy() for states in states_of(model, TEXTS)[1])
    for basis in ("svd", "kq"):
        found = directions(tiny, basis)[1]
        wanted = naive_eigen.key_basis(keys, queries, tiny == "llama", basis), naive_eigen.value_basis(values)
        for side, other in zip((found.keys, found.values), wanted, strict=True):
            np.testing.assert_allclose(side.sigma, other.sigma, rtol=1e-4)
            for count in (3, 11, 16):
                near, cut = (side.down[..., :count] @ side.up[:, :count]).numpy(), other.cut(count)
                np.testing.assert_allclose(near, cut.down @ cut.up, atol=1e-3)
        points = [
            (point.eps, point.r_k, point.r_v) for point in naive_eigen.curve(*wanted, lambda *ranks: 0.0, tiny == "llama")
        ]
        assert candidates(found.keys.sigma, found.values.sigma, 1.0 if tiny == "llama" else 0.98, 0.45) == points


def test_a_budget_is_looked_up_on_the_curve():
    curve = [Point(1.0, 8, 8, 1e-6), Point(0.98, 7, 8, 0.02), Point(0.96, 6, 7, 0.05), Point(0.94, 5, 6, 0.04)]
    budgets = (0, 0.02, 0.021, 0.05, 0.06)
    assert [within(curve, budget, (8, 8)) for budget in budgets] == [(8, 8), (8, 8), (7, 8), (7, 8), (5, 6)]
    for budget in budgets:
        points = [naive_eigen.Point(*vars(point).values()) for point in curve]
        assert naive_eigen.lookup(points, budget, 8)[1:] == within(curve, budget, (8, 8))
    assert within(curve[1:], 0.01, (8, 8)) == within([], 1.0, (8, 8)) == (8, 8), "all directions where the first fails"


# ------------------------------------------------------------------------------------------------------------ calibration


def states_of(model, texts):
    """What each layer's projections give, before any rotation: [layer][q, k, v] of (tokens, heads, 16), by hooks."""
    found = {}

    def note(name):
        return lambda module, args, output: found.setdefault(name, []).append(output[0].unflatten(-1, (-1, 16)))

    parts = [(name, part) for name, part in model.named_modules() if name.endswith(("q_proj", "k_proj", "v_proj"))]
    handles = [part.register_forward_hook(note(name)) for name, part in parts]
    for text in texts:
        model(text, use_cache=False)
    for handle in handles:
        handle.remove()
    states = [torch.cat(found[name]) for side in ("q_proj", "k_proj", "v_proj") for name, _ in parts if name.endswith(side)]
    count = len(states) // 3
    return [states[layer::count] for layer in range(count)]


@pytest.mark.parametrize("tiny", ["llama", "opt"])
def test_sums_are_of_what_the_projections_give(tiny):
    model = shared_model(tiny)
    layers = sums_of(model, TEXTS, rotates(model))
    for sums, (queries, keys, values) in zip(layers, states_of(model, TEXTS), strict=True):
        heads = keys.shape[1]
        for found, states in ((sums.keys, keys), (sums.values, values), (sums.queries, queries)):
            each = states.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # (kv_heads, group * tokens, 16)
            torch.testing.assert_close(found, outer(each), rtol=1e-4, atol=1e-4 * float(found.abs().max()))
        assert sums.count == len(keys)
        found = sums.directions("svd", rotates(model))
        assert len(found.values.down) == heads
        stacked = [keys.reshape(-1, 16)] if tiny == "llama" else torch.cat([keys, queries]).unbind(1)
        sigma = torch.stack([torch.linalg.svdvals(one) for one in stacked])
        torch.testing.assert_close(found.keys.sigma.float(), sigma, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tiny", ["llama", pytest.param("opt", marks=SLOW)])
def test_errors_are_those_of_one_layer_alone(tiny):
    model, rotary = shared_model(tiny), rotates(shared_model(tiny))
    outputs, ranks, layers = [], [(16, 16), (9, 12)], directions(tiny, "svd")
    handle = decoder_layers(model)[1].register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    for codec in ([], *([projected(tiny, *some, layers=[1])] for some in ranks)):
        with session_of(tiny, codec) as session:
            for text in TEXTS:
                model(text, cache=session.new_cache())
    handle.remove()
    exact, *others = (torch.cat(outputs[first : first + 2]) for first in (0, 2, 4))
    expected = [float((other - exact).norm() / exact.norm()) for other in others]
    found = errors_of(model, TEXTS, layers, [[], ranks], rotary)[1]
    assert found[16, 16] < 1e-5 and found[9, 12] == pytest.approx(expected[1], rel=1e-3) and expected[1] > 0.01
    for curve in curves_of(model, TEXTS, layers, rotary, 0.45):
        errors = [point.error for point in curve]
        assert errors[-1] > 0.01 and all(later > 0.9 * earlier for earlier, later in pairwise(errors))
        assert min(min(point.keys, point.values) for point in curve) > 0.45 * 16


# ------------------------------------------------------------------------------------------------------------- the cache


class ByHand(DynamicCache):
    """A stock cache whose keys and values lose what a projection loses, one token and head at a time. Plain Llama rotation."""

    def __init__(self, model, layers, keys, values):
        super().__init__(config=model.config)
        self.rotary, self.whole = rotates(model), [(layer.keys, layer.values) for layer in layers]
        self.ranks = keys, values

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        start = self.get_seq_length(layer_idx)
        (keys, values), (key_rank, value_rank) = self.whole[layer_idx], self.ranks
        lowered = [self.flat(values, states, value_rank) for states in value_states.unbind(2)]
        found = []
        for place, states in enumerate(key_states.unbind(2), start):
            bare = turned(states, -place) if self.rotary else states
            near = self.flat(keys, bare, key_rank)
            found.append(turned(near, place) if self.rotary else near)
        return super().update(torch.stack(found, 2), torch.stack(lowered, 2), layer_idx, *args, **kwargs)

    @staticmethod
    def flat(directions, states, rank):
        """States (batch, heads, 16) after all that `rank` numbers can't say is lost."""
        down, up = directions.down[..., :rank].float(), directions.up[:, :rank].float()
        each = [
            states[:, head] @ down[min(head, len(down) - 1)] @ up[min(head, len(up) - 1)] for head in range(states.shape[1])
        ]
        return torch.stack(each, 1)


def turned(states, place):
    """Rotate (batch, heads, 16) to a place: channel j with j + 8 by place / 10000^(j / 8)."""
    angles = place / 10000.0 ** (torch.arange(8) / 8)
    one, other = states.split(8, -1)
    return torch.cat([one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], -1)


@models("llama", "opt")
def test_all_directions_change_next_to_nothing(tiny):
    model, (prompt, more, later) = shared_model(tiny), talk(2, 60, 8, 9)
    stock = Feed(model, stock_cache(model), 2)
    expected = torch.cat([read(stock, prompt, more), stock(later)], 1)
    for basis in ("svd", "kq"):
        with session_of(tiny, projected(tiny, basis=basis)) as session:
            feed = Feed(model, session.new_cache(), 2)
            assert_near(torch.cat([read(feed, prompt, more), feed(later)], 1), expected, 1e-3)


@pytest.mark.parametrize(("tiny", "basis"), [("llama", "svd"), ("opt", "kq")])
def test_fewer_directions_are_those_of_a_projection_by_hand(tiny, basis):
    model, (prompt, more, later) = shared_model(tiny), talk(2, 20, 5, 6)
    for ranks in ((1, 1), (7, 11), (16, 5)):
        stock = Feed(model, ByHand(model, directions(tiny, basis), *ranks), 2)
        expected = torch.cat([read(stock, prompt, more), stock(later)], 1)
        with session_of(tiny, projected(tiny, *ranks, basis)) as session:
            feed = Feed(model, session.new_cache(), 2)
            assert_near(torch.cat([read(feed, prompt, more), feed(later)], 1), expected, 1e-4)
            one_by_one = Feed(model, session.new_cache(), 2)
            assert_near(one_by_one.each(torch.cat([prompt, more], 1)), expected[:, :25], 1e-4)


@pytest.mark.parametrize(
    ("tiny", "basis", "codec"),
    [
        ("llama", "kq", None),
        ("opt", "svd", {"bits": 4, "group": 4, "residual": 0, "key_axis": "token", "value_axis": "token"}),
        pytest.param(
            "opt", "kq", {"bits": 2, "group": 4, "residual": 8, "key_axis": "channel", "value_axis": "token"}, marks=SLOW
        ),
        pytest.param("llama", "svd", None, marks=SLOW),
        pytest.param("qwen3", "svd", None, marks=SLOW),
    ],
)
def test_one_layer_is_as_the_reference(tiny, basis, codec, monkeypatch):
    calls, attend, (prompt, more, later) = [], KVLayer.attend, talk(1, 21, 4, 6)
    codecs = [projected(tiny, 9, 12, basis)]
    if codec is not None:
        codecs.append(make_codec("kivi", group=4, residual=8) if codec["bits"] == 2 else make_codec("int", group=4))

    def noted(layer, query, key, value, padding, rule):
        output = attend(layer, query, key, value, padding, rule)
        if layer.layer_idx == 1:
            calls.append((*(states[0] for states in (query, key, value, output)), rule.scaling))
        return output

    monkeypatch.setattr(KVLayer, "attend", noted)
    with session_of(tiny, codecs, dtype=torch.float64) as session:
        feed = Feed(session.model, session.new_cache())
        read(feed, prompt, more)
        feed(later)
    layer, rotary = directions(tiny, basis)[1], rotates(shared_model(tiny))
    sides = [(layer.keys, 9), (layer.values, 12)]
    bases = [naive_eigen.Basis(side.down.numpy(), side.up.numpy(), side.sigma.numpy()).cut(count) for side, count in sides]
    rotate = (lambda key, place: turned(torch.from_numpy(key), place).numpy()) if rotary else None
    naive, start = naive_eigen.NaiveEigenCache(*bases, rotate, calls[0][-1], codec=codec), 0
    for queries, keys, values, output, _ in calls:
        if rotary:
            keys = torch.stack([turned(states, -place) for place, states in enumerate(keys.unbind(1), start)], 1)
        start += keys.shape[1]
        kind = "turn" if keys.shape[1] > 1 else "step"
        expected = naive.event(kind, keys.numpy(), values.numpy(), queries.numpy())
        assert_near(output, torch.from_numpy(expected), 1e-5 if rotary else 1e-9)
    assert start == 31


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=SLOW)])
@pytest.mark.parametrize("tiny", ["llama", pytest.param("opt", marks=SLOW)])
def test_pads_change_nothing(tiny, side):
    rows, (more,) = rows_of(31, 9), talk(2, 4)
    ids, mask = padded(rows, side)
    with session_of(tiny, projected(tiny, 9, 12), "h2o", Budget(tokens=16)) as session:
        feed = Feed(session.model, session.new_cache(), 2)
        feed(ids, mask)
        together = feed.each(more)
        for number, row in enumerate(rows):
            alone = Feed(session.model, session.new_cache())
            alone(row)
            assert_near(together[number], alone.each(more[number : number + 1])[0], 1e-4)


@pytest.mark.parametrize("tiny", ["llama", pytest.param("opt", marks=SLOW)])
def test_bytes_are_those_of_the_ranks(tiny):
    (prompt,) = talk(2, 64)
    for dtype in (torch.float32, torch.bfloat16):
        with session_of(tiny, projected(tiny, 9, 13), dtype=dtype) as session:
            cache = session.new_cache()
            Feed(session.model, cache, 2)(prompt)
            memory = cache.memory()
            assert memory.parts["numbers"] / memory.kv_bytes_full == (9 + 13) / 32
            assert memory.kv_bytes == memory.parts["numbers"], "nothing waits"
            held = storages(tensor for layer in cache.layers for side in layer.store.sides for tensor in tensors_in(side))
            assert sum(held.values()) == memory.kv_bytes + sum(
                tensor.untyped_storage().nbytes()
                for layer in cache.layers
                for side in layer.store.sides
                for tensor in side.indices
            )
            bases = {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for layer in cache.layers
                for tensor in layer.store.bases
            }
            assert sum(bases.values()) >= 2 * 4 * 16 * (9 + 13) and memory.state_bytes > sum(bases.values())
    budget = Budget(bytes=2**15)
    with session_of(tiny, projected(tiny, 8, 8), "h2o", budget) as half, session_of(tiny, (), "h2o", budget) as whole:
        kept = [session.new_cache() for session in (half, whole)]
        for session, cache in zip((half, whole), kept, strict=True):
            Feed(session.model, cache)(talk(1, 200)[0])
        assert int(kept[0].kept_len.sum()) == 2 * int(kept[1].kept_len.sum()) == 2 * 2**15 // 128


# ----------------------------------------------------------------------------------------------------- in compositions


def test_bfloat16_is_near_bfloat16():
    (prompt, more), model = talk(2, 40, 6), shared_model("llama", torch.bfloat16)
    wide = read(Feed(shared_model("llama"), stock_cache(model), 2), prompt, more)
    stock = read(Feed(model, stock_cache(model), 2), prompt, more)
    with session_of("llama", projected("llama"), dtype=torch.bfloat16) as session:
        found = read(Feed(model, session.new_cache(), 2), prompt, more)
    assert float((found - wide).norm()) < 2 * float((stock - wide).norm())


@pytest.mark.parametrize("tiny", ["llama", pytest.param("opt", marks=SLOW)])
def test_a_numbers_codec_may_follow(tiny):
    (prompt, more), heads = talk(2, 50, 10), 2 if tiny == "llama" else 4
    codecs = [projected(tiny, 12, 14), make_codec("int", group=4)]
    with session_of(tiny, codecs, "h2o", Budget(tokens=20)) as session:
        feed = Feed(session.model, session.new_cache(), 2)
        read(feed, prompt, more)
        assert feed.cache.kept_len.unique().tolist() == [20]
        parts = {kind: size / (2 * 2 * heads * 21) for kind, size in feed.cache.memory().parts.items()}
        assert parts == {"full_precision": 0, "codes": 6 + 7, "scales": 6 + 8, "zeros": 6 + 8}, "of 3 and 4 groups"
    eight = [projected(tiny, 12, 14), make_codec("int", bits=8, group=4)]
    with session_of(tiny, eight[:1]) as alone, session_of(tiny, eight) as chained:
        one, other = (read(Feed(s.model, s.new_cache(), 2), prompt, more) for s in (alone, chained))
        assert_near(other, one, 0.1)
    kivi = [projected(tiny, 12, 14), make_codec("kivi", group=4, residual=8)]
    with session_of(tiny, kivi) as session:
        feed = Feed(session.model, session.new_cache(), 2)
        feed(prompt)
        keys, values = feed.cache.layers[0].store.sides
        assert (keys.dim, values.dim) == (12, 14)
        assert keys.encoded.tolist() == [[48] * len(keys.encoded[0])] * 2, "six blocks of 8"


def test_rolling_places_whole_keys():
    prompt, more = talk(2, 50, 10)
    settings = {"policy": "streaming_llm", "budget": Budget(tokens=20), "rolling": True}
    with session_of("llama", (), **settings) as stock, session_of("llama", projected("llama"), **settings) as session:
        expected, found = (read(Feed(s.model, s.new_cache(), 2), prompt, more) for s in (stock, session))
        assert_near(found, expected, 1e-3)


def test_keys_placed_anew_take_no_more_bytes():
    """What is projected is held in the values' type, and a budget of bytes knows it."""
    held = {}
    for rolling in (False, True):
        settings = {"policy": "streaming_llm", "budget": Budget(bytes=4000), "rolling": rolling, "num_sink": 2}
        with session_of("llama", projected("llama", 10, 12), dtype=torch.bfloat16, **settings) as session:
            feed = Feed(session.model, session.new_cache())
            feed(talk(1, 100)[0])
            held[rolling] = feed.cache.memory()
    assert held[False].kv_bytes == held[True].kv_bytes > 3800
    assert torch.equal(held[False].kept_len, held[True].kept_len)


@models("gemma3")
def test_beams_and_forks_carry_what_is_held(tiny):
    model, (prompt,) = shared_model(tiny), talk(2, 40)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    expected = model.generate(prompt, **options)
    with session_of(tiny, projected(tiny)) as session:
        assert torch.equal(session.model.generate(prompt, cache=session.new_cache(), **options), expected)
        feed = Feed(model, session.new_cache(), 2)
        feed(prompt)
        fork = Feed(model, feed.cache.fork(), 2)
        fork.mask = feed.mask
        (more,) = talk(2, 5, seed=3)
        assert_near(fork.each(more), feed.each(more))


def test_values_may_be_put_back_by_the_next_projection():
    weight = shared_model("llama").model.layers[0].self_attn.o_proj.weight  # (hidden, heads * 16)
    values = projected("llama", 16, 11).bases[0].to(weight.device, weight.dtype).values
    mixed = torch.randn(1, 2, 2, 3, 11, generator=torch.Generator().manual_seed(0))  # (batch, kv_heads, group, queries, 11)
    unfolded = values.lift(mixed).permute(0, 3, 1, 2, 4).flatten(2) @ weight.T
    folded = torch.cat([part @ values.up[head // 2].T for head, part in enumerate(weight.split(16, 1))], 1)
    assert_near(mixed.permute(0, 3, 1, 2, 4).flatten(2) @ folded.T, unfolded)


# ---------------------------------------------------------------------------------------------------- from an artefact


def setup_of(tiny, **overrides):
    return Setup(f"tiny-{tiny}", tiny_model(tiny, **overrides), tiny_tokenizer(), TEXTS)


def test_bases_are_found_by_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path))
    setup, shown = setup_of("llama"), []
    artefact = run_calibration("eigen", make_calibration("eigen", {}), setup, shown.append)
    curve = [Point(*point) for point in artefact.content["curves"][1]]
    error = curve[2].error * 1.001  # at least the third point's; a later one may be as near
    with attach(setup.model, make_policy("full"), codec=make_codec("eigen", error=error)) as session:
        assert session.plan.codec.label == f"eigen {error:g}"
        cache = session.new_cache()
        Feed(setup.model, cache)(TEXTS[0])
        store = cache.layers[1].store
        assert tuple(side.dim for side in store.sides) == within(curve, error, (16, 16)) != (16, 16)
    assert f"codec=eigen codec.eigen.artefact={artefact.key}" in shown[0] and "% of the cache" in shown[0]

    refused = [(setup.model, make_codec("eigen", basis="kq"), "eigen --model NAME -o basis=kq")]
    other = tiny_model("llama", seed=1)
    refused += [(other, make_codec("eigen", artefact=key), "eigen --model NAME") for key in (None, artefact.key)]
    for model, codec, message in refused:
        with (
            pytest.raises(ArtefactError, match=f"`kvlab calibrate {message}`"),
            attach(model, make_policy("full"), codec=codec),
        ):
            pass
    with pytest.raises(CodecError, match="codec.eigen.error=-1"):
        make_codec("eigen", error=-1)


def test_rotations_that_are_not_known_are_refused(monkeypatch):
    setup = setup_of("llama")
    setup.model.config.model_type = "unknown"
    with pytest.raises(CodecError, match="which needs rotary positions in every layer"):
        make_calibration("eigen", {}).measure(setup)


@pytest.mark.slow
def test_calibrate_and_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    chosen = ["codec=eigen", "codec.eigen.basis=kq", "codec.eigen.error=0.4", "policy=full"]
    code, out, err = kvlab("run", *TINY, *chosen, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1) and "`kvlab calibrate eigen --model tiny-llama -o basis=kq`" in err
    options = ["--texts", "2", "--tokens", "48", "-o", "basis=kq"]
    code, out, err = kvlab("calibrate", "eigen", "--model", "tiny-llama", *options, capsys=capsys)
    assert (code, err) == (0, "") and "use: codec=eigen codec.eigen.basis=kq codec.eigen.artefact=" in out
    code, out, _ = kvlab("run", *TINY, *chosen, "--dry-run", capsys=capsys)
    assert code == 0 and "eigen 0.4 kq" in out
    assert kvlab("run", "-m", *TINY, *chosen[:2], "codec.eigen.error=0.3,0.4", "policy=full") == 0, "no prompt is shared"
    other, result = sorted(results(tmp_path).values(), key=lambda one: one["memory"]["kv_bytes"], reverse=True)
    assert result["codec"] == ["eigen 0.4 kq"] and other["provenance"]["cells_together"] == 1
    assert result["memory"]["kv_bytes"] < 0.95 * result["memory"]["kv_bytes_full"]
