"""Rotary positions taken off keys and queries and put back: at other places (`rolling`), or for a codec. Knows no model.

A family's own rotation is linear in (cos, sin), so applying it with (cos, -sin) / (cos^2 + sin^2) undoes it, partial and
interleaved layouts and scaled tables included. Exact to about 5e-7 in float32; everything here is float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlab.shapes import Keys, Positions, Queries, QueryPositions

Apply = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The family's apply_rotary_pos_emb(q, k, cos, sin)."""

MakeTables = Callable[[int, torch.dtype], tuple[Tensor, Tensor]]
"""cos and sin of the first places, (places, rotary_dim) each, in a type; from the model's own rotary embedding."""


@dataclass(frozen=True)
class RotarySource:
    """Where a model's tables come from: layers that rotate alike have the same `key`."""

    key: Hashable
    make: MakeTables


@dataclass(frozen=True)
class Rotation:
    """What a model used in one call.

    cos, sin  (batch or 1, tokens, rotary_dim)
    apply     the function that applies them; it gets the first `dims` channels of a head (None: all)
    source    the tables for any place
    """

    cos: Tensor
    sin: Tensor
    apply: Apply
    source: RotarySource
    dims: int | None = None

    def undo(self, states: Tensor) -> Tensor:
        """Unrotated states, in float32 or wider. states: (batch, heads, tokens, head_dim)."""
        exact = torch.promote_types(states.dtype, torch.float32)
        cos, sin = self.cos.to(exact), self.sin.to(exact)
        norm = cos.square() + sin.square()
        return self.turn(states.to(exact), cos / norm, -sin / norm)

    def turn(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate states (batch, heads, tokens, head_dim) by tables (batch or 1, tokens, rotary_dim)."""
        turned = states[..., : self.dims]
        turned = self.apply(turned, turned, cos, sin)[0]
        return turned if self.dims is None else torch.cat([turned, states[..., self.dims :]], -1)


class RotaryTable:
    """cos and sin at places in the cache, (places, rotary_dim), made as far as they are needed; shared by layers."""

    def __init__(self, rotation: Rotation) -> None:
        nothing = rotation.cos.new_zeros(0, rotation.cos.shape[-1])
        self.rotation = replace(rotation, cos=nothing, sin=nothing)  # how to turn; the call's own tables may go
        self.cos = self.sin = nothing

    def cover(self, places: int, dtype: torch.dtype) -> None:
        """Make sure that the first `places` are there, in float32 or wider."""
        if places > len(self.cos):
            self.cos, self.sin = self.rotation.source.make(2 * places, torch.promote_types(dtype, torch.float32))

    def place_keys(self, keys: Keys, positions: Positions) -> Keys:
        """Rotate unrotated keys by their rank among the held tokens, oldest first."""
        last = torch.iinfo(positions.dtype).max
        order = positions.masked_fill(positions < 0, last).argsort(-1)
        # Empty slots rank last, maybe beyond the table; what stands in them is not read.
        ranks = torch.arange(order.shape[-1], device=order.device).clamp(max=max(0, len(self.cos) - 1)).expand_as(order)
        return self._rotated(keys, torch.empty_like(order).scatter_(-1, order, ranks))

    def place_queries(self, queries: Queries, query_positions: QueryPositions, positions: Positions) -> Queries:
        """Rotate unrotated queries by the rank of their own token among the held ones of each KV head."""
        held = (positions >= 0)[:, :, None] & (positions[:, :, None] <= query_positions[:, None, :, None])
        places = (held.sum(-1) - 1).clamp(min=0)  # (batch, kv_heads, queries)
        group = queries.shape[2]
        return self._rotated(queries.flatten(2, 3), places.repeat(1, 1, group)).unflatten(2, (group, -1))

    def rotate(self, keys: Keys, positions: Positions) -> Keys:
        """Rotate unrotated keys to these positions; what stands in empty slots is not read."""
        return self._rotated(keys, self._places(positions))

    def undo(self, keys: Keys, positions: Positions) -> Keys:
        """Keys that were rotated to these positions, without their rotation, in float32 or wider."""
        exact = torch.promote_types(keys.dtype, torch.float32)
        cos, sin = (table[self._places(positions).flatten(0, 1)].to(exact) for table in (self.cos, self.sin))
        norm = cos.square() + sin.square()
        return self._turned(keys.to(exact), cos / norm, -sin / norm)

    def _places(self, positions: Positions) -> Positions:
        return positions.long().clamp(min=0, max=max(0, len(self.cos) - 1))

    def _rotated(self, states: Tensor, places: Tensor) -> Tensor:
        """Rotate (batch, kv_heads, tokens, head_dim) by places (batch, kv_heads, tokens)."""
        cos, sin = (table[places.flatten(0, 1)].to(states.dtype) for table in (self.cos, self.sin))
        return self._turned(states, cos, sin)

    def _turned(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn (batch, kv_heads, tokens, head_dim) by tables (batch * kv_heads, tokens, rotary_dim)."""
        flat = states.flatten(0, 1)[:, None]  # (batch * kv_heads, 1, tokens, head_dim)
        return self.rotation.turn(flat, cos, sin)[:, 0].view_as(states)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.cos.untyped_storage().nbytes() + self.sin.untyped_storage().nbytes()
