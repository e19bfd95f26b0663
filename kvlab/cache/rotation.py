"""Rotary positions taken off keys and queries and put back at other places (`rolling`). Knows rotations, no model.

A family's own rotation is linear in (cos, sin), so applying it with (cos, -sin) / (cos^2 + sin^2) undoes it, partial and
interleaved layouts and scaled tables included. Exact to about 5e-7 in float32; everything here is float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_SPARE = 64  # places by which a table grows ahead

Apply = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The family's apply_rotary_pos_emb(q, k, cos, sin)."""


@dataclass(frozen=True)
class Rotation:
    """What a model used in one call: cos and sin (batch or 1, tokens, rotary_dim), and the function that applies them."""

    cos: Tensor
    sin: Tensor
    apply: Apply

    def undo(self, states: Tensor) -> Tensor:
        """Unrotated states, in float32 or wider. states: (batch, heads, tokens, head_dim)."""
        exact = torch.promote_types(states.dtype, torch.float32)
        cos, sin = self.cos.to(exact), self.sin.to(exact)
        norm = cos.square() + sin.square()
        return rotate(states.to(exact), cos / norm, -sin / norm, self.apply)


def rotate(states: Tensor, cos: Tensor, sin: Tensor, apply: Apply) -> Tensor:
    """Rotate states (batch, heads, tokens, head_dim) by tables (batch or 1, tokens, rotary_dim)."""
    return apply(states, states, cos, sin)[0]


class RotaryTable:
    """cos and sin at the first places of each sequence, recorded as tokens pass by; shared by layers that rotate alike.

    Rows are kept apart, so that a padded row whose positions the model counts from its pads stays consistent.
    """

    def __init__(self) -> None:
        self.source: Tensor | None = None
        self.cos: Tensor | None = None  # (batch, places, rotary_dim)
        self.sin: Tensor | None = None

    def record(self, rotation: Rotation, positions: Tensor, places: int) -> None:
        """Add a call's tables for tokens that stand before `places`. positions: (batch, tokens), -1 for pads."""
        if self.source is rotation.cos:
            return
        self.source = rotation.cos
        rows, tokens = ((positions >= 0) & (positions < places)).nonzero(as_tuple=True)
        for name in ("cos", "sin"):
            new = getattr(rotation, name)
            new = new.to(torch.promote_types(new.dtype, torch.float32)).expand(len(positions), -1, -1)
            table = self._grown(getattr(self, name), new, places)
            table[rows, positions[rows, tokens].long()] = new[rows, tokens]
            setattr(self, name, table)

    @staticmethod
    def _grown(table: Tensor | None, like: Tensor, places: int) -> Tensor:
        known = 0 if table is None else table.shape[1]
        if table is not None and known >= places:
            return table
        grown = like.new_zeros(len(like), places + _SPARE, like.shape[-1])
        if table is not None:
            grown[:, :known] = table
        return grown

    def at(self, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin at these places: (batch, heads, tokens) -> each (batch * heads, tokens, rotary_dim)."""
        assert self.cos is not None and self.sin is not None
        batch, heads, tokens = places.shape
        index = places.long().clamp(min=0).view(batch, heads * tokens, 1)
        pair = (table.gather(1, index.expand(-1, -1, table.shape[-1])) for table in (self.cos, self.sin))
        cos, sin = (part.view(batch * heads, tokens, -1).to(dtype) for part in pair)
        return cos, sin

    def select_rows(self, rows: Tensor) -> None:
        """Reorder or expand along the batch."""
        if self.cos is not None and self.sin is not None:
            self.cos, self.sin = self.cos[rows], self.sin[rows]

    def copy(self) -> RotaryTable:
        """An independent copy."""
        other = RotaryTable()
        other.cos, other.sin = (None if table is None else table.clone() for table in (self.cos, self.sin))
        return other

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(table.untyped_storage().nbytes() for table in (self.cos, self.sin) if table is not None)
