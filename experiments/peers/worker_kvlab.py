"""kvlab at work, in its own environment; started by compare.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import transformers
from serving import Job, Worker, serve

from kvlab import Budget, Policy, attach, load_model, make_policy


class KVLab(Worker):
    """Sessions of kvlab; `plain` is the same model without one."""

    cache_needs_surroundings = True

    def __init__(self, folder: str) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = load_model(folder, dtype=torch.float32)[0]

    def versions(self) -> dict[str, str]:
        """Versions of the packages that matter."""
        return {name: version(name) for name in ("kvlab", "transformers", "torch")}

    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.model.config.vocab_size

    def prompt_key(self, job: Job) -> Hashable:
        """snapkv is told at the prompt's end whether it may grow."""
        grows = job.method == "snapkv" and not job.interval
        return job.method, grows, job.length, job.batch, job.keep, job.window, job.kernel, job.seed

    @contextmanager
    def reading(self, job: Job) -> Iterator[Callable[[], Any]]:
        """A session, which lives as long as its caches do."""
        if job.method == "plain":
            yield transformers.DynamicCache
            return
        with attach(self.model, policy=choose_policy(job), budget=Budget(ratio=job.keep)) as session:
            yield session.new_cache

    @contextmanager
    def stepping(self, job: Job) -> Iterator[None]:
        """Decoding goes on in the prompt's session."""
        yield

    def forward(self, ids: torch.Tensor, cache: Any, seen: int) -> torch.Tensor:
        """The cache knows how much was read."""
        return self.model(ids, cache=cache, logits_to_keep=1).logits

    def copy(self, cache: Any) -> Any:
        """A cache with tensors of its own."""
        return cache.fork() if hasattr(cache, "fork") else copy.deepcopy(cache)

    def held(self, cache: Any) -> tuple[float, int]:
        """As kvlab reports it; for a stock cache, as counted on the other side."""
        if hasattr(cache, "memory"):
            memory = cache.memory()
            return memory.kept_len.double().mean().item(), memory.kv_bytes
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return float(cache.get_seq_length()), sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def choose_policy(job: Job) -> Policy:
    """The policy of a method with the settings that kvpress is given."""
    if job.method == "snapkv":
        settings = {"obs_window": job.window, "kernel": job.kernel, "pool": "avg"}
        return make_policy("snapkv", **settings, after_prompt="rank" if job.interval else "grow")
    if job.method == "streaming_llm":
        return make_policy("streaming_llm", num_sink=job.num_sink)
    return make_policy(job.method)


if __name__ == "__main__":
    serve(KVLab)
