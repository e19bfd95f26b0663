"""What benches share: the model, a real text, and caches that have read it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvlab.budget import Budget
from kvlab.codecs import Codec
from kvlab.evals.texts import embedded_text
from kvlab.models import load_model
from kvlab.policies import PolicyError, make_policy, policy_names
from kvlab.session import Session, attach
from kvlab.sharing import Share

AT_LEAST, SPARE = 1024, 64
"""Tokens that benches read whatever the lengths are, and that they decode."""


@dataclass(frozen=True)
class Setup:
    """How a bench is run.

    lengths  prompt lengths; batch: sequences that are decoded together; ratio: the budget; repeats: of each measurement
    """

    model: Any
    tokenizer: Any
    lengths: tuple[int, ...]
    batch: int
    ratio: float
    repeats: int

    @property
    def usual(self) -> bool:
        """Whether targets apply: they are for this model on a processor, this batch and this budget."""
        found = (self.model.config.num_hidden_layers, self.model.config.hidden_size, self.batch, self.ratio)
        return found == (30, 576, 8, 0.2) and self.device.type == "cpu" and self.model.dtype == torch.float32

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @cached_property
    def stock(self) -> Any:
        """The same weights in a model that no session touches."""
        twin = type(self.model)(copy.deepcopy(self.model.config)).to(self.device, self.model.dtype)
        twin.load_state_dict(self.model.state_dict(), assign=True)
        twin.tie_weights()
        return twin.eval()

    def ids(self, length: int) -> torch.Tensor:
        """(1, length) tokens of prose."""
        ids = self.tokenizer(embedded_text().text[: 10 * length], add_special_tokens=False, verbose=False).input_ids
        if len(ids) < length:
            raise ValueError(f"the embedded text has {len(ids)} tokens, fewer than {length}: choose shorter lengths")
        return torch.tensor(ids[:length], device=self.device)[None]

    @contextmanager
    def session(self, policy: str, method: Codec | Share | None = None, **settings: Any) -> Iterator[Session]:
        """A session of a policy at the bench's budget, with a codec, a way of sharing or neither."""
        budget = Budget() if policy == "full" else Budget(ratio=self.ratio)
        work: dict[str, Any] = {} if method is None else {"codec" if isinstance(method, Codec) else "share": method}
        with attach(self.model, make_policy(policy, **settings), budget, tokenizer=self.tokenizer, **work) as session:
            yield session


def load(name: str, device: str | None, dtype: str | None, **options: Any) -> Setup:
    """Load a model for benches. Raises ValueError for one that can't be."""
    given = {key: value for key, value in (("device", device), ("dtype", dtype)) if value is not None}
    model, tokenizer = load_model(name, **given)
    setup = Setup(model, tokenizer, **options)
    longest = max(max(setup.lengths), AT_LEAST)
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and longest + SPARE > context:
        raise ValueError(f"{name} reads {context} tokens at most, and benches need {longest + SPARE}: choose shorter --lengths")
    setup.ids(longest)
    return setup


def evicting() -> list[str]:
    """Names of policies that keep to a budget and need no settings."""
    found = []
    for name in policy_names():
        try:
            evicts = make_policy(name).evicts
        except (PolicyError, TypeError):  # another's policy, with settings that must be given
            continue
        found += [name] if evicts else []
    return found
