"""How a policy meets a text: prompts are read under a protocol; what follows is scored or generated under eviction.

    prompt    the prompt but its held-back end is read with full attention and evicted to the budget once; everything after
              it (question, continuation, generation) is read under per-step eviction
    chunked   the same, but the prompt is read in chunks and evicted to the budget after each: bounded peak memory
    stream    eviction acts from the first token on, each token as if it were decoded
    h2o_local, h2o_global  nothing is evicted: whole texts are read under the masks of H2O's released code

In all of them the last token of a prompt is read under eviction, so that even the first token of a continuation sees what
the policy left. Prompts whose compressed parts are equal are read once. Knows sessions and caches, no task, and of
policies only the one whose code is simulated.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvlab.budget import Budget, exact_share
from kvlab.hints import did_you_mean
from kvlab.measure import now
from kvlab.policies import Policy, make_policy
from kvlab.policies.h2o import H2O
from kvlab.reading import Feed, Prompt, Reading, WholeTexts, in_segments
from kvlab.session import Session
from kvlab.settings import SettingError
from kvlab.simulation import H2OSimulation

READ_TOKENS = 4096
"""Tokens of a batch that are decoded per call where their logits are of no use."""
SCORE_TOKENS = 1024
"""Tokens of a batch scored per call: bounds the memory that logits take."""


@dataclass(frozen=True)
class Protocol:
    """How prompts are read. Their last token is always read after an eviction, or nothing could change what follows it.

    exact  how tokens of a known text are decoded: `scan`: many in a forward pass, each layer replaying its evictions;
           `step`: one forward pass for each, as generation does. Results differ by rounding only.
    """

    exact: Literal["scan", "step"] = "scan"

    name: ClassVar[str] = ""
    compresses: ClassVar[bool] = True
    """Whether a part of the prompt is read with full attention and evicted afterwards."""
    several_turns: ClassVar[bool] = False
    """Whether a prompt is evicted more than once."""
    simulated: ClassVar[bool] = False
    """Whether evictions are only simulated, by masks over whole texts."""
    labels: ClassVar[tuple[str, ...]] = ()
    """What a reader of results must know."""

    def held(self, prompt: Prompt) -> int:
        """How many last tokens of a prompt are read after its context, at least 1."""
        return 1

    def query_aware(self, prompt: Prompt) -> bool:
        """Whether the question (or a part of it) is inside the compressed part."""
        return self.compresses and (prompt.asks or self.held(prompt) < prompt.question)

    def segment(self, tokens: int) -> int:
        """Tokens of a known text in one forward pass, where `tokens` would do."""
        return 1 if self.exact == "step" else tokens

    def known_len(self, prompt: Prompt) -> int:
        """Length that a budget by ratio is of."""
        return len(prompt.ids)

    def check(self, policy: Policy, budget: Budget) -> None:
        """Raises SettingError if a policy or a budget can't be run under this protocol."""

    def at_work(self, policy: Policy, budget: Budget) -> dict[str, Any]:
        """Policy, budget and simulation that `attach` is given."""
        return {"policy": policy, "budget": budget}

    def read_context(self, feed: Feed, rows: Sequence[Sequence[int]], prefill_chunk: int | None) -> None:
        """Read the contexts: prompts without what is held back."""
        raise NotImplementedError


@dataclass(frozen=True)
class HoldsBack(Protocol):
    """hold_back: last tokens of a prompt that stay outside its compressed part, at least 1.

    Without it the question is held back where a task marks one, else the last token.
    """

    hold_back: int | None = None

    def __post_init__(self) -> None:
        if self.hold_back == 0:
            raise SettingError(
                "protocol.hold_back=0: use at least 1, since with nothing held back the first token of an answer is predicted "
                "from full attention and no policy could change it"
            )

    def held(self, prompt: Prompt) -> int:
        """What is held back; one token at least is compressed where there are two."""
        wanted = self.hold_back if self.hold_back is not None else max(1, prompt.question)
        return min(wanted, max(1, len(prompt.ids) - 1))


@dataclass(frozen=True)
class PromptProtocol(HoldsBack):
    """The prompt is read with full attention and evicted at its end."""

    name: ClassVar[str] = "prompt"

    def read_context(self, feed: Feed, rows: Sequence[Sequence[int]], prefill_chunk: int | None) -> None:
        """One turn, in chunks or at once."""
        parts = list(in_segments(rows, prefill_chunk))
        if len(parts) == 1:  # a layer's turn ends with its call, so no layer waits for the others
            feed(parts[0])
            return
        with feed.cache.turn():
            for part in parts:
                feed(part)


