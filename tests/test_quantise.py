"""The quantiser of groups: every back end bit for bit against the definition, the definition against loops over groups."""

import math

import numpy as np
import pytest
import torch

from kvlab.kernels import dispatch, packed, quantise_cpu
from kvlab.kernels.packed import BITS
from naive_codecs import affine_group, pack_bits

# (unit, dim, channels): axis token, axis channel, both; groups that don't divide, units that end within a byte
SHAPES = [(1, 64, 32), (32, 64, 1), (1, 80, 32), (32, 5, 1), (1, 38, 16), (1, 20, 32), (1, 12, 1), (5, 38, 7), (1, 1, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TINY = 2.0**-24  # the smallest half
ALONE = [0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 1e-9, -1e-9, 65504.0, -65504.0, 7e4, -7e4]  # each a group of its own


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def from_levels(seed, shape, levels):
    return torch.tensor(levels)[torch.randint(len(levels), shape, generator=torch.Generator().manual_seed(seed))]


def numbers(unit, dim):
    """Units (n, unit, dim) of every kind that rounds in its own way."""
    few = (4, unit, dim)
    spread = 10.0 ** torch.arange(-12, 10, 2.0)
    return torch.cat([
        normal(0, *few),
        normal(1, len(spread), unit, dim) * spread[:, None, None],  # subnormal scales, and beyond all halves
        (normal(2, *few) * TINY * 3) + 1,  # narrower than halves can tell
        normal(3, *few).abs() + 2,
        -normal(4, *few).abs() - 2,
        torch.tensor(ALONE).view(-1, 1, 1).expand(-1, *few[1:]),
        from_levels(5, few, [0.0, -0.0]),
        from_levels(6, few, [0.0, -0.0, 1e-9, 1e-30]),
        from_levels(7, few, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]),  # halfway between codes
        from_levels(8, few, [0.0, TINY, -TINY, TINY / 2, -TINY / 2, 1023.5 * TINY, 1024 * TINY, -1023.5 * TINY]),
        from_levels(9, few, [65504.0, 65519.0, 7e4, -7e4, 1e9, -1e9, 3e38, -3e38, 0.0]),
        from_levels(10, few, [-7e4, -1e9, -65504.0, -65505.0]),
        from_levels(11, few, [math.inf, -math.inf, 0.0, 1.0]),
        from_levels(12, few, [math.inf]),
    ])  # fmt: skip


def bits_of(planes):
    code, scale, zero = planes
    assert code.dtype == torch.uint8 and scale.dtype == zero.dtype == torch.float16
    return code, scale.view(torch.int16), zero.view(torch.int16)


def check_equal(units, bits, channels):
    expected = bits_of(packed.quantise(units, bits, channels))
    for name, found, wanted in zip(
        ("code", "scale", "zero"), bits_of(quantise_cpu.quantise(units, bits, channels)), expected, strict=True
    ):
        assert found.shape == wanted.shape, name
        wrong = (found != wanted).any(-1).nonzero().flatten().tolist()
        assert not wrong, (name, units[wrong[0]])


@pytest.mark.parametrize("bits", BITS)
def test_back_ends_give_the_same_bits(bits):
    for unit, dim, channels in SHAPES:
        for dtype in DTYPES:
            check_equal(numbers(unit, dim).to(dtype), bits, channels)


def test_every_number_near_a_half():
    """Groups of one number: the half below each, for all finite halves, what is beside them, and half way to the next."""
    half = torch.arange(2**16).to(torch.int16).view(torch.float16)
    x = half[half.isfinite()].float()
    between = x + torch.nextafter(x.half(), torch.tensor(math.inf).half()).float().sub(x).div(2)
    x = torch.cat([x, torch.nextafter(x, x + 1), torch.nextafter(x, x - 1), between])
    check_equal(x.view(-1, 1, 1), 1, 1)
    check_equal(torch.stack([torch.zeros_like(x), x.abs()], -1)[:, None], 1, 2)  # the scale is the half above


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("quantise", [packed.quantise, quantise_cpu.quantise], ids=["reference", "cpu"])
def test_definition_equals_loops(quantise, dtype):
    """Group by group, and the bytes of whole units."""
    for bits, (unit, dim, channels) in zip(BITS, SHAPES, strict=True):
        units = numbers(unit, dim)[::5].to(dtype)
        units = units[units.isfinite().flatten(1).all(1)]
        code, scale, zero = quantise(units, bits, channels)
        for u, numbers_of_unit in enumerate(units.numpy()):
            codes = np.zeros((unit, dim), dtype=int)
            for group, start in enumerate(range(0, dim, channels)):
                part = numbers_of_unit[:, start : start + channels]
                found, *halves = affine_group(part.ravel(), bits)
                codes[:, start : start + channels] = found.reshape(part.shape)
                assert [scale[u, group].item(), zero[u, group].item()] == halves
            assert bytes(code[u].tolist()) == pack_bits(codes.ravel(), bits)


@pytest.mark.parametrize("quantise", [packed.quantise, quantise_cpu.quantise], ids=["reference", "cpu"])
def test_nan_shows_in_its_group_alone(quantise):
    for unit, channels in ((1, 4), (8, 1)):
        units, place = normal(1, 3, unit, 16), (1, unit - 1, 6)
        expected = quantise(units, 4, channels)
        units[place] = math.nan
        found, group = quantise(units, 4, channels), 6 // channels
        for with_nan, without in zip(found[1:], expected[1:], strict=True):
            assert with_nan[1, group].isnan()
            others = torch.ones_like(without, dtype=torch.bool)
            others[1, group] = False
            assert torch.equal(with_nan[others], without[others])
        assert torch.equal(found[0][::2], expected[0][::2])


def test_threads_and_gaps_change_nothing():
    """Many units, which threads share, of a tensor in another order of axes."""
    before, wide = torch.get_num_threads(), normal(2, 40, 24, 100).transpose(0, 2)
    assert wide.numel() >= quantise_cpu.SHARED and not wide.is_contiguous()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            check_equal(wide, 2, 1)
    finally:
        torch.set_num_threads(before)
    check_equal(wide[:0], 2, 1)


def test_which_back_end_has_which():
    assert dispatch.REFERENCE.quantise is dispatch.choose("auto", "cpu", torch.float64).quantise is packed.quantise
    assert dispatch.choose("auto", "cpu", torch.bfloat16).quantise is quantise_cpu.quantise
    pytest.importorskip("triton")
    assert dispatch.choose("auto", "cuda", torch.bfloat16).quantise is packed.quantise
