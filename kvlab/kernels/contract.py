"""What kernels are given: rows of slots, tokens that arrive, limits, and the rule by which tokens leave.

A row is one KV head of one sequence; `rows` = batch * kv_heads, sequence by sequence. A rule is a family with parameters, so
kernels know no policy: what becomes of the attention that a token receives (`observe`), and which token leaves (`order`).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from torch import Tensor

from kvlab.shapes import Keys, PerHead, QueryPositions, Scores, Values

OBSERVE = ("nothing", "sum", "last", "marks", "stamps")
ORDER = ("age", "value", "ranked", "expired", "count", "distance", "decayed")
GROUPS = ("mean", "sum", "max", "first")
HAIR = 2.0**-10
"""By which part attention must be below a bound to count as below, so that equal attention isn't by rounding."""


@dataclass(frozen=True)
class Marks:
    """What becomes of low attention, merged over a group: what is below 1 / a number of tokens, by more than HAIR.

    `marks`: at which of the last `window` queries a token's attention was low: a bit for each query, that of position p at
    place p mod window, a byte's lowest bit first. Bits of queries from before the token came are 0.
    `stamps`: the token's value is the position of the last query whose attention was not low; it leaves, in the order
    `expired`, when its value is `window` or more behind.

    high  a bit says the opposite: that attention was not low
    of    which number: tokens `seen` by then, or tokens that the row `held`, the query's own included
    """

    window: int
    high: bool = False
    of: Literal["seen", "held"] = "seen"


@dataclass(frozen=True)
class Decay:
    """What orders tokens that lose importance with age: influence * importance ** power.

    influence = max(floor, rate ** max(0, age - grace)), with the grace of `Limits`; importance = value_weight * value / the
    row's largest + norm_weight * norm / the row's largest; what has no largest above 0 doesn't count
    """

    rate: float
    floor: float
    power: float
    value_weight: float
    norm_weight: float


@dataclass(frozen=True)
class ScanRule:
    """How per-step eviction may be replayed over known tokens.

    observe  what a step's attention, merged over a KV head's query heads, does to each held token's value:
             `nothing`; `sum`: is added; `last`: replaces it, and isn't kept between calls; `marks`: sets a bit, `stamps`: where
             it isn't low the value becomes the query's position, see `Marks`
    order    which unprotected token leaves first: `age`: the oldest; `value`: the one with the lowest value;
             `ranked`: the lowest value while more than half of the limit is held by tokens whose value is finite, then the
             oldest of the others; `expired`: whatever the limit is, all whose value is `Marks.window` or more behind the newest
             position, and all that left a sliding window; then the lowest value; `count`: with most bits of low attention, or
             fewest of high; `distance`: whose bits differ most from those of the arriving token's probes, added up over probes;
             `decayed`: lowest as in `Decay`
    plane    name of the per-token state that holds the value; None where nothing outlives a step
    bits     name of the per-token state that holds bits, bytes of uint8; norm: of the one that holds norms
    group    how query heads merge: mean, sum, max, first
    marks, decay  details of `marks`, `stamps`, `expired` and `count`, and of `decayed`
    coupled  all KV heads of a sequence hold the same tokens in the same slots and drop together, by the mean of their values;
             kvlab sets it from the policy's `coupling`

    Ties go to the newer token. A value that is no number counts as the lowest.
    """

    observe: Literal["nothing", "sum", "last", "marks", "stamps"] = "nothing"
    order: Literal["age", "value", "ranked", "expired", "count", "distance", "decayed"] = "age"
    plane: str | None = None
    _: KW_ONLY
    bits: str | None = None
    norm: str | None = None
    marks: Marks | None = None
    decay: Decay | None = None
    group: Literal["mean", "sum", "max", "first"] = "mean"
    coupled: bool = False

    def __post_init__(self) -> None:
        for name, known in (("observe", OBSERVE), ("order", ORDER), ("group", GROUPS)):
            if getattr(self, name) not in known:
                raise ValueError(f"ScanRule({name}={getattr(self, name)!r}): use one of {', '.join(known)}")
        by_value = self.order in ("value", "ranked", "expired", "decayed")
        if self.plane is None and (self.observe in ("sum", "stamps") or (by_value and self.observe != "last")):
            raise ValueError(f"{self}: name the per-token state that holds the value, plane=...")
        by_bits = self.order in ("count", "distance")
        if self.bits is None and (self.observe == "marks" or by_bits):
            raise ValueError(f"{self}: name the per-token state that holds the bits, bits=...")
        for lacking, needed in (
            ("marks", self.observe in ("marks", "stamps") or self.order in ("count", "expired")),
            ("decay", self.order == "decayed"),
        ):
            if needed and getattr(self, lacking) is None:
                raise ValueError(f"{self}: {lacking}=... must say the details")
        if self.order == "decayed" and self.norm is None:
            raise ValueError(f"{self}: name the per-token state that holds the norms, norm=...")
        if self.coupled and (by_bits or self.order in ("decayed", "expired")):
            raise ValueError(f"{self}: heads can't be coupled in this order")

    @property
    def open_ended(self) -> bool:
        """Whether how many tokens stay depends on their values, so that lengths after a scan must be read back."""
        return self.order == "expired"

    @property
    def planes(self) -> tuple[str | None, str | None, str | None]:
        """Names of the states that kernels read: value, norm, bits."""
        return self.plane, self.norm, self.bits


