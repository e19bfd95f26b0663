"""A slow, plain reference of decoquant: a block of keys or values as a large factor in few bits times a small one in half.

A block is X (T, D), all heads of a layer side by side.  The decomposition is computed in float64 and its factors are
rounded to float32 (float64 for float64 numbers); quantising is float32, one operation at a time.
"""

from __future__ import annotations

import numpy as np

from naive_codecs import half_above, working


def as_block(x) -> np.ndarray:
    """(heads, T, d) as X (T, heads * d), head by head."""
    heads, length, d = np.shape(x)
    return np.array([[x[h][t][c] for h in range(heads) for c in range(d)] for t in range(length)])


def from_block(block: np.ndarray, heads: int) -> np.ndarray:
    """X (T, heads * d) as (heads, T, d)."""
    d = block.shape[1] // heads
    return np.stack([block[:, h * d : (h + 1) * d] for h in range(heads)])


def factors(block, j: int) -> tuple[np.ndarray, np.ndarray]:
    """T_L (T * D / j, j) and T_S (j, j) of X (T, D), whose product is X in rows of j; ValueError unless j divides D."""
    block = working(block)
    length, width = block.shape
    if width % j:
        raise ValueError(f"{j} channels do not divide {width}")
    a = block.reshape(length * width // j, j).astype(np.float64)
    eigenvalues, vectors = np.linalg.eigh(a.T @ a)  # ascending
    singular = [float(np.sqrt(max(eigenvalues[i], 0.0))) for i in reversed(range(j))]
    left, small = np.zeros(a.shape), np.zeros((j, j))
    for i, value in enumerate(singular):
        if value <= 1e-6 * singular[0]:
            continue
        v = vectors[:, j - 1 - i]
        if v[int(np.argmax(np.abs(v)))] < 0:  # argmax: the first of the largest
            v = -v
        left[:, i] = a @ v / np.sqrt(value)
        small[i] = np.sqrt(value) * v
    return left.astype(block.dtype), small.astype(block.dtype)


def quantise(left, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Unsigned codes (T, D) and Delta (T,) half of T_L as (T, D)."""
    left = working(left)
    kind = left.dtype.type
    top = 2 ** (bits - 1) - 1
    codes, deltas = np.zeros(left.shape, dtype=int), np.zeros(len(left), dtype=np.float16)
    for t, row in enumerate(left):
        step = max(abs(x) for x in row) / kind(top)
        deltas[t] = half_above(step)
        if deltas[t] == 0:
            deltas[t] = 1
        for c, x in enumerate(row):
            q = np.rint(x / kind(deltas[t]))
            codes[t, c] = min(max(int(q), -top), top) + top
    return codes, deltas


def decode(codes, deltas, small, bits: int) -> np.ndarray:
    """X (T, D) again; T_S (j, j) is rounded to half first."""
    kind = working(small).dtype.type
    top = 2 ** (bits - 1) - 1
    small = np.asarray(small).astype(np.float16).astype(kind)
    left = np.array([[kind(code - top) * kind(delta) for code in row] for row, delta in zip(codes, deltas, strict=True)])
    return (left.reshape(-1, len(small)) @ small).reshape(np.shape(codes))


def roundtrip(x, bits: int, j: int) -> np.ndarray:
    """x (heads, T, d), one block, encoded and decoded."""
    block = working(as_block(x))
    left, small = factors(block, j)
    codes, deltas = quantise(left.reshape(block.shape), bits)
    return from_block(decode(codes, deltas, small, bits), len(x))


def blocks(block: int, events: list[tuple[str, int]]) -> list[tuple[int, int] | None]:
    """Per event, ("turn", n) or ("step", 1): the tokens (start, stop) that become a block at its end, if any."""
    seen, done = 0, 0
    result: list[tuple[int, int] | None] = []
    for kind, n in events:
        seen += n
        if kind == "turn" or seen - done == block:
            result.append((done, seen))
            done = seen
        else:
            result.append(None)
    return result


def bits_per_element(bits: int, length: int, width: int, j: int = 16) -> float:
    """Bits that each of T * D numbers of a block takes: codes, a half per token, and the small factor in half."""
    return bits + 16 / width + 16 * j * j / (length * width)
