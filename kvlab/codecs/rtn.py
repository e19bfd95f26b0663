"""Plain round-to-nearest integers in groups, as FlexGen (Sheng et al. 2023) compresses its cache and H2O's Table 6 adds.

Each token is encoded by itself, at once, so any policy may let it leave at any time.
"""

from dataclasses import dataclass

from torch import Tensor

from kvlab.codecs.affine import Axis, GroupedSide, Grouping
from kvlab.codecs.base import Codec, register_codec
from kvlab.codecs.kivi import check_grouping
from kvlab.kernels.dispatch import Kernels


@register_codec("int")
@dataclass(frozen=True)
class RoundToNearest(Codec):
    """Integers of `bits` with a scale and a zero for each group.

    bits      of a code: 1 to 8, or 16
    group     numbers that share a scale and a zero
    axis      token: channels of one token and head; channel: tokens of one channel, which can't leave one by one
    residual  newest tokens in full precision (axis token), or tokens that wait for each other (axis channel: at least a group)

    Bits per number: bits + 32 / group.
    """

    bits: int = 4
    group: int = 32
    axis: Axis = "token"
    residual: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grouping(self.name, self.bits, self.group)

    def sides(self, layer_idx: int, keys: Tensor, values: Tensor, kernels: Kernels) -> tuple[GroupedSide, GroupedSide]:
        """Both alike."""
        keys_, values_ = (GroupedSide(like, self.grouping(like.shape[-1]), kernels) for like in (keys, values))
        return keys_, values_

    def grouping(self, dim: int) -> Grouping:
        """How both sides are quantised."""
        residual = self.residual if self.axis == "token" else max(self.group, -(-self.residual // self.group) * self.group)
        return Grouping(self.bits, self.axis, self.group, residual, dim)

    def bits_of(self, side: str, dim: int, itemsize: int) -> float:
        """Of an encoded token."""
        return self.grouping(dim).bits_per_number

    @property
    def evictable(self) -> bool:
        """Unless tokens share scales or wait."""
        return self.axis == "token" and self.residual == 0

    @property
    def sheds(self) -> bool:
        """Unless tokens share scales."""
        return self.axis == "token"

    @property
    def label(self) -> str:
        """int4, int8, and what else isn't a default."""
        return super().label.replace(f" bits={self.bits}", "").replace(self.name, f"int{self.bits}", 1)
