"""The text that needles are hidden in: a few repeated sentences, English prose that comes with Python, or a folder of texts."""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from pydoc_data.topics import topics

from kvlab.hints import did_you_mean

HAYSTACKS = ("noise", "prose")
"""Names that `Haystack.named` knows."""

_NOISE = (
    "Rain fell on the roof all morning.",
    "The baker swept the floor and went home.",
    "Nobody came along the road that day.",
    "The kettle sang while the clock ticked on.",
    "A boat lay in the harbor with its sails down.",
    "Later the wind turned and the evening grew cool.",
)
# Topics that do not contain one another, from general to special. A release of Python that lacks one goes without.
_TOPICS = """objects types specialnames execmodel compound calls comparisons assignment import raise assert global nonlocal
    strings string-methods typesseq typesmapping formatstrings debugger identifiers attribute-access"""
# No digits, so that prose can't answer a puzzle; no code; neither a scrap nor a page.
_PROSE_SENTENCE = re.compile(r"[A-Z][A-Za-z_ ,;:'()—-]{30,280}\.")
_LONGEST = 60
"""Words in a sentence of a folder; longer ones, such as text without full stops, are cut, or needles could not stand inside."""


@dataclass(frozen=True)
class Haystack:
    """An endless run of sentences: after the last comes the first. `shifts`: each puzzle begins at another sentence."""

    name: str
    sentences: tuple[str, ...]
    shifts: bool

    @classmethod
    def named(cls, name: str) -> Haystack:
        """'noise': our own few sentences over and over; 'prose': Python's language reference (it differs between releases)."""
        if name not in HAYSTACKS:
            raise ValueError(f"unknown haystack {name!r}{did_you_mean(name, HAYSTACKS)}; known: {', '.join(HAYSTACKS)}")
        return cls(name, _prose(), True) if name == "prose" else cls(name, _NOISE, False)

    @classmethod
    def from_folder(cls, path: str | Path) -> Haystack:
        """The sentences of all .txt files (UTF-8) right inside a folder, in order of file names."""
        texts = [_read(file) for file in sorted(Path(path).glob("*.txt"))]
        sentences = tuple(sentence for text in texts for sentence in _short_sentences(text))
        if not sentences:
            raise ValueError(f"no .txt file with text in the folder {str(path)!r}; give a folder that holds some")
        return cls(str(path), sentences, True)

    @cached_property
    def hash(self) -> str:
        """BLAKE2 of the text, 32 hex digits: part of a run's identity."""
        return hashlib.blake2b("\n".join(self.sentences).encode(), digest_size=16).hexdigest()

    def take(self, number: int, rng: random.Random) -> list[str]:
        """`number` sentences in a row; where they begin takes one draw from `rng` unless the haystack always begins anew."""
        start = rng.randrange(len(self.sentences)) if self.shifts else 0
        return [self.sentences[(start + i) % len(self.sentences)] for i in range(number)]


@cache
def _prose() -> tuple[str, ...]:
    paragraphs = (part for topic in _TOPICS.split() for part in re.split(r"\n\s*\n", topics.get(topic, "")))
    sentences = (sentence for part in paragraphs for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", _plain(part)))
    # Two spaces are where an empty string was quoted.
    return tuple(dict.fromkeys(s for s in sentences if _PROSE_SENTENCE.fullmatch(s) and "  " not in s))


def _plain(paragraph: str) -> str:
    """A paragraph of reStructuredText on one line, without the term it defines, footnotes, stars and quotation marks."""
    lines = paragraph.strip("\n").splitlines()
    indents = [len(line) - len(line.lstrip()) for line in lines]
    if len(lines) > 1 and indents[1] > indents[0] and not re.match(r"\s*([*-]|\d+\.) ", lines[0]):
        lines = lines[1:]
    text = " ".join(re.sub(r"(?<=\w)-\n\s*", "-", "\n".join(lines)).split())  # words are broken at their own hyphens only
    text = re.sub(r"\*\*[^*]+:\*\*| \[\d+\]", "", text)
    return re.sub(r"[*\"“”‘]|(?<!\w)['’]|['’](?!\w)", "", text).replace("’", "'").lstrip("- ")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from None


def _short_sentences(text: str) -> list[str]:
    paragraphs = re.split(r"\n\s*\n", text)
    split = [s.split() for part in paragraphs for s in re.split(r"(?<=[.!?])\s+", part.strip())]
    return [" ".join(words[at : at + _LONGEST]) for words in split for at in range(0, len(words), _LONGEST)]
