"""Whether methods stand in a paper's order: every pair that the paper tells apart, against our paired difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from kvlab.metrics import Difference


@dataclass(frozen=True)
class Order:
    """Methods of one model and task, best first, and what their pairs say.

    theirs, ours  methods in order; '≈' stands between neighbours that can't be told apart
    pairs         that the paper tells apart and we have; agree, reversed: of them, those whose difference here excludes 0
    tau           Kendall's: (agree - reversed) / pairs, those within noise counting as neither; None without pairs
    verdict       the same in words
    """

    model: str
    task: str
    theirs: str
    ours: str
    pairs: int
    agree: int
    reversed: int
    tau: float | None
    verdict: str


Paired = Callable[[str, str], Difference | None]
"""Ours of one method minus another's."""


def order_of(
    model: str,
    task: str,
    published: Mapping[str, float | None],
    better: str,
    tie: float,
    ours: Mapping[str, float],
    difference: Paired,
    at_chance: bool = False,
) -> Order:
    """Compare the orders of methods.

    published  the paper's numbers, of which `better` ("higher", "lower") is better, and those within `tie` are equal; where
               it has none at all, ours is the order of all methods
    ours       values by method, higher is better; difference: paired, in the metric's own direction
    """
    sign = 1.0 if better == "higher" else -1.0
    theirs = {method: sign * value for method, value in published.items() if value is not None and method in ours}
    blank = all(value is None for value in published.values())

    def their_sign(a: str, b: str) -> int:
        return _sign(theirs[a] - theirs[b], abs(theirs[a] - theirs[b]) > tie * (1 + 1e-9))

    def our_sign(a: str, b: str) -> int:
        found = difference(a, b)
        return _sign(ours[a] - ours[b], found is not None and not found.within_noise)

    told = [(a, b) for a, b in combinations(theirs, 2) if their_sign(a, b)]
    products = [their_sign(a, b) * our_sign(a, b) for a, b in told]
    agree, wrong = products.count(1), products.count(-1)
    return Order(
        model,
        task,
        _chain(theirs, their_sign),
        _chain({method: ours[method] for method in ours if blank or method in theirs}, our_sign),
        len(told),
        agree,
        wrong,
        (agree - wrong) / len(told) if told else None,
        ("no order: no published numbers" if blank else _verdict(len(theirs), len(told), agree, wrong))
        + (" (full cache at chance)" if at_chance else ""),
    )


def _sign(difference: float, told: bool) -> int:
    return 0 if not told or difference == 0 else 1 if difference > 0 else -1


def _chain(values: Mapping[str, float], sign: Callable[[str, str], int]) -> str:
    """Methods by value, best first."""
    best: Sequence[str] = sorted(values, key=lambda method: -values[method])
    parts = [f" {'>' if sign(a, b) else '≈'} {b}" for a, b in zip(best, best[1:], strict=False)]
    return "".join([*best[:1], *parts])


def _verdict(methods: int, pairs: int, agree: int, wrong: int) -> str:
    if methods < 2:
        return "no order: fewer than two methods with both numbers"
    if not pairs:
        return "no order: the paper's numbers are equal"
    noise = pairs - agree - wrong
    if noise == pairs:
        return f"can't be told: all {pairs} pairs are within noise here" if pairs > 1 else "can't be told: within noise here"
    open_text = f", {noise} within noise" if noise else ""
    if not wrong:
        return f"agrees: {agree} of {pairs}{open_text}"
    return f"{'reversed' if not agree else 'agrees in part'}: {agree} of {pairs} agree, {wrong} reversed{open_text}"
