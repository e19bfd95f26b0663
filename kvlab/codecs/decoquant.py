"""DecoQuant (Liu et al. 2024, arXiv 2405.12591): blocks of keys or values as a large factor in few bits times a tiny exact one.

What the factors are is in `factors.py`. A block's T_S is kept in float16, T_L as codes with one step per token of all heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from kvlab.budget import LayerGeometry
from kvlab.codecs.base import Codec, CodecError, register_codec
from kvlab.codecs.factors import balanced, encode_block, gram
from kvlab.codecs.side import Place, Side
from kvlab.kernels.dispatch import Kernels
from kvlab.kernels.packed import BLOCK, packed_bytes, unpack
from kvlab.rows import Counts, RowPlanes
from kvlab.shapes import Attention, Kept, Outputs, Queries

BITS = range(2, 9)
"""Bits that a code may have: with one there is no step on either side of 0."""
STRIDE = 32
"""Tokens that leave a sliding window together, since all that stay move."""
KINDS = {"code": "codes", "scale": "scales"}


class DecoSide(Side):
    """Keys or values of one layer in blocks. Rows of its planes are sequences, not heads."""

    def __init__(self, like: Tensor, codec: DecoQuant) -> None:
        super().__init__(like)
        self.codec = codec
        rows, size = (like.shape[0], 1), packed_bytes(like.shape[1] * like.shape[3], codec.bits)
        kinds = {"code": (torch.uint8, (size,)), "scale": (torch.float16, ())}
        self.tokens = RowPlanes.none(rows, kinds, like.device)
        factor = (torch.float16, (codec.channels, codec.channels))
        self.factors = RowPlanes.none(rows, {"factor": factor}, like.device)
        self.spans: list[list[int]] = [[] for _ in range(like.shape[0])]
        """Tokens of each block of each sequence, oldest first; lists are replaced, never changed in place."""

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.recent.lengths.shape[1]

    @property
    def encoded(self) -> Counts:
        """The same in all heads of a sequence."""
        return np.repeat(self.tokens.lengths, self.heads, 1)

    # ------------------------------------------------------------------------------------------------ writing

    def due(self, recent: Counts, turn_end: bool) -> Counts:
        """All at a turn's end; at steps whole blocks."""
        return recent if turn_end else recent // self.codec.block * self.codec.block

    def encode(self, tokens: Tensor, counts: Counts, limit: Counts | None) -> None:
        """Each sequence's tokens are a block."""
        assert (counts == counts[:, :1]).all(), "heads encoded together have equally many tokens"
        each = counts[:, :1]
        parts = tokens.split((each[:, 0] * self.heads).tolist())
        blocks = [part.unflatten(0, (self.heads, -1)) for part in parts if len(part)]
        bits, channels = self.codec.bits, self.codec.channels
        to_left, small = (part.to(tokens.device) for part in balanced([gram(block, channels) for block in blocks]))
        coded = [encode_block(block, factor, bits) for block, factor in zip(blocks, to_left, strict=True)]
        exactly = np.zeros_like(each)  # no slots to grow by: a block is long
        code, step = (torch.cat(parts) for parts in zip(*coded, strict=True))
        self.tokens.extend({"code": code, "scale": step}, each, exactly)
        self.factors.extend({"factor": small.to(self._exact)}, (each > 0).astype(np.int64), exactly)
        self.spans = [[*spans, count] if count else spans for spans, count in zip(self.spans, each[:, 0].tolist(), strict=True)]

    @property
    def _exact(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def may_keep(self, kept: Kept) -> bool:
        """Whether all heads lose the same: a token has codes of its own, but they are those of all heads."""
        part = self._inside(kept)
        return bool((part == part[:, :1]).all())

    def droppable(self, first: Counts) -> Counts:
        """As many as all heads can lose, some at a time."""
        first = np.broadcast_to(first.min(1, keepdims=True), first.shape)
        return np.where(first >= self.encoded, first, first // STRIDE * STRIDE)

    def keep_encoded(self, kept: Kept, limit: Counts | None) -> None:
        """Drop tokens of all heads. T_S stays as long as a token of its block does."""
        kept = self._inside(kept)[:, :1]
        flags, exactly = kept[:, 0].cpu().numpy(), np.zeros_like(self.tokens.lengths)
        ends = [[0, *accumulate(spans)] for spans in self.spans]
        left = [[int(row[a:b].sum()) for a, b in pairwise(places)] for row, places in zip(flags, ends, strict=True)]
        stays = torch.zeros(len(left), 1, max(map(len, left)), dtype=torch.bool)
        for row, counts in enumerate(left):
            stays[row, 0, : len(counts)] = torch.tensor(counts) > 0
        self.tokens.keep_slots(kept, exactly)
        self.factors.keep_slots(stays.to(kept.device), exactly)
        self.spans = [[count for count in counts if count] for counts in left]

    def _inside(self, kept: Kept) -> Kept:
        """Of slots (batch, kv_heads, slots) those that hold an encoded token."""
        return kept & (torch.arange(kept.shape[-1], device=kept.device) < self.tokens.row_lengths[:, None, None])

    def select_encoded(self, sequences: Tensor) -> None:
        """Blocks of these sequences."""
        self.tokens.select_rows(sequences)
        self.factors.select_rows(sequences)
        self.spans = [self.spans[sequence] for sequence in sequences.tolist()]

    def copy_encoded(self, other: Self) -> None:
        """Copies of all blocks."""
        other.tokens, other.factors, other.spans = self.tokens.copy(), self.factors.copy(), list(self.spans)

    # ------------------------------------------------------------------------------------------------ reading

    def stretches(self) -> Iterator[tuple[int, int, Tensor]]:
        """First token and last + 1 of stretches in which no sequence needs two T_S, and those, (batch, j, j) in float16.

        A sequence that has no such tokens gets any.
        """
        ends, factors = [list(accumulate(spans)) for spans in self.spans], self.factors.planes["factor"]
        slots = self.factors.capacity[:, 0]
        firsts = (slots.cumsum() - slots).tolist()
        for start, end in pairwise(sorted({0, *(place for row in ends for place in row)})):
            numbers = [first + sum(place <= start for place in row) for first, row in zip(firsts, ends, strict=True)]
            yield start, end, torch.stack([factors[min(number, len(factors) - 1)] for number in numbers])

    def whole(self, start: int, end: int, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
        """T_L of these tokens as whole numbers, (batch, kv_heads, n, dim), some at a time: first, last + 1, and those.

        Rows that have fewer tokens end in anything.
        """
        bits, width, first = self.codec.bits, self.heads * self.dim, self.tokens.row_offsets[:, None]
        plane, top = self.tokens.planes["code"], 2 ** (self.codec.bits - 1) - 1
        for low in range(start, end, BLOCK):
            high = min(low + BLOCK, end)
            if self.tokens.uniform:
                codes = self.tokens.dense("code")[:, 0, low:high]
            else:
                codes = plane[(first + torch.arange(low, high, device=plane.device)).clamp(max=len(plane) - 1)]
            numbers = unpack(codes, bits, width).to(dtype).sub_(top)
            yield low, high, numbers.unflatten(-1, (self.heads, self.dim)).transpose(1, 2)

    def steps(self, dtype: torch.dtype) -> Tensor:
        """Of all encoded tokens, (batch, 1, 1, 1, longest), 0 beyond a row's end."""
        steps = self.tokens.dense("scale")[:, 0]
        inside = torch.arange(steps.shape[1], device=steps.device) < self.tokens.row_lengths[:, None]
        return steps.masked_fill(~inside, 0).to(dtype)[:, None, None, None]

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Some tokens at a time."""
        steps = self.steps(self._exact)[:, 0, 0, 0, :, None, None]
        for start, end, small in self.stretches():
            for low, high, whole in self.whole(start, end, self._exact):
                left = whole.transpose(1, 2) * steps[:, low:high]  # (batch, n, kv_heads, dim), as runs may cross heads
                decoded = left.reshape(len(left), -1, self.codec.channels) @ small.to(self._exact)
                yield low, decoded.view(left.shape).transpose(1, 2)

    @property
    def _folds(self) -> bool:
        """Whether T_S can be moved to the other factor of a product: no run of channels crosses heads."""
        return self.dim % self.codec.channels == 0

    def dots_encoded(self, queries: Queries, place: Place | None) -> Attention:
        """Queries are turned by T_S, instead of keys, unless keys must be rotated."""
        if place is not None or not self._folds:
            return super().dots_encoded(queries, place)
        found = []
        for start, end, small in self.stretches():
            turned = self._turned(queries, small.mT).flatten(2, 3)
            found += [turned @ whole.mT for _, _, whole in self.whole(start, end, queries.dtype)]
        return torch.cat(found, 3).unflatten(2, queries.shape[2:4]) * self.steps(queries.dtype)

    def mix_encoded(self, weights: Attention) -> Outputs:
        """Sums of T_L are turned by T_S, instead of values."""
        if not self._folds:
            return super().mix_encoded(weights)
        steps, shape = self.steps(weights.dtype), (*weights.shape[:4], self.dim)
        own = (weights[..., : steps.shape[-1]] * steps).flatten(2, 3)  # of a row's own tokens alone
        total = weights.new_zeros(shape)
        for start, end, small in self.stretches():
            parts = [own[..., low:high] @ whole for low, high, whole in self.whole(start, end, weights.dtype)]
            total += self._turned(torch.stack(parts).sum(0).view(shape), small)
        return total

    def _turned(self, numbers: Tensor, factor: Tensor) -> Tensor:
        """Runs of j channels times the sequence's factor: (batch, kv_heads, group, queries, dim) by (batch, j, j)."""
        runs = numbers.reshape(len(numbers), -1, self.codec.channels) @ factor.to(numbers.dtype)
        return runs.view(numbers.shape)

    # ------------------------------------------------------------------------------------------------- memory

    def parts(self) -> dict[str, int]:
        """Codes, steps of tokens, and T_S."""
        return {kind: self.tokens.bytes_of(name) for name, kind in KINDS.items()} | {"factors": self.factors.bytes_of("factor")}

    @property
    def indices(self) -> list[Tensor]:
        """Of all parts."""
        return [*super().indices, *self.tokens.indices, *self.factors.indices]

    def row_bytes(self) -> np.ndarray:
        """Of each sequence."""
        tokens, factors = (planes.capacity[:, 0] * planes.slot_bytes for planes in (self.tokens, self.factors))
        return tokens + factors


@register_codec("decoquant")
@dataclass(frozen=True)
class DecoQuant(Codec):
    """Factors of blocks, the large one in integers of `bits`.

    bits      of a code, 2 to 8
    channels  j, the width of a run; must divide kv_heads * head_dim
    block     decoded tokens that stay in full precision until so many are there; each turn's rest is a block at its end
    rope      post: keys as attention needs them; pre: keys without their rotation, which is put back when they are read (the
              paper's code does the one in its few-shot tests and the other in its LAMBADA tests)

    Bits per number of a block of T tokens: bits + 16 / D + 16 * channels**2 / (T * D), D = kv_heads * head_dim.
    """

    bits: int = 4
    channels: int = 16
    block: int = 1024
    rope: Literal["post", "pre"] = "post"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in BITS:
            raise CodecError(f"codec {self.name}: bits={self.bits}: use {BITS[0]} to {BITS[-1]}")
        for name in ("channels", "block"):
            if not getattr(self, name):
                raise CodecError(f"codec {self.name}: {name}=0: use at least 1")

    def sides(self, layer_idx: int, keys: Tensor, values: Tensor, kernels: Kernels) -> tuple[DecoSide, DecoSide]:
        """Both alike. Raises CodecError if `channels` does not divide what heads have together."""
        self._check_widths(*(like.shape[1] * like.shape[3] for like in (keys, values)))
        return DecoSide(keys, self), DecoSide(values, self)

    def _check_widths(self, keys: int, values: int) -> None:
        common = math.gcd(keys, values)
        if common % self.channels:
            fits = max(j for j in range(1, min(self.channels, common) + 1) if common % j == 0)
            raise CodecError(
                f"codec {self.name}: channels={self.channels}: a layer's heads together have {keys} numbers in a token's key "
                f"and {values} in its value, and {self.channels} does not divide both: use channels={fits}"
            )

    def bits_of(self, side: str, dim: int, itemsize: int) -> float:
        """Of a token in a full block of a layer whose heads have `dim` numbers together; too many for one head's `dim`."""
        return self.bits + 16 / dim + 16 * self.channels**2 / (self.block * dim)

    def fitted(self, layer_idx: int, layer: LayerGeometry) -> LayerGeometry:
        """With steps and T_S shared by all heads. Raises CodecError if `channels` does not divide what they have together."""
        widths = layer.num_kv_heads * layer.key_dim, layer.num_kv_heads * layer.value_dim
        self._check_widths(*widths)
        keys, values = (self.bits_of("", width, 0) / 8 for width in widths)
        return dataclasses.replace(layer, key_itemsize=keys, value_itemsize=values)

    @property
    def joint(self) -> bool:
        """Heads share factors and steps."""
        return True

    @property
    def pre_rope(self) -> bool:
        """By `rope`."""
        return self.rope == "pre"

    @property
    def label(self) -> str:
        """decoquant4, decoquant2, and what else isn't a default."""
        return super().label.replace(f" bits={self.bits}", "").replace(self.name, f"{self.name}{self.bits}", 1)
