"""How much of a KV cache may be held: the one place where a ratio, a token count or bytes become tokens per KV head.

Knows the geometry of a cache (layers, heads, bytes), no model and no policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np


class BudgetError(ValueError):
    """A budget that cannot be: the message says what to change."""


@dataclass(frozen=True)
class LayerGeometry:
    """Sizes of one attention layer's cache: heads, dimensions, bytes of one number, and the sliding window, if any.

    Bytes of a number may be broken where a codec packs them.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    key_itemsize: int | float = 4
    value_itemsize: int | float = 4

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in this layer, over all KV heads."""
        return math.ceil(self.num_kv_heads * (self.key_dim * self.key_itemsize + self.value_dim * self.value_itemsize))


@dataclass(frozen=True)
class Budget:
    """What a cache may hold. At most one of `ratio`, `tokens`, `bytes`; none means no limit.

    ratio   share in (0, 1] of the prompt (`of="prompt"`; at a later turn, of all tokens seen; under `stream`, of the known
            text) or of prompt plus new tokens (`of="total"`, which needs `new_cache(max_new_tokens=...)`).
            B = max(1, floor(ratio * length)) for each sequence of a batch, pads not counted.
    tokens  tokens per KV head, at least 1.
    bytes   bytes of keys and values for each sequence, over all layers and heads.

    Raises BudgetError where a value cannot be.
    """

    ratio: float | None = None
    tokens: int | None = None
    bytes: int | None = None
    of: Literal["prompt", "total"] = "prompt"

    def __post_init__(self) -> None:
        given = [name for name in ("ratio", "tokens", "bytes") if getattr(self, name) is not None]
        if len(given) > 1:
            raise BudgetError(f"budget: give one of ratio, tokens and bytes, not {' and '.join(given)}")
        if self.of not in ("prompt", "total"):
            raise BudgetError(f"budget.of={self.of!r}: use 'prompt' or 'total'")
        if self.of == "total" and self.ratio is None:
            raise BudgetError("budget.of='total' goes with budget.ratio; tokens and bytes are absolute")
        if self.ratio is not None:
            _check_ratio(self.ratio)
        for name in ("tokens", "bytes"):
            _check_count(name, getattr(self, name))

    @property
    def unlimited(self) -> bool:
        """Whether there is no limit."""
        return self.ratio is None and self.tokens is None and self.bytes is None

    def resolve(
        self, lengths: Sequence[int], layers: Sequence[LayerGeometry], new_tokens: int | None = None
    ) -> list[int] | None:
        """Tokens per KV head and layer for each sequence, or None for no limit.

        lengths     tokens of each sequence that `ratio` is of (pads not counted)
        layers      geometry of every layer
        new_tokens  tokens still to come, for `of="total"`
        Raises BudgetError if `of="total"` lacks new_tokens, or if `bytes` hold no token.
        """
        if self.tokens is not None:
            return [self.tokens] * len(lengths)
        if self.bytes is not None:
            tokens = _tokens_in(self.bytes, layers)
            return None if tokens is None else [tokens] * len(lengths)
        if self.ratio is None:
            return None
        if self.of == "total":
            if new_tokens is None:
                raise BudgetError("budget.of='total' needs new_cache(max_new_tokens=...) to know the total")
            lengths = [length + new_tokens for length in lengths]
        ratio = exact_share(self.ratio)
        return [max(1, math.floor(ratio * int(length))) for length in lengths]


def exact_share(share: float) -> Fraction:
    """A share as it was written: 0.29 of 100 is 29, where binary floats say 28; 1 / 3 is a third."""
    return Fraction(str(share)).limit_denominator(10**6)


def apportion(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers near `shares` that sum exactly to `total`: largest remainder, ties to the lower index.

    `shares` must sum to `total` up to rounding error.
    """
    real = np.asarray(shares, dtype=np.float64)
    real = np.where(np.abs(real - np.rint(real)) < 1e-9, np.rint(real), real)
    whole = np.floor(real).astype(np.int64)
    missing = total - int(whole.sum())
    assert 0 <= missing <= len(real), f"shares {shares} do not sum to {total}"
    order = np.argsort(-(real - whole).round(9), kind="stable")
    whole[order[:missing]] += 1
    return whole.tolist()


def _check_ratio(ratio: object) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise BudgetError(f"budget.ratio={ratio!r}: use a number above 0 and at most 1, such as 0.2")


def _check_count(name: str, count: object) -> None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise BudgetError(f"budget.{name}={count!r}: use a whole number of at least 1")


def _tokens_in(limit: int, layers: Sequence[LayerGeometry]) -> int | None:
    """Largest B such that min(B, window) tokens in every layer take at most `limit` bytes; None where any B does."""

    def size(tokens: int) -> int:
        return sum(min(tokens, layer.window or tokens) * layer.token_bytes for layer in layers)

    if size(1) > limit:
        raise BudgetError(f"budget.bytes={limit} holds no token: one token in every layer takes {size(1)} bytes")
    if all(layer.window is not None for layer in layers):
        widest = max(layer.window or 0 for layer in layers)
        if size(widest) <= limit:
            return None
    low, high = 1, 2
    while size(high) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return low
