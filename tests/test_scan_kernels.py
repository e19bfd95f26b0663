"""Kernels of every back end against plain loops in float64 (naive_kernels): the scan, decoding, and attention with mass.

Random cases whose decisions hang on accumulated attention are redrawn until no decision is a near tie, since kernels add up
in float32. Every case has garbage around its rows: NaN keys at positions that would be visible, so a read too far shows.
"""

import dataclasses
import importlib
import itertools
import math

import numpy as np
import pytest
import torch

from kvlab.kernels.contract import GROUPS, OBSERVE, ORDER, Arrivals, Decay, Limits, Marks, ScanRule, Slots
from kvlab.kernels.reference import AttentionRule, Fade, attend_with_mass
from naive_kernels import naive_attend, naive_prefill, naive_scan, numbers, rows_of, sees

THINNED = 3
BACK_ENDS = {"cpu": "cpu"}  # module in kvlab.kernels: device
FLOAT16 = pytest.param(torch.float16, marks=pytest.mark.slow)  # kernels of one more type take half a minute to compile
DTYPES = (torch.float32, torch.bfloat16, FLOAT16)
UNLIMITED = 2**40
CLOSE = {"rtol": 1e-5, "atol": 4e-6}
SAME = {"rtol": 1e-6, "atol": 1e-6}
CLEAR = 3e-5
"""Smallest relative gap between two values at which float32 sums surely decide as float64 ones do."""
DIMS = ((16, 16), (32, 32), (64, 64), (80, 80), (128, 128), (256, 256), (64, 16), (16, 80), (24, 20))
RULES = [
    (observe, order, before)
    for observe, order, before in itertools.product(OBSERVE, ORDER, (False, True))
    if not (observe == "last" and before)  # a token that comes in first has no attention to decide by
]
COUPLED_ORDERS = ("age", "value", "ranked")
DECAY = Decay(rate=0.9, floor=0.2, power=1.2, value_weight=0.7, norm_weight=0.3)
FADE = (0.8, 0.1, 1, (0, 4))  # rate, floor, sinks, grace
PADS = {
    "none": "++++++++++++",
    "left": "...+++++++++",
    "right": "+++++++++...",
    "middle": "++..++.+++++",
    "mixed": ".++.++++..+.",
    "only": "............",
}


@pytest.fixture(params=BACK_ENDS)
def kernels(request):
    return importlib.import_module(f"kvlab.kernels.{request.param}")


def device_of(kernels):
    return BACK_ENDS[kernels.__name__.rsplit(".", 1)[-1]]


@dataclasses.dataclass(frozen=True)
class Case:
    queries: torch.Tensor
    arrivals: Arrivals
    slots: Slots
    limits: Limits
    attention: AttentionRule
    rule: ScanRule
    capacities: list


def on(device, thing):
    """A copy of a dataclass of tensors, or of one tensor, on a device."""
    if isinstance(thing, torch.Tensor):
        return thing.clone().to(device)
    if dataclasses.is_dataclass(thing):
        names = [field.name for field in dataclasses.fields(thing) if field.init]
        return dataclasses.replace(thing, **{name: on(device, getattr(thing, name)) for name in names})
    return thing


class Draw:
    """Random tensors from one seed."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def uniform(self, *shape):
        return torch.rand(*shape, generator=self.generator)

    def below(self, high):
        return int(torch.randint(high, (), generator=self.generator))

    def between(self, low, high):
        return low + self.below(high - low + 1)

    def some(self, size, count):
        """`count` of range(size), shuffled."""
        return torch.randperm(size, generator=self.generator)[:count].tolist()


def make_rule(observe="nothing", order="age", merge="mean", *, marks=None, decay=DECAY, coupled=False):
    """A rule with all that its family needs; planes are named as those of `Slots`."""
    marks = marks or Marks(5)
    by_bits = observe == "marks" or order in ("count", "distance")
    by_value = order in ("value", "ranked", "decayed", "expired")
    return ScanRule(
        observe,
        order,
        "value" if observe in ("sum", "stamps") or (by_value and observe != "last") else None,
        bits="bits" if by_bits else None,
        norm="norm" if order == "decayed" else None,
        marks=marks if observe in ("marks", "stamps") or order in ("count", "expired") else None,
        decay=decay if order == "decayed" else None,
        group=merge,
        coupled=coupled,
    )


def plane_of_limits(draw, value, shape):
    """One number for all rows, or a random one of each row from a range (low, high)."""
    rows = [value if isinstance(value, int) else draw.between(*value) for _ in range(math.prod(shape))]
    return torch.tensor(rows).reshape(shape)


def make_limits(draw, shape, limit, target, recent, num_sink, before, grace):
    limit = plane_of_limits(draw, limit, shape)
    target = limit.clone() if target is None else torch.minimum(limit, plane_of_limits(draw, target, shape))
    recent = torch.minimum(limit, plane_of_limits(draw, recent, shape))
    grace = None if grace is None else plane_of_limits(draw, grace, shape)
    return Limits(limit=limit, target=target, recent=recent, num_sink=num_sink, before=before, grace=grace)


def most_held(length, arriving, limit, before):
    """Slots that a row needs, not one more."""
    return max(length, min(length + arriving, max(limit, length) + (0 if before else 1)))


def held_positions(draw, shape, limits, start, held, coupled):
    """Positions that each row holds at first, shuffled: some of those before `start`; the rows of a unit alike."""
    batch, kv_heads = shape
    rows = []
    for b, h in np.ndindex(batch, kv_heads):
        if coupled and h > 0:
            rows.append(rows[-1])
            continue
        most = min(start[b], int(limits.limit[b, h]) + 2)
        length = {"none": 0, "full": min(start[b], int(limits.limit[b, h])), "ragged": draw.between(0, most)}[held]
        rows.append(draw.some(start[b], length))
    return rows


def fill_values(draw, size, kind, dtype):
    values = draw.uniform(size) * 2
    if kind == "ties":
        values = (values * 2).floor()
    if kind == "odd":
        for index, number in enumerate((math.nan, math.inf, -math.inf)):
            values[draw.some(size, size // 6 + (index == 0) * size // 6)] = number
    if kind == "zero":
        values = values * 0
    return values.to(dtype)


def make_slots(draw, held, capacities, dims, dtype, *, values, special, source, value_dtype, norms=None, code=None):
    """Rows with gaps between them. What no row holds is garbage; a gap's positions look like those of tokens."""
    gaps = [draw.below(4) for _ in range(len(held) + 1)]
    offsets = [sum(gaps[: r + 1]) + sum(capacities[:r]) for r in range(len(held))]
    total = max(1, sum(gaps) + sum(capacities))
    slots = Slots(
        keys=torch.full((total, dims[0]), math.nan, dtype=dtype),
        values=torch.full((total, dims[1]), math.nan, dtype=dtype),
        positions=torch.full((total,), 1, dtype=torch.int32),
        offsets=torch.tensor(offsets),
        lengths=torch.tensor([len(row) for row in held]),
        widest=max(capacities),
        value=None if values is None else torch.full((total,), 77.0, dtype=value_dtype),
        special=torch.ones(total, dtype=torch.bool) if special else None,
        source=torch.full((total,), -55, dtype=torch.int32) if source else None,
        norm=None if norms is None else torch.full((total,), 88.0),
        bits=None if code is None else torch.full((total, code.bytes), 0b10101010, dtype=torch.uint8),
    )
    for row, offset, capacity in zip(held, offsets, capacities, strict=True):
        slots.positions[offset : offset + capacity] = -1
        part = slice(offset, offset + len(row))
        slots.positions[part] = torch.tensor(row, dtype=torch.int32)
        slots.keys[part], slots.values[part] = draw.normal(len(row), dims[0]), draw.normal(len(row), dims[1])
        if values is not None:
            slots.value[part] = fill_values(draw, len(row), values, value_dtype)
        if special:
            slots.special[part] = torch.tensor([position % 5 == 1 for position in row], dtype=torch.bool)
        if source:
            slots.source[part] = torch.arange(len(row), dtype=torch.int32) + 1000 * (offset + 1)
        if norms is not None:
            slots.norm[part] = fill_values(draw, len(row), norms, torch.float32)
        if code is not None:
            slots.bits[part] = code.draw(draw, len(row))
    return slots


