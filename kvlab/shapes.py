"""Named tensor shapes and `Step`, what a policy sees of one attention layer.

This module knows no model and no policy. Axis names, used all over kvlab:
`batch` sequences, `kv_heads` key/value heads, `group` query heads that read one KV head,
`queries` query tokens, `slots` places of a layer's store (an empty one has position -1).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

Queries = Float[Tensor, "batch kv_heads group queries head_dim"]
Keys = Float[Tensor, "batch kv_heads slots head_dim"]
Values = Float[Tensor, "batch kv_heads slots value_dim"]
Outputs = Float[Tensor, "batch kv_heads group queries value_dim"]
Attention = Float[Tensor, "batch kv_heads group queries slots"]
Positions = Int[Tensor, "batch kv_heads slots"]
QueryPositions = Int[Tensor, "batch queries"]
Scores = Float[Tensor, "batch kv_heads slots"]
Tiers = Int[Tensor, "batch kv_heads slots"]
Kept = Bool[Tensor, "batch kv_heads slots"]
PerHead = Int[Tensor, "batch kv_heads"]
PerRow = Int[Tensor, " batch"]
Probes = UInt8[Tensor, "batch kv_heads probes tokens bytes"]
Look = tuple[Attention, QueryPositions]
"""Attention of some queries, and their positions; zero and -1 for queries that do not exist."""


@dataclass(frozen=True)
class Arrival:
    """Tokens on their way into one layer's cache."""

    layer_idx: int
    keys: Keys
    values: Values
    """As they will be stored: (batch, kv_heads, tokens, dim)."""
    positions: QueryPositions
    """True positions, (batch, tokens), -1 for pads."""

    def part(self, start: int, end: int) -> Arrival:
        """Some of the tokens."""
        now = slice(start, end)
        return Arrival(self.layer_idx, self.keys[:, :, now], self.values[:, :, now], self.positions[:, now])


class _Deferred:
    """A field that may be given as a function, which is called when the field is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.place = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:  # so a dataclass finds no default
            raise AttributeError
        value = vars(instance)[self.place]
        if not isinstance(value, Tensor):
            value = vars(instance)[self.place] = value()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.place] = value


def _deferred() -> Any:
    return _Deferred()


@dataclass(frozen=True)
class Step:
    """What one decision of a policy may look at: one layer, right after its attention (or before, see `Policy.phase`).

    `positions` are true token positions (pads never count), -1 where a slot is empty; slots stand in no order, so rules
    read positions and never slot indices. Tensors are views of what the cache holds: read them, never write.
    """

    layer_idx: int
    num_layers: int
    prompt_end: bool
    """True at the end of a turn, False at a decode step."""
    positions: Positions
    now: PerRow
    """Position of each sequence's newest token."""
    budget: PerHead
    """Tokens that each head may hold after this decision."""
    recent: PerHead
    """Tokens at the end that selection protects."""
    queries: Queries
    """The voting queries: the current token's, or at a turn's end the last `obs_window` (fewer in a shorter turn)."""
    query_positions: QueryPositions
    """Positions of `queries`, -1 for one that does not exist."""
    keys: Keys = _deferred()
    """Of all slots, as they are stored; decoded when a policy reads them, where a codec holds them."""
    values: Values = _deferred()
    grace: PerHead | None = None
    """Age in tokens up to which nothing decays, for a policy that says so (`Policy.grace`)."""
    arriving: Arrival | None = None
    """The token about to come in, for a policy that decides before attention."""
    attention: Attention | None = None
    """Softmax attention of `queries`, zero for queries that do not exist; None unless the policy asks for it."""
    looks: Callable[[], Iterator[Look]] | None = None
    """Attention of `queries`, some at a time, so that any number of them takes little memory."""
    mass: Scores | None = None
    """Attention that each token received so far, summed over queries (H2O, section 4.1)."""
    token_ids: Positions | None = None
    sample_ids: Int[Tensor, " batch"] | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """The policy's own per-token state: (batch, kv_heads, slots, ...)."""
    window: int | None = None
    """Sliding window of the layer."""
    profile: Mapping[str, Tensor] = field(default_factory=dict)
    """What the policy found out about each head at the first prompt's end: (batch, kv_heads, ...)."""
    vocab: Any = None
    """Special and punctuation ids (`kvlab.vocab.Vocab`), where the session has a tokenizer."""

    def changed(self, **changes: Any) -> Step:
        """The same with other values; unlike `replace` it reads nothing that is deferred."""
        other = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(other, name, value)
        return other
