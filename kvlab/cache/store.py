"""The stores of one layer: positions and per-token state, for rows of different lengths, and keys and values beside them.

The order of slots means nothing where single tokens leave: the last takes the place of one that leaves. This module knows no
policy, no budget rule and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvlab.kernels.contract import Slots
from kvlab.rows import Counts, RowPlanes, Rows
from kvlab.shapes import Kept, Keys, Positions, Values

StateKinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Per-token state: name -> (dtype, shape)."""
KV = ("keys", "values")


@dataclass(frozen=True)
class View:
    """Dense view of a store: (batch, kv_heads, slots, ...). `index` is set where rows are ragged and this is a copy.

    read_keys, read_values  what `keys` and `values` are asked of when they are first needed; before the store changes
    """

    positions: Positions
    state: dict[str, Tensor]
    full: bool
    """Whether every slot holds a token."""
    index: Tensor | None
    read_keys: Callable[[], Keys]
    read_values: Callable[[], Values]

    @cached_property
    def keys(self) -> Keys:
        """Keys, decoded where they are held encoded."""
        return self.read_keys()

    @cached_property
    def values(self) -> Values:
        """Values, decoded where they are held encoded."""
        return self.read_values()


class TokenRows(RowPlanes):
    """Rows of tokens: positions (int32, -1 for an empty slot) and per-token state."""

    @property
    def positions(self) -> Tensor:
        """(total_slots,) int32, -1 for an empty slot."""
        return self.planes["positions"]

    @property
    def state(self) -> dict[str, Tensor]:
        """Per-token state by name, (total_slots, ...)."""
        return {name: plane for name, plane in self.planes.items() if name not in (*KV, "positions")}

    @property
    def state_bytes(self) -> int:
        """Bytes of bookkeeping held on the device: positions, per-token state, slot indices."""
        held = [self.positions, *self.state.values(), *self.indices]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    def without(self, names: Iterable[str]) -> None:
        """Forget this state."""
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

    def _view(self) -> tuple[dict[str, Tensor], bool, Tensor | None]:
        """All planes in dense form by name, whether every slot holds a token, and the index of a ragged store's copy."""
        if self.uniform:
            width, index = int(self.lengths.max()), None
            dense = {name: self._dense(plane)[:, :, :width] for name, plane in self.planes.items()}
        else:
            width = int(self.lengths.max())
            index, absent = (part[..., :width] for part in self._gather_index())
            dense = {name: plane[index] for name, plane in self.planes.items()}
            dense["positions"] = dense["positions"].masked_fill(absent, -1)
        return dense, bool((self.lengths == width).all()), index


class SlotStore(TokenRows):
    """Keys and values of one layer as they came, in planes `keys` and `values` beside positions and per-token state."""

    encoded = False
    evictable = True
    """Whether single tokens may leave."""
    offload_bytes = 0
    bases: tuple[Tensor, ...] = ()
    """What tokens are projected by: other layers and caches may have the same tensors."""

    def _begin(self, planes: dict[str, Tensor], capacity: Counts, lengths: Counts) -> None:
        super()._begin(planes, capacity, lengths)
        self._slots_of: tuple[tuple[str | None, ...], Slots] | None = None

    @classmethod
    def empty(cls, keys: Keys, values: Values, state: StateKinds) -> SlotStore:
        """A store without slots, for tensors like these (their slots axis may be anything)."""
        kinds = {
            "keys": (keys.dtype, keys.shape[-1:]),
            "values": (values.dtype, values.shape[-1:]),
            "positions": (torch.int32, ()),
            **state,
        }
        return cls.none(keys.shape[:2], kinds, keys.device)

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
    def dims(self) -> tuple[int, int]:
        """Numbers of a key and of a value."""
        return self.keys.shape[-1], self.values.shape[-1]

    @property
    def state_count(self) -> int:
        """How many kinds of per-token state there are."""
        return len(self.planes) - 3

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of key and value storage held, free slots included, by what they hold."""
        return {"full_precision": self.bytes_of("keys") + self.bytes_of("values")}

    @property
    def kv_bytes(self) -> int:
        """Bytes of key and value storage held, free slots included."""
        return sum(self.parts.values())

    @property
    def row_bytes(self) -> np.ndarray:
        """The part of `kv_bytes` that each sequence takes, (batch,)."""
        slot = sum(plane.shape[-1] * plane.itemsize for plane in (self.keys, self.values))
        return self.capacity.sum(1) * slot

    def view(self) -> View:
        """Dense view. Where rows are ragged it is a copy, in which short rows end in empty slots."""
        dense, full, index = self._view()
        keys, values, positions = (dense.pop(name) for name in ("keys", "values", "positions"))
        return View(positions, dense, full, index, lambda: keys, lambda: values)

    def slots(self, names: tuple[str | None, str | None, str | None] = (None, None, None)) -> Slots:
        """What kernels work on; the planes that their rule keeps: value, norm, bits. After a scan call `scanned`."""
        if self._slots_of is None or self._slots_of[0] != names:
            value, norm, bits = (None if name is None else self.planes[name] for name in names)
            slots = Slots(
                keys=self.keys,
                values=self.values,
                positions=self.positions,
                offsets=self.row_offsets,
                lengths=self.row_lengths,
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

    def read_lengths(self) -> Counts:
        """Tokens of each row as a kernel has left them on the device, which this waits for: (batch, kv_heads)."""
        return self.row_lengths.cpu().numpy().reshape(self.lengths.shape).copy()

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
        super().without(names)

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
        incoming = {"keys": keys, "values": values, "positions": positions[:, None], **state}
        self.add(incoming, positions >= 0, arrived=arrived, more_to_come=more_to_come)

    def insert(
        self, keys: Keys, values: Values, positions: Tensor, state: Mapping[str, Tensor], rows: Rows | None = None
    ) -> None:
        """Write one token into each row's free slot (rows: (batch,) mask, None = all). Call `reserve` first.

        keys and values (batch, kv_heads, 1, dim), positions (batch, 1), state (batch, kv_heads or 1, 1, ...) by name.
        """
        self.add_one({"keys": keys, "values": values, "positions": positions[:, None], **state}, rows)

    def keep(self, kept: Kept, view: View, limit: Counts | None) -> None:
        """Drop all but `kept` (as in `view`) and free their memory. Rows get some free slots, at most `limit` in all."""
        self.keep_slots(kept, limit, view.index)

    def _set_lengths(self, lengths: Counts, change: Tensor | int | None = None) -> None:
        super()._set_lengths(lengths, change)
        if change is None:
            self._slots_of = None
