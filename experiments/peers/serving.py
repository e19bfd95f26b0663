"""What both workers share: the jobs, how they are timed, and how commands come in and answers go out.

Needs torch only, so that it runs in either environment. All timing is in this file: no library gets a stopwatch of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

METHODS = ("plain", "full", "h2o", "snapkv", "knorm", "streaming_llm")


class Unavailable(Exception):
    """A library does not offer this work; the message says why."""


@dataclass(frozen=True)
class Job:
    """One piece of work, the same for both libraries.

    do         `prefill`, `prompt` (reads a prompt and keeps its cache), `decode` (on a copy of that cache), `release`
    method     one of METHODS; `plain` is transformers alone, `full` the library without eviction
    length     tokens of the prompt; batch: prompts; steps: tokens that are decoded
    keep       share of the prompt that stays
    interval   0: evict at the prompt's end only, where the method allows that; n: evict while decoding, at least every n steps
    num_sink, window, kernel  settings of streaming_llm and snapkv, equal on both sides
    """

    do: str
    method: str = "plain"
    length: int = 2048
    batch: int = 1
    steps: int = 16
    keep: float = 0.2
    interval: int = 0
    num_sink: int = 4
    window: int = 64
    kernel: int = 5
    seed: int = 0


@dataclass
class Prompt:
    """A prompt that has been read: what it was read for, its cache, the token that follows."""

    key: Hashable
    cache: Any
    token: torch.Tensor
    surroundings: ExitStack


class Worker(ABC):
    """One library at work. Subclasses say how it is called; what is done and what is timed is the same for all."""

    prompt: Prompt | None = None
    cache_needs_surroundings = False
    """Whether a prompt's surroundings must last while its cache is decoded with."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of the packages that matter."""

    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids."""

    @abstractmethod
    def prompt_key(self, job: Job) -> Hashable:
        """What a prompt's cache depends on; jobs with equal keys share one."""

    @abstractmethod
    def reading(self, job: Job) -> AbstractContextManager[Callable[[], Any]]:
        """Surroundings in which a prompt is read; gives a function that makes an empty cache."""

    @abstractmethod
    def stepping(self, job: Job) -> AbstractContextManager[Any]:
        """Surroundings in which tokens are decoded."""

    @abstractmethod
    def forward(self, ids: torch.Tensor, cache: Any, seen: int) -> torch.Tensor:
        """Logits of the last token, (batch, 1, vocabulary), after the model has read `ids` behind `seen` tokens."""

    @abstractmethod
    def copy(self, cache: Any) -> Any:
        """An independent copy of a cache."""

    @abstractmethod
    def held(self, cache: Any) -> tuple[float, int]:
        """(tokens held per head and sequence in the mean, bytes of keys and values)."""

    def run(self, job: Job) -> dict[str, Any]:
        """Do one job."""
        with torch.inference_mode():
            if job.do == "prefill":
                return self._prefill(job)
            if job.do == "prompt":
                return self._read_prompt(job)
            if job.do == "decode":
                return self._decode(job)
            if job.do == "release":
                return self._release()
        raise ValueError(f"unknown work {job.do!r}")

    def _prefill(self, job: Job) -> dict[str, Any]:
        ids = prompt_ids(job, self.vocabulary())
        with self.reading(job) as new_cache:
            cache = new_cache()
            gc.collect()
            start = time.perf_counter()
            logits = self.forward(ids, cache, 0)
            seconds = time.perf_counter() - start
            return {"seconds": seconds, "top": top(logits)} | self._held(cache)

    def _read_prompt(self, job: Job) -> dict[str, Any]:
        if self.prompt is None or self.prompt.key != self.prompt_key(job):
            self._release()
            with ExitStack() as stack:
                cache = stack.enter_context(self.reading(job))()
                logits = self.forward(prompt_ids(job, self.vocabulary()), cache, 0)
                lasting = stack.pop_all() if self.cache_needs_surroundings else ExitStack()
            self.prompt = Prompt(self.prompt_key(job), cache, next_token(logits), lasting)
        return self._held(self.prompt.cache)

    def _decode(self, job: Job) -> dict[str, Any]:
        if self.prompt is None or self.prompt.key != self.prompt_key(job):
            raise ValueError("no prompt has been read for this work")
        cache, token = self.copy(self.prompt.cache), self.prompt.token
        with self.stepping(job):
            gc.collect()
            start = time.perf_counter()
            for step in range(job.steps):
                logits = self.forward(token, cache, job.length + step)
                token = next_token(logits)
            seconds = (time.perf_counter() - start) / job.steps
        return {"seconds": seconds, "top": top(logits)} | self._held(cache)

    def _release(self) -> dict[str, Any]:
        if self.prompt is not None:
            self.prompt.surroundings.close()
            self.prompt = None
            gc.collect()
        return {}

    def _held(self, cache: Any) -> dict[str, Any]:
        tokens, size = self.held(cache)
        return {"tokens": tokens, "kv_bytes": size}


def prompt_ids(job: Job, vocabulary: int) -> torch.Tensor:
    """Random token ids, the same in every environment: (batch, length)."""
    generator = torch.Generator().manual_seed(job.seed)
    return torch.randint(vocabulary, (job.batch, job.length), generator=generator)


def next_token(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest next token of each sequence, (batch, 1)."""
    return logits[:, -1].argmax(-1, keepdim=True)


def top(logits: torch.Tensor) -> list[float]:
    """Largest logit of each sequence, by which it can be seen whether two libraries computed the same."""
    return logits[:, -1].amax(-1).tolist()


def parse() -> argparse.Namespace:
    """The command line of a worker."""
    parser = argparse.ArgumentParser(description="Started by compare.py; takes commands on standard input, one JSON per line.")
    parser.add_argument("model", help="model folder")
    parser.add_argument("--threads", type=int, required=True)
    return parser.parse_args()


def serve(make: Callable[[str], Worker]) -> None:
    """Load the model, say which versions are at work, then answer commands until standard input ends.

    Answers are the only thing on standard output: whatever libraries print there goes to standard error.
    """
    args = parse()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(args.threads)
    worker = make(args.model)
    hello = {"python": sys.version.split()[0], **worker.versions(), "torch threads": str(torch.get_num_threads())}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(worker, line)), file=answers, flush=True)


def answer(worker: Worker, line: str) -> dict[str, Any]:
    """What to say to one command; an error is an answer too."""
    try:
        return worker.run(Job(**json.loads(line)))
    except Unavailable as error:
        return {"unavailable": str(error)}
    except Exception as error:  # the other library and the remaining work must go on
        text = " ".join(str(error).split())
        return {"error": f"{type(error).__name__}: {text}"[:300]}
