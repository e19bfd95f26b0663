"""Decoding: time of one step of a batch, with caches that hold a prompt, against transformers' own cache.

A prompt is read once and its row repeated, as what stands in the rows makes no difference to the time of a step.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from transformers import DynamicCache

from kvlab.bench.setup import Setup, evicting
from kvlab.bench.timing import Line, Work, alternate, bandwidth

STEPS = 8
"""Steps for each repeat. Caches take turns after every step."""
TARGETS: dict[int, tuple[float | None, ...]] = {2048: (2.0, 1.3, 1.3), 4096: (2.5, 1.6, None)}
"""Prompt length -> h2o over transformers' full cache, h2o over kvlab's, and kvlab's over transformers'."""
NO_TARGETS: tuple[float | None, ...] = (None, None, None)
DECIDING_TARGET = 1.10


def decode(setup: Setup) -> list[Line]:
    """h2o and full against transformers' cache at each length; every policy against streaming_llm at the shortest."""
    assert "kvlab" not in setup.stock.config._attn_implementation, "made before any session"
    speed = bandwidth(setup.device)
    lines = [line for length in setup.lengths for line in _against_full(setup, length, speed)]
    return lines + _deciding(setup, min(setup.lengths))


def _against_full(setup: Setup, length: int, speed: float) -> list[Line]:
    with ExitStack() as stack, torch.inference_mode():
        caches = {name: _kvlab_cache(setup, name, length, stack) for name in ("full", "h2o")}
        works = {name: _step(setup, setup.model, cache) for name, cache in caches.items()}
        works["transformers"] = _step(setup, setup.stock, _stock_cache(setup, length))
        step = alternate(works, STEPS * setup.repeats, setup.device, warm_up=2)
        held = {name: caches[name].memory().kv_bytes for name in ("full", "h2o")}
    at = f"batch {setup.batch} × {length}"
    over_stock, over_full, full = TARGETS.get(length, NO_TARGETS) if setup.usual else NO_TARGETS

    def line(name: str, other: str, target: float | None) -> Line:
        floor = (_weight_bytes(setup) + held[name]) / speed
        note = f"{setup.batch / step[name]:.0f} tokens/s; {held[name] / 2**20:.0f} MiB of keys and values"
        labels = {"h2o": f"h2o at {setup.ratio:.0%}", "full": "kvlab's full", "transformers": "transformers' DynamicCache"}
        what = f"{labels[name]} over {labels[other]}, {at}"
        return Line(what, step[name], step[other], target, True, floor, note)

    return [line("h2o", "transformers", over_stock), line("h2o", "full", over_full), line("full", "transformers", full)]


def _deciding(setup: Setup, length: int) -> list[Line]:
    """What deciding costs: policies against the one that need not look, all holding equally much."""
    names = evicting()
    with ExitStack() as stack, torch.inference_mode():
        works = {name: _step(setup, setup.model, _kvlab_cache(setup, name, length, stack)) for name in names}
        step = alternate(works, STEPS * setup.repeats, setup.device, warm_up=2)
    base = step.pop("streaming_llm")
    at = f"batch {setup.batch} × {length} at {setup.ratio:.0%}"
    target = DECIDING_TARGET if setup.usual else None
    return [Line(f"{name} over streaming_llm, {at}", seconds, base, target) for name, seconds in step.items()]


def _weight_bytes(setup: Setup) -> int:
    """Weights that a step reads: all but an embedding that isn't the output's too."""
    model = setup.model
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    read = sum(parameter.nbytes for parameter in model.parameters())
    return read if head is not None and head.weight is embedding else read - embedding.nbytes


def _kvlab_cache(setup: Setup, name: str, length: int, stack: ExitStack) -> Any:
    session = stack.enter_context(setup.session(name))
    cache = session.new_cache()
    setup.model(setup.ids(length), cache=cache, logits_to_keep=1)
    cache.batch_repeat_interleave(setup.batch)
    return cache


def _stock_cache(setup: Setup, length: int) -> DynamicCache:
    cache = DynamicCache(config=setup.stock.config)
    setup.stock(setup.ids(length), cache=cache, logits_to_keep=1)
    cache.batch_repeat_interleave(setup.batch)
    return cache


def _step(setup: Setup, model: Any, cache: Any) -> Work:
    """One greedy step of the batch after the other."""
    token = torch.full((setup.batch, 1), 11, device=setup.device)

    def run() -> None:
        nonlocal token
        token = model(token, cache=cache).logits[:, -1].argmax(-1)[:, None]

    return run
