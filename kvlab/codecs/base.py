"""What a codec is: how keys and values are held in fewer bits or channels. One paper, one file, no model anywhere.

A codec is a frozen dataclass registered by name; its fields are its settings (and its Hydra config). It makes the two sides of
each layer, which hold what it encodes. How two follow each other is in `chain.py`. Attention inside a turn is over what came
in; at the turn's end the policy evicts first, then codecs encode. A decoded token comes in in full precision, attends, and is
encoded when its codec says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from kvlab.budget import LayerGeometry
from kvlab.codecs.basis import Basis
from kvlab.codecs.side import Side
from kvlab.kernels.dispatch import Kernels
from kvlab.policies.base import Policy
from kvlab.registry import Registry
from kvlab.settings import check, label_of


class CodecError(ValueError):
    """A codec, one of its settings or a composition that cannot be: the message says what to change."""


@dataclass(frozen=True)
class Codec:
    """Base of all codecs. Override `sides`; declare the rest only where it differs."""

    name: ClassVar[str] = ""
    stage: ClassVar[Literal["channels", "numbers"]] = "numbers"
    """What becomes less: the channels of a token, or what a number takes. In a chain channels come first."""
    calibrated: ClassVar[str] = ""
    """Kind of artefact that it needs (`kvlab.artefacts`); such a codec has a setting `artefact: str | None = None`."""
    calibrated_by: ClassVar[tuple[str, ...]] = ()
    """Settings with which the artefact must have been made."""
    calibrated_version: ClassVar[int] = 1
    """Of the artefact."""

    def __post_init__(self) -> None:
        check(self, f"codec.{self.name}", CodecError)

    def for_model(self, model: Any) -> Codec:
        """The same codec with what it must know of this model, which `attach` asks for once. Raises a ValueError."""
        return self

    def sides(self, layer_idx: int, keys: Tensor, values: Tensor, kernels: Kernels) -> tuple[Side, Side]:
        """Empty sides of one layer for keys and values like these, (batch, kv_heads, tokens, dim)."""
        raise NotImplementedError(f"codec {self.name or type(self).__name__} has no sides()")

    def basis_of(self, layer_idx: int) -> Basis | None:
        """What a layer's keys (without rotation if `pre_rope`) and values are projected to as they come in, if anything."""
        return None

    def bits_of(self, side: str, dim: int, itemsize: int) -> float:
        """Bits of one number of an encoded token. side: keys or values; dim: of a token and head; itemsize: in bytes."""
        return 8.0 * itemsize

    def fitted(self, layer_idx: int, layer: LayerGeometry) -> LayerGeometry:
        """A layer's geometry with the bytes of numbers as they are encoded."""
        keys = self.bits_of("keys", layer.key_dim, math.ceil(layer.key_itemsize)) / 8
        values = self.bits_of("values", layer.value_dim, math.ceil(layer.value_itemsize)) / 8
        return dataclasses.replace(layer, key_itemsize=keys, value_itemsize=values)

    @property
    def joint(self) -> bool:
        """Whether the heads of a layer are encoded together, so that they must hold the same tokens."""
        return False

    @property
    def evictable(self) -> bool:
        """Whether each token is encoded alone and at once, so that any may leave at any time."""
        return False

    @property
    def sheds(self) -> bool:
        """Whether encoded tokens, of each head its own, may leave when a later turn or chunk ends."""
        return self.evictable

    @property
    def projects(self) -> bool:
        """Whether `basis_of` may be anything but None."""
        return type(self).basis_of is not Codec.basis_of

    @property
    def pre_rope(self) -> bool:
        """Whether keys are held without their rotation."""
        return False

    @property
    def offloads(self) -> bool:
        """Whether the host's memory holds copies, which the bytes of keys and values don't count."""
        return False

    @property
    def watches(self) -> int:
        """How many of the last queries and their attention the sides are shown, 0 for none."""
        return 0

    @property
    def needs_prompt(self) -> bool:
        """Whether how tokens are encoded is settled at a prompt's end, so that a cache can't begin with steps."""
        return False

    @property
    def at_once(self) -> str:
        """What to choose instead, where each token must be encoded by itself at once."""
        return "codec=int4"

    @property
    def label(self) -> str:
        """For tables and folders: the name and the settings that aren't defaults, but no artefact's key."""
        return label_of(self, self.name)

    def check_policy(self, policy: Policy) -> None:
        """Raises CodecError where this policy and this codec can't work together honestly."""
        if self.joint and policy.ragged:
            raise CodecError(
                f"codec {self.label} encodes the heads of a layer together, and under policy {policy.name} they hold different "
                "tokens; use a codec that takes each head by itself, such as codec=int4"
            )
        if not self.evictable and drops_after_prompt(policy):
            grow = "policy.after_prompt=grow, " if hasattr(policy, "after_prompt") else ""
            raise CodecError(
                f"codec {self.label} encodes tokens in groups or lets them wait, and policy {policy.name} drops single tokens "
                f"at decode steps: use {grow}a codec that encodes each token by itself at once ({self.at_once}), or policy=full"
            )


def drops_after_prompt(policy: Policy) -> bool:
    """Whether tokens may leave at decode steps."""
    return policy.evicts and policy.drops and (policy.when == "every_step" or policy.chooses or policy.ranks_after_prompt)


CODECS: Registry[Codec] = Registry("codec", "register_codec", CodecError, "kvlab.codecs")
CodecType = TypeVar("CodecType", bound=type[Codec])


def register_codec(name: str) -> Callable[[CodecType], CodecType]:
    """Class decorator: make a codec known by `name`. Raises CodecError if another module's codec has that name."""

    def add(cls: CodecType) -> CodecType:
        CODECS.add(name, cls)
        return cls

    return add


def codec_names() -> list[str]:
    """Names of all registered codecs, those of installed plug-ins (entry-point group `kvlab.codecs`) included."""
    return CODECS.names()


def codec_class(name: str) -> type[Codec]:
    """The codec registered by `name`. Raises CodecError with near names if there is none."""
    return CODECS.find(name)


def make_codec(name: str, **settings: object) -> Codec:
    """A codec by name with its settings. Raises CodecError on an unknown name or setting, or a wrong value."""
    return CODECS.make(name, settings)
