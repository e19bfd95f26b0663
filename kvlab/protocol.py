"""How a policy meets a text: prompts read under a protocol, then continuations scored or generated under eviction.

    prompt    the prompt but its held-back end is read with full attention and evicted to the budget once; everything after
              it (question, continuation, generation) is read under per-step eviction
    chunked   the same, but the prompt is read in chunks and evicted to the budget after each: bounded peak memory
    stream    eviction acts from the first token on, each token as if it were decoded

In all of them the last token of a prompt is read under eviction, so that even the first token of a continuation sees what
the policy left. Prompts whose compressed parts are equal are read once. Knows sessions and caches, no policy and no task.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig

from kvlab.cache import KVCache, RowMemory
from kvlab.hints import did_you_mean
from kvlab.policies import Policy, make_policy
from kvlab.session import Session
from kvlab.settings import SettingError

SCORE_SEGMENT = 128
"""Tokens scored per call: bounds the memory that logits take."""
READ_SEGMENT = 512
"""Tokens read per call under `stream`."""


@dataclass(frozen=True)
class Prompt:
    """One prompt's token ids.

    question  how many of the last ids are the question (with what follows it), 0 where none is marked
    text_len  tokens of the whole text where more than the prompt is known before, as when a given text is scored
    """

    ids: tuple[int, ...]
    question: int = 0
    text_len: int = 0


@dataclass(frozen=True)
class Protocol:
    """How prompts are read. hold_back: last tokens of a prompt that stay outside its compressed part, at least 1.

    Without it the question is held back where a task marks one, else the last token. At least one token is read after the
    eviction, since otherwise the first token of an answer would be predicted from full attention.
    """

    hold_back: int | None = None

    name: ClassVar[str] = ""
    compresses: ClassVar[bool] = True
    """Whether a part of the prompt is read with full attention and evicted afterwards."""

    def __post_init__(self) -> None:
        if self.hold_back == 0:
            raise SettingError(
                "protocol.hold_back=0: use at least 1, since with nothing held back the first token of an answer is predicted "
                "from full attention and no policy could change it"
            )

    def held(self, prompt: Prompt) -> int:
        """How many last tokens of a prompt are held back; one token at least is compressed where there are two."""
        wanted = self.hold_back if self.hold_back is not None else max(1, prompt.question)
        return min(wanted, max(1, len(prompt.ids) - 1))

    def query_aware(self, prompt: Prompt) -> bool:
        """Whether the question (or a part of it) is inside the compressed part."""
        return self.compresses and self.held(prompt) < prompt.question

    def known_len(self, prompt: Prompt) -> int:
        """Length that a budget by ratio is of."""
        return len(prompt.ids)

    def check(self, policy: Policy) -> None:
        """Raises SettingError if a policy can't be run under this protocol."""

    def read_context(self, feed: Feed, rows: Sequence[Sequence[int]], prefill_chunk: int | None) -> None:
        """Read the compressed parts."""
        raise NotImplementedError


@dataclass(frozen=True)
class PromptProtocol(Protocol):
    """The prompt is read with full attention and evicted at its end."""

    name: ClassVar[str] = "prompt"

    def read_context(self, feed: Feed, rows: Sequence[Sequence[int]], prefill_chunk: int | None) -> None:
        """One turn, in chunks or at once."""
        with feed.cache.turn():
            for part in in_segments(rows, prefill_chunk):
                feed(part)


@dataclass(frozen=True)
class Chunked(Protocol):
    """The prompt is read in chunks of `chunk` tokens and evicted to the budget after each."""

    chunk: int = 256

    name: ClassVar[str] = "chunked"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise SettingError("protocol.chunk=0: use the number of tokens of a chunk, such as 256")

    def read_context(self, feed: Feed, rows: Sequence[Sequence[int]], prefill_chunk: int | None) -> None:
        """Each chunk is a turn."""
        for part in in_segments(rows, self.chunk):
            with feed.cache.turn():
                for piece in in_segments(part, prefill_chunk):
                    feed(piece)


