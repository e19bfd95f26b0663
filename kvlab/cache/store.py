"""The slot store of one layer: keys, values, true positions and per-token state, for rows of different lengths.

A row is one KV head of one sequence. All rows lie end to end in flat tensors ("planes"), each with its own number of slots,
so a head that keeps less takes less (ragged heads), and where all rows have the same number of slots the dense view
(batch, kv_heads, slots, ...) costs nothing. A row's tokens fill its first slots: a new one comes behind them, and where one
leaves the last one takes its place, so the order of slots means nothing. This module knows no policy, no budget rule and no
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlab.kernels.contract import Slots
from kvlab.shapes import Kept, Keys, PerHead, Positions, Values

GROWTH = 16
"""Slots, at least, by which a row grows while its budget is not reached; long rows by a 32nd, as all that is held moves."""

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
    """

    def __init__(self, planes: dict[str, Tensor], capacity: Counts, lengths: Counts) -> None:
        self.planes = planes
        self.capacity = capacity
        self._lengths = lengths
        self._offsets = _row_starts(capacity)
        self._device_lengths: Tensor | None = None
        self._device_offsets: Tensor | None = None
        self._dense_index: Tensor | None = None
        self._slots_of: tuple[tuple[str | None, ...], Slots] | None = None

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
        return cls(planes, none, none.copy())

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
    def lengths(self) -> Counts:
        """Tokens of each row, (batch, kv_heads)."""
        return self._lengths

    @property
    def state_count(self) -> int:
        """How many kinds of per-token state there are."""
        return len(self.planes) - 3

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
        """Slot indices and lengths that are kept on the device."""
        kept = (self._device_lengths, self._device_offsets, self._dense_index)
        return [tensor for tensor in kept if tensor is not None]

    @property
    def state_bytes(self) -> int:
        """Bytes of bookkeeping held on the device: positions, per-token state, slot indices."""
        held = [self.positions, *self.state.values(), *self.indices]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    def view(self) -> View:
        """Dense view. Where rows are ragged it is a copy, in which short rows end in empty slots."""
        if self.uniform:
            width = int(self.lengths.max())
            dense = {name: self._dense(plane)[:, :, :width] for name, plane in self.planes.items()}
            index = None
        else:
            index, absent = self._gather_index()
            width = index.shape[-1]
            dense = {name: plane[index] for name, plane in self.planes.items()}
            dense["positions"] = dense["positions"].masked_fill(absent, -1)
        keys, values, positions = (dense.pop(name) for name in ("keys", "values", "positions"))
        return View(keys, values, positions, dense, bool((self.lengths == width).all()), index)

    def slots(self, names: tuple[str | None, str | None, str | None] = (None, None, None)) -> Slots:
        """What kernels work on; the planes that their rule keeps: value, norm, bits. After a scan call `scanned`."""
        if self._slots_of is None or self._slots_of[0] != names:
            value, norm, bits = (None if name is None else self.planes[name] for name in names)
            slots = Slots(
                keys=self.keys,
                values=self.values,
                positions=self.positions,
                offsets=self._row_offsets(),
                lengths=self._row_lengths(),
                widest=int(self.capacity.max(initial=0)),
                value=value,
                norm=norm,
                bits=bits,
            )
            self._slots_of = (names, slots)
        return self._slots_of[1]

    def scanned(self, lengths: Counts) -> None:
        """A kernel has changed the rows, and their lengths on the device too; these are the same on the host."""
        self._lengths = lengths

    def replace_state(self, incoming: Mapping[str, Tensor], source: Tensor, keep: Iterable[str | None] = ()) -> None:
        """State, but for the planes `keep`, of tokens that a kernel moved. incoming: (arrived, ...) by name, 0 if left out.

        source (total_slots,): the slot where a token was before, or total_slots + its number among those that arrived.
        """
        for name, plane in self.state.items():
            if name in keep:
                continue
            if name in incoming:
                self.planes[name] = torch.cat([plane, incoming[name].to(plane.dtype)])[source]
            else:
                old = plane[source.clamp(max=len(plane) - 1)]
                self.planes[name] = torch.where((source < len(plane)).view(-1, *[1] * (plane.ndim - 1)), old, 0)

    def without(self, names: Iterable[str]) -> None:
        """Forget this state."""
        self._slots_of = None
        for name in names:
            del self.planes[name]

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
        self,
        keys: Keys,
        values: Values,
        positions: Tensor,
        state: Mapping[str, Tensor],
        *,
        arrived: Counts | None = None,
        more_to_come: bool = False,
    ) -> None:
        """Add a turn's tokens. No free slot remains, unless `more_to_come` asks for room to grow by chunks.

        positions (batch, tokens), -1 for a pad, which takes no slot; state (batch, kv_heads or 1, tokens, ...) by name,
        0 for what is left out; arrived (batch, 1): how many aren't pads, where the caller knows.
        """
        if arrived is None:
            arrived = (positions >= 0).sum(-1).cpu().numpy()[:, None]
        lengths = self.lengths + arrived
        fits = (lengths <= self.capacity).all() if more_to_come else (lengths == self.capacity).all()
        if not fits:
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
        self._set_lengths(lengths)

    def insert(
        self, keys: Keys, values: Values, positions: Tensor, state: Mapping[str, Tensor], rows: Rows | None = None
    ) -> None:
        """Write one token into each row's free slot (rows: (batch,) mask, None = all). Call `reserve` first.

        keys and values (batch, kv_heads, 1, dim), positions (batch, 1), state (batch, kv_heads or 1, 1, ...) by name.
        """
        slots, pick = self._row_offsets() + self._row_lengths(), None
        written = np.ones_like(self.lengths)
        if rows is not None:
            written *= np.asarray(rows)[:, None]
            pick = torch.from_numpy(written.ravel().nonzero()[0]).to(slots.device)
            slots = slots[pick]
        incoming = self._spread(keys, values, positions, state)
        for name, plane in self.planes.items():
            if name in incoming:
                new = incoming[name].flatten(0, 2)
                plane[slots] = new if pick is None else new[pick]
            else:
                plane[slots] = 0
        self._set_lengths(self.lengths + written, 1 if pick is None else torch.from_numpy(written.ravel()))

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
        roomy = self.lengths + self._growth(self.lengths)
        roomy = roomy if limit is None else np.minimum(roomy, np.maximum(limit, self.lengths))
        if (self.capacity > roomy).any():
            self._resize(np.minimum(self.capacity, roomy))

    def vacate(self, slots: PerHead, rows: Rows | None = None) -> None:
        """Drop one token a row, by its slot in the dense view; the row's last token takes its place.

        rows: (batch, kv_heads) mask, None = all
        """
        offsets = self._row_offsets()
        gap, end = offsets + slots.flatten(), offsets + self._row_lengths() - 1
        less: Tensor | int = 1
        if rows is not None:
            less = torch.from_numpy(rows.ravel()).to(gap.device)
            gap, end, less = gap[less], end[less], less.long()
        for plane in self.planes.values():
            plane[gap] = plane[end]
        self.positions[end] = -1
        self._set_lengths(self.lengths - (1 if rows is None else rows), -less)

    def keep(self, kept: Kept, view: View, limit: Counts | None) -> None:
        """Drop all but `kept` (as in `view`) and free their memory. Rows get some free slots, at most `limit` in all."""
        lengths = kept.sum(-1).cpu().numpy()
        roomy = lengths + self._growth(lengths)
        capacity = roomy if limit is None else np.minimum(roomy, np.maximum(limit, lengths))
        index = view.index
        if index is None:
            starts = self._row_offsets().view(lengths.shape)[..., None]
            index = starts + torch.arange(view.positions.shape[-1], device=kept.device)
        self._rebuild(capacity, lengths, index[kept])

    def select_rows(self, sequences: Tensor) -> None:
        """Rebuild the store from these sequences of the batch (beam search, expansion): (new_batch,) indices."""
        chosen = sequences.cpu().numpy()
        capacity = self.capacity[chosen]
        source = self._slots(self._offsets[chosen], capacity)
        planes = {name: plane[source] for name, plane in self.planes.items()}
        SlotStore.__init__(self, planes, capacity, self.lengths[chosen])

    def copy(self) -> SlotStore:
        """An independent copy of everything held."""
        planes = {name: plane.clone() for name, plane in self.planes.items()}
        return SlotStore(planes, self.capacity.copy(), self.lengths.copy())

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
        SlotStore.__init__(self, planes, capacity, lengths)

    def _set_lengths(self, lengths: Counts, change: Tensor | int | None = None) -> None:
        """New lengths; `change` is what they change by, where it is cheaper to apply that on the device."""
        self._lengths = lengths
        if change is None:
            self._device_lengths = self._slots_of = None
        elif self._device_lengths is not None:
            self._device_lengths += change if isinstance(change, int) else change.to(self._device_lengths.device)

    @staticmethod
    def _growth(slots: Counts) -> Counts:
        return np.maximum(GROWTH, slots // 32)

    def _slots(self, starts: Counts, counts: Counts) -> Tensor:
        """Flat indices of `counts` slots from `starts` on, row by row."""
        starts, counts = starts.ravel(), counts.ravel()
        before = counts.cumsum() - counts
        flat = np.arange(counts.sum()) + np.repeat(starts - before, counts)
        return torch.from_numpy(flat).to(self.keys.device)

    def _row_offsets(self) -> Tensor:
        """First slot of each row, (rows,) on the device."""
        if self._device_offsets is None:
            self._device_offsets = torch.from_numpy(self._offsets.ravel()).to(self.keys.device)
        return self._device_offsets

    def _row_lengths(self) -> Tensor:
        """Tokens of each row, (rows,) on the device."""
        if self._device_lengths is None:
            self._device_lengths = torch.from_numpy(self.lengths.flatten()).to(self.keys.device)
        return self._device_lengths


def _row_starts(capacity: Counts) -> Counts:
    """Flat offset of each row."""
    ends = capacity.cumsum().reshape(capacity.shape)
    return ends - capacity
