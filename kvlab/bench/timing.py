"""Timing several things in turn, so that a busy machine slows all alike, and what a comparison looks like.

All figures are ratios of two times taken in one process: medians of several repeats after a warm-up. An absolute time says
little about another machine.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

from kvlab.measure import now

Work = Callable[[], Any]


@dataclass(frozen=True)
class Line:
    """One comparison.

    seconds, against  medians of the work and of what it is compared with
    faster            whether the ratio says how many times faster the work is (else: how many times longer it takes)
    target            what the ratio should be at least (`faster`) or at most; None where there is none
    floor             seconds below which the work can't go: bytes that it must read / measured bandwidth
    note              what else is worth knowing
    """

    what: str
    seconds: float
    against: float
    target: float | None
    faster: bool = False
    floor: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        """How many times faster, or how many times the time."""
        return self.against / self.seconds if self.faster else self.seconds / self.against

    @property
    def met(self) -> bool | None:
        """Whether the target is met."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.faster else self.ratio <= self.target

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


def alternate(works: Mapping[str, Work], repeats: int, device: torch.device, warm_up: int = 1) -> dict[str, float]:
    """Median seconds of each, done in turn `repeats` times after `warm_up` rounds that don't count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    rounds = range(warm_up + repeats)
    for number in tqdm(rounds, unit="round", leave=False, disable=None):
        gc.collect()  # not in the middle of a measurement
        for name, work in works.items():
            start = now(device)
            work()
            if number >= warm_up:
                times[name].append(now(device) - start)
    return {name: statistics.median(found) for name, found in times.items()}


def bandwidth(device: torch.device) -> float:
    """Bytes per second that the device reads from its memory, measured on tensors far larger than any cache."""
    big = torch.ones(2**27, device=device)  # 512 MiB
    return big.numel() * big.element_size() / alternate({"read": lambda: big.sum()}, 5, device)["read"]


def mark(met: bool | None) -> str:
    """Whether a target is met, for a table."""
    return "" if met is None else "yes" if met else "**no**"


def render(title: str, lines: list[Line]) -> str:
    """A Markdown table."""
    rows = ["| what | ms | against, ms | ratio | target | met | floor, ms | |", "|---|---|---|---|---|---|---|---|"]
    for line in lines:
        sign, floor = "≥" if line.faster else "≤", "" if line.floor is None else f"{1000 * line.floor:.1f}"
        target = "" if line.target is None else f"{sign} {line.target:.2f} ×"
        times = f"{1000 * line.seconds:.1f} | {1000 * line.against:.1f} | {line.ratio:.2f} ×"
        rows.append(f"| {line.what} | {times} | {target} | {mark(line.met)} | {floor} | {line.note} |")
    return "\n".join([f"### {title}", "", *rows])
