"""KVSharer's search (Yang et al. 2024, arXiv 2410.18517, Algorithm 1): pairs of layers that can share a cache.

Whether a pair is accepted doesn't depend on how many are wanted, so one list of pairs serves any number of layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from kvlab.analyze.setup import Setup
from kvlab.calibrate.base import Calibration, Measured
from kvlab.policies import make_policy
from kvlab.session import attach
from kvlab.settings import SettingError, check
from kvlab.shapes import Step
from kvlab.sharing.base import resolve
from kvlab.sharing.kvsharer import MOST, dropped
from kvlab.support import layer_kinds

BATCH = 10
"""Texts that are read together."""

Pair = tuple[int, int]
"""Target, and the earlier layer whose cache it reads."""
Order = Literal["dissimilar", "similar", "random"]


@dataclass(frozen=True)
class KVSharerCalibration(Calibration):
    """Tries pairs of layers one by one, those whose caches differ most first, and keeps what leaves the outputs alike.

    order      dissimilar as in the paper; similar or random, to compare with
    distance   flat: Euclidean of all numbers (the paper); tokens: mean over heads and tokens of Euclidean (the released code)
    threshold  cosine to the full model's last hidden states that must be exceeded
    seed       of order=random
    """

    order: Order = "dissimilar"
    distance: Literal["flat", "tokens"] = "flat"
    threshold: float = 0.5
    seed: int = 0

    texts: ClassVar[int] = 30
    tokens: ClassVar[int] = 64

    def __post_init__(self) -> None:
        check(self, "calibrate kvsharer")
        if not -1 <= self.threshold < 1:
            raise SettingError(f"calibrate kvsharer.threshold={self.threshold!r}: use a cosine from -1 to below 1")

    def measure(self, setup: Setup) -> Measured:
        """Read the texts once for distances, and once for each pair that is tried."""
        texts = torch.cat(list(setup.texts))
        keys, values = mean_caches(setup.model, texts)
        kinds = layer_kinds(setup.model)
        apart = distances(keys, values, kinds, self.distance)
        pairs = ordered(apart, self.order, self.seed)
        most = dropped(MOST, len(keys))
        with tqdm(total=most, unit="layer", disable=None, leave=False) as bar:
            accepted, tried = walk(pairs, similarity_to_full(setup.model, texts), self.threshold, most, bar.update)
        found = [pair for pair, _ in accepted]
        content = {
            "layers": len(keys),
            "pairs": found,
            "similarities": [round(alike, 6) for _, alike in accepted],
            "distances": [round(apart[pair], 6) for pair in found],
            "tried": tried,
        }
        order = "" if self.order == "dissimilar" else f"share.order={self.order} "
        return Measured(content, f"share=kvsharer {order}share.artefact=KEY", _lines(accepted, tried, len(keys)))


def mean_caches(model: Any, texts: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's keys as they are cached (rotated) and values, averaged over texts: (kv_heads, tokens, dim) in float64.

    texts: ids, (texts, tokens).
    """
    sums: dict[int, tuple[Tensor, Tensor]] = {}

    def watch(step: Step) -> None:
        new = tuple(side.cpu().double().sum(0) for side in (step.keys, step.values))
        old = sums.get(step.layer_idx, (0, 0))
        sums[step.layer_idx] = (old[0] + new[0], old[1] + new[1])

    with torch.inference_mode(), attach(model, make_policy("full"), watch=watch) as session:
        for part in texts.split(BATCH):
            model(part, cache=session.new_cache(), logits_to_keep=1)
    layers = [sums[layer] for layer in sorted(sums)]
    return [keys / len(texts) for keys, _ in layers], [values / len(texts) for _, values in layers]


def distances(
    keys: Sequence[Tensor], values: Sequence[Tensor], kinds: Sequence[object], distance: Literal["flat", "tokens"] = "flat"
) -> dict[Pair, float]:
    """How far apart the caches of every two layers of one kind are: keys and values (kv_heads, tokens, dim), averaged."""

    def apart(one: Tensor, other: Tensor) -> float:
        difference = one - other
        return float(difference.norm() if distance == "flat" else difference.norm(dim=-1).mean())

    layers = range(len(keys))
    shapes = [(kinds[layer], keys[layer].shape, values[layer].shape) for layer in layers]
    return {
        (target, source): (apart(keys[source], keys[target]) + apart(values[source], values[target])) / 2
        for target in layers
        for source in range(target)
        if shapes[source] == shapes[target]
    }


def ordered(apart: Mapping[Pair, float], order: Order, seed: int = 0) -> list[Pair]:
    """Pairs in the order in which they are tried; of those equally far apart the lower target first, then the lower source."""
    if order == "random":
        pairs = sorted(apart)
        random.Random(seed).shuffle(pairs)
        return pairs
    sign = -1 if order == "dissimilar" else 1
    return sorted(apart, key=lambda pair: (sign * apart[pair], pair))


def walk(
    pairs: Iterable[Pair],
    similarity: Callable[[dict[int, int]], float],
    threshold: float,
    most: int,
    progress: Callable[[int], object] = lambda accepted: None,
) -> tuple[list[tuple[Pair, float]], int]:
    """The pairs that are accepted, in order, at most `most`, with the similarity when each came in; and how many were tried.

    similarity: of the model to the full one under a map from target to the layer that holds what it reads
    """
    accepted: list[tuple[Pair, float]] = []
    tried = 0
    for pair in pairs:
        if len(accepted) == most:
            break
        if any(pair[0] == target for (target, _), _ in accepted):
            continue
        alike = similarity(resolve([*(known for known, _ in accepted), pair]))
        tried += 1
        if alike > threshold:
            accepted.append((pair, alike))
            progress(1)
    return accepted, tried


def similarity_to_full(model: Any, texts: Tensor) -> Callable[[dict[int, int]], float]:
    """What says how alike last hidden states under a map are to the full model's: cosine of all numbers, mean over texts."""
    full = _last_hidden(model, texts, {})

    def similarity(sources: dict[int, int]) -> float:
        shared = _last_hidden(model, texts, sources)
        return float(torch.nn.functional.cosine_similarity(shared, full, dim=-1).mean())

    return similarity


def _last_hidden(model: Any, texts: Tensor, sources: Mapping[int, int]) -> Tensor:
    """Hidden states after the last norm, (texts, tokens * hidden) in float64."""
    found: list[Tensor] = []
    with (
        torch.inference_mode(),
        _outputs_of(model.get_decoder(), lambda output: found.append(output.last_hidden_state.cpu().double().flatten(1))),
        attach(model, make_policy("full"), share=sources or None) as session,
    ):
        for part in texts.split(BATCH):
            model(part, cache=session.new_cache(), logits_to_keep=1)
    return torch.cat(found)


@contextmanager
def _outputs_of(module: torch.nn.Module, see: Callable[[Any], object]) -> Any:
    """Show what a module returns."""
    handle = module.register_forward_hook(lambda module, inputs, output: see(output) and None)
    try:
        yield
    finally:
        handle.remove()


def _lines(accepted: Sequence[tuple[Pair, float]], tried: int, layers: int) -> tuple[str, ...]:
    pairs = ", ".join(f"{target}<-{source}" for (target, source), _ in accepted) or "none"
    worst = f"; similarity falls to {accepted[-1][1]:.3f}" if accepted else ""
    return (f"{len(accepted)} of {tried} pairs accepted, for {layers} layers{worst}", f"layer<-source: {pairs}")
