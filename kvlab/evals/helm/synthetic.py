"""Synthetic reasoning without data, in HELM's spirit: patterns of letters and words, drawn from a seed. The wording is ours.

pattern_match          which of four patterns does a text follow?
variable_substitution  write a pattern out, given what its letters stand for
induction              find the pattern that two texts share
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvlab.evals.helm.spec import Draft, Reference

MODES = ("pattern_match", "variable_substitution", "induction")
"""Kinds of puzzles, the default one first."""

_LETTERS = ("K", "M", "W")
_SIGNS = ("+", "-", "*", "=")
_WORDS = (
    *("lamp", "otter", "spoon", "cedar", "violin", "falcon"),
    *("pebble", "turnip", "ladder", "badger", "copper", "willow"),
)


def puzzle(mode: str, rng: random.Random) -> Draft:
    """A puzzle of a mode and its one answer."""
    if mode == "pattern_match":
        return _match(rng)
    return _substitution(rng) if mode == "variable_substitution" else _induction(rng)


def _pattern(rng: random.Random) -> tuple[str, ...]:
    """Each letter at least once, four signs, in random order but for the ends, which are letters."""
    inner = [*_LETTERS, *_SIGNS, rng.choice(_LETTERS)]
    rng.shuffle(inner)
    return (rng.choice(_LETTERS), *inner, rng.choice(_LETTERS))


def _patterns(rng: random.Random, number: int) -> list[tuple[str, ...]]:
    """Patterns that no renaming of letters makes equal, so that a text follows one of them only."""
    found: list[tuple[str, ...]] = []
    while len(found) < number:
        new = _pattern(rng)
        if all(_shape(new) != _shape(other) for other in found):
            found.append(new)
    return found


def _shape(pattern: Sequence[str]) -> tuple[str, ...]:
    """The pattern with its letters numbered in order of appearance."""
    order = list(dict.fromkeys(part for part in pattern if part in _LETTERS))
    return tuple(str(order.index(part)) if part in order else part for part in pattern)


def _meaning(rng: random.Random) -> dict[str, str]:
    return dict(zip(_LETTERS, rng.sample(_WORDS, len(_LETTERS)), strict=True))


def _written(pattern: Sequence[str], meaning: dict[str, str] | None = None) -> str:
    return " ".join((meaning or {}).get(part, part) for part in pattern)


def _match(rng: random.Random) -> Draft:
    patterns = _patterns(rng, 4)
    right = rng.randrange(4)
    listed = "".join(f"Pattern: {_written(pattern)}\n" for pattern in patterns)
    references = tuple(Reference(_written(pattern), number == right) for number, pattern in enumerate(patterns))
    return Draft(f"Text: {_written(patterns[right], _meaning(rng))}", references[right : right + 1], context=listed)


def _substitution(rng: random.Random) -> Draft:
    pattern, meaning = _pattern(rng), _meaning(rng)
    given = ", ".join(f"{letter} is {word}" for letter, word in meaning.items())
    return Draft(f"Letters: {given}", (Reference(_written(pattern, meaning), True),), context=f"Pattern: {_written(pattern)}\n")


def _induction(rng: random.Random) -> Draft:
    pattern = _pattern(rng)
    named = dict(zip(dict.fromkeys(part for part in pattern if part in _LETTERS), _LETTERS, strict=True))
    texts = "".join(f"Text: {_written(pattern, _meaning(rng))}\n" for _ in range(2))
    return Draft(texts.rstrip("\n"), (Reference(_written(pattern, named), True),))
