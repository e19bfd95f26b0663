"""Attention over what a layer holds, and what follows once all queries of a call have attended. Knows no policy by name."""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor

from kvlab.cache.call import Call
from kvlab.cache.decisions import DecidingLayer
from kvlab.cache.encoded import EncodedStore
from kvlab.cache.limits import unlimited
from kvlab.cache.store import View
from kvlab.cache.voters import Voters
from kvlab.codecs.attended import Seen
from kvlab.kernels import reference
from kvlab.kernels.reference import AttentionRule, merge_group
from kvlab.shapes import Outputs, Queries, Scores


class AttendingLayer(DecidingLayer):
    """A layer over whose store queries attend: its own, or also those of layers that read it."""

    def _attend_many(
        self, queries: Queries, view: View | None, call: Call, rule: AttentionRule, causal: bool, counted: bool
    ) -> Outputs:
        """Attention of a call's tokens, which are in the store already (view None: pads alone).

        queries  as they attend; counted: whether what they attend to is added to the mass
        """
        if view is None:
            return queries.new_zeros(*queries.shape[:-1], self._held.dims[1])
        if self.given is not None:
            if counted:
                assert self.given.mass is not None, "who leads counts what followers need"
                self._receive(self.given.mass, view)
            return queries  # which nobody reads
        keys = self._placed_keys(view)
        places = (call.positions, view.positions, rule)
        if (simulation := self.cache.plan.simulation) is not None:
            return simulation(queries, keys, view.values, *places)
        group = self.policy.group if counted else None
        if group is None and rule.fused:
            return reference.attend(queries, keys, view.values, *places, causal=causal)
        output, mass = self._kernels(keys).prefill_stats(queries, keys, view.values, *places, group=group, causal=causal)
        if group is not None:
            self._receive(mass, view)
        return output

    def _receive(self, mass: Scores, view: View) -> None:
        """Add what slots received to the mass, in `view` too; followers are told."""
        self.received = mass if self.cache.followers else None
        self._held.write_state("mass", view.state["mass"] + mass, view)

    def _attend_step(self, queries: Queries, view: View, call: Call, rule: AttentionRule) -> tuple[Outputs, Tensor | None]:
        """Attention of a decoded token, and its weights (batch, kv_heads, group, 1, slots) where they are wanted."""
        rule, store = self._faded(rule), self._held
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

    # ------------------------------------------------------------------------------------------ all have attended

    def _end_turn(self, new: Voters) -> None:
        """All queries of a turn's call have attended: remember those that vote, and decide unless more chunks follow."""
        voters, count = self.voters, self._voting
        self.voters = new.last(count) if voters is None else voters.then(new.queries, new.positions, count)
        self.cache.note_bytes(self.layer_idx, self._held.kv_bytes)
        if not self.cache.turn_open:
            self.close_turn()

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

    def _end_step(self, queries: Queries, view: View, call: Call, attention: Tensor | None) -> None:
        """All queries of a step have attended: what they attended to counts, and what is due is encoded and leaves."""
        store = self._held
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
        if self.policy.phase != "before_attention":
            self._decide_step(queries, call, view, attention, None)
