"""A sample as text, for readers of results: what was asked, and what would have been right."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from kvlab.evals.base import Sample


def prompts_hash(samples: Sequence[Sample]) -> str:
    """Of all token ids that are read before anything is asked."""
    prompts = [prompt.ids for sample in samples for prompt in sample.prompts]
    return hashlib.blake2b(repr(prompts).encode(), digest_size=8).hexdigest()


def as_text(sample: Sample, tokenizer: Any) -> dict[str, Any]:
    """`id` and `prompt`, special tokens included, as the model reads it.

    Where there are such: `others` (further prompts), `question` (the prompt's end that is one), `gold` (what is scored),
    `choices` and `right`, the number of the right one.
    """

    def text(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    prompt, *others = sample.prompts
    found: dict[str, Any] = {"id": sample.id, "prompt": text(prompt.ids)}
    if others:
        found["others"] = [text(other.ids) for other in others]
    if prompt.question:
        found["question"] = text(prompt.ids[-prompt.question :])
    if sample.gold:
        found["gold"] = text(sample.gold)
    if sample.choices:
        found |= {"choices": [text(choice) for choice in sample.choices], "right": sample.gold_choice}
    return found
