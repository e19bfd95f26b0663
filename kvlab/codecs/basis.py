"""Fewer numbers for each key and value, by a projection that was made beforehand. Knows no model and no way to make one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.shapes import Queries


@dataclass(frozen=True)
class Projection:
    """A map to `rank` numbers and one back, for each KV head or one for all of a layer.

    down  (1 or kv_heads, dim, rank); up: (1 or kv_heads, rank, dim); what they are applied to is taken to their type
    """

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        """Numbers that are held."""
        return self.down.shape[-1]

    def lower(self, numbers: Tensor) -> Tensor:
        """(batch, kv_heads, ..., dim) -> (batch, kv_heads, ..., rank)."""
        return _by(numbers, self.down)

    def lift(self, numbers: Tensor) -> Tensor:
        """(batch, kv_heads, ..., rank) -> (batch, kv_heads, ..., dim)."""
        return _by(numbers, self.up)

    def turn(self, queries: Queries) -> Queries:
        """Queries whose products with lowered keys are those that they themselves have with lifted ones."""
        return _by(queries, self.up.mT)

    def to(self, device: torch.device, dtype: torch.dtype) -> Projection:
        """There and in that type; the same tensors where they are already."""
        return Projection(self.down.to(device, dtype), self.up.to(device, dtype))


@dataclass(frozen=True)
class Basis:
    """Projections of one layer's keys and values, in float32 or float64. Tensors that are views bring all their storage."""

    keys: Projection
    values: Projection

    def to(self, device: torch.device, dtype: torch.dtype) -> Basis:
        """There and in that type; the same tensors where they are already."""
        return Basis(self.keys.to(device, dtype), self.values.to(device, dtype))

    @property
    def tensors(self) -> list[Tensor]:
        """All four."""
        return [self.keys.down, self.keys.up, self.values.down, self.values.up]


def _by(numbers: Tensor, matrix: Tensor) -> Tensor:
    """(batch, kv_heads, ..., n) times (1 or kv_heads, n, m)."""
    flat = numbers.to(matrix.dtype).flatten(2, -2) @ matrix
    return flat.view(*numbers.shape[:-1], matrix.shape[-1])
