"""What codecs are shown of attention: the last queries of a layer, and how much of their attention each token got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvlab.rows import Counts, RowPlanes
from kvlab.shapes import Kept, Queries, QueryPositions


@dataclass(frozen=True)
class Seen:
    """The last queries of a turn, or those of a step, and what they attended to.

    queries    (batch, kv_heads, group, queries, head_dim), as they attended
    positions  (batch, queries), -1 for one that does not exist; those come first
    turn_end   whether they are a turn's last ones, after which tokens have left
    read_attention  what `attention` is asked of when it is first needed; before the store changes
    """

    queries: Queries
    positions: QueryPositions
    turn_end: bool
    read_attention: Callable[[], Tensor]

    @cached_property
    def attention(self) -> Tensor:
        """The most that a KV head's query heads gave, (batch, kv_heads, queries, slots), tokens not encoded yet included."""
        return self.read_attention()


class AttentionWindow:
    """For each token of each row what the last `size` queries gave it, 0 from those before it came.

    rows  (batch, rows of a sequence)
    """

    def __init__(self, rows: tuple[int, ...], size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size = size
        self.weights = RowPlanes.none(rows, {"weight": (dtype, (size,))}, device)

    def observe(self, attention: Tensor, queries: QueryPositions, lengths: Counts) -> None:
        """The newest queries' attention, (batch, rows, queries, slots), of rows that have so many tokens.

        queries (batch, queries): -1 for one that doesn't exist; those come first. A row's window moves by those that exist.
        """
        batch, rows, many, slots = attention.shape
        both = attention.new_zeros(batch, rows, slots, self.size + many)
        both[..., self.size :] = attention.transpose(2, 3)
        held = self.weights.dense_of(self.weights.planes["weight"][self.weights.flat()])
        both[:, :, : held.shape[2], : self.size] = held
        real = (queries >= 0).sum(1, keepdim=True)
        place = torch.arange(self.size, device=queries.device) + real
        place = torch.where(place < self.size, place, place + many - real)  # past those that don't exist
        both = both.gather(3, place[:, None, None].expand(batch, rows, slots, -1))
        inside = torch.arange(slots, device=both.device) < torch.from_numpy(lengths).to(both.device)[..., None]
        self.weights.refill({"weight": both[inside]}, lengths)

    def largest(self, starts: Counts | int = 0, counts: Counts | None = None) -> Tensor:
        """The most that a query gave, of `counts` tokens of each row from slot `starts` on: (counts.sum(),) row by row."""
        return self.weights.planes["weight"][self.weights.flat(starts, counts)].amax(1)

    def keep(self, kept: Kept) -> None:
        """Drop all tokens but these, (batch, rows, slots), which may be more than it has."""
        longest = int(self.weights.lengths.max(initial=0))
        if longest:
            inside = (
                torch.arange(longest, device=kept.device) < torch.from_numpy(self.weights.lengths).to(kept.device)[..., None]
            )
            self.weights.keep_slots(kept[..., :longest] & inside, None)

    def clear(self) -> None:
        """Forget all."""
        plane = self.weights.planes["weight"]
        nothing = np.zeros_like(self.weights.lengths)
        self.weights = RowPlanes({"weight": plane.new_zeros(0, self.size)}, nothing, nothing.copy())

    def copy(self) -> AttentionWindow:
        """An independent copy."""
        other = object.__new__(AttentionWindow)
        other.size, other.weights = self.size, self.weights.copy()
        return other
