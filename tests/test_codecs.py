"""Stores of encoded keys and values, fed by hand, against the slow references of `naive_codecs.py`: bit for bit.

Codes, scales, zeros and the tokens in full precision are read from the planes row by row, after every turn and step; attention
is compared with a softmax over what the reference holds.
"""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from contracts.helpers import storages, tensors_in
from kvlab.cache.encoded import EncodedStore
from kvlab.codecs import CodecError, make_codec
from kvlab.codecs.affine import GroupedSide, Grouping
from kvlab.kernels.dispatch import choose
from kvlab.kernels.packed import half_above, half_below
from kvlab.kernels.reference import AttentionRule
from naive_codecs import CODECS, NaiveCodecCache, int_residual

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 5e-6, torch.float64: 1e-12}
slow = pytest.mark.slow


# ----------------------------------------------------------------------------------------------------------- driving


@dataclass(frozen=True)
class Case:
    """One comparison. script: events, each the tokens that come to every row: a tuple is a turn, a list of 0 and 1 a step."""

    codec: str = "kivi"
    settings: tuple = ()
    heads: int = 2
    dim: int = 8
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    pads: str = "left"
    constant: bool = False
    script: tuple = ((21,), *[[1]] * 14)

    @property
    def rows(self):
        return len(self.script[0])

    def make(self):
        return make_codec(self.codec, **dict(self.settings))

    def naive(self):
        """One reference for each row."""
        known = {**CODECS["kivi2" if self.codec == "kivi" else "int4"], **dict(self.settings)}
        if self.codec == "int":
            axis = known.pop("axis", "token")
            known |= {"key_axis": axis, "value_axis": axis, "residual": int_residual(axis, known["group"], known["residual"])}
        return [NaiveCodecCache(**known) for _ in range(self.rows)]


def numbers(case, count, dim, seed):
    """(rows, heads, count, dim): channels of different size and offset, so that groups have very different ranges."""
    generator = torch.Generator().manual_seed(seed)
    if case.constant:
        levels = torch.tensor([0.0, -0.0, 1.5, -3.0, 1e-9, -1e-9, 0.1, -0.1])
        return levels[torch.randint(0, len(levels), (case.rows, case.heads, count, 1), generator=generator)].expand(
            -1, -1, -1, dim
        )
    size = torch.rand(case.heads, 1, dim, generator=torch.Generator().manual_seed(1)) * 3 + 0.01
    x = torch.randn(case.rows, case.heads, count, dim, generator=generator, dtype=torch.float64)
    return ((x * size + size) * torch.tensor([1.0, -1.0]).repeat(dim)[:dim]).to(case.dtype)


def laid_out(counts, pads):
    """Which columns of a batch are real, for rows of these lengths: (rows, longest)."""
    column = np.arange(max(counts))
    counts = np.array(counts)[:, None]
    return column < counts if pads == "right" else column >= max(counts.ravel()) - counts


class Run:
    """A store and its references, fed alike; and a store of the compiled back end where there is one for the type."""

    def __init__(self, case):
        self.case, self.naive, self.seen = case, case.naive(), np.zeros(case.rows, dtype=int)
        self.seed, self.dims = 10, (case.dim, case.value_dim or case.dim)
        like = [torch.zeros(case.rows, case.heads, 0, dim, dtype=case.dtype) for dim in self.dims]
        kernels = [choose(name, "cpu", case.dtype) for name in ("reference", "auto")[: 1 if case.dtype == torch.float64 else 2]]
        self.stores = [EncodedStore.of(case.make(), *like, {}, each) for each in kernels]
        self.store = self.stores[0]

    def event(self, counts):
        """One turn or step. Returns outputs of the stores after a step, and of the references, (query heads, dim)."""
        step = isinstance(counts, list)
        self.seed += 2
        count = max(counts)
        keys, values = (numbers(self.case, count, dim, self.seed + side) for side, dim in enumerate(self.dims))
        real = laid_out(counts, self.case.pads)
        positions = torch.from_numpy(np.where(real, self.seen[:, None] + real.cumsum(1) - 1, -1))
        self.seen += np.array(counts)
        got = self._step(keys, values, positions) if step else self._turn(keys, values, positions)
        found = []
        for row, naive in enumerate(self.naive):
            if counts[row]:
                parts = [exact(x[row][:, real[row]]) for x in (keys, values)]
                queries = exact(self.queries()[row].flatten(0, 1)) if step else None
                found.append((row, naive.event("step" if step else "turn", *parts, queries)))
        return [(output[row, ..., 0, :].flatten(0, 1), out[:, 0]) for output in got for row, out in found]

    def queries(self):
        """(rows, heads, 2, 1, dim) of the current event."""
        shape = (self.case.rows, self.case.heads, 2, 1, self.case.dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64).to(self.case.dtype)

    def _turn(self, keys, values, positions):
        for store in self.stores:
            store.append(keys, values, positions, {})
            store.seal(True, None)
        return []

    def _step(self, keys, values, positions):
        rows = (positions[:, 0] >= 0).numpy()
        rows, outputs = None if rows.all() else rows, []
        for store in self.stores:
            store.reserve(None, rows)
            store.insert(keys, values, positions, {}, rows)
            rule = AttentionRule(scaling=self.case.dim**-0.5)
            outputs.append(store.attend(self.queries(), positions, store.view(), rule)[0])
            store.seal(False, None)
        return outputs


