"""A slow, plain reference of KVSharer: which layers read another's cache, and what a shared cache gives and keeps.

A *pair* is (target, source) with source < target; a *map* is {target: source} with sources that hold a cache of their own.
The *readers* of a source are itself and then its targets, ascending.  Numbers are (heads, tokens, d) with KV heads first.
Float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from fractions import Fraction

import numpy as np

from naive_codecs import attention

Pair = tuple[int, int]

# --------------------------------------------------------------------------------------------------------- maps


def resolve(pairs: Iterable[Pair] | Mapping[int, int]) -> dict[int, int]:
    """The map that pairs come to, in whatever order: a source that is itself a target stands for its own source."""
    direct = dict(pairs)
    for target, source in direct.items():
        if source >= target:
            raise ValueError(f"layer {target} can't read layer {source}, which comes later")
    result = {}
    for target in sorted(direct):
        source = direct[target]
        while source in direct:
            source = direct[source]
        result[target] = source
    return result


def readers(sources: Mapping[int, int], source: int) -> list[int]:
    """Layers that read this one's cache, itself first."""
    resolved = resolve(sources)
    assert source not in resolved
    return [source] + sorted(target for target, layer in resolved.items() if layer == source)


def holders(sources: Mapping[int, int], num_layers: int) -> list[int]:
    """Layers that hold a cache."""
    return [layer for layer in range(num_layers) if layer not in sources]


def num_shared(drop: float, num_layers: int) -> int:
    """Layers that hold nothing: drop (a decimal number as written) of all, halves up."""
    return math.floor(Fraction(str(drop)) * num_layers + Fraction(1, 2))


# ------------------------------------------------------------------------------------------------------- search


def averages(texts: list[list]) -> list[np.ndarray]:
    """texts[i][layer] (heads, T, d), all texts of one length: the mean over texts, per layer."""
    result = []
    for layer in range(len(texts[0])):
        total = np.zeros(np.shape(texts[0][layer]))
        for text in texts:
            total += np.asarray(text[layer], dtype=np.float64)
        result.append(total / len(texts))
    return result


def norm(x: np.ndarray) -> float:
    """The Euclidean norm of all numbers."""
    return math.sqrt(sum(float(number) ** 2 for number in np.ravel(x)))


def apart(a, b, distance: str) -> float:
    """How far two layers' averaged keys, or values, (heads, T, d) are apart."""
    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    if distance == "flat":
        return norm(difference)
    assert distance == "tokens"
    norms = [norm(token) for head in difference for token in head]
    return sum(norms) / len(norms)


def distances(keys: list, values: list, distance: str = "flat") -> dict[Pair, float]:
    """keys[layer], values[layer] averaged: the distance of each (target, source) whose numbers are of equal shape."""
    result = {}
    for target in range(len(keys)):
        for source in range(target):
            if np.shape(keys[target]) == np.shape(keys[source]) and np.shape(values[target]) == np.shape(values[source]):
                key_part = apart(keys[target], keys[source], distance)
                result[target, source] = (key_part + apart(values[target], values[source], distance)) / 2
    return result


def ordered(apart: Mapping[Pair, float], order: str = "dissimilar", kinds: list[Hashable] | None = None) -> list[Pair]:
    """Pairs in the order they are tried: the lower target first where distances are equal, then the lower source.

    kinds[layer]: what layers must have in common to share at all (window, rotary kind, ...).
    """
    sign = {"dissimilar": -1, "similar": 1}[order]
    pairs = [pair for pair in apart if kinds is None or kinds[pair[0]] == kinds[pair[1]]]
    return sorted(pairs, key=lambda pair: (sign * apart[pair], *pair))


def cosine(a, b) -> float:
    """Of all numbers flattened."""
    a, b = np.ravel(np.asarray(a, dtype=np.float64)), np.ravel(np.asarray(b, dtype=np.float64))
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True)) / (norm(a) * norm(b))


def mean_cosine(states: list, others: list) -> float:
    """Mean over texts of the cosine of last hidden states."""
    return sum(cosine(a, b) for a, b in zip(states, others, strict=True)) / len(states)


def walk(
    pairs: list[Pair], similarity: Callable[[dict[int, int]], float], num_layers: int, threshold: float = 0.5
) -> list[Pair]:
    """The pairs that are accepted, in order, until half of the layers are targets."""
    accepted: list[Pair] = []
    for target, source in pairs:
        if len(accepted) == num_layers // 2:
            break
        if target in dict(accepted):
            continue
        if similarity(resolve([*accepted, (target, source)])) > threshold:
            accepted.append((target, source))
    return accepted


# ---------------------------------------------------------------------------------------------------- attention


