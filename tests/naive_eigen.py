"""A slow, plain reference of Eigen Attention: bases, ranks, the curve of errors, and one layer's cache of projected tokens.

Rows of numbers are multiplied from the right: low = x @ down, x again = low @ up.  Bases are float64.  Axis 0 of a basis is of
size heads, or of size 1 where all KV heads of a layer share it.  Signs of its vectors are free: compare products, not vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from naive_codecs import attention, working
from naive_think import HeadSide, keep_only, make_sides, total

NULL = 1e-12  # an eigenvalue of this share of the largest, or less, is none

# -------------------------------------------------------------------------------------------------------- bases


@dataclass
class Basis:
    """down (1 or heads, d, r), up (1 or heads, r, d), and singular values (1 or heads, d), descending."""

    down: np.ndarray
    up: np.ndarray
    sigma: np.ndarray

    def cut(self, r: int) -> Basis:
        """The first r directions."""
        return Basis(self.down[:, :, :r], self.up[:, :r], self.sigma)

    def of(self, kv_head: int) -> tuple[np.ndarray, np.ndarray]:
        """down (d, r) and up (r, d) of one KV head."""
        i = kv_head if len(self.down) > 1 else 0
        return self.down[i], self.up[i]


def svd(x) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """down (d, d), up (d, d) and sigma (d,) of rows x (n, d), uncentred."""
    x = np.asarray(x, dtype=np.float64)
    n, d = x.shape
    x = np.concatenate([x, np.zeros((max(0, d - n), d))])
    _, sigma, rows = np.linalg.svd(x, full_matrices=False)
    return rows.T, rows, sigma


def kq(keys, queries) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of what keeps keys (n, d) times queries (m, d) best (KQ-SVD).

    In directions that no key has, `down` and `up` pass numbers on as they are, so that all d directions give the identity.
    """
    keys, queries = np.asarray(keys, dtype=np.float64), np.asarray(queries, dtype=np.float64)
    root, inverse = roots(keys.T @ keys)
    query_root, _ = roots(queries.T @ queries)
    nothing = np.eye(len(root)) - root @ inverse  # projects on the directions that no key has
    left, sigma, _ = np.linalg.svd(root @ query_root)
    return (inverse + nothing) @ left, left.T @ (root + nothing), sigma


