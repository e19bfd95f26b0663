"""What an analysis is: it sees a layer's attention some queries at a time, keeps sums, and makes tables and a picture of them.

Nothing of size tokens x tokens is ever there: a chunk of queries (`Step.looks`) comes and goes, vectors of a text's length and
sums stay. Sequences come one by one, so the batch is 1 everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvlab.kernels import reference
from kvlab.shapes import Attention, Queries, QueryPositions, Step

ROWS = 8
"""Layers that a printed table shows at most; all are in the file."""


@dataclass(frozen=True)
class Chunk:
    """Some queries of one layer, and their attention to all tokens of the text."""

    step: Step
    attention: Attention
    query_positions: QueryPositions
    queries: Queries

    @cached_property
    def merged(self) -> Tensor:
        """Attention, mean over the query heads of each KV head: (1, kv_heads, queries, slots)."""
        return reference.merge_group(self.attention, "mean")

    @cached_property
    def visible(self) -> Tensor:
        """What each query may look at, a layer's sliding window respected: (1, kv_heads, 1, queries, slots)."""
        return reference.visible(self.query_positions, self.step.positions, self.step.window)[:, :, None]


def chunks(step: Step) -> Iterator[Chunk]:
    """All queries of a text, in order, some at a time: so few that what is made of them fits in a processor's cache."""
    assert step.looks is not None
    start, size = 0, reference.CHUNK
    for look, positions in step.looks():
        for attention, where in zip(look.split(size, 3), positions.split(size, 1), strict=True):
            end = start + where.shape[1]
            yield Chunk(step, attention, where, step.queries[:, :, :, start:end])
            start = end


def in_text_order(step: Step, per_slot: Tensor) -> np.ndarray:
    """Values of slots, (1, kv_heads, slots), as values of the text's tokens, (kv_heads, tokens)."""
    order = step.positions.argsort(-1)[..., -text_length(step) :]  # empty slots, at -1, come first
    return per_slot.gather(-1, order)[0].cpu().numpy()


def text_length(step: Step) -> int:
    """Tokens of the text."""
    return int(step.now[0]) + 1


class Analysis(ABC):
    """One question about attention. A layer of a text comes as `begin`, `see` for all its chunks of queries, and `end`."""

    title: ClassVar[str]
    meaning: ClassVar[str]
    """What the printed table says, in a sentence or two."""

    @abstractmethod
    def begin(self, step: Step, text: Tensor) -> None:
        """A layer of a text, whose ids are (1, tokens)."""

    @abstractmethod
    def see(self, chunk: Chunk) -> None:
        """The next queries of this layer."""

    @abstractmethod
    def end(self, step: Step) -> None:
        """The layer is over."""

    @abstractmethod
    def tables(self) -> dict[str, pd.DataFrame]:
        """All results: what a file's name ends in -> its rows; '' is the main one."""

    @abstractmethod
    def summary(self) -> pd.DataFrame:
        """A few rows, to be printed."""

    @abstractmethod
    def draw(self, figure: Any) -> None:
        """The picture, into an empty matplotlib figure."""

    def lines(self) -> list[str]:
        """What is printed beside the table."""
        return []


def some_layers(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of a few layers, evenly spaced, first and last among them, and the mean over all."""
    chosen = np.unique(np.linspace(0, len(rows) - 1, ROWS).round().astype(int))
    mean = rows.mean().to_frame().T
    return pd.concat([rows.iloc[chosen].astype({"layer": object}), mean.assign(layer="all")], ignore_index=True)


def by_layer(axis: Any, **settings: Any) -> None:
    """Name the axes of a picture that has layers across."""
    axis.set(xlabel="layer", **settings)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)


def zeros(like: Tensor, *shape: int) -> Tensor:
    """float64 sums to add to, where a tensor is."""
    return torch.zeros(shape or like.shape, dtype=torch.float64, device=like.device)
