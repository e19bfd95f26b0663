"""lm-eval's requests as prompts and continuations: tokenised and cut as its own Hugging Face model does, grouped by context.

Knows lm-eval's conventions, none of its classes: `task.py` (lm-eval's tasks in kvlab's loop) and `kvlab.lm_eval_model`
(kvlab as a model in lm-eval's) both ask through this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab.evals.base import Record, Sample, Task
from kvlab.reading import Prompt, Reading, Scored
from kvlab.settings import SettingError

Ids = tuple[int, ...]
ROLLING = 2048
"""Tokens of a rolling window where neither the task nor the tokenizer says how many a model reads."""


@dataclass(frozen=True)
class Part:
    """Ids to be scored after one of a sample's prompts, for one of its requests; a rolling request has several."""

    request: int
    row: int
    ids: Ids


@dataclass(frozen=True)
class Doc(Sample):
    """All requests of one document. Requests with the same context share its prompt.

    source  what the task needs to turn results into values
    """

    parts: tuple[Part, ...] = ()
    source: Any = field(default=None, compare=False, repr=False)

    @property
    def after(self) -> int:
        """Most tokens that are scored or generated after a prompt."""
        return max(self.after_each)

    @property
    def after_each(self) -> tuple[int, ...]:
        """Windows of a text, and what follows the contexts of a question, may differ in length."""
        generated = super().after
        rows = range(len(self.prompts))
        return tuple(max([generated, *(len(part.ids) for part in self.parts if part.row == row)]) for row in rows)

    @property
    def work(self) -> int:
        """Tokens that are scored or generated in all."""
        return super().work + sum(len(part.ids) for part in self.parts)

    @property
    def tokens(self) -> int:
        """Most tokens that the model reads: the last one that is scored is not read."""
        texts = [len(self.prompts[part.row].ids) + len(part.ids) - 1 for part in self.parts]
        return max([len(self.prompt.ids) + super().after, *texts])


