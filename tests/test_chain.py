"""Codecs in a row: which go together, what they are as one, and projections of what comes in."""

from dataclasses import dataclass

import pytest
import torch

from conftest import shared_model
from contracts.helpers import (
    Feed,
    assert_near,
    kv_heads_of,
    layers_of,
    padded,
    rows_of,
    stock_cache,
    storages,
    talk,
    tensors_in,
)
from kvlab import Budget, attach, make_policy
from kvlab.codecs import CodecError, chain, make_codec
from kvlab.codecs.basis import Basis, Projection
from kvlab.codecs.chain import ChannelCodec

THINK, KIVI, INT = make_codec("think"), make_codec("kivi", group=4, residual=12), make_codec("int")


@dataclass(frozen=True)
class Turned(ChannelCodec):
    """Keys and values in any basis, of each layer and head its own; without their last numbers if `left` says so."""

    rotary: bool = True
    heads: int = 2
    left: int = 16
    dtype: torch.dtype = torch.float64
    name = "turned"

    @property
    def pre_rope(self):
        return self.rotary

    def widths(self, layer_idx, key_dim, value_dim):
        return self.left, self.left

    def basis_of(self, layer_idx):
        draw, made = torch.Generator().manual_seed(layer_idx), []
        for heads in (1 if self.rotary else self.heads, self.heads):
            turn = torch.linalg.qr(torch.randn(heads, 16, 16, generator=draw, dtype=torch.float64))[0]
            down, up = turn[..., : self.left] * 1.5, turn.mT[:, : self.left] / 1.5  # one is not the other turned over
            made.append(Projection(down.to(self.dtype).contiguous(), up.to(self.dtype).contiguous()))
        return Basis(*made)


# ------------------------------------------------------------------------------------------------------ what goes together


@pytest.mark.parametrize(
    ("codecs", "says"),
    [
        ([KIVI, THINK], r"codec=\[kivi2,think\]: think chooses channels before kivi2 encodes: codec=\[think,kivi2\]"),
        ([KIVI, INT], "kivi2 and int4 encode numbers.*can't be chained"),
        ([THINK, INT, KIVI], "int4 and kivi2 encode numbers.*can't be chained"),
        ([THINK, THINK], "think and think leave out channels.*can't be chained"),
        ([THINK, make_codec("decoquant", rope="pre")], "decoquant4 takes the rotation off keys.*use rope=post"),
        (["think"], "pass a codec"),
    ],
)
def test_what_cant_be_chained(codecs, says):
    with pytest.raises(CodecError, match=says) as refusal:
        chain(codecs)
    assert "\n" not in str(refusal.value)


def test_a_chain_is_as_its_codecs_are():
    assert chain([]) is None
    assert chain([INT]) is INT
    assert [chain(codecs).label for codecs in ([THINK], [THINK, INT], [make_codec("think", drop=0.5), KIVI])] == [
        "think",
        "think+int4",
        "think drop=0.5+kivi2 group=4 residual=12",
    ]
    qaq = make_codec("qaq", window=50, promote=True)
    for one, other in (([THINK, qaq], qaq), ([THINK, INT], INT), ([THINK, make_codec("decoquant")], make_codec("decoquant"))):
        both = chain(one)
        for name in ("evictable", "sheds", "joint", "offloads", "pre_rope"):
            assert getattr(both, name) == getattr(other, name), name
    assert [chain(codecs).watches for codecs in ([THINK, qaq], [THINK, INT])] == [50, 32]
    assert not chain([THINK]).evictable
    assert chain([Turned()]).evictable
    with pytest.raises(CodecError, match="codec think encodes tokens in groups or lets them wait.*h2o drops single tokens"):
        chain([THINK]).check_policy(make_policy("h2o"))
    chain([THINK, INT]).check_policy(make_policy("h2o"))


# -------------------------------------------------------------------------------------------------------------- projections


def turned(model, **settings):
    return Turned(model.config.model_type == "llama", kv_heads_of(model), **settings)


@pytest.mark.parametrize("tiny", ["llama", "opt"])
@pytest.mark.parametrize("numbers", [(), (make_codec("int", bits=16),)], ids=["alone", "int16"])
def test_another_basis_of_all_numbers_changes_nothing(tiny, numbers):
    """Padded prompts, decoded tokens, a second turn."""
    model, (steps, more) = shared_model(tiny, torch.float64), talk(2, 6, 7, seed=1)
    pieces = (padded(rows_of(30, 21), "left"), *((token,) for token in (*steps.split(1, 1), more, more[:, :1])))
    stock = Feed(model, stock_cache(model), 2)
    expected = [stock(*piece)[:, -1] for piece in pieces]
    with attach(model, make_policy("full"), codec=(turned(model), *numbers)) as session:
        feed = Feed(model, session.new_cache(), 2)
        for piece, wanted in zip(pieces, expected, strict=True):
            assert_near(feed(*piece)[:, -1], wanted, 1e-2 if numbers else 1e-9)


@pytest.mark.parametrize("tiny", ["llama", "opt"])
def test_what_is_held_is_projected_and_billed(tiny):
    """Coordinates in the model's dtype; bases count as bookkeeping of each cache, though a copy has the same ones."""
    model, (prompt, steps) = shared_model(tiny, torch.bfloat16), talk(2, 40, 8)
    with attach(model, make_policy("h2o"), Budget(tokens=20), codec=turned(model, left=10, dtype=torch.float32)) as session:
        feed = Feed(model, session.new_cache(), 2)
        feed(prompt)
        feed.each(steps)
        memory, stores = feed.cache.memory(), [layer.store for layer in feed.cache.layers]
        heads = 2 * kv_heads_of(model) * layers_of(model)
        assert memory.kv_bytes == heads * 21 * 2 * 10 * 2
        assert memory.kv_bytes_full == heads * 48 * 2 * 16 * 2
        assert sum(layer.token_bytes for layer in session.plan.layers) * 2 == heads * 2 * 10 * 2
        bases = storages(base for store in stores for base in store.bases)
        for cache in (feed.cache, feed.cache.fork()):
            memory, found = cache.memory(), storages(tensors_in(cache))
            assert bases.keys() <= found.keys()
            assert memory.kv_bytes + memory.state_bytes == sum(found.values())