def shared_attention(
    queries: list, keys: list, values: list, sources: Mapping[int, int], scaling: float | None = None
) -> list[np.ndarray]:
    """Per layer, queries (H, m, d) of the newest m tokens, keys and values (heads, T, d) of all: out (H, m, dv) per layer."""
    resolved = resolve(sources)
    outputs = []
    for layer, asked in enumerate(queries):
        source = resolved.get(layer, layer)
        outputs.append(attention(asked, keys[source], values[source], scaling)[0])
    return outputs


def joined(parts: list, heads: int) -> np.ndarray:
    """parts[reader] (H, ...), source first, as one layer's (readers * H, ...): readers side by side in each KV head's group."""
    parts = [np.asarray(part) for part in parts]
    rows = []
    for kv_head in range(heads):
        for part in parts:
            g = len(part) // heads
            rows += [part[kv_head * g + member] for member in range(g)]
    return np.stack(rows)


def parted(x, heads: int, num_readers: int) -> list[np.ndarray]:
    """What `joined` made one, per reader again."""
    g = len(x) // heads // num_readers
    places = [[(h * num_readers + reader) * g + i for h in range(heads) for i in range(g)] for reader in range(num_readers)]
    return [np.asarray(x)[some] for some in places]


def merged(weights: list, heads: int, group: str = "mean") -> np.ndarray:
    """weights[reader] (H, m, T), source first: each query's attention (heads, m, T), merged over all readers' query heads."""
    together = joined(weights, heads)
    size = len(together) // heads
    _, m, length = together.shape
    result = np.zeros((heads, m, length))
    for kv_head in range(heads):
        members = together[kv_head * size : (kv_head + 1) * size]
        for i in range(m):
            for t in range(length):
                numbers = [float(member[i, t]) for member in members]
                result[kv_head, i, t] = {
                    "mean": sum(numbers) / len(numbers),
                    "max": max(numbers),
                    "sum": sum(numbers),
                    "first": numbers[0],
                }[group]
    return result


def joint_mass(weights: list, heads: int, group: str = "mean") -> np.ndarray:
    """The mass (heads, T) that one call's queries add to what was read."""
    return merged(weights, heads, group).sum(axis=1)


class NaiveSharedStore:
    """A source's cache under heavy hitters (H2O): one decision a turn or step, when the last of its readers has attended.

    held[kv_head]: sorted positions; mass[kv_head]: {position: mass}; read[kv_head]: tokens that the last event's readers read.
    """

    def __init__(
        self, budget: int | None, heavy_share: float = 0.5, group: str = "mean", scaling: float | None = None, heads: int = 1
    ):
        self.budget, self.heavy_share, self.group, self.scaling, self.heads = budget, heavy_share, group, scaling, heads
        self.held: list[list[int]] = [[] for _ in range(heads)]
        self.mass: list[dict[int, float]] = [{} for _ in range(heads)]
        self.read: list[int] = [0] * heads
        self.keys: list[np.ndarray] = []  # per position, (heads, d): of all that ever came
        self.values: list[np.ndarray] = []

    def event(self, keys, values, queries: list) -> list[np.ndarray]:
        """A turn or a step of tokens (heads, n, d), and queries[reader] (H, n, d), source first; out (H, n, dv) per reader."""
        keys, values = np.asarray(keys, dtype=np.float64), np.asarray(values, dtype=np.float64)
        n, start = keys.shape[1], len(self.keys)
        self.keys += [keys[:, t] for t in range(n)]
        self.values += [values[:, t] for t in range(n)]
        outputs: list[list[np.ndarray]] = [[] for _ in queries]
        for kv_head in range(self.heads):
            held = self.held[kv_head] + list(range(start, start + n))
            own_keys = np.stack([self.keys[position][kv_head] for position in held])[None]
            own_values = np.stack([self.values[position][kv_head] for position in held])[None]
            weights = []
            for reader, asked in enumerate(queries):
                g = len(asked) // self.heads
                group = np.asarray(asked)[kv_head * g : (kv_head + 1) * g]
                out, looks = attention(group, own_keys, own_values, self.scaling)
                outputs[reader] += list(out)
                weights.append(looks)
            for position, gained in zip(held, joint_mass(weights, 1, self.group)[0], strict=True):
                self.mass[kv_head][position] = self.mass[kv_head].get(position, 0.0) + float(gained)
            self.read[kv_head] = len(held)
            self.held[kv_head] = held
        self.decide()
        return [np.stack(heads) for heads in outputs]

    def decide(self) -> None:
        """The newest B - heavy stay and, of the others, those of most mass; of equal ones the newer."""
        if self.budget is None:
            return
        recent = self.budget - math.floor(Fraction(str(self.heavy_share)) * self.budget)
        for kv_head, held in enumerate(self.held):
            ranks = [(position >= len(self.keys) - recent, self.mass[kv_head][position], position) for position in held]
            kept = sorted(position for _, _, position in sorted(ranks, reverse=True)[: self.budget])
            self.held[kv_head] = kept
            self.mass[kv_head] = {position: self.mass[kv_head][position] for position in kept}
