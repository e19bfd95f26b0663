"""Numbers held as they came, of tokens that may have lost channels: what ends a chain where no codec takes fewer bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from kvlab.codecs.base import Codec
from kvlab.codecs.side import Side
from kvlab.kernels.dispatch import Kernels
from kvlab.kernels.packed import BLOCK
from kvlab.policies.base import Policy
from kvlab.rows import Counts, RowPlanes
from kvlab.shapes import Kept, PerHead

LEAVE = 16
"""Tokens that leave a sliding window together, since all that is held moves."""
ALL = 2**62
"""Tokens that wait where none is ever encoded."""


class PlainSide(Side):
    """Tokens that are encoded have `dim` numbers in the type in which they came.

    wait  tokens that keep all channels when a turn ends, and those decoded after it; None: each is encoded at once
    """

    def __init__(self, like: Tensor, wait: int | None) -> None:
        super().__init__(like)
        self.wait = wait
        self.tokens = RowPlanes.none(tuple(like.shape[:2]), {"x": (like.dtype, (self.dim,))}, like.device)

    @property
    def encoded(self) -> Counts:
        """Tokens encoded in each row."""
        return self.tokens.lengths

    def due(self, recent: Counts, turn_end: bool) -> Counts:
        """All at once, or at a turn's end all but those that wait."""
        if self.wait is None:
            return recent.copy()
        return np.maximum(recent - self.wait, 0) if turn_end else np.zeros_like(recent)

    def encode(self, tokens: Tensor, counts: Counts, limit: Counts | None) -> None:
        """Add tokens."""
        self.tokens.extend({"x": tokens}, counts, limit)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Some tokens of each row at a time."""
        dense, exact = self.tokens.dense("x"), torch.promote_types(self.dtype, torch.float32)
        for first in range(0, dense.shape[2], BLOCK):
            yield first, dense[:, :, first : first + BLOCK].to(exact)

    def parts(self) -> dict[str, int]:
        """Numbers of encoded tokens."""
        return {"numbers": self.tokens.bytes_of("x")}

    def row_bytes(self) -> np.ndarray:
        """Of each sequence."""
        return self.tokens.capacity.sum(1) * self.tokens.slot_bytes

    @property
    def indices(self) -> list[Tensor]:
        """Of both parts."""
        return [*super().indices, *self.tokens.indices]

    def select_encoded(self, sequences: Tensor) -> None:
        """Tokens of these sequences."""
        self.tokens.select_rows(sequences)

    def copy_encoded(self, other: Self) -> None:
        """Copies of all tokens."""
        other.tokens = self.tokens.copy()

    def may_keep(self, kept: Kept) -> bool:
        """Each token is by itself."""
        return True

    def droppable(self, first: Counts) -> Counts:
        """Some at a time."""
        return np.where(first >= self.encoded, first, first // LEAVE * LEAVE)

    def keep_encoded(self, kept: Kept, limit: Counts | None) -> None:
        """Drop tokens."""
        self.tokens.keep_slots(kept, limit)

    def vacate(self, slots: PerHead, rows: np.ndarray | None) -> None:
        """The row's last token takes the place of one that leaves."""
        self.tokens.vacate(slots, rows)


@dataclass(frozen=True)
class Plain(Codec):
    """Not registered, since it changes nothing by itself: `chain` puts it behind a codec of channels.

    wait  None: each token is encoded at once; a number: keys are when a turn ends, but for the newest `wait`, values never
    """

    wait: int | None = None

    def sides(self, layer_idx: int, keys: Tensor, values: Tensor, kernels: Kernels) -> tuple[PlainSide, PlainSide]:
        """Both alike, unless tokens wait."""
        return PlainSide(keys, self.wait), PlainSide(values, None if self.wait is None else ALL)

    @property
    def evictable(self) -> bool:
        """Unless tokens wait."""
        return self.wait is None

    @property
    def sheds(self) -> bool:
        """Each token is by itself."""
        return True

    @property
    def label(self) -> str:
        """Nothing to say."""
        return ""

    def check_policy(self, policy: Policy) -> None:
        """The chain that it ends says what can't be."""
