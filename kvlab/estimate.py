"""Roughly what a cell takes, before anything is loaded: bytes of the cache of a batch, and seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from kvlab.cells import Cell
from kvlab.session import attach
from kvlab.workbench import Workbench

STEP_S = 3e-4
"""Seconds of one token in one layer of the token-by-token path, beside its matrix products (seen on a CPU)."""


@dataclass(frozen=True)
class Estimate:
    """kv_bytes: of a batch when its prompts have been evicted; seconds: of everything, within a factor of about two.

    prompts_s: those of them in which prompts are read, which cells may share
    """

    kv_bytes: int | float
    seconds: int | float
    prompts_s: int | float = 0.0

    def __str__(self) -> str:
        """For the plan of a sweep."""
        time_text = f"{self.seconds:.0f} s" if self.seconds < 90 else f"{self.seconds / 60:.0f} min"
        return f"~{self.kv_bytes / 1e6:.1f} MB KV per batch, ~{time_text}"


def estimate(cell: Cell, bench: Workbench, samples: int) -> Estimate:
    """What `samples` more samples of a cell take."""
    model, tokenizer = bench.shape
    every = bench.samples(cell)
    weights = sum(parameter.numel() for parameter in model.parameters())
    read = [prompt for sample in every for prompt in sample.prompts]
    samples = round(samples * len(read) / len(every))  # rows, from here on
    prompts = sum(len(prompt.ids) for prompt in read) / len(read)
    after = (sum(map(cell.protocol.held, read)) + sum(sample.work for sample in every)) / len(read)
    rows = min(cell.runtime.batch_size, len(read))
    known = sum(map(cell.protocol.known_len, read)) / len(read)
    kv_bytes = rows * cache_bytes(cell, model, tokenizer, known, prompts + after)
    steps = after if cell.protocol.compresses else prompts + after
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    prompts_s = 2 * weights * prompts * samples / _flops()
    seconds = prompts_s + 2 * weights * after * samples / _flops() + samples / rows * steps * layers * STEP_S
    if any(sample.new_tokens for sample in every):  # each new token reads all weights once a batch
        seconds += samples / rows * after * 2 * weights * rows**0.3 / _flops() * 4
    return Estimate(kv_bytes, seconds, prompts_s)


def cache_bytes(cell: Cell, model: PreTrainedModel, tokenizer: Any, known: int | float, tokens: int | float) -> int | float:
    """Bytes of one sequence's cache once it has seen so many tokens, of which a budget's ratio is of those `known`.

    model  may be without its weights
    """
    at_work = {name: value for name, value in cell.at_work.items() if name != "simulation"}
    with attach(model, tokenizer=tokenizer, **at_work) as session:
        plan = session.plan
        holding = [plan.layers[layer] for layer in plan.holders]
        budget = plan.budget.resolve([max(1, round(known))], holding, new_tokens=0)
        held = min(tokens, budget[0]) if budget else tokens
        return sum(layer.token_bytes * min(held, layer.window or held) for layer in holding)


def together(guesses: Sequence[Estimate]) -> Estimate:
    """Of cells that read their prompts once: their caches are there at once, whole prompts only as long as one is read."""
    prompts_s = max(guess.prompts_s for guess in guesses)
    own = sum(guess.seconds - guess.prompts_s for guess in guesses)
    return Estimate(sum(guess.kv_bytes for guess in guesses), prompts_s + own, prompts_s)


@cache
def _flops() -> float:
    """Floating-point operations a second of a matrix product here."""
    a = torch.randn(512, 512)
    a @ a
    start = time.perf_counter()
    for _ in range(10):
        a @ a
    return 10 * 2 * 512**3 / (time.perf_counter() - start)
