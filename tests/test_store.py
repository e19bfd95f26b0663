"""The slot store against a plain model of it: a dict of tokens for each row, driven through random operations."""

import copy
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvlab.cache.store import SlotStore
from kvlab.rows import GROWTH

MASS, TOKEN, MARKS = torch.float32, torch.int32, torch.int16


@dataclass
class Expected:
    """What the store should hold. rows[sequence][kv_head]: position -> [key, value, mass, token id, marks]."""

    rows: list
    capacity: np.ndarray
    seen: list

    @property
    def lengths(self):
        return np.array([[len(held) for held in sequence] for sequence in self.rows])


def new_store(batch, kv_heads, key_dim, value_dim, dtype=torch.float32):
    keys = torch.zeros(batch, kv_heads, 1, key_dim, dtype=dtype)
    values = torch.zeros(batch, kv_heads, 1, value_dim, dtype=dtype)
    return SlotStore.empty(keys, values, {"mass": (MASS, ()), "token_ids": (TOKEN, ()), "marks": (MARKS, (3,))})


def new_expected(batch, kv_heads):
    rows = [[{} for _ in range(kv_heads)] for _ in range(batch)]
    return Expected(rows, np.zeros((batch, kv_heads), dtype=np.int64), [0] * batch)


def tensors(store):
    return [store.keys, store.values, store.positions, *store.indices, *store.state.values()]


def arrays(store):
    return [store.capacity, store.lengths]


def contents(view):
    """Rows of position -> [key, value, mass, token id, marks], and how many slots hold a token."""
    positions, keys, values = view.positions.tolist(), view.keys.tolist(), view.values.tolist()
    planes = [keys, values, *(view.state[name].tolist() for name in ("mass", "token_ids", "marks"))]
    rows, held = [], 0
    for b, sequence in enumerate(positions):
        rows.append([])
        for h, head in enumerate(sequence):
            slots = [slot for slot, position in enumerate(head) if position != -1]
            held += len(slots)
            rows[b].append({head[s]: [plane[b][h][s] for plane in planes] for s in slots})
    return rows, held


def check(store, expected):
    """Everything that must hold after any operation."""
    lengths, capacity = expected.lengths, expected.capacity
    key_dim, value_dim, dtype = store.keys.shape[-1], store.values.shape[-1], store.keys.dtype
    assert np.array_equal(store.lengths, lengths)
    assert np.array_equal(store.capacity, capacity)
    assert (store.capacity >= store.lengths).all()
    uniform = len(set(capacity.flatten().tolist())) == 1
    assert store.uniform == uniform

    view = store.view()
    width = view.positions.shape[-1]
    assert view.positions.shape == (*lengths.shape, width)
    assert view.keys.shape == (*lengths.shape, width, key_dim)
    assert view.values.shape == (*lengths.shape, width, value_dim)
    assert view.keys.dtype == view.values.dtype == dtype
    assert {name: tensor.dtype for name, tensor in view.state.items()} == {"mass": MASS, "token_ids": TOKEN, "marks": MARKS}
    assert width == lengths.max()
    rows, held = contents(view)
    assert rows == expected.rows
    assert held == lengths.sum()  # no position twice
    assert (view.positions >= -1).all()
    assert view.full == bool((view.positions >= 0).all())

    # A dense view of rows of one size is the storage itself; of ragged rows it is a copy, and `index` says of what.
    if uniform:
        assert view.index is None
        assert view.keys.untyped_storage().data_ptr() == store.keys.untyped_storage().data_ptr()
        assert view.state["mass"].untyped_storage().data_ptr() == store.state["mass"].untyped_storage().data_ptr()
    else:
        mask = view.positions >= 0
        assert torch.equal(store.positions[view.index[mask]], view.positions[mask])
        assert torch.equal(store.keys[view.index[mask]], view.keys[mask])

    # A row's tokens fill its first slots, and kernels are told so.
    ends = capacity.flatten().cumsum()
    starts = ends - capacity.flatten()
    flat = store.positions.tolist()
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        held = lengths.flatten()[row]
        assert [position != -1 for position in flat[start:end]] == [slot < held for slot in range(end - start)]
    slots = store.slots(("mass", None, None))
    assert slots.offsets.tolist() == starts.tolist() and slots.lengths.tolist() == lengths.flatten().tolist()
    assert slots.widest == capacity.max() and slots.value is store.planes["mass"]

    total = int(capacity.sum())
    itemsize = {torch.float32: 4, torch.bfloat16: 2}[dtype]
    assert store.kv_bytes == total * (key_dim + value_dim) * itemsize
    assert store.state_bytes == total * (4 + 4 + 4 + 3 * 2) + 8 * sum(index.numel() for index in store.indices)
    for tensor in tensors(store):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def assert_apart(store, other):
    """Nothing of one store lies in the other's memory."""
    pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors(store) if tensor.numel()}
    assert pointers.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in tensors(other) if tensor.numel())
    assert not any(np.shares_memory(one, two) for one in arrays(store) for two in arrays(other))