@dataclasses.dataclass(frozen=True)
class Code:
    """How a rule's bits are drawn: only the first `places` of their bytes are ever set."""

    bytes: int
    places: int

    def draw(self, draw, *shape):
        bits = torch.randint(2, (*shape, 8 * self.bytes), generator=draw.generator)
        bits[..., self.places :] = 0
        return (bits.unflatten(-1, (self.bytes, 8)) << torch.arange(8)).sum(-1).to(torch.uint8)


def code_of(rule, size):
    """A rule's bits: as many as marks need, whole bytes for distances, `size` of them where that is enough."""
    if rule.bits is None:
        return None
    needed = 1 if rule.marks is None else -(-rule.marks.window // 8)
    size = max(size, needed)
    return Code(size, 8 * size) if rule.order == "distance" else Code(needed, rule.marks.window)


def arriving_positions(draw, pads, batch, tokens, start):
    """(batch, tokens): the pattern of pads, one for all sequences or one for each, repeated to the length."""
    patterns = [PADS[pads]] * batch if isinstance(pads, str) else [PADS[name] for name in pads]
    assert len(patterns) == batch
    positions = torch.full((batch, tokens), -1)
    for b, pattern in enumerate(patterns):
        real = [t for t in range(tokens) if pattern[t * len(pattern) // tokens] == "+"]
        positions[b, real] = start[b] + torch.arange(len(real))
    return positions


def make_arrivals(
    draw, positions, kv_heads, dims, dtype, *, values, special, source, value_dtype, norms=None, code=None, probes=None
):  # fmt: skip
    batch, tokens = positions.shape
    shape = (batch, kv_heads, tokens)

    def plane(kind, dtype):
        """Nothing, or numbers drawn row by row."""
        if kind is None:
            return None
        return torch.stack([fill_values(draw, tokens, kind, dtype) for _ in range(batch * kv_heads)]).view(shape)

    return Arrivals(
        keys=draw.normal(*shape, dims[0], dtype=dtype),
        values=draw.normal(*shape, dims[1], dtype=dtype),
        positions=positions,
        value=plane(values, value_dtype),
        special=draw.uniform(batch, tokens) < 0.2 if special else None,
        source=torch.arange(math.prod(shape), dtype=torch.int32).view(shape) if source else None,
        norm=plane(norms, torch.float32),
        bits=None if code is None else code.draw(draw, *shape),
        probes=None if probes is None else code.draw(draw, batch, kv_heads, probes, tokens),
    )


def make_attention(draw, shape, group, head_dim, window=None, softcap=None, sinks=False, fade=None):
    """shape: (batch, kv_heads); fade: (rate, floor, sinks, grace as for `plane_of_limits`)."""
    sinks = draw.normal(shape[1], group) + 1 if sinks else None
    if fade is not None:
        fade = Fade(*fade[:3], plane_of_limits(draw, fade[3], shape))
    return AttentionRule(1.5 * max(1, head_dim) ** -0.5, window, softcap, sinks, fade)


def make_case(
    seed,
    *,
    shape=(2, 2),
    group=2,
    tokens=14,
    dims=(16, 16),
    dtype=torch.float32,
    rule=None,
    before=False,
    held="ragged",
    limit=(2, 7),
    target=None,
    recent=(0, 2),
    grace=(0, 4),
    num_sink=0,
    pads="none",
    values="plain",
    arriving="plain",
    bytes=2,
    probes=2,
    special=False,
    source=True,
    start=None,
    value_dtype=torch.float32,
    **attention,
):
    """A call of the scan. `values` and `arriving`: how values of held and of arriving tokens are drawn, None: not at all.

    bytes: of codes whose distance counts; bits of marks are as many as needed, and those of arriving tokens start at 0
    """
    draw = Draw(seed)
    rule = rule or make_rule("sum", "value")
    values, arriving = (None if rule.plane is None else kind for kind in (values, arriving))
    norms, code = None if rule.norm is None else "plain", code_of(rule, bytes)
    by_distance = rule.order == "distance"
    start = start or [0 if held == "none" else draw.between(6, 12) for _ in range(shape[0])]
    limits = make_limits(draw, shape, limit, target, recent, num_sink, before, grace if rule.order == "decayed" else None)
    rows = held_positions(draw, shape, limits, start, held, rule.coupled)
    positions = arriving_positions(draw, pads, shape[0], tokens, start)
    capacities = []
    for (b, h), row in zip(np.ndindex(*shape), rows, strict=True):
        bound = int(limits.limit[b, 0 if rule.coupled else h])
        capacities.append(most_held(len(row), int((positions[b] >= 0).sum()), bound, before))
    planes = {"special": special, "source": source, "value_dtype": value_dtype, "norms": norms}
    return Case(
        queries=draw.normal(*shape, group, tokens, dims[0], dtype=dtype),
        arrivals=make_arrivals(
            draw,
            positions,
            shape[1],
            dims,
            dtype,
            values=arriving,
            code=code if by_distance else None,
            probes=probes if by_distance else None,
            **planes,
        ),
        slots=make_slots(draw, rows, capacities, dims, dtype, values=values, code=code, **planes),
        limits=limits,
        attention=make_attention(draw, shape, group, dims[0], **attention),
        rule=rule,
        capacities=capacities,
    )


def expect(case):
    return naive_scan(case.queries, case.arrivals, rows_of(case.slots), case.limits, case.attention, case.rule)


def clear_case(seed, **options):
    """A case without near ties, and what is expected of it."""
    for attempt in range(20):
        case = make_case(1000 * seed + attempt, **options)
        expected = expect(case)
        if expected.margin > CLEAR:
            return case, expected
    raise AssertionError("every draw has a near tie")


def run_scan(kernels, case):
    """Outputs, and the slots that a scan leaves; what it was given must not change otherwise."""
    device = device_of(kernels)
    given = [on(device, thing) for thing in (case.queries, case.arrivals, case.limits, case.attention)]
    slots = on(device, case.slots)
    outputs = kernels.evict_scan(given[0], given[1], slots, *given[2:], case.rule)
    for before, after in zip((case.queries, case.arrivals, case.limits, case.attention), given, strict=True):
        assert_identical(before, on("cpu", after))
    assert outputs.dtype == torch.float32
    assert outputs.shape == (*case.queries.shape[:4], case.arrivals.values.shape[-1])
    return outputs.cpu(), on("cpu", slots)


def assert_identical(first, second):
    if isinstance(first, torch.Tensor):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    elif dataclasses.is_dataclass(first):
        for field in (field for field in dataclasses.fields(first) if field.init):
            assert_identical(getattr(first, field.name), getattr(second, field.name))
    else:
        assert first == second


def assert_close(actual, expected, **tolerance):
    np.testing.assert_allclose(numbers(actual), expected, **(tolerance or CLOSE))


def assert_same_rows(actual, expected, names, **tolerance):
    """Rows hold the same tokens, in any order."""
    for row, wanted in zip(actual, expected, strict=True):
        row, wanted = (sorted(tokens, key=lambda token: token["position"]) for tokens in (row, wanted))
        assert [token["position"] for token in row] == [token["position"] for token in wanted]
        for token, other in zip(row, wanted, strict=True):
            assert "bits" not in names or token["bits"] == other["bits"]
            for name in set(names) - {"bits"}:  # ints of any size
                np.testing.assert_allclose(
                    token[name], other[name], **((tolerance or CLOSE) if name == "value" else {"rtol": 0}), err_msg=name
                )


def planes_of(slots):
    names = {"key": slots.keys, "content": slots.values, "value": slots.value, "norm": slots.norm, "bits": slots.bits}
    names |= {"special": slots.special, "source": slots.source}
    return [name for name, plane in names.items() if plane is not None]


def assert_around(case, slots):
    """Past a row's tokens positions are -1; outside of rows nothing has changed; rows stay where they were."""
    assert torch.equal(case.slots.offsets, slots.offsets)
    outside = torch.ones(len(slots.positions), dtype=torch.bool)
    for offset, length, capacity in zip(slots.offsets.tolist(), slots.lengths.tolist(), case.capacities, strict=True):
        assert 0 <= length <= capacity
        assert (slots.positions[offset + length : offset + capacity] == -1).all()
        outside[offset : offset + capacity] = False
    for plane in ("keys", "values", "positions", "value", "norm", "bits", "special", "source"):
        before, after = getattr(case.slots, plane), getattr(slots, plane)
        if before is not None:
            assert_identical(before[outside], after[outside])


def assert_aligned(slots, kv_heads):
    """Rows of a sequence hold the same tokens in the same slots."""
    positions = [[token["position"] for token in row] for row in rows_of(slots)]
    for r, row in enumerate(positions):
        assert row == positions[r // kv_heads * kv_heads]


def check_scan(kernels, case, expected):
    outputs, slots = run_scan(kernels, case)
    assert_close(outputs, expected.outputs)
    assert_same_rows(rows_of(slots), expected.rows, planes_of(slots))
    assert_around(case, slots)
    if case.rule.coupled:
        assert_aligned(slots, case.limits.limit.shape[1])
    return outputs, slots


# --- the scan: rules ---


@pytest.mark.parametrize("merge", GROUPS)
@pytest.mark.parametrize(("observe", "order", "before"), RULES)
def test_every_rule(kernels, observe, order, before, merge):
    rule = make_rule(observe, order, merge)
    kind = "odd" if order == "ranked" and observe == "nothing" else "plain"
    options = {"num_sink": 1, "values": kind, "arriving": kind, "target": (1, 7), "special": True}
    case, expected = clear_case(1, rule=rule, before=before, group=3, **options)
    check_scan(kernels, case, expected)


@pytest.mark.parametrize("merge", GROUPS)
@pytest.mark.parametrize("order", COUPLED_ORDERS)
def test_coupled_rows_drop_by_the_mean_of_a_steps_attention(kernels, order, merge):
    rule = make_rule("last", order, merge, coupled=True)
    case, expected = clear_case(2, rule=rule, shape=(2, 3), group=2, num_sink=1, target=(1, 7), special=True)
    check_scan(kernels, case, expected)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("order", COUPLED_ORDERS)
def test_coupled_rows_of_equal_values_drop_together(kernels, order, before):
    """Limits are the first row's, whatever those of the other rows are."""
    rule = ScanRule("nothing", order, "value", coupled=True)
    case = with_equal_heads(make_case(3, rule=rule, shape=(2, 3), before=before, values="odd", arriving="odd", special=True))
    check_scan(kernels, case, expect(case))


def with_equal_heads(case):
    """The same values in all rows of each sequence."""
    shape = case.limits.limit.shape
    slots, arriving = on("cpu", case.slots), case.arrivals.value[:, :1].expand(-1, shape[1], -1).contiguous()
    for r in range(math.prod(shape)):
        first = slots.offsets[r // shape[1] * shape[1]]
        slots.value[slots.offsets[r] :][: slots.lengths[r]] = slots.value[first:][: slots.lengths[r]].clone()
    return dataclasses.replace(case, slots=slots, arrivals=dataclasses.replace(case.arrivals, value=arriving))


@pytest.mark.parametrize("observe", ["nothing", "sum"])
def test_coupled_rows_drop_by_the_mean_of_stored_values(kernels, observe):
    rule = ScanRule(observe, "value", "value", coupled=True)
    for seed in range(4):
        case, expected = clear_case(seed, rule=rule)
        check_scan(kernels, case, expected)


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("seed", range(30))
def test_anything_at_once(kernels, seed, before):
    draw = Draw(seed)
    fitting = [names for *names, first_room in RULES if first_room == before]
    observe, order = fitting[draw.below(len(fitting))]
    marks = Marks(draw.between(1, 20), high=bool(draw.below(2)), of=("seen", "held")[draw.below(2)])
    coupled = observe == "last" and order in COUPLED_ORDERS
    rule = make_rule(observe, order, GROUPS[draw.below(4)], marks=marks, coupled=coupled)
    options = {
        "bytes": draw.between(1, 9),
        "probes": draw.between(1, 3),
        "fade": FADE if draw.below(3) == 0 else None,
        "shape": (3, draw.between(1, 3)),
        "group": draw.between(1, 4),
        "limit": (1, 9),
        "target": (1, 9) if draw.below(2) else None,
        "recent": (0, 4),
        "num_sink": draw.below(4),
        "pads": [list(PADS)[draw.below(len(PADS))] for _ in range(3)],
        "special": bool(draw.below(2)),
        "window": draw.between(2, 12) if draw.below(2) else None,
        "softcap": 1.5 if draw.below(2) else None,
        "sinks": bool(draw.below(2)),
        "held": "none" if draw.below(3) == 0 else "ragged",
    }
    case, expected = clear_case(100 + seed, rule=rule, before=before, **options)
    check_scan(kernels, case, expected)


def test_a_call_without_tokens(kernels):
    case = make_case(4, tokens=0)
    check_scan(kernels, case, expect(case))


# --- the scan: bits, ages, scans that decide alone ---

MARKS = [
    Marks(window, high, of) for window in (3, 8, 20, 40) for high, of in itertools.product((False, True), ("seen", "held"))
]


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("marks", MARKS, ids=str)
def test_bits_of_attention_decide(kernels, marks, before):
    """Texts of up to 26 tokens, so that a ring of bits is gone round many times, once, or not at all."""
    for merge in GROUPS:
        rule = make_rule("marks", "count", merge, marks=marks)
        options = {"limit": (4, 9), "target": (2, 9), "num_sink": 1, "special": True, "group": 3}
        case, expected = clear_case(51, rule=rule, before=before, pads=("middle", "left"), **options)
        check_scan(kernels, case, expected)


def test_bits_are_set_whatever_decides(kernels):
    """Each row has its own, whether its tokens leave alone or with those of other rows."""
    for order, coupled in (("age", False), ("age", True), ("value", False), ("distance", False)):
        case, expected = clear_case(52, rule=make_rule("marks", order, coupled=coupled), bytes=1, target=(1, 7))
        check_scan(kernels, case, expected)


def test_bits_may_come_along(kernels):
    """And start at 0 where they don't, even in a slot that a token of other bits has left."""
    case, _ = clear_case(53, rule=make_rule("marks", "count", marks=Marks(20)), held="full", limit=(3, 5))
    given = code_of(case.rule, 1).draw(Draw(53), *case.arrivals.keys.shape[:3])
    for bits in (None, given):
        part = dataclasses.replace(case, arrivals=dataclasses.replace(case.arrivals, bits=bits))
        expected = expect(part)
        assert expected.margin > CLEAR, "choose another seed"
        check_scan(kernels, part, expected)


@pytest.mark.parametrize("of", ["seen", "held"])
def test_attention_at_the_bound_is_not_low(kernels, of):
    """Tokens that all get the same, 1 / their number: rounding may not put some of them below it."""
    rule = make_rule("marks", "count", marks=Marks(40, of=of))
    for group in (1, 5, 6, 8):  # the mean of 8 equal numbers may come out smaller
        case = make_case(54, rule=rule, group=group, limit=UNLIMITED, held="none", tokens=40, shape=(1, 1))
        case = dataclasses.replace(case, queries=torch.zeros_like(case.queries))
        _, slots = run_scan(kernels, case)
        assert (slots.bits[int(slots.offsets) :][:40] == 0).all()


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("probes", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 12, 16])
def test_the_farthest_code_leaves(kernels, size, probes, before):
    rule = make_rule(order="distance")
    options = {"limit": (3, 8), "target": (1, 8), "num_sink": 1, "special": True, "pads": ("none", "mixed")}
    for seed in range(3):
        case = make_case(60 + seed, rule=rule, bytes=size, probes=probes, before=before, **options)
        check_scan(kernels, case, expect(case))


def stamped(case, seed):
    """As `stamps` and `expired` are meant: a held token's value is a position from the one before its own on."""
    draw, slots, arrivals = Draw(seed), on("cpu", case.slots), case.arrivals
    for r, (offset, length) in enumerate(zip(slots.offsets.tolist(), slots.lengths.tolist(), strict=True)):
        first = arrivals.positions[r // case.limits.limit.shape[1]]
        newest = int(first[first >= 0].min()) - 1
        for slot in range(offset, offset + length):
            slots.value[slot] = draw.between(int(slots.positions[slot]) - 1, newest)
    value = (arrivals.positions[:, None] - 1).float().expand(arrivals.keys.shape[:3]).contiguous()
    return dataclasses.replace(case, slots=slots, arrivals=dataclasses.replace(arrivals, value=value))


def clear_stamps(seed, **options):
    """A stamped case without near ties, and what is expected of it."""
    for attempt in range(20):
        case = stamped(make_case(1000 * seed + attempt, **options), attempt)
        expected = expect(case)
        if expected.margin > CLEAR:
            return case, expected
    raise AssertionError("every draw has a near tie")


@pytest.mark.parametrize("merge", ["max", "mean"])
@pytest.mark.parametrize("of", ["seen", "held"])
@pytest.mark.parametrize("span", [1, 2, 4, 2**40])
def test_what_has_expired_leaves(kernels, span, of, merge):
    """Rows end at lengths of their own, whatever their limits; protected tokens stay, but not outside a window."""
    shrunk = []
    for group, window, before in ((1, None, False), (3, None, False), (8, 19, False), (2, None, True)):
        rule = make_rule("stamps", "expired", merge, marks=Marks(span, of=of))
        options = {"limit": (5, 30), "recent": (0, 3), "num_sink": 1, "special": True, "pads": ("middle", "left")}
        case, expected = clear_stamps(55, rule=rule, group=group, window=window, before=before, tokens=18, **options)
        check_scan(kernels, case, expected)
        limits = case.limits.limit.flatten().tolist()
        shrunk += [len(row) < min(peak, limit) for row, peak, limit in zip(expected.rows, expected.peaks, limits, strict=True)]
    assert any(shrunk)


def test_values_that_are_no_numbers_expire_at_once(kernels):
    for before in (False, True):
        rule = make_rule("nothing", "expired", marks=Marks(14))
        case = make_case(56, rule=rule, values="odd", arriving="odd", limit=(6, 30), before=before, num_sink=1)
        assert case.slots.value.isnan().any() and case.arrivals.value.isnan().any()
        check_scan(kernels, case, expect(case))


@pytest.mark.parametrize("of", ["seen", "held"])
def test_equal_attention_never_expires(kernels, of):
    for group, merge in ((1, "max"), (5, "mean"), (8, "mean")):
        rule = make_rule("stamps", "expired", merge, marks=Marks(1, of=of))
        case = make_case(57, rule=rule, group=group, limit=UNLIMITED, held="none", tokens=40, shape=(1, 1), recent=0)
        case = stamped(dataclasses.replace(case, queries=torch.zeros_like(case.queries)), 0)
        _, slots = run_scan(kernels, case)
        assert slots.lengths.tolist() == [40]


DECAYS = {
    "usual": (DECAY, (0, 4)),
    "by value": (Decay(0.8, 0.1, 1.0, 1.0, 0.0), (0, 4)),
    "by norm": (Decay(0.8, 0.1, 0.5, 0.0, 2.0), (0, 4)),
    "squared": (Decay(0.95, 0.01, 2.0, 0.3, 0.3), (0, 4)),
    "age alone": (Decay(0.9, 0.001, 0.0, 0.5, 0.5), 0),
    "at once at the floor": (Decay(0.5, 0.9, 1.5, 0.5, 0.5), 1),
    "never": (Decay(1.0, 1.0, 1.0, 0.5, 0.5), 0),
    "not yet": (Decay(0.5, 0.1, 1.0, 0.5, 0.5), UNLIMITED),
}


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("name", DECAYS)
def test_what_has_decayed_most_leaves(kernels, name, before):
    decay, grace = DECAYS[name]
    for observe in ("nothing", "sum") if before else ("nothing", "sum", "last"):
        rule = make_rule(observe, "decayed", decay=decay)
        options = {"limit": (3, 8), "target": (1, 8), "num_sink": 1, "special": True, "pads": ("none", "mixed")}
        case, expected = clear_case(70, rule=rule, before=before, grace=grace, tokens=20, **options)
        check_scan(kernels, case, expected)


@pytest.mark.parametrize("kind", ["zero", "odd"])
def test_values_that_are_no_numbers_decay_too(kernels, kind):
    """NaN is lower than all; where no value is above 0, norms alone count. Infinity has no share of itself: it isn't drawn."""
    for seed in range(6):
        rule = make_rule("nothing", "decayed")
        case = make_case(80 + seed, rule=rule, values=kind, arriving=kind, limit=(4, 8), target=(2, 8))
        for plane in (case.slots.value, case.arrivals.value):
            plane[plane.isinf()] = 0.5
        check_scan(kernels, case, expect(case))


def test_the_largest_of_a_row_is_its_largest_when_a_decision_begins(kernels):
    """Although the token that has it leaves first, out of a window: 1 would leave next, 2 if all were weighed anew."""
    slots = Slots(
        keys=torch.zeros(5, 0),
        values=torch.zeros(5, 0),
        positions=torch.tensor([0, 1, 2, 3, -1], dtype=torch.int32),
        offsets=torch.tensor([0]),
        lengths=torch.tensor([4]),
        widest=5,
        value=torch.tensor([10.0, 1.0, 0.2, 1.0, 0.0]),
        norm=torch.tensor([0.0, 0.5, 0.6, 1.0, 0.0]),
    )
    none, one = torch.zeros(1, 1, 1, 0), torch.ones(1, 1, dtype=torch.int64)
    arrivals = Arrivals(none, none, torch.tensor([[4]]), value=torch.ones(1, 1, 1), norm=torch.ones(1, 1, 1))
    rule = make_rule(order="decayed", decay=Decay(1.0, 1.0, 1.0, 1.0, 1.0))
    limits = Limits(limit=4 * one, target=3 * one, recent=one, grace=one)
    device = device_of(kernels)
    slots = on(device, slots)
    given = (on(device, thing) for thing in (none[:, :, None], arrivals))
    kernels.evict_scan(*given, slots, on(device, limits), AttentionRule(1.0, window=4), rule)
    assert sorted(slots.positions[:3].tolist()) == [2, 3, 4]


def test_norms_start_at_zero_if_none_are_given(kernels):
    case, _ = clear_case(83, rule=make_rule("nothing", "decayed"), held="full", limit=(4, 6))
    case = dataclasses.replace(case, arrivals=dataclasses.replace(case.arrivals, norm=None))
    expected = expect(case)
    assert expected.margin > CLEAR, "choose another seed"
    check_scan(kernels, case, expected)


def test_norms_of_another_type_are_refused(kernels):
    """The kernel would work on a copy, and what it changes would be lost."""
    case, expected = clear_case(83, rule=make_rule("nothing", "decayed"))
    case = dataclasses.replace(case, slots=dataclasses.replace(case.slots, norm=case.slots.norm.double()))
    with pytest.raises(AssertionError, match="copy"):
        check_scan(kernels, case, expected)


def test_what_a_rule_needs_must_be_given(kernels):
    case, expected = clear_case(84, rule=make_rule("nothing", "decayed"))
    with pytest.raises(AssertionError, match="grace"):
        check_scan(kernels, dataclasses.replace(case, limits=dataclasses.replace(case.limits, grace=None)), expected)
    case = make_case(84, rule=make_rule(order="distance"))
    with pytest.raises(AssertionError, match="probes"):
        check_scan(kernels, dataclasses.replace(case, arrivals=dataclasses.replace(case.arrivals, probes=None)), expect(case))


@pytest.fixture
def poisoned():
    """New memory is full of NaN, so that what nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("order", ["age", "value", "count", "distance", "decayed"])
@pytest.mark.parametrize("dims", [(0, 0), (0, 16)], ids=str)
def test_a_scan_without_key_dims_decides_alone(kernels, poisoned, dims, order, before):
    options = {"target": (1, 7), "num_sink": 1, "special": True, "window": 8, "pads": ("middle", "left"), "sinks": True}
    case = make_case(90, rule=make_rule(order=order), dims=dims, before=before, **options)
    expected = expect(case)
    assert order != "decayed" or expected.margin > CLEAR, "choose another seed"
    check_scan(kernels, case, expected)


# --- fading ---

FADES = {
    "usual": FADE,
    "each row's grace": (0.7, 0.05, 0, (0, 12)),
    "no floor to reach": (0.9, 1e-6, 2, 0),
    "at the floor": (0.3, 0.6, 1, 1),
    "deep": (0.2, 1e-30, 1, 0),
    "never": (1.0, 1.0, 0, 0),
    "floor of one": (0.5, 1.0, 0, 0),
    "not yet": (0.5, 0.1, 0, UNLIMITED),
}
FADE_OPTIONS = ({}, {"softcap": 0.7}, {"sinks": True}, {"window": 5}, {"softcap": 2.0, "sinks": True, "window": 9})


@pytest.mark.parametrize("options", FADE_OPTIONS, ids=str)
@pytest.mark.parametrize("fade", FADES)
def test_old_tokens_fade(kernels, fade, options):
    rules = (("sum", "value"), ("marks", "count"), ("nothing", "age"))
    for observe, order in rules:
        rule, more = make_rule(observe, order), {"num_sink": 1, "pads": ("none", "mixed"), "tokens": 18}
        case, expected = clear_case(40, rule=rule, fade=FADES[fade], limit=(4, 12), **options, **more)
        check_scan(kernels, case, expected)


@pytest.mark.parametrize("options", FADE_OPTIONS, ids=str)
@pytest.mark.parametrize("fade", FADES)
def test_decode_of_what_has_faded(kernels, fade, options):
    for seed in range(3):
        check_decode(kernels, *decode_case(seed, fade=FADES[fade], queries=5, **options))


def test_nothing_fades_within_a_prompt(kernels):
    with pytest.raises(AssertionError, match="fade"):
        check_prefill(kernels, prefill_case(3, fade=FADE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("observe", "order", "fade"), [("marks", "count", None), ("sum", "decayed", FADE), ("stamps", "expired", None)]
)
def test_new_families_in_every_type(kernels, observe, order, fade, dtype):
    options = {"dtype": dtype, "dims": (64, 16), "fade": fade, "target": (1, 7), "special": True, "num_sink": 1}
    case, expected = clear_case(41, rule=make_rule(observe, order), **options)
    check_scan(kernels, case, expected)


# --- the scan: types and shapes ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_scan_in_every_type_and_size(kernels, dtype, dims):
    case, expected = clear_case(5, dtype=dtype, dims=dims, tokens=9, group=2, sinks=True, softcap=2.0, special=True, num_sink=1)
    check_scan(kernels, case, expected)


@pytest.mark.parametrize("coupled", [False, True], ids=["alone", "coupled"])
@pytest.mark.parametrize("group", range(1, 9))
def test_scan_with_every_group_size(kernels, group, coupled):
    for merge in GROUPS:
        rule = make_rule("last" if coupled else "sum", "value", merge, coupled=coupled)
        case, expected = clear_case(6, rule=rule, group=group, sinks=True, tokens=9)
        check_scan(kernels, case, expected)


def test_inputs_may_be_views(kernels):
    """As models give them: (batch, tokens, heads, dim) in memory."""
    case, expected = clear_case(7, special=True)
    names = ("keys", "values", "value", "source")
    arrivals = dataclasses.replace(case.arrivals, **{name: spread(getattr(case.arrivals, name), 2) for name in names})
    queries = spread(case.queries, 3)
    assert not queries.is_contiguous() and not arrivals.keys.is_contiguous()
    check_scan(kernels, dataclasses.replace(case, queries=queries, arrivals=arrivals), expected)
    queries, slots, positions, rule = decode_case(7)
    check_decode(kernels, spread(queries, 3), slots, positions, rule)
    given = prefill_case(7)
    check_prefill(kernels, (spread(given[0], 3), *(spread(tensor, 2) for tensor in given[1:3]), *given[3:]))


def spread(tensor, tokens):
    """The same numbers, with the token axis before the heads in memory."""
    return tensor.movedim(tokens, 1).contiguous().movedim(1, tokens)


@pytest.mark.parametrize("plane", ["special", "source"])
def test_planes_are_optional(kernels, plane):
    case, expected = clear_case(7, special=plane != "special", source=plane != "source")
    _, slots = check_scan(kernels, case, expected)
    assert getattr(slots, plane) is None


def test_values_start_at_zero_if_none_are_given(kernels):
    """Even in a slot that a token of another value has left."""
    case, _ = clear_case(8, num_sink=1)
    case = dataclasses.replace(case, arrivals=dataclasses.replace(case.arrivals, value=None))
    expected = expect(case)
    assert expected.margin > CLEAR, "choose another seed"
    check_scan(kernels, case, expected)


def test_values_of_another_type_are_refused(kernels):
    """The kernel would work on a copy, and what it changes would be lost."""
    case, expected = clear_case(8, value_dtype=torch.float64)
    with pytest.raises(AssertionError, match="copy"):
        check_scan(kernels, case, expected)


# --- the scan: which tokens stay ---


def kept(kernels, positions, limit, *, values=None, before=False, window=None, special=(), order="value", **limits):
    """Positions in slot order after `positions` came into one row, each with a given value."""
    count = len(positions)
    value = torch.tensor(values if values is not None else [0.0] * count, dtype=torch.float32).view(1, 1, count)
    one = torch.ones(1, 1, dtype=torch.int64)
    size = min(count, limit + 1)
    slots = Slots(
        keys=torch.zeros(size, 16),
        values=torch.zeros(size, 16),
        positions=torch.full((size,), -1, dtype=torch.int32),
        offsets=torch.tensor([0]),
        lengths=torch.tensor([0]),
        widest=size,
        value=torch.full((size,), 9.0),
        special=torch.ones(size, dtype=torch.bool),
    )
    arrivals = Arrivals(
        keys=torch.zeros(1, 1, count, 16),
        values=torch.zeros(1, 1, count, 16),
        positions=torch.tensor([positions]),
        value=value,
        special=torch.tensor([[position in special for position in positions]]),
    )
    plane = {"limit": one * limit, "target": one * limits.pop("target", limit), "recent": one * limits.pop("recent", 0)}
    rule = ScanRule(limits.pop("observe", "nothing"), order, "value")
    device = device_of(kernels)
    slots = on(device, slots)
    bounds = Limits(**plane, before=before, num_sink=limits.pop("num_sink", 0))
    assert not limits
    queries = torch.zeros(1, 1, 2, count, 16, device=device)
    kernels.evict_scan(queries, on(device, arrivals), slots, on(device, bounds), AttentionRule(1.0, window), rule)
    held = int(slots.lengths)
    assert (slots.positions[held:] == -1).all()
    return slots.positions[:held].tolist()


def test_the_last_token_moves_into_the_gap(kernels):
    assert kept(kernels, [0, 1, 2], 3, order="age") == [0, 1, 2]
    assert kept(kernels, [0, 1, 2, 3], 3, order="age") == [3, 1, 2]
    assert kept(kernels, [0, 1, 2, 3, 4], 3, order="age") == [3, 4, 2]
    assert kept(kernels, [0, 1, 2, 3], 3, order="age", before=True) == [2, 1, 3]


def test_several_leave_at_once_down_to_the_target(kernels):
    assert kept(kernels, range(5), 4, order="age", target=2) == [4, 3]
    assert kept(kernels, range(7), 4, order="age", target=2) == [4, 3, 5, 6]
    assert sorted(kept(kernels, range(5), 4, order="age", target=2, before=True)) == [2, 3, 4]
    assert sorted(kept(kernels, range(5), 4, order="age", target=4, before=True)) == [1, 2, 3, 4]


def test_ties_go_to_the_newer_token(kernels):
    for before in (False, True):
        assert sorted(kept(kernels, range(6), 3, values=[1.0] * 6, before=before)) == [3, 4, 5]
        assert sorted(kept(kernels, range(6), 4, values=[2.0, 1.0, 1.0, 2.0, 3.0, 3.0], before=before)) == [0, 3, 4, 5]


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_many_ties(kernels, before):
    for seed in range(6):
        rule = ScanRule("nothing", ("value", "ranked")[seed % 2], "value")
        case = make_case(seed, rule=rule, before=before, values="ties", arriving="ties", target=(1, 7), limit=(3, 8))
        check_scan(kernels, case, expect(case))


def test_equal_attention_is_a_tie(kernels):
    """Of tokens with the same key each gets the same weight to the last bit, wherever it lies."""
    for count in (4, 9, 23):
        assert sorted(kept(kernels, range(count + 2), count, observe="last")) == list(range(2, count + 2))


def test_the_lowest_value_leaves(kernels):
    assert sorted(kept(kernels, range(5), 3, values=[5.0, 1.0, 4.0, 2.0, 3.0])) == [0, 2, 4]
    # All stand lower than those before: the new one leaves at once, unless room is made first.
    assert kept(kernels, range(4), 2, values=[4.0, 3.0, 2.0, 1.0]) == [0, 1]
    assert kept(kernels, range(4), 2, values=[4.0, 3.0, 2.0, 1.0], before=True) == [0, 3]


def test_a_value_that_is_no_number_is_the_lowest(kernels):
    nan, inf = math.nan, math.inf
    assert sorted(kept(kernels, range(5), 3, values=[5.0, nan, 4.0, -3.0, nan])) == [0, 2, 3]
    assert sorted(kept(kernels, range(5), 3, values=[inf, -inf, nan, 1.0, -2.0])) == [0, 3, 4]
    # NaN and -inf tie: the older leaves.
    assert sorted(kept(kernels, range(4), 3, values=[-inf, nan, 1.0, -2.0])) == [1, 2, 3]
    assert sorted(kept(kernels, range(4), 3, values=[nan, -inf, 1.0, -2.0])) == [1, 2, 3]


def test_ranked_counts_the_tokens_with_values(kernels):
    nan, inf = math.nan, math.inf
    ranked = {"order": "ranked"}
    # limit 4, half of it 2: with three finite values the lowest leaves, with two the oldest of the others.
    assert sorted(kept(kernels, range(5), 4, values=[3.0, 2.0, 1.0, inf, inf], **ranked)) == [0, 1, 3, 4]
    assert sorted(kept(kernels, range(5), 4, values=[3.0, 2.0, inf, inf, inf], **ranked)) == [0, 1, 3, 4]
    assert sorted(kept(kernels, range(5), 4, values=[inf, nan, -inf, 1.0, 2.0], **ranked)) == [1, 2, 3, 4]
    # A value that is no number is the lowest as long as values decide.
    assert sorted(kept(kernels, range(5), 4, values=[3.0, nan, 1.0, inf, 2.0], **ranked)) == [0, 2, 3, 4]
    # limit 5, half of it 2: half rounds down.
    assert sorted(kept(kernels, range(6), 5, values=[inf, 2.0, 1.0, 3.0, inf, inf], **ranked)) == [0, 1, 3, 4, 5]
    # Every drop counts anew: the lowest value while there are three, then the oldest other.
    assert sorted(kept(kernels, range(5), 4, values=[inf, 3.0, 2.0, 1.0, inf], target=3, **ranked)) == [1, 2, 4]
    # Only protected tokens stand against one with a value: it leaves although others should.
    assert sorted(kept(kernels, range(4), 3, values=[1.0, inf, inf, inf], recent=3, **ranked)) == [1, 2, 3]


def test_recent_tokens_stay(kernels):
    falling = [9.0 - position for position in range(8)]
    for recent in range(4):
        expected = sorted({*range(4 - recent), *range(8 - recent, 8)})
        assert sorted(kept(kernels, range(8), 4, values=falling, recent=recent)) == expected
    assert sorted(kept(kernels, range(8), 4, values=falling, recent=4)) == [4, 5, 6, 7]
    assert sorted(kept(kernels, range(8), 4, values=falling, recent=4, target=2)) == [6, 7]
    # Before a token comes in, it counts as the newest already.
    assert sorted(kept(kernels, range(8), 4, values=falling, recent=2, before=True)) == [0, 1, 6, 7]


def test_sinks_stay_and_the_latest_sink_leaves_first(kernels):
    assert sorted(kept(kernels, range(8), 4, order="age", num_sink=2)) == [0, 1, 6, 7]
    assert sorted(kept(kernels, range(8), 4, order="age", num_sink=6)) == [0, 1, 2, 3]
    assert sorted(kept(kernels, range(8), 4, order="age", num_sink=6, target=2)) == [0, 1]
    assert sorted(kept(kernels, range(6), 3, order="age", num_sink=9)) == [0, 1, 2]
    assert sorted(kept(kernels, range(6), 3, order="age", num_sink=9, before=True)) == [0, 1, 5]
    assert sorted(kept(kernels, range(8), 4, order="age", num_sink=2, recent=4)) == [0, 1, 6, 7]


def test_special_tokens_stay_longer_than_recent_ones(kernels):
    assert sorted(kept(kernels, range(8), 3, order="age", special=(1, 4))) == [1, 4, 7]
    assert sorted(kept(kernels, range(8), 3, order="age", special=(1, 4), recent=3)) == [1, 4, 7]
    assert sorted(kept(kernels, range(8), 3, order="age", special=(1, 2, 3, 4))) == [2, 3, 4]
    assert sorted(kept(kernels, range(8), 3, order="age", special=(1, 2, 3), num_sink=2)) == [0, 1, 3]


def test_tokens_outside_the_window_leave_first(kernels):
    rising = [0.0, 0.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0]
    assert sorted(kept(kernels, range(8), 4, values=rising)) == [2, 3, 6, 7]
    assert sorted(kept(kernels, range(8), 4, values=rising, window=4)) == [4, 5, 6, 7]
    assert sorted(kept(kernels, range(8), 4, values=rising, window=5)) == [3, 5, 6, 7]
    assert sorted(kept(kernels, range(8), 4, order="age", num_sink=3, special=(0, 4), window=3)) == [4, 5, 6, 7]
    assert sorted(kept(kernels, range(8), 4, order="age", num_sink=3, window=7)) == [1, 2, 6, 7]
    # Room is made for a token that is about to come in: what it will not see leaves first.
    assert sorted(kept(kernels, range(5), 4, values=[9.0, 1.0, 1.0, 1.0, 1.0], window=4, before=True)) == [1, 2, 3, 4]
    assert sorted(kept(kernels, range(5), 4, values=[9.0, 1.0, 1.0, 1.0, 1.0], window=5, before=True)) == [0, 2, 3, 4]


def test_limit_of_one(kernels):
    for before in (False, True):
        assert kept(kernels, range(5), 1, order="age", before=before) == [4]
    assert kept(kernels, range(5), 1, values=[5.0, 4.0, 3.0, 2.0, 1.0]) == [0]
    assert kept(kernels, range(5), 1, values=[5.0, 4.0, 3.0, 2.0, 1.0], before=True) == [4]
    assert kept(kernels, range(5), 1, order="age", num_sink=1) == [0]
    assert kept(kernels, range(5), 1, order="age", num_sink=1, before=True) == [4]


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("limit", [6, UNLIMITED], ids=["fits", "unlimited"])
def test_nothing_leaves_within_the_limit(kernels, limit, before):
    case = make_case(9, limit=limit, tokens=6, held="none", before=before, recent=2, target=2, values="odd")
    _, slots = check_scan(kernels, case, expect(case))
    assert slots.lengths.tolist() == [6] * 4
    assert [token["position"] for token in rows_of(slots)[3]] == list(range(6))


def test_unlimited_rows_beside_limited_ones(kernels):
    case, _ = clear_case(10, limit=4, held="full")
    slots = make_slots(
        Draw(1), [[]] * 4, [14, 4, 14, 5], (16, 16), torch.float32, values="plain", special=False, source=True,
        value_dtype=torch.float32,
    )  # fmt: skip
    limit = torch.tensor([[UNLIMITED, 3], [UNLIMITED, 4]])
    limits = Limits(limit=limit, target=limit.clone(), recent=torch.tensor([[0, 1], [0, 0]]))
    case = dataclasses.replace(case, slots=slots, limits=limits, capacities=[14, 4, 14, 5])
    _, slots = check_scan(kernels, case, expect(case))
    assert slots.lengths.tolist() == [14, 3, 14, 4]


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_rows_that_hold_more_than_their_limit(kernels, before):
    """As after a limit has shrunk: the first token lets all leave that are too many."""
    rule = ScanRule("nothing", "value", "value")
    case = make_case(11, rule=rule, limit=UNLIMITED, held="ragged", before=before, start=[9, 7], target=UNLIMITED)
    limit = torch.tensor([[1, 2], [3, 2]])
    limits = Limits(limit=limit, target=limit.clone(), recent=limit.clone(), before=before)
    _, slots = check_scan(kernels, dataclasses.replace(case, limits=limits), expect(dataclasses.replace(case, limits=limits)))
    assert slots.lengths.tolist() == limit.flatten().tolist()


# --- the scan: pads, windows, attention ---


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("coupled", [False, True], ids=["alone", "coupled"])
@pytest.mark.parametrize("pads", [("none", "left"), ("right", "middle"), ("only", "mixed"), ("only", "only")], ids="-".join)
def test_pads(kernels, pads, coupled, before):
    observe = "nothing" if before else "last" if coupled else "sum"
    rule = ScanRule(observe, "age" if before else "value", None if observe == "last" else "value", coupled=coupled)
    case, expected = clear_case(12, rule=rule, pads=pads, tokens=12, before=before, target=(1, 6))
    outputs, slots = check_scan(kernels, case, expected)
    for b, t in (case.arrivals.positions < 0).nonzero().tolist():
        assert (outputs[b, :, :, t] == 0).all()
    if pads == ("only", "only"):
        assert_identical(case.slots, slots)


def test_a_pads_numbers_reach_nothing(kernels):
    case, expected = clear_case(13, pads=("left", "mixed"), tokens=12)
    b, t = (case.arrivals.positions < 0).nonzero().T
    for tensor in (case.arrivals.keys, case.arrivals.values):
        tensor[b, :, t] = math.nan
    case.queries.permute(0, 3, 1, 2, 4)[b, t] = math.nan
    check_scan(kernels, case, expected)


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 6, 7, 30])
def test_windows(kernels, window, before):
    for limit in (3, 6):
        case, expected = clear_case(14, window=window, limit=limit, recent=1, num_sink=2, before=before, special=True)
        check_scan(kernels, case, expected)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
def test_attention_options(kernels, softcap, sinks):
    case, expected = clear_case(15, softcap=softcap, sinks=sinks, group=3)
    check_scan(kernels, case, expected)


def test_huge_logits_stay_finite(kernels):
    case, _ = clear_case(16)
    rule = ScanRule("sum", "age", "value")
    case = dataclasses.replace(case, rule=rule, attention=AttentionRule(scaling=40.0, sinks=torch.full((2, 2), 200.0)))
    outputs, slots = run_scan(kernels, case)
    expected = expect(case)
    assert_close(outputs, expected.outputs, rtol=1e-3, atol=1e-3)
    assert_same_rows(rows_of(slots), expected.rows, ["value"], rtol=1e-3, atol=1e-3)


# --- the scan: in several calls ---


def cut(case, slots, first, last):
    tokens = slice(first, last)
    arrivals = case.arrivals
    parts = {name: getattr(arrivals, name) for name in ("keys", "values", "value", "source", "norm", "bits")}
    parts = {name: None if part is None else part[:, :, tokens].contiguous() for name, part in parts.items()}
    parts["probes"] = None if arrivals.probes is None else arrivals.probes[:, :, :, tokens].contiguous()
    for name in ("positions", "special"):
        part = getattr(arrivals, name)
        parts[name] = None if part is None else part[:, tokens].contiguous()
    queries = case.queries[:, :, :, tokens].contiguous()
    return dataclasses.replace(case, queries=queries, slots=slots, arrivals=Arrivals(**parts))


@pytest.mark.parametrize(
    ("observe", "order", "before", "coupled"),
    [
        ("sum", "value", False, False),
        ("sum", "value", True, False),
        ("last", "value", False, True),
        ("nothing", "age", True, False),
        ("sum", "ranked", False, False),
        ("nothing", "ranked", True, False),
        ("marks", "count", False, False),
        ("nothing", "distance", True, False),
        ("sum", "decayed", False, False),
        ("stamps", "expired", False, False),
    ],
)
def test_several_calls_are_as_one(kernels, observe, order, before, coupled):
    rule = make_rule(observe, order, coupled=coupled)
    kind = "odd" if order == "ranked" else "plain"
    for seed in range(3):
        options = {"pads": ("middle", "left"), "tokens": 12, "target": (2, 7), "values": kind, "arriving": kind, "window": 9}
        case, _ = clear_case(20 + seed, rule=rule, before=before, special=True, num_sink=1, **options)
        outputs, slots = run_scan(kernels, case)
        points = sorted({0, 12, *Draw(seed).some(12, 3)})
        parts, now = [], case.slots
        for first, last in itertools.pairwise(points):
            part, now = run_scan(kernels, cut(case, now, first, last))
            parts.append(part)
        assert_close(torch.cat(parts, 3), numbers(outputs), **SAME)
        assert_same_rows(rows_of(now), rows_of(slots), planes_of(slots), **SAME)


def test_a_call_for_each_token(kernels):
    case, expected = clear_case(30, num_sink=1, tokens=10)
    now, parts = case.slots, []
    for t in range(10):
        part, now = run_scan(kernels, cut(case, now, t, t + 1))
        parts.append(part)
    assert_close(torch.cat(parts, 3), expected.outputs)
    assert_same_rows(rows_of(now), expected.rows, planes_of(now))


# --- decoding over slots ---


def decode_case(seed, *, shape=(2, 2), group=2, queries=3, dims=(16, 16), dtype=torch.float32, lowest=1, **attention):
    """Slots of ragged rows, and queries that each see at least one token of every row; the first sequence has a pad."""
    draw = Draw(seed)
    rule = make_attention(draw, shape, group, dims[0], **attention)
    starts = [draw.between(5, 12) for _ in range(shape[0])]
    rows = [draw.some(starts[r // shape[1]], draw.between(lowest, 5)) for r in range(math.prod(shape))]
    capacities = [len(row) + draw.below(3) for row in rows]
    slots = make_slots(
        draw, rows, capacities, dims, dtype, values="plain", special=True, source=True, value_dtype=torch.float32
    )
    positions = torch.full((shape[0], queries), -1)
    for b, q in np.ndindex(shape[0], queries):
        mine = rows[b * shape[1] : (b + 1) * shape[1]]
        fit = [now for now in range(20) if all(any(sees(now, p, rule.window) for p in row) for row in mine)]
        if fit and not (b == 0 and q == queries - 1 and queries > 1):
            positions[b, q] = fit[draw.below(len(fit))]
    return draw.normal(*shape, group, queries, dims[0], dtype=dtype), slots, positions, rule


def check_decode(kernels, queries, slots, positions, rule):
    device = device_of(kernels)
    given = [on(device, thing) for thing in (queries, slots, positions, rule)]
    outputs, weights = kernels.decode_attend(*given, want_weights=True)
    for before, after in zip((queries, slots, positions, rule), given, strict=True):
        assert_identical(before, on("cpu", after))
    expected, wanted = naive_attend(queries, rows_of(slots), positions, rule)
    assert outputs.dtype == weights.dtype == torch.float32
    assert weights.shape == (*queries.shape[:4], slots.widest)
    assert_close(outputs, expected)
    longest = wanted.shape[-1]
    assert_close(weights[..., :longest], wanted)
    assert (weights[..., longest:] == 0).all()
    for r, length in enumerate(slots.lengths.tolist()):
        assert (weights.flatten(0, 1)[r, ..., length:] == 0).all()
    real = (positions >= 0)[:, None, None, :].expand(weights.shape[:4])
    assert (outputs.cpu()[~real] == 0).all() and (weights.cpu()[~real] == 0).all()
    if rule.sinks is None:
        torch.testing.assert_close(weights.cpu().sum(-1), real.float(), rtol=0, atol=2e-6)
    alone, none = kernels.decode_attend(*given)
    assert none is None
    torch.testing.assert_close(alone, outputs, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_decode_in_every_type_and_size(kernels, dtype, dims):
    check_decode(kernels, *decode_case(1, dims=dims, dtype=dtype))


@pytest.mark.parametrize("group", range(1, 9))
def test_decode_with_every_group_size(kernels, group):
    check_decode(kernels, *decode_case(2, group=group, shape=(3, 2), sinks=True))
    check_decode(kernels, *decode_case(3, group=group, queries=1))


@pytest.mark.parametrize("window", [None, 1, 2, 4, 9])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_decode_options(kernels, window, sinks, softcap):
    for seed in range(3):
        check_decode(kernels, *decode_case(seed, window=window, sinks=sinks, softcap=softcap, queries=5))


@pytest.mark.slow
def test_subnormal_float16_numbers_count(kernels):
    queries, slots, positions, rule = decode_case(6, dtype=torch.float16)
    slots.values.mul_(2.0**-17)
    outputs, _ = kernels.decode_attend(*(on(device_of(kernels), thing) for thing in (queries, slots, positions, rule)))
    assert_close(outputs, naive_attend(queries, rows_of(slots), positions, rule)[0], rtol=1e-4, atol=1e-10)


def test_decode_of_pads_alone(kernels):
    queries, slots, positions, rule = decode_case(4, lowest=0)
    check_decode(kernels, queries, slots, torch.full_like(positions, -1), rule)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_decode_of_a_query_that_sees_nothing_stays_finite(kernels, sinks):
    """Nothing more is promised, except that with sinks there is a softmax: no slot takes part in it."""
    queries, slots, _, rule = decode_case(5, sinks=sinks)
    slots.positions[slots.positions >= 0] += 50
    slots.keys.nan_to_num_(1.0), slots.values.nan_to_num_(1.0)
    queries, slots, rule = (on(device_of(kernels), thing) for thing in (queries, slots, rule))
    outputs, weights = kernels.decode_attend(
        queries, slots, torch.full((2, 3), 7, device=queries.device), rule, want_weights=True
    )
    assert outputs.isfinite().all() and weights.isfinite().all()
    if sinks:
        assert (outputs == 0).all() and (weights == 0).all()


# --- attention with mass over dense slots ---


def prefill_case(
    seed, *, held=9, lowest=0, queries=7, shape=(2, 2), group=2, dims=(16, 16), dtype=torch.float32, pads=(0, 0), **attention
):
    """Rows that hold some of the first `held` tokens, at least `lowest`, and all that ask, shuffled among empty slots.

    pads: of each sequence, at the left of its queries.
    """
    draw = Draw(seed)
    slots = held + queries
    query_positions = torch.full((shape[0], queries), -1)
    positions = torch.full((*shape, slots), -1)
    for b, pad in enumerate(pads):
        query_positions[b, pad:] = held + torch.arange(queries - pad)
        for h in range(shape[1]):
            there = [*draw.some(held, draw.between(lowest, held)), *query_positions[b, pad:].tolist()]
            positions[b, h, draw.some(slots, len(there))] = torch.tensor(there)
    keys, values = draw.normal(*shape, slots, dims[0], dtype=dtype), draw.normal(*shape, slots, dims[1], dtype=dtype)
    values[positions < 0] = 50  # whoever reads an empty slot sees it
    asked = draw.normal(*shape, group, queries, dims[0], dtype=dtype)
    return asked, keys, values, query_positions, positions, make_attention(draw, shape, group, dims[0], **attention)


def text_case(seed, *, queries=9, pads=(0,), heads=1, group=2, dims=(16, 16), **attention):
    """Slots and queries are the same tokens in the same order, left pads of each sequence included."""
    draw = Draw(seed)
    shape = (len(pads), heads)
    query_positions = torch.stack([torch.cat([torch.full((pad,), -1), 3 + torch.arange(queries - pad)]) for pad in pads])
    positions = query_positions[:, None].repeat(1, heads, 1)
    keys, values = draw.normal(*shape, queries, dims[0]), draw.normal(*shape, queries, dims[1])
    asked = draw.normal(*shape, group, queries, dims[0])
    return asked, keys, values, query_positions, positions, make_attention(draw, shape, group, dims[0], **attention)


def run_prefill(kernels, case, **options):
    device = device_of(kernels)
    given = [on(device, thing) for thing in case]
    outputs, mass = kernels.prefill_stats(*given, **options)
    for before, after in zip(case, given, strict=True):
        assert_identical(before, on("cpu", after))
    assert outputs.dtype == mass.dtype == torch.float32
    return outputs.cpu(), mass.cpu()


def check_prefill(kernels, case, group="mean", causal=False):
    outputs, mass = run_prefill(kernels, case, group=group, causal=causal)
    expected, wanted = naive_prefill(*case, group)
    assert_close(outputs, expected)
    assert_close(mass, wanted)
    query_positions, positions = case[3:5]
    missing = (query_positions < 0)[:, None, None, :].expand(outputs.shape[:4])
    assert (outputs[missing] == 0).all() and (mass[positions < 0] == 0).all()
    return outputs, mass


@pytest.fixture(params=[False, True], ids=["one-chunk", "chunks"])
def chunks(request, kernels, monkeypatch):
    """Whether few queries already need several passes."""
    if request.param:
        monkeypatch.setattr(kernels, "_chunk", lambda *_: 16, raising=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_prefill_in_every_type_and_size(kernels, dtype, dims):
    check_prefill(kernels, prefill_case(1, dims=dims, dtype=dtype))


@pytest.mark.parametrize("merge", GROUPS)
@pytest.mark.parametrize("group", range(1, 9))
def test_prefill_with_every_group(kernels, group, merge):
    check_prefill(kernels, prefill_case(2, group=group, sinks=True, queries=4), merge)


@pytest.mark.parametrize("pads", [(0, 0), (3, 0), (20, 1), (35, 34)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 60])
def test_prefill_over_kept_tokens(kernels, chunks, window, pads):
    check_prefill(kernels, prefill_case(3, queries=35, pads=pads, window=window, shape=(2, 1)), "max")


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_prefill_options(kernels, chunks, softcap, sinks):
    check_prefill(kernels, prefill_case(4, queries=20, softcap=softcap, sinks=sinks, group=3), "sum")


TEXT_OPTIONS = ({}, {"window": 4}, {"window": 16}, {"window": 17, "softcap": 0.7}, {"sinks": True})


@pytest.mark.parametrize("options", TEXT_OPTIONS, ids=str)
def test_prefill_told_that_it_is_causal(kernels, chunks, options):
    """Only batches without pads may be."""
    case = text_case(5, queries=34, heads=2, **options)
    outputs, mass = check_prefill(kernels, case, "mean", causal=True)
    for first, second in zip(run_prefill(kernels, case, group="mean"), (outputs, mass), strict=True):
        assert_close(first, numbers(second), **SAME)


@pytest.mark.parametrize("pads", [(3, 0), (17, 33)], ids=str)
@pytest.mark.parametrize("options", TEXT_OPTIONS, ids=str)
def test_prefill_of_a_padded_batch(kernels, chunks, options, pads):
    check_prefill(kernels, text_case(5, queries=34, pads=pads, **options), "mean")


@pytest.mark.parametrize("queries", [1, 15, 16, 17, 32, 33])
def test_prefill_of_texts_around_a_chunks_end(kernels, chunks, queries):
    for merge, group in (("mean", 3), ("max", 2), ("sum", 1), ("first", 2)):
        check_prefill(kernels, text_case(6, queries=queries, group=group), merge, causal=True)


def test_prefill_over_many_slots(kernels):
    """More than any back end is likely to sum up in one go."""
    check_prefill(kernels, prefill_case(10, held=1100, lowest=1100, queries=3, shape=(1, 2), pads=(0,)))


def test_prefill_mass_adds_up_to_the_queries(kernels, chunks):
    case = prefill_case(7, queries=30, pads=(0, 12))
    for merge, heads in (("mean", 1), ("sum", 2), ("first", 1)):
        mass = run_prefill(kernels, case, group=merge)[1]
        assert_close(mass.sum(-1), [[30 * heads] * 2, [18 * heads] * 2], rtol=1e-5)


def test_prefill_without_mass(kernels, chunks):
    case = prefill_case(7, queries=30, pads=(0, 12))
    outputs, mass = run_prefill(kernels, case, group=None)
    torch.testing.assert_close(outputs, run_prefill(kernels, case, group="sum")[0])
    assert mass.shape == case[4].shape and (mass == 0).all()


@pytest.mark.parametrize("group", GROUPS)
def test_prefill_equals_the_reference(kernels, group):
    case = prefill_case(8, queries=20, pads=(2, 0), window=7, sinks=True)
    outputs, mass = run_prefill(kernels, case, group=group)
    for actual, wanted in zip((outputs, mass), attend_with_mass(*case, group=group), strict=True):
        assert_close(actual, numbers(wanted))


def test_prefill_of_a_query_that_sees_nothing_stays_finite(kernels, chunks):
    case = list(prefill_case(9, queries=20))
    case[4] = case[4] + 100 * (case[4] >= 0)
    for tensor in run_prefill(kernels, case, group="mean"):
        assert tensor.isfinite().all()
