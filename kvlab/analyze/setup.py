"""What analyses share: the model, and pieces of a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvlab.evals.chat import start_ids
from kvlab.evals.texts import embedded_text, file_text
from kvlab.models import load_spec, resolve_model
from kvlab.outline import fingerprint

LEAST = 20
"""Tokens of a text: a tenth of them are ranks that a line is fitted to."""
COLUMN = "text"
"""Of a file that is a table."""


@dataclass(frozen=True)
class Setup:
    """A model, and texts of equal length for it: each (1, tokens).

    fingerprint  of the model's files, "" where it was given as an object; source: what the texts were cut from
    """

    name: str
    model: Any
    tokenizer: Any
    texts: tuple[torch.Tensor, ...]
    fingerprint: str = ""
    source: str = "a text of its own"

    @property
    def label(self) -> str:
        """What pictures and tables are of."""
        count, tokens = len(self.texts), self.texts[0].shape[1]
        return f"{self.name}, {f'{count} texts' if count > 1 else 'a text'} of {tokens} tokens"


def load(
    name: str,
    device: str | None,
    dtype: str | None,
    *,
    file: str | None,
    tokens: int,
    texts: int,
    held_out: bool = False,
) -> Setup:
    """Load a model and cut a text for it: a file's, or else prose that comes with Python.

    held_out  from the text's end, since tasks read it from its start
    Raises ValueError where one can't be had, or doesn't fit the other.
    """
    if tokens < LEAST:
        raise ValueError(f"--tokens {tokens}: use at least {LEAST}")
    given: dict[str, Any] = {key: value for key, value in (("device", device), ("dtype", dtype)) if value is not None}
    text = (file_text(file, COLUMN, "--file") if file else embedded_text()).text
    spec = resolve_model(name, **given)
    model, tokenizer = load_spec(spec)
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and tokens > context:
        raise ValueError(f"--tokens {tokens}: {name} reads {context} tokens at most")
    found = tuple(ids.to(model.device) for ids in pieces(text, tokenizer, tokens, texts, from_end=held_out))
    source = Path(file).name if file else "prose that comes with Python"
    return Setup(spec.name, model, tokenizer, found, fingerprint(spec), f"the end of {source}" if held_out else source)


def pieces(text: str, tokenizer: Any, tokens: int, count: int, *, from_end: bool = False) -> list[torch.Tensor]:
    """`count` pieces of a text, one after the other: (1, tokens) ids each, the tokenizer's start token, if any, in front.

    from_end  the last ones
    """
    ids, start = tokenizer(text, add_special_tokens=False, verbose=False).input_ids, start_ids(tokenizer)
    fresh = tokens - len(start)  # tokens of the text in each piece
    if fresh < 1:
        raise ValueError(f"--tokens {tokens}: too short for the {len(start)} tokens that every text begins with")
    if len(ids) < count * fresh:
        raise ValueError(
            f"the text has {len(ids)} tokens, and --texts {count} of --tokens {tokens} need {count * fresh}: "
            "lower them, or give a longer --file"
        )
    ids = ids[len(ids) - count * fresh :] if from_end else ids
    return [torch.tensor([[*start, *ids[number * fresh : (number + 1) * fresh]]]) for number in range(count)]
