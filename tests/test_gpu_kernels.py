"""The GPU's kernels against the definition in plain torch, and the scan against the processor's kernels.

Without a GPU Triton's interpreter runs them on the processor: it finds wrong numbers, not wrong barriers.
"""

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton decides at its first import whether the interpreter runs kernels. conftest.py sets this too, before everything
    # that imports Triton on its own; here it helps where this file runs without that.
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from kvlab.kernels import cpu, gpu, reference  # noqa: E402
from kvlab.kernels.contract import GROUPS, Arrivals, Decay, Limits, Marks, ScanRule, Slots  # noqa: E402
from kvlab.kernels.reference import AttentionRule, Fade  # noqa: E402

if DEVICE == "cpu":
    import triton.language as tl

    assert not hasattr(tl.cdiv, "cache_key"), "Triton was imported before TRITON_INTERPRET=1: set it in the environment"

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-5, torch.float16: 2e-5}
"""bfloat16: a weight is held in two halves of 8 bits each."""
PLAIN = AttentionRule(0.3)
FADE = Fade(0.7, 0.05, 1, torch.tensor([[0, 2], [5, 2**40]]))


def close(found, expected, tolerance):
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=tolerance, atol=tolerance)


def on_device(thing):
    """A copy on the device of all tensors that a dataclass holds; of a tensor itself."""
    if isinstance(thing, torch.Tensor):
        return thing.clone().to(DEVICE)
    parts = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init}
    return dataclasses.replace(
        thing, **{name: on_device(part) for name, part in parts.items() if isinstance(part, torch.Tensor)}
    )


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codes(seed, *shape):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def sinks(heads, group):
    return normal(99, heads, group)


def filled(batch, heads, widest, dims, lengths, dtype=torch.float32, spread=1):
    """Slots with these many tokens a row, in shuffled order, every `spread`-th position; gaps between rows hold NaN."""
    room = widest + 3
    total = batch * heads * room
    keys, values = (torch.full((total, dim), float("nan"), dtype=dtype) for dim in dims)
    positions = torch.full((total,), -1, dtype=torch.int32)
    offsets = torch.arange(batch * heads) * room
    for row, length in enumerate(lengths):
        part = slice(row * room, row * room + length)
        keys[part], values[part] = normal(row, length, dims[0], dtype=dtype), normal(row + 50, length, dims[1], dtype=dtype)
        positions[part] = torch.randperm(length, generator=torch.Generator().manual_seed(row)).int() * spread
    return Slots(keys, values, positions, offsets, torch.tensor(lengths), widest)


def dense(slots, batch, heads):
    """Keys, values and positions of all rows, (batch, kv_heads, widest, ...)."""
    index = slots.offsets[:, None] + torch.arange(slots.widest)
    inside = torch.arange(slots.widest) < slots.lengths[:, None]
    keys, values = (
        part[index].masked_fill(~inside[..., None], 0).unflatten(0, (batch, heads)) for part in (slots.keys, slots.values)
    )
    return keys, values, slots.positions[index].masked_fill(~inside, -1).unflatten(0, (batch, heads))


