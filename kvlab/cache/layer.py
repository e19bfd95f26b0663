"""One layer of a cache: takes an attention call, stores its tokens, attends, and lets the policy evict.

A call is a *turn* (full attention inside, one decision at its end) or *steps* (each token as if decoded: insert, attend,
decide). This module knows the timing rule and no policy by name; the model is known by `AttentionRule` alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.call import Call
from kvlab.cache.decisions import DecidingLayer
from kvlab.cache.encoded import EncodedStore
from kvlab.cache.limits import unlimited
from kvlab.cache.scan import arrivals_of, lengths_after, move_state, with_source
from kvlab.cache.store import SlotStore, View
from kvlab.cache.voters import Voters
from kvlab.codecs.attended import Seen
from kvlab.kernels import reference
from kvlab.kernels.contract import ScanRule
from kvlab.kernels.dispatch import EvictScan
from kvlab.kernels.reference import AttentionRule, merge_group
from kvlab.policies.base import RANK, SCORE
from kvlab.shapes import Arrival, Outputs, Queries


class KVLayer(DecidingLayer):
    """Cache of one model layer, which attends."""

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
            self.store = self._new_store(key, value)
        if self.cache.plan.unrotates and not self.policy.rolling:
            assert isinstance(self.store, EncodedStore)
            self.store.table = self._turning(key, call)
        arrival = Arrival(self.layer_idx, key, value, call.positions)
        attend = self._turn if self.cache.takes_turn(call) else self._steps
        output = attend(queries, arrival, call)
        self.cache.note_bytes(self.layer_idx, self.store.kv_bytes)
        output = output.flatten(1, 2)
        return output if output.dtype == query.dtype else output.to(query.dtype)

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
        voters, count = self.voters, self._voting
        new = Voters(seen, call.positions)
        self.voters = new.last(count) if voters is None else voters.then(seen, call.positions, count)
        self.cache.note_bytes(self.layer_idx, self._held.kv_bytes)
        if not self.cache.turn_open:
            self.close_turn()
        return output

    @property
    def _voting(self) -> int | None:
        """How many of the turn's last queries are remembered, None for all: only where they will be looked at."""
        plan = self.cache.plan
        if plan.watch is not None:
            return None
        no_limit = plan.budget.unlimited and self.rule.window is None
        decided = bool(self.profile) or (self.policy.replays_prompt and no_limit)
        count = 1 if decided else self.policy.voting
        return count if count is None or plan.codec is None else max(count, plan.codec.watches)

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
            if not alone:
                raise ValueError("a simulation reads each text in one call of a new cache, since its masks need all of it")
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
        if self.store.encoded:
            self._encode(None, came)
        self.store.trim(self.limits.room)
        self.turn_start = self.voters = None

    # ------------------------------------------------------------------------------------------------- steps

    def _steps(self, queries: Queries, arrival: Arrival, call: Call) -> Outputs:
        """Each token as if it were decoded."""
        if self.cache.plan.simulation is not None:
            raise ValueError("a simulation reads whole texts and decodes nothing, since its masks need all of a text")
        if self.limits is None:
            self._set_limits(self._budget_from(self.cache.stream_budgets(len(call.seen))))
        rule = None if self._held.encoded else self.cache.plan.rule
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
        if policy.rolling or policy.chooses or policy.remembers or limits.fade is not None or self._held.encoded:
            return 0
        return min(tokens, int((limits.limit - self._held.lengths).min()))

    def _scan(self, scan: EvictScan, rule: ScanRule, queries: Queries, arrival: Arrival, call: Call) -> Outputs:
        """All steps at once, by a kernel that works on the store in place."""
        store, limits = self._held, self.limits
        assert limits is not None and isinstance(store, SlotStore)
        if store.lengths is not self.steady:
            store.reserve(limits.room, None, call.arrived, beyond=not limits.device.before)
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
        if moved:
            assert slots.source is not None
            move_state(store, state, slots.source, rule, arrival.keys.shape[:3])
        self._note_lengths(rule, call)
        self.row_seen = call.seen
        return output

    def _note_lengths(self, rule: ScanRule, call: Call) -> None:
        """How many tokens a scan has left, on the host; memory of those that left is freed where they may have been many."""
        store, limits = self._held, self.limits
        assert limits is not None and isinstance(store, SlotStore)
        if rule.open_ended:
            most = store.lengths + call.arrived
            store.scanned(store.read_lengths())
            if (most - store.lengths > 1).any():
                store.settle(limits.room)
        elif store.lengths is not self.steady:
            limit = limits.limit
            lengths = lengths_after(store.lengths, call.arrived, limit, limits.target, limits.device.before)
            store.scanned(lengths)
            full = limits.target is limit and (lengths == limit).all() and (store.capacity >= limits.room).all()
            self.steady = lengths if full else None

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
        queries = self._placed_queries(queries, call.positions, view)
        output, attention = self._attend_step(queries, view, call)
        if attention is not None and "mass" in self.policy.needs:
            received = merge_group(attention, self.policy.group)[:, :, 0]
            store.write_state("mass", view.state["mass"] + received, view)
        if self.policy.remembers:
            looks = None if attention is None else partial(iter, [(attention, call.positions)])
            self._remember(self._step(view, queries, call.positions, call.newest[:, 0], attention, looks), view)
        if isinstance(store, EncodedStore):
            self.cache.note_bytes(self.layer_idx, store.kv_bytes)  # the most there is: encoding only makes it less
            assert attention is not None
            self._encode(Seen(queries, call.positions, False, partial(attention.amax, 2)))
        if not first_room:
            self._decide_step(queries, call, view, attention, None)
        return output

    def _attend_step(self, queries: Queries, view: View, call: Call) -> tuple[Outputs, Tensor | None]:
        rule, store = self._step_rule, self._held
        wanted = self.policy.when == "every_step" and bool(self.policy.needs & {"mass", "attention", "looks"})
        wanted |= self.policy.chooses
        if self.table is None:
            if isinstance(store, EncodedStore):
                return store.attend(queries, call.positions, view, rule)
            if (decode := self._kernels(store.keys).decode_attend) is not None:
                output, attention = decode(queries, store.slots(), call.positions, rule, want_weights=wanted)
                return output, None if attention is None else attention[..., : view.positions.shape[-1]]
        keys = self._placed_keys(view)
        places = (call.positions, view.positions, rule)
        if wanted or store.encoded:
            attention = reference.weights(queries, keys, *places)
            flat = attention.flatten(2, 3) @ view.values.to(attention.dtype)
            return flat.unflatten(2, attention.shape[2:4]), attention
        seen = view.full and rule.window is None and not call.padded
        return reference.attend(queries, keys, view.values, *places, all_visible=seen), None
