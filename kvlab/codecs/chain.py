"""Codecs in a row: one that leaves out channels, then one that holds what is left in fewer bits. For a cache they are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from kvlab.budget import LayerGeometry
from kvlab.codecs.base import Codec, CodecError
from kvlab.codecs.basis import Basis
from kvlab.codecs.plain import Plain
from kvlab.codecs.side import Side
from kvlab.kernels.dispatch import Kernels
from kvlab.policies.base import Policy

WORK: dict[Literal["channels", "numbers"], str] = {"channels": "leave out channels", "numbers": "encode numbers"}


@dataclass(frozen=True)
class ChannelCodec(Codec):
    """A codec that leaves fewer numbers of each token. Override `widths`, and `over` or `basis_of`; others as needed."""

    stage = "channels"

    def widths(self, layer_idx: int, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Numbers that are left of a key and of a value in this layer."""
        raise NotImplementedError(f"codec {self.name or type(self).__name__} has no widths()")

    @property
    def alone(self) -> Codec:
        """What holds the numbers that are left where no other codec follows."""
        return Plain()

    def over(self, numbers: Codec, layer_idx: int, keys: Tensor, values: Tensor, kernels: Kernels) -> tuple[Side, Side]:
        """Empty sides of one layer in which `numbers` encodes what is left.

        keys and values: like those that come in, (batch, kv_heads, tokens, dim); projected already where there is a basis
        """
        return numbers.sides(layer_idx, keys, values, kernels)

    def check_policy(self, policy: Policy) -> None:
        """Raises CodecError where this policy can't work with fewer channels; tokens that wait are the chain's concern."""


@dataclass(frozen=True)
class Chain(Codec):
    """Both as one codec; made by `chain`. numbers: `channels.alone` where only channels are left out."""

    channels: ChannelCodec
    numbers: Codec
    name = "chain"

    def for_model(self, model: Any) -> Codec:
        """Each by itself."""
        channels = self.channels.for_model(model)
        assert isinstance(channels, ChannelCodec)
        return Chain(channels, self.numbers.for_model(model))

    def sides(self, layer_idx: int, keys: Tensor, values: Tensor, kernels: Kernels) -> tuple[Side, Side]:
        """Sides of the second, of fewer channels."""
        return self.channels.over(self.numbers, layer_idx, keys, values, kernels)

    def basis_of(self, layer_idx: int) -> Basis | None:
        """Of the first."""
        return self.channels.basis_of(layer_idx)

    def bits_of(self, side: str, dim: int, itemsize: int) -> float:
        """Of a number that is left, of `dim` such."""
        return self.numbers.bits_of(side, dim, itemsize)

    def fitted(self, layer_idx: int, layer: LayerGeometry) -> LayerGeometry:
        """With the bytes of what is left spread over all numbers of a token."""
        keys, values = self.channels.widths(layer_idx, layer.key_dim, layer.value_dim)
        projected = self.channels.basis_of(layer_idx) is not None  # then keys are of the values' type, rotated or not
        itemsize = layer.value_itemsize if projected else layer.key_itemsize
        left = self.numbers.fitted(layer_idx, replace(layer, key_dim=keys, value_dim=values, key_itemsize=itemsize))
        return replace(
            layer,
            key_itemsize=left.key_itemsize * keys / layer.key_dim,
            value_itemsize=left.value_itemsize * values / layer.value_dim,
        )

    @property
    def joint(self) -> bool:
        """As the second."""
        return self.numbers.joint

    @property
    def evictable(self) -> bool:
        """As the second."""
        return self.numbers.evictable

    @property
    def sheds(self) -> bool:
        """As the second."""
        return self.numbers.sheds

    @property
    def pre_rope(self) -> bool:
        """As the first."""
        return self.channels.pre_rope

    @property
    def offloads(self) -> bool:
        """As the second."""
        return self.numbers.offloads

    @property
    def watches(self) -> int:
        """As many as either needs."""
        return max(self.channels.watches, self.numbers.watches)

    @property
    def needs_prompt(self) -> bool:
        """If either does."""
        return self.channels.needs_prompt or self.numbers.needs_prompt

    @property
    def at_once(self) -> str:
        """Behind the same channels."""
        return f"codec=[{self.channels.name},int4]"

    @property
    def label(self) -> str:
        """Both, such as think+kivi2."""
        return "+".join(filter(None, (self.channels.label, self.numbers.label)))

    def check_policy(self, policy: Policy) -> None:
        """The two together, and each for itself."""
        self.channels.check_policy(policy)
        super().check_policy(policy)
        self.numbers.check_policy(policy)


def chain(codecs: Sequence[Codec]) -> Codec | None:
    """The codecs of a list as one, None for an empty list.

    Raises CodecError unless it is at most one that leaves out channels, and then at most one that encodes numbers.
    """
    for codec in codecs:
        if not isinstance(codec, Codec):
            raise CodecError(f"codec={codec!r}: pass a codec, such as make_codec('kivi', bits=2)")
    if not codecs:
        return None
    first, *rest = codecs
    names = [codec.label.partition(" ")[0] for codec in codecs]
    listed, stages = f"codec=[{','.join(names)}]", [codec.stage for codec in codecs]
    for stage, work in WORK.items():
        if stages.count(stage) > 1:
            several = " and ".join(name for name, its in zip(names, stages, strict=True) if its == stage)
            raise CodecError(f"{listed}: {several} {work}, and codecs of one kind can't be chained; give one of them")
    if stages == ["numbers", "channels"]:
        raise CodecError(f"{listed}: {names[1]} chooses channels before {names[0]} encodes: codec=[{names[1]},{names[0]}]")
    if not isinstance(first, ChannelCodec):
        return first
    numbers = rest[0] if rest else first.alone
    if numbers.pre_rope:
        way = "rope=post" if hasattr(numbers, "rope") else "another codec"
        raise CodecError(f"{listed}: {names[1]} takes the rotation off keys, and {names[0]} has settled that: use {way}")
    return Chain(first, numbers)
