"""Sets of token ids that policies treat apart: special tokens and punctuation. Knows tokenizers, no model and no policy."""

from __future__ import annotations

import unicodedata
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class Vocab:
    """Special and punctuation ids of a transformers tokenizer, found once when first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._on_device: dict[torch.device, Tensor] = {}

    def special_ids(self, device: torch.device) -> Tensor:
        """Ids of special tokens, (count,) int32, made once for each device."""
        if device not in self._on_device:
            self._on_device[device] = torch.tensor(sorted(self.special), dtype=torch.int32, device=device)
        return self._on_device[device]

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