def exact(tensor):
    """As an array whose numbers are the same."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def row_of(planes, name, row, head):
    """What stands in a row of a plane, found from capacities alone."""
    start = int(planes.capacity[:row].sum() + planes.capacity[row, :head].sum())
    return planes.planes[name][start : start + int(planes.lengths[row, head])]


def assert_sides_equal(run):
    """Every row of both sides holds the reference's bits."""
    for row, naive in enumerate(run.naive):
        for side, expected in zip(run.store.sides, (naive.keys, naive.values), strict=True):
            for head in range(run.case.heads):
                codes = [bytes(code.tolist()) for code in row_of(side.units, "code", row, head)]
                assert codes == [unit.streams[head] for unit in expected.units], "codes"
                for name in ("scale", "zero"):
                    wanted = [getattr(unit, f"{name}s")[head] for unit in expected.units]
                    found = row_of(side.units, name, row, head).numpy()
                    np.testing.assert_array_equal(found, np.array(wanted).reshape(found.shape), name)
                recent = exact(row_of(side.recent, "x", row, head))
                np.testing.assert_array_equal(recent, np.array([x[head] for x in expected.full]).reshape(recent.shape))
    for store in run.stores[1:]:  # back ends quantise alike
        for one, other in zip(run.store.sides, store.sides, strict=True):
            for kind, row, head in ((kind, *place) for kind in one.units.planes for place in np.ndindex(*one.encoded.shape)):
                assert torch.equal(row_of(one.units, kind, row, head), row_of(other.units, kind, row, head)), kind


def assert_view_equals(run):
    """Keys and values of a view are the reference's numbers, in the type in which they came."""
    view = run.store.view()
    for row, naive in enumerate(run.naive):
        for dense, side in ((view.keys, naive.keys), (view.values, naive.values)):
            assert dense.dtype == run.case.dtype
            held = torch.from_numpy(side.held()).to(run.case.dtype)
            assert torch.equal(dense[row, :, : held.shape[1]], held)
            assert view.positions[row, :, : held.shape[1]].tolist() == [list(range(held.shape[1]))] * run.case.heads


def compare(case):
    """The whole script, compared after each event."""
    run = Run(case)
    for counts in case.script:
        for got, wanted in run.event(counts):
            # Outputs are means of values: what differs is as large as values are.
            np.testing.assert_allclose(got.double().numpy(), wanted, atol=TOLERANCE[case.dtype] * max(1, abs(wanted).max()))
        assert_sides_equal(run)
    assert_view_equals(run)
    return run


def kivi(bits=2, group=4, residual=8, key_axis="channel", value_axis="token"):
    names = ("bits", "group", "residual", "key_axis", "value_axis")
    return tuple(zip(names, (bits, group, residual, key_axis, value_axis), strict=True))


STEPS = tuple([1] for _ in range(14))
PAIR = tuple([1, 1] for _ in range(9))
RAGGED = ((21, 5), *PAIR, [1, 0], [0, 1], (3, 11), [1, 1], (0, 4), *PAIR)
"""Prompts of which one is shorter than the residual, steps without one row, turns of any length, pads alone for a row."""

