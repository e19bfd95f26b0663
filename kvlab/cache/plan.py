"""From a session's policy and budget to how many tokens each layer may hold. Shared by all layers of a cache."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvlab.budget import Budget, BudgetError, LayerGeometry
from kvlab.codecs.base import Codec
from kvlab.kernels.contract import ScanRule
from kvlab.policies.base import Policy, PolicyError, rule_of
from kvlab.shapes import Outputs, Step
from kvlab.vocab import Vocab


@dataclass(frozen=True)
class Plan:
    """Everything about a cache that doesn't change while it lives.

    layers    geometry of every layer; itemsize: bytes of one number in the model's dtype
    codec     how keys and values are held, None as they come
    vocab     special and punctuation token ids, None without a tokenizer
    kernels   back end: auto, reference, cpu, gpu
    watch     is shown each layer at each turn's end, with all queries of the turn, before anything leaves
    simulation  attention of whole texts, in place of the model's own, where an eviction is only simulated
    sources   layers that hold nothing -> the layer that holds what they read; an earlier one, which reads its own
    """

    policy: Policy
    budget: Budget
    layers: tuple[LayerGeometry, ...]
    itemsize: int
    codec: Codec | None = None
    vocab: Vocab | None = None
    kernels: str = "auto"
    watch: Callable[[Step], None] | None = None
    simulation: Callable[..., Outputs] | None = None
    sources: Mapping[int, int] = field(default_factory=dict)
    ended: Callable[[], bool] = field(default=lambda: False, compare=False)
    """Whether the session is over."""

    def __post_init__(self) -> None:
        if self.policy.evicts and not self.policy.drops and self.budget.unlimited:
            raise PolicyError(f"policy {self.policy.name} drops nothing and fades beyond a part of the budget: give a budget")
        fixed = self.budget.resolve([1], self._held) if self.budget.ratio is None else None
        if fixed is not None and self.policy.evicts and self.least > fixed[0]:
            raise BudgetError(
                f"the budget holds {fixed[0]} tokens per head, fewer than {self.policy.name} protects "
                f"({self.protection}); raise the budget or lower these settings"
            )

    @property
    def unrotates(self) -> bool:
        """Whether keys are held without their rotation."""
        return self.policy.rolling or (self.codec is not None and self.codec.pre_rope)

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Layers that hold a cache."""
        return tuple(layer for layer in range(len(self.layers)) if layer not in self.sources)

    @cached_property
    def readers(self) -> Counter[int]:
        """How many other layers read what a layer holds."""
        return Counter(self.sources.values())

    @property
    def _held(self) -> list[LayerGeometry]:
        """Geometry of the layers that hold a cache."""
        return [self.layers[layer] for layer in self.holders]

    @cached_property
    def rule(self) -> ScanRule | None:
        """The rule that kernels follow at decode steps; None where the policy's own `score` is asked."""
        return rule_of(self.policy)

    def tokens(self, lengths: np.ndarray, new_tokens: int | None) -> np.ndarray | None:
        """Budget of each layer and sequence, (layers, batch), for sequences of these lengths; None for no limit.

        What holds no cache gets 0 and counts for nothing.
        """
        if not self.policy.evicts:
            return None
        budgets = self.budget.resolve(lengths.tolist(), self._held, new_tokens)
        if budgets is None:
            return None
        for budget in budgets:
            self._warn_if_cut(budget)
        rows = zip(budgets, lengths.tolist(), strict=True)
        return np.array([self._over_layers(budget, length) for budget, length in rows]).T

    def _over_layers(self, budget: int, length: int) -> list[int]:
        holders = self.holders
        split = self.policy.layer_budget(budget, len(holders), length)
        if len(split) != len(holders) or sum(split) != len(holders) * budget:
            total = f"{len(holders)} layers and sum to {len(holders) * budget}"
            raise PolicyError(f"policy {self.policy.name}: layer_budget gave {split}; it must name {total}")
        given = dict(zip(holders, split, strict=True))
        return [given.get(layer, 0) for layer in range(len(self.layers))]

    @property
    def _protected(self) -> dict[str, int]:
        """Tokens that settings protect whatever the budget is."""
        recent = {"recent_window": self.policy.recent_window}
        if self.policy.when == "prompt_end" and not self.policy.chooses:
            recent["obs_window"] = self.policy.obs_window
        widest = max(recent, key=lambda name: recent[name])
        return {"num_sink": self.policy.num_sink, widest: recent[widest]}

    @property
    def least(self) -> int:
        """Tokens that the policy's settings protect, whatever the budget is."""
        return sum(self._protected.values())

    @property
    def protection(self) -> str:
        """The settings that protect tokens."""
        return ", ".join(f"{name}={value}" for name, value in self._protected.items() if value)

    def _warn_if_cut(self, budget: int) -> None:
        if self.least > budget:
            warnings.warn(
                f"a budget of {budget} tokens is smaller than what {self.policy.name} protects ({self.protection}); "
                "the oldest of the recent tokens leave first",
                stacklevel=2,
            )
