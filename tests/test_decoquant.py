"""DecoQuant against its slow reference: factors, codes, what stays where over turns and steps, and whole models."""

import hashlib

import numpy as np
import pytest
import torch

import naive_decoquant
from conftest import shared_model
from contracts.helpers import Feed, assert_near, fresh_model, padded, rows_of, talk
from kvlab import Budget, attach, make_codec, make_policy
from kvlab.codecs import CodecError
from kvlab.codecs.decoquant import STRIDE
from kvlab.codecs.factors import PIECE, balanced, encode_block, gram, symmetric
from kvlab.kernels.packed import BLOCK, unpack


def drawn(*shape, seed=0, dtype=torch.float32):
    """Numbers whose channels differ in size and go together, so that factors are nothing like what they are made of."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(*shape, generator=generator, dtype=torch.float64)
    mixed = numbers @ torch.randn(shape[-1], shape[-1], generator=generator, dtype=torch.float64)
    return (mixed * torch.linspace(0.1, 2, shape[-1])).to(dtype)


def factors_of(block, channels):
    """T_L (T * D / j, j) and T_S of a block (heads, T, dim), as kvlab makes them, both in float64."""
    to_left, small = balanced([gram(block, channels)])
    return block.transpose(0, 1).reshape(-1, channels).double() @ to_left[0], small[0]


# ---------------------------------------------------------------------------------------------- one block by itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("heads", "length", "dim", "channels"), [(2, 9, 16, 16), (3, 5, 8, 6), (2, 1, 16, 16), (1, 4, 8, 1)])
def test_factors_are_those_of_the_definition(heads, length, dim, channels, dtype):
    block = drawn(heads, length, dim, dtype=dtype)
    left, small = factors_of(block, channels)
    plain = naive_decoquant.as_block(block.double().numpy())
    expected_left, expected_small = naive_decoquant.factors(plain, channels)
    assert np.abs(small.numpy() - expected_small).max() < 1e-5
    assert np.abs(left.numpy() - expected_left).max() < 1e-5 * max(1, np.abs(expected_left).max())
    again = (left @ small).reshape(length, heads * dim)
    assert (again - torch.from_numpy(plain)).abs().max() < 1e-5 * np.abs(plain).max()


def test_vanished_directions_are_nothing():
    block = torch.zeros(2, 3, 8)
    assert not any(part.any() for part in factors_of(block, 8))
    block[0, :, 2] = torch.tensor([3.0, 0.0, -4.0])  # one direction alone: the root of 5 times the third unit vector
    left, small = factors_of(block, 8)
    assert torch.allclose(small[0], torch.eye(8, dtype=torch.float64)[2] * 5**0.5) and not small[1:].any()
    assert torch.allclose(left[:, 0], torch.tensor([3, 0, 0, 0, -4, 0], dtype=torch.float64) / 5**0.5) and not left[:, 1:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_and_steps_bit_for_bit(bits, dtype):
    top = 2 ** (bits - 1) - 1
    rows = drawn(12, 23, seed=bits, dtype=dtype) * torch.logspace(-6, 3, 12, dtype=dtype)[:, None]
    rows[3] = 0
    rows[4] = torch.arange(23) % (2 * top + 1) - top + 0.5  # halves, which go to the even neighbour
    rows[4, 0] = top
    rows[5, 7] = 1e9  # no float16 is as large as its step
    codes, step = symmetric(rows, bits)
    expected_codes, expected_step = naive_decoquant.quantise(rows.numpy(), bits)
    assert codes.dtype == torch.uint8 and step.dtype == torch.float16
    assert np.array_equal(step.numpy(), expected_step) and np.array_equal(codes.numpy(), expected_codes)


def test_a_long_block_is_encoded_in_pieces_that_nobody_sees():
    block = drawn(2, PIECE + 3, 8)
    runs = block.reshape(-1, 8).double()
    assert torch.allclose(gram(block, 8), runs.mT @ runs)
    to_left = balanced([gram(block, 8)])[0][0]
    packed, step = encode_block(block, to_left, 4)
    left, _ = factors_of(block, 8)
    codes, whole_step = symmetric(left.float().view(PIECE + 3, 16), 4)
    assert torch.equal(step, whole_step) and torch.equal(unpack(packed, 4, 16), codes)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_an_outlier_channel_hurts_less_than_under_plain_rounding(bits):
    block = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    block[:, 37] *= 30
    side = Script([64], 1, 256, bits=bits, tokens=block[None, None]).play([("turn", [64])]).side
    codes, step = naive_decoquant.quantise(block.numpy(), bits)
    plain = torch.from_numpy((codes - (2 ** (bits - 1) - 1)) * np.float32(step)[:, None])
    error, plain_error = (float((found - block).norm() / block.norm()) for found in (side.dense()[0, 0], plain))
    assert error < 0.99 * plain_error
    assert bits < 8 or error < plain_error / 2


# --------------------------------------------------------------------------------------- a side over turns and steps


class Script:
    """A side fed by turns and steps, and what its rows were fed. most: tokens that each row gets at most."""

    def __init__(self, most, heads, dim, bits=4, channels=16, block=1024, tokens=None, dtype=torch.float32):
        self.codec = make_codec("decoquant", bits=bits, channels=channels, block=block)
        self.tokens = drawn(len(most), heads, max(most), dim, dtype=dtype) if tokens is None else tokens
        self.side = self.codec.sides(0, self.tokens, self.tokens, None)[0]
        self.seen = np.zeros(len(most), dtype=np.int64)
        self.events = []

    def play(self, events):
        """("turn", tokens of each row, pads in front), ("step",) or, where some rows get none, ("step", 1 or 0 of each row)."""
        for kind, *given in events:
            counts = np.array(given[0] if given else [1] * len(self.seen))
            if kind == "turn":
                self._turn(counts)
            else:
                token = torch.stack([row[:, seen : seen + 1] for row, seen in zip(self.tokens, self.seen, strict=True)])
                self.side.add_one(token, None if counts.all() else counts > 0)
                self.seen = self.seen + counts
            self.side.seal(kind == "turn", None)
            self.events.append((kind, counts.tolist()))
        return self

    def _turn(self, counts):
        width = counts.max()
        columns = torch.full((*self.tokens.shape[:2], width, self.tokens.shape[3]), 7e4).to(self.tokens.dtype)  # what pads hold
        for row, (seen, count) in enumerate(zip(self.seen, counts, strict=True)):
            columns[row, :, width - count :] = self.tokens[row, :, seen : seen + count]
        valid = torch.arange(width) >= torch.from_numpy(width - counts)[:, None]
        self.side.add(columns, valid, counts[:, None], False)
        self.seen = self.seen + counts

    def spans(self, row):
        """First and last + 1 of each block of a row, by the reference."""
        events = [(kind, counts[row]) for kind, counts in self.events]
        return [span for span in naive_decoquant.blocks(self.codec.block, events) if span and span[0] < span[1]]


def stored(side, row):
    """Codes (n, D), steps (n,) and factors (blocks, j, j) of a row, straight from the planes."""
    width = side.heads * side.dim
    count, first = int(side.tokens.lengths[row, 0]), int(side.tokens.capacity[:row].sum())
    part = slice(first, first + count)
    codes = unpack(side.tokens.planes["code"][part], side.codec.bits, width)
    first = int(side.factors.capacity[:row].sum())
    factors = side.factors.planes["factor"][first : first + int(side.factors.lengths[row, 0])]
    return codes.numpy().astype(int), side.tokens.planes["scale"][part].numpy(), factors.numpy()


def decoded(side, row, spans):
    """What stands encoded in a row, (heads, n, dim), decoded by the reference from the side's own codes, steps and factors."""
    codes, steps, factors = stored(side, row)
    assert len(factors) == len(spans) and len(codes) == sum(end - start for start, end in spans)
    blocks, at = [np.zeros((side.heads, 0, side.dim), dtype=np.float32)], 0
    for (start, end), small in zip(spans, factors, strict=True):
        part = slice(at, at := at + end - start)
        block = naive_decoquant.decode(codes[part], steps[part], np.float32(small), side.codec.bits)
        blocks.append(naive_decoquant.from_block(block, side.heads))
    return np.concatenate(blocks, 1)