@dataclass(frozen=True)
class Slots:
    """Storage of all rows, end to end. A row's tokens fill its first slots; beyond them positions are -1.

    keys, values (total, dim); positions (total,) int32; value, norm (total,) float32 and bits (total, bytes) uint8, None if the
    rule has no such plane; special (total,) bool, None if no token is special; source (total,) int32, None if nobody asks where
    tokens came from
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
    norm: Tensor | None = None
    bits: Tensor | None = None
    kept: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)
    """What a back end has made of these tensors, for the next call."""


@dataclass(frozen=True)
class Arrivals:
    """New tokens, in order.

    keys, values (batch, kv_heads, tokens, dim) in the storage's type; positions (batch, tokens), -1 for pads, which come in
    nowhere; value, norm: what these start with, (batch, kv_heads, tokens), None for 0; special (batch, tokens) bool;
    source: what goes into `Slots.source`, (batch, kv_heads, tokens); bits (batch, kv_heads, tokens, bytes), None for 0;
    probes (batch, kv_heads, probes, tokens, bytes): what `distance` compares held bits with
    Without key dims (dim 0) nothing attends: a scan decides alone, and outputs are 0.
    """

    keys: Keys
    values: Values
    positions: QueryPositions
    value: Scores | None = None
    special: Tensor | None = None
    source: Tensor | None = None
    norm: Scores | None = None
    bits: Tensor | None = None
    probes: Tensor | None = None


@dataclass(frozen=True)
class Limits:
    """What rows may hold, (batch, kv_heads) int64 each.

    limit     tokens after a decision
    target    tokens that a decision leaves, at most `limit`
    recent    last tokens that are protected, the newest included
    num_sink  first tokens of a sequence that are protected
    before    room is made before a token comes in (it reads at most `limit` tokens), not after (at most `limit` + 1)
    grace     age in tokens up to which nothing decays, for the order `decayed`
    """

    limit: PerHead
    target: PerHead
    recent: PerHead
    num_sink: int = 0
    before: bool = False
    grace: PerHead | None = None
    kept: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)
    """What a back end has made of these tensors, for the next call."""


def check_given(rule: ScanRule, arrivals: Arrivals, limits: Limits) -> None:
    """Kernels would read what isn't there."""
    assert rule.order != "decayed" or limits.grace is not None, "decayed: Limits.grace must say when that begins"
    assert rule.order != "distance" or arrivals.probes is not None, "distance: Arrivals.probes must say from what"
