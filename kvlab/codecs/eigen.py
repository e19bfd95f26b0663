"""Eigen Attention (Saxena et al. 2024, arXiv 2408.05646): keys and values in fewer numbers, by bases found beforehand.

Keys are held without their rotation, put back whole and rotated to their own positions at each call; where a model doesn't
rotate, queries are projected instead. The paper folds the other projections into the model's weights, which gives the same
outputs: here they are applied inside attention, so its savings of time aren't had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvlab.artefacts import Artefact, find_for, weights_hash
from kvlab.codecs.base import CodecError, register_codec
from kvlab.codecs.basis import Basis, Projection
from kvlab.codecs.chain import ChannelCodec


@dataclass(frozen=True)
class Point:
    """What a calibration has tried on one layer.

    eps           share of the sum of singular values that is kept
    keys, values  directions that this takes
    error         of the layer's output, ||Y - Y~|| / ||Y||
    """

    eps: float
    keys: int
    values: int
    error: float


def within(curve: Sequence[Point], error: float, dims: tuple[int, int]) -> tuple[int, int]:
    """Directions of keys and values: those of the last point before the first whose error isn't below `error`.

    curve: by falling eps; dims: of keys and values, which is what stays where the first point fails.
    """
    held = dims
    for point in curve:
        if point.error >= error:
            break
        held = point.keys, point.values
    return held


def projection(down: Tensor, up: Tensor | None, rank: int) -> Projection:
    """By the first `rank` directions. down (heads, dim, dim), up (heads, dim, dim) or None where they are orthonormal."""
    first = down[..., :rank].contiguous()
    return Projection(first, first.mT if up is None else up[:, :rank].contiguous())


@dataclass(frozen=True, eq=False)
class Projected(ChannelCodec):
    """A codec that knows its model.

    rotary  whether keys are held without their rotation
    bases   of layers; one that has none is held as it is
    label   of the codec that it is made of
    """

    rotary: bool
    bases: Mapping[int, Basis]
    label: str = "eigen"
    name = "eigen"

    def widths(self, layer_idx: int, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Ranks of the layer's bases."""
        basis = self.bases.get(layer_idx)
        return (key_dim, value_dim) if basis is None else (basis.keys.rank, basis.values.rank)

    def basis_of(self, layer_idx: int) -> Basis | None:
        """The layer's."""
        return self.bases.get(layer_idx)

    @property
    def pre_rope(self) -> bool:
        """Since rotation and projection can't change places."""
        return self.rotary


_made: dict[tuple[Any, ...], dict[int, Basis]] = {}
"""The bases that were made last, which nothing changes: each batch of a sweep attaches anew."""


@register_codec("eigen")
@dataclass(frozen=True)
class Eigen(ChannelCodec):
    """Each layer's keys and values in as few numbers as change its output by less than `error`; see `kvlab calibrate eigen`.

    error     largest relative error of a layer's output that calibration has found, inputs being exact; 0: all numbers
    basis     svd, as in the paper; kq: bases of keys that keep their products with queries (KQ-SVD, arXiv 2512.05916)
    artefact  key of what calibration has left; null: the one of this model and this basis

    Of 2 * dim numbers of a token r_k + r_v are held, in the model's type, whatever its position: prompts too are attended to
    as they are held.
    """

    error: float = 0.025
    basis: Literal["svd", "kq"] = "svd"
    artefact: str | None = None

    calibrated: ClassVar[str] = "eigen"
    calibrated_by: ClassVar[tuple[str, ...]] = ("basis",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.error < 0:
            raise CodecError(f"codec.{self.name}.error={self.error!r}: use a number of at least 0")

    @property
    def projects(self) -> bool:
        """What knows the model does."""
        return True

    def for_model(self, model: Any) -> Projected:
        """With the bases of this model's layers. Raises ArtefactError where there are none."""
        found = find_for(self, f"codec.{self.name}", weights=weights_hash(model))
        curves = found.content["curves"]
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        if len(curves) != layers:
            raise CodecError(
                f"eigen artefact {found.key} is of a model with {len(curves)} layers, not {layers}: leave out "
                f"codec.{self.name}.artefact"
            )
        made_of = (found.path, found.tensors_hash, self.error, model.device, torch.promote_types(model.dtype, torch.float32))
        if made_of not in _made:
            _made.clear()
            _made[made_of] = self._bases(found, *made_of[3:])
        return Projected(found.content["rotary"], _made[made_of], self.label)

    def _bases(self, found: Artefact, device: torch.device, dtype: torch.dtype) -> dict[int, Basis]:
        """As many directions of each layer as the error allows."""
        tensors, bases = found.tensors(), {}
        for layer, (points, whole) in enumerate(zip(found.content["curves"], found.content["dims"], strict=True)):
            keys, values = within([Point(*point) for point in points], self.error, tuple(whole))
            of_keys = projection(tensors[f"{layer}.keys.down"], tensors.get(f"{layer}.keys.up"), keys)
            bases[layer] = Basis(of_keys, projection(tensors[f"{layer}.values.down"], None, values)).to(device, dtype)
        return bases

    @property
    def label(self) -> str:
        """Such as 'eigen 0.025', 'eigen 0.1 kq'."""
        return f"{self.name} {self.error:g}{'' if self.basis == 'svd' else f' {self.basis}'}"