CASES = {
    **{f"{bits} bits": Case(settings=kivi(bits)) for bits in (2, 4, 8, 3, 16)},
    "keys by token": Case(settings=kivi(key_axis="token")),
    "values by channel": Case(settings=kivi(value_axis="channel")),
    "the other way round": Case(settings=kivi(key_axis="token", value_axis="channel")),
    "group 3": Case(settings=kivi(3, 3, 9)),
    "group 5, residual of one group": Case(settings=kivi(2, 5, 5)),
    "residual 0": Case(settings=kivi(residual=0, key_axis="token")),
    "groups of one token": Case(settings=kivi(2, 1, 3)),
    "a group longer than a head": Case(settings=kivi(group=12, residual=12)),
    "constant groups": Case(settings=kivi(), constant=True),
    "constant groups, 16 bits": Case(settings=kivi(16), constant=True),
    "bfloat16": Case(settings=kivi(), dtype=torch.bfloat16, script=RAGGED),
    "float64": Case(settings=kivi(), dtype=torch.float64, script=RAGGED),
    "float64, 16 bits": Case(settings=kivi(16), dtype=torch.float64),
    "pads left": Case(settings=kivi(), script=RAGGED),
    "pads right": Case(settings=kivi(), script=RAGGED, pads="right"),
    "pads, channels on both sides": Case(settings=kivi(key_axis="channel", value_axis="channel"), script=RAGGED),
    "values of another size": Case(settings=kivi(), dim=6, value_dim=10),
    "turns that fill no group": Case(settings=kivi(), script=((3,), (2,), (2,), (3,), *STEPS[:3], (1,), (30,))),
    "token by token": Case(settings=kivi(), script=([1],) * 19),
    "int4": Case("int", script=RAGGED),
    "int8, odd groups": Case("int", (("bits", 8), ("group", 3)), script=RAGGED),
    "int by channel": Case("int", (("axis", "channel"), ("group", 4)), script=RAGGED),
    "int by channel, residual rounded up": Case("int", (("axis", "channel"), ("group", 4), ("residual", 5))),
    "int with a residual": Case("int", (("residual", 4),), script=RAGGED),
    "more tokens than are decoded at once": Case(settings=kivi(), heads=1, dim=4, script=((530, 270), [1, 1])),
    "kivi2 as published": Case(dim=4, heads=1, script=((150,), *STEPS[:3])),
}


@pytest.mark.parametrize("name", CASES)
def test_all_that_is_held_equals_the_reference_bit_for_bit(name):
    run = compare(CASES[name])
    assert any(side.units.lengths.any() for side in run.store.sides), "nothing was encoded"


@pytest.mark.parametrize("dim", [64, pytest.param(80, marks=slow), 96, pytest.param(128, marks=slow)])
def test_heads_of_real_sizes(dim):
    """80 channels are two groups of 32 and one of 16."""
    compare(Case(settings=kivi(4, 32, 32), dim=dim, heads=1, script=((40,), [1])))


@slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("residual", [32, 64, 128])
@pytest.mark.parametrize("axes", [(k, v) for k in ("channel", "token") for v in ("channel", "token")], ids="-".join)
@pytest.mark.parametrize("bits", [2, 4])
def test_published_groups_on_ragged_batches(bits, axes, residual, dtype):
    script = ((150, 70), *PAIR[:4], (1, 9), [1, 0], (40, 0), [1, 1])
    compare(Case(settings=kivi(bits, 32, residual, *axes), dim=8, heads=1, dtype=dtype, script=script))


@slow
@pytest.mark.parametrize("seed", range(12))
def test_random_scripts(seed):
    draw = np.random.default_rng(seed)
    group = int(draw.choice([1, 2, 3, 4, 7]))
    axes = [str(axis) for axis in draw.choice(["token", "channel"], 2)]
    settings = kivi(int(draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 16])), group, group * int(draw.integers(1, 4)), *axes)
    events = [tuple(draw.integers(1, 20, 3).tolist())]
    for _ in range(25):
        step = draw.random() < 0.7
        counts = draw.integers(0, 2 if step else 15, 3)
        counts[draw.integers(3)] |= 1
        events.append(counts.tolist() if step else tuple(counts.tolist()))
    compare(Case(settings=settings, dim=5, script=tuple(events), pads=str(draw.choice(["left", "right"]))))


