"""One layer of a cache: takes an attention call, stores its tokens, attends, and lets the policy evict.

A call is a *turn* (full attention inside, one decision at its end) or *steps* (each token as if decoded: insert, attend,
decide). This module knows the timing rule and no policy by name; the model is known by `AttentionRule` alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.attending import AttendingLayer
from kvlab.cache.call import Call
from kvlab.cache.encoded import EncodedStore
from kvlab.cache.leading import Handed
from kvlab.cache.readers import OpenCall, joined
from kvlab.cache.scan import arrivals_of, lengths_after, move_state, with_source
from kvlab.cache.state import without
from kvlab.cache.store import SlotStore
from kvlab.cache.voters import Voters
from kvlab.kernels.contract import ScanRule
from kvlab.kernels.dispatch import EvictScan
from kvlab.kernels.reference import AttentionRule
from kvlab.policies.base import RANK, SCORE
from kvlab.shapes import Arrival, Outputs, Queries


class KVLayer(AttendingLayer):
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
        source = self.cache.plan.sources.get(self.layer_idx)
        if source is None:
            output = self._over_own(queries, key, value, call)
        else:
            output = self._over_anothers(self.cache.layers[source], queries, call)
        output = output.flatten(1, 2)
        return output if output.dtype == query.dtype else output.to(query.dtype)

    def _over_own(self, queries: Queries, key: Tensor, value: Tensor, call: Call) -> Outputs:
        """Attention over what this layer holds, which takes the new tokens first."""
        if self.open is not None:  # a forward pass ended before all its readers had attended
            self.cache.broken = True
            self.cache.check_usable()
        if self.policy.rolling:
            queries, key = self._unrotate(queries, key, call)
        if self.store is None:
            self.store = self._new_store(key, value)
        if self.cache.plan.unrotates and not self.policy.rolling:
            assert isinstance(self.store, EncodedStore)
            self.store.table = self._turning(key, call)
        arrival = Arrival(self.layer_idx, key, value, call.positions)
        attend = self._turn if self.cache.takes_turn(call) else self._steps
        output = attend(queries, arrival, call)
        self.cache.note_bytes(self.layer_idx, self.store.kv_bytes)
        if self.cache.followers:
            self._hand_on(queries, arrival, call)
        return output

    def _hand_on(self, queries: Queries, arrival: Arrival, call: Call) -> None:
        """Let followers take a call in, once the turn is over."""
        cache, mass = self.cache, self.received
        self.received = None
        self.handed = (*self.handed, Handed(queries, arrival, call, self.rule, cache.input_ids, mass, cache.turn_open))
        if not cache.turn_open:
            self.lead()

    def lead(self) -> None:
        """The turn is over here: let the followers' layers take it in."""
        turn, self.handed = self.handed, ()
        for follower in self.cache.followers:
            follower.take(self.layer_idx, turn)

    def follow(self, handed: Handed) -> None:
        """Take in a call over which a leader's layer has attended, as if it had come here."""
        self.is_initialized, self.batch_size = True, len(handed.queries)
        self.seen_len += handed.call.tokens
        self.rule, self.given = handed.rule, handed
        try:
            arrival = handed.arrival
            self._over_own(handed.queries, arrival.keys, arrival.values, self.cache.call_of(handed))
        finally:
            self.given = None

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
        output, placed = self._take_in(queries, arrival, call, counted=True, kind="turn")
        if not self.readers:
            self._end_turn(Voters(queries if self.policy.replays_prompt else placed, call.positions))
        return output

    def _take_in(
        self, queries: Queries, arrival: Arrival, call: Call, counted: bool, kind: Literal["turn", "steps"]
    ) -> tuple[Outputs, Queries]:
        """Store tokens and let them attend, none leaving; also the queries as they attended.

        counted  whether what they attend to is added to the mass, if the policy needs it
        """
        store = self._held
        alone = not store.lengths.any()
        if not alone and self.cache.plan.simulation is not None:
            raise ValueError("a simulation reads each text in one call of a new cache, since its masks need all of it")
        state = self._arriving_state(arrival, call)
        more, arrived = self.cache.turn_open, call.arrived
        store.append(arrival.keys, arrival.values, call.positions, state, arrived=arrived, more_to_come=more)
        self.row_seen = call.seen
        view = store.view() if store.lengths.any() else None  # None: pads alone
        causal = alone and view is not None and view.full and not call.padded
        counted &= "mass" in self.policy.needs
        if self.readers:
            self.open = OpenCall(call, view, 1 + self.readers, kind, causal, counted)
            return self.read(queries, self.rule), queries
        placed = queries if view is None else self._placed_queries(queries, call.positions, view)
        return self._attend_many(placed, view, call, self.rule, causal, counted), placed

    # ------------------------------------------------------------------------------------------------- steps

    def _steps(self, queries: Queries, arrival: Arrival, call: Call) -> Outputs:
        """Each token as if it were decoded."""
        if self.cache.plan.simulation is not None:
            raise ValueError("a simulation reads whole texts and decodes nothing, since its masks need all of a text")
        if self.limits is None:
            self._set_limits(self._budget_from(self.cache.stream_budgets(len(call.seen))))
        rule = None if self._held.encoded or self.readers else self.cache.plan.rule
        scan = None if rule is None else self._kernels(arrival.keys).evict_scan
        steps = self._one_step if rule is None or scan is None else partial(self._scan, scan, rule)
        if call.tokens == 1:
            return steps(queries, arrival, call)
        outputs, start = [], 0
        while start < call.tokens:
            quiet = self.quiet_tokens(call.tokens - start)
            if self.readers and quiet < call.tokens:
                raise ValueError(
                    f"layer {self.layer_idx} is read by other layers, so what leaves is decided when all have attended: give "
                    f"one token a call, or as many as cache.step_tokens({call.tokens}) says"
                )
            end = start + quiet if quiet > 1 else call.tokens if scan is not None else start + 1
            some, part, calls = queries[..., start:end, :], arrival.part(start, end), call.part(start, end)
            counted = self.policy.when == "every_step"
            outputs.append(self._take_in(some, part, calls, counted, "steps")[0] if quiet > 1 else steps(some, part, calls))
            start = end
        self.row_seen = call.seen  # the same array in all layers, so that they share calls
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 3)

    def quiet_tokens(self, tokens: int) -> int:
        """How many of the next tokens can come before any could leave; 0 where each must be placed anew."""
        policy, limits = self.policy, self.limits
        if (
            limits is None
            or policy.rolling
            or policy.chooses
            or policy.remembers
            or limits.fade is not None
            or self._held.encoded
        ):
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
        output = scan(queries, new, slots, limits.device, self._faded(self.rule), rule)
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
        if self.readers:
            self.open = OpenCall(call, view, 1 + self.readers, "step")
            return self.read(queries, self.rule)
        queries = self._placed_queries(queries, call.positions, view)
        output, attention = self._attend_step(queries, view, call, self.rule)
        self._end_step(queries, view, call, attention)
        return output

    # ------------------------------------------------------------------------------------------------ sharing

    @property
    def readers(self) -> int:
        """How many other layers read what this one holds."""
        return self.cache.plan.readers[self.layer_idx]

    def _over_anothers(self, source: KVLayer, queries: Queries, call: Call) -> Outputs:
        """Attention over what another layer holds, which has the new tokens already."""
        if self.policy.rolling:
            rotation = self._own_rotation()
            if self.cache.table_for(rotation) is not source.table:
                raise ValueError(
                    f"layers {source.layer_idx} and {self.layer_idx} rotate in different ways, so under rolling=true they "
                    "can't share a cache; use rolling=false, or pair layers that are alike"
                )
            queries = without(rotation, queries)
        self.rotation = None
        output = source.read(queries, self.rule)
        self.row_seen = call.seen
        return output

    def read(self, queries: Queries, rule: AttentionRule) -> Outputs:
        """Attention of one of the layers that read this one's store, over it and the open call's tokens; the last one ends it.

        queries and the result as of `_attend_many`; rule: the reading layer's own.
        """
        now = self.open
        assert now is not None, "a store is read once its own layer has taken the call's tokens"
        call, attention = now.call, None
        view = None if now.view is None else replace(now.view)  # so that nothing decoded outlives its reader
        placed = queries if view is None else self._placed_queries(queries, call.positions, view)
        if now.kind == "step":
            assert view is not None
            output, attention = self._attend_step(placed, view, call, rule)
        else:
            output = self._attend_many(placed, view, call, rule, now.causal, counted=False)
        if now.kind == "step" or now.counted:
            now.queries.append(now.scaled(placed, rule))
        if now.kind == "turn":
            seen = now.scaled(queries if self.policy.replays_prompt else placed, rule)
            some, count = Voters(seen, call.positions), self._voting
            now.voters.append(some if count is None else some.last(count))
        if attention is not None:
            now.attention.append(attention)
        now.rules.append(rule)
        now.waiting -= 1
        if not now.waiting:
            self._all_have_read(now)
        return output

    def _all_have_read(self, now: OpenCall) -> None:
        """What is done about a call's tokens once all readers have attended."""
        self.open, call, view = None, now.call, now.view
        if now.kind == "step":
            assert view is not None
            self._end_step(joined(now.queries), view, call, joined(now.attention) if now.attention else None)
        elif now.counted and view is not None:
            self._attend_many(joined(now.queries), view, call, now.rule, now.causal, counted=True)
        if now.kind == "turn":
            ahead = self.policy.phase == "before_attention"  # at steps it decides before its readers' queries are known
            self.rule = self.rule if ahead else now.rule
            self._end_turn(now.voters[0] if ahead else now.all_voters)
        self.cache.note_bytes(self.layer_idx, self._held.kv_bytes)
