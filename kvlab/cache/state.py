"""What one layer of a cache is: its store, lengths, limits and state, and what transformers asks of a cache layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvlab.cache.call import Call
from kvlab.cache.encoded import EncodedStore
from kvlab.cache.leading import Handed
from kvlab.cache.limits import RowLimits, unlimited
from kvlab.cache.readers import OpenCall
from kvlab.cache.rotation import RotaryTable, Rotation
from kvlab.cache.store import SlotStore, View
from kvlab.cache.voters import Voters
from kvlab.kernels.dispatch import Kernels, choose
from kvlab.kernels.reference import AttentionRule, accumulate_type
from kvlab.policies.base import RANK, SCORE, Policy
from kvlab.shapes import Keys, Queries, Scores

if TYPE_CHECKING:
    from kvlab.cache.kv_cache import KVCache

NOTHING_SEEN = np.zeros(0, dtype=np.int64)


class KVLength(int):
    """A length that says it is a kvlab cache's, so that the mask function needs no global to know."""


class LayerState(CacheLayerMixin):
    """Cache of one model layer. `seen_len` counts tokens as transformers does, pads included; `row_seen` real ones."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: KVCache, layer_idx: int) -> None:
        super().__init__()
        self.cache = cache
        self.layer_idx = layer_idx
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized = False
        self.seen_len = 0
        self.store: SlotStore | EncodedStore | None = None
        self.row_seen = NOTHING_SEEN  # (batch,); arrays of lengths and limits are replaced, never changed in place
        self.turn_start: np.ndarray | None = None  # `row_seen` when the open turn began
        self.limits: RowLimits | None = None  # None before the first budget
        self.steady: np.ndarray | None = None  # lengths that stay: each new token makes one leave, and has room
        self.back_end: Kernels | None = None
        self.rule = AttentionRule(scaling=1.0)
        self.rotation: Rotation | None = None  # of the current call, left here by the attention modules' pre-hook
        self.table: RotaryTable | None = None  # of places in the cache, under `rolling`
        self.exact = torch.float32  # what is summed up is of this type
        self.voters: Voters | None = None  # the open turn's last queries
        self.open: OpenCall | None = None  # a call that layers which read this one's store have yet to attend over
        self.profile: dict[str, Tensor] = {}  # what the policy found out about each head, (batch, kv_heads, ...)
        self.handed: tuple[Handed, ...] = ()  # calls of the open turn, where there are followers
        self.received: Scores | None = None  # mass of the current call, where there are followers
        self.given: Handed | None = None  # the current call, where a leader's layer has attended

    # ------------------------------------------------------------------- what transformers asks of a cache layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage is made by the first attention call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand the new keys on to the attention function, marked with this layer. Nothing is stored yet."""
        self.cache.expect(self)
        self.is_initialized = True
        self.batch_size = key_states.shape[0]
        self.seen_len += key_states.shape[2]
        marked = key_states.view_as(key_states)
        marked.kvlab_layer = self  # type: ignore[attr-defined]
        return marked, value_states

    def get_seq_length(self) -> int:
        """Tokens seen, pads and evicted ones included: what positions go on from."""
        return self.seen_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset that masks are made for."""
        return KVLength(self.seen_len + query_length), 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: evicted tokens can't come back."""
        raise NotImplementedError(
            "a kvlab cache can't be rolled back (evicted tokens are gone), so assisted decoding is not possible with it; "
            "call generate without assistant_model and prompt_lookup_num_tokens"
        )

    def select_rows(self, rows: Tensor, row_seen: np.ndarray) -> None:
        """Take these sequences of the batch, in this order: (new_batch,) indices on the CPU, and their `row_seen`."""
        self.batch_size = len(rows)
        self.row_seen = row_seen
        if self.store is None:
            return
        self.store.select_rows(rows)
        if self.limits is not None:
            self._set_limits(self.limits.budget[rows.numpy()])
        self.profile = {name: part[rows.to(part.device)] for name, part in self.profile.items()}
        self.turn_start = None if self.turn_start is None else self.turn_start[rows.numpy()]
        self.voters = None if self.voters is None else self.voters.rows(rows)

    def fork(self, cache: KVCache, keep_limit: bool = True) -> Self:
        """An independent copy that belongs to another cache; under no limit if that is not to be kept."""
        other = type(self)(cache, self.layer_idx)
        other.__dict__.update({name: value for name, value in vars(self).items() if name != "cache"})
        other.store = None if self.store is None else self.store.copy()
        if other.store is not None and not keep_limit:
            held, needed = set(other.store.state), set(other._state_kinds())
            if lacking := needed - held:
                name = cache.plan.policy.name
                raise ValueError(f"a fork for {name} needs {', '.join(sorted(lacking))} of each token, which this cache lacks")
            other.store.without(held - needed)
            other._set_limits(unlimited(other.store.lengths.shape))
            other.profile = {}
        return other

    @property
    def policy(self) -> Policy:
        """The cache's policy."""
        return self.cache.plan.policy

    def _state_kinds(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        exact = self.exact
        if self.policy.once:
            kinds[SCORE] = (exact, ())
        if "mass" in self.policy.needs:
            kinds["mass"] = (exact, ())
        if self.cache.needs_token_ids:
            kinds["token_ids"] = (torch.int32, ())
        if self.policy.ranks_after_prompt:
            kinds[RANK] = (exact, ())
        return kinds | {name: (kind.dtype, kind.shape) for name, kind in self.policy.token_state().items()}

    # ------------------------------------------------------------------------------------------------- limits

    def _set_limits(self, budget: np.ndarray) -> None:
        """Budget of each row from now on, (batch, kv_heads) tokens, and what follows from it."""
        window = self.rule.window if self._held.evictable else None  # groups of tokens leave a window as a whole
        self.limits, self.steady = RowLimits(self.policy, budget, window, self._held.device), None

    @property
    def own_tensors(self) -> list[Tensor]:
        """What is kept on the device beside the store: limits, what the policy found out of heads, queries of an open turn."""
        limits = [] if self.limits is None else self.limits.tensors
        voters = [] if self.voters is None else [self.voters.queries, self.voters.positions]
        return [*limits, *self.profile.values(), *voters]

    def _budget_from(self, budgets: np.ndarray | None) -> np.ndarray:
        """Budget of every row from those of all layers, (layers, batch) or None."""
        if budgets is None:
            return unlimited(self._held.lengths.shape)
        return np.repeat(budgets[self.layer_idx][:, None], self._held.lengths.shape[1], axis=1)

    def _faded(self, rule: AttentionRule) -> AttentionRule:
        """How tokens attend at steps, where a policy may let old ones fade."""
        fade = None if self.limits is None else self.limits.fade
        return rule if fade is None else replace(rule, fade=fade)

    def _kernels(self, keys: Keys) -> Kernels:
        if self.back_end is None:
            self.back_end = choose(self.cache.plan.kernels, keys.device.type, keys.dtype)
        return self.back_end

    def _new_store(self, key: Tensor, value: Tensor) -> SlotStore | EncodedStore:
        self.exact = accumulate_type(key)
        codec = self.cache.plan.codec
        if codec is None:
            return SlotStore.empty(key, value, self._state_kinds())
        return EncodedStore.of(codec, key, value, self._state_kinds(), self._kernels(key), self.layer_idx)

    @property
    def _held(self) -> SlotStore | EncodedStore:
        assert self.store is not None
        return self.store

    # ----------------------------------------------------------------------------------------------- positions

    def _unrotate(self, queries: Queries, key: Tensor, call: Call) -> tuple[Queries, Keys]:
        """Queries and keys without their rotation, whose table is recorded for later places."""
        rotation = self._own_rotation()
        self.table = self.cache.table_for(rotation)
        self.table.cover(self._longest_row() + call.tokens, queries.dtype)
        return without(rotation, queries), rotation.undo(key)

    def _own_rotation(self) -> Rotation:
        """This layer's rotation in the current call, under `rolling`."""
        if self.rotation is None:
            raise ValueError("rolling needs rotary position embeddings, and this layer was given none; use rolling=false")
        rotation, self.rotation = self.rotation, None
        return rotation

    def _turning(self, key: Tensor, call: Call) -> RotaryTable:
        """The table of this layer's rotation, for the positions of all tokens, where a codec holds keys without it."""
        if self.rotation is None:
            assert self.cache.plan.codec is not None
            raise ValueError(
                f"codec {self.cache.plan.codec.label} holds keys without their rotary position embeddings, and this layer was "
                "given none"
            )
        table = self.cache.table_for(self.rotation)
        table.cover(int(call.seen.max()), key.dtype)
        self.rotation = None
        return table

    def _longest_row(self) -> int:
        return 0 if self.store is None else int(self.store.lengths.max(initial=0))

    def _placed_keys(self, view: View) -> Keys:
        """Keys as attention needs them: rotated by their place in the cache under `rolling`."""
        return view.keys if self.table is None else self.table.place_keys(view.keys, view.positions)

    def _placed_queries(self, queries: Queries, query_positions: Tensor, view: View) -> Queries:
        return queries if self.table is None else self.table.place_queries(queries, query_positions, view.positions)


def without(rotation: Rotation, queries: Queries) -> Queries:
    """Queries without their rotation."""
    return rotation.undo(queries.flatten(1, 2)).unflatten(1, queries.shape[1:3])
