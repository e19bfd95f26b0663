"""The last queries of a turn, which vote at its end: remembered over its chunks, and shown some at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.kernels import reference
from kvlab.kernels.reference import AttentionRule
from kvlab.shapes import Keys, Look, Positions, Queries

LOOK_BYTES = 2**26
"""Attention weights that are there at once."""


@dataclass(frozen=True)
class Voters:
    """Queries as they attended, (batch, kv_heads, group, queries, head_dim); their positions (batch, queries), -1 for none."""

    queries: Queries
    positions: Tensor

    def then(self, queries: Queries, positions: Tensor, count: int | None) -> Voters:
        """With those of a later chunk, the last `count` of each row (None: all)."""
        return Voters(torch.cat([self.queries, queries], 3), torch.cat([self.positions, positions], 1)).last(count)

    def last(self, count: int | None) -> Voters:
        """Each row's own last ones, in order, where rows are padded."""
        last = self.positions.argsort(dim=1, stable=True)  # pads, at -1, come first
        last = last if count is None else last[:, -count:]
        index = last[:, None, None, :, None].expand(-1, *self.queries.shape[1:3], -1, self.queries.shape[-1])
        return Voters(self.queries.gather(3, index), self.positions.gather(1, last))

    def rows(self, rows: Tensor) -> Voters:
        """Of these sequences of the batch."""
        rows = rows.to(self.positions.device)
        return Voters(self.queries[rows], self.positions[rows])

    def looks(self, keys: Keys, positions: Positions, rule: AttentionRule) -> Iterator[Look]:
        """What they attend to, some of them at a time."""
        each = self.queries[:, :, :, 0, 0].numel() * positions.shape[-1] * 4
        size = max(1, LOOK_BYTES // max(1, each))
        for queries, where in zip(self.queries.split(size, 3), self.positions.split(size, 1), strict=True):
            yield reference.weights(queries, keys, where, positions, rule), where
