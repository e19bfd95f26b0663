"""What `codec=eigen` must know of a model: bases of each layer's keys and values, and how much is lost with fewer directions.

Two passes over the texts, both of the model as it is. The first sums up outer products of keys, queries and values, keys and
queries without their rotation. In the second each layer is called again with what it was given, once for each number of
directions, and its output compared with the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from kvlab.analyze.setup import Setup
from kvlab.cache import KVCache
from kvlab.cache.encoded import EncodedStore
from kvlab.calibrate.base import Calibration, Measured
from kvlab.calibrate.bases import Directions, candidates, kq_bases, outer, svd_bases
from kvlab.calibrate.layers import Again, replayed
from kvlab.codecs.base import CodecError
from kvlab.codecs.basis import Basis
from kvlab.codecs.chain import chain
from kvlab.codecs.eigen import Point, Projected, projection, within
from kvlab.policies import make_policy
from kvlab.session import attach
from kvlab.settings import SettingError, check
from kvlab.shapes import Step
from kvlab.support import no_rolling, rotates

BUDGETS = (0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2)
"""Errors for which the share of the cache that is left is told."""


@dataclass(frozen=True)
class EigenCalibration(Calibration):
    """Bases and curves (Eigen Attention, Saxena et al. 2024, arXiv 2408.05646).

    basis  svd, as in the paper; kq: of keys, what keeps their dot products with queries (KQ-SVD, arXiv 2512.05916)
    floor  ranks at or below this part of the head size aren't tried
    """

    basis: Literal["svd", "kq"] = "svd"
    floor: float = 0.45

    texts: ClassVar[int] = 8
    tokens: ClassVar[int] = 512

    def __post_init__(self) -> None:
        check(self, "calibrate eigen")
        if not 0 <= self.floor < 1:
            raise SettingError(f"calibrate eigen.floor={self.floor!r}: use a share from 0 to below 1")

    def measure(self, setup: Setup) -> Measured:
        """Two passes over the texts. Raises CodecError for a model whose rotation can't be taken off."""
        rotary = rotates(setup.model)
        if rotary and (reason := no_rolling(setup.model, "another codec")):
            raise CodecError(f"codec eigen holds keys without their rotation, which {reason}")
        layers = [sums.directions(self.basis, rotary) for sums in sums_of(setup.model, setup.texts, rotary)]
        curves = curves_of(setup.model, setup.texts, layers, rotary, self.floor)
        content = {
            "rotary": rotary,
            "dims": [layer.dims for layer in layers],
            "curves": [[[point.eps, point.keys, point.values, point.error] for point in curve] for curve in curves],
        }
        tensors = {f"{index}.{name}": part for index, layer in enumerate(layers) for name, part in layer.tensors.items()}
        basis = "" if self.basis == "svd" else f"codec.eigen.basis={self.basis} "
        return Measured(content, f"codec=eigen {basis}codec.eigen.artefact=KEY", told(curves, layers), tensors)