# ------------------------------------------------------------------------------------------------------- what is decoded


def test_no_number_is_further_off_than_half_a_scale():
    for bits in (1, 2, 4, 8, 16):
        x = torch.randn(50, 1, 40, generator=torch.Generator().manual_seed(bits)) * torch.logspace(-6, 4, 50)[:, None, None]
        side = GroupedSide(x.view(1, 1, 50, 40), Grouping(bits, "token", 16, 0, 40), choose("reference", "cpu", x.dtype))
        side.add(x.view(1, 1, 50, 40), torch.ones(1, 50, dtype=torch.bool), np.full((1, 1), 50), False)
        side.seal(True, None)
        scale = side.units.planes["scale"].float().repeat_interleave(16, 1)[:, :40]
        off = (side.dense()[0, 0] - x[:, 0]).abs()
        assert bool((off <= scale / 2 * (1 + 1e-3) + x[:, 0].abs() * 1e-6).all())
        assert bool((off > scale / 4).any()), "codes of so few bits can't be that near"


def test_a_sequence_of_nans_leaves_its_neighbours_alone():
    """Short rows end in whatever stands there, which no sum may touch, encoded or not."""
    for settings in (kivi(), kivi(residual=40)):
        case = Case(settings=settings, script=((30, 12),))
        outputs = []
        for spoilt in (False, True):
            run = Run(case)
            keys, values = (numbers(case, 30, dim, 1 + dim) for dim in run.dims)
            if spoilt:
                values[0] = keys[0] = float("nan")
            real = laid_out((30, 12), "right")
            run._turn(keys, values, torch.from_numpy(np.where(real, real.cumsum(1) - 1, -1)))
            one = torch.ones(2, 2, 1, case.dim)
            outputs.append([output[1] for output in run._step(one, one, torch.tensor([[30], [12]]))])
        assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


# ------------------------------------------------------------------------------------------------ nothing is encoded twice


@pytest.mark.parametrize("name", ["pads left", "values by channel", "int4", "bfloat16"])
def test_what_is_encoded_is_never_encoded_again(name, monkeypatch):
    """Each token is encoded once, from the numbers that came; its bytes stay the same ever after."""
    case, given = CASES[name], []
    encode = GroupedSide.encode

    def watched(side, tokens, counts, limit):
        given.append((id(side), tokens))
        encode(side, tokens, counts, limit)

    monkeypatch.setattr(GroupedSide, "encode", watched)
    run, before, arrived = Run(case), {}, set()
    for counts in case.script:
        run.event(counts)
        for number, dim in enumerate(run.dims):
            arrived |= {tuple(token) for token in numbers(case, max(counts), dim, run.seed + number).flatten(0, 2).tolist()}
        for place in np.ndindex(2, case.rows, case.heads):
            units = run.store.sides[place[0]].units
            now = {kind: row_of(units, kind, *place[1:]).clone() for kind in units.planes}
            for kind, old in before.get(place, {}).items():
                assert torch.equal(now[kind][: len(old)], old)
            before[place] = now
    for side in run.store.sides:
        tokens = [tuple(token) for number, some in given if number == id(side) for token in some.tolist()]
        assert len(tokens) == len(set(tokens)) == side.encoded.sum()
        assert set(tokens) <= arrived, "encoded from other numbers than came"


# ------------------------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("name", ["pads left", "int4", "int by channel", "values by channel", "bfloat16"])
def test_parts_are_all_storages_there_are(name):
    """Codes, scales, zeros and what is in full precision are all that a walk finds; indices are bookkeeping."""
    run = Run(CASES[name])
    for counts in run.case.script:
        run.event(counts)
        store = run.store
        found = storages(tensors_in(store.sides))
        index = storages(tensor for tensor in tensors_in(store.sides) if tensor.dtype == torch.int64)
        assert sum(store.parts.values()) == store.kv_bytes == sum(found.values()) - sum(index.values())
        assert set(store.parts) == {"full_precision", "codes", "scales", "zeros"}
        assert store.row_bytes.sum() == store.kv_bytes
        assert store.state_bytes == sum(storages(tensors_in(store)).values()) - store.kv_bytes