@dataclass(frozen=True)
class Encoder:
    """Texts to token ids. max_length: tokens that a text may have, of which more are cut on the left; None: nothing is cut."""

    tokenizer: Any
    max_length: int | None = None

    @property
    def prefix(self) -> int:
        """What stands in for an empty context: the start token, or the end token where there is none."""
        start, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if start is None and end is None:
            raise SettingError("this model's tokenizer has neither a start nor an end token to score a text without context")
        return start if start is not None else end

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer adds unless the text begins with one already."""
        if special is None:
            special = not text.startswith(self.tokenizer.decode([self.prefix]))
        return self.tokenizer(text, add_special_tokens=special, verbose=False).input_ids

    def pair(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """Ids of a context and of what follows it, tokenised as one; spaces at the context's end go to what follows."""
        if not context:
            ids = self.encode(continuation, special=False)
            whole = ids if ids[:1] == [self.prefix] else [self.prefix, *ids]
            return tuple(whole[:1]), tuple(whole[1:])
        bare = context.rstrip()
        if not bare:
            raise SettingError("a context is nothing but spaces")
        start = self.encode(bare)
        return tuple(start), tuple(self.encode(bare + context[len(bare) :] + continuation)[len(start) :])

    def fitted(self, context: Ids, continuation: Ids) -> Ids:
        """What is left of a context beside a continuation, whose last token the model doesn't read."""
        room = len(context) if self.max_length is None else self.max_length + 1 - len(continuation)
        if room < 1:
            raise SettingError(f"{len(continuation)} tokens to score don't fit {self.max_length}: raise task.max_length")
        return context[-room:]

    def before(self, context: str, new_tokens: int) -> tuple[Ids, int]:
        """Ids of a context that so many tokens are generated after, and how many were cut on its left."""
        ids = tuple(self.encode(context)) or (self.prefix,)
        room = len(ids) if self.max_length is None else self.max_length - new_tokens
        if room < 1:
            raise SettingError(f"{new_tokens} new tokens don't fit {self.max_length}: raise task.max_length")
        return ids[-room:], max(0, len(ids) - room)

    def rolling(self, text: str) -> list[tuple[Ids, Ids]]:
        """A text in windows: what is read before, and what is scored; each token of the text is scored once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        known = self.tokenizer.model_max_length
        size = self.max_length or (known if known < 1 << 20 else ROLLING)
        windows = get_rolling_token_windows(self.encode(text), self.prefix, size, context_len=1)
        found = [(tuple(context), tuple(scored)) for context, scored in map(make_disjoint_window, windows)]
        if not found:
            raise SettingError("a text to score is empty")
        return found


def windows_of(windows: Sequence[tuple[Ids, Ids]]) -> tuple[tuple[Prompt, ...], tuple[Part, ...]]:
    """Prompts and parts of one request's windows. A budget by ratio is of each window's whole text."""
    prompts = tuple(Prompt(context, text_len=len(context) + len(ids)) for context, ids in windows)
    return prompts, tuple(Part(0, row, ids) for row, (_, ids) in enumerate(windows))


def grouped(pairs: Sequence[tuple[int, Ids, Ids]]) -> tuple[tuple[Prompt, ...], tuple[Part, ...]]:
    """Prompts and parts of (request, context, continuation); equal contexts are one prompt."""
    prompts: dict[Ids, Prompt] = {}
    parts = []
    for request, context, ids in pairs:
        if not ids:
            raise SettingError("a choice has no tokens of its own after its context")
        prompts.setdefault(context, Prompt(context, asks=True))
        parts.append(Part(request, list(prompts).index(context), ids))
    return tuple(prompts.values()), tuple(parts)


def score_parts(reading: Reading, docs: Sequence[Doc]) -> list[list[Scored]]:
    """Each document's parts, scored on forks of the reading, whose rows are the documents' prompts in order.

    Whole texts, one to a row, move the reading itself on: what it then holds is what the text was read with.
    """
    rows: list[list[Ids]] = [[] for doc in docs for _ in doc.prompts]
    places: list[list[tuple[int, int]]] = []
    first = 0
    for doc in docs:
        places.append([])
        for part in doc.parts:
            row = first + part.row
            places[-1].append((row, len(rows[row])))
            rows[row].append(part.ids)
        first += len(doc.prompts)
    if rows and all(prompt.text_len for doc in docs for prompt in doc.prompts):
        scored = [[text] for text in reading.score([ids for (ids,) in rows])]
    else:
        scored = reading.score_choices(rows)
    return [[scored[row][number] for row, number in own] for own in places]


@dataclass(frozen=True)
class Requests(Task):
    """Answers requests and leaves it to others what they mean.

    A record has `loglikelihoods`, a pair for each request (log-probability, whether it was likeliest throughout), or `output`.
    """

    def evaluate(self, reading: Reading, samples: Sequence[Sample], tokenizer: Any) -> list[Record]:
        """Scored parts summed up by request; what is generated and its gold answer as in every task."""
        docs = [sample for sample in samples if isinstance(sample, Doc)]
        parts = score_parts(reading, docs)
        records = super().evaluate(reading, samples, tokenizer)
        for record, doc, scored in zip(records, docs, parts, strict=True):
            if doc.parts:
                record |= _by_request(doc, scored)
        return records


def _by_request(doc: Doc, scored: Sequence[Scored]) -> Record:
    """Log-probabilities of requests and their numbers of tokens, and the likeliest token in each place of a single one."""
    requests = max(part.request for part in doc.parts) + 1
    own = [[s for part, s in zip(doc.parts, scored, strict=True) if part.request == number] for number in range(requests)]
    found: Record = {
        "loglikelihoods": [[sum(s.logprob for s in each), all(s.greedy for s in each)] for each in own],
        "scored_tokens": [sum(len(s.ids) for s in each) for each in own],
    }
    if requests == 1:
        found["trace"] = [token for s in own[0] for token in s.top1]
    return found
