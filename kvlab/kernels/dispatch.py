"""Which back end runs where. `reference` is plain torch and runs everywhere; there, eviction is each policy's own `score`."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from kvlab.kernels import packed, reference
from kvlab.kernels.contract import Arrivals, Limits, ScanRule, Slots
from kvlab.kernels.packed import Packed
from kvlab.kernels.reference import AttentionRule
from kvlab.shapes import Attention, Keys, Outputs, Positions, Queries, QueryPositions, Scores, Values

NAMES = ("auto", "reference", "cpu", "gpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What compiled kernels take."""


class PrefillStats(Protocol):
    """Attention outputs of many queries, and the attention that each slot received.

    group   how query heads merge; None: nothing is counted, and the second result is 0
    causal  the caller knows that slots and queries are the same tokens in the same order, none missing
    """

    def __call__(
        self,
        queries: Queries,
        keys: Keys,
        values: Values,
        query_positions: QueryPositions,
        positions: Positions,
        attention: AttentionRule,
        /,
        *,
        group: str | None,
        causal: bool = False,
    ) -> tuple[Outputs, Scores]:
        """See above."""
        ...


class DecodeAttend(Protocol):
    """Attention of one or a few queries over slots, which aren't changed.

    Returns outputs, and if wanted the attention that each slot got, (batch, kv_heads, group, queries, widest), 0 beyond a
    row's end; both in float32, and 0 for queries that don't exist (position -1).
    """

    def __call__(
        self,
        queries: Queries,
        slots: Slots,
        query_positions: QueryPositions,
        attention: AttentionRule,
        /,
        *,
        want_weights: bool,
    ) -> tuple[Outputs, Attention | None]:
        """See above."""
        ...


class EvictScan(Protocol):
    """Replays decoding over known tokens: each comes in, attends, and lets tokens leave. `slots` is changed in place.

    Returns attention outputs in float32; those of pads are 0. Every row must have room for what it will hold.
    """

    def __call__(
        self, queries: Queries, arrivals: Arrivals, slots: Slots, limits: Limits, attention: AttentionRule, rule: ScanRule, /
    ) -> Outputs:
        """See above."""
        ...


class PackedLogits(Protocol):
    """Dot products of queries with packed keys as they decode, not scaled: (batch, kv_heads, group, queries, packed.tokens) in
    float32, 0 beyond a row's end.
    """

    def __call__(self, queries: Queries, packed: Packed, /) -> Attention:
        """See above."""
        ...


class PackedMix(Protocol):
    """Sums over tokens of weight * packed value as it decodes: (batch, kv_heads, group, queries, dim) in float32.

    Weights are float32 and have a column for each of packed.tokens or more; those beyond a row's end aren't looked at.
    """

    def __call__(self, weights: Attention, packed: Packed, /) -> Outputs:
        """See above."""
        ...


class Quantise(Protocol):
    """Codes of units (n, tokens, dim), each with its scales: code (n, bytes) uint8 as `packed.pack` has it, scale and zero
    (n, groups) in float16, where a group is `channels` neighbouring channels of all tokens of a unit, the last perhaps fewer.

    zero   the largest float16 not above the group's smallest number, at least -65504, never a negative zero
    scale  the smallest float16 not below (largest - zero) / (2**bits - 1), at most 65504; 1 where that is 0
    code   (number - zero) / scale rounded to the nearest whole number, halves to even, within 0 to 2**bits - 1

    Computed in float32, float64 for float64, every operation rounded once; all back ends give the same bits. So a decoded
    number of float16's range is never further off than half a scale. A group with NaN has a NaN scale and zero, and any codes.
    """

    def __call__(self, units: Tensor, bits: int, channels: int, /) -> tuple[Tensor, Tensor, Tensor]:
        """See above."""
        ...


@dataclass(frozen=True)
class Kernels:
    """The operations of one back end; what it lacks is done step by step with the reference."""

    name: str
    prefill_stats: PrefillStats
    decode_attend: DecodeAttend | None = None
    evict_scan: EvictScan | None = None
    packed_logits: PackedLogits = packed.packed_logits
    packed_mix: PackedMix = packed.packed_mix
    quantise: Quantise = packed.quantise


REFERENCE = Kernels("reference", reference.attend_with_mass)


@functools.cache
def choose(wanted: str, device_type: str, dtype: torch.dtype) -> Kernels:
    """The back end for tensors of this kind. Raises ValueError where the one wanted by name can't be had."""
    if wanted not in NAMES:
        raise ValueError(f"kernels={wanted!r}: use one of {', '.join(NAMES)}")
    if wanted == "reference":
        return REFERENCE
    for name, device, package in (("cpu", "cpu", "numba"), ("gpu", "cuda", "triton")):
        if wanted in ("auto", name) and device_type == device and dtype in DTYPES and find_spec(package) is not None:
            module, codes = (importlib.import_module(f"kvlab.kernels.{prefix}{name}") for prefix in ("", "packed_"))
            quantise = importlib.import_module("kvlab.kernels.quantise_cpu").quantise if name == "cpu" else packed.quantise
            slots = (module.prefill_stats, module.decode_attend, module.evict_scan)
            return Kernels(name, *slots, codes.packed_logits, codes.packed_mix, quantise)
    if wanted != "auto":
        need = {"cpu": "the CPU", "gpu": "a CUDA device and the package triton"}[wanted]
        raise ValueError(
            f"kernels={wanted} needs {need} and float32, bfloat16 or float16, not {str(dtype).removeprefix('torch.')} on "
            f"{device_type}; use kernels=auto"
        )
    return REFERENCE
