"""Generated retrieval puzzles of any length: something to find stands in a long context, and the question comes afterwards.

The kinds follow passkey retrieval (Mohtashami and Jaggi, arXiv 2305.16300), needle in a haystack, RULER (Hsieh et al.,
arXiv 2404.06654) and key-value retrieval (Liu et al., arXiv 2307.03172). The wording is ours: scores don't
compare with theirs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from kvlab.evals.haystack import HAYSTACKS, Haystack
from kvlab.hints import did_you_mean

__all__ = ["HAYSTACKS", "KINDS", "MOST_NEEDLES", "Haystack", "Puzzle", "make_puzzle", "recall"]

KINDS: dict[str, str] = {}
"""What each kind of puzzle asks, by name."""
MOST_NEEDLES = 500

_READ = "Read the text below with care, for it holds facts that will be asked about at the end."
_CITIES = """Lisbon Oslo Cairo Lima Quito Dublin Vienna Athens Havana Nairobi Prague Seoul Tunis Riga Hanoi Bogota Geneva
    Dakar Manila Warsaw Toronto Sydney Madrid Kyoto"""
_ANIMALS = """otter heron badger falcon walrus lizard beaver donkey parrot turtle weasel salmon magpie rabbit jaguar ferret
    gecko moose hornet toucan llama bison raven lobster"""
_KEYS = [f"{city} {animal}" for city in _CITIES.split() for animal in _ANIMALS.split()]
# Plain words, none the beginning of another or said in a question.
_WORDS = """apple anchor arrow autumn bamboo basket beacon blanket bottle bridge bronze bucket butter button cabin camera candle
    canvas carpet castle cellar cherry chimney circle clover coffee copper corner cotton cradle crayon curtain cushion desert
    dinner doctor dragon drawer engine fabric farmer feather fiddle finger flower forest fossil fountain garden garlic gentle
    ginger glacier goblet granite guitar hammer harvest helmet honey husband island ivory jacket jasmine jungle kitchen ladder
    lantern lemon library linen magnet mango maple marble meadow melody mirror mitten monsoon mountain museum mustard needle
    nephew nickel nutmeg oasis ocean olive onion orchard oyster paddle palace paper pebble pencil pepper piano pillow pirate
    planet pocket poem pottery powder prairie puzzle quarry quilt radish rainbow ribbon river rocket saddle saffron sailor
    sandal scarf school shadow shovel silver singer spider sponge spring stable statue stone sugar summer sunset tablet tailor
    teapot temple thimble thunder ticket timber tomato trumpet tulip tunnel turnip umbrella valley vanilla velvet village
    violin voyage wagon walnut water whistle willow window winter wizard yogurt zipper"""


@dataclass(frozen=True)
class Puzzle:
    """A context and a question about it.

    context: what may be compressed; question: asked afterwards; answer_start: words the answer is begun with (may be '');
    answers: every string that must occur in the reply; depth: where the (first) needle was asked to stand, 0 to 1 (it stands
    at the nearest sentence boundary), None for kinds without one.
    """

    context: str
    question: str
    answer_start: str
    answers: tuple[str, ...]
    depth: float | None


@dataclass(frozen=True)
class _Task:
    """One try at a puzzle: `size` pieces (sentences, words or pairs), all else drawn from `rng`."""

    size: int
    depth: float
    haystack: Haystack
    needles: int
    rng: random.Random

    def hide(self, needles: Sequence[tuple[float, str]]) -> str:
        """The haystack with each needle at its depth; needles at one place stand as listed."""
        sentences = self.haystack.take(self.size, self.rng)
        placed = [(round(depth * self.size), order, needle) for order, (depth, needle) in enumerate(needles)]
        for place, _, needle in sorted(placed, reverse=True):  # from the end, so that places stay right
            sentences.insert(place, needle)
        return " ".join([_READ, *sentences])

    def spread(self, number: int, start: float) -> list[float]:
        """Ascending depths: `start`, then one at random in each of `number - 1` equal parts of what follows it."""
        parts = max(number - 1, 1)
        return [start, *(start + (1 - start) * (i + self.rng.random()) / parts for i in range(number - 1))]

    def distinct(self, number: int, draw: Callable[[], str]) -> list[str]:
        """So many different strings, in the order drawn."""
        found: dict[str, None] = {}
        while len(found) < number:
            found.setdefault(draw())
        return list(found)

    def numbers(self, number: int, digits: int) -> list[str]:
        """Different numbers of so many digits."""
        return self.distinct(number, lambda: str(self.rng.randrange(10 ** (digits - 1), 10**digits)))


_KINDS: dict[str, tuple[Callable[[_Task], Puzzle], int]] = {}


def _kind(name: str, description: str, least: int = 0) -> Callable[[Callable[[_Task], Puzzle]], Callable[[_Task], Puzzle]]:
    """Registers a kind; `least`: the fewest pieces it can be made of."""

    def register(build: Callable[[_Task], Puzzle]) -> Callable[[_Task], Puzzle]:
        KINDS[name], _KINDS[name] = description, (build, least)
        return build

    return register


def make_puzzle(
    kind: str, *, length: int, depth: float, rng: random.Random, count: Callable[[str], int], haystack: Haystack, needles: int
) -> Puzzle:
    """A puzzle of at most `length` tokens: context, question and answer_start, each counted alone.

    It falls short of `length` by at most 1 in 200 or less than one more piece (sentence, word or pair). The arguments and the
    state of `rng` decide it all.
    `depth`: share of the haystack, 0 to 1, before the (first) needle; ignored by common_words and frequent_words.
    `count`: the number of tokens in a text; called about 10 times, whatever the length.
    `haystack`: ignored by common_words, frequent_words and key_value.
    `needles`: 1 to MOST_NEEDLES; other keys (multikey), values (multivalue), keys asked for (multiquery), hops from the first
    variable to the last (variables); ignored by the other kinds.
    Raises ValueError for what can't be; for a length that is too short it says the least that would do.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind={kind!r} of puzzle{did_you_mean(kind, KINDS)}; known: {', '.join(KINDS)}")
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth!r} must be a number from 0 (before the haystack) to 1 (after it)")
    if not isinstance(needles, int) or not 1 <= needles <= MOST_NEEDLES:
        raise ValueError(f"needles={needles!r} must be a whole number from 1 to {MOST_NEEDLES}")
    build, least = _KINDS[kind]
    seed = rng.getrandbits(64)
    short = cache(count)  # question and answer_start are mostly the same at every size

    def make(size: int) -> Puzzle:
        # Every size draws from the same seed, so that sizes differ in the number of pieces and little else.
        return build(_Task(size, depth, haystack, needles, random.Random(seed)))

    def tokens(size: int) -> int:
        puzzle = make(size)
        return count(puzzle.context) + short(puzzle.question) + short(puzzle.answer_start)

    smallest = tokens(least)
    if smallest > length:
        raise ValueError(f"length={length} is too short for kind={kind}: needs at least {smallest} tokens")
    return make(_largest(tokens, least, smallest, length))


