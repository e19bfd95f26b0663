"""ThinK: which channels stay, what attends to them, and what they take, alone and before codecs of few bits."""

import numpy as np
import pytest
import torch

from conftest import shared_model
from contracts.helpers import Feed, kv_heads_of, layers_of, padded, policy_for, rows_of, storages, talk, tensors_in
from kvlab import Budget, attach, make_policy
from kvlab.cache.encoded import EncodedStore
from kvlab.codecs import CodecError, chain, make_codec
from kvlab.codecs.attended import Seen
from kvlab.kernels.dispatch import choose
from naive_codecs import CODECS
from naive_think import NaiveThinkCache
from test_codec_models import seen_by_layers  # noqa: F401  a fixture

SMALL = {"obs_window": 5, "recent": 6}
KIVI = {**CODECS["kivi2"], "group": 4, "residual": 12}
NUMBERS = {
    "kivi2": make_codec("kivi", **KIVI),
    "kivi4 by token": make_codec("kivi", bits=4, group=4, residual=12, key_axis="token"),
    "int4": make_codec("int"),
    "int3 by channel": make_codec("int", bits=3, axis="channel", group=4),
    "decoquant4": make_codec("decoquant", channels=4, block=8),
    "qaq": make_codec("qaq"),
    "qaq of layers": make_codec("qaq", level="layer"),
}
slow = pytest.mark.slow


def key_sides(cache):
    return [layer.store.sides[0] for layer in cache.layers]


# ---------------------------------------------------------------------------------------------------- one layer, by hand


class Followed:
    """A session's cache and a reference of layer 1 for each row, which is told what that layer was given and what it kept."""

    def __init__(self, session, calls, think, codec=None):
        self.feed, self.calls, self.evicts = Feed(session.model, session.new_cache(), 2), calls, session.policy.evicts
        settings = {"drop": think.drop, "obs_window": think.obs_window, "recent": think.recent}
        self.naive = [NaiveThinkCache(**settings, codec=codec) for _ in range(2)]

    def __call__(self, ids, mask=None):
        """One call of the model, whose attention must be the references'."""
        self.calls.clear()
        self.feed(ids, mask)
        _, query, key, value, padding, rule, output = next(call for call in self.calls if call[0] == 1)
        kept, kind = self.feed.cache.kept_positions()[1], "turn" if ids.shape[1] > 1 else "step"
        for row, naive in enumerate(self.naive):
            real = slice(None) if padding is None else padding[row].bool().numpy()
            naive.scaling, given = rule.scaling, [part[row][:, real] for part in (key, value, query)]
            wanted = naive.event(kind, *given, kept=kept[row] if self.evicts else None)
            np.testing.assert_allclose(output[row][:, real], wanted, atol=1e-9)

    def check(self):
        """Channels, tokens that are encoded, and all numbers as they are read."""
        store = self.feed.cache.layers[1].store
        view = store.view()
        for row, naive in enumerate(self.naive):
            assert store.sides[0].channels.chosen[row].tolist() == naive.channels
            for head, (keys, values) in enumerate(zip(naive.keys, naive.values, strict=True)):
                assert store.sides[0].encoded[row, head] == keys.num_encoded > 0
                order = view.positions[row, head, : int(store.lengths[row, head])].argsort()
                for found, expected in ((view.keys, keys.held()), (view.values, values.held())):
                    np.testing.assert_allclose(found[row, head, order].numpy(), expected[0], atol=1e-12)


BEHIND = {
    "alone": (None, {}),
    "kivi2": (KIVI, {}),
    "snapkv, kivi2": (KIVI, {"name": "snapkv", "after_prompt": "grow", "obs_window": 4}),
    "h2o, int4": (CODECS["int4"], {"name": "h2o"}),
    "snapkv": (None, {"name": "snapkv", "after_prompt": "grow", "obs_window": 4}),
    "int4": (CODECS["int4"], {}),
}


@pytest.mark.parametrize(
    ("tiny", "case"),
    [
        *(("llama", case) for case in ("alone", "snapkv, kivi2", "h2o, int4")),
        *(pytest.param("llama", case, marks=slow) for case in ("kivi2", "snapkv", "int4")),
        *(pytest.param(tiny, case, marks=slow) for tiny in ("opt", "qwen3", "gpt_neox") for case in BEHIND),
    ],
)
def test_a_layer_equals_the_reference(tiny, case, seen_by_layers):  # noqa: F811
    """Padded prompts, steps, a turn of other lengths where groups allow one, steps; the channels of the first turn stay."""
    codec, policy = BEHIND[case]
    think = make_codec("think", drop=0.35, **SMALL)
    behind = {None: [], 2: [make_codec("kivi", **KIVI)], 4: [make_codec("int")]}[codec and codec["bits"]]
    made = make_policy(**{"name": "full", **policy})
    with attach(shared_model(tiny, torch.float64), made, Budget(tokens=20), codec=[think, *behind]) as session:
        run = Followed(session, seen_by_layers, think, codec)
        run(*padded(rows_of(30, 25), "left"))
        (steps,) = talk(2, 13, seed=2)
        for token in steps.split(1, 1):
            run(token)
        if case != "snapkv, kivi2":
            run(*padded(rows_of(9, 15, seed=1), "right"))
            run(steps[:, :1])
        run.check()


