"""Hyde-IKV: influence fades with age, importance decides what leaves. An idea without a paper: all of it is kvlab's own."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvlab.budget import exact_share
from kvlab.kernels.contract import Decay, ScanRule
from kvlab.policies.base import Group, Policy, PolicyError, TokenState, register
from kvlab.shapes import Arrival, PerHead, Scores, Step


@register("hyde")
@dataclass(frozen=True)
class Hyde(Policy):
    """Old tokens lose influence on attention by and by, and the least important of them leave (kvlab's own, no paper).

    action            `fade`: old tokens' influence is lowered, nothing leaves; `evict`: the lowest score leaves; or both
    decay, min_decay  influence = max(min_decay, decay ** (age beyond the window)), its logarithm is added to attention logits
                      at decode steps; keys and values are never changed, so nothing compounds
    window_share      part of the budget whose tokens, the last ones, don't fade
    attention_weight, norm_weight  importance = the first * attention received / the most that any received + the second * norm
                      of the key / the largest
    power             score = influence * importance ** power
    group             how a KV head's query heads merge, per query

    Sinks and the recent window keep an influence of 1.
    """

    action: Literal["fade+evict", "fade", "evict"] = "fade+evict"
    attention_weight: float = 0.7
    norm_weight: float = 0.3
    decay: float = 0.97
    window_share: float = 0.25
    min_decay: float = 0.15
    power: float = 1.2
    group: Group = "mean"

    needs: ClassVar[frozenset[str]] = frozenset({"mass"})
    state: ClassVar[dict[str, TokenState]] = {"norm": TokenState(torch.float32)}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("decay", "min_decay"):
            if not 0 < getattr(self, name) <= 1:
                raise PolicyError(f"policy.{name}={getattr(self, name)!r}: use a number above 0, at most 1")
        if not 0 <= self.window_share <= 1:
            raise PolicyError(f"policy.window_share={self.window_share!r}: use a share between 0 and 1")
        for name in ("attention_weight", "norm_weight", "power"):
            if getattr(self, name) < 0:
                raise PolicyError(f"policy.{name}={getattr(self, name)!r}: use at least 0")

    @property
    def drops(self) -> bool:
        """Whether anything leaves."""
        return self.action != "fade"

    @property
    def fades(self) -> tuple[float, float] | None:
        """How influence on attention falls."""
        return None if self.action == "evict" else (self.decay, self.min_decay)

    def grace(self, budget: PerHead) -> PerHead:
        """The window, but at least the recent tokens."""
        share = exact_share(self.window_share)
        return (budget * share.numerator // share.denominator).clamp(min=self.recent_window)

    def scan_rule(self) -> ScanRule:
        """A running sum and norms, of which age takes its part."""
        decay = Decay(self.decay, self.min_decay, self.power, self.attention_weight, self.norm_weight)
        return ScanRule(observe="sum", order="decayed", plane="mass", norm="norm", decay=decay, group=self.group)

    def arrive(self, arrival: Arrival) -> dict[str, Tensor]:
        """Norms of new keys."""
        exact = torch.promote_types(arrival.keys.dtype, torch.float32)
        return {"norm": torch.linalg.vector_norm(arrival.keys, dim=-1, dtype=exact)}

    def score(self, step: Step) -> Scores:
        """What is left of a token's importance at its age."""
        assert step.mass is not None and step.grace is not None
        held = step.positions >= 0
        importance = self.attention_weight * _relative(step.mass, held)
        importance = importance + self.norm_weight * _relative(step.state["norm"], held)
        over = (step.now[:, None, None] - step.positions - step.grace[..., None]).clamp(min=0)
        influence = (over.to(importance.dtype) * math.log(self.decay)).exp().clamp(min=self.min_decay)
        return influence * importance**self.power


def _relative(values: Scores, held: Tensor) -> Scores:
    """Values as parts of the largest held one; 0 where all are 0."""
    values = values.masked_fill(~held, 0.0)
    most = values.amax(-1, keepdim=True)
    return values / most.masked_fill(most <= 0, float("inf"))
