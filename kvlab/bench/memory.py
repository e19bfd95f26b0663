"""Memory: bytes of keys and values that caches hold, against what their budget allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvlab.bench.setup import Setup, evicting
from kvlab.bench.timing import mark

TARGET = 1.02


@dataclass(frozen=True)
class Held:
    """What one policy's cache holds after a prompt and some steps, in bytes; state: positions, scores, indices."""

    policy: str
    held: int
    allowed: int
    state: int
    full: int

    @property
    def ratio(self) -> float:
        """Held over allowed."""
        return self.held / self.allowed

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "ratio": self.ratio, "target": TARGET, "met": self.ratio <= TARGET}


def memory(setup: Setup) -> list[Held]:
    """Every policy that keeps to a budget, at the shortest length."""
    length = min(setup.lengths)
    ids, found = setup.ids(length), []
    for name in evicting():
        with setup.session(name) as session, torch.inference_mode():
            cache = session.new_cache()
            setup.model(ids, cache=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(setup.batch)
            for _ in range(4):
                setup.model(torch.full((setup.batch, 1), 11, device=setup.device), cache=cache)
            weighs = cache.memory()
            allowed = sum(int(layer.limits.limit.sum()) * _token_bytes(layer.store) for layer in cache.layers)
            found.append(Held(name, weighs.kv_bytes, allowed, weighs.state_bytes, weighs.kv_bytes_full))
    return found


def _token_bytes(store: Any) -> int:
    return store.keys.shape[-1] * store.keys.itemsize + store.values.shape[-1] * store.values.itemsize


def render_memory(title: str, rows: list[Held]) -> str:
    """A Markdown table."""
    lines = [f"### {title}", "", "| policy | held, MiB | allowed, MiB | ratio | target | met | state, MiB | full cache, MiB |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        sizes = [f"{number / 2**20:.2f}" for number in (row.held, row.allowed, row.state, row.full)]
        met = mark(row.ratio <= TARGET)
        lines.append(
            f"| {row.policy} | {sizes[0]} | {sizes[1]} | {row.ratio:.4f} | ≤ {TARGET} | {met} | {sizes[2]} | {sizes[3]} |"
        )
    return "\n".join(lines)