# ----------------------------------------------------------------------------------------------------- stores, fed by hand


def fed(codecs, keys, values, queries, lengths=None):
    """A store after one turn; lengths: tokens of each row, the last columns. (batch, heads, tokens, dim)."""
    store = EncodedStore.of(chain(codecs), keys, values, {}, choose("auto", "cpu", keys.dtype))
    batch, _, count, _ = keys.shape
    real = torch.arange(count) >= count - torch.tensor(lengths or [count] * batch)[:, None]
    positions = torch.where(real, real.cumsum(1) - 1, -1)
    store.append(keys, values, positions, {})
    attention = torch.rand(batch, keys.shape[1], count, int(store.lengths.max()))
    store.observe(Seen(queries, positions, True, lambda: attention))
    store.seal(True, None)
    return store


def drawn(dim=9, count=50, dtype=torch.float32):
    draw = torch.Generator().manual_seed(dim)
    keys, values = (torch.randn(2, 3, count, dim, generator=draw).to(dtype) for _ in range(2))
    return keys, values, torch.randn(2, 3, 2, count, dim, generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["kivi2", "int4", "int3 by channel", "decoquant4"])
def test_a_codec_encodes_what_is_left_as_if_there_were_no_more(name, dtype):
    """Bit for bit what it makes of keys that have the chosen channels alone, where rows are padded too."""
    keys, values, queries = drawn(dim=12, dtype=dtype)
    numbers = NUMBERS[name]
    both = fed([make_codec("think", drop=0.34), numbers], keys, values, queries, [50, 31])
    index = both.sides[0].channels.chosen.long()
    assert index.shape == (2, 3, 8)
    fewer = keys.gather(3, index[:, :, None].expand(-1, -1, 50, -1))
    single = fed([numbers], fewer, values, queries, [50, 31])
    for one, other in zip(both.sides, single.sides, strict=True):
        encoded, expected = (storage_of(side) for side in (one, other))
        assert encoded.keys() == expected.keys()
        assert all(torch.equal(encoded[plane], expected[plane]) for plane in encoded)
    wide, narrow = both.sides[0].dense(), single.sides[0].dense()
    counts = torch.from_numpy(single.sides[0].encoded)
    for row, head in np.ndindex(2, 3):
        kept, count = index[row, head], int(counts[row, head])
        assert torch.equal(wide[row, head, :count, kept], narrow[row, head, :count])
        assert wide[row, head, :count].count_nonzero() == narrow[row, head, :count].count_nonzero()
        length = int(both.lengths[row, head])
        assert torch.equal(wide[row, head, count:length], keys[row, head, 50 - length + count :])