EVENTS = [("turn", [13, 1, 6]), *[("step",)] * 4, ("turn", [2, 9, 1]), *[("step",)] * 8]
"""Of blocks of 6: the first steps fill none, the second a whole one and some more."""
SHAPES = [(4, 2, 64, 16), (2, 3, 80, 16), (8, 1, 96, 16), (4, 2, 128, 16), (3, 2, 24, 16), (8, 4, 16, 64), (5, 3, 7, 1)]
"""bits, heads, dim, channels: the last but two and one have runs that cross heads."""


@pytest.mark.parametrize(("bits", "heads", "dim", "channels"), SHAPES)
def test_rows_hold_the_blocks_of_the_reference(bits, heads, dim, channels):
    script = Script([27, 22, 19], heads, dim, bits, channels, block=6).play(EVENTS)
    side, tokens = script.side, script.tokens
    dense, queries = side.dense(), drawn(3, heads, 2, 1, dim, seed=1)
    weights = torch.rand(3, heads, 2, 1, dense.shape[2], generator=torch.Generator().manual_seed(0))
    beyond = torch.arange(dense.shape[2]) >= torch.from_numpy(script.seen)[:, None]
    weights = weights.masked_fill(beyond[:, None, None, None], 0)
    dots, mixed = side.dots(queries, None), side.mix(weights)
    for row in range(3):
        spans = script.spans(row)
        last, seen = spans[-1][1], int(script.seen[row])
        assert side.encoded[row].tolist() == [last] * heads and last == seen - 2
        expected = np.concatenate([decoded(side, row, spans), tokens[row, :, last:seen].numpy()], 1)
        assert np.abs(dense[row, :, :seen].numpy() - expected).max() < 1e-5 * np.abs(expected).max()
        exact = torch.from_numpy(expected.astype(np.float64))[:, None]
        products = queries[row].double() @ exact.mT
        assert_near(dots[row, ..., :seen].double(), products)
        assert_near(mixed[row].double(), weights[row, ..., :seen].double() @ exact)
        for start, end in spans:
            rounded = naive_decoquant.roundtrip(tokens[row, :, start:end].numpy(), bits, channels)
            off = np.abs(dense[row, :, start:end].numpy() - rounded) > 1e-3 * np.abs(rounded).max()
            assert off.mean() < 0.02  # a factor that rounds otherwise may move a code by one