# ------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    "group, count, dims, rule, dtype, spread",
    [
        (1, 1, (16, 16), PLAIN, torch.float32, 1),
        (3, 2, (20, 33), AttentionRule(0.2, window=9), torch.float32, 1),
        (4, 1, (64, 16), AttentionRule(0.3, softcap=2.0), torch.bfloat16, 1),
        (2, 1, (16, 40), AttentionRule(0.3, sinks=sinks(2, 2)), torch.float16, 1),
        (5, 4, (24, 24), AttentionRule(0.3, window=23, softcap=5.0, sinks=sinks(2, 5)), torch.float32, 3),
        (2, 2, (16, 16), AttentionRule(0.3, fade=FADE), torch.float32, 1),
        (3, 1, (24, 16), AttentionRule(0.3, window=30, softcap=2.0, sinks=sinks(2, 3), fade=FADE), torch.bfloat16, 2),
    ],
)
@pytest.mark.parametrize("want_weights", [False, True])
def test_decode_attend_equals_the_definition(group, count, dims, rule, dtype, spread, want_weights):
    lengths = [37, 5, 40, 16]
    slots = filled(2, 2, 41, dims, lengths, dtype, spread)
    queries = normal(7, 2, 2, group, count, dims[0], dtype=dtype)
    now = torch.tensor([4, 15]) * spread  # the newest position in the shortest row of each sequence; others hold newer ones
    where = now[:, None] - torch.arange(count)[None] * (spread > 1)
    if count > 1:
        where[0, 0] = -1
    keys, values, positions = dense(slots, 2, 2)
    expected = reference.weights(queries, keys, where, positions, rule)
    output, found = gpu.decode_attend(
        on_device(queries), on_device(slots), where.to(DEVICE), moved(rule), want_weights=want_weights
    )
    assert output.dtype == torch.float32
    close(output, expected @ values.float()[:, :, None], TOLERANCE[dtype])
    if want_weights:
        close(found, expected, TOLERANCE[dtype])
        assert not found.cpu().masked_select(positions[:, :, None, None].expand_as(found) < 0).any()
    else:
        assert found is None


def moved(rule):
    parts = {name: on_device(getattr(rule, name)) for name in ("sinks", "fade") if getattr(rule, name) is not None}
    return dataclasses.replace(rule, **parts)


@pytest.mark.parametrize("lengths", [[1, 1], [33, 1], [0, 7]])
def test_decode_attend_of_tiny_and_empty_rows(lengths):
    """A row that holds nothing gives 0; more shares than tokens are no trouble."""
    slots = filled(1, 2, 60, (16, 16), lengths)
    queries = normal(3, 1, 2, 2, 1, 16)
    output, found = gpu.decode_attend(
        on_device(queries), on_device(slots), torch.tensor([[99]]).to(DEVICE), PLAIN, want_weights=True
    )
    keys, values, positions = dense(slots, 1, 2)
    expected = reference.weights(queries, keys, torch.tensor([[99]]), positions, PLAIN)
    expected = expected * (torch.tensor(lengths) > 0)[None, :, None, None, None]
    close(found, expected, 1e-5)
    close(output, expected @ values[:, :, None], 1e-5)


# -------------------------------------------------------------------------------------------------------- prefill


@pytest.mark.parametrize("group", [*GROUPS, None])
@pytest.mark.parametrize(
    "size, dims, rule, dtype, causal, padded",
    [
        (1, (16, 16), PLAIN, torch.float32, True, False),
        (3, (20, 24), AttentionRule(0.2, window=7), torch.float32, True, False),
        (2, (16, 40), AttentionRule(0.3, window=12, softcap=2.0, sinks=sinks(2, 2)), torch.float32, False, True),
        (2, (32, 16), AttentionRule(0.2, sinks=sinks(2, 2)), torch.bfloat16, False, False),
    ],
)
def test_prefill_stats_equal_the_definition(group, size, dims, rule, dtype, causal, padded):
    count = 21
    earlier = 0 if causal else 6
    queries = normal(1, 2, 2, size, count, dims[0], dtype=dtype)
    keys, values = (normal(seed, 2, 2, earlier + count, dim, dtype=dtype) for seed, dim in ((2, dims[0]), (3, dims[1])))
    positions = torch.arange(earlier + count, dtype=torch.int32).expand(2, 2, -1).clone()
    where = (torch.arange(count) + earlier).expand(2, -1).clone()
    if padded:  # the second sequence starts with pads, and two of the first one's slots are empty
        where[1] = torch.cat([torch.full((5,), -1), torch.arange(count - 5)])
        positions[1] = torch.cat([torch.full((earlier + 5,), -1), torch.arange(count - 5)])
        positions[0, 1, 3] = positions[0, 0, 18] = -1
    expected, mass = reference.attend_with_mass(
        queries.float(), keys, values, where, positions, rule, group=group, causal=causal
    )
    inputs = (part.to(DEVICE) for part in (queries, keys, values, where, positions))
    output, found = gpu.prefill_stats(*inputs, moved(rule), group=group, causal=causal)
    assert output.dtype == found.dtype == torch.float32
    close(output, expected, TOLERANCE[dtype])
    close(found, mass, TOLERANCE[dtype])


