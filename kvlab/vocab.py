"""Sets of token ids that policies treat apart: special tokens and punctuation. Knows tokenizers, no model and no policy."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

PUNCTUATION, SPECIAL = 1, 2
"""Kinds of tokens."""
LONGEST_MARKER = 12
"""Tokens of a template's marker, at most."""


class Vocab:
    """Special and punctuation ids of a transformers tokenizer, found once when first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._on_device: dict[torch.device, Tensor] = {}
        self._kinds: dict[torch.device, Tensor] = {}

    def special_ids(self, device: torch.device) -> Tensor:
        """Ids of special tokens, (count,) int32, made once for each device."""
        if device not in self._on_device:
            self._on_device[device] = torch.tensor(sorted(self.special), dtype=torch.int32, device=device)
        return self._on_device[device]

    def kinds(self, ids: Tensor) -> Tensor:
        """Of each id, in uint8: SPECIAL, PUNCTUATION, or 0 for anything else."""
        if ids.device not in self._kinds:
            table = torch.zeros(1 + max([*self.special, *self.punctuation, 0]), dtype=torch.uint8)
            table[list(self.punctuation)] = PUNCTUATION
            table[list(self.special)] = SPECIAL
            self._kinds[ids.device] = table.to(ids.device)
        table = self._kinds[ids.device]
        return torch.where((ids >= 0) & (ids < len(table)), table[ids.long().clamp(0, len(table) - 1)], 0)

    def in_markers(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Which ids (..., tokens), in the order of their positions, -1 for none, are part of a marker of the chat template."""
        found = torch.zeros_like(positions, dtype=torch.bool)
        follows = (positions >= 0) & (positions - positions.roll(1, -1) == 1)  # the token before it stands there too
        for marker in self.markers:
            size = len(marker)
            if size > ids.shape[-1]:
                continue
            matches = (ids.unfold(-1, size, 1) == torch.tensor(marker, device=ids.device)).all(-1)
            matches &= follows.unfold(-1, size, 1)[..., 1:].all(-1) & (positions.unfold(-1, size, 1)[..., 0] >= 0)
            for place in range(size):
                found[..., place : place + matches.shape[-1]] |= matches
        return found

    @cached_property
    def markers(self) -> tuple[tuple[int, ...], ...]:
        """What the chat template writes around messages, as sequences of two ids or more that begin with a special token or
        hold none. They are short: a longer text is a message that the template itself begins with."""
        found: dict[tuple[int, ...], None] = {}
        for text in _template_texts(self._tokenizer):
            ids = self._tokenizer(text.strip(), add_special_tokens=False).input_ids
            starts = [place for place, token in enumerate(ids) if token in self.special]
            edges = sorted({0, *starts, len(ids)})
            for start, end in zip(edges, edges[1:], strict=False):
                if 1 < end - start <= LONGEST_MARKER:
                    found[tuple(ids[start:end])] = None
        return tuple(found)

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of special tokens: BOS, EOS, pad, and every added token that is marked special."""
        added = self._tokenizer.added_tokens_decoder
        return frozenset(self._tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}

    @cached_property
    def punctuation(self) -> frozenset[int]:
        """Ids whose text, spaces aside, is punctuation or symbols only."""
        texts = self._tokenizer.batch_decode([[i] for i in range(len(self._tokenizer))])
        return frozenset(i for i, text in enumerate(texts) if i not in self.special and _is_punctuation(text.strip()))


def _is_punctuation(text: str) -> bool:
    return bool(text) and all(unicodedata.category(letter)[0] in "PS" and letter != "\ufffd" for letter in text)


def _template_texts(tokenizer: Any) -> Iterator[str]:
    """The fixed texts of a chat template, found by rendering conversations and taking the messages out."""
    if getattr(tokenizer, "chat_template", None) is None:
        return
    words = ["kvlabsystem", "kvlabquestion", "kvlabanswer", "kvlabmore"]
    messages = [
        {"role": role, "content": word} for role, word in zip(("system", "user", "assistant", "user"), words, strict=True)
    ]
    for conversation in (messages, messages[1:]):
        try:
            rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except Exception:  # templates raise what they like at roles that they don't know
            continue
        for word in words:
            rendered = rendered.replace(word, "\0")
        yield from (text for text in rendered.split("\0") if text.strip())
