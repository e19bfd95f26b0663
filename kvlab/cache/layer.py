"""One layer of a cache: takes an attention call, stores its tokens, attends, and lets the policy evict.

A call is a *turn* (full attention inside, one decision at its end) or *steps* (each token as if decoded: insert, attend,
decide). This module knows the timing rule and no policy by name; the model is known by `AttentionRule` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvlab import selection
from kvlab.cache.call import Call
from kvlab.cache.decide import judge
from kvlab.cache.limits import RowLimits, unlimited
from kvlab.cache.replay import replay_by_kernel, replay_by_steps
from kvlab.cache.rotation import RotaryTable, Rotation
from kvlab.cache.scan import arrivals_of, lengths_after, move_state, with_source
from kvlab.cache.store import SlotStore, View
from kvlab.cache.voters import Voters
from kvlab.kernels import reference
from kvlab.kernels.contract import ScanRule
from kvlab.kernels.dispatch import EvictScan, Kernels, choose
from kvlab.kernels.reference import AttentionRule, accumulate_type, merge_group
from kvlab.measure import now as time
from kvlab.policies.base import RANK, SCORE, Policy
from kvlab.shapes import Arrival, Kept, Keys, Look, Outputs, Queries, Scores, Step, Tiers

if TYPE_CHECKING:
    from kvlab.cache.kv_cache import KVCache

NOTHING_SEEN = np.zeros(0, dtype=np.int64)


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
        self.row_seen = NOTHING_SEEN  # (batch,); arrays of lengths and limits are replaced, never changed in place
        self.turn_start: np.ndarray | None = None  # `row_seen` when the open turn began
        self.limits: RowLimits | None = None  # None before the first budget
        self.steady: np.ndarray | None = None  # lengths that stay: each new token makes one leave, and has room
        self.back_end: Kernels | None = None
        self.rule = AttentionRule(scaling=1.0)
        self.rotation: Rotation | None = None  # of the current call, left here by the attention modules' pre-hook
        self.table: RotaryTable | None = None
        self.voters: Voters | None = None  # the open turn's last queries
        self.profile: dict[str, Tensor] = {}  # what the policy found out about each head, (batch, kv_heads, ...)
        self.profile_cost = (0.0, 0)  # seconds which that took, bytes of the queries that were held for it

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
        if self.store is None:
            return
        self.store.select_rows(rows)
        self.batch_size = len(rows)
        self.row_seen = row_seen
        if self.limits is not None:
            self._set_limits(self.limits.budget[rows.numpy()])
        self.profile = {name: part[rows.to(part.device)] for name, part in self.profile.items()}
        self.voters = None if self.voters is None else self.voters.rows(rows)

    def fork(self, cache: KVCache, keep_limit: bool = True) -> KVLayer:
        """An independent copy that belongs to another cache; under no limit if that is not to be kept."""
        other = KVLayer(cache, self.layer_idx)
        other.__dict__.update({name: value for name, value in vars(self).items() if name != "cache"})
        other.store = None if self.store is None else self.store.copy()
        if other.store is not None and not keep_limit:
            held, needed = set(other.store.state), set(other._state_kinds(other.store.keys))
            if lacking := needed - held:
                name = cache.plan.policy.name
                raise ValueError(f"a fork for {name} needs {', '.join(sorted(lacking))} of each token, which this cache lacks")
            other.store.without(held - needed)
            other._set_limits(unlimited(other.store.lengths.shape))
            other.profile = {}
        return other

    # ---------------------------------------------------------------------------------------------- attention

    @property
    def policy(self) -> Policy:
        """The cache's policy."""
        return self.cache.plan.policy

    def attend(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, rule: AttentionRule) -> Tensor:
        """Attention of new tokens over what is held and over themselves, with storage and eviction.

        query (batch, heads, tokens, head_dim), key and value (batch, kv_heads, tokens, dim) as the model made them;
        padding (batch, tokens), False for pads. Returns (batch, heads, tokens, value_dim); rows of pads mean nothing.
        Has no gradient. An error on the way leaves the cache unusable until `reset`, which later calls say.
        """
        self.cache.check_usable()
        try:
            with torch.inference_mode(False), torch.no_grad():  # what is stored must outlive the caller's mode
                return self._attend(query, key, value, padding, rule)
        except BaseException:
            self.cache.broken = True
            raise

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, rule: AttentionRule) -> Tensor:
        self.rule = rule
        call = self.cache.call_for(self.row_seen, key, padding)
        batch, heads, tokens, dim = query.shape
        queries = query.reshape(batch, key.shape[1], -1, tokens, dim)  # query head h reads KV head h // group
        if self.policy.rolling:
            queries, key = self._unrotate(query, key, call)
        if self.store is None:
            self.store = SlotStore.empty(key, value, self._state_kinds(key))
        arrival = Arrival(self.layer_idx, key, value, call.positions)
        attend = self._turn if self.cache.takes_turn(call) else self._steps
        output = attend(queries, arrival, call)
        self.cache.note_bytes(self.layer_idx, self.store.kv_bytes)
        output = output.flatten(1, 2)
        return output if output.dtype == query.dtype else output.to(query.dtype)

    def _state_kinds(self, key: Tensor) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        if self.policy.once:
            kinds[SCORE] = (accumulate_type(key), ())
        if "mass" in self.policy.needs:
            kinds["mass"] = (accumulate_type(key), ())
        if self.cache.needs_token_ids:
            kinds["token_ids"] = (torch.int32, ())
        if self.policy.ranks_after_prompt:
            kinds[RANK] = (accumulate_type(key), ())
        return kinds | {name: (kind.dtype, kind.shape) for name, kind in self.policy.token_state().items()}

    def _arriving_state(self, arrival: Arrival, call: Call) -> dict[str, Tensor]:
        """State that tokens bring along: (batch, kv_heads or 1, tokens, ...)."""
        state = dict(self.policy.arrive(arrival))
        if self.policy.once:
            state[SCORE] = self.policy.score(self._step_of(arrival, call))
        if call.token_ids is not None:
            state["token_ids"] = call.token_ids[:, None]
        if self.policy.ranks_after_prompt:
            state[RANK] = torch.full((1, 1, 1), float("inf"), device=arrival.keys.device)
        return state

    # ------------------------------------------------------------------------------------------------- turns

    def _turn(self, queries: Queries, arrival: Arrival, call: Call) -> Outputs:
        """Full attention of a turn (or of one of its chunks); evicts at its end unless more chunks follow."""
        if self.turn_start is None:
            self.turn_start = self.row_seen if len(self.row_seen) else np.zeros_like(call.seen)
        output, placed = self._take_in(queries, arrival, call, counted=True)
        seen = queries if self.policy.replays_prompt else placed
        voters, count = self.voters, None if self.cache.plan.watch else self.policy.voting
        new = Voters(seen, call.positions)
        self.voters = new.last(count) if voters is None else voters.then(seen, call.positions, count)
        self.cache.note_bytes(self.layer_idx, self._held.kv_bytes)
        if not self.cache.turn_open:
            self.close_turn()
        return output

    def _take_in(self, queries: Queries, arrival: Arrival, call: Call, counted: bool) -> tuple[Outputs, Queries]:
        """Store tokens and let them attend, none leaving; also the queries as they attended.

        counted  whether what they attend to is added to the mass, if the policy needs it
        """
        store = self._held
        alone = not store.lengths.any()
        state = self._arriving_state(arrival, call)
        more, arrived = self.cache.turn_open, call.arrived
        store.append(arrival.keys, arrival.values, call.positions, state, arrived=arrived, more_to_come=more)
        self.row_seen = call.seen
        if not store.lengths.any():  # pads alone
            return queries.new_zeros(*queries.shape[:-1], arrival.values.shape[-1]), queries
        view = store.view()
        causal = alone and view.full and not call.padded
        queries, keys = self._placed_queries(queries, call.positions, view), self._placed_keys(view)
        places = (call.positions, view.positions, self.rule)
        if (simulation := self.cache.plan.simulation) is not None:
            assert alone, "a simulation reads whole texts"
            return simulation(queries, keys, view.values, *places), queries
        group = self.policy.group if counted and "mass" in self.policy.needs else None
        if group is None and self.rule.fused:
            return reference.attend(queries, keys, view.values, *places, causal=causal), queries
        output, mass = self._kernels(keys).prefill_stats(queries, keys, view.values, *places, group=group, causal=causal)
        if group is not None:
            store.write_state("mass", view.state["mass"] + mass, view)
        return output, queries

    def close_turn(self) -> None:
        """The decision at a turn's end: resolve the budget for all tokens seen, then evict down to it."""
        if self.store is None or self.turn_start is None:
            return
        if not self.row_seen.all():
            row = int(self.row_seen.argmin())
            raise ValueError(f"row {row} of the batch has pads only; give every prompt at least one token")
        came = (self.row_seen > self.turn_start)[:, None]  # a row that got pads only is left as it is
        none = unlimited(self.store.lengths.shape)
        before = none if self.limits is None else self.limits.budget
        self._set_limits(np.where(came, self._budget_from(self.cache.budgets(self.row_seen)), before))
        assert self.limits is not None
        policy = self.policy
        due = policy.chooses or (policy.ranks_after_prompt and not self.limits.none)
        if self.cache.plan.watch or policy.remembers or (came & (due | (self.store.lengths > self.limits.limit))).any():
            self._decide_turn(came, before)
        if not policy.holds_budget_after_prompt:
            self._set_limits(np.where(came, none, before))
        self.store.trim(self.limits.room)
        self.turn_start = self.voters = None

    # ------------------------------------------------------------------------------------------------- steps

    def _steps(self, queries: Queries, arrival: Arrival, call: Call) -> Outputs:
        """Each token as if it were decoded."""
        if self.limits is None:
            self._set_limits(self._budget_from(self.cache.stream_budgets(len(call.seen))))
        rule = self.cache.plan.rule
        scan = None if rule is None else self._kernels(arrival.keys).evict_scan
        steps = self._one_step if rule is None or scan is None else partial(self._scan, scan, rule)
        if call.tokens == 1:
            return steps(queries, arrival, call)
        outputs, start = [], 0
        while start < call.tokens:
            quiet = self._quiet_tokens(call.tokens - start)
            end = start + quiet if quiet > 1 else call.tokens if scan is not None else start + 1
            some, part, calls = queries[..., start:end, :], arrival.part(start, end), call.part(start, end)
            counted = self.policy.when == "every_step"
            outputs.append(self._take_in(some, part, calls, counted)[0] if quiet > 1 else steps(some, part, calls))
            start = end
        self.row_seen = call.seen  # the same array in all layers, so that they share calls
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 3)

    def _quiet_tokens(self, tokens: int) -> int:
        """How many of the next tokens can come before any could leave; 0 where each must be placed anew."""
        policy, limits = self.policy, self.limits
        assert limits is not None
        if policy.rolling or policy.chooses or policy.remembers or limits.fade is not None:
            return 0
        return min(tokens, int((limits.limit - self._held.lengths).min()))

    def _scan(self, scan: EvictScan, rule: ScanRule, queries: Queries, arrival: Arrival, call: Call) -> Outputs:
        """All steps at once, by a kernel that works on the store in place."""
        store, limits = self._held, self.limits
        assert limits is not None
        limit, before = limits.limit, limits.device.before
        steady = store.lengths is self.steady
        if not steady:
            store.reserve(limits.room, None, call.arrived, beyond=not before)
            least = np.minimum(store.lengths + call.arrived, limits.room)
            assert (store.capacity >= least).all(), "kernels write where they are told"
        state = self._arriving_state(arrival, call)
        slots = store.slots(rule.planes)
        probes = self.policy.probes(queries, arrival) if rule.order == "distance" else None
        new = arrivals_of(arrival, state, rule, probes)
        special = self.cache.special_ids(arrival.keys.device)
        if special is not None and call.token_ids is not None:
            new = replace(new, special=torch.isin(call.token_ids, special))
            slots = replace(slots, special=torch.isin(store.state["token_ids"], special))
        moved = store.state_count > sum(name is not None for name in rule.planes)  # state that the kernel doesn't know
        if moved:
            slots, new = with_source(slots, new)
        output = scan(queries, new, slots, limits.device, self._step_rule, rule)
        if not steady:
            lengths = lengths_after(store.lengths, call.arrived, limit, limits.target, before)
            store.scanned(lengths)
            full = limits.target is limit and (lengths == limit).all() and (store.capacity >= limits.room).all()
            self.steady = lengths if full else None
        if moved:
            assert slots.source is not None
            move_state(store, state, slots.source, rule, arrival.keys.shape[:3])
        self.row_seen = call.seen
        return output

    def _one_step(self, queries: Queries, arrival: Arrival, call: Call) -> Outputs:
        store, limits, first_room = self._held, self.limits, self.policy.phase == "before_attention"
        assert limits is not None
        rows = None if call.real is None else call.real[:, 0]
        self.row_seen = call.seen
        if first_room:
            self._decide_step(queries, call, store.view(), None, arrival)
        store.reserve(limits.room, rows)
        store.insert(arrival.keys, arrival.values, call.positions, self._arriving_state(arrival, call), rows)
        view = store.view()
        queries, keys = self._placed_queries(queries, call.positions, view), self._placed_keys(view)
        output, attention = self._attend_step(queries, keys, view, call)
        if attention is not None and "mass" in self.policy.needs:
            received = merge_group(attention, self.policy.group)[:, :, 0]
            store.write_state("mass", view.state["mass"] + received, view)
        if self.policy.remembers:
            assert attention is not None, "a policy remembers what it asks for"
            looks = partial(iter, [(attention, call.positions)])
            self._remember(self._step(view, queries, call.positions, call.newest[:, 0], attention, looks), view)
        if not first_room:
            self._decide_step(queries, call, view, attention, None)
        return output

    def _attend_step(self, queries: Queries, keys: Keys, view: View, call: Call) -> tuple[Outputs, Tensor | None]:
        rule = self._step_rule
        places = (call.positions, view.positions, rule)
        wanted = self.policy.when == "every_step" and bool(self.policy.needs & {"mass", "attention", "looks"})
        wanted |= self.policy.chooses
        decode = self._kernels(keys).decode_attend
        if decode is not None and self.table is None:
            output, attention = decode(queries, self._held.slots(), call.positions, rule, want_weights=wanted)
            return output, None if attention is None else attention[..., : view.positions.shape[-1]]
        if wanted:
            attention = reference.weights(queries, keys, *places)
            flat = attention.flatten(2, 3) @ view.values.to(attention.dtype)
            return flat.unflatten(2, attention.shape[2:4]), attention
        seen = view.full and rule.window is None and not call.padded
        return reference.attend(queries, keys, view.values, *places, all_visible=seen), None

    # --------------------------------------------------------------------------------------------- decisions

    def _decide_turn(self, came: np.ndarray, before: np.ndarray) -> None:
        """Evict down to the budget in the rows to which tokens came."""
        store, policy = self._held, self.policy
        view = store.view()
        assert self.voters is not None and self.limits is not None
        if (watch := self.cache.plan.watch) is not None:
            watch(self._turn_step(view, self.voters))
            self.voters = self.voters.last(policy.voting)
        step = self._turn_step(view, self.voters)
        now = step.now
        if policy.remembers:
            step = self._remember(step, view)
        if policy.chooses:
            if not self.profile:
                started = time(now.device)
                self.profile = dict(policy.profile(step))
                held = (self.voters.queries, self.voters.positions)
                self.profile_cost = time(now.device) - started, sum(part.untyped_storage().nbytes() for part in held)
            kept = policy.select(replace(step, profile=self.profile))
            self._keep(kept | ~torch.from_numpy(came).to(kept.device)[..., None], view)
            return
        over = came & (store.lengths > self.limits.limit)
        if policy.replays_prompt and over.any():
            self._keep(self._replayed(step) | ~torch.from_numpy(over).to(now.device)[..., None], view)
            return
        scores, tiers = judge(policy, step, self.rule.window, self.cache.special_ids(view.positions.device))
        if policy.ranks_after_prompt:
            self._remember_rank(scores, tiers, came, view)
        if type(policy).head_budget is not Policy.head_budget:
            self._set_limits(np.where(came, policy.head_budget(step, scores, tiers).cpu().numpy(), before))
        limit = self.limits.limit
        if (came & (store.lengths > limit)).any():
            budget = torch.from_numpy(np.where(came, limit, store.lengths)).to(view.positions.device)
            store.keep(selection.select(scores, step.positions, tiers, budget), view, self.limits.room)

    def _turn_step(self, view: View, voters: Voters) -> Step:
        """What there is to look at when a turn ends."""
        keys, attention = self._placed_keys(view), None
        if "attention" in self.policy.needs:
            attention = reference.weights(voters.queries, keys, voters.positions, view.positions, self.rule)
        now = torch.from_numpy(self.row_seen - 1).to(view.positions.device)
        looks = partial(voters.looks, keys, view.positions, self.rule)
        return self._step(view, voters.queries, voters.positions, now, attention, looks, prompt_end=True)

    def _replayed(self, step: Step) -> Kept:
        """What the turn's tokens would have left, had they come one by one."""
        assert self.voters is not None and self.turn_start is not None and self.limits is not None
        device, special = step.positions.device, self.cache.special_ids(step.positions.device)
        start = torch.from_numpy(np.array(self.turn_start)).to(device)
        rule, scan = self.cache.plan.rule, self._kernels(step.keys).evict_scan
        if rule is None or scan is None:
            return replay_by_steps(self.policy, step, self.voters, start, self.rule.window, special, self.limits.target)
        ids = None if special is None or step.token_ids is None else torch.isin(step.token_ids, special)
        return replay_by_kernel(self.policy, rule, scan, step, self.voters, start, self.limits.device, ids, self.rule)

    def _remember(self, step: Step, view: View) -> Step:
        """Let the policy write its own state."""
        for name, dense in self.policy.remember(step).items():
            self._held.write_state(name, dense, view)
        return replace(step, state={name: view.state[name] for name in step.state})

    def _remember_rank(self, scores: Scores, tiers: Tiers, came: np.ndarray, view: View) -> None:
        """Scores of a turn's end, which decide what leaves until the next one; protected tokens weren't scored."""
        rank = scores.to(view.state[RANK].dtype).masked_fill(tiers >= selection.RECENT, float("inf"))
        fresh = torch.from_numpy(came).to(rank.device)[..., None]
        self._held.write_state(RANK, torch.where(fresh, rank, view.state[RANK]), view)

    def _decide_step(
        self, queries: Queries, call: Call, view: View, attention: Tensor | None, arriving: Arrival | None
    ) -> None:
        """Evict where a row is over its limit, or would be with the token about to arrive."""
        store, limits = self._held, self.limits
        assert limits is not None
        if self.policy.chooses:
            step = self._step(view, queries, call.positions, call.newest[:, 0], attention, None)
            kept = self.policy.select(step)
            self._keep(kept if call.real is None else kept | ~call.positions.ge(0)[..., None], view)
            return
        room = limits.limit if arriving is None else limits.limit - 1
        over = store.lengths > room
        if call.real is not None:
            over &= call.real[:, :1]
        if not over.any():
            return
        left = np.minimum(limits.target, room)
        step = self._step(view, queries, call.positions, call.newest[:, 0], attention, None, arriving)
        scores, tiers = judge(self.policy, step, self.rule.window, self.cache.special_ids(view.positions.device))
        if (store.lengths - left == 1)[over].all() and (store.lengths == store.capacity)[over].all():
            store.vacate(selection.victim(scores, step.positions, tiers), None if over.all() else over)
        else:
            budget = torch.from_numpy(np.where(over, left, store.lengths)).to(view.positions.device)
            store.keep(selection.select(scores, step.positions, tiers, budget), view, limits.room)

    def _keep(self, kept: Kept, view: View) -> None:
        """Drop all but these, in place where a row loses one token at most."""
        assert self.limits is not None
        gone = (view.positions >= 0) & ~kept
        counts = gone.sum(-1)
        most = int(counts.max())
        if most == 1 and self.turn_start is None:
            self._held.vacate(gone.long().argmax(-1), counts.bool().cpu().numpy())
        elif most:
            self._held.keep(kept & (view.positions >= 0), view, self.limits.room)

    def _step_of(self, arrival: Arrival, call: Call) -> Step:
        """New tokens for a policy that scores each token once, by what it is alone."""
        positions = arrival.positions[:, None].expand(arrival.keys.shape[:3])
        nothing = call.nothing.expand(positions.shape[:2])
        return Step(
            layer_idx=self.layer_idx,
            num_layers=len(self.cache.layers),
            prompt_end=False,
            positions=positions,
            now=call.newest[:, -1],
            budget=nothing,
            recent=nothing,
            grace=None,
            queries=arrival.keys[:, :, None],
            query_positions=arrival.positions,
            keys=arrival.keys,
            values=arrival.values,
            arriving=arrival,
            token_ids=None if call.token_ids is None else call.token_ids[:, None].expand_as(positions),
            sample_ids=self.cache.sample_keys(len(positions), positions.device),
        )

    def _step(
        self,
        view: View,
        queries: Queries,
        query_positions: Tensor,
        now: Tensor,
        attention: Tensor | None,
        looks: Callable[[], Iterator[Look]] | None,
        arriving: Arrival | None = None,
        *,
        prompt_end: bool = False,
    ) -> Step:
        """What the policy may look at."""
        assert self.limits is not None
        state = dict(view.state)
        return Step(
            layer_idx=self.layer_idx,
            num_layers=len(self.cache.layers),
            prompt_end=prompt_end,
            positions=view.positions,
            now=now,
            budget=self.limits.device.limit,
            recent=self.limits.device.recent,
            grace=self.limits.device.grace,
            queries=queries,
            query_positions=query_positions,
            keys=view.keys,
            values=view.values,
            arriving=arriving,
            attention=attention,
            looks=looks,
            mass=state.pop("mass", None),
            token_ids=state.pop("token_ids", None),
            sample_ids=self.cache.sample_keys(len(self.row_seen), view.positions.device),
            state=state,
            profile=self.profile,
            window=self.rule.window,
            vocab=self.cache.plan.vocab,
        )

    # ------------------------------------------------------------------------------------------------- limits

    def _set_limits(self, budget: np.ndarray) -> None:
        """Budget of each row from now on, (batch, kv_heads) tokens, and what follows from it."""
        self.limits, self.steady = RowLimits(self.policy, budget, self.rule.window, self._held.keys.device), None

    @property
    def own_tensors(self) -> list[Tensor]:
        """What is kept on the device beside the store: limits, and what the policy found out about heads."""
        return [*([] if self.limits is None else self.limits.tensors), *self.profile.values()]

    def _budget_from(self, budgets: np.ndarray | None) -> np.ndarray:
        """Budget of every row from those of all layers, (layers, batch) or None."""
        if budgets is None:
            return unlimited(self._held.lengths.shape)
        return np.repeat(budgets[self.layer_idx][:, None], self._held.lengths.shape[1], axis=1)

    @property
    def _step_rule(self) -> AttentionRule:
        """How tokens attend at steps, where a policy may let old ones fade."""
        fade = None if self.limits is None else self.limits.fade
        return self.rule if fade is None else replace(self.rule, fade=fade)

    def _kernels(self, keys: Keys) -> Kernels:
        if self.back_end is None:
            self.back_end = choose(self.cache.plan.kernels, keys.device.type, keys.dtype)
        return self.back_end

    @property
    def _held(self) -> SlotStore:
        assert self.store is not None
        return self.store

    # ----------------------------------------------------------------------------------------------- positions

    def _unrotate(self, query: Tensor, key: Tensor, call: Call) -> tuple[Queries, Keys]:
        """Queries and keys without their rotation, whose table is recorded for later places."""
        if self.rotation is None:
            raise ValueError("rolling needs rotary position embeddings, and this layer was given none; use rolling=false")
        self.table = self.cache.table_for(self.rotation)
        self.table.cover(self._longest_row() + call.tokens, query.dtype)
        rotation, self.rotation = self.rotation, None
        return rotation.undo(query).unflatten(1, (key.shape[1], -1)), rotation.undo(key)

    def _longest_row(self) -> int:
        return 0 if self.store is None else int(self.store.lengths.max(initial=0))

    def _placed_keys(self, view: View) -> Keys:
        """Keys as attention needs them: rotated by their place in the cache under `rolling`."""
        return view.keys if self.table is None else self.table.place_keys(view.keys, view.positions)

    def _placed_queries(self, queries: Queries, query_positions: Tensor, view: View) -> Queries:
        return queries if self.table is None else self.table.place_queries(queries, query_positions, view.positions)
