"""A slow, plain reference of ThinK: one layer, one sequence, alone or before a kivi or int codec.

At the end of a sequence's first turn each KV head chooses channels of keys by queries and keys, once and for all.  What is
stored of a key from then on are these channels.  Keys and queries come as they attend (rotated).

Numbers are (heads, tokens, d) with KV heads first; query head h reads KV head h // g.  A token's *position* is its place in the
order of arrival, from 0.  Scores are float32, or float64 where the numbers are float64, one operation at a time.  KV heads
may hold different tokens, so each has its own sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from naive_codecs import Side, Unit, attention, encode_unit, ready, working

PLAIN = 0  # in place of bits: what is stored keeps its numbers as they are

# ----------------------------------------------------------------------------------------------------- channels


def num_dropped(d: int, drop: float) -> int:
    """floor(d * drop), with drop the decimal number as written."""
    return math.floor(Fraction(str(drop)) * d)


def channel_scores(queries, keys, obs_window: int = 32) -> np.ndarray:
    """Scores (d,) of one KV head, by the last `obs_window` queries of its group (g, n, d) and all keys (T, d) that it holds."""
    queries, keys = working(queries)[:, -obs_window:], working(keys)
    kind = keys.dtype.type
    g, n, d = queries.shape
    scores = np.zeros(d, dtype=kind)
    for j in range(d):
        looks = kind(0)
        for h in range(g):
            squares = kind(0)
            for t in range(n):
                squares += queries[h, t, j] * queries[h, t, j]
            looks += squares / kind(n)
        held = kind(0)
        for key in keys:
            held += key[j] * key[j]
        scores[j] = looks / kind(g) * (held / kind(len(keys)))
    return scores


def chosen_channels(scores, drop: float) -> list[int]:
    """The channels that stay, ascending: all but the floor(d * drop) of lowest score; of equal ones the later goes first."""
    lowest_first = sorted(range(len(scores)), key=lambda j: (scores[j], -j))
    return sorted(lowest_first[num_dropped(len(scores), drop) :])


# -------------------------------------------------------------------------------------------------------- sides


@dataclass
class HeadSide(Side):
    """Keys or values of one KV head, (1, n, d): of tokens that are stored some channels, of the newest all of them."""

    channels: list[int] | None = None  # None: all
    width: int = 0

    @property
    def num_encoded(self) -> int:
        """Tokens that are stored; they are the oldest."""
        return sum(unit.decoded.shape[1] for unit in self.units)

    def held(self) -> np.ndarray:
        """What is attended to, (1, T, d): zeros in channels that were left out."""
        stored = np.zeros((1, self.num_encoded, self.width), dtype=self.kind)
        start = 0
        for unit in self.units:
            for t in range(unit.decoded.shape[1]):
                for place, channel in enumerate(self.channels or range(self.width)):
                    stored[0, start, channel] = unit.decoded[0, t, place]
                start += 1
        return np.concatenate([stored, *[x[:, None] for x in self.full]], axis=1)

    def insert(self, x) -> None:
        """New tokens, x (1, n, d), with all channels in full precision."""
        super().insert(x)
        self.width, self.kind = np.shape(x)[2], working(x).dtype

    def seal(self, turn_ends: bool = True) -> None:
        """Stores what the schedule says; plain: at a turn's end all tokens but the last `residual`."""
        if self.bits == PLAIN:
            now, size = max(0, len(self.full) - self.residual) if turn_ends else 0, 1
        else:
            now, size = ready(self.axis, self.group, self.residual, len(self.full))
        for _ in range(now // size):
            x = np.stack(self.full[:size], axis=1)
            self.units.append(self.stored_unit(x if self.channels is None else x[:, :, self.channels]))
            self.full = self.full[size:]

    def stored_unit(self, x: np.ndarray) -> Unit:
        """One unit of x (1, tokens, r)."""
        start = self.num_encoded
        if self.bits == PLAIN:
            nothing = np.zeros((1, 0))
            return Unit(start, start + x.shape[1], nothing, nothing, nothing, [b""], x)
        return encode_unit(x, self.bits, self.axis, self.group, start)

    def keep(self, places: list[int]) -> None:
        """Only the tokens at these places of `held` stay; ValueError where a part of a unit would leave."""
        stays, start, units = set(places), 0, []
        for unit in self.units:
            tokens = unit.decoded.shape[1]
            inside = [i in stays for i in range(start, start + tokens)]
            if any(inside) and not all(inside):
                raise ValueError("tokens that were encoded together leave together")
            if all(inside):
                units.append(unit)
            start += tokens
        self.full = [x for i, x in enumerate(self.full, start) if i in stays]
        self.units = units

    def counts(self) -> dict[str, int]:
        """Numbers held, by kind."""
        return {
            "full": len(self.full) * self.width,
            "plain": sum(unit.decoded.size for unit in self.units) if self.bits == PLAIN else 0,
            "codes": sum(unit.codes.size for unit in self.units),
            "scales": sum(unit.scales.size for unit in self.units),
            "zeros": sum(unit.zeros.size for unit in self.units),
            "code_bytes": sum(len(stream) for unit in self.units for stream in unit.streams),
        }


def make_sides(codec: dict | None, residual: int) -> tuple[HeadSide, HeadSide]:
    """Keys and values of one KV head; codec as in `naive_codecs.CODECS`, or None: plain, with this residual."""
    if codec is None:
        return HeadSide(PLAIN, "token", 1, residual), HeadSide(PLAIN, "token", 1, residual)
    bits, group, residual = codec["bits"], codec["group"], codec["residual"]
    return HeadSide(bits, codec["key_axis"], group, residual), HeadSide(bits, codec["value_axis"], group, residual)


def keep_only(kept: list[list[int]], positions: list[list[int]], *sides: list[HeadSide]) -> None:
    """Per KV head, only the tokens at these positions stay; `positions` (of what is held) follows."""
    for kv_head, stays in enumerate(kept):
        places = [i for i, position in enumerate(positions[kv_head]) if position in stays]
        assert len(places) == len(stays), "what is not held can't stay"
        for side in sides:
            side[kv_head].keep(places)
        positions[kv_head] = [positions[kv_head][i] for i in places]


def total(sides: list[HeadSide]) -> dict[str, int]:
    """The counts of all KV heads."""
    parts = [side.counts() for side in sides]
    return {kind: sum(part[kind] for part in parts) for kind in parts[0]}


# -------------------------------------------------------------------------------------------------------- cache


class NaiveThinkCache:
    """What one layer holds of one sequence; `codec` as in `naive_codecs.CODECS`, or None for ThinK alone.

    channels[kv_head] (None before the first turn's end), scores[kv_head] (d,), positions[kv_head] (what is held, in order),
    keys[kv_head] and values[kv_head] (HeadSide), weights[h] (n, T): the last event's attention of query head h.
    """

    def __init__(
        self,
        drop: float = 0.4,
        obs_window: int = 32,
        recent: int = 32,
        codec: dict | None = None,
        scaling: float | None = None,
    ):
        self.drop, self.obs_window, self.recent, self.codec, self.scaling = drop, obs_window, recent, codec, scaling
        self.channels: list[list[int]] | None = None
        self.scores: list[np.ndarray] = []
        self.keys: list[HeadSide] = []
        self.values: list[HeadSide] = []
        self.positions: list[list[int]] = []
        self.weights: list[np.ndarray] = []
        self.looks: list[np.ndarray] = []  # queries of the turn that goes on, one (H, n, d) per chunk
        self.seen = 0

    def event(self, kind: str, keys, values, queries, kept: list[list[int]] | None = None) -> np.ndarray:
        """A "turn", a "chunk" of one that goes on, or a "step": insert, attend, evict, choose channels, store; out (H, n, dv).

        keys, values (heads, n, d), queries (H, n, d); kept[kv_head]: positions that stay after attention (None: all).
        """
        n = np.shape(keys)[1]
        assert kind in ("turn", "chunk") or (kind == "step" and n == 1)
        self.insert(np.asarray(keys), np.asarray(values))
        out = self.attend(queries)
        if kept is not None:
            keep_only(kept, self.positions, self.keys, self.values)
        if kind != "step":
            self.looks.append(working(queries))
        if kind == "turn":
            if self.channels is None:
                self.choose(np.concatenate(self.looks, axis=1))
            self.looks = []
        if kind != "chunk" and self.channels is not None:
            self.seal(kind == "turn")
        return out

    def insert(self, keys: np.ndarray, values: np.ndarray) -> None:
        """New tokens, (heads, n, d), with all channels."""
        heads, n, _ = keys.shape
        if not self.keys:
            pairs = [make_sides(self.codec, self.recent) for _ in range(heads)]
            self.keys, self.values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            self.positions = [[] for _ in range(heads)]
        for kv_head in range(heads):
            self.keys[kv_head].insert(keys[kv_head : kv_head + 1])
            self.values[kv_head].insert(values[kv_head : kv_head + 1])
            self.positions[kv_head] += range(self.seen, self.seen + n)
        self.seen += n

    def attend(self, queries) -> np.ndarray:
        """Attention of the newest n tokens over all that is held, queries (H, n, d); (H, n, dv) in float64."""
        queries = np.asarray(queries)
        g = len(queries) // len(self.keys)
        out, self.weights = [], []
        for kv_head, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            group = queries[kv_head * g : (kv_head + 1) * g]
            outputs, weights = attention(group, keys.held(), values.held(), self.scaling)
            out += list(outputs)
            self.weights += list(weights)
        return np.stack(out)

    def choose(self, queries: np.ndarray) -> None:
        """The channels of each KV head, by the turn's queries (H, n, d) and all keys held."""
        g = len(queries) // len(self.keys)
        for kv_head, side in enumerate(self.keys):
            group = queries[kv_head * g : (kv_head + 1) * g]
            self.scores.append(channel_scores(group, side.held()[0], self.obs_window))
        self.channels = [chosen_channels(scores, self.drop) for scores in self.scores]
        for side, channels in zip(self.keys, self.channels, strict=True):
            side.channels = channels

    def seal(self, turn_ends: bool) -> None:
        """Stores what the schedule says; alone, values stay as they are."""
        for side in self.keys + ([] if self.codec is None else self.values):
            side.seal(turn_ends)

    def counts(self) -> dict[str, dict[str, int]]:
        """Numbers held over all KV heads: {"keys", "values"} by kind as in `HeadSide.counts`, and channels that were chosen."""
        chosen = sum(len(channels) for channels in self.channels or [])
        return {"keys": total(self.keys), "values": total(self.values), "channels": {"chosen": chosen}}
