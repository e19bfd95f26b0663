"""A slow, plain reference of QAQ: bits per token from how much attention it gets, outliers kept exactly.

One layer, one sequence.  A *row* is what has thresholds of its own: a KV head (level "head") or the whole layer (level
"layer").  A *group* is one token of a row: d numbers, or heads * d numbers, head by head.  The formulas of bits are evaluated
in float64 from float32 ranges; near a whole number another precision may say one bit more or less (`wanted` shows how near).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from naive_codecs import HALF_MAX, affine_decode, affine_group, attention, working


@dataclass(frozen=True)
class Settings:
    """The codec's settings; `spread` says whose range counts when bits are computed anew."""

    bits_min: int = 1
    bits_max: int = 4
    error_keys: float = 3.0
    error_values: float = 3.0
    window: int = 5
    q_norm: float = 300.0
    outliers: float = 0.01
    level: str = "head"
    formula: str = "paper"
    dynamic: bool = False
    promote: bool = False
    spread: str = (
        "first"  # "first": of the exact numbers; "held": of the decoded ones; "scale": all that their codes could span
    )


# ----------------------------------------------------------------------------------------------------- outliers


def thresholds(numbers, outliers: float) -> tuple:
    """lo and hi of a row's first encoded numbers; `outliers` counts as the decimal number that it is written as, 0 as none."""
    if not outliers:
        return -math.inf, math.inf
    order = sorted(numbers)
    k = math.floor(Fraction(str(outliers)) / 2 * len(order))
    return order[k], order[len(order) - 1 - k]


def outlier_places(numbers, lo, hi) -> list[int]:
    """Indices of the numbers outside lo .. hi."""
    return [i for i, x in enumerate(numbers) if x < lo or x > hi]


def value_range(numbers, outside: list[int]) -> float:
    """max - min of the numbers that are no outliers, in their own precision; 0 if there are none."""
    inliers = [x for i, x in enumerate(numbers) if i not in outside]
    return float(max(inliers) - min(inliers)) if inliers else 0.0


# --------------------------------------------------------------------------------------------------------- bits


def wanted(side: str, spread: float, share: float, seen: int, s: Settings) -> float:
    """The formula's bits before they are rounded up and clamped; -inf where the range or, for values, the attention is 0.

    side "keys" or "values", spread the group's range, share its S_t, seen the sequence's tokens T.
    """
    if spread == 0 or (side == "values" and share == 0):
        return -math.inf
    seen = max(seen, 2)
    if side == "values":
        sigma = s.error_values / (math.sqrt(seen) * share)
    else:
        sigma = math.sqrt(math.log(seen**3 / (seen - 1) * s.error_keys**2 + 1) / s.q_norm)
    if sigma == 0:
        return math.inf
    if s.formula == "paper":
        return math.log2(spread / (2 * math.sqrt(3) * sigma))
    return math.log2(spread / (2 * math.sqrt(12) * sigma) + 1)  # e = sqrt(12) * sigma for keys and for values


def token_bits(side: str, spread: float, share: float, t: int, seen: int, s: Settings) -> int:
    """Bits of token t; the newest window - 1 have bits_max whatever their range."""
    if t > seen - s.window:
        return s.bits_max
    bits = wanted(side, spread, share, seen, s)
    return math.ceil(min(max(bits, s.bits_min), s.bits_max))