@dataclass(frozen=True)
class Stream(Protocol):
    """Every token counts as decoded, from the first on."""

    name: ClassVar[str] = "stream"
    compresses: ClassVar[bool] = False

    def known_len(self, prompt: Prompt) -> int:
        """The known text, with what is to be scored."""
        return max(len(prompt.ids), prompt.text_len)

    def check(self, policy: Policy) -> None:
        """Policies that decide at a prompt's end have nothing to decide here."""
        if policy.evicts and policy.when == "prompt_end":
            raise SettingError(
                f"policy {policy.name} decides at a prompt's end and can't evict from the first token on: use protocol=prompt "
                "or protocol=chunked, or another policy"
            )

    def read_context(self, feed: Feed, rows: Sequence[Sequence[int]], prefill_chunk: int | None) -> None:
        """All steps."""
        with feed.cache.stepwise():
            for part in in_segments(rows, prefill_chunk or READ_SEGMENT):
                feed(part)


PROTOCOLS: dict[str, type[Protocol]] = {cls.name: cls for cls in (PromptProtocol, Stream, Chunked)}


def protocol_class(name: str) -> type[Protocol]:
    """The protocol of that name. Raises SettingError with near names if there is none."""
    if name not in PROTOCOLS:
        raise SettingError(f"unknown protocol {name!r}{did_you_mean(name, PROTOCOLS)}; known: {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


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


def in_segments(rows: Sequence[Sequence[int]], size: int | None) -> Iterator[list[Sequence[int]]]:
    """Pieces of at most `size` tokens, in order; a row that has ended gives empty pieces."""
    longest = max(len(row) for row in rows)
    size = size or max(longest, 1)
    for start in range(0, longest, size):
        yield [row[start : start + size] for row in rows]


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
        """Whether greedy decoding would give this continuation."""
        return list(self.ids) == self.top1


@dataclass(frozen=True)
class Reading:
    """A batch of prompts that has been read up to the last token of each, which is fed with what comes next.

    prefill_s, prefill_tokens  time and tokens of the compressed part, over the batch
    """

    feed: Feed
    last: tuple[int, ...]
    prefill_s: float
    prefill_tokens: int

    def fork(self, policy: Policy | None = None) -> Reading:
        """An independent copy; see `KVCache.fork`."""
        return replace(self, feed=self.feed.fork(policy))

    def memory(self) -> tuple[list[RowMemory], int, int]:
        """What each sequence holds now, the peak of the batch, and its bookkeeping, in bytes."""
        memory = self.feed.cache.memory()
        return self.feed.cache.memory_by_row(), memory.kv_bytes_peak, memory.state_bytes

    def score(self, continuations: Sequence[Sequence[int]]) -> list[Scored]:
        """Log-probabilities of one continuation for each prompt, read under eviction. The reading moves on with it."""
        fed = [(last, *row[:-1]) for last, row in zip(self.last, continuations, strict=True)]
        scored = [Scored(tuple(row), [], []) for row in continuations]
        with self.feed.cache.stepwise():
            for part in in_segments(fed, SCORE_SEGMENT):
                logits = self.feed(part, logits=True)
                assert logits is not None
                for one, piece, row in zip(scored, part, logits, strict=True):
                    done = len(one.logprobs)
                    gold = torch.tensor(one.ids[done : done + len(piece)], device=row.device, dtype=torch.long)
                    logprobs = row[: len(piece)].float().log_softmax(-1)
                    one.logprobs.extend(logprobs.gather(-1, gold[:, None])[:, 0].tolist())
                    one.top1.extend(logprobs.argmax(-1).tolist())
        return scored

    def score_choices(self, choices: Sequence[Sequence[Sequence[int]]]) -> list[list[Scored]]:
        """Log-probabilities of several continuations of each prompt, each on a fork, so that their order can't matter."""
        results: list[list[Scored]] = [[] for _ in choices]
        for number in range(max(len(options) for options in choices)):
            rows = [row for row, options in enumerate(choices) if number < len(options)]
            fork = self.fork().take(rows)
            for row, scored in zip(rows, fork.score([choices[row][number] for row in rows]), strict=True):
                results[row].append(scored)
        return results

    def take(self, rows: Sequence[int]) -> Reading:
        """Go on with these prompts alone."""
        self.feed.take(rows)
        return replace(self, last=tuple(self.last[row] for row in rows))

    def generate(self, max_new_tokens: int, tokenizer: Any = None, stop: Sequence[str] = (), **options: Any) -> list[list[int]]:
        """New token ids of each prompt, without the end token; greedy unless `options` say otherwise (as `generate` has them).

        stop  strings that end a text, which need the tokenizer
        """
        feed = self.feed
        last = torch.tensor(self.last, device=feed.ids.device)[:, None]
        ids, mask = torch.cat([feed.ids, last], 1), torch.cat([feed.mask, torch.ones_like(last)], 1)
        ends = _end_tokens(feed.model)
        config = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": feed.pad_id, **options}
        stopping = {"stop_strings": list(stop), "tokenizer": tokenizer} if stop else {}
        out = feed.model.generate(
            ids,
            attention_mask=mask,
            cache=feed.cache,
            generation_config=GenerationConfig(eos_token_id=ends or None, **config),
            **stopping,
        )
        return [_until(row, ends) for row in out[:, ids.shape[1] :].tolist()]

    def decode(self) -> Iterator[float]:
        """Decode greedily, one token of each row at a time; seconds of every step of the batch, without end."""
        feed, tokens = self.feed, [[token] for token in self.last]
        while True:
            start = now(feed.model)
            logits = feed(tokens, logits=True)
            assert logits is not None
            tokens = logits[:, -1].argmax(-1)[:, None].tolist()
            yield now(feed.model) - start


def _end_tokens(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    return [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [ends]


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    return next((ids[:place] for place, token in enumerate(ids) if token in ends), ids)


def now(model: Any) -> float:
    """Seconds, once the model's device has done what it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


@dataclass(frozen=True)
class Reader:
    """Reads batches of prompts with one session, under one protocol."""

    session: Session
    protocol: Protocol
    pad_id: int = 0
    prefill_chunk: int | None = None

    def read(self, prompts: Sequence[Prompt], max_new_tokens: int = 0) -> Reading:
        """Read all but the last token of each prompt. max_new_tokens: tokens to come, for a budget of the total."""
        contexts = [prompt.ids[: -self.protocol.held(prompt)] for prompt in prompts]
        keys = [(ids, self.protocol.known_len(prompt)) for ids, prompt in zip(contexts, prompts, strict=True)]
        shared = list(dict.fromkeys(keys))
        cache = self.session.new_cache(
            max_new_tokens=max_new_tokens,
            sample_ids=[_name(ids) for ids, _ in shared],
            known_len=[known for _, known in shared],
        )
        feed = Feed(self.session.model, cache, len(shared), self.pad_id)
        start = now(feed.model)
        if any(ids for ids, _ in shared):
            self.protocol.read_context(feed, [ids for ids, _ in shared], self.prefill_chunk)
        prefill_s = now(feed.model) - start
        if len(shared) < len(keys):
            feed.take([shared.index(key) for key in keys])
        held = [prompt.ids[len(ids) : -1] for ids, prompt in zip(contexts, prompts, strict=True)]
        if any(held):
            with cache.stepwise():
                for part in in_segments(held, READ_SEGMENT):
                    feed(part)
        tokens = sum(len(ids) for ids, _ in shared)
        return Reading(feed, tuple(prompt.ids[-1] for prompt in prompts), prefill_s, tokens)

    def overhead(self, reading: Reading, steps: int = 8) -> tuple[float, float]:
        """Seconds of a decode step of the batch, and how many of them a step without any policy on the same tokens saves.

        Medians over some steps on forks, the two kinds in turn, so that a busy machine slows both.
        """
        policy = self.session.policy
        ours = reading.fork().decode()
        if not policy.evicts:
            return statistics.median([next(ours) for _ in range(steps + 1)][1:]), 0.0
        plain = reading.fork(make_policy("full", rolling=policy.rolling)).decode()
        pairs = [(next(ours), next(plain)) for _ in range(steps + 1)][1:]  # the first makes room for those to come
        return statistics.median(mine for mine, _ in pairs), statistics.median(mine - other for mine, other in pairs)


def _name(ids: Sequence[int]) -> str:
    """What random draws depend on: the text itself, so that batches and shared prefixes change nothing."""
    return hashlib.blake2b(b",".join(str(token).encode() for token in ids), digest_size=8).hexdigest()
