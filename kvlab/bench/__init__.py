"""`kvlab bench`: what kvlab's caches and kernels cost and save, each figure a ratio of two times taken in one process."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch

from kvlab.bench.choices import choices
from kvlab.bench.codecs import codecs, render_codecs
from kvlab.bench.decode import decode
from kvlab.bench.loglik import loglik
from kvlab.bench.memory import memory, render_memory
from kvlab.bench.prefill import prefill
from kvlab.bench.setup import Setup, load
from kvlab.bench.sweep import sweep
from kvlab.bench.timing import render

__all__ = ["BENCHES", "Setup", "load", "run_benches"]

BENCHES: dict[str, tuple[str, Callable[[Setup], Sequence[Any]], Callable[[str, Any], str]]] = {
    "decode": ("Decoding", decode, render),
    "prefill": ("Reading a prompt", prefill, render),
    "loglik": ("Log-probabilities under per-step eviction", loglik, render),
    "choices": ("Multiple choice", choices, render),
    "codecs": ("Codecs", codecs, render_codecs),
    "memory": ("Keys and values held", memory, render_memory),
    "sweep": ("Sweeps", sweep, render),
}
"""name -> (title, bench, how to print it)"""


def run_benches(names: Sequence[str], setup: Setup, as_json: bool, show: Callable[[str], None]) -> None:
    """Run these benches and show each as soon as it is there; as JSON all at once."""
    found = {}
    for name in names:
        title, bench, table = BENCHES[name]
        lines = list(bench(setup))
        found[name] = [line.as_dict() for line in lines]
        if not as_json:
            show(table(title, lines) + "\n")
    if as_json:
        show(json.dumps({"machine": machine(setup), "benches": found}, indent=1))
    else:
        show("  ".join(f"{name} {value}" for name, value in machine(setup).items()))


def machine(setup: Setup) -> dict[str, Any]:
    """What the figures depend on."""
    device = setup.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(setup.model.dtype).removeprefix("torch."),
        "repeats": setup.repeats,
        **{package: version(package) for package in ("torch", "transformers", "numba")},
    }
