"""One forward pass for several caches: the model is called with a leader, whose layers hand on what they were given.

Until a prompt's first turn ends nothing has left, so attention is the same whatever a policy is going to keep. A follower's
layer stores the same tokens, is told what attention they received, and evicts at the turn's end; it attends to nothing. It ends
as if the model had been called with its cache. Of a turn in chunks followers store nothing before its end, and then one layer
after the other, so that they never hold whole prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from kvlab.cache.call import Call
from kvlab.kernels.reference import AttentionRule
from kvlab.measure import now
from kvlab.shapes import Arrival, Queries, Scores

if TYPE_CHECKING:
    from kvlab.cache.kv_cache import KVCache


@dataclass(frozen=True)
class Handed:
    """An attention call of a leader's layer.

    queries, arrival, call, rule  what it was given
    ids   token ids of the forward pass, (batch, tokens)
    mass  attention that slots received, (batch, kv_heads, slots), where the leader's policy wants it
    open  whether it is one of several calls of a turn
    """

    queries: Queries
    arrival: Arrival
    call: Call
    rule: AttentionRule
    ids: Tensor | None
    mass: Scores | None
    open: bool


@dataclass
class Follower:
    """A cache that takes part in a leader's turn.

    error    what its policy or codec raised; the cache is unusable then, and takes part no more
    seconds  what it took beside the forward pass
    """

    cache: KVCache
    error: Exception | None = None
    seconds: float = 0.0
    _held: list[list[int]] = field(default_factory=list)

    def take(self, layer_idx: int, turn: Sequence[Handed]) -> None:
        """Take in a layer's part of the turn, and end it there."""
        if self.error is not None:
            return
        device = turn[0].arrival.keys.device
        start = now(device)
        try:
            self._held.append(self._taken(layer_idx, turn))
        except Exception as error:  # whatever a policy may raise: the leader and other followers go on
            self.error, self.cache.broken = error, True
        self.seconds += now(device) - start

    def _taken(self, layer_idx: int, turn: Sequence[Handed]) -> list[int]:
        """Bytes that the layer held after each call of a turn in chunks, and after its end."""
        cache, held = self.cache, []
        layer = cache.layers[layer_idx]
        chunked = turn[0].open
        cache.phase, cache.turn_open = "prompt", chunked
        try:
            for handed in turn:
                layer.follow(handed)
                held.append(layer.store.kv_bytes)
            if chunked:
                layer.close_turn()
        finally:
            cache.phase, cache.turn_open = "auto", False
        return [*held, layer.store.kv_bytes]

    def end(self) -> None:
        """A turn in chunks is over: bytes are noted in the order in which chunks would have come."""
        if self.error is None:
            self.cache.note_again(self._held)