def _largest(tokens: Callable[[int], int], least: int, smallest: int, length: int) -> int:
    """The largest size of at most `length` tokens, or one that falls short by 1 in 200; guesses along straight lines."""
    low, low_tokens = least, smallest
    high, high_tokens = least, smallest  # a size that is too large, once one has been seen
    step = 0
    # A piece is at least one token; without that bound a `count` that never grows would go on for ever.
    while high - low != 1 and length - low_tokens > length // 200 and low < least + length:
        step += 1
        other, other_tokens = (high, high_tokens) if high > low else (least, smallest)
        slope = max((other_tokens - low_tokens) / (other - low), 1) if other != low else 0
        guess = low + int((length - low_tokens) / slope) if slope else least + 8
        if high > low:
            # Every third guess halves the rest, should pieces be so uneven that guesses creep.
            guess = min((low + high) // 2 if step % 3 == 0 else guess, high - 1)
        guess = max(guess, low + 1)
        counted = tokens(guess)
        if counted > length:
            high, high_tokens = guess, counted
        else:
            low, low_tokens = guess, counted
    return low


def recall(reply: str, answers: Sequence[str]) -> float:
    """The share of `answers` that occur in `reply`, as whole words and in any case, 0 to 1.

    An answer with a digit in it must not touch other hex digits: 12345 is not found in 123456 or a12345, but is in '12345km'.
    """
    if isinstance(answers, str) or not answers or not all(answers):
        raise ValueError(f"answers={answers!r} must be a sequence of strings with at least one, none of them empty")
    return sum(_occurs(answer, reply) for answer in answers) / len(answers)


def _occurs(answer: str, reply: str) -> bool:
    edge = "[0-9a-f]" if any(letter.isdigit() for letter in answer) else r"\w"
    return re.search(f"(?<!{edge}){re.escape(answer)}(?!{edge})", reply, re.IGNORECASE) is not None


@_kind("passkey", "a number of 5 digits, stated twice in one place")
def _passkey(task: _Task) -> Puzzle:
    (number,) = task.numbers(1, 5)
    needle = f"Note this well. The pass key is {number}. Keep {number} in mind as the pass key."
    return Puzzle(task.hide([(task.depth, needle)]), "What is the pass key?", "The pass key is", (number,), task.depth)


def _fact(key: str, number: str) -> str:
    return f"The secret number of the {key} is {number}."


def _one_key(task: _Task, others: int) -> Puzzle:
    """One key is asked; `others` stand at random places."""
    keys, numbers = task.rng.sample(_KEYS, others + 1), task.numbers(others + 1, 7)
    asked, *rest = [_fact(*fact) for fact in zip(keys, numbers, strict=True)]
    hidden = [(task.rng.random(), fact) for fact in rest]
    hidden.insert(len(hidden) if task.depth > 0.5 else 0, (task.depth, asked))  # depth 0 is before all others, 1 after
    context = task.hide(hidden)
    question, start = f"What is the secret number of the {keys[0]}?", f"The secret number of the {keys[0]} is"
    return Puzzle(context, question, start, (numbers[0],), task.depth)


@_kind("needle", "the number of one key")
def _needle(task: _Task) -> Puzzle:
    return _one_key(task, 0)


@_kind("multikey", "the number of one key among `needles` others like it")
def _multikey(task: _Task) -> Puzzle:
    return _one_key(task, task.needles)


@_kind("multivalue", "all `needles` numbers of one key, at places from the depth on")
def _multivalue(task: _Task) -> Puzzle:
    key, numbers = task.rng.choice(_KEYS), task.numbers(task.needles, 7)
    facts = [f"One secret number of the {key} is {number}." for number in numbers]
    context = task.hide(list(zip(task.spread(task.needles, task.depth), facts, strict=True)))
    question, start = f"What are all the secret numbers of the {key}?", f"The secret numbers of the {key} are"
    return Puzzle(context, question, start, tuple(numbers), task.depth)


@_kind("multiquery", "the numbers of `needles` keys, at places from the depth on")
def _multiquery(task: _Task) -> Puzzle:
    keys, numbers = task.rng.sample(_KEYS, task.needles), task.numbers(task.needles, 7)
    facts = [_fact(*fact) for fact in zip(keys, numbers, strict=True)]
    context = task.hide(list(zip(task.spread(task.needles, task.depth), facts, strict=True)))
    asked = sorted(zip(keys, numbers, strict=True))  # in another order than in the text
    listed = " and ".join(filter(None, (", ".join(f"the {key}" for key, _ in asked[:-1]), f"the {asked[-1][0]}")))
    question, start = f"What are the secret numbers of {listed}?", "The secret numbers are"
    return Puzzle(context, question, start, tuple(number for _, number in asked), task.depth)


@_kind("variables", "all variables that come by a value in `needles` hops, among two chains of other values")
def _variables(task: _Task) -> Puzzle:
    links, chains = task.needles + 1, 3
    names = task.distinct(links * chains, lambda: "".join(task.rng.choices("BCDFGHJKLMNPQRSTVWXZ", k=4)))
    values = task.numbers(chains, 5)
    hidden: list[tuple[float, str]] = []
    for chain, value in enumerate(values):
        mine = names[chain * links : (chain + 1) * links]
        sources = [value, *(f"VAR {name}" for name in mine[:-1])]
        lines = [f"VAR {name} = {source}." for name, source in zip(mine, sources, strict=True)]
        depths = task.spread(links, task.rng.random() if chain else task.depth)
        hidden += zip(depths, lines, strict=True)
    question = f"Which variables hold the value {values[0]}, given directly or by way of other variables?"
    return Puzzle(task.hide(hidden), question, f"The variables that hold {values[0]} are", tuple(names[:links]), task.depth)


@_kind("common_words", "the 10 words said most often in a numbered list (fewer if it has under 30 entries)", least=6)
def _common_words(task: _Task) -> Puzzle:
    """Half the list is the common words, each equally often and at least twice; the rest takes turns."""
    words = _WORDS.split()
    task.rng.shuffle(words)
    common = words[: min(10, task.size // 3)]
    rare = words[len(common) :]
    often = max(2, task.size // (2 * len(common)))
    entries = [word for word in common for _ in range(often)]
    entries += [rare[i % len(rare)] for i in range(task.size - len(entries))]
    task.rng.shuffle(entries)
    listing = "\n".join(f"{number}. {word}" for number, word in enumerate(entries, 1))
    context = f"Below is a numbered list in which some words come up more often than others.\n{listing}"
    question = f"Which {len(common)} words come up most often in the list?"
    return Puzzle(context, question, f"The {len(common)} most common words are", tuple(common), None)


@_kind("frequent_words", "the three most frequent of many made-up words", least=28)
def _frequent_words(task: _Task) -> Puzzle:
    """Frequencies fall with rank to the power 1.5; what rounding leaves over is words said once."""
    rank_one = 0.3828 * task.size  # 1 / zeta(1.5)
    counts = [int(rank_one / rank**1.5) for rank in range(1, task.size) if rank**1.5 <= rank_one]
    counts += [1] * (task.size - sum(counts))
    letters = ["bdfgklmnprstvz", "aeiou"] * 3
    words = task.distinct(len(counts), lambda: "".join(task.rng.choice(choice) for choice in letters))
    text = [word for word, often in zip(words, counts, strict=True) for _ in range(often)]
    task.rng.shuffle(text)
    context = f"The text below is in a made-up language, and some of its words come up more often than others. {' '.join(text)}"
    question = "Which three made-up words come up most often in the text?"
    return Puzzle(context, question, "The three most frequent words are", tuple(words[:3]), None)


@_kind("key_value", "the value of one key among random pairs", least=1)
def _key_value(task: _Task) -> Puzzle:
    draws = task.distinct(2 * task.size, lambda: f"{task.rng.getrandbits(32):08x}")
    pairs = list(zip(draws[::2], draws[1::2], strict=True))
    key, value = asked = pairs.pop(0)
    pairs.insert(round(task.depth * len(pairs)), asked)
    records = ",\n".join(f'"{name}": "{content}"' for name, content in pairs)
    context = f"Below is a record of keys and their values.\n{{{records}}}"
    return Puzzle(context, f'What is the value of the key "{key}" in the record?', f'"{key}":', (value,), task.depth)
