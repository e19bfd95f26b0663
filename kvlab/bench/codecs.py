"""Codecs: what a decode step costs beside a full cache, what caches say they hold, and what the process really holds."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from kvlab.artefacts import ArtefactError, find_for, weights_hash
from kvlab.bench.setup import Setup
from kvlab.bench.timing import alternate
from kvlab.codecs import Codec, CodecError, chain, codec_class, codec_names, make_codec
from kvlab.measure import PeakMemory
from kvlab.sharing import Share, share_class, share_names

BITS = (8, 4, 2)
STEPS = 4
"""Steps for each repeat, a full cache's and a codec's in turn."""


@dataclass(frozen=True)
class Coded:
    """One codec after a prompt, all in bytes but the seconds of a decode step.

    process  by how much the process (or its device) holds more than before the cache was there; None where it can't be known
    parts    what `held` is made of
    """

    codec: str
    held: int
    full: int
    process: int | None
    offload: int
    seconds: float
    full_seconds: float
    parts: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "of_full": self.held / self.full, "step_ratio": self.seconds / self.full_seconds}


def all_codecs() -> list[Codec]:
    """Every codec that needs no settings, at several bits where those are a setting, and two in a row."""
    found: list[Codec] = []
    for name in codec_names():
        has_bits = any(field.name == "bits" for field in dataclasses.fields(codec_class(name)))
        for settings in [{"bits": bits} for bits in BITS] if has_bits else [{}]:
            try:
                found.append(make_codec(name, **settings))
            except (CodecError, TypeError):  # another's codec, with settings that must be given
                continue
    both = chain([make_codec("think"), make_codec("kivi", bits=2)])
    return found if both is None else [*found, both]


def calibrated(model: Any) -> list[Codec | Share]:
    """Codecs and ways of sharing at their defaults, for which this model has been calibrated."""
    found: list[Codec | Share] = []
    classes: list[Any] = [*map(codec_class, codec_names()), *map(share_class, share_names())]
    for cls in classes:
        if cls.calibrated:
            with suppress(ArtefactError, TypeError):  # the latter: another's, with settings that must be given
                method = cls()
                find_for(method, cls.name, weights=weights_hash(model))
                found.append(method)
    return found


def codecs(setup: Setup) -> list[Coded]:
    """A full cache, every codec and what has been calibrated at the longest length, one after the other."""
    length = max(setup.lengths)
    ready = calibrated(setup.model)
    methods = [codec for codec in all_codecs() if not codec.calibrated] + ready
    with torch.inference_mode():
        with setup.session("full") as session:  # what is made once must not count as the first cache's
            _read(setup, session, length)
        before = PeakMemory.held()
        with setup.session("full") as session:
            cache = _read(setup, session, length)
            found = [_coded(setup, "full", cache, before, cache)]
            for method in methods:
                before = PeakMemory.held()
                with setup.session("full", method) as other:
                    found.append(_coded(setup, method.label, _read(setup, other, length), before, cache))
    return found


def _read(setup: Setup, session: Any, length: int) -> Any:
    cache = session.new_cache()
    setup.model(setup.ids(length), cache=cache, logits_to_keep=1)
    cache.batch_repeat_interleave(setup.batch)
    return cache


def _coded(setup: Setup, name: str, cache: Any, before: int | None, full: Any) -> Coded:
    after, memory = PeakMemory.held(), cache.memory()
    token = torch.full((setup.batch, 1), 11, device=setup.device)
    works = {"full": lambda: setup.model(token, cache=full), "coded": lambda: setup.model(token, cache=cache)}
    step = alternate(works, STEPS * setup.repeats, setup.device, warm_up=2)
    process = None if before is None or after is None else after - before
    kv = memory.kv_bytes, memory.kv_bytes_full, process, memory.offload_bytes
    return Coded(name, *kv, step["coded"], step["full"], memory.parts)


def render_codecs(title: str, rows: list[Coded]) -> str:
    """A Markdown table."""
    head = ["codec", "held, MiB", "× full", "process, MiB", "step, ms", "full's step, ms", "ratio", "of what, MiB"]
    lines = [f"### {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        process = "" if row.process is None else f"{row.process / 2**20:.1f}"
        parts = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in row.parts.items() if size)
        parts += f"; on the CPU {row.offload / 2**20:.1f}" if row.offload else ""
        times = f"{1000 * row.seconds:.1f} | {1000 * row.full_seconds:.1f} | {row.seconds / row.full_seconds:.2f}"
        lines.append(f"| {row.codec} | {row.held / 2**20:.1f} | {row.held / row.full:.3f} | {process} | {times} | {parts} |")
    return "\n".join(lines)
