"""Packed codes: bytes against a loop over bits, and every back end's products against loops over tokens in float64.

Rows are ragged, one is empty, and units between rows hold NaN scales, so that a read too far shows.
"""

import dataclasses
import importlib
import math
import os
import random

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # as in conftest.py, where this file runs without that

from kvlab.kernels import dispatch, packed  # noqa: E402
from kvlab.kernels.packed import BITS, Packed, dequantise, pack, packed_bytes, unpack  # noqa: E402

BACK_ENDS = {"packed": "cpu", "packed_cpu": "cpu", "packed_gpu": DEVICE}
CLOSE = {"rtol": 1e-5, "atol": 2e-5}  # of sums of a few hundred numbers of size 1


@pytest.fixture(params=BACK_ENDS)
def kernels(request):
    if request.param == "packed_gpu":
        pytest.importorskip("triton")
    return importlib.import_module(f"kvlab.kernels.{request.param}")


def device_of(kernels):
    return BACK_ENDS[kernels.__name__.rsplit(".", 1)[-1]]


# ------------------------------------------------------------------------------------------------------------ bits


def naive_pack(codes, bits):
    """Bytes of a list of whole numbers, bit by bit."""
    stream = [number >> k & 1 for number in codes for k in range(bits)]
    stream += [0] * (-len(stream) % 8)
    return [sum(stream[8 * i + k] << k for k in range(8)) for i in range(len(stream) // 8)]


@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_those_of_a_loop_over_bits(bits):
    draw = random.Random(bits)
    for count in (0, 1, 2, 3, 5, 7, 8, 9, 13, 16, 38, 65):
        rows = [[draw.choice((0, 2**bits - 1, draw.randrange(2**bits))) for _ in range(count)] for _ in range(4)]
        codes = torch.tensor(rows).view(2, 2, count)
        found = pack(codes, bits)
        assert found.dtype == torch.uint8 and found.shape == (2, 2, packed_bytes(count, bits))
        assert found.flatten(0, 1).tolist() == [naive_pack(row, bits) for row in rows]
        back = unpack(found, bits, count)
        assert back.dtype == (torch.int32 if bits == 16 else torch.uint8)
        assert torch.equal(back.long(), codes)


@pytest.mark.parametrize("bits", BITS)
def test_spare_bytes_and_bits_are_not_read(bits):
    """As where a unit's codes are the first of something longer."""
    codes = torch.randint(2**bits, (3, 11), generator=torch.Generator().manual_seed(1))
    held = torch.cat([pack(codes, bits), torch.full((3, 2), 255, dtype=torch.uint8)], -1)
    spare = -11 * bits % 8
    held[:, -3] |= 256 - 2 ** (8 - spare) if spare else 0
    assert torch.equal(unpack(held, bits, 11).long(), codes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_codes_may_be_whole_numbers_of_any_type(dtype):
    codes = torch.arange(4, dtype=dtype).repeat(5)
    for bits in BITS[1:]:
        assert torch.equal(unpack(pack(codes, bits), bits, 20).long(), codes.long())


# -------------------------------------------------------------------------------------------------------- products


@dataclasses.dataclass
class Case:
    """One side, and the plain numbers that it stands for: a list of (tokens, dim) float64, one a row."""

    side: Packed
    decoded: list

    def moved(self, device):
        parts = {name: getattr(self.side, name).to(device) for name in ("codes", "scale", "zero", "offsets", "lengths")}
        return dataclasses.replace(self.side, **parts)


def made(bits, unit, dim, channels, lengths, seed=0):
    """Rows of these many units. A code is drawn with its extremes, scales so that numbers are of size 1."""
    draw = np.random.default_rng(seed)
    groups, gap = math.ceil(dim / channels), 2
    units = sum(lengths) + gap * (len(lengths) + 1)
    codes = torch.full((units, packed_bytes(unit * dim, bits)), 255, dtype=torch.uint8)
    scale, zero = torch.full((2, units, groups), math.nan).half()
    offsets, decoded, place = [], [], gap
    for count in lengths:
        offsets.append(place)
        row = []
        for u in range(place, place + count):
            numbers = draw.integers(0, 2**bits, (unit, dim))
            codes[u] = torch.tensor(naive_pack(numbers.flatten().tolist(), bits), dtype=torch.uint8)
            scale[u] = torch.from_numpy(draw.uniform(0.5, 1, groups) / (2**bits - 1)).half()
            zero[u] = torch.from_numpy(draw.normal(-0.4, 0.3, groups)).half()
            row.append(naive_decode(numbers, scale[u].tolist(), zero[u].tolist(), channels))
        decoded.append(np.concatenate(row) if row else np.zeros((0, dim)))
        place += count + gap
    side = Packed(
        codes, scale, zero, torch.tensor(offsets), torch.tensor(lengths), bits, unit, dim, channels, max(lengths)
    )  # fmt: skip
    return Case(side, decoded)


def naive_decode(numbers, scale, zero, channels):
    return np.array([[code * scale[c // channels] + zero[c // channels] for c, code in enumerate(token)] for token in numbers])


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive_logits(queries, case):
    """(batch, kv_heads, group, queries, tokens) float64."""
    batch, heads, group, count, _ = queries.shape
    result = np.zeros((batch, heads, group, count, case.side.widest * case.side.unit))
    for b, h, g, q in np.ndindex(batch, heads, group, count):
        for t, token in enumerate(case.decoded[b * heads + h]):
            result[b, h, g, q, t] = np.dot(queries[b, h, g, q].double().numpy(), token)
    return torch.from_numpy(result)


def naive_mix(weights, case):
    """(batch, kv_heads, group, queries, dim) float64."""
    batch, heads, group, count, _ = weights.shape
    result = np.zeros((batch, heads, group, count, case.side.dim))
    for b, h, g, q in np.ndindex(batch, heads, group, count):
        for t, token in enumerate(case.decoded[b * heads + h]):
            result[b, h, g, q] += weights[b, h, g, q, t].double().item() * token
    return torch.from_numpy(result)


def check(kernels, case, batch, group, count, spare=3):
    """Both products; columns of weights that no token has hold NaN."""
    device, heads = device_of(kernels), len(case.decoded) // batch
    side, tokens = case.moved(device), case.side.widest * case.side.unit
    queries = normal(1, batch, heads, group, count, case.side.dim)
    found = kernels.packed_logits(queries.to(device), side)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), naive_logits(queries, case), **CLOSE)
    weights = normal(2, batch, heads, group, count, tokens + spare)
    for row, numbers in enumerate(case.decoded):
        weights[row // heads, row % heads, :, :, len(numbers) :] = math.nan
    found = kernels.packed_mix(weights.to(device), side)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), naive_mix(weights, case), **CLOSE)


# (unit, dim, channels), and the lengths of rows of two sequences
SHAPES = [
    ((32, 64, 1), (2, 0, 1, 1)),  # a scale for each channel of 32 tokens
    ((1, 80, 32), (37, 3, 0, 33)),  # a scale for each 32 channels of a token, the last group shorter
    ((40, 12, 1), (1, 2, 0, 1)),  # longer than a block of tokens, and no whole one
    ((1, 38, 16), (34, 0, 5, 1)),  # tokens that end within a byte
    ((8, 20, 1), (5, 1, 0, 9)),
    ((1, 128, 128), (6, 40, 0, 1)),
    ((5, 38, 7), (0, 7, 2, 1)),  # scales shared by tokens and by channels, units that end within a byte
    ((1, 96, 32), (32, 64, 0, 2)),
    ((1, 20, 32), (9, 0, 33, 4)),  # a group wider than a token
    ((1, 12, 1), (3, 2, 0, 35)),
]
LINES = [(1, 1), (3, 1), (2, 2), (8, 1), (1, 5)]  # group, queries


@pytest.mark.parametrize("bits", BITS)
def test_products_equal_loops(kernels, bits):
    """Each number of bits with three of the shapes, one with scales of each kind at least; all shapes get their turn."""
    for turn in (0, 3, 7):
        place = bits + turn
        shape, lengths = SHAPES[place % len(SHAPES)]
        check(kernels, made(bits, *shape, lengths, seed=place), 2, *LINES[place % len(LINES)])


@pytest.mark.slow
@pytest.mark.parametrize("shape, lengths", SHAPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_products_equal_loops_on_the_whole_grid(kernels, bits, shape, lengths):
    for lines in LINES:
        check(kernels, made(bits, *shape, lengths), 2, *lines)


def test_nothing_encoded_gives_zeros(kernels):
    for unit in (1, 32):
        case = made(2, unit, 16, 1 if unit > 1 else 16, (0, 0))
        check(kernels, case, 1, 2, 1)
        check(kernels, dataclasses.replace(case, side=dataclasses.replace(case.side, widest=1)), 1, 2, 1)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in Triton's interpreter
def test_a_query_gone_wrong_shows_but_not_beyond_a_rows_end(kernels):
    case = made(2, 32, 16, 1, (2, 1))
    queries = torch.full((1, 2, 1, 1, 16), math.nan).to(device_of(kernels))
    found = kernels.packed_logits(queries, case.moved(device_of(kernels))).cpu()[0, :, 0, 0]
    assert found.isnan().sum(-1).tolist() == [64, 32] and not found[1, 32:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_of_any_type_meet_numbers_that_are_not_rounded(kernels, dtype):
    case = made(4, 32, 64, 1, (1, 2))
    queries = normal(5, 1, 2, 3, 1, 64).to(dtype)
    found = kernels.packed_logits(queries.to(device_of(kernels)), case.moved(device_of(kernels)))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), naive_logits(queries, case), **CLOSE)


def test_tensors_with_gaps(kernels):
    """Weights that are part of wider ones, queries in another order of axes, planes that are every second unit's."""
    case, device = made(2, 1, 32, 16, (20, 35)), device_of(kernels)
    codes, scale, zero = (
        torch.stack((part, part), 1)[:, 0] for part in (case.side.codes, case.side.scale, case.side.zero)
    )  # fmt: skip
    assert not codes.is_contiguous()
    side = dataclasses.replace(case.moved(device), codes=codes.to(device), scale=scale.to(device), zero=zero.to(device))
    queries, wide = normal(5, 1, 3, 2, 2, 32).transpose(1, 3), normal(6, 1, 2, 2, 3, 99).to(device)
    assert not queries.is_contiguous()
    torch.testing.assert_close(
        kernels.packed_logits(queries.to(device), side).cpu().double(), naive_logits(queries, case), **CLOSE
    )
    for weights in (wide[..., 7:60], wide[..., :70:2]):
        torch.testing.assert_close(
            kernels.packed_mix(weights, side).cpu().double(), naive_mix(weights.cpu(), case), **CLOSE
        )  # fmt: skip


def test_subnormal_and_infinite_scales(kernels):
    """Half precision's ends: the smallest scale counts, one that isn't finite shows."""
    case, device = made(8, 1, 16, 1, (3,)), device_of(kernels)
    side = case.moved(device)
    queries = torch.zeros(1, 1, 1, 1, 16).to(device)
    queries[..., 0] = 2.0**20
    first = int(case.side.offsets[0])
    side.codes[first : first + 3, 0] = 255
    side.zero[:] = 0
    side.scale[first : first + 3, 0] = torch.tensor([2.0**-24, 0.5, math.inf]).half()
    found = kernels.packed_logits(queries, side).flatten().cpu()
    torch.testing.assert_close(found[:2], torch.tensor([255 * 2.0**-4, 255 * 2.0**19]))
    assert not found[2].isfinite()


def test_threads_change_nothing():
    from kvlab.kernels import packed_cpu

    case, before = made(4, 8, 24, 1, (3, 0, 5, 1, 2, 4)), torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            check(packed_cpu, case, 2, 2, 1)
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------ the definition


@pytest.mark.parametrize("shape, lengths", [SHAPES[0], SHAPES[1], SHAPES[6]], ids=str)
def test_definition_decodes_a_block_at_a_time(monkeypatch, shape, lengths):
    case, given = made(3, *shape, lengths), []
    monkeypatch.setattr(packed, "BLOCK", 16)
    monkeypatch.setattr(packed, "dequantise", lambda *args: given.append(args[1:3]) or dequantise(*args))
    check(packed, case, 2, 2, 1)
    size = max(1, 16 // case.side.unit)
    blocks = [(first, min(first + size, case.side.widest)) for first in range(0, case.side.widest, size)]
    assert len(blocks) > 1 and given == [*blocks, *blocks]


def test_definition_of_float64_models():
    case = made(4, 32, 16, 1, (2, 1))
    queries, weights = normal(1, 1, 2, 2, 1, 16).double(), normal(2, 1, 2, 2, 1, 64).double()
    for found, expected in (
        (packed.packed_logits(queries, case.side), naive_logits(queries, case)),
        (packed.packed_mix(weights, case.side), naive_mix(weights, case)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_every_back_end_has_both():
    assert (dispatch.REFERENCE.packed_logits, dispatch.REFERENCE.packed_mix) == (packed.packed_logits, packed.packed_mix)
    chosen = dispatch.choose("auto", "cpu", torch.float32)
    assert {chosen.packed_logits.__module__, chosen.packed_mix.__module__} == {"kvlab.kernels.packed_cpu"}
    chosen = dispatch.choose("auto", "cpu", torch.float64)
    assert chosen.packed_logits is packed.packed_logits
    pytest.importorskip("triton")
    chosen = dispatch.choose("auto", "cuda", torch.bfloat16)
    assert {chosen.packed_logits.__module__, chosen.packed_mix.__module__} == {"kvlab.kernels.packed_gpu"}


def test_what_does_not_fit_is_refused(kernels):
    side = made(2, 1, 16, 16, (4, 2)).moved(device_of(kernels))
    for call in (
        lambda: kernels.packed_logits(torch.zeros(1, 3, 1, 1, 16), side),
        lambda: kernels.packed_logits(torch.zeros(1, 2, 1, 1, 8), side),
        lambda: kernels.packed_mix(torch.zeros(1, 2, 1, 1, 3), side),
        lambda: dataclasses.replace(side, bits=3),
        lambda: dataclasses.replace(side, channels=8),
        lambda: dataclasses.replace(side, scale=side.scale.float()),
    ):
        with pytest.raises(AssertionError):
            call()
