"""Rows of different lengths, end to end in flat tensors. Knows nothing of what stands in them.

A row is one KV head of one sequence (or one sequence), with its own number of slots in each of several tensors ("planes"), so a
head that keeps less takes less (ragged heads); where all rows have the same number of slots the dense view (batch, kv_heads,
slots, ...) costs nothing. What a row holds fills its first slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np
import torch
from torch import Tensor

from kvlab.shapes import PerHead

GROWTH = 16
"""Slots, at least, by which a row grows while its budget is not reached; long rows by a 32nd, as all that is held moves."""

Counts = np.ndarray  # (batch, kv_heads) int64, on the host: lengths never wait for the device
Rows = np.ndarray  # masks of rows on the host
FILL = {"positions": -1}
"""What an empty slot of a plane holds, where that is not 0."""


class RowPlanes:
    """Planes (total_slots, ...) by name. capacity, lengths: slots of each row and those in use, (batch, kv_heads).

    growth  slots, at least, by which rows grow: fewer where a slot holds several tokens
    """

    growth = GROWTH

    def __init__(self, planes: dict[str, Tensor], capacity: Counts, lengths: Counts) -> None:
        self._begin(planes, capacity, lengths)

    def _begin(self, planes: dict[str, Tensor], capacity: Counts, lengths: Counts) -> None:
        self.planes = planes
        self.capacity = capacity
        self._lengths = lengths
        self._offsets = _row_starts(capacity)
        self._uniform: bool | None = None
        self._device_lengths: Tensor | None = None
        self._device_offsets: Tensor | None = None
        self._dense_index: Tensor | None = None

    @classmethod
    def none(
        cls, rows: tuple[int, ...], kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> Self:
        """Rows without slots. kinds: name -> (dtype, shape of one slot)."""
        nothing = np.zeros(rows, dtype=np.int64)
        planes = {name: torch.zeros(0, *shape, dtype=kind, device=device) for name, (kind, shape) in kinds.items()}
        return cls(planes, nothing, nothing.copy())

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def lengths(self) -> Counts:
        """Slots in use of each row, (batch, kv_heads)."""
        return self._lengths

    @property
    def device(self) -> torch.device:
        """Where the planes are."""
        return next(iter(self.planes.values())).device

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same number of slots."""
        if self._uniform is None:
            self._uniform = alike(self.capacity)
        return self._uniform

    def bytes_of(self, name: str) -> int:
        """Bytes of a plane's storage, free slots included."""
        return self.planes[name].untyped_storage().nbytes()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all planes."""
        return sum(plane[:1].numel() // max(1, len(plane[:1])) * plane.itemsize for plane in self.planes.values())

    @property
    def indices(self) -> list[Tensor]:
        """Slot indices and lengths that are kept on the device."""
        kept = (self._device_lengths, self._device_offsets, self._dense_index)
        return [tensor for tensor in kept if tensor is not None]

    def dense(self, name: str) -> Tensor:
        """A plane as (batch, kv_heads, longest row, ...); a copy where rows are ragged, in which short rows end in anything."""
        if self.uniform:
            return self._dense(self.planes[name])[:, :, : int(self.lengths.max(initial=0))]
        return self.planes[name][self._gather_index()[0][..., : int(self.lengths.max(initial=0))]]

    def _dense(self, plane: Tensor) -> Tensor:
        """A plane of uniform rows as (batch, kv_heads, capacity, ...)."""
        return plane.view(*self.lengths.shape, int(self.capacity.flat[0]), *plane.shape[1:])

    def _gather_index(self) -> tuple[Tensor, Tensor]:
        """Flat index of each dense slot, and which dense slots lie beyond their row's end."""
        if self._dense_index is None:
            slots = np.arange(self.capacity.max())
            index = np.where(slots < self.capacity[..., None], self._offsets[..., None] + slots, -1)
            self._dense_index = torch.from_numpy(index).to(self.device)
        return self._dense_index.clamp(min=0), self._dense_index < 0

    def flat(self, starts: Counts | int = 0, counts: Counts | None = None) -> Tensor:
        """Indices into the planes, row by row: of `counts` slots of each row from `starts` on, of all in use if not given."""
        return self._slots(self._offsets + starts, self.lengths if counts is None else counts)

    def dense_of(self, flat: Tensor, fill: float = 0) -> Tensor:
        """What stands row by row for the slots in use, (lengths.sum(), ...), as (batch, kv_heads, longest row, ...)."""
        longest = int(self.lengths.max(initial=0))
        dense = flat.new_full((self.lengths.size * longest, *flat.shape[1:]), fill)
        dense[self._slots(np.arange(self.lengths.size) * longest, self.lengths)] = flat
        return dense.view(*self.lengths.shape, longest, *flat.shape[1:])

    # ------------------------------------------------------------------------------------------------ writing

    def add(
        self, incoming: Mapping[str, Tensor], valid: Tensor, *, arrived: Counts | None = None, more_to_come: bool = False
    ) -> None:
        """Add columns to all rows. No free slot remains, unless `more_to_come` asks for room to grow by chunks.

        incoming (batch, kv_heads or 1, columns, ...) by plane, 0 for what is left out; valid (batch, columns): the rest takes
        no slot; arrived (batch, 1): how many are valid, where the caller knows.
        """
        if arrived is None:
            arrived = valid.sum(-1).cpu().numpy()[:, None]
        lengths = self.lengths + arrived
        fits = (lengths <= self.capacity).all() if more_to_come else (lengths == self.capacity).all()
        if not fits:
            self._resize(np.maximum(lengths, self.capacity * 3 // 2) if more_to_come else lengths)
        columns = valid.shape[1]
        new = self._spread(incoming, columns)
        start = int(self.lengths.flat[0])
        if self.uniform and (self.lengths == start).all() and (arrived == columns).all():
            for name, plane in self.planes.items():
                self._dense(plane)[:, :, start : start + columns] = new.get(name, 0)
        else:
            mask = valid[:, None].expand(-1, lengths.shape[1], -1)
            target = self._slots(self._offsets + self.lengths, np.broadcast_to(arrived, lengths.shape))
            for name, plane in self.planes.items():
                plane[target] = new[name][mask] if name in new else 0
        self._set_lengths(lengths)

    def add_one(self, incoming: Mapping[str, Tensor], rows: Rows | None = None) -> None:
        """Write one slot of each row (rows: (batch,) mask, None = all). Call `reserve` first.

        incoming (batch, kv_heads or 1, 1, ...) by plane, 0 for what is left out
        """
        slots, pick = self.row_offsets + self.row_lengths, None
        written = np.ones_like(self.lengths)
        if rows is not None:
            written *= np.asarray(rows)[:, None]
            pick = torch.from_numpy(written.ravel().nonzero()[0]).to(slots.device)
            slots = slots[pick]
        spread = self._spread(incoming, 1)
        for name, plane in self.planes.items():
            if name in spread:
                new = spread[name].flatten(0, 2)
                plane[slots] = new if pick is None else new[pick]
            else:
                plane[slots] = 0
        self._set_lengths(self.lengths + written, 1 if pick is None else torch.from_numpy(written.ravel()))

    def extend(self, incoming: Mapping[str, Tensor], counts: Counts, limit: Counts | None = None) -> None:
        """Add `counts` slots to the rows, (batch, kv_heads), from flat tensors (counts.sum(), ...) row by row.

        Rows that lack room get what they need where they were empty and a little more where they weren't, at most `limit`.
        """
        lengths = self.lengths + counts
        if (lengths > self.capacity).any():
            grown = np.where(self.lengths > 0, np.maximum(lengths, self.capacity + self._growth(self.capacity)), lengths)
            grown = grown if limit is None else np.minimum(grown, np.maximum(limit, lengths))
            self._resize(np.where(lengths > self.capacity, grown, self.capacity))
        if self.uniform and alike(self.lengths, counts):
            start, count = int(self.lengths.flat[0]), int(counts.flat[0])
            for name, plane in self.planes.items():
                new = incoming[name].view(*counts.shape, count, *plane.shape[1:])
                self._dense(plane)[:, :, start : start + count] = new
            self._set_lengths(lengths, count)
            return
        target = self._slots(self._offsets + self.lengths, counts)
        for name, plane in self.planes.items():
            plane[target] = incoming[name].to(plane.dtype)
        self._set_lengths(lengths)

    def refill(self, incoming: Mapping[str, Tensor], lengths: Counts) -> None:
        """New content for all slots: flat tensors (lengths.sum(), ...) by plane, row by row.

        Rows keep the slots that they have where those are enough and not many more than that.
        """
        roomy = lengths + self._growth(lengths)
        fits = (self.capacity >= lengths).all() and (self.capacity <= roomy + self._growth(roomy)).all()
        capacity = self.capacity if fits else np.where(lengths > 0, roomy, 0)
        if not fits:
            total = int(capacity.sum())
            planes = {name: plane.new_full((total, *plane.shape[1:]), FILL.get(name, 0)) for name, plane in self.planes.items()}
            self._begin(planes, capacity, self.lengths)
        self._set_lengths(lengths)
        target = self.flat()
        for name, plane in self.planes.items():
            plane[target] = incoming[name].to(plane.dtype)

    def take_front(self, counts: Counts, *, more_to_come: bool) -> dict[str, Tensor]:
        """Remove the first `counts` slots of each row, and return what stood there, (counts.sum(), ...) row by row.

        No free slot remains, unless `more_to_come` asks for some.
        """
        if self.uniform and alike(counts):
            front = int(counts.flat[0])
            taken = {name: self._dense(plane)[:, :, :front].flatten(0, 2) for name, plane in self.planes.items()}
        else:
            source = self._slots(self._offsets, counts)
            taken = {name: plane[source] for name, plane in self.planes.items()}
        left = self.lengths - counts
        if not left.any():
            nothing = {name: plane.new_empty(0, *plane.shape[1:]) for name, plane in self.planes.items()}
            self._begin(nothing, left, left.copy())
            return taken
        roomy = np.where(left > 0, left + self._growth(left), 0) if more_to_come else left
        capacity = np.minimum(self.capacity, roomy)
        self._move(capacity, left, counts)
        return taken

    def reserve(self, limit: Counts | None, rows: Rows | None = None, tokens: Counts | int = 1, *, beyond: bool = True) -> None:
        """Make sure that each row has slots for `tokens` more, (batch, 1) or one number for all, but not beyond `limit`.

        A row that lacks some grows by more than it needs, never beyond `limit` slots; but if `beyond`, it can always take one.
        """
        wanted = self.lengths + tokens
        if not (wanted > self.capacity).any():
            return
        if limit is not None:
            limit = np.maximum(limit, self.lengths + beyond)
            wanted = np.minimum(wanted, limit)
        lacking = wanted > self.capacity
        if rows is not None:
            lacking &= np.asarray(rows)[:, None]
        if not lacking.any():
            return
        grown = np.maximum(wanted, self.capacity + self._growth(self.capacity))
        if limit is not None:
            grown = np.minimum(grown, limit)
        self._resize(np.where(lacking, grown, self.capacity))

    def trim(self, limit: Counts | None = None) -> None:
        """Free what rows hold beyond the slots that they grow by, and beyond `limit`."""
        roomy = self._roomy(self.lengths, limit)
        if (self.capacity > roomy).any():
            self._resize(np.minimum(self.capacity, roomy))

    def vacate(self, slots: PerHead, rows: Rows | None = None) -> None:
        """Drop one token a row, by its slot in the dense view; the row's last token takes its place.

        rows: (batch, kv_heads) mask, None = all
        """
        offsets = self.row_offsets
        gap, end = offsets + slots.flatten(), offsets + self.row_lengths - 1
        less: Tensor | int = 1
        if rows is not None:
            less = torch.from_numpy(rows.ravel()).to(gap.device)
            gap, end, less = gap[less], end[less], less.long()
        for plane in self.planes.values():
            plane[gap] = plane[end]
        for name, empty in FILL.items():
            if name in self.planes:
                self.planes[name][end] = empty
        self._set_lengths(self.lengths - (1 if rows is None else rows), -less)

    def keep_slots(self, kept: Tensor, limit: Counts | None, index: Tensor | None = None) -> None:
        """Drop all slots but `kept`, (batch, kv_heads, longest row) bool, and free their memory; the order stays.

        Rows get some free slots, at most `limit` in all. index: flat index of each dense slot, if there is one already.
        """
        lengths = kept.sum(-1).cpu().numpy()
        if index is None:
            starts = self.row_offsets.view(lengths.shape)[..., None]
            index = starts + torch.arange(kept.shape[-1], device=kept.device)
        self._rebuild(self._roomy(lengths, limit), lengths, index[kept])

    def settle(self, limit: Counts | None) -> None:
        """Free the memory of what a kernel has dropped, as `keep_slots` does."""
        self._resize(self._roomy(self.lengths, limit))

    def select_rows(self, sequences: Tensor) -> None:
        """Rebuild the store from these sequences of the batch: (new_batch,) indices."""
        chosen = sequences.cpu().numpy()
        capacity = self.capacity[chosen]
        source = self._slots(self._offsets[chosen], capacity)
        planes = {name: plane[source] for name, plane in self.planes.items()}
        self._begin(planes, capacity, self.lengths[chosen])

    def copy(self) -> Self:
        """An independent copy of everything held."""
        planes = {name: plane.clone() for name, plane in self.planes.items()}
        other = type(self)(planes, self.capacity.copy(), self.lengths.copy())
        other.growth = self.growth
        return other

    # ------------------------------------------------------------------------------------------------ moving

    def _spread(self, incoming: Mapping[str, Tensor], columns: int) -> dict[str, Tensor]:
        """New columns plane by plane, in each plane's type: (batch, kv_heads, columns, ...)."""
        shape, planes = (*self.lengths.shape, columns), self.planes
        return {name: new.to(planes[name].dtype).expand(*shape, *planes[name].shape[1:]) for name, new in incoming.items()}

    def _resize(self, capacity: Counts) -> None:
        """Same tokens, other numbers of slots; they move to the front of their rows."""
        self._move(capacity, self.lengths, np.zeros_like(self.lengths))

    def _move(self, capacity: Counts, lengths: Counts, first: Counts) -> None:
        """Rows of `capacity` slots that hold `lengths` of their tokens, from the slots `first` on."""
        if self.uniform and alike(capacity, lengths, first):
            start, count = int(first.flat[0]), int(lengths.flat[0])
            self._rebuild(capacity, lengths, slice(start, start + count))
        else:
            self._rebuild(capacity, lengths, self._slots(self._offsets + first, lengths))

    def _rebuild(self, capacity: Counts, lengths: Counts, source: Tensor | slice) -> None:
        """New planes that hold the tokens at these flat indices (row by row), so that the old ones are released.

        source: a slice where it is the same slots of every row, and rows have the same number of them before and after
        """
        target = None if isinstance(source, slice) else self._slots(_row_starts(capacity), lengths)
        total, rows, count = int(capacity.sum()), lengths.size, int(lengths.max(initial=0))
        planes = {}
        for name in list(self.planes):
            plane = self.planes.pop(name)  # one plane at a time is there twice
            planes[name] = plane.new_full((total, *plane.shape[1:]), FILL.get(name, 0))
            if target is not None:
                planes[name][target] = plane[source]
            elif count:
                _by_row(planes[name], rows)[:, :count] = _by_row(plane, rows)[:, source]
        self._begin(planes, capacity, lengths)

    def _set_lengths(self, lengths: Counts, change: Tensor | int | None = None) -> None:
        """New lengths; `change` is what they change by, where it is cheaper to apply that on the device."""
        self._lengths = lengths
        if change is None:
            self._device_lengths = None
        elif self._device_lengths is not None:
            self._device_lengths += change if isinstance(change, int) else change.to(self._device_lengths.device)

    def _growth(self, slots: Counts) -> Counts:
        return np.maximum(self.growth, slots // 32)

    def _roomy(self, lengths: Counts, limit: Counts | None) -> Counts:
        """Slots of rows that hold so many: some free ones, at most `limit` in all."""
        roomy = lengths + self._growth(lengths)
        return roomy if limit is None else np.minimum(roomy, np.maximum(limit, lengths))

    def _slots(self, starts: Counts, counts: Counts) -> Tensor:
        """Flat indices of `counts` slots from `starts` on, row by row."""
        starts, counts = starts.ravel(), counts.ravel()
        before = counts.cumsum() - counts
        flat = np.arange(counts.sum()) + np.repeat(starts - before, counts)
        return torch.from_numpy(flat).to(self.device)

    @property
    def row_offsets(self) -> Tensor:
        """First slot of each row, (rows,) on the device."""
        if self._device_offsets is None:
            self._device_offsets = torch.from_numpy(self._offsets.ravel()).to(self.device)
        return self._device_offsets

    @property
    def row_lengths(self) -> Tensor:
        """Tokens of each row, (rows,) on the device."""
        if self._device_lengths is None:
            self._device_lengths = torch.from_numpy(self.lengths.flatten()).to(self.device)
        return self._device_lengths


def alike(*counts: Counts) -> bool:
    """Whether each of these has one number for all rows."""
    return all(bool((rows == rows.flat[0]).all()) for rows in counts)


def _by_row(plane: Tensor, rows: int) -> Tensor:
    """A plane of rows with the same number of slots as (rows, capacity, ...)."""
    return plane.view(rows, len(plane) // rows, *plane.shape[1:])


def _row_starts(capacity: Counts) -> Counts:
    """Flat offset of each row."""
    ends = capacity.cumsum().reshape(capacity.shape)
    return ends - capacity
