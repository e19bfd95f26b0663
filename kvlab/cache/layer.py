"""One layer of a cache: takes an attention call, stores its tokens, attends, and lets the policy evict.

A call is a *turn* (full attention inside, one decision at its end) or *steps* (each token as if decoded: insert, attend,
decide). This module knows the timing rule and no policy by name; the model is known by `AttentionRule` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvlab import selection
from kvlab.cache.rotation import RotaryTable, Rotation, rotate
from kvlab.cache.store import SlotStore, View
from kvlab.kernels import reference
from kvlab.kernels.reference import AttentionRule, accumulate_type, merge_group
from kvlab.shapes import Keys, Outputs, Positions, Queries, Step, Values

if TYPE_CHECKING:
    from kvlab.cache.kv_cache import KVCache


class KVLength(int):
    """A length that says it is a kvlab cache's, so that the mask function needs no global to know."""


class KVLayer(CacheLayerMixin):
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
        self.store: SlotStore | None = None
        self.row_seen = np.zeros(0, dtype=np.int64)  # (batch,)
        self.limit: np.ndarray | None = None  # (batch, kv_heads) tokens; None = unlimited
        self.budgeted = False  # whether `limit` has been set
        self.rule = AttentionRule(scaling=1.0)
        self.padded = False  # whether the current call has pads; without any, the host needs no word from the device
        self.rotation: Rotation | None = None  # of the current call, left here by the attention modules' pre-hook
        self.table: RotaryTable | None = None
        self.voters: tuple[Queries, Tensor] | None = None  # the turn's last queries and their positions (batch, queries)

    # ------------------------------------------------------------------- what transformers asks of a cache layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage is made by the first attention call."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand the new keys on to the attention function, marked with this layer. Nothing is stored yet."""
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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these sequences of the batch, in this order: (new_batch,) indices."""
        if self.store is None:
            return
        self.store.select_rows(beam_idx)
        rows = beam_idx.cpu().numpy()
        self.batch_size = len(rows)
        self.row_seen = self.row_seen[rows]
        self.limit = None if self.limit is None else self.limit[rows]
        if self.voters is not None:
            self.voters = (self.voters[0][beam_idx], self.voters[1][beam_idx])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Same as `reorder_cache`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.store is not None:
            rows = torch.arange(len(self.row_seen), device=self.store.keys.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def fork(self, cache: KVCache) -> KVLayer:
        """An independent copy that belongs to another cache."""
        other = KVLayer(cache, self.layer_idx)
        other.__dict__.update({name: value for name, value in vars(self).items() if name not in ("cache", "table")})
        other.store = None if self.store is None else self.store.copy()
        other.row_seen = self.row_seen.copy()
        return other

    # ---------------------------------------------------------------------------------------------- attention

    @property
    def policy(self) -> Any:
        """The cache's policy."""
        return self.cache.plan.policy

    @torch.no_grad()
    def attend(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, rule: AttentionRule) -> Tensor:
        """Attention of new tokens over what is held and over themselves, with storage and eviction.

        query (batch, heads, tokens, head_dim), key and value (batch, kv_heads, tokens, dim) as the model made them;
        padding (batch, tokens), False for pads. Returns (batch, heads, tokens, value_dim); rows of pads mean nothing.
        """
        self.rule = rule
        self.padded = padding is not None
        positions = self._new_positions(key, padding)
        queries = query.unflatten(1, (key.shape[1], -1))  # query head h reads KV head h // group
        if self.policy.rolling:
            queries, key = self._unrotate(query, key, positions)
        if self.store is None:
            self.store = SlotStore.empty(key, value, self._state_types(key))
        if self.cache.takes_turn(key.shape[2], self.row_seen):
            output = self._turn(queries, key, value, positions)
        else:
            output = self._steps(queries, key, value, positions)
        self.cache.note_bytes(self.layer_idx, self.store.kv_bytes)
        return output.flatten(1, 2).to(query.dtype)

    def _new_positions(self, key: Tensor, padding: Tensor | None) -> Tensor:
        """True positions of the new tokens, (batch, tokens), -1 for pads."""
        batch, _, tokens, _ = key.shape
        if not len(self.row_seen):
            self.row_seen = np.zeros(batch, dtype=np.int64)
        if len(self.row_seen) != batch:
            raise ValueError(f"this cache holds {len(self.row_seen)} sequences, the call has {batch}; use a new cache")
        seen = torch.from_numpy(self.row_seen).to(key.device)[:, None]
        if padding is None:
            return seen + torch.arange(tokens, device=key.device)
        return torch.where(padding, seen + padding.cumsum(1) - 1, -1)

    def _state_types(self, key: Tensor) -> dict[str, torch.dtype]:
        kinds = {}
        if "mass" in self.policy.needs:
            kinds["mass"] = accumulate_type(key)
        if self.cache.needs_token_ids:
            kinds["token_ids"] = torch.int32
        return kinds

    def _arriving_state(self, positions: Tensor) -> dict[str, Tensor]:
        """State that tokens bring along: (batch, tokens)."""
        if not self.cache.needs_token_ids:
            return {}
        ids = self.cache.input_ids
        if ids is None or ids.shape != positions.shape:
            raise ValueError(f"policy {self.policy.name} needs token ids: call the model with input_ids, not inputs_embeds")
        return {"token_ids": ids.to(positions.device)}

    # ------------------------------------------------------------------------------------------------- turns

    def _turn(self, queries: Queries, key: Keys, value: Values, positions: Tensor) -> Outputs:
        """Full attention of a turn (or of one of its chunks); evicts at its end unless more chunks follow."""
        store = self._require_store()
        alone = not store.lengths.any()
        store.append(key, value, positions, self._arriving_state(positions))
        self._count(positions)
        view = store.view()
        causal = alone and view.full
        queries, keys = self._placed(queries, view.keys, positions, view.positions)
        group = self.policy.group if "mass" in self.policy.needs else None
        if group is None:
            output = reference.attend(queries, keys, view.values, positions, view.positions, self.rule, causal=causal)
        else:
            output, mass = reference.attend_with_mass(
                queries, keys, view.values, positions, view.positions, self.rule, group=group, causal=causal
            )
            store.write_state("mass", view.state["mass"] + mass, view)
        self._remember_voters(queries, positions)
        self.cache.note_bytes(self.layer_idx, store.kv_bytes)
        if not self.cache.turn_open:
            self.close_turn()
        return output

    def close_turn(self) -> None:
        """The decision at a turn's end: resolve the budget for all tokens seen, then evict down to it."""
        if self.store is None:
            return
        self._set_limit(self.cache.budgets(self.row_seen))
        voters, self.voters = self.voters, None
        if self.limit is not None and (self.store.lengths > self.limit).any():
            view = self.store.view()
            queries, query_positions = voters if voters is not None else self._no_voters(view)
            attention = None
            if "attention" in self.policy.needs:
                _, keys = self._placed(None, view.keys, query_positions, view.positions)
                attention = reference.weights(queries, keys, query_positions, view.positions, self.rule)
            step = self._step_view(view, queries, query_positions, attention, prompt_end=True)
            self._evict(step, view)
        if not self.policy.holds_budget_after_prompt:
            self.limit = self._window_limit()

    def _remember_voters(self, queries: Queries, positions: Tensor) -> None:
        """Keep the last `obs_window` queries of the turn, each row's own last ones where rows are padded."""
        wanted = self.policy.obs_window
        if self.voters is not None:
            queries = torch.cat([self.voters[0], queries], 3)
            positions = torch.cat([self.voters[1], positions], 1)
        last = positions.argsort(dim=1, stable=True)[:, -wanted:]  # pads, at -1, come first
        index = last[:, None, None, :, None].expand(-1, *queries.shape[1:3], -1, queries.shape[-1])
        self.voters = (queries.gather(3, index), positions.gather(1, last))

    def _no_voters(self, view: View) -> tuple[Queries, Tensor]:
        batch, kv_heads, _, dim = view.keys.shape
        none = torch.full((batch, 1), -1, device=view.keys.device)
        return view.keys.new_zeros(batch, kv_heads, 1, 1, dim), none

    # ------------------------------------------------------------------------------------------------- steps

    def _steps(self, queries: Queries, key: Keys, value: Values, positions: Tensor) -> Outputs:
        """Each token as if it were decoded."""
        if not self.budgeted:
            self._set_limit(self.cache.stream_budgets(len(positions)))
        arriving = self._arriving_state(positions)
        outputs = []
        for t in range(positions.shape[1]):
            now = slice(t, t + 1)
            state = {name: tensor[:, now] for name, tensor in arriving.items()}
            outputs.append(self._one_step(queries[..., now, :], key[:, :, now], value[:, :, now], positions[:, now], state))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 3)

    def _one_step(self, queries: Queries, key: Keys, value: Values, position: Tensor, state: dict[str, Tensor]) -> Outputs:
        store = self._require_store()
        rows = position[:, 0] >= 0 if self.padded else None
        self._count(position)
        before = self.policy.phase == "before_attention"
        if before:
            self._drop_to(queries, position, None, spare=1, rows=rows)
        room = None if self.limit is None else self.limit + (0 if before else 1)
        store.reserve(room, rows)
        store.insert(key, value, position, state, rows)
        view = store.view()
        queries, keys = self._placed(queries, view.keys, position, view.positions)
        output, attention = self._attend_step(queries, keys, view, position)
        if attention is not None and "mass" in self.policy.needs:
            received = merge_group(attention, self.policy.group)[:, :, 0]
            store.write_state("mass", view.state["mass"] + received, view)
        if not before:
            self._drop_to(queries, position, attention, spare=0, rows=rows)
        return output

    def _attend_step(self, queries: Queries, keys: Keys, view: View, position: Tensor) -> tuple[Outputs, Tensor | None]:
        every_step = self.policy.when == "every_step"
        if every_step and self.policy.needs & {"mass", "attention"}:
            attention = reference.weights(queries, keys, position, view.positions, self.rule)
            flat = attention.flatten(2, 3) @ view.values.to(attention.dtype)
            return flat.unflatten(2, attention.shape[2:4]), attention
        seen = view.full and self.rule.window is None and not self.padded
        output = reference.attend(queries, keys, view.values, position, view.positions, self.rule, all_visible=seen)
        return output, None

    def _drop_to(
        self, queries: Queries, position: Tensor, attention: Tensor | None, *, spare: int, rows: Tensor | None
    ) -> None:
        """Evict what is over the limit less `spare`."""
        store = self._require_store()
        if self.limit is None:
            return
        over = store.lengths - (self.limit - spare)
        if rows is not None:
            over = np.where(rows.cpu().numpy()[:, None], over, 0)
        if (over > 0).any():
            view = store.view()
            step = self._step_view(view, queries, position, attention, prompt_end=False)
            self._evict(step, view, over)

    # --------------------------------------------------------------------------------------------- decisions

    def _step_view(
        self, view: View, queries: Queries, query_positions: Tensor, attention: Tensor | None, *, prompt_end: bool
    ) -> Step:
        device = view.positions.device
        assert self.limit is not None
        budget = torch.from_numpy(self.limit).to(device)
        return Step(
            layer_idx=self.layer_idx,
            num_layers=len(self.cache.layers),
            prompt_end=prompt_end,
            positions=view.positions,
            now=torch.from_numpy(self.row_seen - 1).to(device),
            budget=budget,
            recent=self.policy.recent(budget),
            queries=queries,
            query_positions=query_positions,
            keys=view.keys,
            values=view.values,
            attention=attention,
            mass=view.state.get("mass"),
            token_ids=view.state.get("token_ids"),
            sample_ids=self.cache.sample_keys(len(self.row_seen), device),
        )

    def _evict(self, step: Step, view: View, over: np.ndarray | None = None) -> None:
        """Let the policy decide and drop the rest. `over`: tokens too many per row at a decode step, None at a turn's end."""
        store = self._require_store()
        tiers = selection.assign_tiers(
            step.positions,
            step.now,
            num_sink=self.policy.num_sink,
            recent=step.recent,
            special=self._special(step),
            window=self.rule.window,
        )
        first_in_first_out = self.policy.when == "prompt_end" and not step.prompt_end
        scores = step.positions.float() if first_in_first_out else self.policy.score(step)
        if over is not None and over.max() == 1 and (store.lengths == store.capacity)[over > 0].all():
            rows = None if (over > 0).all() else over > 0
            store.vacate(selection.victim(scores, step.positions, tiers), rows)
            return
        budget = step.budget
        if step.prompt_end:
            budget = self.policy.head_budget(step, scores, tiers)
            self.limit = self._cap(budget.cpu().numpy())
        elif over is not None:
            budget = torch.from_numpy(store.lengths - over.clip(min=0)).to(budget.device)
        room = self.limit + (self.policy.phase == "after_attention") if self.limit is not None else None
        store.keep(selection.select(scores, step.positions, tiers, budget), view, room)

    def _special(self, step: Step) -> Tensor | None:
        if not self.policy.keep_special or step.token_ids is None:
            return None
        special = self.cache.special_ids(step.token_ids.device)
        return torch.isin(step.token_ids, special)

    def _set_limit(self, budgets: np.ndarray | None) -> None:
        """Limit of every row from this layer's budgets, (layers, batch) or None."""
        self.budgeted = True
        if budgets is None:
            self.limit = self._window_limit()
            return
        kv_heads = self._require_store().lengths.shape[1]
        self.limit = self._cap(np.repeat(budgets[self.layer_idx][:, None], kv_heads, axis=1))

    def _cap(self, limit: np.ndarray) -> np.ndarray:
        """A sliding-window layer holds its window at most."""
        return limit if self.rule.window is None else np.minimum(limit, self.rule.window)

    def _window_limit(self) -> np.ndarray | None:
        if self.rule.window is None:
            return None
        return np.full(self._require_store().lengths.shape, self.rule.window, dtype=np.int64)

    # ----------------------------------------------------------------------------------------------- positions

    def _count(self, positions: Tensor) -> None:
        self.row_seen = self.row_seen + ((positions >= 0).sum(1).cpu().numpy() if self.padded else positions.shape[1])

    def _unrotate(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Queries, Keys]:
        """Queries and keys without their rotation, whose table is recorded for later places."""
        if self.rotation is None:
            raise ValueError("rolling needs rotary position embeddings, and this layer was given none; use rolling=false")
        if self.table is None:
            self.table = self.cache.table_for(self.rotation)
        held = 0 if self.store is None else int(self.store.lengths.max(initial=0))
        self.table.record(self.rotation, positions, held + positions.shape[1])
        return self.rotation.undo(query).unflatten(1, (key.shape[1], -1)), self.rotation.undo(key)

    def _placed(
        self, queries: Queries | None, keys: Keys, query_positions: Tensor, positions: Positions
    ) -> tuple[Queries, Keys]:
        """Under `rolling`, rotate keys by their rank among the held tokens and queries by their own token's rank."""
        if not self.policy.rolling:
            return queries, keys  # type: ignore[return-value]
        last = torch.iinfo(positions.dtype).max
        order = positions.masked_fill(positions < 0, last).argsort(-1)
        ranks = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).to(order).expand_as(order))
        keys = self._rotated(keys, ranks)
        if queries is not None:
            held = (positions >= 0)[:, :, None] & (positions[:, :, None] <= query_positions[:, None, :, None])
            places = held.sum(-1) - 1  # (batch, kv_heads, queries)
            group = queries.shape[2]
            flat = self._rotated(queries.flatten(2, 3), places.repeat(1, 1, group))
            queries = flat.unflatten(2, (group, -1))
        return queries, keys  # type: ignore[return-value]

    def _rotated(self, states: Tensor, places: Tensor) -> Tensor:
        """Rotate (batch, kv_heads, tokens, head_dim) by places (batch, kv_heads, tokens)."""
        assert self.table is not None and self.rotation is not None
        cos, sin = self.table.at(places, states.dtype)
        flat = states.flatten(0, 1)[:, None]  # (batch * kv_heads, 1, tokens, head_dim)
        return rotate(flat, cos, sin, self.rotation.apply)[:, 0].view_as(states)

    def _require_store(self) -> SlotStore:
        assert self.store is not None
        return self.store
