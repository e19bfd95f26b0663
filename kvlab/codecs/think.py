"""ThinK (Xu et al. 2024, arXiv 2407.21018): channels of keys that queries hardly read are left out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.budget import exact_share
from kvlab.codecs.attended import Seen
from kvlab.codecs.base import Codec, CodecError, register_codec
from kvlab.codecs.chain import ChannelCodec
from kvlab.codecs.channels import Channels
from kvlab.codecs.plain import Plain
from kvlab.codecs.side import Side
from kvlab.kernels.dispatch import Kernels
from kvlab.policies.base import Policy
from kvlab.rows import RowPlanes


@register_codec("think")
@dataclass(frozen=True)
class Think(ChannelCodec):
    """Keys without those channels that add least to logits; alone, or before a codec that takes fewer bits.

    drop        lambda, share of a key's channels that are left out, below 1
    obs_window  last queries of the first turn that channels are chosen by
    recent      newest keys that keep all channels when a turn ends, as those do that are decoded; where another codec follows,
                the tokens that it lets wait do instead

    Channel j adds q_j k_j to a logit. Its score is the mean of the queries' squares, over a KV head's query heads and its last
    queries, times the mean of the squares of the keys held. Bytes of keys and values: 1 - drop / 2.
    """

    drop: float = 0.4
    obs_window: int = 32
    recent: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.drop < 1:
            raise CodecError(f"codec.{self.name}.drop={self.drop}: use a share from 0 to below 1")
        if not self.obs_window:
            raise CodecError(f"codec.{self.name}.obs_window=0: use at least 1")

    def widths(self, layer_idx: int, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Fewer for keys alone."""
        return key_dim - math.floor(key_dim * exact_share(self.drop)), value_dim

    @property
    def alone(self) -> Codec:
        """Keys lose their channels at a turn's end."""
        return Plain(self.recent)

    @property
    def watches(self) -> int:
        """The queries that score."""
        return self.obs_window

    @property
    def needs_prompt(self) -> bool:
        """Channels are chosen at its end."""
        return True

    def over(self, numbers: Codec, layer_idx: int, keys: Tensor, values: Tensor, kernels: Kernels) -> tuple[Side, Side]:
        """Keys of fewer channels, values as they are."""
        dim = keys.shape[-1]
        left, _ = self.widths(layer_idx, dim, values.shape[-1])
        narrow, whole = numbers.sides(layer_idx, keys[..., :left], values, kernels)
        narrow.narrow(keys, Channels(left, dim, self.score))
        return narrow, whole

    def score(self, seen: Seen, held: RowPlanes) -> Tensor:
        """How much each channel of each KV head's keys counts, (batch, kv_heads, dim), in float32 or float64."""
        queries = seen.queries[..., -self.obs_window :, :]  # (batch, kv_heads, group, queries, dim)
        exact, there = torch.promote_types(queries.dtype, torch.float32), seen.positions[:, -self.obs_window :] >= 0
        squares = torch.where(there[:, None, None, :, None], queries.to(exact).square(), 0)
        asked = squares.sum((2, 3)) / (there.sum(1) * queries.shape[2])[:, None, None]
        keys = held.dense("x")
        inside = torch.arange(keys.shape[2], device=keys.device) < held.row_lengths.view(*keys.shape[:2], 1)
        squares = torch.where(inside[..., None], keys.to(exact).square(), 0)
        return asked * (squares.sum(2) / inside.sum(2, keepdim=True).clamp(min=1))

    def check_policy(self, policy: Policy) -> None:
        """Channels are chosen of keys as they attend, which must not be rotated anew."""
        if policy.rolling:
            raise CodecError(
                f"codec {self.name} chooses channels of rotated keys, and policy {policy.name} rotates them anew as others "
                "leave: use policy.rolling=false"
            )
