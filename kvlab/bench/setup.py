"""What benches share: the model, a real text, and caches that have read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kvlab.budget import Budget
from kvlab.evals.texts import embedded_text
from kvlab.models import load_model
from kvlab.policies import make_policy
from kvlab.session import Session, attach


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
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    def ids(self, length: int) -> torch.Tensor:
        """(1, length) tokens of prose."""
        ids = self.tokenizer(embedded_text().text[: 10 * length], add_special_tokens=False, verbose=False).input_ids
        if len(ids) < length:
            raise ValueError(f"the embedded text has {len(ids)} tokens, fewer than {length}: choose shorter lengths")
        return torch.tensor(ids[:length], device=self.device)[None]

    @contextmanager
    def session(self, policy: str, **settings: Any) -> Iterator[Session]:
        """A session of a policy at the bench's budget."""
        budget = Budget() if policy == "full" else Budget(ratio=self.ratio)
        with attach(self.model, make_policy(policy, **settings), budget, tokenizer=self.tokenizer) as session:
            yield session


def load(name: str, device: str | None, dtype: str | None, **options: Any) -> Setup:
    """Load a model for benches. Raises ValueError for one that can't be."""
    given = {key: value for key, value in (("device", device), ("dtype", dtype)) if value is not None}
    model, tokenizer = load_model(name, **given)
    return Setup(model, tokenizer, **options)
