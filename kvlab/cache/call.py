"""The new tokens of one forward pass: where they stand, and which are pads. Made once, read by all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class CallKey:
    """What a call's tokens are made from. Equal keys mean the same forward pass: tensors and arrays by identity."""

    row_seen: np.ndarray
    tokens: int
    padding: Tensor | None
    token_ids: Tensor | None
    device: torch.device

    def same(self, other: CallKey) -> bool:
        """Whether both are of one forward pass (and one device)."""
        parts = ("row_seen", "padding", "token_ids")
        identical = all(getattr(self, part) is getattr(other, part) for part in parts)
        return identical and self.tokens == other.tokens and self.device == other.device


@dataclass(frozen=True)
class Call:
    """New tokens of a batch. Positions count a sequence's real tokens, so pads shift nothing.

    positions  (batch, tokens), -1 for pads
    newest     (batch, tokens): position of each row's newest real token once this one has come
    real       (batch, tokens) on the host, False for pads; None if there are none, so that no step asks the device
    seen_before, seen  (batch,) real tokens of each row before and after this call
    token_ids  (batch, tokens), where a policy needs them
    """

    positions: Tensor
    newest: Tensor
    real: np.ndarray | None
    seen_before: np.ndarray
    seen: np.ndarray
    token_ids: Tensor | None = None

    @classmethod
    def of(cls, seen: np.ndarray, tokens: int, padding: Tensor | None, token_ids: Tensor | None, device: torch.device) -> Call:
        """New tokens after `seen` (batch,). padding: (batch, tokens), False for pads, None if there are none."""
        base = torch.from_numpy(seen).to(device)[:, None]
        if padding is None:
            positions = base + torch.arange(tokens, device=device)
            return cls(positions, positions, None, seen, seen + tokens, token_ids)
        newest = base + padding.to(device).cumsum(1) - 1
        real = padding.cpu().numpy()
        return cls(torch.where(padding.to(device), newest, -1), newest, real, seen, seen + real.sum(1), token_ids)

    @property
    def tokens(self) -> int:
        """How many tokens, pads included."""
        return self.positions.shape[1]

    @cached_property
    def arrived(self) -> np.ndarray:
        """How many real tokens come into each row: (batch, 1)."""
        return (self.seen - self.seen_before)[:, None]

    @cached_property
    def nothing(self) -> Tensor:
        """(batch, 1) zeros, for what a token alone has none of."""
        return torch.zeros_like(self.positions[:, :1])

    @cached_property
    def first(self) -> bool:
        """Whether no row has seen anything before."""
        return not self.seen_before.any()

    @property
    def padded(self) -> bool:
        """Whether any of them is a pad."""
        return self.real is not None

    def part(self, start: int, end: int) -> Call:
        """Some of the tokens, as a call of their own."""
        if (start, end) == (0, self.tokens):
            return self
        now = slice(start, end)
        ids = None if self.token_ids is None else self.token_ids[:, now]
        if self.real is None:
            before, after = self.seen_before + start, self.seen_before + end
            return Call(self.positions[:, now], self.newest[:, now], None, before, after, ids)
        before = self.seen_before + self.real[:, :start].sum(1)
        real = self.real[:, now]
        some = None if real.all() else real
        return Call(self.positions[:, now], self.newest[:, now], some, before, before + real.sum(1), ids)