PER_NUMBER = {
    "kivi2": ("kivi", {}, 3.0),
    "kivi2, 64": ("kivi", {"group": 64}, 2.5),
    "kivi2, 128": ("kivi", {"group": 128}, 2.25),
    "kivi4": ("kivi", {"bits": 4}, 5.0),
    "int4": ("int", {}, 5.0),
    "int8": ("int", {"bits": 8}, 9.0),
    "int4 by channel": ("int", {"axis": "channel"}, 5.0),
}


@pytest.mark.parametrize("name", PER_NUMBER)
@pytest.mark.parametrize("tokens", [1024, 1000])
def test_bits_per_number_at_a_prompts_end(name, tokens):
    """What is held is ((T - rho) * b + 16 * rho) / T bits per number, with rho tokens of T in 16 bits: nothing is hidden."""
    codec, settings, bits = PER_NUMBER[name]
    case = Case(codec, tuple(settings.items()), dim=128, dtype=torch.bfloat16, script=((tokens,),))
    run = Run(case)
    keys, values = (numbers(case, tokens, 128, seed) for seed in (1, 2))
    run._turn(keys, values, torch.arange(tokens)[None])
    count, made = tokens * case.heads * 128, case.make()
    total = 0.0
    for which, side in zip(("keys", "values"), run.store.sides, strict=True):
        rho = side.recent.lengths[0, 0]
        slide = codec == "kivi" and which == "values"
        wait = 128 if codec == "kivi" else 32 if "axis" in settings else 1
        assert rho == (128 if slide else tokens % wait)
        encoded = sum(side.parts().values()) * 8 / (side.encoded.sum() * 128)
        assert encoded == pytest.approx(bits, rel=0.01)
        assert encoded == pytest.approx(made.bits_of(which, 128, 2), rel=1e-9)
        total += ((tokens - rho) * bits + 16 * rho) / tokens / 2
    assert run.store.kv_bytes * 8 / (2 * count) == pytest.approx(total, rel=0.01)


def test_steps_hold_little_more_than_their_tokens():
    """Free slots at steps are few: no side's storage is larger than its tokens and 64 more in each row."""
    run = Run(Case(settings=kivi(2, 32, 64), dim=4, script=((110, 90),)))
    run.event((110, 90))
    for _ in range(40):
        run.event([1, 1])
        for side in run.store.sides:
            assert (side.units.capacity * side.grouping.unit <= side.encoded + 64).all()
            assert (side.recent.capacity <= side.recent.lengths + 16).all()


# --------------------------------------------------------------------------------------------------- leaving, rows, copies


def filled(codec="int", settings=(), script=((20, 9), [1, 1])):
    run = Run(Case(codec, settings, script=script))
    for counts in script:
        run.event(counts)
    return run


def contents(store):
    """Position -> decoded key and value, of each row and head."""
    view = store.view()
    return [
        {
            p: (view.keys[row, head, slot].tolist(), view.values[row, head, slot].tolist())
            for slot, p in enumerate(view.positions[row, head].tolist())
            if p >= 0
        }
        for row, head in np.ndindex(*view.positions.shape[:2])
    ]


@pytest.mark.parametrize("settings", [(), (("residual", 6),), (("axis", "channel"), ("group", 4), ("residual", 8))])
def test_tokens_that_stay_are_as_they_were(settings):
    """Kept sets that differ by head, cut through encoded tokens and those in full precision."""
    store = filled(settings=settings).store
    before, view = contents(store), store.view()
    kept = torch.rand(view.positions.shape, generator=torch.Generator().manual_seed(3)) < 0.6
    if store.sides[0].grouping.unit > 1:  # whole groups
        kept[..., :16] = kept[..., :16:4].repeat_interleave(4, -1)
        kept[1, :, :8] = kept[1, :, :8:4].repeat_interleave(4, -1)
    kept &= view.positions >= 0
    left = [set(view.positions[place][kept[place]].tolist()) for place in np.ndindex(*kept.shape[:2])]
    store.keep(kept, view, None)
    assert contents(store) == [{p: row[p] for p in stays} for row, stays in zip(before, left, strict=True)]
    assert (store.sides[0].encoded + store.sides[0].recent.lengths == store.lengths).all()


