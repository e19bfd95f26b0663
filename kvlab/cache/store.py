"""The slot store of one layer: keys, values, true positions and per-token state, for rows of different lengths.

A row is one KV head of one sequence. All rows lie end to end in flat tensors ("planes"), each with its own number of slots,
so a head that keeps less takes less (ragged heads), and where all rows have the same number of slots the dense view
(batch, kv_heads, slots, ...) costs nothing. A token is written into a free slot and a victim's slot is written over; the
order of slots means nothing. This module knows no policy, no budget rule and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlab.shapes import Kept, Keys, PerHead, Positions, Values

GROWTH = 16
"""Slots by which a row grows while its budget is not reached."""

Counts = np.ndarray  # (batch, kv_heads) int64, on the host: lengths never wait for the device
Rows = np.ndarray  # masks of rows on the host


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


class SlotStore:
    """Keys and values of one layer.

    planes    flat tensors (total_slots, ...): keys, values, positions (int32, -1 for an empty slot), and per-token state
    capacity, lengths  slots and tokens of each row, (batch, kv_heads)
    next_slot  flat index of the slot that each row writes next, (batch * kv_heads,); of no meaning for a full row
    holed      rows whose one free slot is a victim's, somewhere; the others fill their first slots
    """

    def __init__(self, planes: dict[str, Tensor], capacity: Counts, lengths: Counts, next_slot: Tensor, holed: Rows) -> None:
        self.planes = planes
        self.capacity = capacity
        self.lengths = lengths
        self.next_slot = next_slot
        self.holed = holed
        self._offsets = _row_starts(capacity)
        self._device_offsets: Tensor | None = None
        self._dense_index: Tensor | None = None

    @classmethod
    def empty(cls, keys: Keys, values: Values, state: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> SlotStore:
        """A store without slots, for tensors like these (their slots axis may be anything). state: name -> (dtype, shape)."""
        none = np.zeros(keys.shape[:2], dtype=np.int64)
        device = keys.device
        planes = {
            "keys": keys.new_zeros(0, keys.shape[-1]),
            "values": values.new_zeros(0, values.shape[-1]),
            "positions": torch.zeros(0, dtype=torch.int32, device=device),
        }
        planes |= {name: torch.zeros(0, *shape, dtype=kind, device=device) for name, (kind, shape) in state.items()}
        next_slot = torch.zeros(none.size, dtype=torch.long, device=device)
        return cls(planes, none, none.copy(), next_slot, np.zeros_like(none, dtype=bool))

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def keys(self) -> Tensor:
        """(total_slots, key_dim)."""
        return self.planes["keys"]

    @property
    def values(self) -> Tensor:
        """(total_slots, value_dim)."""
        return self.planes["values"]

    @property
    def positions(self) -> Tensor:
        """(total_slots,) int32, -1 for an empty slot."""
        return self.planes["positions"]

    @property
    def state(self) -> dict[str, Tensor]:
        """Per-token state by name, (total_slots, ...)."""
        return {name: plane for name, plane in self.planes.items() if name not in ("keys", "values", "positions")}

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same number of slots."""
        return bool((self.capacity == self.capacity.flat[0]).all())

    @property
    def kv_bytes(self) -> int:
        """Bytes of key and value storage held, free slots included."""
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    @property
    def row_bytes(self) -> np.ndarray:
        """The part of `kv_bytes` that each sequence takes, (batch,)."""
        slot = sum(plane.shape[-1] * plane.itemsize for plane in (self.keys, self.values))
        return self.capacity.sum(1) * slot

    @property
    def indices(self) -> list[Tensor]:
        """Slot indices that are kept on the device."""
        return [tensor for tensor in (self.next_slot, self._device_offsets, self._dense_index) if tensor is not None]

    @property
    def state_bytes(self) -> int:
        """Bytes of bookkeeping held on the device: positions, per-token state, slot indices."""
        held = [self.positions, *self.state.values(), *self.indices]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    def view(self) -> View:
        """Dense view. Where rows are ragged it is a copy, in which short rows end in empty slots."""
        if self.uniform:
            width = int(self.capacity.flat[0] if self.holed.any() else self.lengths.max())
            dense = {name: self._dense(plane)[:, :, :width] for name, plane in self.planes.items()}
            index = None
        else:
            index, absent = self._gather_index()
            width = index.shape[-1]
            dense = {name: plane[index] for name, plane in self.planes.items()}
            dense["positions"] = dense["positions"].masked_fill(absent, -1)
        keys, values, positions = (dense.pop(name) for name in ("keys", "values", "positions"))
        return View(keys, values, positions, dense, bool((self.lengths == width).all()), index)

    def write_state(self, name: str, dense: Tensor, view: View) -> None:
        """Set the per-token state, in `view` too, from its dense form (batch, kv_heads, slots, ...)."""
        if view.index is None:
            view.state[name].copy_(dense)
        else:
            held = view.positions >= 0
            view.state[name] = dense.to(self.planes[name].dtype)
            self.planes[name][view.index[held]] = view.state[name][held]

    def _dense(self, plane: Tensor) -> Tensor:
        """A plane of uniform rows as (batch, kv_heads, capacity, ...)."""
        return plane.view(*self.lengths.shape, int(self.capacity.flat[0]), *plane.shape[1:])

    def _gather_index(self) -> tuple[Tensor, Tensor]:
        """Flat index of each dense slot, and which dense slots lie beyond their row's end."""
        if self._dense_index is None:
            slots = np.arange(self.capacity.max())
            index = np.where(slots < self.capacity[..., None], self._offsets[..., None] + slots, -1)
            self._dense_index = torch.from_numpy(index).to(self.keys.device)
        return self._dense_index.clamp(min=0), self._dense_index < 0

    # ------------------------------------------------------------------------------------------------ writing

    def append(
        self, keys: Keys, values: Values, positions: Tensor, state: Mapping[str, Tensor], *, more_to_come: bool = False
    ) -> None:
        """Add a turn's tokens. No free slot remains, unless `more_to_come` asks for room to grow by chunks.

        positions (batch, tokens), -1 for a pad, which takes no slot; state (batch, kv_heads or 1, tokens, ...) by name,
        0 for what is left out.
        """
        arrived = (positions >= 0).sum(-1).cpu().numpy()[:, None]  # (batch, 1)
        lengths = self.lengths + arrived
        fits = (lengths <= self.capacity).all() if more_to_come else (lengths == self.capacity).all()
        if self.holed.any() or not fits:
            self._resize(np.maximum(lengths, self.capacity * 3 // 2) if more_to_come else lengths)
        incoming = self._spread(keys, values, positions, state)
        start, tokens = int(self.lengths.flat[0]), positions.shape[1]
        if self.uniform and (self.lengths == start).all() and (arrived == tokens).all():
            for name, plane in self.planes.items():
                self._dense(plane)[:, :, start : start + tokens] = incoming.get(name, 0)
        else:
            valid = (positions >= 0)[:, None].expand(-1, lengths.shape[1], -1)
            target = self._slots(self._offsets + self.lengths, np.broadcast_to(arrived, lengths.shape))
            for name, plane in self.planes.items():
                plane[target] = incoming[name][valid] if name in incoming else 0
        self.lengths = lengths
        self._point_behind(~self.holed)

    def insert(
        self, keys: Keys, values: Values, positions: Tensor, state: Mapping[str, Tensor], rows: Rows | None = None
    ) -> None:
        """Write one token into each row's free slot (rows: (batch,) mask, None = all). Call `reserve` first.

        keys and values (batch, kv_heads, 1, dim), positions (batch, 1), state (batch, kv_heads or 1, 1, ...) by name.
        """
        slots, pick = self.next_slot, None
        if rows is not None:
            written = np.broadcast_to(np.asarray(rows)[:, None], self.lengths.shape)
            pick = torch.from_numpy(written.ravel().nonzero()[0]).to(slots.device)
            slots = slots[pick]
        else:
            written = np.ones_like(self.holed)
        incoming = self._spread(keys, values, positions, state)
        for name, plane in self.planes.items():
            if name in incoming:
                new = incoming[name].flatten(0, 2)
                plane[slots] = new if pick is None else new[pick]
            else:
                plane[slots] = 0
        self.lengths = self.lengths + written
        self.holed = self.holed & ~written
        if (self.lengths < self.capacity).any():
            self._point_behind(written.copy())

    def reserve(self, limit: Counts | None, rows: Rows | None = None) -> None:
        """Make sure that each row has a free slot; a row grows by GROWTH slots, never beyond `limit` slots."""
        lacking = self.lengths == self.capacity
        if rows is not None:
            lacking &= np.asarray(rows)[:, None]
        if not lacking.any():
            return
        grown = self.capacity + GROWTH
        if limit is not None:
            grown = np.minimum(grown, np.maximum(limit, self.lengths + 1))
        self._resize(np.where(lacking, grown, self.capacity))

    def trim(self) -> None:
        """Free what rows hold beyond GROWTH free slots."""
        if (self.capacity > self.lengths + GROWTH).any():
            self._resize(np.minimum(self.capacity, self.lengths + GROWTH))

    def vacate(self, slots: PerHead, rows: Rows | None = None) -> None:
        """Drop one token a row: its slot in the dense view becomes the next one written. rows: (batch, kv_heads) mask."""
        flat = (self._offsets_on_device() + slots).flatten()
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
            index = self._offsets_on_device()[..., None] + torch.arange(view.positions.shape[-1], device=kept.device)
        self._rebuild(capacity, lengths, index[kept])

    def select_rows(self, sequences: Tensor) -> None:
        """Rebuild the store from these sequences of the batch (beam search, expansion): (new_batch,) indices."""
        chosen = sequences.cpu().numpy()
        capacity, holed = self.capacity[chosen], self.holed[chosen]
        source = self._slots(self._offsets[chosen], capacity)
        rows = torch.from_numpy(np.arange(self.lengths.size).reshape(self.lengths.shape)[chosen].ravel())
        shift = torch.from_numpy((_row_starts(capacity) - self._offsets[chosen]).ravel())
        next_slot = self.next_slot[rows.to(self.keys.device)] + shift.to(self.keys.device)
        planes = {name: plane[source] for name, plane in self.planes.items()}
        self._take(planes, capacity, self.lengths[chosen], next_slot, holed)

    def copy(self) -> SlotStore:
        """An independent copy of everything held."""
        planes = {name: plane.clone() for name, plane in self.planes.items()}
        return SlotStore(planes, self.capacity.copy(), self.lengths.copy(), self.next_slot.clone(), self.holed.copy())

    # ------------------------------------------------------------------------------------------------ moving

    def _spread(self, keys: Keys, values: Values, positions: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New tokens plane by plane, in each plane's type: (batch, kv_heads, tokens, ...)."""
        incoming = {"keys": keys, "values": values, "positions": positions[:, None], **state}
        shape = (*self.lengths.shape, positions.shape[1])
        planes = self.planes
        return {name: new.to(planes[name].dtype).expand(*shape, *planes[name].shape[1:]) for name, new in incoming.items()}

    def _resize(self, capacity: Counts) -> None:
        """Same tokens, other numbers of slots; they move to the front of their rows."""
        self._rebuild(capacity, self.lengths, (self.positions >= 0).nonzero()[:, 0])

    def _rebuild(self, capacity: Counts, lengths: Counts, source: Tensor) -> None:
        """New planes that hold the tokens at these flat indices (row by row), so that the old ones are released."""
        target = self._slots(_row_starts(capacity), lengths)
        total = int(capacity.sum())
        planes = {}
        for name in list(self.planes):
            plane = self.planes.pop(name)  # one plane at a time is there twice
            planes[name] = plane.new_full((total, *plane.shape[1:]), -1 if name == "positions" else 0)
            planes[name][target] = plane[source]
        self._take(planes, capacity, lengths, self.next_slot, np.zeros_like(self.holed))

    def _take(self, planes: dict[str, Tensor], capacity: Counts, lengths: Counts, next_slot: Tensor, holed: Rows) -> None:
        SlotStore.__init__(self, planes, capacity, lengths, next_slot, holed)
        self._point_behind(~holed)

    def _slots(self, starts: Counts, counts: Counts) -> Tensor:
        """Flat indices of `counts` slots from `starts` on, row by row."""
        starts, counts = starts.ravel(), counts.ravel()
        before = counts.cumsum() - counts
        flat = np.arange(counts.sum()) + np.repeat(starts - before, counts)
        return torch.from_numpy(flat).to(self.keys.device)

    def _point_behind(self, rows: Rows) -> None:
        """Let these rows, (batch, kv_heads) mask, write next behind their last token."""
        behind = self._offsets + np.minimum(self.lengths, np.maximum(self.capacity - 1, 0))
        new = torch.from_numpy(behind.ravel()).to(self.keys.device)
        if not rows.all():
            new = torch.where(torch.from_numpy(rows.ravel()).to(new.device), new, self.next_slot)
        self.next_slot = new

    def _offsets_on_device(self) -> Tensor:
        if self._device_offsets is None:
            self._device_offsets = torch.from_numpy(self._offsets).to(self.keys.device)
        return self._device_offsets


def _row_starts(capacity: Counts) -> Counts:
    """Flat offset of each row."""
    ends = capacity.cumsum().reshape(capacity.shape)
    return ends - capacity