def storage_of(side):
    """Planes of the encoded part by name."""
    rows = {name: part for name, part in vars(side).items() if name in ("units", "tokens", "factors")}
    return {f"{name}.{plane}": tensor for name, part in rows.items() for plane, tensor in part.planes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropping_nothing_changes_no_bit(dtype):
    keys, values, queries = drawn(dtype=dtype)
    view = fed([make_codec("think", drop=0.0)], keys, values, queries).view()
    assert torch.equal(view.keys, keys) and torch.equal(view.values, values)
    model, (prompt, steps, more) = shared_model("llama", dtype), talk(2, 40, 8, 9)
    found = []
    for codecs in ([make_codec("think", drop=0.0), NUMBERS["kivi2"]], [NUMBERS["kivi2"]]):
        with attach(model, make_policy("full"), codec=codecs) as session:
            feed = Feed(model, session.new_cache(), 2)
            found.append(torch.cat([feed(prompt), feed.each(steps), feed(more)], 1))
    assert torch.equal(*found)


def test_equal_scores_leave_the_lower_channels_and_shares_are_as_written():
    ones = torch.ones(1, 1, 40, 100)
    store = fed([make_codec("think", drop=0.29)], ones, ones, torch.ones(1, 1, 2, 40, 100))
    assert store.sides[0].channels.chosen.tolist() == [[list(range(71))]]
    assert make_codec("think", drop=0.99).widths(0, 16, 16) == (1, 16)


# ------------------------------------------------------------------------------------------------------------ whole models


@pytest.mark.parametrize("name", ["alone", *NUMBERS])
def test_every_codec_of_numbers_goes_behind_it(name):
    """Prompts with pads, steps, a fork, another order, a later turn; bytes are those of all storages."""
    model, rows, (steps, more) = shared_model("llama"), rows_of(60, 47), talk(2, 6, 13, seed=1)
    behind = [] if name == "alone" else [NUMBERS[name]]
    with attach(model, make_policy("full"), codec=[make_codec("think", **SMALL), *behind]) as session:
        feed = Feed(model, session.new_cache(), 2)
        feed(*padded(rows, "left"))
        chosen = [side.channels.chosen for side in key_sides(feed.cache)]
        assert {kept.shape[-1] for kept in chosen} == {10}
        feed.each(steps)
        fork = Feed(model, feed.cache.fork(), 2)
        fork.mask = feed.mask
        assert not storages(tensors_in(key_sides(fork.cache))).keys() & storages(tensors_in(key_sides(feed.cache))).keys()
        feed.cache.reorder_cache(torch.tensor([1, 0]))
        feed.mask = feed.mask.flip(0)
        turned = feed(more.flip(0))
        torch.testing.assert_close(fork(more), turned.flip(0), atol=1e-3, rtol=1e-3)
        for side, kept in zip(key_sides(feed.cache), chosen, strict=True):
            assert torch.equal(side.channels.chosen, kept.flip(0))
            assert side.encoded.min() > 0
        memory, stores = feed.cache.memory(), [layer.store for layer in feed.cache.layers]
        assert memory.parts["channels"] == 2 * sum(kept.numel() for kept in chosen)
        walk = sum(storages(tensors_in(stores)).values())
        assert memory.kv_bytes + sum(store.state_bytes for store in stores) == walk
        assert memory.kv_bytes == sum(row.kv_bytes for row in feed.cache.memory_by_row())


@pytest.mark.parametrize("drop", [0.25, 0.5])
def test_a_prefix_takes_so_much_less(drop):
    """Of the storages of keys and values: 1 - drop / 2, without what says which channels; and so does the plan."""
    model, (prompt,) = shared_model("llama", torch.bfloat16), talk(2, 200)
    with attach(model, make_policy("full"), codec=make_codec("think", drop=drop, recent=0)) as session:
        cache = session.new_cache()
        model(prompt, cache=cache)
        sides = [side for layer in cache.layers for side in layer.store.sides]
        held = storages(plane for side in sides for planes in (side.recent, side.tokens) for plane in planes.planes.values())
        full = 2 * 200 * kv_heads_of(model) * layers_of(model) * 2 * 16 * 2
        # Values may have some free slots to grow by.
        assert 1 - drop / 2 <= sum(held.values()) / full <= (1 - drop / 2) * 1.06
        assert cache.memory().kv_bytes_full == full
        assert sum(layer.token_bytes for layer in session.plan.layers) * 400 == full * (1 - drop / 2)


@pytest.mark.filterwarnings("ignore:a budget of")
def test_with_policies_that_evict():
    """A prompt is evicted before channels are chosen; behind int4 a policy may drop tokens at any step."""
    model, (prompt, steps, more) = shared_model("llama"), talk(2, 60, 20, 9)
    think = make_codec("think", **SMALL)
    snap = policy_for("llama", "snapkv", after_prompt="grow", obs_window=4)
    with attach(model, snap, Budget(tokens=30), codec=[think, NUMBERS["kivi2"]]) as session:
        feed = Feed(model, session.new_cache(), 2)
        feed(prompt)
        kept = feed.cache.kept_positions()
        feed.each(steps)
        assert feed.cache.kept_len.tolist() == [[[50] * 2] * 2] * 2
        after = feed.cache.kept_positions()
        assert all(set(kept[0][row][head]) < set(after[0][row][head]) for row in range(2) for head in range(2))
    with attach(model, make_policy("h2o"), Budget(tokens=20), codec=[think, NUMBERS["int4"]]) as session:
        feed = Feed(model, session.new_cache(), 2)
        for piece in (prompt, *steps.split(1, 1), more, more[:, :1]):
            feed(piece)
            memory = feed.cache.memory()
            assert feed.cache.kept_len.max() == 20
            token = 2 * (5 + 4 + 8 + 4)  # 10 and 16 codes of 4 bits, a scale and a zero each; two heads
            assert memory.kv_bytes - memory.parts["channels"] <= 2 * layers_of(model) * 21 * token
    says = r"codec think .*encodes tokens in groups or lets them wait.*h2o drops single tokens.*codec=\[think,int4\]"
    with pytest.raises(CodecError, match=says), attach(model, make_policy("h2o"), Budget(tokens=20), codec=think):
        pass
    with pytest.raises(CodecError, match="rolling=false"):
        chain([think, NUMBERS["int4"]]).check_policy(make_policy("streaming_llm", rolling=True))


def test_a_cache_that_begins_with_steps_is_refused():
    model, (ids,) = shared_model("llama"), talk(1, 20)
    with attach(model, make_policy("full"), codec=make_codec("think")) as session:
        cache = session.new_cache()
        with pytest.raises(ValueError, match="codec think looks at a prompt's end.*give a prompt first"), cache.stepwise():
            model(ids, cache=cache)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"drop": 1.0}, "codec.think.drop=1.0: use a share from 0 to below 1"),
        ({"drop": -0.1}, "use a share"),
        ({"obs_window": 0}, "codec.think.obs_window=0: use at least 1"),
        ({"recent": -1}, "use a whole number"),
    ],
)
def test_settings_that_cant_be(settings, says):
    with pytest.raises(CodecError, match=says):
        make_codec("think", **settings)
