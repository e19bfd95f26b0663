"""Numbers in the tails of a distribution, kept exactly and sparsely beside what is quantised.

A group is what shares a scale, a row is what shares thresholds; a row's first groups set its thresholds, which then stay.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from kvlab.rows import Counts, RowPlanes

SHORT = 2**15
"""Places in a group that 16 bits can tell apart."""


class Outliers:
    """Value and place of each outlier, and how many of them each group has.

    rows   (batch, rows of a sequence); size: numbers of a group
    share  of the first numbers of a row that are outliers, half in each tail
    """

    def __init__(self, rows: tuple[int, ...], size: int, share: float, dtype: torch.dtype, device: torch.device) -> None:
        self.share = Fraction(str(share))  # as it is written: floor(0.58 / 2 * 100) is 29
        wide = torch.int16 if size < SHORT else torch.int32
        self.items = RowPlanes.none(rows, {"value": (dtype, ()), "place": (wide, ())}, device)
        self.counts = RowPlanes.none(rows, {"count": (torch.uint8 if size < 2**8 else wide, ())}, device)
        self.limits = torch.zeros(*rows, 2, dtype=dtype, device=device)
        self.known = np.zeros(rows, dtype=bool)  # which rows have thresholds

    def mark(self, groups: Tensor, counts: Counts) -> Tensor:
        """Which numbers of new groups (counts.sum(), size), row by row, are outliers: (counts.sum(), size)."""
        parts = groups.split(counts.ravel().tolist())
        for row in np.flatnonzero((counts > 0) & ~self.known):
            self.limits.view(-1, 2)[row] = self._thresholds(parts[row])
        self.known = self.known | (counts > 0)
        low, high = self.limits.view(-1, 2)[owners(counts, groups.device)].split(1, 1)
        return (groups < low) | (groups > high)

    def _thresholds(self, numbers: Tensor) -> Tensor:
        """The least and the largest number that is none."""
        exact = numbers.to(torch.promote_types(numbers.dtype, torch.float32)).flatten()
        beyond = math.floor(self.share / 2 * len(exact))
        return torch.stack([exact.kthvalue(beyond + 1)[0], exact.kthvalue(len(exact) - beyond)[0]]).to(numbers.dtype)

    def add(self, groups: Tensor, outside: Tensor, counts: Counts) -> None:
        """Keep the marked numbers of new groups."""
        found = outside.sum(1)
        before = np.concatenate([[0], found.cumsum(0).cpu().numpy()])
        ends = counts.ravel().cumsum()
        items = (before[ends] - before[ends - counts.ravel()]).reshape(counts.shape)
        self.items.extend({"value": groups[outside], "place": outside.nonzero()[:, 1]}, items)
        self.counts.extend({"count": found}, counts)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """Number of its group, counted row by row, place in it, and value of each outlier: (outliers,)."""
        count = self.counts.planes["count"][self.counts.flat()].long()
        group = torch.repeat_interleave(count, output_size=int(self.items.lengths.sum()))
        index = self.items.flat()
        return group, self.items.planes["place"][index].long(), self.items.planes["value"][index]

    def among(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same of these groups alone, (n,) numbers; the first result counts among them."""
        index = torch.full((int(self.counts.lengths.sum()),), -1, device=groups.device)
        index[groups] = torch.arange(len(groups), device=groups.device)
        group, place, value = self.all()
        inside = index[group] >= 0
        return index[group][inside], place[inside], value[inside]

    def keep(self, kept: Tensor) -> None:
        """Drop all groups but these, (groups,) bool."""
        group = self.all()[0]
        self.items.keep_slots(self.items.dense_of(kept[group]), None)
        self.counts.keep_slots(self.counts.dense_of(kept), None)

    def parts(self) -> dict[str, int]:
        """Bytes; counts and thresholds are bookkeeping."""
        return {
            "outliers": self.items.bytes_of("value"),
            "outlier_indices": self.items.bytes_of("place"),
            "bookkeeping": self.counts.bytes_of("count") + self.limits.untyped_storage().nbytes(),
        }

    def row_bytes(self) -> np.ndarray:
        """Of each sequence."""
        slots = sum(part.capacity.sum(1) * part.slot_bytes for part in (self.items, self.counts))
        return slots + self.limits[:1].numel() * self.limits.itemsize

    def select(self, sequences: Tensor) -> None:
        """Take these sequences."""
        self.items.select_rows(sequences)
        self.counts.select_rows(sequences)
        self.limits, self.known = self.limits[sequences.to(self.limits.device)], self.known[sequences.cpu().numpy()]

    def copy(self) -> Outliers:
        """An independent copy."""
        other = object.__new__(Outliers)
        other.__dict__.update(vars(self))
        other.items, other.counts, other.limits = self.items.copy(), self.counts.copy(), self.limits.clone()
        return other


def owners(counts: Counts, device: torch.device) -> Tensor:
    """The row of each of `counts` things, row by row: (counts.sum(),)."""
    return torch.from_numpy(np.repeat(np.arange(counts.size), counts.ravel())).to(device)