def test_rows_fill_blocks_at_different_times():
    steps = [("step", counts) for counts in ([0, 1], [1, 1], [1, 0], [1, 1], [0, 1], [1, 1])]
    script = Script([20, 20], 2, 16, block=4).play([("turn", [2, 3]), ("turn", [0, 2]), *steps])
    side = script.side
    assert [script.spans(row) for row in range(2)] == [[(0, 2), (2, 6)], [(0, 3), (3, 5), (5, 9)]]
    assert side.factors.lengths[:, 0].tolist() == [2, 3]
    for row, dense in enumerate(dense_rows(script)):
        expected = decoded(side, row, script.spans(row))
        last = expected.shape[1]
        assert np.abs(dense[:, :last].numpy() - expected).max() < 1e-5 * np.abs(expected).max()
        assert torch.equal(dense[:, last:], script.tokens[row, :, last : script.seen[row]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_keep_theirs(dtype):
    script = Script([9, 4], 2, 16, block=4, dtype=dtype).play([("turn", [4, 1]), *[("step",)] * 3])
    side = script.side
    assert side.dense().dtype == dtype and side.recent.planes["x"].dtype == dtype
    expected = naive_decoquant.roundtrip(script.tokens[0, :, :4].to(torch.promote_types(dtype, torch.float32)).numpy(), 4, 16)
    close = torch.isclose(side.dense()[0, :, :4].double(), torch.from_numpy(expected).double(), rtol=1e-2, atol=1e-3)
    assert close.double().mean() > 0.95


def test_many_tokens_are_decoded_some_at_a_time():
    length = BLOCK + 40
    side = Script([length, 30], 2, 16).play([("turn", [length, 30])]).side
    blocks = list(side.blocks())
    assert [start for start, _ in blocks] == [0, 30, 30 + BLOCK] and max(block.shape[2] for _, block in blocks) == BLOCK
    whole = torch.cat([block for _, block in blocks], 2)
    expected = decoded(side, 0, [(0, length)])
    assert np.abs(whole[0].numpy() - expected).max() < 1e-5 * np.abs(expected).max()


def marks(side, row):
    """Hashes of what a row holds encoded, token by token and block by block."""
    return [[hashlib.sha256(item.tobytes()).hexdigest() for item in part] for part in stored(side, row)]


def test_what_is_encoded_never_changes():
    script, before = Script([27, 22, 19], 2, 16, block=6), [[[], [], []]] * 3
    for event in EVENTS:
        script.play([event])
        now = [marks(script.side, row) for row in range(3)]
        for old, new in zip(before, now, strict=True):
            assert all(part[: len(was)] == was for was, part in zip(old, new, strict=True))
        before = now
    assert sum(map(len, before[0])) == 2 * 25 + 3


@pytest.mark.parametrize(("heads", "dim", "bits"), [(3, 64, 4), (2, 96, 2), (32, 128, 4)])
def test_bits_of_a_number_are_those_of_the_storages(heads, dim, bits):
    side = Script([1024], heads, dim, bits).play([("turn", [1024])]).side
    kinds = {
        "codes": side.tokens.planes["code"],
        "scales": side.tokens.planes["scale"],
        "factors": side.factors.planes["factor"],
    }
    sizes = {kind: plane.untyped_storage().nbytes() for kind, plane in kinds.items()}
    assert side.bytes_by_part == {"full_precision": 0, **sizes} and side.bytes_by_row.tolist() == [sum(sizes.values())]
    expected = naive_decoquant.bits_per_element(bits, 1024, heads * dim)
    assert 8 * sum(sizes.values()) / (1024 * heads * dim) == pytest.approx(expected, rel=0.01)
    assert side.codec.bits_of("keys", heads * dim, 2) == pytest.approx(expected)


def test_blocks_take_no_more_than_they_need():
    script = Script([27, 22, 19], 2, 16, block=6).play(EVENTS)
    spans = [script.spans(row) for row in range(3)]
    assert script.side.row_bytes().tolist() == [row[-1][1] * (16 + 2) + len(row) * 2 * 16 * 16 for row in spans]


# ---------------------------------------------------------------------------------- sequences that come and tokens that go


def dense_rows(script):
    """What each row holds, (heads, n, dim)."""
    dense = script.side.dense()
    return [dense[row, :, :seen].clone() for row, seen in enumerate(script.seen)]


def test_copies_and_chosen_sequences_are_their_own():
    script = Script([40, 35, 32], 2, 16, block=6).play(EVENTS[:7])
    before, bytes_before = dense_rows(script), script.side.bytes_by_part
    twin = Script([40, 35, 32], 2, 16, block=6, tokens=script.tokens)
    twin.side, twin.seen, twin.events = script.side.copy(), script.seen.copy(), list(script.events)
    twin.side.select_rows(torch.tensor([2, 0, 0]))
    twin.tokens, twin.seen = script.tokens[[2, 0, 0]], script.seen[[2, 0, 0]]
    for new, old in zip(dense_rows(twin), [before[2], before[0], before[0]], strict=True):
        assert torch.equal(new, old)
    twin.play([("turn", [3, 1, 5]), *[("step",)] * 7])
    assert all(torch.equal(new, old) for new, old in zip(dense_rows(script), before, strict=True))
    assert script.side.bytes_by_part == bytes_before
    kept = [("turn", [1, 3, 3]), *[("step",)] * 6]
    script.play(kept)
    alone = Script([40, 35, 32], 2, 16, block=6, tokens=script.tokens).play([*EVENTS[:7], *kept])
    assert all(torch.equal(new, old) for new, old in zip(dense_rows(script), dense_rows(alone), strict=True))


def test_tokens_leave_in_all_heads_and_a_factor_with_the_last_of_its_block():
    script = Script([27, 22, 19], 2, 16, block=6).play(EVENTS)
    side, before = script.side, dense_rows(script)
    kept = torch.zeros(3, 2, 27, dtype=torch.bool)
    for row, chosen in enumerate([[14, 20, 25, 26], [0, *range(10, 22)], range(19)]):  # row 0 loses its first block
        kept[row, :, chosen] = True
    some = kept.clone()
    some[1, 1, 3] = True
    most = int(side.encoded.max())
    assert side.may_keep(kept[..., :most]) and not side.may_keep(some[..., :most])
    side.keep(kept, None)
    script.seen = kept[:, 0].sum(-1).numpy()
    for row, (new, old) in enumerate(zip(dense_rows(script), before, strict=True)):
        assert_near(new, old[:, kept[row, 0, : old.shape[1]]])
    assert side.factors.lengths[:, 0].tolist() == [2, 3, 3] and side.tokens.lengths[:, 0].tolist() == [2, 11, 17]
    assert side.row_bytes().tolist() == [count * 18 + factors * 512 for count, factors in [(2, 2), (11, 3), (17, 3)]]
    weights = torch.rand(3, 2, 1, 1, int(script.seen.max()))
    expected = torch.stack([weights[row, ..., : new.shape[1]] @ new[:, None] for row, new in enumerate(dense_rows(script))])
    assert_near(
        side.mix(weights.masked_fill(torch.arange(19) >= torch.from_numpy(script.seen).view(3, 1, 1, 1, 1), 0)), expected
    )


def test_front_tokens_leave_some_at_a_time():
    side = Script([100, 90], 2, 16).play([("turn", [100, 90])]).side
    first = np.array([[STRIDE + 1, 70], [95, 95]])
    assert side.droppable(first).tolist() == [[STRIDE, STRIDE], [95, 95]]


def test_tokens_outside_a_window_leave_and_nothing_else_changes(monkeypatch):
    model = shared_model("mistral_swa")
    monkeypatch.setattr("kvlab.codecs.decoquant.STRIDE", 4)
    (prompt, more), logits, held = talk(1, 40, 14), [], []
    prompt_alone = lambda side, first: np.where(side.encoded == 0, first, 0)  # noqa: E731  its tokens leave before encoding
    for droppable in (None, prompt_alone):
        if droppable is not None:
            monkeypatch.setattr("kvlab.codecs.decoquant.DecoSide.droppable", droppable)
        with attach(model, make_policy("full"), codec=make_codec("decoquant", block=8, channels=8)) as session:
            cache = session.new_cache()
            feed = Feed(model, cache)
            logits.append(torch.cat([feed(prompt), feed.each(more)], 1))
            held.append(cache.kept_len.max())
    assert_near(logits[0], logits[1])
    assert held[0] < 24 + 4 and held[1] == 24 + 14


# -------------------------------------------------------------------------------------------------- whole models


def through(model, codec, *pieces, mask=None, steps=0, **options):
    """Logits of pieces, and of greedy steps after them; also the cache."""
    with attach(model, make_policy(options.pop("policy", "full")), options.pop("budget", None), codec=codec) as session:
        cache = session.new_cache()
        feed = Feed(model, cache, len(pieces[0]))
        logits = [feed(piece, mask) for piece in pieces]
        tokens, seen = feed.greedy(logits[-1][:, -1], steps) if steps else (None, logits[-1])
        return torch.cat([*logits, seen], 1), tokens, cache


@pytest.mark.parametrize("rope", ["post", "pre"])
def test_eight_bits_are_near_the_full_cache(rope):
    model = fresh_model("llama", dtype=torch.float32)
    pieces = talk(2, 60, *[1] * 14, 20, 1, 1)
    exact, _, _ = through(model, (), *pieces)
    logits, _, cache = through(model, make_codec("decoquant", bits=8, block=10, rope=rope), *pieces)
    assert_near(logits[:, :60], exact[:, :60])  # nothing is encoded yet
    error = (logits - exact)[:, 60:].abs().max() / exact.abs().max()
    assert 1e-4 < error < 0.05
    coarse, _, _ = through(model, make_codec("decoquant", bits=2, block=10, rope=rope), *pieces)
    assert (coarse - exact)[:, 60:].abs().mean() > 5 * (logits - exact)[:, 60:].abs().mean()
    parts = cache.memory().parts
    assert parts["codes"] == 2 * 2 * 2 * 94 * 32 and parts["scales"] == 2 * 2 * 2 * 94 * 2
    assert parts["factors"] == 2 * 2 * 2 * 3 * 512 and sum(parts.values()) == cache.memory().kv_bytes


def test_keys_without_rotation_are_what_is_encoded():
    model = shared_model("llama")
    prompt, last = talk(1, 40, 1)
    held = []
    for rope in ("pre", "post"):
        _, _, cache = through(model, make_codec("decoquant", bits=8, rope=rope), prompt)
        store = cache.layers[0].store
        view = store.view()
        held.append((store.sides[0].dense(), view.keys, store.table, view.positions))
    (unrotated, keys, table, positions), (rotated, same, none, _) = held
    assert none is None and torch.equal(rotated, same)
    scale = rotated.abs().max()
    assert (keys - rotated).abs().max() < 0.02 * scale < (unrotated - rotated).abs().max()
    assert (table.undo(rotated, positions) - unrotated).abs().max() < 0.02 * scale
    steps = [through(model, make_codec("decoquant", bits=8, rope=rope), prompt, last)[0][:, -1] for rope in ("pre", "post")]
    assert (steps[0] - steps[1]).abs().max() < 0.05 * steps[0].abs().max()


@pytest.mark.parametrize("rope", ["post", "pre"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_among_others_is_as_alone(side, rope):
    model, codec = shared_model("llama"), make_codec("decoquant", block=5, rope=rope)
    rows = rows_of(30, 7, 1)
    ids, mask = padded(rows, side)
    with attach(model, make_policy("full"), codec=codec) as session:
        cache = session.new_cache()
        feed = Feed(model, cache, 3)
        logits = feed(ids, mask)
        last = torch.stack([logits[row, int(mask[row].nonzero()[-1])] for row in range(3)])
        tokens, seen = feed.greedy(last, 12)
        for row, prompt in enumerate(rows):
            alone = Feed(model, session.new_cache())
            expected, expected_logits = alone.greedy(alone(prompt)[:, -1], 12)
            assert torch.equal(tokens[row], expected[0])
            assert_near(seen[row], expected_logits[0], 1e-3)  # a step may round to the next float16


def test_forks_go_their_own_ways():
    model, (prompt, one, other) = shared_model("llama"), talk(1, 30, 9, 9)
    with attach(model, make_policy("full"), codec=make_codec("decoquant", block=4)) as session:
        cache = session.new_cache()
        Feed(model, cache)(prompt)
        fork, mask = cache.fork(), torch.ones_like(prompt)
        found = []
        for branch, ids in ((fork, one), (cache, other)):
            feed = Feed(model, branch)
            feed.mask = mask
            found.append(feed.each(ids))
        for ids, logits in zip((one, other), found, strict=True):
            alone = Feed(model, session.new_cache())
            alone(prompt)
            assert_near(alone.each(ids), logits)


def test_tokens_are_evicted_before_the_rest_is_encoded():
    model, (prompt, more) = shared_model("llama"), talk(2, 60, 8)
    policy = make_policy("snapkv", obs_window=8, after_prompt="grow")
    with attach(model, policy, Budget(tokens=20), codec=make_codec("decoquant", block=6)) as session:
        cache = session.new_cache()
        feed = Feed(model, cache, 2)
        feed(prompt)
        store = cache.layers[0].store
        assert store.sides[0].encoded.tolist() == [[20, 20]] * 2 and cache.kept_len.unique().tolist() == [20]
        feed.each(more)
        assert store.sides[0].encoded.tolist() == [[26, 26]] * 2 and cache.kept_len.unique().tolist() == [28]


# ------------------------------------------------------------------------------------------------ what can't be


def test_what_cannot_be_is_refused_with_what_to_change():
    with pytest.raises(CodecError, match="bits=1: use 2 to 8"):
        make_codec("decoquant", bits=1)
    with pytest.raises(CodecError, match="block=0"):
        make_codec("decoquant", block=0)
    with pytest.raises(CodecError, match="post"):
        make_codec("decoquant", rope="none")
    keys, values = torch.zeros(1, 3, 1, 20), torch.zeros(1, 3, 1, 30)
    with pytest.raises(CodecError, match="60 numbers .* 90 .*use channels=15"):
        make_codec("decoquant").sides(0, keys, values, None)
    make_codec("decoquant", channels=15).sides(0, keys, values, None)
    model = shared_model("llama")
    with (
        pytest.raises(CodecError, match="use channels=32"),
        attach(model, make_policy("full"), codec=make_codec("decoquant", channels=48)),
    ):
        pass
    for name, why in (("adakv", "different"), ("h2o", "single tokens")):
        with pytest.raises(CodecError, match=why):
            make_codec("decoquant").check_policy(make_policy(name))
    with (
        pytest.raises(CodecError, match="rotation, .* use rope=post"),
        attach(shared_model("opt"), make_policy("full"), codec=make_codec("decoquant", rope="pre")),
    ):
        pass
    with pytest.raises(ValueError, match="infinite"):
        Script([3], 2, 16, tokens=torch.full((1, 2, 3, 16), float("inf"))).play([("turn", [3])])


def test_labels_tell_settings_apart():
    assert make_codec("decoquant").label == "decoquant4"
    assert make_codec("decoquant", bits=2, rope="pre").label == "decoquant2 rope=pre"


def test_a_row_without_new_tokens_keeps_what_waits():
    model = shared_model("llama")
    with attach(model, make_policy("full"), codec=make_codec("decoquant", block=50)) as session:
        cache = session.new_cache()
        ids = torch.arange(3, 27).view(2, 12)
        model(ids, cache=cache)
        for token in (30, 31):
            model(torch.full((2, 1), token), cache=cache)
        mask = torch.ones(2, 19, dtype=torch.long)
        mask[1, 14:] = 0
        model(ids[:, :5], attention_mask=mask, cache=cache)
        for layer in cache.layers:
            for side in layer.store.sides:
                assert (side.encoded == [[19], [12]]).all(), "two decoded tokens of the second row wait for their block"
                assert (side.recent.lengths == [[0], [2]]).all()