class Driver:
    """Does one random operation after the other, to the store and to the model alike."""

    def __init__(self, seed, dtype):
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.batch, self.kv_heads = int(self.rng.integers(1, 5)), int(self.rng.integers(1, 4))
        self.key_dim, self.value_dim = (int(dim) for dim in self.rng.permutation(np.arange(1, 6))[:2])
        self.store = new_store(self.batch, self.kv_heads, self.key_dim, self.value_dim, dtype)
        self.expected = new_expected(self.batch, self.kv_heads)
        self.asides = []
        self.met = Counter()

    def run(self, operations):
        check(self.store, self.expected)
        names = ["append", "step", "step", "step", "vacate", "vacate", "keep", "select_rows", "aside", "write_state", "trim"]
        for _ in range(operations):
            name = names[self.rng.integers(len(names))]
            getattr(self, name)()
            check(self.store, self.expected)
            self.note(name)
        for store, expected in self.asides:
            check(store, expected)
        return self.met

    def note(self, name):
        lengths = self.expected.lengths
        self.met.update({name, "uniform" if self.store.uniform else "ragged"})
        self.met["empty row"] += bool((lengths == 0).any() and lengths.any())
        self.met["empty"] += not lengths.any()

    # ------------------------------------------------------------------------------------------- random inputs

    def numbers(self, *shape):
        """Whole numbers that every dtype holds exactly, laid out as models do or in order."""
        drawn = torch.from_numpy(self.rng.integers(-100, 100, shape)).to(self.dtype)
        return drawn.transpose(1, 2).contiguous().transpose(1, 2) if self.rng.random() < 0.5 else drawn

    def limit(self):
        """No limit, one for all rows, or one for each."""
        kind = self.rng.integers(3)
        if kind == 0:
            return None
        shape = (self.batch, self.kv_heads)
        return np.full(shape, self.rng.integers(0, 40)) if kind == 1 else self.rng.integers(0, 40, shape)

    def place(self, sequence, keys, values, ids, marks, tokens):
        """Put a sequence's tokens, given by their index in the call, into the model."""
        for head in range(self.kv_heads):
            for count, token in enumerate(tokens):
                self.expected.rows[sequence][head][self.expected.seen[sequence] + count] = [
                    keys[sequence, head, token].tolist(),
                    values[sequence, head, token].tolist(),
                    0.0,
                    int(ids[sequence, token]),
                    marks[sequence, head, token].tolist(),
                ]
        self.expected.seen[sequence] += len(tokens)

    # -------------------------------------------------------------------------------------------------- operations

    def append(self):
        tokens = int(self.rng.integers(1, 9))
        keys = self.numbers(self.batch, self.kv_heads, tokens, self.key_dim)
        values = self.numbers(self.batch, self.kv_heads, tokens, self.value_dim)
        ids = torch.from_numpy(self.rng.integers(0, 1000, (self.batch, tokens)))
        marks = torch.from_numpy(self.rng.integers(0, 1000, (self.batch, self.kv_heads, tokens, 3)))
        real = self.rng.random((self.batch, tokens)) < self.rng.choice([0.4, 1.0])
        if self.rng.random() < 0.1:
            real[self.rng.integers(self.batch)] = False
        seen = np.array(self.expected.seen)[:, None]
        kind = self.rng.choice(["int32", "int64"])
        positions = torch.from_numpy(np.where(real, seen + real.cumsum(1) - 1, -1).astype(kind))
        for sequence in range(self.batch):
            self.place(sequence, keys, values, ids, marks, np.flatnonzero(real[sequence]))
        more = bool(self.rng.random() < 0.5)
        roomy = np.maximum(self.expected.lengths, self.expected.capacity * 3 // 2)
        self.store.append(keys, values, positions, {"token_ids": ids[:, None], "marks": marks}, more_to_come=more)
        self.met["roomy"] += more
        if more:  # how much room is its own business, within reason
            assert (self.expected.lengths <= self.store.capacity).all() and (self.store.capacity <= roomy).all()
        self.expected.capacity = self.store.capacity.copy() if more else self.expected.lengths
        for given in (keys, values, positions, ids, marks):  # what was stored must not be the caller's memory
            given.fill_(7)

    def step(self):
        active = None if self.rng.random() < 0.5 else self.rng.random(self.batch) < 0.6
        rows = np.ones(self.batch, dtype=bool) if active is None else active
        mask = None if active is None else torch.from_numpy(active)
        limit, tokens = self.limit(), int(self.rng.choice([1, 1, 3, 30]))
        lengths, capacity = self.expected.lengths, self.expected.capacity
        most = np.full_like(lengths, 10**6) if limit is None else np.maximum(limit, lengths + 1)
        wanted = np.minimum(lengths + tokens, most)
        lacking = (wanted > capacity) & rows[:, None]
        self.expected.capacity = np.where(lacking, np.minimum(np.maximum(wanted, capacity + GROWTH), most), capacity)
        self.store.reserve(limit, mask, tokens)
        check(self.store, self.expected)
        assert (self.store.lengths < self.store.capacity)[rows].all()

        keys = self.numbers(self.batch, self.kv_heads, 1, self.key_dim)
        values = self.numbers(self.batch, self.kv_heads, 1, self.value_dim)
        ids = torch.from_numpy(self.rng.integers(0, 1000, (self.batch, 1)))
        marks = torch.from_numpy(self.rng.integers(0, 1000, (self.batch, self.kv_heads, 1, 3)))
        positions = torch.from_numpy(np.where(rows, self.expected.seen, -1))[:, None]
        for sequence in np.flatnonzero(rows):
            self.place(sequence, keys, values, ids, marks, [0])
        self.store.insert(keys, values, positions, {"token_ids": ids[:, None], "marks": marks}, mask)

    def vacate(self):
        some = self.expected.lengths > 0
        every = bool(some.all()) and self.rng.random() < 0.7
        rows = some if every else some & (self.rng.random(some.shape) < 0.7)
        if not rows.any():
            return
        positions = self.store.view().positions
        slots = np.zeros(some.shape, dtype=np.int64)
        for sequence, head in zip(*rows.nonzero(), strict=True):
            held = (positions[sequence, head] >= 0).nonzero()[:, 0].tolist()
            slots[sequence, head] = self.rng.choice(held)
            self.expected.rows[sequence][head].pop(int(positions[sequence, head, slots[sequence, head]]))
        self.store.vacate(torch.from_numpy(slots), None if every else rows)

    def keep(self):
        view = self.store.view()
        share = self.rng.choice([0.0, 0.3, 0.8, 1.0], self.expected.capacity.shape)[..., None]
        kept = torch.from_numpy(self.rng.random(view.positions.shape) < share) & (view.positions >= 0)
        for sequence in range(self.batch):
            for head in range(self.kv_heads):
                left = set(view.positions[sequence, head][kept[sequence, head]].tolist())
                held = self.expected.rows[sequence][head]
                self.expected.rows[sequence][head] = {p: token for p, token in held.items() if p in left}
        limit, lengths = self.limit(), self.expected.lengths
        spare = lengths + GROWTH
        self.expected.capacity = spare if limit is None else np.minimum(spare, np.maximum(limit, lengths))
        self.store.keep(kept, view, limit)

    def select_rows(self):
        chosen = self.rng.integers(0, self.batch, int(self.rng.integers(1, 5)))
        self.batch = len(chosen)
        self.expected.rows = [copy.deepcopy(self.expected.rows[sequence]) for sequence in chosen]
        self.expected.seen = [self.expected.seen[sequence] for sequence in chosen]
        self.expected.capacity = self.expected.capacity[chosen]
        self.store.select_rows(torch.from_numpy(chosen))

    def aside(self):
        """Copy; go on with the original or with the copy, and look at the other at the end."""
        other = self.store.copy()
        assert_apart(self.store, other)
        pair = [self.store, other]
        if self.rng.random() < 0.5:
            pair.reverse()
        self.store = pair[0]
        self.asides.append((pair[1], copy.deepcopy(self.expected)))

    def trim(self):
        self.expected.capacity = np.minimum(self.expected.capacity, self.expected.lengths + GROWTH)
        self.store.trim()

    def write_state(self):
        view = self.store.view()
        mass = torch.from_numpy(self.rng.integers(0, 1000, view.positions.shape)).float()
        positions = view.positions.tolist()
        for sequence, heads in enumerate(self.expected.rows):
            for head, held in enumerate(heads):
                for slot, position in enumerate(positions[sequence][head]):
                    if position >= 0:
                        held[position][2] = float(mass[sequence, head, slot])
        self.store.write_state("mass", mass, view)
        mass.fill_(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block", range(10))
def test_random_operations(block, dtype):
    met = Counter()
    for seed in range(12 * block, 12 * block + 12):
        met.update(Driver(seed, dtype).run(operations=22))
    # The sequences are worth something only if they get everywhere.
    everywhere = {"append", "step", "vacate", "keep", "select_rows", "aside", "write_state", "trim"}
    everywhere |= {"uniform", "ragged", "roomy", "empty row", "empty"}
    assert all(met[name] >= 5 for name in everywhere), met


# ------------------------------------------------------------------------------------------------- single cases


def filled(batch=2, kv_heads=2, tokens=5, dim=3, seed=0):
    """A store that holds one turn without pads."""
    generator = torch.Generator().manual_seed(seed)
    store = new_store(batch, kv_heads, dim, dim)
    keys = torch.randn(batch, kv_heads, tokens, dim, generator=generator)
    store.append(keys, keys + 1, torch.arange(tokens).expand(batch, -1), {})
    return store, keys


def insert(store, number, rows=None):
    batch, kv_heads = store.lengths.shape
    token = torch.full((batch, kv_heads, 1, store.keys.shape[-1]), float(number))
    store.insert(token, token, torch.full((batch, 1), number), {}, rows)


@pytest.fixture
def every_warning():
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def test_one_kv_head_works_without_warnings(every_warning, recwarn):
    """Some warnings come once in a process only, which hides them from whichever test runs second."""
    store, _ = filled(batch=2, kv_heads=1)
    for number in (5, 6):
        store.reserve(None, None)
        insert(store, number)
    insert(store, 7, rows=torch.tensor([True, False]))
    store.keep(torch.ones(2, 1, 8, dtype=torch.bool) & (store.view().positions >= 0), store.view(), np.array([[4], [7]]))
    store.vacate(torch.zeros(2, 1, dtype=torch.long), np.array([[True], [False]]))
    store.select_rows(torch.tensor([1, 0]))
    assert [str(warning.message) for warning in recwarn] == []


def test_a_new_store_has_no_slot():
    store = new_store(3, 2, 4, 5)
    assert store.kv_bytes == 0
    assert store.view().positions.shape == (3, 2, 0)
    assert store.uniform


def test_the_last_token_takes_a_victims_place_and_nothing_else_moves():
    store, keys = filled(batch=1, kv_heads=2, tokens=6)
    store.vacate(torch.tensor([[4, 1]]))
    insert(store, 9)
    view = store.view()
    assert view.positions.tolist() == [[[0, 1, 2, 3, 5, 9], [0, 5, 2, 3, 4, 9]]]
    assert torch.equal(view.keys[0, 0, :4], keys[0, 0, :4])
    assert view.full and view.index is None


def test_the_last_token_itself_may_leave():
    store, _ = filled(batch=1, kv_heads=1, tokens=3)
    store.vacate(torch.tensor([[2]]))
    assert store.positions.tolist() == [0, 1, -1] and store.lengths.tolist() == [[2]]


def test_several_victims_one_after_the_other():
    store, _ = filled(batch=2, kv_heads=1, tokens=4)
    for _ in range(2):
        store.vacate(torch.zeros(2, 1, dtype=torch.long), np.array([[True], [False]]))
    assert store.view().positions[:, 0].tolist() == [[2, 1, -1, -1], [0, 1, 2, 3]]
    insert(store, 8, rows=torch.tensor([True, False]))
    assert store.view().positions[:, 0].tolist() == [[2, 1, 8, -1], [0, 1, 2, 3]]


def test_state_follows_tokens_that_a_kernel_moved():
    store, _ = filled(batch=1, kv_heads=1, tokens=3)
    store.write_state("token_ids", torch.tensor([[[10, 11, 12]]]), store.view())
    store.write_state("mass", torch.tensor([[[1.0, 2.0, 3.0]]]), store.view())
    arrived = {"token_ids": torch.tensor([20, 21])}
    store.replace_state(arrived, torch.tensor([4, 2, 3], dtype=torch.int32), keep=("mass",))
    assert store.state["token_ids"].tolist() == [21, 12, 20]
    assert store.state["mass"].tolist() == [1.0, 2.0, 3.0]
    store.replace_state(arrived, torch.tensor([4, 2, 3], dtype=torch.int32))
    assert store.state["mass"].tolist() == [0.0, 3.0, 0.0]


def test_growth_happens_once_in_many_steps():
    store, _ = filled(tokens=3)
    sizes = []
    for number in range(3, 3 + 2 * GROWTH):
        store.reserve(None, None)
        insert(store, number)
        sizes.append(int(store.capacity[0, 0]))
    assert sizes == [3 + GROWTH] * GROWTH + [3 + 2 * GROWTH] * GROWTH


def test_free_slots_behind_all_rows_are_not_shown():
    """So that attention reads what is held, and needs no mask where rows are of one length."""
    store, _ = filled(tokens=3)
    store.reserve(None, None)
    insert(store, 3)
    view = store.view()
    assert store.capacity.tolist() == [[3 + GROWTH] * 2] * 2
    assert view.positions.tolist() == [[[0, 1, 2, 3]] * 2] * 2 and view.full


def test_chunks_of_a_turn_move_few_tokens():
    """Room grows by half, so that many chunks do not each copy all that came before."""
    store, _ = filled(batch=1, kv_heads=1, tokens=64)
    sizes = set()
    for start in range(64, 512, 8):
        new = torch.zeros(1, 1, 8, 3)
        store.append(new, new, torch.arange(start, start + 8)[None], {}, more_to_come=True)
        sizes.add(int(store.capacity[0, 0]))
    assert len(sizes) <= 7 and max(sizes) < 512 * 3 // 2 + 8
    store.trim()
    assert store.capacity.tolist() == [[min(max(sizes), 512 + GROWTH)]]
    assert store.view().positions[0, 0].tolist() == list(range(512))


def test_growth_stops_at_the_limit():
    store, _ = filled(tokens=3)
    limit = np.array([[5, 4], [4, 3]])
    store.reserve(limit, None)
    assert store.capacity.tolist() == [[5, 4], [4, 4]]  # the last row is over its limit; there must be a slot still


def test_storage_shrinks_with_what_is_kept():
    store, _ = filled(batch=1, kv_heads=1, tokens=100, dim=8)
    before = store.kv_bytes
    kept = torch.zeros(1, 1, 100, dtype=torch.bool)
    kept[..., :10] = True
    store.keep(kept, store.view(), limit=np.array([[11]]))
    assert (before, store.kv_bytes) == (100 * 16 * 4, 11 * 16 * 4)


def test_state_that_a_token_does_not_bring_is_zero_in_a_used_slot():
    store, _ = filled(batch=1, kv_heads=1, tokens=3)
    view = store.view()
    store.write_state("mass", torch.tensor([[[1.0, 2.0, 3.0]]]), view)
    store.vacate(torch.tensor([[1]]))
    insert(store, 5)
    assert store.view().state["mass"].tolist() == [[[1.0, 3.0, 0.0]]]


def test_state_that_a_turn_does_not_bring_is_zero_in_free_slots_too():
    """Writing a whole dense view also writes the slots behind short rows; tokens that come into them start at zero."""
    store, _ = filled(batch=2, kv_heads=1, tokens=4)
    kept = torch.tensor([[[True] * 4], [[True, True, False, False]]])
    store.keep(kept, store.view(), limit=np.array([[6], [6]]))
    view = store.view()
    store.write_state("mass", torch.full(view.positions.shape, 5.0), view)
    new = torch.zeros(2, 1, 2, 3)
    store.append(new, new, torch.tensor([[4, 5], [2, 3]]), {}, more_to_come=True)
    view = store.view()
    assert view.state["mass"][view.positions >= 0].tolist() == [5, 5, 5, 5, 0, 0, 5, 5, 0, 0]


def test_duplicated_sequences_go_separate_ways():
    store, _ = filled(batch=2, kv_heads=1, tokens=3)
    store.select_rows(torch.tensor([1, 1, 0]))
    store.vacate(torch.tensor([[0], [1], [2]]))
    insert(store, 8)
    assert store.view().positions[:, 0].tolist() == [[2, 1, 8], [0, 2, 8], [0, 1, 8]]


def test_a_row_of_pads_only_takes_no_slot():
    store = new_store(2, 1, 2, 2)
    keys = torch.ones(2, 1, 3, 2)
    store.append(keys, keys, torch.tensor([[-1, 0, 1], [-1, -1, -1]]), {})
    assert store.capacity.tolist() == [[2], [0]]
    assert store.view().positions.tolist() == [[[0, 1]], [[-1, -1]]]
    store.reserve(np.array([[2], [2]]), torch.tensor([False, True]))
    insert(store, 0, rows=torch.tensor([False, True]))
    assert store.view().positions.tolist() == [[[0, 1]], [[0, -1]]]
