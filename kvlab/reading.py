"""A batch of prompts that has been read: what comes next is scored or generated under eviction, on forks where need be.

Knows sessions' caches and a model to call, no policy, no protocol and no task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from kvlab.cache import KVCache, Memory, RowMemory
from kvlab.codecs.side import FULL_PRECISION
from kvlab.measure import now
from kvlab.policies import Policy


@dataclass(frozen=True)
class Prompt:
    """One prompt's token ids.

    name      what random draws depend on where no context is shared; a sample's id
    question  how many of the last ids are the question (with what follows it), 0 where none is marked
    text_len  tokens of the whole text where more than the prompt is known before, as when a given text is scored
    asks      whether it holds a question that can't be told from the rest, as where a benchmark has one string for both
    """

    ids: tuple[int, ...]
    question: int = 0
    text_len: int = 0
    name: str = ""
    asks: bool = False


def in_segments(rows: Sequence[Sequence[int]], size: int | None) -> Iterator[list[Sequence[int]]]:
    """Pieces of at most `size` tokens, in order; a row that has ended gives empty pieces."""
    longest = max(len(row) for row in rows)
    size = size or max(longest, 1)
    for start in range(0, longest, size):
        yield [row[start : start + size] for row in rows]


class Feed:
    """Calls a model on one cache, piece by piece, with the mask and the positions of everything fed so far.

    ids, mask  (batch, tokens) of all calls, pads included
    """

    def __init__(self, model: Any, cache: KVCache, batch: int, pad_id: int) -> None:
        self.model, self.cache, self.pad_id = model, cache, pad_id
        self.ids = torch.zeros(batch, 0, dtype=torch.long, device=model.device)
        self.mask = torch.zeros_like(self.ids)

    def __call__(self, rows: Sequence[Sequence[int]], logits: bool = False) -> Tensor | None:
        """Feed these tokens, padded on the right; logits (batch, tokens, vocab) if wanted."""
        ids, mask = self._padded(rows)
        self.ids, self.mask = torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.model(
            ids,
            attention_mask=self.mask,
            position_ids=positions,
            cache=self.cache,
            logits_to_keep=0 if logits else 1,
        )
        return output.logits if logits else None

    def steps(
        self, rows: Sequence[Sequence[int]], size: int, logits: bool = False
    ) -> Iterator[tuple[list[Sequence[int]], Any]]:
        """Feed these tokens inside `stepwise`, `size` of each row a call or as many as the cache can take; and their logits."""
        start, longest = 0, max(len(row) for row in rows)
        while start < longest:
            end = start + self.cache.step_tokens(min(size, longest - start))
            part = [row[start:end] for row in rows]
            yield part, self(part, logits)
            start = end

    def fork(self, policy: Policy | None = None) -> Feed:
        """The same on a copy of the cache."""
        other = Feed(self.model, self.cache.fork(policy), len(self.ids), self.pad_id)
        other.ids, other.mask = self.ids, self.mask
        return other

    def take(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        if list(rows) != list(range(len(self.ids))):
            index = torch.tensor(rows)
            if self.ids.shape[1]:
                self.cache.reorder_cache(index)
            self.ids, self.mask = self.ids[index.to(self.ids.device)], self.mask[index.to(self.ids.device)]

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest = max(len(row) for row in rows)
        ids = [[*row, *[self.pad_id] * (longest - len(row))] for row in rows]
        mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        return torch.tensor(ids, device=self.ids.device), torch.tensor(mask, device=self.ids.device)


@dataclass(frozen=True)
class Scored:
    """A scored continuation: its ids, the log-probability of each, and the id that was likeliest in its place."""

    ids: tuple[int, ...]
    logprobs: list[float]
    top1: list[int]

    @property
    def logprob(self) -> float:
        """Of the whole continuation."""
        return sum(self.logprobs)

    @property
    def greedy(self) -> bool:
        """Whether each token was the likeliest in its place."""
        return list(self.ids) == self.top1


@dataclass
class Reading:
    """A batch of texts that have been read up to the last token of each, which is fed with what comes next.

    Scoring and generating move it on, so that the last token is that of the continuation.

    prefill_s, prefill_tokens  time and tokens of the compressed part, over the batch
    together  how many tokens of each row are scored per call
    """

    feed: Feed
    last: tuple[int, ...]
    prefill_s: float
    prefill_tokens: int
    together: int = 1

    def fork(self, policy: Policy | None = None) -> Reading:
        """An independent copy; see `KVCache.fork`."""
        return replace(self, feed=self.feed.fork(policy))

    def memory(self) -> tuple[list[RowMemory], Memory]:
        """What each sequence holds now, and what the batch does."""
        memory = self.feed.cache.memory()
        nothing = [RowMemory(0, 0, 0, 0)] * len(self.last)  # prompts of one token, which is yet to be read
        return self.feed.cache.memory_by_row() or nothing, memory

    def memories(self) -> list[tuple[list[RowMemory], Memory]]:
        """The same of each batch that was read one after the other, here one."""
        return [self.memory()]

    def score(self, continuations: Sequence[Sequence[int]]) -> list[Scored]:
        """Log-probabilities of one continuation for each prompt, read under eviction. The reading moves on with it."""
        fed = [(last, *row[:-1]) for last, row in zip(self.last, continuations, strict=True)]
        scored = [Scored(tuple(row), [], []) for row in continuations]
        with self.feed.cache.stepwise():
            for part, logits in self.feed.steps(fed, self.together, logits=True):
                for one, piece, row in zip(scored, part, logits, strict=True):
                    done = len(one.logprobs)
                    gold = torch.tensor(one.ids[done : done + len(piece)], device=row.device, dtype=torch.long)
                    logprobs = row[: len(piece)].float().log_softmax(-1)
                    one.logprobs.extend(logprobs.gather(-1, gold[:, None])[:, 0].tolist())
                    one.top1.extend(logprobs.argmax(-1).tolist())
        self.last = tuple(one.ids[-1] for one in scored)
        return scored

    def score_choices(self, choices: Sequence[Sequence[Sequence[int]]]) -> list[list[Scored]]:
        """Log-probabilities of several continuations of each prompt, each on a fork, so that their order can't matter.

        Those of about the same length are scored together, whichever prompts they follow, as pads cost as much as tokens.
        """
        pairs = [(row, number) for row, options in enumerate(choices) for number in range(len(options))]
        pairs.sort(key=lambda pair: -len(choices[pair[0]][pair[1]]))
        found: dict[tuple[int, int], Scored] = {}
        for start in range(0, len(pairs), len(choices)):
            some = pairs[start : start + len(choices)]
            fork = self.fork().take([row for row, _ in some])
            found |= zip(some, fork.score([choices[row][number] for row, number in some]), strict=True)
        return [[found[row, number] for number in range(len(options))] for row, options in enumerate(choices)]

    def take(self, rows: Sequence[int]) -> Reading:
        """Go on with these prompts alone."""
        self.feed.take(rows)
        return replace(self, last=tuple(self.last[row] for row in rows))

    def generate(
        self,
        max_new_tokens: int,
        tokenizer: Any = None,
        stop: Sequence[str] = (),
        ends: Sequence[int] = (),
        **options: Any,
    ) -> list[list[int]]:
        """New token ids of each prompt, without the end token; greedy unless `options` say otherwise (as `generate` has them).

        stop  strings that end a text, which need the tokenizer
        ends  token ids that end a text, besides the model's own
        What the model's own generation config asks for (penalties, temperatures) is left aside.
        """
        feed = self.feed
        last = torch.tensor(self.last, device=feed.ids.device)[:, None]
        ids, mask = torch.cat([feed.ids, last], 1), torch.cat([feed.mask, torch.ones_like(last)], 1)
        ends = [*_end_tokens(feed.model), *ends]
        settings = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": feed.pad_id, **options}
        config = GenerationConfig(eos_token_id=ends or None, stop_strings=list(stop) or None, **settings)
        with _no_generation_config(feed.model):
            named = {"tokenizer": tokenizer} if stop else {}
            out = feed.model.generate(ids, attention_mask=mask, cache=feed.cache, generation_config=config, **named)
        feed.ids, self.last = out[:, :-1], tuple(out[:, -1].tolist())
        feed.mask = torch.cat([mask, mask.new_ones(len(out), out.shape[1] - ids.shape[1] - 1)], 1)
        rows = [_until(row, ends) for row in out[:, ids.shape[1] :].tolist()]
        return [_without_pads(row, feed.pad_id) for row in rows] if stop else rows

    def decode(self) -> Iterator[float]:
        """Decode greedily, one token of each row at a time; seconds of every step of the batch, without end."""
        feed, tokens = self.feed, [[token] for token in self.last]
        while True:
            start = now(feed.model.device)
            logits = feed(tokens, logits=True)
            assert logits is not None
            tokens = logits[:, -1].argmax(-1)[:, None].tolist()
            self.last = tuple(token for (token,) in tokens)
            yield now(feed.model.device) - start


TOGETHER = 2048
"""Tokens of whole texts that are read at once."""


@dataclass
class WholeTexts(Reading):
    """Prompts that are read only together with what is to be scored, where evictions are simulated by masks.

    A mask depends on the whole text, so nothing is shared and nothing can be generated.
    """

    prompts: tuple[tuple[int, ...], ...] = ()
    session: Any = None

    @classmethod
    def of(cls, session: Any, prompts: Sequence[Prompt], pad_id: int) -> WholeTexts:
        """session: with the simulation at work."""
        ids = tuple(prompt.ids for prompt in prompts)
        return cls(Feed(session.model, session.new_cache(), len(ids), pad_id), (), 0.0, 0, prompts=ids, session=session)

    def fork(self, policy: Policy | None = None) -> WholeTexts:
        """Readings hold nothing between texts."""
        return replace(self)

    def take(self, rows: Sequence[int]) -> WholeTexts:
        """These prompts alone."""
        return replace(self, prompts=tuple(self.prompts[row] for row in rows))

    def memory(self) -> tuple[list[RowMemory], Memory]:
        """A full cache of each prompt, which is what a simulation needs."""
        layers = self.session.plan.layers
        rows = []
        for prompt in self.prompts:
            held = sum(min(len(prompt), layer.window or len(prompt)) * layer.token_bytes for layer in layers)
            tokens = len(prompt) * sum(layer.num_kv_heads for layer in layers)
            rows.append(RowMemory(held, held, tokens, tokens))
        total = sum(row.kv_bytes for row in rows)
        return rows, Memory(total, total, total, 0, 0, 1.0, {FULL_PRECISION: total}, torch.zeros(0, 0, 0, dtype=torch.long))

    def score(self, continuations: Sequence[Sequence[int]]) -> list[Scored]:
        """Log-probabilities of one continuation for each prompt, some rows at a time, as logits take much memory."""
        longest = max(len(prompt) + len(row) for prompt, row in zip(self.prompts, continuations, strict=True))
        size = max(1, TOGETHER // longest)
        pairs = list(zip(self.prompts, continuations, strict=True))
        return [scored for start in range(0, len(pairs), size) for scored in self._score(pairs[start : start + size])]

    def _score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
        feed = Feed(self.feed.model, self.session.new_cache(), len(pairs), self.feed.pad_id)
        logits = feed([(*prompt, *row[:-1]) for prompt, row in pairs], logits=True)
        assert logits is not None
        scored = []
        for row, (prompt, gold) in enumerate(pairs):
            logprobs = logits[row, len(prompt) - 1 : len(prompt) - 1 + len(gold)].float().log_softmax(-1)
            found = logprobs.gather(-1, torch.tensor(gold, device=logits.device)[:, None])[:, 0]
            scored.append(Scored(tuple(gold), found.tolist(), logprobs.argmax(-1).tolist()))
        return scored

    def generate(self, max_new_tokens: int, tokenizer: Any = None, *_: Any, **options: Any) -> list[list[int]]:
        """Refused: a mask needs the whole text."""
        raise ValueError("a simulated eviction can't generate, since its mask needs the whole text; use protocol=prompt")


def _end_tokens(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = getattr(model.config, "eos_token_id", None) if ends is None else ends
    return [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [ends]


@contextmanager
def _no_generation_config(model: Any) -> Iterator[None]:
    """What a generation config leaves open is taken from the model's, so that is put aside meanwhile."""
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


def _without_pads(ids: list[int], pad_id: int) -> list[int]:
    """A row that a stop string ended is filled up to the longest of its batch."""
    end = len(ids)
    while end and ids[end - 1] == pad_id:
        end -= 1
    return ids[:end]


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    return next((ids[:place] for place, token in enumerate(ids) if token in ends), ids)