@dataclass(frozen=True)
class LayerDirections:
    """Of one layer's keys (of all heads where they rotate, else of each) and values (of each head)."""

    keys: Directions
    values: Directions

    @property
    def dims(self) -> tuple[int, int]:
        """Numbers of a key and of a value."""
        return self.keys.sigma.shape[-1], self.values.sigma.shape[-1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """For the artefact, in float32; what is the transpose of another is left out."""
        found = {"keys.down": self.keys.down, "values.down": self.values.down}
        found |= {"keys.sigma": self.keys.sigma, "values.sigma": self.values.sigma}
        if not self.keys.orthonormal:
            found["keys.up"] = self.keys.up
        return {name: part.float() for name, part in found.items()}

    def first(self, keys: int, values: int) -> Basis:
        """The first directions, as many of each side."""
        up = None if self.keys.orthonormal else self.keys.up
        return Basis(projection(self.keys.down, up, keys), projection(self.values.down, None, values))


# ------------------------------------------------------------------------------------------------------------- bases


@dataclass
class Sums:
    """Outer products of one layer's `count` keys, queries and values of each KV head: (kv_heads, dim, dim) in float64."""

    keys: Tensor
    queries: Tensor
    values: Tensor
    count: int

    def directions(self, basis: str, rotary: bool) -> LayerDirections:
        """Right singular vectors; with basis=kq those of keys by KQ-SVD."""
        keys, queries, count = self.keys, self.queries, self.count
        if rotary:
            keys, queries, count = keys.sum(0, keepdim=True), queries.sum(0, keepdim=True), count * len(keys)
        if basis == "kq":
            return LayerDirections(kq_bases(keys, queries, count), svd_bases(self.values))
        return LayerDirections(svd_bases(keys if rotary else keys + queries), svd_bases(self.values))


def sums_of(model: Any, texts: Sequence[Tensor], rotary: bool) -> list[Sums]:
    """Of each layer, from one forward pass of each text, (1, tokens) ids, under a full cache."""
    found: dict[int, Sums] = {}
    cache: KVCache

    def watch(step: Step) -> None:
        layer, keys, queries = cache.layers[step.layer_idx], step.keys, step.queries.flatten(1, 2)  # (1, heads, tokens, dim)
        if rotary:
            assert isinstance(layer.store, EncodedStore) and layer.store.table is not None
            keys = layer.store.table.undo(keys, step.positions)
            queries = layer.store.table.undo(queries, step.query_positions[:, None].expand(queries.shape[:3]))
        scale = layer.rule.scaling * keys.shape[3] ** 0.5  # OPT scales its queries itself
        queries = scale * queries.reshape(keys.shape[1], -1, keys.shape[3])  # (kv_heads, group * tokens, dim)
        new = Sums(outer(keys[0]), outer(queries), outer(step.values[0]), keys.shape[2])
        before = found.get(step.layer_idx)
        if before is not None:
            new = Sums(*(getattr(before, name) + getattr(new, name) for name in vars(new)))
        found[step.layer_idx] = new
        bar.update()

    with (
        torch.inference_mode(),
        attach(model, make_policy("full"), codec=Projected(rotary, {}), watch=watch) as session,
        tqdm(total=len(texts) * len(session.plan.layers), desc="bases", unit="layer", disable=None, leave=False) as bar,
    ):
        for text in texts:
            cache = session.new_cache()
            model(text, cache=cache, logits_to_keep=1)
            cache.reset()
    return [found[layer] for layer in sorted(found)]


# ------------------------------------------------------------------------------------------------------------ curves


def curves_of(
    model: Any, texts: Sequence[Tensor], layers: Sequence[LayerDirections], rotary: bool, floor: float
) -> list[list[Point]]:
    """Of each layer the relative error of its output for ever fewer directions."""
    first = 1.0 if rotary else 0.98  # as in the released code
    tried = [candidates(layer.keys.sigma, layer.values.sigma, first, floor) for layer in layers]
    ranks = [list(dict.fromkeys((keys, values) for _, keys, values in some)) for some in tried]
    errors = errors_of(model, texts, layers, ranks, rotary)
    return [[Point(*one, error[one[1:]]) for one in some] for some, error in zip(tried, errors, strict=True)]


def errors_of(
    model: Any,
    texts: Sequence[Tensor],
    layers: Sequence[LayerDirections],
    ranks: Sequence[Sequence[tuple[int, int]]],
    rotary: bool,
) -> list[dict[tuple[int, int], float]]:
    """Of each layer ||Y - Y~|| / ||Y|| of its output over all texts for these numbers of directions, inputs being exact."""
    lost: list[dict[tuple[int, int], Tensor]] = [{} for _ in layers]

    def show(index: int, output: Tensor, again: Again) -> None:
        exact = output.double()
        for some in ranks[index]:
            codec = chain([Projected(rotary, {index: layers[index].first(*some)})])
            used = KVCache(replace(session.plan, codec=codec))
            found = again(used).double()
            used.reset()  # caches and their layers know each other, so they would stay until Python looks for such rings
            sums = torch.stack([(found - exact).square().sum(), exact.square().sum()]).cpu()
            lost[index][some] = lost[index].get(some, 0) + sums
        bar.update()

    with (
        torch.inference_mode(),
        attach(model, make_policy("full")) as session,
        replayed(model, show),
        tqdm(total=len(texts) * len(layers), desc="errors", unit="layer", disable=None, leave=False) as bar,
    ):
        for text in texts:
            cache = session.new_cache()
            model(text, cache=cache, logits_to_keep=1)
            cache.reset()
    return [{some: float((sums[0] / sums[1]).sqrt()) for some, sums in found.items()} for found in lost]


def told(curves: Sequence[Sequence[Point]], layers: Sequence[LayerDirections]) -> tuple[str, ...]:
    """What is left of the cache at some errors, to be read."""
    dims, lines = [layer.dims for layer in layers], []
    for error in BUDGETS:
        ranks = [within(curve, error, dim) for curve, dim in zip(curves, dims, strict=True)]
        share = sum(map(sum, ranks)) / sum(map(sum, dims))
        keys, values = zip(*ranks, strict=True)
        lines.append(
            f"error {error:g}: {100 * share:.1f} % of the cache; numbers of a key {min(keys)} to {max(keys)}, "
            f"of a value {min(values)} to {max(values)}"
        )
    return tuple(lines)
