"""Groups of numbers that each have a number of bits of their own, a scale and a zero; codes of equal width stand together.

Groups stand row by row in their order, and so do the codes of each width. So the codes of width b belong, one after the
other, to the groups that have b bits: nothing needs to say where a group's codes are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlab.codecs.outliers import owners
from kvlab.kernels.packed import MOST, Packed, pack, packed_bytes, quantise, unpack
from kvlab.rows import Counts, RowPlanes


@dataclass(frozen=True)
class Encoded:
    """Some groups: bits, scale, zero (n,), and the packed codes of those of each width, in their order."""

    bits: Tensor
    scale: Tensor
    zero: Tensor
    codes: dict[int, Tensor]

    @property
    def planes(self) -> dict[str, Tensor]:
        """What stands for each group."""
        return {"bits": self.bits, "scale": self.scale, "zero": self.zero}


def inlier_range(groups: Tensor, outside: Tensor) -> Tensor:
    """max - min of each group's numbers that aren't `outside`, (n, size) -> (n,); 0 where there are none."""
    low = groups.masked_fill(outside, float("inf")).amin(1)
    return (groups.masked_fill(outside, float("-inf")).amax(1) - low).masked_fill(outside.all(1), 0)


def encode(groups: Tensor, outside: Tensor, bits: Tensor) -> Encoded:
    """Groups (n, size) in float32 or float64, each with its bits (n,), without the numbers `outside`, whose codes are 0.

    0 bits: the zero is the float16 nearest to the middle of the range, and there are no codes.
    """
    low = groups.masked_fill(outside, float("inf")).amin(1, keepdim=True)
    low = low.masked_fill(outside.all(1, keepdim=True), 0)
    filled = torch.where(outside, low, groups)  # what is left out must not widen the range
    scale = torch.ones(len(groups), dtype=torch.half, device=groups.device)
    zero, codes = torch.zeros_like(scale), {}
    for width in bits.unique().tolist():
        which = (bits == width).nonzero()[:, 0]
        some = filled[which]
        if width:
            code, scales, zeros = quantise(some[:, None], width, some.shape[1])
            numbers = unpack(code, width, some.shape[1]).masked_fill(outside[which], 0)
            codes[width] = pack(numbers, width)
            scale[which], zero[which] = scales[:, 0], zeros[:, 0]
        else:
            zero[which] = ((some.amin(1) + some.amax(1)) / 2).clamp(-MOST, MOST).half()
    return Encoded(bits, scale, zero, codes)


class MixedWidths:
    """The encoded groups of all rows. size: numbers of a group; widths: numbers of bits that a group may have."""

    def __init__(self, rows: tuple[int, ...], size: int, widths: Iterable[int], device: torch.device) -> None:
        self.size = size
        half = (torch.float16, ())
        self.groups = RowPlanes.none(rows, {"bits": (torch.uint8, ()), "scale": half, "zero": half}, device)
        kinds = {width: {"code": (torch.uint8, (packed_bytes(size, width),))} for width in widths if width}
        self.codes = {width: RowPlanes.none(rows, kind, device) for width, kind in kinds.items()}

    @property
    def lengths(self) -> Counts:
        """Groups of each row."""
        return self.groups.lengths

    def read(self, name: str) -> Tensor:
        """bits, scale or zero of all groups, row by row: (groups,)."""
        return self.groups.planes[name][self.groups.flat()]

    def extend(self, new: Encoded, counts: Counts) -> None:
        """Add groups at the ends of rows, `counts` to each, given row by row."""
        self.groups.extend(new.planes, counts)
        for width, codes in new.codes.items():
            self.codes[width].extend({"code": codes}, _per_row(new.bits == width, counts))

    def rewrite(self, which: Tensor, new: Encoded) -> None:
        """Put other codes in the place of some groups', (n,) numbers ascending. All others stay as they are."""
        before = self.read("bits")
        after = before.clone()
        after[which] = new.bits
        touched = set(before[which].unique().tolist()) | set(new.codes)
        place = torch.empty(len(before), dtype=torch.int64, device=which.device)  # of a group's codes: old ones, then new ones
        for width in touched - {0}:
            part = self.codes[width]
            codes = old = part.planes["code"]
            place[(before == width).nonzero()[:, 0]] = part.flat()
            if width in new.codes:
                codes = torch.cat([old, new.codes[width]])
                place[which[new.bits == width]] = torch.arange(len(old), len(codes), device=which.device)
            has = after == width
            part.refill({"code": codes[place[has.nonzero()[:, 0]]]}, _per_row(has, self.lengths))
        target = self.groups.flat()[which]
        for name, plane in self.groups.planes.items():
            plane[target] = new.planes[name].to(plane.dtype)

    def decode(self, which: Tensor, dtype: torch.dtype) -> Tensor:
        """Numbers of some groups, (n,) -> (n, size); 0 codes at outliers."""
        bits = self.read("bits")
        index = self.groups.flat()[which]
        scale, zero = (self.groups.planes[name][index].to(dtype) for name in ("scale", "zero"))
        numbers = torch.zeros(len(which), self.size, dtype=dtype, device=which.device)
        for width, part in self.codes.items():
            have = bits == width
            some = have[which].nonzero()[:, 0]
            code = part.flat()[(have.cumsum(0) - 1)[which[some]]]
            numbers[some] = unpack(part.planes["code"][code], width, self.size).to(dtype)
        return numbers * scale[:, None] + zero[:, None]

    def packed(self, slots: Tensor) -> Iterator[tuple[Packed, Tensor]]:
        """What kernels read of each width, and the slots (rows..., longest of that width) of its groups, -1 beyond the end.

        slots (groups,): of all groups in their rows.
        """
        bits, scale, zero = (self.read(name) for name in ("bits", "scale", "zero"))
        for width, part in self.codes.items():
            if not part.lengths.any():
                continue
            which, index = (bits == width).nonzero()[:, 0], part.flat()
            scales, zeros = (scale.new_zeros(len(part.planes["code"]), 1) for _ in range(2))
            scales[index, 0], zeros[index, 0] = scale[which], zero[which]
            packed = Packed(
                codes=part.planes["code"],
                scale=scales,
                zero=zeros,
                offsets=part.row_offsets,
                lengths=part.row_lengths,
                bits=width,
                unit=1,
                dim=self.size,
                channels=self.size,
                widest=int(part.lengths.max()),
            )
            yield packed, part.dense_of(slots[which], -1)

    def keep(self, kept: Tensor) -> None:
        """Drop all groups but these, (groups,) bool."""
        bits = self.read("bits")
        for width, part in self.codes.items():
            part.keep_slots(part.dense_of(kept[bits == width]), None)
        self.groups.keep_slots(self.groups.dense_of(kept), None)

    def parts(self) -> dict[str, int]:
        """Bytes; the groups' widths are bookkeeping."""
        codes = sum(part.bytes_of("code") for part in self.codes.values())
        scales, zeros, widths = (self.groups.bytes_of(name) for name in ("scale", "zero", "bits"))
        return {"codes": codes, "scales": scales, "zeros": zeros, "bookkeeping": widths}

    def row_bytes(self) -> np.ndarray:
        """Of each sequence."""
        return sum(
            (part.capacity.sum(1) * part.slot_bytes for part in (self.groups, *self.codes.values())),
            start=np.zeros(len(self.lengths), dtype=np.int64),
        )

    def select(self, sequences: Tensor) -> None:
        """Take these sequences."""
        for part in (self.groups, *self.codes.values()):
            part.select_rows(sequences)

    def copy(self) -> MixedWidths:
        """An independent copy."""
        other = object.__new__(MixedWidths)
        other.size, other.groups = self.size, self.groups.copy()
        other.codes = {width: part.copy() for width, part in self.codes.items()}
        return other


def _per_row(which: Tensor, counts: Counts) -> Counts:
    """How many of the things of each row, `counts` of them row by row, are marked."""
    rows = owners(counts, which.device)[which]
    return rows.bincount(minlength=counts.size).cpu().numpy().reshape(counts.shape)
