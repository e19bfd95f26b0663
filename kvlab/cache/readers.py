"""A call on a store that several layers read: what is remembered of each, until the last of them has attended.

To a policy and a codec their query heads are further members of each KV head's group, reader after reader, the store's own
layer first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from kvlab.cache.call import Call
from kvlab.cache.store import View
from kvlab.cache.voters import Voters
from kvlab.kernels.reference import AttentionRule
from kvlab.shapes import Attention, Queries


@dataclass
class OpenCall:
    """Tokens that are in a store already, and to which some of its readers have yet to attend.

    view     of the store with these tokens, None where it is empty since they are pads alone
    waiting  readers that are still to come
    kind     tokens of a turn; several steps at which nothing leaves; or one step, with a decision behind it
    causal   see `PrefillStats`; counted: whether what slots receive is added to the mass (one step says so itself)
    queries  of each reader, (batch, kv_heads, group, queries, head_dim), where `counted` or at one step
    voters   of each reader in a turn; attention: of each at a step, where it is wanted
    """

    call: Call
    view: View | None
    waiting: int
    kind: Literal["turn", "steps", "step"]
    causal: bool = False
    counted: bool = False
    rules: list[AttentionRule] = field(default_factory=list)
    queries: list[Queries] = field(default_factory=list)
    voters: list[Voters] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)

    @property
    def rule(self) -> AttentionRule:
        """The rule of all readers together. Their scalings are in their queries, see `scaled`."""
        sinks = [rule.sinks for rule in self.rules if rule.sinks is not None]
        return replace(self.rules[0], sinks=torch.cat(sinks, 1)) if sinks else self.rules[0]

    def scaled(self, queries: Queries, rule: AttentionRule) -> Queries:
        """A reader's queries as the first reader's rule would have to find them, where a model scales by layer."""
        first = self.rules[0] if self.rules else rule
        assert (rule.window, rule.softcap) == (first.window, first.softcap), "readers of a store see alike"
        return queries if rule.scaling == first.scaling else queries * (rule.scaling / first.scaling)

    @property
    def all_voters(self) -> Voters:
        """Those of all readers together."""
        return Voters(joined([some.queries for some in self.voters]), self.voters[0].positions)


def joined(parts: list[Tensor]) -> Tensor:
    """Readers side by side in the group: (batch, kv_heads, group * readers, ...)."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
