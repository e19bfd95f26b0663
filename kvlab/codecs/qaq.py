"""QAQ (Dong et al. 2024, arXiv 2403.04643): bits of each token by how much its errors would show, and sparse outliers.

Two formulas: `paper`, and `code` as the authors released it, which takes the whole allowed deviation for half a step and comes
to about one bit less. The released code has also a level at which a token has one scale over all layers; layers are encoded one
by one here, so that level can't be had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvlab.codecs.base import Codec, CodecError, drops_after_prompt, register_codec
from kvlab.codecs.qaq_side import QaqSide
from kvlab.kernels.dispatch import Kernels
from kvlab.kernels.packed import packed_bytes
from kvlab.policies.base import Policy


@register_codec("qaq")
@dataclass(frozen=True)
class Qaq(Codec):
    """A token of little attention may have large errors in its value; keys bear less than values.

    bits_min, bits_max  of a code: 0 to 8, or both 16; with 0 bits a token is the middle of its range
    error_keys    sigma_S: deviation that attention logits may have; error_values: sigma_X, that the output may have
    window        a token's attention is the most that one of the last `window` queries gave it; the newest window - 1 tokens,
                  of which that says little, have bits_max
    q_norm        squared length of queries, its upper decile: `kvlab calibrate qaq`
    outliers      share of numbers kept exactly, half in each tail of a row's first encoded numbers; 0: none at all
    level         head: a token of a head has a scale, a zero and bits; layer: a token of all heads together
    formula       paper or code
    dynamic       after each step all tokens' bits are reckoned anew, and what has more is encoded again from what is held
                  (its range then counts as scale * (2**bits - 1)); false: bits stay, as in the released code
    promote       what has fewer bits than it should is encoded again from an exact copy in the host's memory; needs dynamic

    Bits per number: those of its token, 32 / size of a group for scale and zero, and outliers with a 16-bit place each.
    """

    bits_min: int = 1
    bits_max: int = 4
    error_keys: float = 3.0
    error_values: float = 3.0
    window: int = 5
    q_norm: float = 300.0
    outliers: float = 0.01
    level: Literal["head", "layer"] = "head"
    formula: Literal["paper", "code"] = "paper"
    dynamic: bool = True
    promote: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        own = f"codec.{self.name}"
        if not (self.bits_min <= self.bits_max <= 8 or self.bits_min == self.bits_max == 16):
            raise CodecError(f"{own}: bits_min={self.bits_min}, bits_max={self.bits_max}: use 0 to 8 in this order, or both 16")
        if not self.window:
            raise CodecError(f"{own}.window=0: use at least 1")
        if min(self.error_keys, self.error_values) < 0 or self.q_norm <= 0:
            raise CodecError(f"{own}: error_keys and error_values must be at least 0, and q_norm above 0")
        if not 0 <= self.outliers < 1:
            raise CodecError(f"{own}.outliers={self.outliers}: use a share from 0 to below 1")
        if self.promote and not self.dynamic:
            raise CodecError(f"{own}.promote=true raises bits at steps: use dynamic=true with it")

    def sides(self, layer_idx: int, keys: Tensor, values: Tensor, kernels: Kernels) -> tuple[QaqSide, QaqSide]:
        """Keys, whose bits need no attention, and values."""
        return QaqSide(keys, self, False, kernels), QaqSide(values, self, True, kernels)

    @property
    def sheds(self) -> bool:
        """Unless heads share scales."""
        return self.level == "head"

    @property
    def offloads(self) -> bool:
        """The exact copy."""
        return self.promote

    @property
    def watches(self) -> int:
        """The window."""
        return self.window

    def bits_of(self, side: str, dim: int, itemsize: int) -> float:
        """Of an encoded token at bits_max, with as many outliers as the first tokens have, at level head."""
        outliers = self.outliers * (8 * itemsize + 16) + (8 / dim if self.outliers else 0)
        history = 32 * self.window / dim if self.dynamic and side == "values" else 0
        return 8 * packed_bytes(dim, self.bits_max) / dim + (32 + 8) / dim + outliers + history

    def check_policy(self, policy: Policy) -> None:
        """Tokens stand in order and have bits by that, so none may leave at steps."""
        if self.level == "layer" and policy.ragged:
            raise CodecError(
                f"codec {self.name} with level=layer encodes the heads of a layer together, and under policy {policy.name} "
                f"they hold different tokens; use codec.{self.name}.level=head"
            )
        if drops_after_prompt(policy):
            grow = "policy.after_prompt=grow, " if hasattr(policy, "after_prompt") else ""
            raise CodecError(
                f"codec {self.name} reckons bits from a row's tokens in order, and policy {policy.name} drops single ones "
                f"at decode steps: use {grow}a codec that encodes each token by itself (codec=int4), or policy=full"
            )

    def bits(self, spread: Tensor, share: Tensor | None, seen: Tensor, newest: Tensor) -> Tensor:
        """Bits of groups, all (n,): range, attention (None for keys), tokens of the sequence, and which are among the newest.

        In float64. A range or an attention of 0 has bits_min.
        """
        spread, seen = spread.double(), seen.clamp(min=2).double()
        nothing = spread == 0
        if share is None:
            sigma = ((seen**3 / (seen - 1) * self.error_keys**2 + 1).log() / self.q_norm).sqrt()
        else:
            sigma = self.error_values / (seen.sqrt() * share.double())
            nothing = nothing | (share == 0)
        if self.formula == "paper":
            wanted = (spread / (2 * math.sqrt(3) * sigma)).log2()
        else:
            wanted = (spread / (2 * math.sqrt(12) * sigma) + 1).log2()
        wanted = wanted.masked_fill(nothing, -math.inf).ceil().clamp(self.bits_min, self.bits_max)
        return wanted.masked_fill(newest, self.bits_max).to(torch.uint8)
