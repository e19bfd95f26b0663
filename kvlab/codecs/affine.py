"""Groups of numbers as codes of few bits with a scale and a zero, both float16: what KIVI and plain int-k have in common.

A code stands for code * scale + zero. The zero is the largest float16 not above the group's minimum and the scale the smallest
float16 that spans the rest, so a decoded number is never further off than half a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from kvlab.codecs.side import Place, Side
from kvlab.kernels.dispatch import Kernels
from kvlab.kernels.packed import BLOCK, Packed, dequantise, packed_bytes
from kvlab.rows import GROWTH, Counts, RowPlanes
from kvlab.shapes import Attention, Kept, Outputs, PerHead, Queries

Axis = Literal["token", "channel"]
KINDS = {"code": "codes", "scale": "scales", "zero": "zeros"}


@dataclass(frozen=True)
class Grouping:
    """How one side is quantised.

    bits      of a code, 1 to 8 or 16
    axis      token: each token alone, groups of `group` channels; channel: `group` tokens together, a scale for each channel
    group     numbers that share a scale
    residual  tokens that stay in full precision: the newest ones (axis token), or all until so many are there (axis channel)
    dim       channels of a token and head
    """

    bits: int
    axis: Axis
    group: int
    residual: int
    dim: int

    @property
    def unit(self) -> int:
        """Tokens encoded together."""
        return 1 if self.axis == "token" else self.group

    @property
    def channels(self) -> int:
        """Channels that share a scale."""
        return min(self.group, self.dim) if self.axis == "token" else 1

    @property
    def groups(self) -> int:
        """Scales of a unit."""
        return -(-self.dim // self.channels)

    @property
    def bits_per_number(self) -> float:
        """Bits that a number takes, scales and zeros included."""
        count = self.unit * self.dim
        return (8 * packed_bytes(count, self.bits) + 32 * self.groups) / count

    def due(self, recent: Counts) -> Counts:
        """How many of the oldest tokens in full precision are encoded, of so many."""
        if self.axis == "token":
            return np.maximum(recent - self.residual, 0)
        return recent // self.residual * self.residual


class GroupedSide(Side):
    """A side whose tokens are encoded in units by `Grouping`."""

    def __init__(self, like: Tensor, grouping: Grouping, kernels: Kernels) -> None:
        super().__init__(like)
        self.grouping, self.kernels = grouping, kernels
        size = packed_bytes(grouping.unit * grouping.dim, grouping.bits)
        scale = (torch.float16, (grouping.groups,))
        kinds = {"code": (torch.uint8, (size,)), "scale": scale, "zero": scale}
        self.units = RowPlanes.none(tuple(like.shape[:2]), kinds, like.device)
        self.units.growth = max(1, GROWTH // grouping.unit)

    @property
    def encoded(self) -> Counts:
        """Tokens encoded in each row."""
        return self.units.lengths * self.grouping.unit

    def due(self, recent: Counts, turn_end: bool) -> Counts:
        """By the grouping's axis; the same at a turn's end and at steps."""
        return self.grouping.due(recent)

    def encode(self, tokens: Tensor, counts: Counts, limit: Counts | None) -> None:
        """Add units."""
        grouping, unit = self.grouping, self.grouping.unit
        found = self.kernels.quantise(tokens.view(-1, unit, grouping.dim), grouping.bits, grouping.channels)
        self.units.extend(dict(zip(KINDS, found, strict=True)), counts // unit, limit if unit == 1 else None)

    @property
    def packed(self) -> Packed:
        """What kernels read."""
        planes, grouping = self.units.planes, self.grouping
        return Packed(
            codes=planes["code"],
            scale=planes["scale"],
            zero=planes["zero"],
            offsets=self.units.row_offsets,
            lengths=self.units.row_lengths,
            bits=grouping.bits,
            unit=grouping.unit,
            dim=grouping.dim,
            channels=grouping.channels,
            widest=int(self.units.lengths.max(initial=0)),
        )

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Some units of each row at a time."""
        packed, unit = self.packed, self.grouping.unit
        exact = torch.promote_types(self.dtype, torch.float32)
        size = max(1, BLOCK // unit)
        for first in range(0, packed.widest, size):
            block = dequantise(packed, first, min(first + size, packed.widest), exact)
            yield first * unit, block.unflatten(0, self.units.lengths.shape)

    def dots_encoded(self, queries: Queries, place: Place | None) -> Attention:
        """By a kernel, unless keys must be turned first."""
        return super().dots_encoded(queries, place) if place is not None else self.kernels.packed_logits(queries, self.packed)

    def mix_encoded(self, weights: Attention) -> Outputs:
        """By a kernel."""
        packed = self.packed
        short = packed.tokens - weights.shape[-1]
        assert short <= 0, "each encoded token has a weight"
        return self.kernels.packed_mix(weights, packed)

    def parts(self) -> dict[str, int]:
        """Codes, scales, zeros."""
        return {kind: self.units.bytes_of(name) for name, kind in KINDS.items()}

    def row_bytes(self) -> np.ndarray:
        """Of each sequence."""
        return self.units.capacity.sum(1) * self.units.slot_bytes

    @property
    def indices(self) -> list[Tensor]:
        """Of both parts."""
        return [*super().indices, *self.units.indices]

    def select_encoded(self, sequences: Tensor) -> None:
        """Units of these sequences."""
        self.units.select_rows(sequences)

    def copy_encoded(self, other: Self) -> None:
        """Copies of all units."""
        other.units = self.units.copy()

    def may_keep(self, kept: Kept) -> bool:
        """Whether no unit would lose a part of its tokens."""
        unit = self.grouping.unit
        if unit == 1:
            return True
        inside = torch.arange(kept.shape[-1], device=kept.device) < torch.from_numpy(self.encoded).to(kept.device)[..., None]
        whole = (kept & inside).unflatten(-1, (-1, unit))
        return bool((whole.any(-1) == whole.all(-1)).all())

    def droppable(self, first: Counts) -> Counts:
        """Whole units."""
        unit = self.grouping.unit
        return np.where(first >= self.encoded, first, first // unit * unit)

    def keep_encoded(self, kept: Kept, limit: Counts | None) -> None:
        """Drop units."""
        unit = self.grouping.unit
        self.units.keep_slots(kept[..., ::unit], limit if unit == 1 else None)

    def vacate(self, slots: PerHead, rows: np.ndarray | None) -> None:
        """The row's last token takes the place of one that leaves."""
        self.units.vacate(slots, rows)