def roots(square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """C^(1/2) and the pseudo-inverse C^(-1/2) of a symmetric C (d, d)."""
    values, vectors = np.linalg.eigh(square)
    root, inverse = np.zeros(square.shape), np.zeros(square.shape)
    for value, vector in zip(values, vectors.T, strict=True):
        if value > NULL * max(values):
            root += np.sqrt(value) * np.outer(vector, vector)
            inverse += np.outer(vector, vector) / np.sqrt(value)
    return root, inverse


def stacked(parts: list[tuple]) -> Basis:
    """One basis for each of the parts (down, up, sigma)."""
    down, up, sigma = (np.stack([part[i] for part in parts]) for i in range(3))
    return Basis(down, up, sigma)


def key_basis(keys, queries, rotary: bool, basis: str = "svd") -> Basis:
    """keys (heads, n, d), queries (H, n, d), both before rotation: one basis for all KV heads (rotary), or one for each.

    svd: rotary: of all keys; else of a head's keys and the queries of its group. kq: of these keys and these queries.
    """
    keys, queries = np.asarray(keys), np.asarray(queries)
    g = len(queries) // len(keys)
    groups = [(keys[h : h + 1], queries[h * g : (h + 1) * g]) for h in range(len(keys))]
    parts = []
    for some_keys, some_queries in [(keys, queries)] if rotary else groups:
        k, q = np.concatenate(list(some_keys)), np.concatenate(list(some_queries))
        if basis == "kq":
            parts.append(kq(k, q))
        else:
            parts.append(svd(k if rotary else np.concatenate([k, q])))
    return stacked(parts)


def value_basis(values) -> Basis:
    """values (heads, n, dv): a basis for each KV head, from values alone."""
    return stacked([svd(head) for head in np.asarray(values)])


def folded(w_o, basis: Basis, num_heads: int) -> np.ndarray:
    """The output weights (hidden, H * dv) that take outputs of r numbers a head: (hidden, H * r)."""
    blocks = np.split(np.asarray(w_o, dtype=np.float64), num_heads, axis=1)
    g = num_heads // len(basis.down)
    return np.concatenate([block @ basis.of(h // g)[1].T for h, block in enumerate(blocks)], axis=1)


# -------------------------------------------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Point:
    """One threshold on the curve of a layer: ranks of keys and values, and the layer's relative error with them."""

    eps: float
    r_k: int
    r_v: int
    err: float


def rank(sigma, eps: float) -> int:
    """Directions whose share of the singular values, summed from the largest, stays below eps: at least 1; 1.0: all of them."""
    sigma = [float(x) for x in sigma]
    if eps == 1.0:
        return len(sigma)
    count, running = 0, 0.0
    for value in sigma:
        running += value / sum(sigma)
        if running >= eps:
            break
        count += 1
    return max(1, count)


def ranks(keys: Basis, values: Basis, eps: float) -> tuple[int, int]:
    """r_k and r_v of a layer: the largest over its KV heads."""
    return max(rank(sigma, eps) for sigma in keys.sigma), max(rank(sigma, eps) for sigma in values.sigma)


def relative_error(exact, approximate) -> float:
    """||Y - Y~||_F / ||Y||_F."""
    exact, approximate = np.asarray(exact, dtype=np.float64), np.asarray(approximate, dtype=np.float64)
    return float(np.sqrt(np.sum((exact - approximate) ** 2)) / np.sqrt(np.sum(exact**2)))


def above_floor(r_k: int, r_v: int, d: int, dv: int, floor: float) -> bool:
    """Are both ranks more than `floor` (a decimal number as written) of all directions?"""
    return r_k > Fraction(str(floor)) * d and r_v > Fraction(str(floor)) * dv


def curve(
    keys: Basis, values: Basis, error: Callable[[int, int], float], rotary: bool, floor: float = 0.45, step: str = "0.02"
) -> list[Point]:
    """All points from eps 1.0 (rotary) or 0.98 on, until a rank falls to the floor; that point isn't recorded.

    error(r_k, r_v): the layer's relative error with these ranks.
    """
    points, d, dv = [], keys.down.shape[1], values.down.shape[1]
    eps = Fraction(1) if rotary else Fraction("0.98")
    while eps > 0:
        r_k, r_v = ranks(keys, values, float(eps))
        if not above_floor(r_k, r_v, d, dv, floor):
            break
        points.append(Point(float(eps), r_k, r_v, error(r_k, r_v)))
        eps -= Fraction(step)
    return points


def lookup(points: list[Point], budget: float, d: int, dv: int | None = None, floor: float = 0.45) -> tuple[float, int, int]:
    """(eps, r_k, r_v) for a budget of error: the last point before the first that fails; full rank if none comes before it."""
    dv = d if dv is None else dv
    found = (1.0, d, dv)
    for point in points:
        if not (point.err < budget and above_floor(point.r_k, point.r_v, d, dv, floor)):
            break
        found = (point.eps, point.r_k, point.r_v)
    return found


# -------------------------------------------------------------------------------------------------------- cache


def same(x: np.ndarray) -> np.ndarray:
    """No rounding."""
    return x


class NaiveEigenCache:
    """One layer, one sequence: every token is projected as it comes, alone or before a codec of `naive_codecs.CODECS`.

    keys, values: bases that were cut to r_k and r_v.  rotate(key (d,), position) -> (d,) for rotary models, else None.
    rounded: to the model's dtype, of stored numbers and of rotated keys.  Held per KV head: low_keys, low_values (HeadSide),
    positions; weights[h] (n, T): the last event's attention.
    """

    def __init__(
        self,
        keys: Basis,
        values: Basis,
        rotate: Callable[[np.ndarray, int], np.ndarray] | None = None,
        scaling: float | None = None,
        rounded: Callable[[np.ndarray], np.ndarray] = same,
        codec: dict | None = None,
    ):
        self.key_basis, self.value_basis = keys, values
        self.rotate, self.rounded, self.codec = rotate, rounded, codec
        self.scaling = keys.down.shape[1] ** -0.5 if scaling is None else scaling
        self.low_keys: list[HeadSide] = []
        self.low_values: list[HeadSide] = []
        self.positions: list[list[int]] = []
        self.weights: list[np.ndarray] = []
        self.seen = 0

    def event(
        self, kind: str, keys, values, queries, kept: list[list[int]] | None = None, positions: list[int] | None = None
    ) -> np.ndarray:
        """A "turn" or a "step": project and insert, attend, evict, encode; out (H, n, dv).

        keys (heads, n, d) before rotation, values (heads, n, dv), queries (H, n, d) as they attend (rotated where the model
        rotates).  kept[kv_head]: positions that stay after attention.  positions: of the new tokens, else as they come.
        """
        keys, values = working(keys), working(values)
        heads, n, _ = keys.shape
        assert kind == "turn" or (kind == "step" and n == 1)
        positions = list(range(self.seen, self.seen + n)) if positions is None else positions
        self.seen += n
        if not self.low_keys:
            pairs = [make_sides(self.codec, 0) for _ in range(heads)]
            self.low_keys, self.low_values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            self.positions = [[] for _ in range(heads)]
        for h in range(heads):
            self.low_keys[h].insert(self.projected(keys[h], self.key_basis.of(h)[0])[None])
            self.low_values[h].insert(self.projected(values[h], self.value_basis.of(h)[0])[None])
            self.positions[h] += positions
        out = self.attend(queries)
        if kept is not None:
            keep_only(kept, self.positions, self.low_keys, self.low_values)
        if self.codec is not None:
            for side in self.low_keys + self.low_values:
                side.seal(kind == "turn")
        return out

    def projected(self, x: np.ndarray, down: np.ndarray) -> np.ndarray:
        """x (n, d) as (n, r), rounded as the model's numbers are."""
        return self.rounded(x @ down.astype(x.dtype))

    def dense_keys(self, h: int) -> np.ndarray:
        """The keys (T, d) that a KV head's tokens stand for, each rotated to its own position."""
        low = self.low_keys[h].held()[0]
        full = low @ self.key_basis.of(h)[1].astype(low.dtype)
        if self.rotate is None:
            return full
        placed = [self.rotate(key, position) for key, position in zip(full, self.positions[h], strict=True)]
        return self.rounded(np.stack(placed).astype(low.dtype))

    def attend(self, queries) -> np.ndarray:
        """Attention of the newest n tokens, queries (H, n, d); (H, n, dv) in float64."""
        queries = np.asarray(queries, dtype=np.float64)
        g = len(queries) // len(self.low_keys)
        out, self.weights = [], []
        for h in range(len(self.low_keys)):
            group, keys = queries[h * g : (h + 1) * g], self.dense_keys(h)
            if self.rotate is None:
                up = self.key_basis.of(h)[1]
                group, keys = np.stack([[up @ query for query in head] for head in group]), self.low_keys[h].held()[0]
            low, weights = attention(group, keys[None], self.low_values[h].held(), self.scaling)
            out += [head @ self.value_basis.of(h)[1] for head in low]
            self.weights += list(weights)
        return np.stack(out)

    def counts(self) -> dict[str, dict[str, int]]:
        """Numbers held over all KV heads, {"keys", "values"}, by kind as in `HeadSide.counts`."""
        return {"keys": total(self.low_keys), "values": total(self.low_values)}
