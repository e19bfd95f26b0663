"""The cache that a model is given: one `KVLayer` per layer, phases, budgets, forks, and what it all weighs."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvlab.budget import Budget, BudgetError
from kvlab.cache.call import Call, CallKey
from kvlab.cache.layer import KVLayer
from kvlab.cache.leading import Follower, Handed
from kvlab.cache.plan import Plan
from kvlab.cache.rotation import RotaryTable, Rotation
from kvlab.policies.base import Policy

Phase = Literal["auto", "prompt", "step"]


@dataclass(frozen=True)
class Memory:
    """What a cache weighs, all in bytes but the last two.

    kv_bytes       keys and values held now, free slots included: the size of the tensors' storages
    parts          the same by what is held: full_precision, codes, scales, zeros and what else a codec holds
    kv_bytes_peak  the most that layers held together at any time (a layer's storage counts once while it is rebuilt)
    kv_bytes_full  what a full cache of the tokens seen would hold in the model's dtype (a sliding-window layer: its window),
                   layers that read another's included
    state_bytes    bookkeeping on the device: positions, attention mass, other state, indices, limits, rotary tables, what
                   tokens are projected by, queries of an open turn; but not what all caches of a session share (tables of token
                   kinds, hash projections)
    offload_bytes  copies that a codec holds on the CPU beside the device's memory
    kept_fraction  kept tokens / seen tokens, over all layers and heads
    kept_len       kept tokens, (layers, batch, kv_heads)
    """

    kv_bytes: int
    kv_bytes_peak: int
    kv_bytes_full: int
    state_bytes: int
    offload_bytes: int
    kept_fraction: float
    parts: dict[str, int]
    kept_len: Tensor = field(repr=False)

    def as_dict(self) -> dict[str, object]:
        """Plain values, `kept_len` as nested lists."""
        return {**asdict(self), "kept_len": self.kept_len.tolist()}


@dataclass(frozen=True)
class RowMemory:
    """What one sequence of a batch weighs: bytes held and of a full cache, tokens kept and seen over all layers and heads."""

    kv_bytes: int
    kv_bytes_full: int
    kept: int
    seen: int


class KVCache(Cache):
    """A transformers cache that holds what its policy keeps. Made by `Session.new_cache`.

    A call with several tokens is a turn: full attention inside, evicted at its end. `with cache.turn():` joins several
    calls (chunks of one prompt) into one turn; `with cache.stepwise():` treats every token as if it were decoded.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        max_new_tokens: int | None = None,
        sample_ids: Sequence[int | str] | None = None,
        known_len: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(layers=[KVLayer(self, idx) for idx in range(len(plan.layers))])
        self.plan = plan
        self.max_new_tokens = max_new_tokens
        self.known_len = None if known_len is None else np.asarray(known_len, dtype=np.int64)
        self._sample_keys = None if sample_ids is None else [_sample_key(sample) for sample in sample_ids]
        self._sample_tensors: dict[tuple[int, torch.device], Tensor] = {}
        self._start_anew()

    def _start_anew(self) -> None:
        self.phase: Phase = "auto"
        self.turn_open = False
        self.broken = False
        self.input_ids: Tensor | None = None  # of the current call, left here by the model's pre-hook
        self.pending: KVLayer | None = None  # a layer whose keys have not reached kvlab's attention yet
        self._call: tuple[CallKey, Call] | None = None  # the last call's tokens, and what they were made from
        self._budgets: tuple[bytes, np.ndarray | None] | None = None
        self._tables: dict[Hashable, RotaryTable] = {}
        self._held = [0] * len(self.layers)
        self._peak = 0
        self.profile_cost = (0.0, 0)
        self.followers: tuple[Follower, ...] = ()

    # ------------------------------------------------------------------------------------------------ phases

    @contextmanager
    def turn(self) -> Iterator[KVCache]:
        """Calls inside are chunks of one turn: full attention, one decision when the block ends."""
        with self._in_phase("prompt"):
            self.turn_open = True
            try:
                yield self
            except BaseException:
                self.broken = True
                raise
            finally:
                self.turn_open = False
            self._close_turn()

    @torch.inference_mode(False)  # what is stored must outlive the caller's mode
    def _close_turn(self) -> None:
        for layer in self.layers:
            layer.close_turn()
            if layer.store is not None:
                self.note_bytes(layer.layer_idx, layer.store.kv_bytes)
            if layer.handed:
                layer.lead()
        for follower in self.followers:
            follower.end()

    @contextmanager
    def stepwise(self) -> Iterator[KVCache]:
        """Every token of the calls inside counts as decoded: inserted, attended, evicted one after the other.

        From the first token on, a budget by ratio needs `new_cache(known_len=...)`.
        """
        with self._in_phase("step"):
            yield self

    @contextmanager
    def _in_phase(self, phase: Phase) -> Iterator[None]:
        if self.phase != "auto":
            raise RuntimeError(f"the cache is in a {self.phase!r} block already; leave it first")
        self.phase = phase
        try:
            yield
        finally:
            self.phase = "auto"

    @contextmanager
    def leading(self, caches: Sequence[KVCache]) -> Iterator[tuple[Follower, ...]]:
        """The first turn, read inside, is that of these new caches too, whose policies and codecs see what this one's does.

        All must hold keys and values as they attend: no `rolling`, no basis, no sharing. Whose policy needs the mass must have
        a leader whose policy counts it by the same `group`; and whose policy doesn't, one that doesn't either.
        """
        assert not self.seen_len.any() and not any(cache.plan.sources or cache.plan.unrotates for cache in (self, *caches))
        self.followers = tuple(Follower(cache) for cache in caches)
        try:
            yield self.followers
        finally:
            self.followers = ()

    def takes_turn(self, call: Call) -> bool:
        """Whether a call is (part of) a turn; a single token is one only as the first of all."""
        if self.phase != "auto":
            return self.phase == "prompt"
        return call.tokens > 1 or call.first

    def step_tokens(self, tokens: int) -> int:
        """How many of the next `tokens` one call inside `stepwise` may have, 1 at least.

        All; but where layers read another's cache, only as many as can come before any leaves or is encoded.
        """
        return max(1, min([tokens, *(self.layers[layer].quiet_tokens(tokens) for layer in self.plan.readers)]))

    # ----------------------------------------------------------------------------------------------- budgets

    def budgets(self, lengths: np.ndarray) -> np.ndarray | None:
        """Tokens per head of every layer and sequence, (layers, batch), when these many tokens have been seen.

        A ratio is of the known length where that is more.
        """
        if self.known_len is not None:
            lengths = np.maximum(lengths, self.known_len)
        key = lengths.tobytes()
        if self._budgets is None or self._budgets[0] != key:
            self._budgets = (key, self.plan.tokens(lengths, self.max_new_tokens))
        return self._budgets[1]

    def stream_budgets(self, batch: int) -> np.ndarray | None:
        """The same where eviction starts with the first token, so the whole length must be known before."""
        policy, codec = self.plan.policy, self.plan.codec
        if codec is not None and codec.needs_prompt:
            raise ValueError(f"codec {codec.label} looks at a prompt's end, and a cache began with steps: give a prompt first")
        if policy.evicts and policy.when == "prompt_end":
            raise ValueError(f"policy {policy.name} decides at a prompt's end and can't evict from the first token on")
        if policy.evicts and self.plan.budget.ratio is not None and self.known_len is None:
            raise BudgetError("a ratio from the first token on needs the length of the text: new_cache(known_len=...)")
        return self.budgets(np.zeros(batch, dtype=np.int64))

    # ------------------------------------------------------------------------------- what layers ask the cache

    def expect(self, layer: KVLayer) -> None:
        """A layer's keys are on their way to kvlab's attention. Raises ValueError if the last ones never got there."""
        self.check_usable()
        if self.plan.ended():
            raise ValueError("the session of this cache has ended; use the cache inside its `with attach(...)` block")
        self.check_arrived()
        self.pending = layer

    def check_arrived(self) -> None:
        """Raises ValueError if a layer's keys were given to the cache and then not to kvlab's attention."""
        if self.pending is not None:
            self.broken = True
            raise ValueError(
                f"layer {self.pending.layer_idx} gave its keys to the kvlab cache, but its attention didn't reach kvlab: the "
                "cache was used on a model that isn't attached, or this model changes keys between cache and attention and "
                "can't be used with kvlab"
            )

    def call_over(self) -> None:
        """A forward pass is over: its ids and positions are of no use any more, and all keys must have arrived."""
        self.input_ids = self._call = None
        self.check_arrived()
        for layer in self.plan.readers:
            if self.layers[layer].open is not None:
                self.broken = True
                raise ValueError(
                    f"a forward pass is over, and not all layers that read the cache of layer {layer} took part in it; share "
                    "no caches where a model leaves out layers"
                )

    def check_usable(self) -> None:
        """Raises RuntimeError after a call that failed midway."""
        if self.broken:
            raise RuntimeError("an earlier call on this cache failed midway; cache.reset(), or take a new cache")

    def call_for(self, row_seen: np.ndarray, key: Tensor, padding: Tensor | None) -> Call:
        """The new tokens of the current forward pass; made for the first layer, shared by the others."""
        batch, _, tokens, _ = key.shape
        if len(row_seen) not in (0, batch):
            raise ValueError(
                f"this cache holds {len(row_seen)} sequences, the call has {batch}; use a new cache, or "
                "cache.batch_repeat_interleave(n) for n continuations of each"
            )
        made_from = CallKey(row_seen, tokens, padding, self.input_ids, key.device)
        if self._call is None or not self._call[0].same(made_from):
            seen = row_seen if len(row_seen) else np.zeros(batch, dtype=np.int64)
            ids = self._ids_for(tokens, batch, key.device)
            self._call = (made_from, Call.of(seen, tokens, padding, ids, key.device))
        return self._call[1]

    def call_of(self, handed: Handed) -> Call:
        """A leader's call as this cache's own."""
        self.input_ids, call = handed.ids, handed.call
        try:
            return replace(call, token_ids=self._ids_for(call.tokens, len(call.seen), call.positions.device))
        finally:
            self.input_ids = None

    def _ids_for(self, tokens: int, batch: int, device: torch.device) -> Tensor | None:
        if not self.needs_token_ids:
            return None
        if self.input_ids is None or self.input_ids.shape != (batch, tokens):
            name = self.plan.policy.name
            raise ValueError(f"policy {name} needs token ids: call the model with input_ids, not inputs_embeds")
        return self.input_ids.to(device)

    @property
    def needs_token_ids(self) -> bool:
        """Whether layers must remember which token each slot holds."""
        return self.plan.policy.keep_special or "token_ids" in self.plan.policy.needs

    def special_ids(self, device: torch.device) -> Tensor | None:
        """Ids of special tokens, where those are protected."""
        if not self.plan.policy.keep_special:
            return None
        assert self.plan.vocab is not None, "attach() checks that keep_special comes with a tokenizer"
        return self.plan.vocab.special_ids(device)

    def sample_keys(self, batch: int, device: torch.device) -> Tensor | None:
        """One integer for each sequence, from `sample_ids`; sequences expanded by `generate` share their sample's."""
        if self._sample_keys is None:
            return None
        repeats, rest = divmod(batch, len(self._sample_keys))
        if rest:
            given = len(self._sample_keys)
            raise ValueError(f"{given} sample_ids were given for a batch of {batch}; give one for each prompt")
        if (batch, device) not in self._sample_tensors:
            self._sample_tensors[batch, device] = torch.tensor(self._sample_keys, device=device).repeat_interleave(repeats)
        return self._sample_tensors[batch, device]

    def table_for(self, rotation: Rotation) -> RotaryTable:
        """The rotary table of all layers that rotate in this way."""
        return self._tables.setdefault((rotation.source.key, rotation.cos.device), RotaryTable(rotation))

    def note_bytes(self, layer_idx: int, kv_bytes: int) -> None:
        """Record what a layer holds now."""
        self._held[layer_idx] = kv_bytes
        self._peak = max(self._peak, sum(self._held))

    def note_again(self, held: Sequence[Sequence[int]]) -> None:
        """Record what layers held after each call of the first turn, [layer][call], in the order of calls."""
        self._held = [0] * len(self.layers)
        for stage in zip(*held, strict=True):
            for layer_idx, kv_bytes in enumerate(stage):
                self.note_bytes(layer_idx, kv_bytes)

    # ------------------------------------------------------------------------------------- rows, copies, reset

    @torch.inference_mode(False)
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these sequences of the batch, in this order (beam search)."""
        rows = beam_idx.cpu()
        row_seen = self.layers[0].row_seen[rows.numpy()]
        if self._sample_keys is not None:
            keys = self.sample_keys(len(self.layers[0].row_seen), rows.device)
            assert keys is not None
            self._sample_keys, self._sample_tensors = keys[rows].tolist(), {}
        if self.known_len is not None and self.known_len.ndim:
            self.known_len = self.known_len[rows.numpy()]
        for layer in self.layers:
            layer.select_rows(rows, row_seen)
            if layer.store is not None:
                self.note_bytes(layer.layer_idx, layer.store.kv_bytes)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Same as `reorder_cache`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        self.reorder_cache(torch.arange(len(self.layers[0].row_seen)).repeat_interleave(repeats))

    @torch.inference_mode(False)
    def fork(self, policy: Policy | None = None) -> KVCache:
        """An independent copy of everything held, policy state included: for several continuations of one prefix.

        policy  another policy for the copy, which is under no budget: `full` holds on to what is held
        """
        self.check_usable()
        if self.phase != "auto":
            raise RuntimeError(f"a cache can't be forked inside a {self.phase!r} block")
        plan = self.plan if policy is None else replace(self.plan, policy=policy, budget=Budget())
        other = KVCache(plan, max_new_tokens=self.max_new_tokens)
        other.known_len = self.known_len
        other._sample_keys = None if self._sample_keys is None else list(self._sample_keys)
        other._tables = dict(self._tables)
        other.layers = [layer.fork(other, keep_limit=policy is None) for layer in self.layers]
        other._held, other._peak = list(self._held), sum(self._held)
        return other

    def reset(self) -> None:
        """Forget everything, as new."""
        super().reset()
        self._start_anew()

    # ------------------------------------------------------------------------------------------------ reports

    @property
    def seen_len(self) -> Tensor:
        """Tokens seen of each sequence, pads not counted: (batch,)."""
        return torch.from_numpy(self.layers[0].row_seen.copy())

    @property
    def kept_len(self) -> Tensor:
        """Tokens kept: (layers, batch, kv_heads). Layers must have equal numbers of KV heads; one that holds nothing has 0."""
        kept = [holder.store.lengths * (layer is holder) for layer, holder in self._filled]
        return torch.from_numpy(np.stack(kept)) if kept else torch.zeros(0, 0, 0, dtype=torch.long)

    def kept_positions(self) -> list[list[list[list[int]]]]:
        """Positions kept, ascending: [layer][sequence][kv_head] -> list of ints."""
        places = [self._places(layer is holder, holder) for layer, holder in self._filled]
        return [[[sorted(p for p in head if p >= 0) for head in row] for row in rows.tolist()] for rows in places]

    @staticmethod
    def _places(holds: bool, holder: Any) -> Tensor:
        places = holder.store.view().positions
        return places if holds else torch.full_like(places, -1)

    @property
    def _filled(self) -> list[tuple[Any, Any]]:
        """Layers that have seen tokens, each with the one that holds what it reads: itself, or another."""
        pairs = [(layer, self.layers[self.plan.sources.get(layer.layer_idx, layer.layer_idx)]) for layer in self.layers]
        return [(layer, holder) for layer, holder in pairs if holder.store is not None]

    @property
    def _holding(self) -> list[Any]:
        """Layers that hold tokens."""
        return [layer for layer in self.layers if layer.store is not None]

    def memory_by_row(self) -> list[RowMemory]:
        """What each sequence of the batch weighs now, in the order of the batch."""
        nothing = np.zeros(len(self.seen_len), dtype=np.int64)
        held = sum((layer.store.row_bytes for layer in self._holding), start=nothing)
        kept = sum((layer.store.lengths.sum(1) for layer in self._holding), start=nothing)
        seen = sum((holder.row_seen * holder.store.lengths.shape[1] for _, holder in self._filled), start=nothing)
        full = sum((self._full_bytes(holder) for _, holder in self._filled), start=nothing)
        rows = zip(held.tolist(), full.tolist(), kept.tolist(), seen.tolist(), strict=True)
        return [RowMemory(*row) for row in rows]

    def heads_by_row(self) -> list[dict[str, object]]:
        """What each sequence of the batch holds head by head, [layer][kv_head]: kept tokens, and what a policy found out.

        A layer that holds nothing has 0 tokens, and of it nothing is found out.
        """
        kept, names = self.kept_len, self._holding[0].profile if self._holding else {}
        rows: list[dict[str, object]] = []
        for row in range(len(self.seen_len)):
            profiles = [layer.profile for layer, _ in self._filled]
            found = {name: [part[name][row].tolist() if part else [] for part in profiles] for name in names}
            rows.append({"kept_len": kept[:, row].tolist(), **found})
        return rows

    def note_profile(self, seconds: float) -> None:
        """A layer's policy has found out about its heads; `profile_cost` sums up seconds and the most bytes of queries held."""
        voters = [layer.voters for layer in self.layers if layer.voters is not None]
        held = sum(part.untyped_storage().nbytes() for some in voters for part in (some.queries, some.positions))
        self.profile_cost = self.profile_cost[0] + seconds, max(self.profile_cost[1], held)

    def memory(self) -> Memory:
        """What the cache weighs now."""
        filled = self._holding
        seen = sum(int(holder.row_seen.sum()) * holder.store.lengths.shape[1] for _, holder in self._filled)
        kept = sum(int(layer.store.lengths.sum()) for layer in filled)
        own = [*self._sample_tensors.values(), *(tensor for layer in filled for tensor in layer.own_tensors)]
        state = sum(layer.store.state_bytes for layer in filled) + sum(table.nbytes for table in self._tables.values())
        state += sum(tensor.untyped_storage().nbytes() for tensor in own)
        bases = [tensor.untyped_storage() for layer in filled for tensor in layer.store.bases]
        state += sum({storage.data_ptr(): storage.nbytes() for storage in bases}.values())
        parts: dict[str, int] = {}
        for layer in filled:
            for kind, size in layer.store.parts.items():
                parts[kind] = parts.get(kind, 0) + size
        return Memory(
            kv_bytes=sum(parts.values()),
            parts=parts,
            offload_bytes=sum(layer.store.offload_bytes for layer in filled),
            kv_bytes_peak=self._peak,
            kv_bytes_full=sum(int(self._full_bytes(holder).sum()) for _, holder in self._filled),
            state_bytes=state,
            kept_fraction=kept / seen if seen else 1.0,
            kept_len=self.kept_len,
        )

    def _full_bytes(self, layer: KVLayer) -> np.ndarray:
        """Bytes of a full cache of this layer, or of one that reads it, (batch,)."""
        window = layer.rule.window
        tokens = layer.row_seen if window is None else np.minimum(layer.row_seen, window)
        assert layer.store is not None
        numbers = layer.store.lengths.shape[1] * (sum(layer.store.dims))
        return tokens * (numbers * self.plan.itemsize)


def _sample_key(sample: int | str) -> int:
    """32 bits that stand for a sample: integers as they are, names by hash."""
    if isinstance(sample, str):
        return int.from_bytes(hashlib.blake2b(sample.encode(), digest_size=4).digest(), "big")
    return int(sample) & 0xFFFFFFFF
