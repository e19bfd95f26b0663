"""FastGen (Ge et al. 2023, arXiv 2310.01801, section 3): each head keeps what it was seen to look at in the prompt."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvlab.budget import exact_share
from kvlab.policies.base import Group, Policy, PolicyError, TokenState, register
from kvlab.selection import DEAD, EMPTY, RECENT, select
from kvlab.shapes import Kept, Positions, Scores, Step
from kvlab.vocab import PUNCTUATION, SPECIAL

PARTS = ("special", "punct", "frequent", "local")
MEMBERS = ("special", "special+punct", "special+punct+frequent", "special+punct+frequent+local", "full")


@register("fastgen")
@dataclass(frozen=True)
class FastGen(Policy):
    """Profile each head at the prompt's end and give it the cheapest set of tokens that recovers its attention.

    threshold       T: the share of attention that a head's set must recover in the prompt
    recovery        `tv`: 1 - the total variation between attention and attention over the set alone, mean over queries, which
                    is the attention that falls on the set; `l1`: 1 - the sum of absolute differences, twice as strict
    members         sets to choose from, tried in this order; parts are special, punct, frequent, local; `full` keeps
                    everything. If none recovers enough, the last is taken
    local_share     local: at most this part of the tokens seen away
    frequent_share  frequent: this part of the tokens seen, those with most attention so far
    group           how a KV head's query heads merge, per query (the paper has no GQA); recovery is their mean

    Sets move with the length after the prompt. There is no budget to meet: compare results at the bytes that are held. A
    budget, if given, is a cap on each head.
    """

    threshold: float = 0.95
    recovery: Literal["tv", "l1"] = "tv"
    members: tuple[str, ...] = MEMBERS
    local_share: float = 0.3
    frequent_share: float = 0.3
    group: Group = "mean"

    when: ClassVar[Literal["every_step", "prompt_end"]] = "prompt_end"
    needs: ClassVar[frozenset[str]] = frozenset({"mass", "token_ids"})
    state: ClassVar[dict[str, TokenState]] = {"kind": TokenState(torch.uint8)}
    ragged: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("threshold", "local_share", "frequent_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise PolicyError(f"policy.{name}={getattr(self, name)!r}: use a share between 0 and 1")
        if not self.members:
            raise PolicyError("policy.members=[]: name at least one set, such as full")
        for member in self.members:
            for part in member.split("+") if member != "full" else ():
                if part not in PARTS:
                    raise PolicyError(
                        f"policy.members: {member!r} isn't a set; use full, or some of {', '.join(PARTS)} joined by '+'"
                    )

    @property
    def voting(self) -> int | None:
        """All queries of the prompt are looked at."""
        return None

    def remember(self, step: Step) -> dict[str, Tensor]:
        """Kinds of tokens: special (markers of several tokens too, where they stand in a prompt), punctuation."""
        assert step.token_ids is not None
        kinds = step.vocab.kinds(step.token_ids)
        if step.prompt_end:
            order = step.positions.argsort(-1)
            marked = step.vocab.in_markers(step.token_ids.gather(-1, order), step.positions.gather(-1, order))
            kinds = kinds.masked_fill(torch.zeros_like(marked).scatter(-1, order, marked), SPECIAL)
        return {"kind": torch.maximum(step.state["kind"], kinds)}

    def profile(self, step: Step) -> dict[str, Tensor]:
        """The member of each head, (batch, kv_heads) int64, and what share of attention it recovers."""
        lost = self._lost(step)
        enough = lost <= (1 - self.threshold) / (2 if self.recovery == "l1" else 1)
        enough[..., -1] = True
        member = enough.long().argmax(-1)
        recovered = 1 - (2 if self.recovery == "l1" else 1) * lost.gather(-1, member[..., None])[..., 0]
        return {"member": member, "recovery": recovered}

    def _lost(self, step: Step) -> Tensor:
        """Attention that falls outside each member's set, mean over the prompt's queries: (batch, kv_heads, members)."""
        assert step.looks is not None
        reach = _share(self.local_share, step.now + 1)
        everything, far = (torch.zeros(step.positions.shape, dtype=torch.float64, device=step.now.device) for _ in range(2))
        queries = torch.zeros_like(step.now)
        for attention, where in step.looks():
            mean = attention.mean(2, dtype=torch.float32)  # (batch, kv_heads, queries, slots)
            everything += mean.sum(2)
            beyond = step.positions[:, :, None] < (where - reach[:, None])[:, None, :, None]
            far += mean.masked_fill(~beyond, 0.0).sum(2)
            queries += (where >= 0).sum(1)
        columns = self._columns(step)
        lost = []
        for member in self.members:
            parts = _parts(member)
            kept = torch.zeros_like(step.positions, dtype=torch.bool)
            for part in parts:
                kept = kept | columns[part] if part in columns else kept
            outside = (far if "local" in parts else everything).masked_fill(kept, 0.0).sum(-1)
            lost.append(torch.zeros_like(outside) if member == "full" else outside / queries.clamp(min=1)[:, None])
        return torch.stack(lost, -1).clamp(max=1)  # rounding may say more than all

    def _columns(self, step: Step) -> dict[str, Kept]:
        """Tokens of the parts that don't depend on a query."""
        assert step.mass is not None
        kind = step.state["kind"]
        count = _share(self.frequent_share, step.now + 1)
        return {"special": kind == SPECIAL, "punct": kind == PUNCTUATION, "frequent": _top(step.mass, step.positions, count)}

    def select(self, step: Step) -> Kept:
        """The union of each head's parts, and what settings protect."""
        member = step.profile["member"]
        reach = _share(self.local_share, step.now + 1)
        local = step.positions >= (step.now - reach)[:, None, None]
        kept = torch.zeros_like(local)
        masks = {**self._columns(step), "local": local, "full": torch.ones_like(local)}
        for mask, has in zip(masks.values(), _membership(self.members, tuple(masks), member.device), strict=True):
            kept |= has[member][..., None] & mask
        tiers = self.tiers(step)
        kept = (kept | (tiers >= RECENT)) & (tiers >= 0) & (tiers != DEAD) & (step.positions >= 0)
        return self._capped(step, kept, tiers)

    def _capped(self, step: Step, kept: Kept, tiers: Tensor) -> Kept:
        """At most the budget of them: protected ones first, then by kind, then by attention."""
        if bool((kept.sum(-1) <= step.budget).all()):
            return kept
        assert step.mass is not None
        mass = step.mass.double()
        score = mass + step.state["kind"] * (mass.amax(-1, keepdim=True) + 1)  # kinds come before mass
        positions = torch.where(kept, step.positions, -1)
        return select(score, positions, torch.where(kept, tiers, EMPTY).to(tiers.dtype), step.budget)


