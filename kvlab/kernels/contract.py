"""What kernels are given: rows of slots, tokens that arrive, limits, and the rule by which tokens leave.

A row is one KV head of one sequence; `rows` = batch * kv_heads, sequence by sequence. A rule is a family with parameters, so
kernels know no policy: what becomes of the attention that a token receives (`observe`), and which token leaves (`order`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from kvlab.shapes import Keys, PerHead, QueryPositions, Scores, Values

OBSERVE = ("nothing", "sum", "last")
ORDER = ("age", "value", "ranked")
GROUPS = ("mean", "sum", "max", "first")


@dataclass(frozen=True)
class ScanRule:
    """How per-step eviction may be replayed over known tokens.

    observe  what a step's attention, merged over a KV head's query heads, does to each held token's value:
             `nothing`; `sum`: is added; `last`: replaces it, and isn't kept between calls
    order    which unprotected token leaves first: `age`: the oldest; `value`: the one with the lowest value;
             `ranked`: the lowest value while more than half of the limit is held by tokens whose value is finite, then the
             oldest of the others
    plane    name of the per-token state that holds the value; None where nothing outlives a step
    group    how query heads merge: mean, sum, max, first
    coupled  all KV heads of a sequence hold the same tokens in the same slots and drop together, by the mean of their values;
             kvlab sets it from the policy's `coupling`

    Ties go to the newer token. A value that is no number counts as the lowest.
    """

    observe: Literal["nothing", "sum", "last"] = "nothing"
    order: Literal["age", "value", "ranked"] = "age"
    plane: str | None = None
    group: Literal["mean", "sum", "max", "first"] = "mean"
    coupled: bool = False

    def __post_init__(self) -> None:
        for name, known in (("observe", OBSERVE), ("order", ORDER), ("group", GROUPS)):
            if getattr(self, name) not in known:
                raise ValueError(f"ScanRule({name}={getattr(self, name)!r}): use one of {', '.join(known)}")
        if self.plane is None and (self.observe == "sum" or (self.order != "age" and self.observe != "last")):
            raise ValueError(f"{self}: name the per-token state that holds the value, plane=...")


@dataclass(frozen=True)
class Slots:
    """Storage of all rows, end to end. A row's tokens fill its first slots; beyond them positions are -1.

    keys, values (total, dim); positions (total,) int32; value (total,) float32, None if the rule has no plane;
    special (total,) bool, None if no token is special; source (total,) int32, None if nobody asks where tokens came from
    offsets  (rows,) int64: first slot of each row; lengths (rows,) int64: its tokens
    widest   slots of the largest row, on the host

    Kernels change all of these in place but offsets. `special` and `source` move along with their tokens.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    offsets: Tensor
    lengths: Tensor
    widest: int
    value: Tensor | None = None
    special: Tensor | None = None
    source: Tensor | None = None
    kept: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)
    """What a back end has made of these tensors, for the next call."""


@dataclass(frozen=True)
class Arrivals:
    """New tokens, in order.

    keys, values (batch, kv_heads, tokens, dim) in the storage's type; positions (batch, tokens), -1 for pads, which come in
    nowhere; value: what a token's value starts with, (batch, kv_heads, tokens), None for 0; special (batch, tokens) bool;
    source: what goes into `Slots.source`, (batch, kv_heads, tokens)
    """

    keys: Keys
    values: Values
    positions: QueryPositions
    value: Scores | None = None
    special: Tensor | None = None
    source: Tensor | None = None


@dataclass(frozen=True)
class Limits:
    """What rows may hold, (batch, kv_heads) int64 each.

    limit     tokens after a decision
    target    tokens that a decision leaves, at most `limit`
    recent    last tokens that are protected, the newest included
    num_sink  first tokens of a sequence that are protected
    before    room is made before a token comes in (it reads at most `limit` tokens), not after (at most `limit` + 1)
    """

    limit: PerHead
    target: PerHead
    recent: PerHead
    num_sink: int = 0
    before: bool = False
    kept: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)
    """What a back end has made of these tensors, for the next call."""
