"""Reading a prompt: what policies add to a plain forward pass, in time and in memory."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from kvlab.bench.setup import Setup
from kvlab.bench.timing import Line, Work, alternate
from kvlab.measure import PeakMemory

MASS_TARGET, TARGET = 1.15, 1.05
LENGTH = 4096
"""Prompt length that the targets are for."""
POLICIES = ("h2o", "snapkv", "knorm", "streaming_llm", "hashevict")


def prefill(setup: Setup) -> list[Line]:
    """Policies against the model's own attention and cache, at the longest length."""
    length = max(setup.lengths)
    ids = setup.ids(length)
    with torch.inference_mode():
        works: dict[str, Work] = {
            "plain": lambda: setup.model(ids, cache=DynamicCache(config=setup.model.config), logits_to_keep=1)
        }
        works |= {name: _read(setup, name, ids) for name in POLICIES}
        times = alternate(works, setup.repeats, setup.device)
        peaks = {name: _peak(work) for name, work in works.items()}
    lines = []
    for name in POLICIES:
        target = MASS_TARGET if name == "h2o" else TARGET
        mine, plain = peaks[name], peaks["plain"]
        extra = "unknown" if mine is None or plain is None else f"{(mine - plain) / 2**20:+.0f} MiB"
        square = length * length * setup.model.config.num_attention_heads * 4 / 2**20
        note = f"memory at the peak: {extra} (a layer's length × length attention would be {square:.0f} MiB)"
        target_here = target if setup.usual and length == LENGTH else None
        lines.append(Line(f"{name} over plain attention, {length} tokens", times[name], times["plain"], target_here, note=note))
    return lines


def _read(setup: Setup, name: str, ids: torch.Tensor) -> Work:
    def run() -> None:
        with setup.session(name) as session:
            setup.model(ids, cache=session.new_cache(), logits_to_keep=1)

    return run


def _peak(work: Work) -> int | None:
    """Most bytes held during the work beyond what was held before; of the device where there is one."""
    before, meter = PeakMemory.held(), PeakMemory()
    work()
    found = meter.read()
    peak = found["peak_device_bytes"] or found["peak_process_bytes"]
    return None if peak is None or before is None else peak - before