# ------------------------------------------------------------------------------------------------------- the scan


@dataclasses.dataclass(frozen=True)
class Case:
    """A scan: ragged rows that hold something already, tokens with pads in between."""

    rule: ScanRule
    attention: AttentionRule = PLAIN
    limit: int = 9
    target: int = 9
    recent: int = 3
    num_sink: int = 2
    before: bool = False
    group: int = 2
    dims: tuple = (16, 24)
    dtype: torch.dtype = torch.float32
    special: bool = False
    source: bool = False
    values: str = "random"
    tokens: int = 7
    bytes: int = 1
    probes: int = 2

    def build(self):
        """Queries, arrivals, slots, limits."""
        batch, heads, widest = 2, 2, 21
        lengths = [6, 6, 9, 9] if self.rule.coupled else [6, 9, 4, 10]
        slots = filled(batch, heads, widest, self.dims, lengths, self.dtype)
        # Rows of a sequence hold tokens of the same past, and the newest of all comes before what arrives.
        for row, length in enumerate(lengths):
            seed = torch.Generator().manual_seed(row // heads if self.rule.coupled else row)
            part = slice(int(slots.offsets[row]), int(slots.offsets[row]) + length)
            slots.positions[part] = torch.randperm(14, generator=seed)[:length].int()
        total = len(slots.positions)
        value = None
        if self.rule.plane is not None:
            value = normal(5, total).abs().float()
            if self.values == "ties":
                value.fill_(0.5)
            if self.values == "odd":
                value[::3], value[1::7], value[5::11] = float("nan"), float("inf"), float("-inf")
        slots = dataclasses.replace(
            slots,
            value=value,
            special=torch.arange(total) % 5 == 0 if self.special else None,
            source=torch.arange(total, dtype=torch.int32) if self.source else None,
            norm=None if self.rule.norm is None else normal(6, total).abs(),
            bits=None if self.rule.bits is None else codes(7, total, self.bytes),
        )
        tokens = self.tokens
        positions = torch.stack([torch.arange(tokens) + 14, torch.arange(tokens) + 13])
        if tokens > 2:
            positions[0, 2] = positions[1, 0] = -1
        arrived = None
        if self.rule.plane is not None and self.values != "ties":
            arrived = normal(8, batch, heads, tokens).abs()
        arrivals = Arrivals(
            normal(11, batch, heads, tokens, self.dims[0], dtype=self.dtype),
            normal(12, batch, heads, tokens, self.dims[1], dtype=self.dtype),
            positions,
            arrived,
            torch.arange(batch * tokens).view(batch, tokens) % 4 == 1 if self.special else None,
            1000 + torch.arange(batch * heads * tokens, dtype=torch.int32).view(batch, heads, tokens) if self.source else None,
            None if self.rule.norm is None or self.values == "ties" else normal(9, batch, heads, tokens).abs(),
            codes(10, batch, heads, tokens, self.bytes) if self.rule.order == "distance" else None,
            codes(14, batch, heads, self.probes, tokens, self.bytes) if self.rule.order == "distance" else None,
        )
        queries = normal(13, batch, heads, self.group, tokens, self.dims[0], dtype=self.dtype)
        ragged = torch.zeros(batch, heads, dtype=torch.int64) if self.rule.coupled else torch.tensor([[0, 2], [1, 0]])
        limits = Limits(
            torch.tensor(self.limit) + ragged,
            torch.tensor(self.target) + ragged,
            torch.full((batch, heads), self.recent),
            self.num_sink,
            self.before,
            torch.tensor([[0, 3], [2**40, 1]]) if self.rule.order == "decayed" else None,
        )
        return queries, arrivals, slots, limits

    def both(self):
        """(outputs, slots) of the processor's kernels and of the GPU's."""
        queries, arrivals, slots, limits = self.build()
        theirs = on_device(slots)
        output = gpu.evict_scan(
            on_device(queries), on_device(arrivals), theirs, on_device(limits), moved(self.attention), self.rule
        )
        expected = cpu.evict_scan(queries, arrivals, slots, limits, self.attention, self.rule)
        return (expected, slots), (output, theirs)


def counted(window, high=False, of="seen", group="mean"):
    return ScanRule("marks", "count", bits="marks", marks=Marks(window, high, of), group=group)


def decayed(observe="sum", decay=Decay(0.8, 0.1, 1.2, 0.7, 0.3)):  # noqa: B008 - it is frozen
    return ScanRule(observe, "decayed", None if observe == "last" else "mass", norm="norm", decay=decay)


def expired(window, of="seen", group="max", observe="stamps"):
    return ScanRule(observe, "expired", "mass", marks=Marks(window, of=of), group=group)


SUMS = ScanRule("sum", "value", "mass")
FAR = ScanRule(order="distance", bits="codes")
CASES = {
    "sum": Case(SUMS),
    "sum, many leave at once": Case(SUMS, target=7),
    "sum, ties": Case(ScanRule("nothing", "value", "mass"), values="ties"),
    "sum, odd values": Case(SUMS, values="odd"),
    "sum, max of a group of 3": Case(ScanRule("sum", "value", "mass", group="max"), group=3),
    "sum of a group of 5": Case(ScanRule("sum", "value", "mass", group="sum"), group=5, dims=(33, 16)),
    "sum, first of a group": Case(ScanRule("sum", "value", "mass", group="first"), group=4),
    "sum, before": Case(SUMS, before=True, target=8),
    "sum, coupled": Case(ScanRule("sum", "value", "mass", coupled=True)),
    "sum, bfloat16": Case(SUMS, dtype=torch.bfloat16),
    "sum, float16, cap, sinks": Case(SUMS, AttentionRule(0.3, softcap=2.0, sinks=sinks(2, 2)), dtype=torch.float16),
    "last, coupled": Case(ScanRule("last", "value", coupled=True), num_sink=0, recent=1),
    "last, coupled, before": Case(ScanRule("last", "value", group="max", coupled=True), before=True, special=True),
    "last": Case(ScanRule("last", "value"), AttentionRule(0.3, window=8), source=True),
    "last, before": Case(ScanRule("last", "value"), before=True, source=True, target=7),
    "age": Case(ScanRule()),
    "age, before": Case(ScanRule(), before=True),
    "age, window": Case(ScanRule(), AttentionRule(0.3, window=6), special=True, source=True, num_sink=4),
    "value, window": Case(ScanRule("nothing", "value", "mass"), AttentionRule(0.3, window=12), recent=1, num_sink=1),
    "age, all protected": Case(ScanRule(), recent=100, num_sink=4, limit=6, target=5, special=True),
    "age, all sinks": Case(ScanRule(), recent=1, num_sink=100, limit=6, target=5, special=True),
    "age, coupled, huge limit": Case(ScanRule(coupled=True), limit=2**40, target=2**40),
    "ranked": Case(ScanRule("nothing", "ranked", "mass"), values="odd", special=True),
    "ranked, half are finite": Case(ScanRule("sum", "ranked", "mass"), values="odd", limit=11, target=10, source=True),
    "ranked, all finite": Case(ScanRule("nothing", "ranked", "mass"), limit=8, target=8),
    "ranked, coupled": Case(ScanRule("nothing", "ranked", "mass", coupled=True), values="odd"),
    "low of seen": Case(counted(5), target=6, special=True, source=True),
    "low of held, around a word's end": Case(counted(29, of="held"), bytes=4, target=6),
    "high of held, max": Case(counted(20, True, "held", "max"), bytes=3, group=3, before=True, target=5),
    "high of seen, sum": Case(counted(8, True, group="sum"), AttentionRule(0.3, window=9), bytes=1, group=3),
    "marks, coupled, age": Case(ScanRule("marks", bits="marks", marks=Marks(3), coupled=True)),
    "distance": Case(FAR, before=True, target=6, special=True, source=True),
    "distance, 2 bytes": Case(FAR, bytes=2, probes=1, before=True),
    "distance, 5 bytes": Case(FAR, AttentionRule(0.3, window=12), bytes=5, probes=3, recent=1),
    "distance, a word": Case(FAR, bytes=4, probes=3, target=7),
    "distance, words": Case(FAR, bytes=20, probes=1, target=7, before=True),
    "decayed": Case(decayed(), target=6, special=True, source=True),
    "decayed, last, before": Case(decayed("last", Decay(0.9, 0.01, 2.0, 1.0, 0.5)), before=True, target=6),
    "decayed, odd values": Case(decayed("nothing", Decay(0.7, 0.3, 0.5, 0.0, 1.0)), values="odd", target=5),
    "decayed, ties": Case(decayed("nothing", Decay(0.7, 0.3, 0.0, 1.0, 1.0)), values="ties", target=5),
    "expired": Case(expired(14), recent=1, special=True, source=True, limit=20),
    "expired, down to a target": Case(expired(15, group="mean"), group=3, recent=1, limit=7, target=5),
    "expired, of held, window": Case(expired(3, "held"), AttentionRule(0.3, window=11), dtype=torch.bfloat16, source=True),
    "expired, before": Case(expired(14), before=True, recent=1, special=True, limit=20),
    "expired, odd values": Case(expired(15, observe="nothing"), values="odd", recent=1, limit=20),
    "expired, never": Case(expired(2**40), limit=2**40, target=2**40),
    "fade": Case(SUMS, AttentionRule(0.3, fade=FADE)),
    "fade, cap, sinks, window": Case(
        counted(4), AttentionRule(0.3, 10, 2.0, sinks(2, 2), fade=FADE), dtype=torch.bfloat16, target=6
    ),
    "no dims, age": Case(ScanRule(), AttentionRule(0.3, window=9), dims=(0, 0), source=True, target=6),
    "no dims, distance": Case(FAR, dims=(0, 0), bytes=8, source=True, special=True, before=True),
    "no key dims": Case(FAR, dims=(0, 16)),
}


def check_scan(case):
    (expected, theirs), (output, ours) = case.both()
    tolerance = TOLERANCE[case.dtype]
    close(output, expected, tolerance)
    assert torch.equal(ours.lengths.cpu(), theirs.lengths)
    assert torch.equal(ours.positions.cpu(), theirs.positions)
    held = theirs.positions >= 0
    for name in ("keys", "values", "special", "source", "norm", "bits"):
        plane, other = getattr(ours, name), getattr(theirs, name)
        assert (plane is None) == (other is None)
        if plane is not None:
            assert torch.equal(plane.cpu()[held], other[held]), name
    if ours.value is not None:
        torch.testing.assert_close(
            ours.value.cpu()[held].float(), theirs.value[held], rtol=tolerance, atol=tolerance, equal_nan=True
        )
    outside = torch.ones_like(held)
    for start in theirs.offsets.tolist():
        outside[start : start + theirs.widest] = False
    assert ours.keys.cpu()[outside].isnan().all(), "a write beyond a row's end"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_scan_of_many_tokens(case):
    check_scan(case)


STEPWISE = [
    "sum", "sum, before", "last, coupled, before", "last", "ranked", "age, window", "age, before", "high of held, max",
    "distance", "decayed", "expired", "expired, before", "fade",
]  # fmt: skip


@pytest.mark.parametrize("name", STEPWISE)
def test_scan_of_many_tokens_launch_by_launch(name, monkeypatch):
    monkeypatch.setattr(gpu, "STEP_BYTES", 0)
    check_scan(CASES[name])


SINGLY = ["sum", "sum, coupled", "last, before", "last, coupled", "age", "ranked", "low of seen", "expired", "no dims, age"]


@pytest.mark.parametrize("name", SINGLY)
def test_scan_of_one_token(name):
    check_scan(dataclasses.replace(CASES[name], tokens=1, limit=6, target=5))


@pytest.mark.parametrize(
    "rule, number_of_bytes",
    [(ScanRule("nothing", "value", "mass"), 1), (counted(77), 10), (FAR, 76), (decayed(), 1), (expired(75), 1)],
    ids=["value", "count", "distance", "decayed", "expired"],
)
def test_victims_beyond_one_block(rule, number_of_bytes):
    """Rows longer than the blocks that tokens are looked at in; several equal values, the oldest of which leaves."""
    length, widest = 75, 80
    slots = filled(1, 2, widest, (16, 16), [length, length])
    total = len(slots.positions)
    value = (torch.arange(total) % 4).float()  # so that slots of one lane are equal too
    slots = dataclasses.replace(slots, value=value, norm=normal(4, total).abs(), bits=codes(5, total, number_of_bytes))
    positions = torch.arange(3)[None] + length
    arrivals = Arrivals(
        normal(1, 1, 2, 3, 16), normal(2, 1, 2, 3, 16), positions, bits=codes(6, 1, 2, 3, number_of_bytes),
        probes=codes(7, 1, 2, 2, 3, number_of_bytes),
    )  # fmt: skip
    bounds = (torch.full((1, 2), number) for number in (length, length - 20, 10))
    limits = Limits(*bounds, num_sink=4, grace=torch.tensor([[20, 7]]))
    queries, theirs = normal(3, 1, 2, 1, 3, 16), on_device(slots)
    attention = AttentionRule(0.3, fade=Fade(0.9, 0.01, 4, torch.tensor([[3, 30]])))
    output = gpu.evict_scan(on_device(queries), on_device(arrivals), theirs, on_device(limits), moved(attention), rule)
    expected = cpu.evict_scan(queries, arrivals, slots, limits, attention, rule)
    close(output, expected, 1e-5)
    assert torch.equal(theirs.positions.cpu(), slots.positions)
    assert torch.equal(theirs.lengths.cpu(), slots.lengths)


# --------------------------------------------------------------------------------------------------- the compiler


def test_experiment_checks_itself_under_the_interpreter():
    script = Path(__file__).parents[1] / "experiments/gpu_check.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[1])}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run([sys.executable, script, "--interpret"], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all checks passed" in ran.stdout
    if DEVICE == "cpu":
        ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 2 and len((ran.stdout + ran.stderr).strip().splitlines()) == 1


COMPILE = textwrap.dedent("""
    import torch, triton
    from triton.backends.compiler import GPUTarget

    class Driver:  # as much of a driver as compiling asks for
        get_current_target = lambda self: GPUTarget("cuda", 80, 32)
        get_current_device = lambda self: 0
        get_current_stream = lambda self, device: 0

    triton.runtime.driver.set_active(Driver())
    from kvlab.kernels import gpu, packed_gpu
    from kvlab.kernels.contract import Arrivals, Decay, Limits, Marks, ScanRule, Slots
    from kvlab.kernels.packed import Packed, packed_bytes
    from kvlab.kernels.reference import AttentionRule, Fade

    class Compiled:
        def __init__(self, kernel):
            self.kernel = kernel
        def __getitem__(self, grid):
            return lambda *args, **options: self.show(self.kernel.warmup(*args, grid=grid, **options).metadata)
        def show(self, metadata):
            assert metadata.shared <= 99 * 1024, (self.kernel.__name__, metadata.shared)
            print("compiled", self.kernel.__name__)

    for module, names in ((gpu, ("_attend_part", "_combine", "scan_units", "_forward", "_mass")),
                          (packed_gpu, ("_logits", "_mix"))):
        for name in names:
            setattr(module, name, Compiled(getattr(module, name)))

    def run(dtype, dim, tokens, rule, attention, planes, width=1):
        total = 600
        slots = Slots(torch.zeros(total, dim, dtype=dtype), torch.zeros(total, dim, dtype=dtype), torch.zeros(total).int(),
                      torch.arange(2) * 300, torch.zeros(2).long(), 300, torch.zeros(total) if rule.plane else None,
                      torch.zeros(total).bool() if planes else None, torch.zeros(total).int() if planes else None,
                      torch.zeros(total) if rule.norm else None, torch.zeros(total, width).byte() if rule.bits else None)
        new = torch.zeros(1, 2, tokens, dim, dtype=dtype)
        arrivals = Arrivals(new, new, torch.zeros(1, tokens).long(), torch.zeros(1, 2, tokens) if planes else None,
                            torch.zeros(1, tokens).bool() if planes else None,
                            torch.zeros(1, 2, tokens).int() if planes else None,
                            torch.zeros(1, 2, tokens) if planes else None,
                            torch.zeros(1, 2, tokens, width).byte() if planes else None,
                            torch.zeros(1, 2, 3, tokens, width).byte())
        limits = Limits(*3 * [torch.zeros(1, 2).long()], before=planes, grace=torch.zeros(1, 2).long())
        queries = torch.zeros(1, 2, 3, tokens, dim, dtype=dtype)
        gpu.evict_scan(queries, arrivals, slots, limits, attention, rule)
        positions = torch.zeros(1, 2, tokens).int()
        if dim == 0 or attention.fade is not None:
            return
        gpu.prefill_stats(queries, new, new, arrivals.positions, positions, attention, group=rule.group, causal=planes)

    run(torch.bfloat16, 128, 1, ScanRule("sum", "value", "mass"), AttentionRule(0.1), False)
    run(torch.float32, 80, 5, ScanRule("last", "ranked", group="max", coupled=True),
        AttentionRule(0.1, 9, 5.0, torch.zeros(2, 3)), True)
    fading = AttentionRule(0.1, fade=Fade(0.9, 0.1, 1, torch.zeros(1, 2).long()))
    marks = ScanRule("marks", "count", bits="bits", marks=Marks(40))
    decayed = ScanRule("sum", "decayed", "mass", norm="norm", decay=Decay(1.0, 0.1, 1.0, 1.0, 0.3))
    far = ScanRule(order="distance", bits="bits")
    run(torch.bfloat16, 128, 1, marks, fading, False, 5)
    run(torch.bfloat16, 64, 5, marks, fading, True, 20)
    run(torch.float32, 64, 5, decayed, fading, True)
    expired = ScanRule("stamps", "expired", "value", marks=Marks(2**40, of="held"), group="max")
    run(torch.bfloat16, 128, 1, expired, AttentionRule(0.1), False)
    run(torch.float32, 64, 5, expired, AttentionRule(0.1, 9), True)
    run(torch.bfloat16, 64, 5, far, AttentionRule(0.1), False, 2)
    run(torch.float32, 0, 5, far, AttentionRule(0.1), True, 8)

    for bits, unit, dim, channels, dtype in ((2, 32, 128, 1, torch.bfloat16), (4, 1, 80, 32, torch.float16),
                                             (3, 1, 64, 64, torch.float32), (16, 8, 256, 1, torch.bfloat16)):
        planes = 2 * [torch.zeros(9, -(-dim // channels)).half()]
        side = Packed(torch.zeros(9, packed_bytes(unit * dim, bits)).byte(), *planes, torch.zeros(2).long(),
                      torch.zeros(2).long(), bits, unit, dim, channels, 4)
        packed_gpu.packed_logits(torch.zeros(1, 2, 3, 1, dim, dtype=dtype), side)
        packed_gpu.packed_mix(torch.zeros(1, 2, 3, 1, 4 * unit), side)
""")


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path):
    """No GPU is needed for that. The interpreter accepts much that the compiler refuses."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("compiled") >= 25, ran.stdout