def shares(rows: list[np.ndarray], seen: int, heads: int, level: str) -> np.ndarray:
    """S_t (rows of the level, T): the most attention that each token got in these rows, each (H, tokens it could see)."""
    result = np.zeros((heads if level == "head" else 1, seen))
    for row in rows:
        group = len(row) // len(result)
        for h in range(len(row)):
            for t in range(row.shape[1]):
                result[h // group, t] = max(result[h // group, t], row[h, t])
    return result


# ------------------------------------------------------------------------------------------------------- groups


@dataclass
class Group:
    """What is stored for one token of one row."""

    bits: int
    codes: list[int]  # empty with 0 bits; 0 at outliers
    scale: np.float16  # 1 where nothing uses it
    zero: np.float16
    outliers: dict[int, np.floating]  # place in the group -> the exact number
    size: int


def encode_group(numbers, outside: list[int], bits: int) -> Group:
    """The numbers of one group, those at `outside` exactly and the others with `bits` bits each."""
    numbers = working(numbers)
    kept = {i: numbers[i] for i in outside}
    inliers = [i for i in range(len(numbers)) if i not in kept]
    codes = [0] * len(numbers) if bits else []
    scale, zero = np.float16(1), np.float16(0)
    if inliers and bits:
        found, scale, zero = affine_group(numbers[inliers], bits)
        for i, code in zip(inliers, found, strict=True):
            codes[i] = int(code)
    elif inliers:
        middle = (min(numbers[inliers]) + max(numbers[inliers])) / numbers.dtype.type(2)
        zero = np.float16(min(max(middle, -HALF_MAX), HALF_MAX))
    return Group(bits, codes, scale, zero, kept, len(numbers))


def decode_group(group: Group, kind=np.float32) -> np.ndarray:
    """The numbers that are attended to."""
    numbers = affine_decode(group.codes or [0] * group.size, group.scale, group.zero, kind)
    for i, value in group.outliers.items():
        numbers[i] = value
    return numbers


# -------------------------------------------------------------------------------------------------------- cache


@dataclass
class Side:
    """The keys or the values, per row of the level and token; `exact` is what the copy on the CPU would hold."""

    name: str
    settings: Settings
    kind: type = np.float32
    limits: list[tuple] = field(default_factory=list)
    groups: list[list[Group]] = field(default_factory=list)
    exact: list[list[np.ndarray]] = field(default_factory=list)

    def split(self, x) -> np.ndarray:
        """(heads, n, d) as (rows of the level, n, numbers of a group)."""
        x = working(x)
        return x if self.settings.level == "head" else np.concatenate(list(x), axis=1)[None]

    def held(self, heads: int) -> np.ndarray:
        """The decoded numbers (heads, T, d)."""
        rows = np.array([[decode_group(group, self.kind) for group in row] for row in self.groups])
        if self.settings.level == "head":
            return rows
        d = rows.shape[2] // heads
        return np.stack([rows[0, :, h * d : (h + 1) * d] for h in range(heads)])

    def bits(self) -> np.ndarray:
        """Bits of each token, (rows of the level, T)."""
        return np.array([[group.bits for group in row] for row in self.groups])

    def encode(self, x, share: np.ndarray, seen: int) -> None:
        """The newest tokens x (heads, n, d); share (rows, T) with them included."""
        rows = self.split(x)
        if not self.groups:
            self.kind = rows.dtype.type
            self.limits = [thresholds(list(row.flatten()), self.settings.outliers) for row in rows]
            self.groups, self.exact = [[] for _ in rows], [[] for _ in rows]
        for r, row in enumerate(rows):
            for i, numbers in enumerate(row):
                t = seen - len(row) + i
                outside = outlier_places(numbers, *self.limits[r])
                bits = token_bits(self.name, value_range(numbers, outside), share[r, t], t, seen, self.settings)
                self.groups[r].append(encode_group(numbers, outside, bits))
                self.exact[r].append(numbers)

    def revise(self, share: np.ndarray, seen: int) -> None:
        """Demotes, and promotes where that is allowed, by bits that are computed anew."""
        s = self.settings
        for r, row in enumerate(self.groups):
            for t, group in enumerate(row):
                held, exact, outside = decode_group(group, self.kind), self.exact[r][t], list(group.outliers)
                if s.spread == "scale":
                    spread = float(group.scale) * (2**group.bits - 1)
                else:
                    spread = value_range(exact if s.spread == "first" else held, outside)
                bits = token_bits(self.name, spread, share[r, t], t, seen, s)
                if bits < group.bits:
                    row[t] = encode_group(held, outside, bits)
                elif bits > group.bits and s.promote:
                    row[t] = encode_group(exact, outside, bits)


class NaiveQaqCache:
    """The qaq cache of one layer and one sequence."""

    def __init__(self, settings: Settings, scaling: float | None = None):
        self.settings, self.scaling = settings, scaling
        self.keys, self.values = Side("keys", settings), Side("values", settings)
        self.rows: list[np.ndarray] = []  # the last `window` attention rows, each (H, tokens)
        self.seen = 0

    def event(self, kind: str, keys, values, queries) -> np.ndarray:
        """A "turn" or a "step": attend (new tokens exact, older ones decoded), then encode; out (H, n, dv)."""
        keys, values = working(keys), working(values)
        heads, n, _ = keys.shape
        assert kind == "turn" or (kind == "step" and n == 1)
        all_keys = np.concatenate([self.keys.held(heads), keys], axis=1) if self.seen else keys
        all_values = np.concatenate([self.values.held(heads), values], axis=1) if self.seen else values
        out, weights = attention(queries, all_keys, all_values, self.scaling)
        self.rows = (self.rows + [weights[:, i] for i in range(n)])[-self.settings.window :]
        self.seen += n
        share = shares(self.rows, self.seen, heads, self.settings.level)
        for side, x in ((self.keys, keys), (self.values, values)):
            side.encode(x, share, self.seen)
            if kind == "step" and self.settings.dynamic:
                side.revise(share, self.seen)
        return out
