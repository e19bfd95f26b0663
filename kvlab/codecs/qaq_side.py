"""Keys or values under QAQ: tokens that each have bits of their own, which may change at every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from kvlab.codecs.attended import AttentionWindow, Seen
from kvlab.codecs.outliers import Outliers, owners
from kvlab.codecs.side import Place, Side
from kvlab.codecs.widths import MixedWidths, encode, inlier_range
from kvlab.kernels.dispatch import Kernels
from kvlab.kernels.packed import BLOCK
from kvlab.rows import Counts, RowPlanes, Rows
from kvlab.shapes import Attention, Kept, Outputs, Queries

if TYPE_CHECKING:
    from kvlab.codecs.qaq import Qaq

LEAVE = 16
"""Tokens that leave a sliding window together, since all that is held moves."""


class QaqSide(Side):
    """Keys or values of one layer. A group is a token of one head, or of all heads together (level layer)."""

    def __init__(self, like: Tensor, codec: Qaq, values: bool, kernels: Kernels) -> None:
        super().__init__(like)
        self.codec, self.kernels = codec, kernels
        self.joined = like.shape[1] if codec.level == "layer" else 1  # heads of a group
        self.working = torch.promote_types(like.dtype, torch.float32)
        rows, size, device = (like.shape[0], like.shape[1] // self.joined), self.joined * self.dim, like.device
        self.codes = MixedWidths(rows, size, range(codec.bits_min, codec.bits_max + 1), device)
        self.outliers = Outliers(rows, size, codec.outliers, like.dtype, device) if codec.outliers else None
        self.attended = AttentionWindow(rows, codec.window, self.working, device) if values else None
        self.seen = torch.zeros(like.shape[0], dtype=torch.int64, device=device)  # tokens of each sequence
        kinds = {"x": (like.dtype, (size,)), "spread": (self.working, ())}
        self.exact = RowPlanes.none(rows, kinds, torch.device("cpu")) if codec.promote else None

    @property
    def encoded(self) -> Counts:
        """Groups, the same in all heads of one."""
        return self.codes.lengths.repeat(self.joined, 1)

    def due(self, recent: Counts, turn_end: bool) -> Counts:
        """All tokens, at once."""
        return recent.copy()

    def observe(self, seen: Seen) -> None:
        """Remember the window's attention, and how many tokens there are."""
        super().observe(seen)
        self.seen = torch.maximum(self.seen, seen.positions.amax(1) + 1)
        if self.attended is not None:
            attention = seen.attention if self.joined == 1 else seen.attention.amax(1, keepdim=True)
            self.attended.observe(attention, seen.positions, (self.encoded + self.recent.lengths)[:, :: self.joined])

    # ----------------------------------------------------------------------------------------------- encoding

    def encode(self, tokens: Tensor, counts: Counts, limit: Counts | None) -> None:
        """Add groups."""
        groups = self._grouped(tokens, counts)
        counts, before = counts[:, :: self.joined], self.codes.lengths
        outside = torch.zeros_like(groups, dtype=torch.bool) if self.outliers is None else self.outliers.mark(groups, counts)
        numbers = groups.to(self.working)
        spread = inlier_range(numbers, outside)
        share = None if self.attended is None else self.attended.largest(before, counts)
        bits = self._bits(spread, share, before, counts)
        self.codes.extend(encode(numbers, outside, bits), counts)
        if self.outliers is not None:
            self.outliers.add(groups, outside, counts)
        if self.exact is not None:
            self.exact.extend({"x": groups.cpu(), "spread": spread.cpu()}, counts)

    def _grouped(self, tokens: Tensor, counts: Counts) -> Tensor:
        """Tokens (counts.sum(), dim), head by head, as groups (groups, size)."""
        if self.joined == 1:
            return tokens
        starts = (counts.cumsum() - counts.ravel()).reshape(counts.shape)
        index = [start[None, :] + np.arange(count[0])[:, None] for start, count in zip(starts, counts, strict=True)]
        return tokens[torch.from_numpy(np.concatenate(index)).to(tokens.device)].flatten(1)

    def _bits(self, spread: Tensor, share: Tensor | None, starts: Counts, counts: Counts) -> Tensor:
        """Bits of `counts` groups of each row from `starts` on, up to its end."""
        device = spread.device
        left = torch.from_numpy(counts.ravel().cumsum()).to(device)[owners(counts, device)]
        left = left - torch.arange(len(spread), device=device)  # to the row's end, itself included
        seen = self.seen.repeat_interleave(counts.shape[1])[owners(counts, device)]
        return self.codec.bits(spread, share, seen, left < self.codec.window)

    def seal(self, turn_end: bool, limit: Counts | None, rows: Rows | None = None) -> None:
        """Encode new tokens; after a step also those again that should have other bits, in rows to which a token came."""
        came = self.recent.lengths[:, :: self.joined] > 0
        super().seal(turn_end, limit, rows)
        if self.codec.dynamic and not turn_end and came.any():
            self._revise(came)
        if self.attended is not None and not self.codec.dynamic:
            self.attended.clear()  # bits that stay need no history

    def _revise(self, came: np.ndarray) -> None:
        """Give groups the bits that they should have now: fewer, or more where there is an exact copy."""
        lengths = self.codes.lengths
        bits = self.codes.read("bits")
        if self.exact is None:
            spread = self.codes.read("scale").double() * (2.0 ** bits.double() - 1)
        else:
            spread = self.exact.planes["spread"][self.exact.flat()].to(bits.device)
        share = None if self.attended is None else self.attended.largest()
        wanted = self._bits(spread, share, np.zeros_like(lengths), lengths)
        changed = wanted < bits if self.exact is None else wanted != bits
        changed &= torch.from_numpy(came.ravel()).to(bits.device)[owners(lengths, bits.device)]
        which = changed.nonzero()[:, 0]
        if len(which):
            numbers = self.codes.decode(which, self.working)
            if self.exact is not None:
                raised = wanted[which] > bits[which]
                index = self.exact.flat()[which[raised].cpu()]
                numbers[raised] = self.exact.planes["x"][index].to(numbers.device, numbers.dtype)
            outside = torch.zeros_like(numbers, dtype=torch.bool)
            if self.outliers is not None:
                group, place, _ = self.outliers.among(which)
                outside[group, place] = True
            self.codes.rewrite(which, encode(numbers, outside, wanted[which]))

    # ------------------------------------------------------------------------------------------------ reading

    def _places(self) -> tuple[Tensor, Tensor]:
        """Row and slot of each group, (groups,)."""
        lengths = self.codes.lengths
        row = owners(lengths, self.recent.device)
        starts = torch.from_numpy(lengths.ravel().cumsum() - lengths.ravel()).to(row.device)
        return row, torch.arange(len(row), device=row.device) - starts[row]

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Some tokens of each row at a time."""
        lengths, longest = self.codes.lengths, int(self.codes.lengths.max(initial=0))
        row, slot = self._places()
        for first in range(0, longest, BLOCK):
            end = min(longest, first + BLOCK)
            which = ((slot >= first) & (slot < end)).nonzero()[:, 0]
            numbers = self.codes.decode(which, self.working)
            if self.outliers is not None:
                group, place, value = self.outliers.among(which)
                numbers[group, place] = value.to(numbers.dtype)
            block = numbers.new_zeros(lengths.size, end - first, self.codes.size)
            block[row[which], slot[which] - first] = numbers
            heads = (
                block.unflatten(-1, (self.joined, self.dim)).transpose(1, 2).reshape(*self.recent.lengths.shape, -1, self.dim)
            )
            yield first, heads

    def dots_encoded(self, queries: Queries, place: Place | None) -> Attention:
        """Each width by a kernel, and what outliers add; by blocks where heads are joined."""
        if place is not None or self.joined > 1:
            return super().dots_encoded(queries, place)
        row, slot = self._places()
        longest = int(self.codes.lengths.max())
        out = queries.new_zeros(*queries.shape[:4], longest + 1)
        for packed, slots in self.codes.packed(slot):
            found = self.kernels.packed_logits(queries, packed)
            target = torch.where(slots < 0, longest, slots)[:, :, None, None]
            out.scatter_(4, target.expand(found.shape), found.to(out.dtype))
        if self.codec.bits_min == 0:
            out[..., :longest] += queries.sum(-1, keepdim=True) * self._middles(out.dtype)
        if self.outliers is not None:
            group, channel, value = self.outliers.all()
            beyond = value.to(out.dtype) - self.codes.read("zero").to(out.dtype)[group]
            lines = queries.flatten(2, 3).flatten(0, 1)[row[group], :, channel]
            by_slot = out.view(len(self.codes.lengths.ravel()), -1, longest + 1).transpose(1, 2)
            by_slot.index_put_((row[group], slot[group]), lines * beyond[:, None], accumulate=True)
        return out[..., :longest]

    def mix_encoded(self, weights: Attention) -> Outputs:
        """The same for the sum."""
        if self.joined > 1:
            return super().mix_encoded(weights)
        row, slot = self._places()
        out = weights.new_zeros(*weights.shape[:4], self.dim)
        for packed, slots in self.codes.packed(slot):
            some = weights.gather(4, slots.clamp(min=0)[:, :, None, None].expand(*weights.shape[:4], -1))
            out += self.kernels.packed_mix(some, packed).to(out.dtype)
        if self.codec.bits_min == 0:
            middles = self._middles(out.dtype)
            inside = torch.where(middles == 0, 0, weights[..., : middles.shape[-1]])
            out += (inside * middles).sum(-1, keepdim=True)
        if self.outliers is not None:
            group, channel, value = self.outliers.all()
            beyond = value.to(out.dtype) - self.codes.read("zero").to(out.dtype)[group]
            lines = weights.flatten(2, 3).flatten(0, 1)[row[group], :, slot[group]]
            by_channel = out.view(len(self.codes.lengths.ravel()), -1, self.dim).transpose(1, 2)
            by_channel.index_put_((row[group], channel), lines * beyond[:, None], accumulate=True)
        return out

    def _middles(self, dtype: torch.dtype) -> Tensor:
        """What groups of 0 bits stand for, 0 for others: (batch, kv_heads, 1, 1, longest)."""
        zero = self.codes.read("zero").to(dtype).masked_fill(self.codes.read("bits") > 0, 0)
        return self.codes.groups.dense_of(zero)[:, :, None, None]

    # ----------------------------------------------------------------------------------------------- storage

    def parts(self) -> dict[str, int]:
        """Bytes; what bits are reckoned from is bookkeeping."""
        found = self.codes.parts()
        if self.outliers is not None:
            for name, size in self.outliers.parts().items():
                found[name] = found.get(name, 0) + size
        found["bookkeeping"] += self.seen.untyped_storage().nbytes()
        if self.attended is not None:
            found["bookkeeping"] += self.attended.weights.bytes_of("weight")
        return found

    def row_bytes(self) -> np.ndarray:
        """Of each sequence."""
        total = self.codes.row_bytes() + self.seen.itemsize
        if self.outliers is not None:
            total = total + self.outliers.row_bytes()
        if self.attended is not None:
            weights = self.attended.weights
            total = total + weights.capacity.sum(1) * weights.slot_bytes
        return total

    @property
    def indices(self) -> list[Tensor]:
        """Of all parts on the device."""
        parts = [self.codes.groups, *self.codes.codes.values()]
        if self.outliers is not None:
            parts += [self.outliers.items, self.outliers.counts]
        if self.attended is not None:
            parts.append(self.attended.weights)
        return [*super().indices, *(index for part in parts for index in part.indices)]

    @property
    def offload_bytes(self) -> int:
        """The exact copy and its ranges."""
        return 0 if self.exact is None else sum(self.exact.bytes_of(name) for name in self.exact.planes)

    def select_encoded(self, sequences: Tensor) -> None:
        """Take these sequences."""
        self.codes.select(sequences)
        self.seen = self.seen[sequences.to(self.seen.device)]
        if self.outliers is not None:
            self.outliers.select(sequences)
        for part in (self.exact, None if self.attended is None else self.attended.weights):
            if part is not None:
                part.select_rows(sequences)

    def copy_encoded(self, other: Self) -> None:
        """Copies of all parts."""
        other.codes, other.seen = self.codes.copy(), self.seen.clone()
        other.outliers = None if self.outliers is None else self.outliers.copy()
        other.attended = None if self.attended is None else self.attended.copy()
        other.exact = None if self.exact is None else self.exact.copy()

    def may_keep(self, kept: Kept) -> bool:
        """Whether all heads of a group lose the same; any groups may leave together, since each is encoded alone."""
        inside = torch.arange(kept.shape[-1], device=kept.device) < torch.from_numpy(self.encoded).to(kept.device)[..., None]
        groups = (kept & inside).unflatten(1, (-1, self.joined))
        return bool((groups == groups[:, :, :1]).all())

    def droppable(self, first: Counts) -> Counts:
        """As many as all heads of a group can lose, some at a time."""
        first = first.reshape(len(first), -1, self.joined).min(2).repeat(self.joined, 1)
        return np.where(first >= self.encoded, first, first // LEAVE * LEAVE)

    def keep(self, kept: Kept, limit: Counts | None) -> None:
        """Drop all but these tokens, and their attention."""
        if self.attended is not None:
            self.attended.keep(kept[:, :: self.joined])
        super().keep(kept, limit)

    def keep_encoded(self, kept: Kept, limit: Counts | None) -> None:
        """Drop groups."""
        row, slot = self._places()
        flat = kept[:, :: self.joined].flatten(0, 1)[row, slot]
        self.codes.keep(flat)
        if self.outliers is not None:
            self.outliers.keep(flat)
        if self.exact is not None:
            self.exact.keep_slots(self.exact.dense_of(flat.cpu()), None)