def _share(share: float, length: Tensor) -> Tensor:
    """floor(share * length), (batch,)."""
    exact = exact_share(share)
    return length * exact.numerator // exact.denominator


def _parts(member: str) -> tuple[str, ...]:
    """Parts whose union a set is; `full` is one of its own."""
    return tuple(member.split("+"))


@functools.lru_cache(maxsize=64)
def _membership(members: tuple[str, ...], parts: tuple[str, ...], device: torch.device) -> Tensor:
    """Which part belongs to which member, (parts, members)."""
    return torch.tensor([[part in _parts(member) for member in members] for part in parts], device=device)


def _top(mass: Scores, positions: Positions, count: Tensor) -> Kept:
    """The `count` (batch,) tokens of each head with most attention, ties to the newer one."""
    held = positions >= 0
    if mass.dtype != torch.float32:
        return select(mass, positions, 2 * held.to(torch.int8) - 1, count[:, None].expand(positions.shape[:2]))
    # Bits of numbers above 0 are in the order of the numbers, so one sort of whole numbers does for both.
    keys = (mass.nan_to_num(nan=0.0).clamp(min=0).view(torch.int32).long() << 32) + positions
    keys = keys.masked_fill(~held, -1)
    place = (keys.shape[-1] - count).clamp(min=0, max=keys.shape[-1] - 1)[:, None, None]
    least = keys.sort(-1).values.gather(-1, place.expand(*keys.shape[:2], 1))
    return (keys >= least) & held & (count > 0)[:, None, None]