@dataclass(frozen=True)
class Chunked(HoldsBack):
    """The prompt is read in chunks of `chunk` tokens and evicted to the budget after each."""

    chunk: int = 256

    name: ClassVar[str] = "chunked"
    several_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise SettingError("protocol.chunk=0: use the number of tokens of a chunk, such as 256")

    def check(self, policy: Policy, budget: Budget) -> None:
        """A profile of a prompt needs all of it."""
        if policy.profiles:
            raise SettingError(f"policy {policy.name} decides by all of a prompt, not chunk by chunk: use protocol=prompt")

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

    def check(self, policy: Policy, budget: Budget) -> None:
        """Policies that decide at a prompt's end have nothing to decide here."""
        if policy.evicts and policy.when == "prompt_end":
            others = "protocol=prompt" if policy.profiles else "protocol=prompt or protocol=chunked"
            raise SettingError(
                f"policy {policy.name} decides at a prompt's end and can't evict from the first token on: use {others}, or "
                "another policy"
            )

    def read_context(self, feed: Feed, rows: Sequence[Sequence[int]], prefill_chunk: int | None) -> None:
        """All steps."""
        with feed.cache.stepwise():
            for _ in feed.steps(rows, self.segment(prefill_chunk or max(1, READ_TOKENS // len(rows)))):
                pass


@dataclass(frozen=True)
class H2OLocal(Protocol):
    """Whole texts under the mask of H2O's code for OPT and NeoX; see `kvlab.simulation`. For full and h2o, by ratio."""

    name: ClassVar[str] = "h2o_local"
    compresses: ClassVar[bool] = False
    simulated: ClassVar[bool] = True
    labels: ClassVar[tuple[str, ...]] = ("simulated",)
    oracle: ClassVar[bool] = False

    def check(self, policy: Policy, budget: Budget) -> None:
        """The masks know heavy hitters and recent tokens as parts of the length, and nothing else."""
        if policy.evicts and (policy.name != "h2o" or policy != H2O(heavy_share=getattr(policy, "heavy_share", 0.5))):
            raise SettingError(
                f"protocol {self.name} simulates policy=h2o (and policy=full beside it) with no setting but heavy_share; use "
                "protocol=prompt or protocol=stream for others"
            )
        if policy.evicts and (budget.ratio is None or budget.of != "prompt"):
            raise SettingError(f"protocol {self.name} needs budget.ratio, a part of each text's length")

    def at_work(self, policy: Policy, budget: Budget) -> dict[str, Any]:
        """Nothing is evicted; h2o's masks stand in for attention."""
        if not isinstance(policy, H2O):
            return {"policy": policy, "budget": budget}
        assert budget.ratio is not None
        heavy = exact_share(budget.ratio) * exact_share(policy.heavy_share)
        parts = float(heavy), float(exact_share(budget.ratio) - heavy)
        return {"policy": make_policy("full"), "budget": Budget(), "simulation": H2OSimulation(*parts, oracle=self.oracle)}


@dataclass(frozen=True)
class H2OGlobal(H2OLocal):
    """The same with the mask of its code for LLaMA, which looks ahead: an oracle."""

    name: ClassVar[str] = "h2o_global"
    labels: ClassVar[tuple[str, ...]] = ("simulated", "oracle")
    oracle: ClassVar[bool] = True


PROTOCOLS: dict[str, type[Protocol]] = {cls.name: cls for cls in (PromptProtocol, Stream, Chunked, H2OLocal, H2OGlobal)}


def protocol_class(name: str) -> type[Protocol]:
    """The protocol of that name. Raises SettingError with near names if there is none."""
    if name not in PROTOCOLS:
        raise SettingError(f"unknown protocol {name!r}{did_you_mean(name, PROTOCOLS)}; known: {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


@dataclass(frozen=True)
class Begun:
    """Prompts that are about to be read.

    contexts  what is compressed of them, equal ones once; rows: which of them each prompt begins with
    feed      of the contexts' cache
    """

    prompts: Sequence[Prompt]
    contexts: list[tuple[int, ...]]
    rows: list[int]
    feed: Feed


@dataclass(frozen=True)
class Reader:
    """Reads batches of prompts with one session, under one protocol."""

    session: Session
    protocol: Protocol
    pad_id: int = 0
    prefill_chunk: int | None = None

    def read(self, prompts: Sequence[Prompt], new_tokens: Sequence[int] | None = None) -> Reading:
        """Read all but the last token of each prompt. new_tokens: how many are to come, for a budget of the total."""
        if self.protocol.simulated:
            return WholeTexts.of(self.session, prompts, self.pad_id)
        begun = self.begin(prompts, new_tokens)
        start = now(self.session.model.device)
        self.read_contexts(begun)
        return self.finish(begun, now(self.session.model.device) - start)

    def begin(self, prompts: Sequence[Prompt], new_tokens: Sequence[int] | None = None) -> Begun:
        """A new cache for these prompts, which has read nothing."""
        contexts = [prompt.ids[: -self.protocol.held(prompt)] for prompt in prompts]
        keys = self._keys(prompts, contexts, new_tokens or [0] * len(prompts))
        shared = list(dict.fromkeys(keys))
        cache = self.session.new_cache(
            max_new_tokens=0,  # known_len has those that are to come
            sample_ids=[name for _, _, name in shared],
            known_len=[known for _, known, _ in shared],
        )
        feed = Feed(self.session.model, cache, len(shared), self.pad_id)
        return Begun(prompts, [ids for ids, _, _ in shared], [shared.index(key) for key in keys], feed)

    def read_contexts(self, begun: Begun) -> None:
        """Read what is compressed, if anything."""
        if any(begun.contexts):
            self.protocol.read_context(begun.feed, begun.contexts, self.prefill_chunk)

    def finish(self, begun: Begun, prefill_s: float) -> Reading:
        """Read what is held back, once contexts have been read."""
        feed, prompts = begun.feed, begun.prompts
        if len(begun.contexts) < len(prompts):
            feed.take(begun.rows)
        contexts = [begun.contexts[row] for row in begun.rows]
        held = [prompt.ids[len(ids) : -1] for ids, prompt in zip(contexts, prompts, strict=True)]
        if any(held):
            with feed.cache.stepwise():
                for _ in feed.steps(held, self.protocol.segment(max(1, READ_TOKENS // len(held)))):
                    pass
        tokens = sum(map(len, begun.contexts))
        together = self.protocol.segment(max(1, SCORE_TOKENS // len(prompts)))
        return Reading(feed, tuple(prompt.ids[-1] for prompt in prompts), prefill_s, tokens, together)

    def _keys(
        self, prompts: Sequence[Prompt], contexts: Sequence[tuple[int, ...]], new_tokens: Sequence[int]
    ) -> list[tuple[tuple[int, ...], int, str]]:
        """Context, length that a ratio is of, and name for random draws; prompts with equal ones are read once."""
        keys = []
        for number, (prompt, context, new) in enumerate(zip(prompts, contexts, new_tokens, strict=True)):
            known = self.protocol.known_len(prompt)
            if self.session.budget.of == "total":
                known = len(prompt.ids) + new
            # The context itself is its name, so that sharing changes no draw; where there is none, nothing is shared.
            keys.append((context, known, _name(context) if context else prompt.name or f"row {number}"))
        return keys

    def overhead(self, reading: Reading, steps: int) -> tuple[float, float]:
        """Seconds of a decode step of the batch, and how many of them a step without any policy on the same tokens saves.

        Medians over some steps, the two kinds in turn, so that a busy machine slows both. The reading moves on.
        """
        policy = self.session.policy
        ours = reading.decode()
        if not policy.evicts:
            return statistics.median([next(ours) for _ in range(steps + 1)][1:]), 0.0
        plain = reading.fork(make_policy("full", rolling=policy.rolling)).decode()
        pairs = [(next(ours), next(plain)) for _ in range(steps + 1)][1:]  # the first makes room for those to come
        return statistics.median(mine for mine, _ in pairs), statistics.median(mine - other for mine, other in pairs)


def _name(ids: Sequence[int]) -> str:
    """What random draws depend on: the text itself, so that batches and shared prefixes change nothing."""
    return hashlib.blake2b(b",".join(str(token).encode() for token in ids), digest_size=8).hexdigest()
