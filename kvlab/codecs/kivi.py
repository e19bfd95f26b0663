"""KIVI (Liu et al. 2024, arXiv 2402.02750): keys quantised per channel, values per token, the newest tokens as they are."""

from dataclasses import dataclass

from torch import Tensor

from kvlab.codecs.affine import Axis, GroupedSide, Grouping
from kvlab.codecs.base import Codec, CodecError, register_codec
from kvlab.kernels.dispatch import Kernels
from kvlab.kernels.packed import BITS


@register_codec("kivi")
@dataclass(frozen=True)
class Kivi(Codec):
    """Outliers of keys sit in few channels, those of values don't, so each side is grouped along the axis that isolates them.

    bits        of a code: 1 to 8, or 16
    group       numbers that share a scale and a zero: tokens of one channel of keys, channels of one token of values
    residual    R: keys are encoded whenever R of them are there in full precision, values but for the newest R
    key_axis, value_axis  channel or token, for the paper's ablation

    Bits per number: bits + 32 / group, and the residual (section 3.2). The attention of a prompt is over exact keys and values.
    """

    bits: int = 2
    group: int = 32
    residual: int = 128
    key_axis: Axis = "channel"
    value_axis: Axis = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grouping(self.name, self.bits, self.group)
        if "channel" in (self.key_axis, self.value_axis) and (self.residual % self.group or not self.residual):
            raise CodecError(f"codec {self.name}: residual={self.residual}: use a multiple of group, which is {self.group}")

    def sides(self, layer_idx: int, keys: Tensor, values: Tensor, kernels: Kernels) -> tuple[GroupedSide, GroupedSide]:
        """One of each axis."""
        return (
            GroupedSide(keys, self.grouping(self.key_axis, keys.shape[-1]), kernels),
            GroupedSide(values, self.grouping(self.value_axis, values.shape[-1]), kernels),
        )

    def grouping(self, axis: Axis, dim: int) -> Grouping:
        """How a side of that axis is quantised."""
        return Grouping(self.bits, axis, self.group, self.residual, dim)

    def bits_of(self, side: str, dim: int, itemsize: int) -> float:
        """Of an encoded token; the residual comes on top."""
        return self.grouping(self.key_axis if side == "keys" else self.value_axis, dim).bits_per_number

    @property
    def sheds(self) -> bool:
        """If no tokens share scales."""
        return self.key_axis == self.value_axis == "token"

    @property
    def label(self) -> str:
        """kivi2, kivi4, and what else isn't a default."""
        return super().label.replace(f"{self.name} bits={self.bits}", self.name).replace(self.name, f"kivi{self.bits}", 1)


def check_grouping(name: str, bits: int, group: int) -> None:
    """Raises CodecError for what kernels can't read."""
    if bits not in BITS:
        raise CodecError(f"codec {name}: bits={bits}: use one of {', '.join(map(str, BITS))}")
    if not group:
        raise CodecError(f"codec {name}: group=0: use at least 1")
