"""The slot store of one layer: keys, values, true positions and per-token state, for rows of different lengths.

A row is one KV head of one sequence. All rows lie end to end in flat tensors, each with its own number of slots, so a head
that keeps less takes less (ragged heads), and where all rows have the same number of slots the dense view
(batch, kv_heads, slots, ...) costs nothing. A token is written into a free slot and a victim's slot is written over; the
order of slots means nothing. This module knows no policy, no budget rule and no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvlab.shapes import Kept, Keys, PerHead, Positions, Values

GROWTH = 16
"""Slots by which a row grows while its budget is not reached."""

Counts = np.ndarray  # (batch, kv_heads) int64, on the host: lengths never wait for the device


@dataclass(frozen=True)
class View:
    """Dense view of a store: (batch, kv_heads, slots, ...). `index` is set where rows are ragged and this is a copy."""

    keys: Keys
    values: Values
    positions: Positions
    state: dict[str, Tensor]
    full: bool
    """Whether every slot holds a token."""
    index: Tensor | None = None


@dataclass
class SlotStore:
    """Keys and values of one layer. Build with `SlotStore.empty`.

    keys (total_slots, key_dim), values (total_slots, value_dim), positions (total_slots,) int32 with -1 for an empty slot;
    state: named per-token tensors (total_slots,), gathered along with the tokens.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    state: dict[str, Tensor]
    capacity: Counts
    lengths: Counts
    next_slot: Tensor
    """Flat index of the slot that each row writes next, (batch * kv_heads,); meaningless for a row without a free slot."""
    holed: np.ndarray
    """(batch, kv_heads) bool: rows whose one free slot is a victim's, somewhere; the others fill their first slots."""
    _offsets: Counts = field(init=False)
    _dense_index: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._offsets = _row_starts(self.capacity)

    @classmethod
    def empty(cls, keys: Keys, values: Values, state: dict[str, torch.dtype]) -> SlotStore:
        """A store without slots, for tensors like these (their slots axis may be anything)."""
        batch, kv_heads = keys.shape[:2]
        none = np.zeros((batch, kv_heads), dtype=np.int64)
        return cls(
            keys=keys.new_zeros(0, keys.shape[-1]),
            values=values.new_zeros(0, values.shape[-1]),
            positions=torch.zeros(0, dtype=torch.int32, device=keys.device),
            state={name: torch.zeros(0, dtype=kind, device=keys.device) for name, kind in state.items()},
            capacity=none,
            lengths=none.copy(),
            next_slot=torch.zeros(none.size, dtype=torch.long, device=keys.device),
            holed=np.zeros_like(none, dtype=bool),
        )

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same number of slots."""
        return bool((self.capacity == self.capacity.flat[0]).all())

    @property
    def kv_bytes(self) -> int:
        """Bytes of key and value storage held, free slots included."""
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    @property
    def state_bytes(self) -> int:
        """Bytes of bookkeeping held on the device: positions, per-token state, next slots."""
        held = [self.positions, self.next_slot, *self.state.values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    def view(self) -> View:
        """Dense view. Where rows are ragged it is a copy, in which short rows end in empty slots."""
        batch, kv_heads = self.lengths.shape
        if self.uniform:
            width = int(self.capacity.flat[0] if self.holed.any() else self.lengths.max())

            def dense(flat: Tensor) -> Tensor:
                return flat.view(batch, kv_heads, int(self.capacity.flat[0]), *flat.shape[1:])[:, :, :width]

            positions, index = dense(self.positions), None
        else:
            index, absent = self._gather_index()
            width = index.shape[-1]

            def dense(flat: Tensor) -> Tensor:
                return flat[index]

            positions = dense(self.positions).masked_fill(absent, -1)
        return View(
            keys=dense(self.keys),
            values=dense(self.values),
            positions=positions,
            state={name: dense(tensor) for name, tensor in self.state.items()},
            full=bool((self.lengths == width).all()),
            index=index,
        )

    def write_state(self, name: str, dense: Tensor, view: View) -> None:
        """Set the per-token state from its dense form, (batch, kv_heads, slots) as in `view`."""
        if view.index is None:
            view.state[name].copy_(dense)
        else:
            held = view.positions >= 0
            self.state[name][view.index[held]] = dense[held].to(self.state[name].dtype)

    def _gather_index(self) -> tuple[Tensor, Tensor]:
        """Flat index of each dense slot, and which dense slots lie beyond their row's end."""
        if self._dense_index is None:
            slots = np.arange(self.capacity.max())
            index = self._offsets[..., None] + np.minimum(slots, np.maximum(self.capacity[..., None] - 1, 0))
            index = np.where(slots < self.capacity[..., None], index, -1)
            self._dense_index = torch.from_numpy(index).to(self.keys.device)
        return self._dense_index.clamp(min=0), self._dense_index < 0

    # ------------------------------------------------------------------------------------------------ writing

    def append(self, keys: Keys, values: Values, positions: Tensor, state: dict[str, Tensor]) -> None:
        """Add a turn's tokens, exactly: no free slot remains. positions (batch, tokens), -1 for a pad, which takes no slot."""
        arrived = (positions >= 0).sum(-1).cpu().numpy()[:, None]  # (batch, 1)
        lengths = self.lengths + arrived
        if not self.lengths.any() and bool((arrived == positions.shape[1]).all()):
            self._adopt(keys, values, positions, state)
            return
        source = (self.positions >= 0).nonzero()[:, 0]
        target = self._targets(self.lengths, _row_starts(lengths))
        new = self._reallocated(lengths, source, target, lengths)
        kv_heads = lengths.shape[1]
        valid = (positions >= 0)[:, None].expand(-1, kv_heads, -1)
        arrived_per_row = np.broadcast_to(arrived, lengths.shape)
        target = self._targets(arrived_per_row, _row_starts(lengths) + self.lengths)
        new.keys[target], new.values[target] = keys[valid], values[valid].to(new.values.dtype)
        new.positions[target] = positions[:, None].expand(-1, kv_heads, -1)[valid].int()
        for name, dense in state.items():
            new.state[name][target] = dense[:, None].expand(-1, kv_heads, -1)[valid].to(new.state[name].dtype)
        self._become(new)

    def insert(self, keys: Keys, values: Values, positions: Tensor, state: dict[str, Tensor], rows: Tensor | None) -> None:
        """Write one token into each row's free slot (rows: (batch,) mask, None = all). Call `reserve` first.

        keys and values (batch, kv_heads, 1, dim), positions (batch, 1).
        """
        kv_heads = self.lengths.shape[1]
        slots = self.next_slot
        pick: slice | Tensor = slice(None)
        if rows is not None:
            pick = rows[:, None].expand(-1, kv_heads).flatten().nonzero()[:, 0]
            slots = slots[pick]
        self.keys[slots] = keys.flatten(0, 2)[pick]
        self.values[slots] = values.flatten(0, 2)[pick]
        self.positions[slots] = positions.int().expand(-1, kv_heads).flatten()[pick]
        for name, tensor in self.state.items():
            tensor[slots] = state[name].expand(-1, kv_heads).flatten()[pick].to(tensor.dtype) if name in state else 0
        written = np.ones((len(self.lengths), 1), dtype=bool) if rows is None else rows.cpu().numpy()[:, None]
        self.lengths = self.lengths + written
        self.holed = self.holed & ~written
        if (self.lengths < self.capacity).any():
            self._point_behind(np.broadcast_to(written, self.lengths.shape))

    def reserve(self, limit: Counts | None, rows: Tensor | None) -> None:
        """Make sure that each row has a free slot; a row grows by GROWTH slots, never beyond `limit` slots."""
        lacking = self.lengths == self.capacity
        if rows is not None:
            lacking &= rows.cpu().numpy()[:, None]
        if not lacking.any():
            return
        capacity = np.where(lacking, self.capacity + GROWTH, self.capacity)
        if limit is not None:
            capacity = np.where(lacking, np.minimum(capacity, np.maximum(limit, self.lengths + 1)), self.capacity)
        source = (self.positions >= 0).nonzero()[:, 0]
        self._become(self._reallocated(capacity, source, self._targets(self.lengths, _row_starts(capacity))))

    def vacate(self, slots: PerHead, rows: Counts | None = None) -> None:
        """Drop one token a row: its slot in the dense view becomes the next one written. rows: mask, None = all."""
        offsets = torch.from_numpy(self._offsets).to(slots.device)
        flat = (offsets + slots).flatten()
        if rows is None:
            rows = np.ones_like(self.holed)
            self.positions[flat] = -1
            self.next_slot = flat
        else:
            mask = torch.from_numpy(rows).to(slots.device).flatten()
            self.positions[flat[mask]] = -1
            self.next_slot = torch.where(mask, flat, self.next_slot)
        assert (self.lengths == self.capacity)[rows].all(), "a row may have one hole only: drop more with keep"
        self.lengths = self.lengths - rows
        self.holed = self.holed | rows

    def keep(self, kept: Kept, view: View, limit: Counts | None) -> None:
        """Drop all but `kept` (as in `view`) and free their memory. Rows get GROWTH free slots, at most `limit` in all."""
        lengths = kept.sum(-1).cpu().numpy()
        capacity = lengths + GROWTH if limit is None else np.minimum(lengths + GROWTH, np.maximum(limit, lengths))
        index = view.index
        if index is None:
            slots = torch.arange(view.positions.shape[-1], device=kept.device)
            index = torch.from_numpy(self._offsets).to(kept.device)[..., None] + slots
        source = index[kept]  # row by row
        self._become(self._reallocated(capacity, source, self._targets(lengths, _row_starts(capacity)), lengths))

    def select_rows(self, sequences: Tensor) -> None:
        """Rebuild the store from these sequences of the batch (beam search, expansion): (new_batch,) indices."""
        chosen = sequences.cpu().numpy()
        capacity = self.capacity[chosen]
        source = _ranges(self._offsets[chosen], capacity)
        target = torch.arange(len(source), device=self.keys.device)
        new = self._reallocated(capacity, torch.from_numpy(source).to(self.keys.device), target, self.lengths[chosen])
        rows = torch.from_numpy(np.arange(self.lengths.size).reshape(self.lengths.shape)[chosen].ravel())
        shift = torch.from_numpy((_row_starts(capacity) - self._offsets[chosen]).ravel()).to(self.keys.device)
        new.next_slot = self.next_slot[rows.to(self.keys.device)] + shift
        new.holed = self.holed[chosen]
        self._become(new)

    def copy(self) -> SlotStore:
        """An independent copy of everything held."""
        return SlotStore(
            self.keys.clone(),
            self.values.clone(),
            self.positions.clone(),
            {name: tensor.clone() for name, tensor in self.state.items()},
            self.capacity.copy(),
            self.lengths.copy(),
            self.next_slot.clone(),
            self.holed.copy(),
        )

    # ------------------------------------------------------------------------------------------------ moving

    def _adopt(self, keys: Keys, values: Values, positions: Tensor, state: dict[str, Tensor]) -> None:
        """First tokens of an empty store, no pads: one straight copy."""
        batch, kv_heads, tokens = keys.shape[:3]
        self.keys = keys.to(self.keys.dtype).reshape(-1, keys.shape[-1]).clone()
        self.values = values.reshape(-1, values.shape[-1]).clone()
        rows = positions.int()[:, None].expand(-1, kv_heads, -1)
        self.positions = rows.reshape(-1).clone()
        for name, tensor in self.state.items():
            if name in state:
                self.state[name] = state[name][:, None].expand_as(rows).reshape(-1).to(tensor.dtype).clone()
            else:
                self.state[name] = tensor.new_zeros(len(self.positions))
        self.capacity = np.full((batch, kv_heads), tokens, dtype=np.int64)
        self.lengths = self.capacity.copy()
        self.holed = np.zeros_like(self.lengths, dtype=bool)
        self._offsets = _row_starts(self.capacity)
        self._dense_index = None

    def _targets(self, counts: Counts, starts: Counts) -> Tensor:
        """Flat indices of the first `counts` slots from `starts` on, row by row."""
        return torch.from_numpy(_ranges(starts, counts)).to(self.keys.device)

    def _reallocated(self, capacity: Counts, source: Tensor, target: Tensor, lengths: Counts | None = None) -> SlotStore:
        """A new store with this capacity into which the tokens at `source` moved to `target`; the rest is empty."""
        total = int(capacity.sum())

        def moved(flat: Tensor, empty: int = 0) -> Tensor:
            new = flat.new_full((total, *flat.shape[1:]), empty)
            new[target] = flat[source]
            return new

        return SlotStore(
            keys=moved(self.keys),
            values=moved(self.values),
            positions=moved(self.positions, -1),
            state={name: moved(tensor) for name, tensor in self.state.items()},
            capacity=capacity,
            lengths=self.lengths if lengths is None else lengths,
            next_slot=self.next_slot,
            holed=np.zeros(capacity.shape, dtype=bool),
        )

    def _become(self, new: SlotStore) -> None:
        """Take over another store's tensors, so that the old ones are released."""
        for name in ("keys", "values", "positions", "state", "capacity", "lengths", "next_slot", "holed", "_offsets"):
            setattr(self, name, getattr(new, name))
        self._dense_index = None
        self._point_behind(~self.holed)

    def _point_behind(self, rows: np.ndarray) -> None:
        """Let these rows, (batch, kv_heads) mask, write next behind their last token."""
        behind = self._offsets + np.minimum(self.lengths, np.maximum(self.capacity - 1, 0))
        new = torch.from_numpy(behind.ravel()).to(self.keys.device)
        self.next_slot = torch.where(torch.from_numpy(rows.ravel()).to(new.device), new, self.next_slot)


def _row_starts(capacity: Counts) -> Counts:
    """Flat offset of each row."""
    ends = capacity.cumsum().reshape(capacity.shape)
    return ends - capacity


def _ranges(starts: Counts, counts: Counts) -> np.ndarray:
    """Concatenation of arange(start, start + count) over all rows."""
    starts, counts = starts.ravel(), counts.ravel()
    before = counts.cumsum() - counts
    return np.arange(counts.sum()) + np.repeat(starts - before, counts)
