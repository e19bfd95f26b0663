"""Slow, plain references of what all codecs of keys and values share, and of the KIVI and int-k caches.

One layer, one sequence; numbers are (heads, tokens, d) with KV heads first.  Arithmetic is float32, or float64 where the
numbers are float64, one operation at a time, so that codes, scales and zeros can be compared bit for bit.  "Half" is IEEE
float16.  Nothing is shared with the package under test.

A *unit* is what is encoded together in one head: one token (axis "token") or `group` tokens (axis "channel").
A *group* is the numbers that share a scale and a zero: up to `group` channels of one token, or `group` tokens of one channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

HALF_MAX = 65504.0

CODECS: dict[str, dict] = {
    "kivi2": {"bits": 2, "group": 32, "residual": 128, "key_axis": "channel", "value_axis": "token"},
    "kivi4": {"bits": 4, "group": 32, "residual": 128, "key_axis": "channel", "value_axis": "token"},
    "int4": {"bits": 4, "group": 32, "residual": 0, "key_axis": "token", "value_axis": "token"},
    "int8": {"bits": 8, "group": 32, "residual": 0, "key_axis": "token", "value_axis": "token"},
}


def working(x) -> np.ndarray:
    """float64 stays as it is; everything else becomes float32."""
    x = np.asarray(x)
    return x if x.dtype == np.float64 else x.astype(np.float32)


# ------------------------------------------------------------------------------------------------ the quantiser


def half_below(x) -> np.float16:
    """The largest half that is not above x; x is clamped to the finite halves first. NaN is an error."""
    exact = min(max(float(x), -HALF_MAX), HALF_MAX)
    if math.isnan(float(x)):
        raise ValueError("NaN has no half below it")
    half = np.float16(exact)
    while float(half) > exact:
        half = np.nextafter(half, np.float16(-np.inf))
    while float(half) < exact and float(np.nextafter(half, np.float16(np.inf))) <= exact:
        half = np.nextafter(half, np.float16(np.inf))
    return half


def half_above(x) -> np.float16:
    """The smallest half that is not below x; x is clamped to the finite halves first. NaN is an error."""
    return np.float16(-half_below(-float(x)))


def affine_group(numbers, bits: int) -> tuple[np.ndarray, np.float16, np.float16]:
    """Codes (ints in 0 .. 2^bits - 1), scale and zero of one group of numbers."""
    if bits not in (1, 2, 3, 4, 5, 6, 7, 8, 16):
        raise ValueError(f"bits must be 1 to 8 or 16, not {bits}")
    numbers = working(numbers)
    kind = numbers.dtype.type
    n = kind(2**bits - 1)
    zero = half_below(min(numbers))
    lo = kind(zero)
    step = (max(numbers) - lo) / n
    scale = half_above(step)
    if scale == 0:
        scale = np.float16(1)
    codes = [int(min(max(np.rint((x - lo) / kind(scale)), kind(0)), n)) for x in numbers]
    return np.array(codes), scale, zero


def affine_decode(codes, scale: np.float16, zero: np.float16, kind=np.float32) -> np.ndarray:
    """The numbers that the codes of one group stand for, in float32 (or `kind`)."""
    return np.array([kind(code) * kind(scale) + kind(zero) for code in codes], dtype=kind)


def pack_bits(codes, bits: int) -> bytes:
    """The byte stream of one unit's codes: number i takes bits i * bits onwards, least significant first; spare bits are 0."""
    stream = bytearray(math.ceil(len(codes) * bits / 8))
    for i, code in enumerate(codes):
        for b in range(bits):
            place = i * bits + b
            if int(code) & (1 << b):
                stream[place // 8] |= 1 << (place % 8)
    return bytes(stream)


# -------------------------------------------------------------------------------------------------------- units


@dataclass
class Unit:
    """What is stored for tokens start .. stop - 1."""

    start: int
    stop: int
    codes: np.ndarray  # (heads, tokens, d) ints
    scales: np.ndarray  # (heads, groups) half; groups in the order of `places_of_groups`
    zeros: np.ndarray  # (heads, groups) half
    streams: list[bytes]  # per head, the packed codes
    decoded: np.ndarray  # (heads, tokens, d)


def places_of_groups(tokens: int, d: int, axis: str, group: int) -> list[list[tuple[int, int]]]:
    """The (token, channel) places of each group of a unit of one head."""
    if axis == "token":
        starts = [(t, c) for t in range(tokens) for c in range(0, d, group)]
        return [[(t, i) for i in range(c, min(c + group, d))] for t, c in starts]
    return [[(t, c) for t in range(tokens)] for c in range(d)]


def encode_unit(x, bits: int, axis: str, group: int, start: int = 0) -> Unit:
    """Encodes one unit, x (heads, tokens, d); axis "token": one token; axis "channel": `group` tokens."""
    x = working(x)
    heads, tokens, d = x.shape
    assert tokens == (1 if axis == "token" else group)
    groups = places_of_groups(tokens, d, axis, group)
    codes, decoded = np.zeros(x.shape, dtype=int), np.zeros_like(x)
    scales = np.zeros((heads, len(groups)), dtype=np.float16)
    zeros = np.zeros((heads, len(groups)), dtype=np.float16)
    for h in range(heads):
        for number, places in enumerate(groups):
            found, scale, zero = affine_group(np.array([x[h, t, c] for t, c in places]), bits)
            scales[h, number], zeros[h, number] = scale, zero
            back = affine_decode(found, scale, zero, x.dtype.type)
            for (t, c), code, value in zip(places, found, back, strict=True):
                codes[h, t, c], decoded[h, t, c] = code, value
    streams = [pack_bits([codes[h, t, c] for t in range(tokens) for c in range(d)], bits) for h in range(heads)]
    return Unit(start, start + tokens, codes, scales, zeros, streams, decoded)


# ---------------------------------------------------------------------------------------------------- schedules


def ready(axis: str, group: int, residual: int, pending: int) -> tuple[int, int]:
    """How many of the oldest `pending` full-precision tokens are encoded now, and in units of how many."""
    if axis == "token":  # slide
        return max(0, pending - residual), 1
    if residual < group or residual % group:
        raise ValueError("axis channel needs a residual that is a multiple of the group, and not 0")
    return pending // residual * residual, group  # flush


def sealed(axis: str, group: int, residual: int, events: list[tuple[str, int]]) -> list[list[tuple[int, int]]]:
    """Per event, ("turn", n) or ("step", 1): the units (start, stop) that are encoded at its end."""
    seen, done, result = 0, 0, []
    for kind, n in events:
        assert kind == "turn" or n == 1
        seen += n
        now, size = ready(axis, group, residual, seen - done)
        result.append([(start, start + size) for start in range(done, done + now, size)])
        done += now
    return result


def int_residual(axis: str, group: int, residual: int) -> int:
    """The residual that int-k works with: its setting, or with axis "channel" at least one group, and whole groups."""
    return residual if axis == "token" else math.ceil(max(residual, group) / group) * group


# ---------------------------------------------------------------------------------------------------- the cache


def attention(queries, keys, values, scaling: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Causal softmax attention of the newest m tokens, in float64.

    queries (H, m, d), keys (heads, T, d), values (heads, T, dv); returns out (H, m, dv) and weights (H, m, T).
    """
    queries, keys, values = (np.asarray(x, dtype=np.float64) for x in (queries, keys, values))
    num_heads, m, d = queries.shape
    heads, length, _ = keys.shape
    scaling = d**-0.5 if scaling is None else scaling
    out, weights = np.zeros((num_heads, m, values.shape[2])), np.zeros((num_heads, m, length))
    for h in range(num_heads):
        kv_head = h // (num_heads // heads)
        for i in range(m):
            seen = range(length - m + i + 1)
            logits = [scaling * float(np.dot(queries[h, i], keys[kv_head, t])) for t in seen]
            shares = [math.exp(logit - max(logits)) for logit in logits]
            for t in seen:
                weights[h, i, t] = shares[t] / sum(shares)
                out[h, i] += weights[h, i, t] * values[kv_head, t]
    return out, weights


@dataclass
class Side:
    """The keys or the values: encoded units, then the newest tokens in full precision."""

    bits: int
    axis: str
    group: int
    residual: int
    units: list[Unit] = field(default_factory=list)
    full: list[np.ndarray] = field(default_factory=list)  # one (heads, d) per token

    @property
    def num_encoded(self) -> int:
        """Tokens that are encoded: 0 .. num_encoded - 1."""
        return self.units[-1].stop if self.units else 0

    @property
    def full_positions(self) -> list[int]:
        """The tokens in full precision."""
        return list(range(self.num_encoded, self.num_encoded + len(self.full)))

    def held(self) -> np.ndarray:
        """What is attended to, (heads, T, d): decoded numbers, then those in full precision."""
        return np.concatenate([unit.decoded for unit in self.units] + [x[:, None] for x in self.full], axis=1)

    def stored(self, name: str) -> np.ndarray:
        """All units' "codes" (heads, encoded tokens, d), or "scales" or "zeros" (heads, units, groups of a unit)."""
        parts = [getattr(unit, name) for unit in self.units]
        return np.concatenate(parts, axis=1) if name == "codes" else np.stack(parts, axis=1)

    def insert(self, x) -> None:
        """New tokens, x (heads, n, d), in full precision."""
        x = working(x)
        self.full += [x[:, t] for t in range(x.shape[1])]

    def seal(self) -> None:
        """Encodes what the schedule says, at the end of an event."""
        now, size = ready(self.axis, self.group, self.residual, len(self.full))
        for _ in range(now // size):
            x = np.stack(self.full[:size], axis=1)
            self.units.append(encode_unit(x, self.bits, self.axis, self.group, self.num_encoded))
            self.full = self.full[size:]


class NaiveCodecCache:
    """The kivi or int cache of one layer and one sequence; keys come as they are stored, rotated or not."""

    def __init__(self, bits: int, group: int, residual: int, key_axis: str, value_axis: str, scaling: float | None = None):
        self.keys = Side(bits, key_axis, group, residual)
        self.values = Side(bits, value_axis, group, residual)
        self.scaling = scaling

    def attend(self, queries) -> np.ndarray:
        """Attention of the newest m tokens, queries (H, m, d), over all that is held now; (H, m, dv)."""
        return attention(queries, self.keys.held(), self.values.held(), self.scaling)[0]

    def event(self, kind: str, keys, values, queries=None) -> np.ndarray | None:
        """A "turn" or a "step": insert (heads, n, d), attend where there are queries, then encode."""
        assert kind == "turn" or (kind == "step" and np.shape(keys)[1] == 1)
        self.keys.insert(keys)
        self.values.insert(values)
        out = None if queries is None else self.attend(queries)
        self.keys.seal()
        self.values.seal()
        return out
