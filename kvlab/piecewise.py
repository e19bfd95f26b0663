"""More prompts than are to be read at once: read and scored some at a time, where nothing needs them all.

So a text of many windows takes no more memory than a batch of as many rows as were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvlab.cache import Memory, RowMemory
from kvlab.protocol import Reader
from kvlab.reading import Prompt, Reading, Scored


@dataclass
class Piecewise(Reading):
    """Prompts of which `size` at a time are read and scored, the first ones at once, others when it is their turn.

    What `Reading` has of one batch (`feed`, `last`, speed of decoding) is that of the piece that was read last; `prefill_s` and
    `prefill_tokens` are of all pieces read so far, each counted once. To score again is to read again. Nothing is generated.
    """

    reader: Reader | None = None
    pieces: Sequence[tuple[Sequence[Prompt], Sequence[int]]] = ()
    held: dict[int, tuple[list[RowMemory], Memory]] = field(default_factory=dict)

    @classmethod
    def of(cls, reader: Reader, prompts: Sequence[Prompt], new_tokens: Sequence[int], size: int) -> Piecewise:
        """Arguments as of `Reader.read`; size: prompts of a piece."""
        starts = range(0, len(prompts), size)
        pieces = [(prompts[start : start + size], new_tokens[start : start + size]) for start in starts]
        first = reader.read(*pieces[0])
        return cls(first.feed, first.last, first.prefill_s, first.prefill_tokens, first.together, reader, pieces)

    def score(self, continuations: Sequence[Sequence[int]]) -> list[Scored]:
        """As of `Reading`, piece by piece."""
        return [one for piece, rows in self._each() for one in piece.score(continuations[rows])]

    def score_choices(self, choices: Sequence[Sequence[Sequence[int]]]) -> list[list[Scored]]:
        """As of `Reading`, piece by piece."""
        return [one for piece, rows in self._each() for one in piece.score_choices(choices[rows])]

    def memories(self) -> list[tuple[list[RowMemory], Memory]]:
        """What pieces held when they had been scored."""
        return [self.held[number] for number in sorted(self.held)] or super().memories()

    def _each(self) -> Iterator[tuple[Reading, slice]]:
        """Each piece, with the rows that it has of all; it is over when the next one is asked for."""
        start = 0
        for number, (prompts, _) in enumerate(self.pieces):
            piece = self._piece(number)
            yield piece, slice(start, start + len(prompts))
            self.feed, self.last = piece.feed, piece.last
            self.held[number] = piece.memory()
            start += len(prompts)

    def _piece(self, number: int) -> Reading:
        if number == 0 and not self.held:
            return Reading(self.feed, self.last, self.prefill_s, self.prefill_tokens, self.together)
        assert self.reader is not None
        self.feed.cache.reset()  # before the next piece takes memory
        piece = self.reader.read(*self.pieces[number])
        if number not in self.held:
            self.prefill_s += piece.prefill_s
            self.prefill_tokens += piece.prefill_tokens
        return piece
