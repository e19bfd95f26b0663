"""Decisions of one layer: what the policy is shown at a turn's end and at a step, and what leaves. Knows no policy by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvlab import selection
from kvlab.cache.call import Call
from kvlab.cache.decide import judge
from kvlab.cache.encoded import EncodedStore
from kvlab.cache.replay import replay_by_kernel, replay_by_steps
from kvlab.cache.state import LayerState
from kvlab.cache.store import View
from kvlab.cache.voters import Voters
from kvlab.codecs.attended import Seen
from kvlab.kernels import reference
from kvlab.measure import now as time
from kvlab.policies.base import RANK, Policy
from kvlab.shapes import Arrival, Kept, Look, Queries, Scores, Step, Tiers


class DecidingLayer(LayerState):
    """A layer that lets its policy evict."""

    def _decide_turn(self, came: np.ndarray, before: np.ndarray) -> None:
        """Evict down to the budget in the rows to which tokens came."""
        store, policy = self._held, self.policy
        view = store.view()
        assert self.voters is not None and self.limits is not None
        if (watch := self.cache.plan.watch) is not None:
            watch(self._turn_step(view, self.voters))
        step = self._turn_step(view, self.voters.last(policy.voting))
        now = step.now
        if policy.remembers:
            step = self._remember(step, view)
        if policy.chooses:
            if policy.profiles and not self.profile:
                started = time(now.device)
                self.profile = dict(policy.profile(step))
                self.cache.note_profile(time(now.device) - started)
            kept = policy.select(step.changed(profile=self.profile))
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
        return step.changed(state={name: view.state[name] for name in step.state})

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

    def _encode(self, seen: Seen | None, came: np.ndarray | None = None) -> None:
        """Let the codec encode what is due; tokens that left a window leave where their group as a whole did.

        seen: queries of a step. At a turn's end None, since the codec may look at the turn's last ones; came: which rows got
        tokens then, (batch, 1).
        """
        store, turn_end = self._held, seen is None
        assert isinstance(store, EncodedStore) and self.limits is not None
        if turn_end:
            self._expire(store)
        if count := store.codec.watches:
            store.observe(self._last_seen(store, count) if seen is None else seen)
        if not turn_end:
            self._expire(store)  # not before, since the step attended to them
        store.seal(turn_end, self.limits.room, came)

    def _last_seen(self, store: EncodedStore, count: int) -> Seen:
        """The turn's last queries, for the codec."""
        assert self.voters is not None
        last, view = self.voters.last(count), store.view()

        def attention() -> Tensor:
            keys = self._placed_keys(view)
            return reference.weights(last.queries, keys, last.positions, view.positions, self.rule).amax(2)

        return Seen(last.queries, last.positions, True, attention)

    def _expire(self, store: EncodedStore) -> None:
        """Let what has left a sliding window leave memory, as far as groups allow."""
        now, window = self.row_seen - 1, self.rule.window
        if window is None or store.evictable or (store.lengths <= window).all():
            return
        view = store.view()
        last = torch.from_numpy(now - window).to(view.positions.device)[:, None, None]
        old = (view.positions <= last) & (view.positions >= 0)
        gone = store.droppable(old.sum(-1).cpu().numpy())
        if gone.any():
            place = torch.arange(old.shape[-1], device=old.device)
            kept = (place >= torch.from_numpy(gone).to(old.device)[..., None]) & (view.positions >= 0)
            store.keep(kept, view, None)

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
            keys=view.read_keys,  # type: ignore[arg-type]  # read when they are asked for
            values=view.read_values,  # type: ignore[arg-type]
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
