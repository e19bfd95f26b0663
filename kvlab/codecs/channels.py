"""Which channels of a head's tokens are encoded: chosen once, at the end of a sequence's first turn, and fixed from then on.

Knows neither why these were chosen (a codec's `Score` says that) nor how what is left is encoded (a side does).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.codecs.attended import Seen
from kvlab.rows import Counts, RowPlanes, alike
from kvlab.shapes import Queries

Score = Callable[[Seen, RowPlanes], Tensor]
"""How much each channel matters, (batch, kv_heads, dim), from the turn's last queries and the tokens held (plane `x`)."""


class Channels:
    """Of each KV head of each sequence the `count` channels of highest score out of `dim`; of equal ones the lower."""

    def __init__(self, count: int, dim: int, score: Score) -> None:
        self.count, self.dim, self.score = count, dim, score
        self.chosen: Tensor | None = None
        """(batch, kv_heads, count) int16, ascending; None before the first turn's end. Replaced, never changed in place."""

    def observe(self, seen: Seen, held: RowPlanes) -> None:
        """Choose at the first turn's end, when all tokens are held in full precision."""
        if self.chosen is None and seen.turn_end:
            best = self.score(seen, held).sort(stable=True, dim=-1, descending=True).indices[..., : self.count]
            self.chosen = best.sort(-1).values.to(torch.int16)

    @property
    def _index(self) -> Tensor:
        assert self.chosen is not None, "a cache that needs a prompt begins with one"
        return self.chosen.long()

    def of_tokens(self, tokens: Tensor, counts: Counts) -> Tensor:
        """Chosen channels of tokens (counts.sum(), dim), row by row: (counts.sum(), count). counts: (batch, kv_heads)."""
        index = self._index.flatten(0, 1)  # (rows, count)
        if alike(counts):
            rows = tokens.view(len(index), -1, self.dim)
            return rows.gather(2, index[:, None].expand(-1, rows.shape[1], -1)).flatten(0, 1)
        parts = zip(tokens.split(counts.ravel().tolist()), index, strict=True)
        return torch.cat([part[:, channels] for part, channels in parts])

    def of_queries(self, queries: Queries) -> Queries:
        """Chosen channels of queries (batch, kv_heads, group, queries, dim)."""
        return queries.gather(4, self._index[:, :, None, None].expand(*queries.shape[:4], -1))

    def widened(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, kv_heads, n, count) with all channels, 0 where they were left out."""
        whole = tokens.new_zeros(*tokens.shape[:3], self.dim)
        return whole.scatter_(3, self._index[:, :, None].expand(tokens.shape), tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of what says which were chosen."""
        return 0 if self.chosen is None else self.chosen.untyped_storage().nbytes()

    def select(self, sequences: Tensor) -> None:
        """Take these sequences of the batch, in this order."""
        if self.chosen is not None:
            self.chosen = self.chosen[sequences.to(self.chosen.device)]

    def copy(self) -> Channels:
        """An independent copy."""
        other = Channels(self.count, self.dim, self.score)
        other.chosen = None if self.chosen is None else self.chosen.clone()
        return other
