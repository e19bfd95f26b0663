"""Which back end runs where. `reference` is plain torch and runs everywhere; there, eviction is each policy's own `score`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from kvlab.kernels import reference

NAMES = ("auto", "reference", "cpu", "gpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What compiled kernels take."""


@dataclass(frozen=True)
class Kernels:
    """The operations of one back end; what it lacks is done step by step with the reference.

    prefill_stats  attention outputs of many queries, and the attention that each slot received
    decode_attend  attention of a few queries over ragged rows, and each slot's part of it
    evict_scan     per-step eviction replayed over known tokens by a rule
    """

    name: str
    prefill_stats: Callable[..., Any]
    decode_attend: Callable[..., Any] | None = None
    evict_scan: Callable[..., Any] | None = None


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
            module = importlib.import_module(f"kvlab.kernels.{name}")
            return Kernels(name, module.prefill_stats, module.decode_attend, module.evict_scan)
    if wanted != "auto":
        need = {"cpu": "the CPU", "gpu": "a CUDA device and the package triton"}[wanted]
        raise ValueError(
            f"kernels={wanted} needs {need} and float32, bfloat16 or float16, not {str(dtype).removeprefix('torch.')} on "
            f"{device_type}; use kernels=auto"
        )
    return REFERENCE
