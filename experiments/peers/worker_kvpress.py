"""kvpress at work, in its own environment; started by compare.py.

Used as its documentation says: a press is active while the prompt is read, decoding continues at the true positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import kvpress  # type: ignore[import-not-found]
import torch
import transformers
from serving import Job, Unavailable, Worker, serve


class KVPress(Worker):
    """Presses on a stock model with a DynamicCache."""

    def __init__(self, folder: str) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def versions(self) -> dict[str, str]:
        """Versions of the packages that matter."""
        return {name: version(name) for name in ("kvpress", "transformers", "torch")}

    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.model.config.vocab_size

    def prompt_key(self, job: Job) -> Hashable:
        """Whatever happens later, a prompt is evicted in the same way."""
        return job.method, job.length, job.batch, job.keep, job.window, job.kernel, job.seed

    @contextmanager
    def reading(self, job: Job) -> Iterator[Callable[[], Any]]:
        """The press is active for the prompt."""
        self._choose_attention(job)
        press = make_press(job, 1 - job.keep)
        with nullcontext() if press is None else press(self.model):
            yield transformers.DynamicCache

    @contextmanager
    def stepping(self, job: Job) -> Iterator[None]:
        """Nothing is active, or a press that evicts every few steps."""
        self._choose_attention(job)
        press = make_decoding_press(job)
        with nullcontext() if press is None else press(self.model):
            yield

    def forward(self, ids: torch.Tensor, cache: Any, seen: int) -> torch.Tensor:
        """Positions are given, since an evicted cache is shorter than what was read."""
        positions = torch.arange(seen, seen + ids.shape[1])[None]
        return self.model(ids, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits

    def copy(self, cache: Any) -> Any:
        """A cache with tensors of its own."""
        return copy.deepcopy(cache)

    def held(self, cache: Any) -> tuple[float, int]:
        """Every layer keeps equally many tokens, but may be at another point of its interval."""
        tokens = sum(layer.keys.shape[2] for layer in cache.layers) / len(cache.layers)
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return tokens, sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def _choose_attention(self, job: Job) -> None:
        """Observed attention needs whole attention matrices, which eager attention alone returns."""
        self.model.set_attn_implementation("eager" if job.method == "h2o" else "sdpa")


def make_press(job: Job, ratio: float) -> Any:
    """The press of a method that removes `ratio` of the tokens; None where nothing is evicted."""
    if job.method == "h2o":
        return kvpress.ObservedAttentionPress(compression_ratio=ratio)
    if job.method == "snapkv":
        return kvpress.SnapKVPress(compression_ratio=ratio, window_size=job.window, kernel_size=job.kernel)
    if job.method == "knorm":
        return kvpress.KnormPress(compression_ratio=ratio)
    if job.method == "streaming_llm":
        return kvpress.StreamingLLMPress(compression_ratio=ratio, n_sink=job.num_sink)
    return None


def make_decoding_press(job: Job) -> Any:
    """Evicts to the prompt's budget after every `interval` decoded tokens; None for an interval of 0."""
    press = make_press(job, 0.0)
    if not job.interval or press is None:
        return None
    if job.method == "snapkv" and job.interval <= job.window:
        raise Unavailable(
            f"SnapKVPress votes with {job.window} queries, so it can't decide every {job.interval} decoded tokens"
        )
    return kvpress.DecodingPress(
        base_press=press,
        compression_interval=job.interval,
        target_size=kvpress.utils.compute_n_kept(job.length, 1 - job.keep),
        hidden_states_buffer_size=job.interval if job.method == "snapkv" else 0,  # the others need no hidden states
    )


if __name__ == "__main__":
    serve(KVPress)
