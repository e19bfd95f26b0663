"""One side of a layer, its keys or its values: the oldest tokens of each row encoded, the rest in full precision.

`Side` holds what all codecs share: the tokens in full precision, and how attention reads both parts. A subclass holds the
encoded part, of some channels only where a codec chose those. Tokens of a row stand in the order [encoded][full precision],
each in the order in which they came (or, where single tokens leave, in any).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Self

import numpy as np
import torch
from torch import Tensor

from kvlab.codecs.attended import Seen
from kvlab.codecs.channels import Channels
from kvlab.rows import Counts, RowPlanes, Rows, alike
from kvlab.shapes import Attention, Kept, Outputs, PerHead, Positions, Queries

Place = Callable[[Tensor, Positions], Tensor]
"""Puts keys (batch, kv_heads, n, dim) where they belong, given their slots in the row, (batch, kv_heads, n)."""
FULL_PRECISION = "full_precision"


class Side(ABC):
    """Keys or values of one layer. like: a tensor (batch, kv_heads, tokens, dim) of their shape and type.

    dim       numbers of an encoded token
    channels  which of its numbers those are, where tokens in full precision have more; None: all
    """

    def __init__(self, like: Tensor) -> None:
        self.dim, self.dtype = like.shape[-1], like.dtype
        self.recent = _waiting(like)
        self.channels: Channels | None = None

    def narrow(self, like: Tensor, channels: Channels) -> None:
        """Encode some channels alone of tokens like these, before any has come."""
        assert channels.count == self.dim and not self.recent.lengths.any()
        self.recent, self.channels = _waiting(like), channels

    # ------------------------------------------------------------------------- what a codec's side must say

    @property
    @abstractmethod
    def encoded(self) -> Counts:
        """Tokens encoded in each row, (batch, kv_heads)."""

    @abstractmethod
    def due(self, recent: Counts, turn_end: bool) -> Counts:
        """How many of the oldest tokens in full precision are to be encoded now, of those that each row has."""

    @abstractmethod
    def encode(self, tokens: Tensor, counts: Counts, limit: Counts | None) -> None:
        """Encode tokens (counts.sum(), dim), row by row, behind those that are. limit: slots that rows may have."""

    @abstractmethod
    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """The encoded tokens decoded, a block at a time: number of its first token, and (batch, kv_heads, n, dim).

        In float32, float64 for float64. Rows that have fewer tokens end in anything.
        """

    @abstractmethod
    def parts(self) -> dict[str, int]:
        """Bytes of the encoded part's storages by what they hold, such as codes, scales, zeros."""

    @abstractmethod
    def row_bytes(self) -> np.ndarray:
        """Bytes of the encoded part of each sequence, (batch,)."""

    @property
    def indices(self) -> list[Tensor]:
        """Bookkeeping on the device; a subclass adds that of its encoded part."""
        return self.recent.indices

    @abstractmethod
    def select_encoded(self, sequences: Tensor) -> None:
        """Take these sequences of the batch, in this order."""

    @abstractmethod
    def copy_encoded(self, other: Self) -> None:
        """Give `other` an independent copy of the encoded part."""

    def keep_encoded(self, kept: Kept, limit: Counts | None) -> None:
        """Drop encoded tokens. kept: (batch, kv_heads, most encoded). Only called if `may_keep`."""
        raise NotImplementedError

    def may_keep(self, kept: Kept) -> bool:
        """Whether these encoded tokens can stay while the others leave."""
        inside = torch.arange(kept.shape[-1], device=kept.device) < torch.from_numpy(self.encoded).to(kept.device)[..., None]
        return bool((kept | ~inside).all())

    def droppable(self, first: Counts) -> Counts:
        """How many of the `first` tokens of each row can leave together; a subclass says more than those not encoded."""
        return np.where(first >= self.encoded, first, 0)

    def observe(self, seen: Seen) -> None:
        """Look at the last queries, before what is due is encoded; by default only to choose channels."""
        if self.channels is not None:
            self.channels.observe(seen, self.recent)

    # ------------------------------------------------------------------------------------------------ writing

    def add(self, tokens: Tensor, valid: Tensor, arrived: Counts, more_to_come: bool) -> None:
        """Add a turn's tokens (batch, kv_heads, tokens, dim) in full precision, but for pads."""
        self.recent.add({"x": tokens}, valid, arrived=arrived, more_to_come=more_to_come)

    def add_one(self, token: Tensor, rows: Rows | None) -> None:
        """Add one token (batch, kv_heads, 1, dim) to each row, or to those of these sequences."""
        self.recent.reserve(None, rows)
        self.recent.add_one({"x": token}, rows)

    def seal(self, turn_end: bool, limit: Counts | None, rows: Rows | None = None) -> None:
        """Encode what is due in these rows, (batch, 1), None = all.

        limit: slots that rows of encoded tokens may have where each is encoded alone
        """
        due = self.due(self.recent.lengths, turn_end)
        due = due if rows is None else np.where(rows, due, 0)
        if due.any():
            taken = self.recent.take_front(due, more_to_come=not turn_end)["x"]
            self.encode(taken if self.channels is None else self.channels.of_tokens(taken, due), due, limit)
        if turn_end:
            self.recent.trim()

    def keep(self, kept: Kept, limit: Counts | None) -> None:
        """Drop all but these tokens, (batch, kv_heads, slots), as they stand in the row."""
        encoded, most = self.encoded, int(self.encoded.max(initial=0))
        if most:
            inside = torch.arange(most, device=kept.device) < torch.from_numpy(encoded).to(kept.device)[..., None]
            part = kept[..., :most] & inside
            if not (part == inside).all():
                self.keep_encoded(part, limit)
        if self.recent.lengths.any():
            self.recent.keep_slots(_tail(kept, encoded, self.recent.lengths), None)

    def vacate(self, slots: PerHead, rows: Rows | None) -> None:
        """Drop one token a row where all are encoded, each alone; the row's last takes its place."""
        raise NotImplementedError

    def select_rows(self, sequences: Tensor) -> None:
        """Take these sequences of the batch, in this order."""
        self.recent.select_rows(sequences)
        if self.channels is not None:
            self.channels.select(sequences)
        self.select_encoded(sequences)

    def copy(self) -> Self:
        """An independent copy of everything held."""
        other = type(self).__new__(type(self))
        other.__dict__.update(vars(self))
        other.recent = self.recent.copy()
        other.channels = None if self.channels is None else self.channels.copy()
        self.copy_encoded(other)
        return other

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of all storages by what they hold."""
        chosen = {} if self.channels is None else {"channels": self.channels.nbytes}
        return {FULL_PRECISION: self.recent.bytes_of("x"), **chosen, **self.parts()}

    @property
    def bytes_by_row(self) -> np.ndarray:
        """The part of each sequence, (batch,)."""
        chosen = 0 if self.channels is None else self.channels.nbytes // max(1, len(self.recent.capacity))
        return self.recent.capacity.sum(1) * self.recent.slot_bytes + self.row_bytes() + chosen

    @property
    def offload_bytes(self) -> int:
        """Bytes of copies on the CPU, which no other figure counts."""
        return 0

    def dense(self) -> Tensor:
        """All tokens, (batch, kv_heads, slots, dim), decoded where they are encoded, in the type in which they came.

        Channels that were left out are 0.
        """
        recent = self.recent.dense("x")
        if not self.encoded.any():
            return recent
        decoded = torch.cat([block.to(self.dtype) for _, block in self.blocks()], 2)
        return self._joined(decoded if self.channels is None else self.channels.widened(decoded), recent, 2)

    def dots(self, queries: Queries, place: Place | None) -> Attention:
        """Dot products with all tokens, (batch, kv_heads, group, queries, slots), as they stand in the row."""
        exact = torch.promote_types(queries.dtype, torch.float32)
        queries = queries.to(exact)
        recent = self.recent.dense("x")
        if place is not None:
            recent = place(recent, self._columns(recent.shape[2]) + self._starts())
        found = times(queries, recent.to(exact).transpose(-1, -2))
        if not self.encoded.any():
            return found
        if self.channels is not None:
            assert place is None, "channels are those of keys as they attend"
            queries = self.channels.of_queries(queries)
        return self._joined(self.dots_encoded(queries, place), found, 4)

    def mix(self, weights: Attention) -> Outputs:
        """Sum of all tokens by these weights, (batch, kv_heads, group, queries, dim)."""
        encoded, lengths = self.encoded, self.recent.lengths
        total = self.mix_encoded(weights) if encoded.any() else None
        if total is not None and not lengths.any():
            return total
        recent = self.recent.dense("x").to(weights.dtype)
        if alike(encoded):
            start = int(encoded.flat[0])
            tail = weights[..., start : start + recent.shape[2]]
        else:
            columns = (self._columns(recent.shape[2]) + self._starts())[:, :, None, None]
            tail = weights.gather(4, columns.clamp(max=weights.shape[4] - 1).expand(*weights.shape[:4], -1))
        if not alike(lengths):
            used = self._columns(recent.shape[2]) < torch.from_numpy(lengths).to(weights.device)[..., None]
            tail = torch.where(used[:, :, None, None], tail, 0)
            recent = torch.where(used[..., None], recent, 0)
        mixed = times(tail, recent)
        return mixed if total is None else total + mixed

    def dots_encoded(self, queries: Queries, place: Place | None) -> Attention:
        """Dot products with the encoded tokens, a block at a time."""
        found = []
        for start, block in self.blocks():
            keys = block if place is None else place(block, self._columns(block.shape[2]) + start)
            found.append(times(queries, keys.to(queries.dtype).transpose(-1, -2)))
        return torch.cat(found, 4)

    def mix_encoded(self, weights: Attention) -> Outputs:
        """Sum of the encoded tokens by these weights, a block at a time; of a row's own tokens alone."""
        encoded = torch.from_numpy(self.encoded).to(weights.device)[..., None]
        total = torch.zeros(*weights.shape[:4], self.dim, dtype=weights.dtype, device=weights.device)
        for start, block in self.blocks():
            end = min(start + block.shape[2], weights.shape[4])
            inside = self._columns(end - start) + start < encoded
            part = torch.where(inside[:, :, None, None], weights[..., start:end], 0)
            total += times(part, torch.where(inside[..., None], block[:, :, : end - start], 0).to(weights.dtype))
        return total

    def _columns(self, count: int) -> Tensor:
        """0, 1, ... for each row: (batch, kv_heads, count)."""
        return torch.arange(count, device=self.recent.device).expand(*self.recent.lengths.shape, count)

    def _starts(self) -> Tensor:
        """Slot of each row's first token in full precision, (batch, kv_heads, 1)."""
        return torch.from_numpy(self.encoded).to(self.recent.device)[..., None]

    def _joined(self, encoded: Tensor, recent: Tensor, axis: int) -> Tensor:
        """Both parts as they stand in the row, along `axis`, on which rows are filled to their own lengths."""
        counts = self.encoded
        most = int(counts.max())
        both = torch.cat([encoded.narrow(axis, 0, most), recent], axis)
        if (counts == most).all():
            return both
        widest = int((counts + self.recent.lengths).max())
        column = self._columns(widest)
        place = torch.where(column < self._starts(), column, column - self._starts() + most).clamp(max=both.shape[axis] - 1)
        shape = [*place.shape[:2], *[1] * (both.ndim - 2)]
        shape[axis] = widest
        size = list(both.shape)
        size[axis] = widest
        return both.gather(axis, place.view(shape).expand(size))


def _waiting(like: Tensor) -> RowPlanes:
    """Rows without tokens, for tokens like these in full precision."""
    return RowPlanes.none(tuple(like.shape[:2]), {"x": (like.dtype, (like.shape[-1],))}, like.device)


def times(lines: Tensor, matrix: Tensor) -> Tensor:
    """(batch, kv_heads, group, queries, n) times (batch, kv_heads, n, m), which isn't copied for each query head."""
    return (lines.flatten(2, 3) @ matrix).unflatten(2, lines.shape[2:4])


def _tail(kept: Kept, starts: Counts, lengths: Counts) -> Kept:
    """Of each row the slots from `starts` on, `lengths` of them: (batch, kv_heads, longest)."""
    columns = np.arange(int(lengths.max(initial=0)))
    index = torch.from_numpy(np.minimum(starts[..., None] + columns, kept.shape[-1] - 1)).to(kept.device)
    inside = torch.from_numpy(columns < lengths[..., None]).to(kept.device)
    return kept.gather(-1, index) & inside
