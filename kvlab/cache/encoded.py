"""A store whose keys and values are held encoded by a codec. Positions and state of tokens are held as in any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.rotation import RotaryTable
from kvlab.cache.store import StateKinds, TokenRows, View
from kvlab.codecs.attended import Seen
from kvlab.codecs.base import Codec
from kvlab.codecs.basis import Basis
from kvlab.codecs.side import Place, Side
from kvlab.kernels.dispatch import Kernels
from kvlab.kernels.reference import AttentionRule, weights_of
from kvlab.rows import Counts, Rows
from kvlab.shapes import Attention, Kept, Keys, Outputs, PerHead, Positions, Queries, QueryPositions, Values


class EncodedStore(TokenRows):
    """Positions and per-token state of one layer in its own planes, keys and values in two sides.

    table      of rotations, where keys are held without theirs; None: they are held as they are
    basis      what sides hold the coordinates of, in the type of values; None: they hold keys and values themselves
    dims       numbers of a key and of a value as they come in
    key_dtype  of keys as they come in
    """

    encoded = True
    codec: Codec
    sides: tuple[Side, Side]
    """Keys, values."""
    table: RotaryTable | None = None
    basis: Basis | None
    dims: tuple[int, int]
    key_dtype: torch.dtype

    @classmethod
    def of(cls, codec: Codec, keys: Keys, values: Values, state: StateKinds, kernels: Kernels, layer_idx: int = 0) -> Self:
        """A store without tokens, for keys and values like these (their slots axis may be anything)."""
        store = cls.none(keys.shape[:2], {"positions": (torch.int32, ()), **state}, keys.device)
        store.codec, store.dims, store.key_dtype = codec, (keys.shape[-1], values.shape[-1]), keys.dtype
        exact, basis = torch.promote_types(keys.dtype, torch.float32), codec.basis_of(layer_idx)
        store.basis = None if basis is None else basis.to(keys.device, exact)
        held = keys.to(exact) if codec.pre_rope else keys  # unrotating rounds
        store.sides = codec.sides(layer_idx, *store._projected(held[:, :, :0], values[:, :, :0]), kernels)
        return store

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def evictable(self) -> bool:
        """Whether single tokens may leave at any time."""
        return self.codec.evictable

    @property
    def bases(self) -> tuple[Tensor, ...]:
        """What tokens are projected by: other layers and caches may have the same tensors."""
        return () if self.basis is None else tuple(self.basis.tensors)

    @property
    def state_count(self) -> int:
        """How many kinds of per-token state there are."""
        return len(self.planes) - 1

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of key and value storage held, free slots included, by what they hold."""
        found: dict[str, int] = {}
        for side in self.sides:
            for kind, size in side.bytes_by_part.items():
                found[kind] = found.get(kind, 0) + size
        return found

    @property
    def kv_bytes(self) -> int:
        """Bytes of key and value storage held, free slots included."""
        return sum(self.parts.values())

    @property
    def offload_bytes(self) -> int:
        """Bytes in the host's memory beside them, of which `kv_bytes` has none."""
        return sum(side.offload_bytes for side in self.sides)

    @property
    def row_bytes(self) -> np.ndarray:
        """The part of `kv_bytes` that each sequence takes, (batch,)."""
        return self.sides[0].bytes_by_row + self.sides[1].bytes_by_row

    @property
    def state_bytes(self) -> int:
        """Bytes of bookkeeping held on the device: positions, per-token state, slot indices of all parts."""
        indices = [tensor for side in self.sides for tensor in side.indices]
        return super().state_bytes + sum(tensor.untyped_storage().nbytes() for tensor in indices)

    def view(self) -> View:
        """Dense view, in which keys and values are decoded when they are asked for."""
        dense, full, index = self._view()
        positions = dense.pop("positions")
        keys, values = self.sides

        def read_keys() -> Keys:
            return self._whole_keys(keys.dense(), positions).to(self.key_dtype)

        def read_values() -> Values:
            return values.dense() if self.basis is None else self.basis.values.lift(values.dense()).to(values.dtype)

        return View(positions, dense, full, index, read_keys, read_values)

    def _whole_keys(self, held: Tensor, positions: Positions) -> Keys:
        """Keys as they attend, from what the side gives."""
        keys = held if self.basis is None else self.basis.keys.lift(held)
        return keys if self.table is None else self.table.rotate(keys, positions)

    def attend(
        self, queries: Queries, query_positions: QueryPositions, view: View, rule: AttentionRule
    ) -> tuple[Outputs, Attention]:
        """Attention over all tokens, of which a block at most is decoded at once; also its weights."""
        basis, place = self.basis, None if self.table is None else self._place(view.positions)
        if basis is not None and place is None:
            queries = basis.keys.turn(queries)
        dots = self.sides[0].dots(queries, place)
        weights = weights_of(dots * rule.scaling, query_positions, view.positions, rule)
        mixed = self.sides[1].mix(weights)
        return mixed if basis is None else basis.values.lift(mixed), weights

    def _place(self, positions: Positions) -> Place:
        last = positions.shape[-1] - 1

        def place(held: Tensor, slots: Positions) -> Keys:
            keys = self._whole_keys(held, positions.gather(-1, slots.clamp(max=last)))
            return keys if self.basis is None else keys.to(self.key_dtype)

        return place

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
        """Add a turn's tokens, in full precision. Arguments as of `SlotStore.append`."""
        valid = positions >= 0
        if arrived is None:
            arrived = valid.sum(-1).cpu().numpy()[:, None]
        self.add({"positions": positions[:, None], **state}, valid, arrived=arrived, more_to_come=more_to_come)
        for side, tokens in zip(self.sides, self._as_held(keys, values, positions), strict=True):
            side.add(tokens, valid, arrived, more_to_come)

    def insert(
        self, keys: Keys, values: Values, positions: Tensor, state: Mapping[str, Tensor], rows: Rows | None = None
    ) -> None:
        """Write one token into each row, in full precision. Arguments as of `SlotStore.insert`."""
        self.add_one({"positions": positions[:, None], **state}, rows)
        for side, tokens in zip(self.sides, self._as_held(keys, values, positions), strict=True):
            side.add_one(tokens, rows)

    def _as_held(self, keys: Keys, values: Values, positions: QueryPositions) -> tuple[Tensor, Tensor]:
        """New tokens as sides hold them: keys without their rotation, both by the basis, where that is so."""
        if self.table is not None:
            keys = self.table.undo(keys, positions[:, None].expand(keys.shape[:3]))
        return self._projected(keys, values)

    def _projected(self, keys: Keys, values: Values) -> tuple[Tensor, Tensor]:
        if self.basis is None:
            return keys, values
        return self.basis.keys.lower(keys).to(values.dtype), self.basis.values.lower(values).to(values.dtype)

    def seal(self, turn_end: bool, limit: Counts | None, rows: Rows | None = None) -> None:
        """Encode what is due, at a turn's end or after a step.

        limit: tokens that rows may hold; rows: those to which tokens came, (batch, 1), None = all
        """
        for side in self.sides:
            side.seal(turn_end, limit, rows)

    def droppable(self, first: Counts) -> Counts:
        """How many of the `first` tokens of each row can leave as whole groups."""
        for side in self.sides:
            first = side.droppable(first)
        return first

    def keep(self, kept: Kept, view: View, limit: Counts | None) -> None:
        """Drop all but `kept` (as in `view`). Raises ValueError where a group of tokens would lose only some."""
        for side in self.sides:
            most = int(side.encoded.max(initial=0))
            if most and not side.may_keep(kept[..., :most]):
                raise ValueError(
                    f"codec {self.codec.label} holds earlier turns in groups of tokens, of which single ones can't leave: use "
                    "a codec that encodes each token by itself (codec=int4), policy=full, or one turn only"
                )
        for side in self.sides:
            side.keep(kept, limit)
        self.keep_slots(kept, limit, view.index)

    def vacate(self, slots: PerHead, rows: Rows | None = None) -> None:
        """Drop one token a row, by its slot in the dense view; the row's last token takes its place."""
        for side in self.sides:
            side.vacate(slots, rows)
        super().vacate(slots, rows)

    def observe(self, seen: Seen) -> None:
        """Show the sides the last queries."""
        for side in self.sides:
            side.observe(seen)

    def select_rows(self, sequences: Tensor) -> None:
        """Take these sequences of the batch, in this order."""
        super().select_rows(sequences)
        for side in self.sides:
            side.select_rows(sequences)

    def copy(self) -> Self:
        """An independent copy of everything held."""
        other = super().copy()
        other.codec, other.table, other.basis = self.codec, self.table, self.basis
        other.dims, other.key_dtype = self.dims, self.key_dtype
        keys, values = self.sides
        other.sides = keys.copy(), values.copy()
        return other