def test_a_group_that_would_lose_some_of_its_tokens_says_so():
    run = filled(settings=(("axis", "channel"), ("group", 4)))
    before, view = contents(run.store), run.store.view()
    kept = view.positions >= 0
    kept[0, 1, 5] = False
    with pytest.raises(ValueError, match=r"codec int4 .*holds earlier turns in groups.*codec=int4") as refusal:
        run.store.keep(kept, view, None)
    assert "\n" not in str(refusal.value)
    assert contents(run.store) == before


def test_one_token_a_row_leaves():
    store = filled().store
    before = contents(store)
    positions = store.view().positions
    slots = torch.tensor([[3, 0], [8, 9]])
    leaving = positions.gather(-1, slots[..., None]).flatten().tolist()
    rows = np.array([[True, False], [True, True]])
    store.vacate(slots, rows)
    for row, gone, leaves in zip(before, leaving, rows.ravel(), strict=True):
        if leaves:
            del row[gone]
    assert contents(store) == before


@pytest.mark.parametrize("name", ["pads left", "int4"])
def test_copies_and_chosen_rows(name):
    run = Run(CASES[name])
    for counts in run.case.script:
        run.event(counts)
    store, before = run.store, contents(run.store)
    other = store.copy()
    assert not storages(tensors_in(store)).keys() & storages(tensors_in(other)).keys()
    other.select_rows(torch.tensor([1, 1, 0]))
    heads = run.case.heads
    assert contents(other) == [*before[heads:], *before[heads:], *before[:heads]]
    run.event([1, 1])  # the copy doesn't notice
    assert contents(other) == [*before[heads:], *before[heads:], *before[:heads]]


# -------------------------------------------------------------------------------------------------- the quantiser, settings


@functools.cache
def halves():
    """All finite halves in ascending order."""
    found = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return np.unique(found[np.isfinite(found)].astype(np.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_neighbouring_halves(dtype):
    """Against a search among all halves: numbers of every size, halves themselves, those just beside them, and beyond all."""
    random = np.random.default_rng(0)
    x = np.concatenate([random.normal(size=500) * 10.0 ** random.integers(-9, 6, 500), random.choice(halves(), 300)])
    x = torch.from_numpy(np.concatenate([x, [0.0, -0.0, 1e-30, -1e-30, 65504, -65504, 65519, -65519, 1e9, -1e9]])).to(dtype)
    x = torch.cat([x, torch.nextafter(x, x + 1), torch.nextafter(x, x - 1)])
    inside = x.double().clamp(-65504, 65504).numpy()
    below, above = half_below(x).double().numpy(), half_above(x).double().numpy()
    np.testing.assert_array_equal(below, halves()[np.searchsorted(halves(), inside, side="right") - 1])
    np.testing.assert_array_equal(above, halves()[np.searchsorted(halves(), inside, side="left")])


@pytest.mark.parametrize(
    ("codec", "settings", "says"),
    [
        ("kivi", {"bits": 9}, "bits=9: use one of 1, 2"),
        ("kivi", {"residual": 100}, "residual=100: use a multiple of group, which is 32"),
        ("kivi", {"residual": 0}, "residual=0: use a multiple"),
        ("kivi", {"group": 0}, "group=0: use at least 1"),
        ("kivi", {"key_axis": "row"}, "key_axis"),
        ("kivi", {"grup": 1}, "did you mean"),
        ("int", {"bits": 0}, "bits=0: use one of"),
        ("int", {"group": -1}, "group"),
        ("int", {"residual": -1}, "residual"),
        ("int5", {}, "int"),
    ],
)
def test_wrong_settings_say_what_to_change(codec, settings, says):
    with pytest.raises(CodecError, match=says) as refusal:
        make_codec(codec, **settings)
    assert "\n" not in str(refusal.value)


def test_settings_that_are_fine():
    assert make_codec("kivi", residual=0, key_axis="token").label == "kivi2 residual=0 key_axis=token"
    assert [make_codec("kivi", bits=bits).label for bits in (2, 4, 16)] == ["kivi2", "kivi4", "kivi16"]
    assert [make_codec("int", bits=bits).label for bits in (4, 8)] == ["int4", "int8"]
    assert make_codec("int", bits=8, group=64).label == "int8 group=64"
