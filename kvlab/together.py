"""Prompts read by several sessions in one forward pass, where attention is the same in all of them: protocol `prompt`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.measure import now
from kvlab.protocol import Begun, Reader
from kvlab.reading import Prompt, Reading


@dataclass(frozen=True)
class Prefilled:
    """What one reader has of a forward pass that it shared.

    seconds  that it would have taken alone, as near as that is known: the forward pass and this reader's own part
    error    what its policy or codec raised, after which there is nothing to go on from
    """

    reader: Reader
    begun: Begun
    seconds: float
    error: Exception | None = None

    def reading(self) -> Reading:
        """Go on by itself, with what was held back."""
        assert self.error is None
        return self.reader.finish(self.begun, self.seconds)


def prefill_together(
    readers: Sequence[Reader], prompts: Sequence[Prompt], new_tokens: Sequence[int] | None = None
) -> list[Prefilled]:
    """Read the prompts' contexts once for all readers, whose sessions are at work on one model; arguments as of `Reader.read`.

    Caches hold what their policies keep, and never a whole prompt together. What readers must have in common is said in
    `KVCache.leading`; and their budgets must be of the same lengths. What the first one's policy raises is raised.
    """
    begun = [reader.begin(prompts, new_tokens) for reader in readers]
    first = begun[0]
    device = first.feed.model.device
    with first.feed.cache.leading([other.feed.cache for other in begun[1:]]) as followers:
        start = now(device)
        readers[0].read_contexts(first)
        shared = now(device) - start - sum(follower.seconds for follower in followers)
    found = [Prefilled(readers[0], first, shared)]
    for reader, other, follower in zip(readers[1:], begun[1:], followers, strict=True):
        assert (other.contexts, other.rows) == (first.contexts, first.rows), "budgets are of the same lengths"
        other.feed.ids, other.feed.mask = first.feed.ids, first.feed.mask
        found.append(Prefilled(reader, other, shared + follower.seconds, follower.error))
    return found
