"""HashEvict (Liu et al. 2024, arXiv 2412.16187, section 3): drop the token whose key's hash is farthest from the query's."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from kvlab.kernels.contract import ScanRule
from kvlab.policies.base import Policy, PolicyError, TokenState, register
from kvlab.shapes import Arrival, Probes, Queries, Scores, Step


@register("hashevict")
@dataclass(frozen=True)
class HashEvict(Policy):
    """Before a token attends, it takes the place of the one whose hash code differs most from its own.

    num_sink, recent_window  first and last tokens, which stay
    bits    of a code: signs of a random projection, one for each layer, the same for all heads
    probe   code that the held keys' are compared with: of the current `query` (the paper; distances are averaged over a KV
            head's query heads), or of the new `key` (the released code)
    prompt  what stays of a prompt longer than the budget: what the steps would leave if it came token by token (`stream`, the
            first releases), or its first and most `recent` tokens (later ones)
    seed    of the projection

    No attention weights are needed, so the fused attention stays. Codes are held packed, and billed.
    """

    num_sink: int = 4
    recent_window: int = 10
    bits: int = 16
    probe: Literal["query", "key"] = "query"
    prompt: Literal["stream", "recent"] = "stream"
    seed: int = 0

    phase: ClassVar[Literal["after_attention", "before_attention"]] = "before_attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.bits <= 1024:
            raise PolicyError(f"policy.bits={self.bits}: use 1 to 1024, such as 16")

    def token_state(self) -> dict[str, TokenState]:
        """Code of each key."""
        return {"codes": TokenState(torch.uint8, (-(-self.bits // 8),))}

    @property
    def replays_prompt(self) -> bool:
        """Where steps decide about a prompt."""
        return self.prompt == "stream"

    @property
    def voting(self) -> int | None:
        """Replaying compares held keys with every query of the prompt."""
        return None if self.replays_prompt and self.probe == "query" else 1

    def scan_rule(self) -> ScanRule:
        """Distances alone."""
        return ScanRule(order="distance", bits="codes")

    def codes(self, vectors: Tensor, layer_idx: int) -> Tensor:
        """Packed codes: (..., head_dim) -> (..., bytes)."""
        matrix = projection(self.seed, layer_idx, vectors.shape[-1], self.bits, vectors.device)
        signs = vectors.to(matrix.dtype) @ matrix > 0
        padded = torch.nn.functional.pad(signs, (0, -self.bits % 8)).unflatten(-1, (-1, 8))
        return (padded * 2 ** torch.arange(8, device=vectors.device)).sum(-1).to(torch.uint8)

    def arrive(self, arrival: Arrival) -> dict[str, Tensor]:
        """The codes of new keys."""
        return {"codes": self.codes(arrival.keys, arrival.layer_idx)}

    def probes(self, queries: Queries, arrival: Arrival) -> Probes:
        """The codes that held ones are compared with: of each query head, or of the new key."""
        vectors = queries if self.probe == "query" else arrival.keys[:, :, None]
        return self.codes(vectors, arrival.layer_idx)

    def score(self, step: Step) -> Scores:
        """Minus the mean Hamming distance; at a turn's end, unless steps decide, the position."""
        if step.prompt_end:
            return step.positions.float()
        assert step.arriving is not None
        probes = self.probes(step.queries, step.arriving)  # (batch, kv_heads, probes, 1, bytes)
        differing = step.state["codes"][:, :, None] ^ probes
        return -ones_in_byte(differing.device)[differing.int()].sum(-1).float().mean(2)


@functools.lru_cache(maxsize=512)
def projection(seed: int, layer_idx: int, head_dim: int, bits: int, device: torch.device) -> Tensor:
    """Gaussian matrix of one layer, (head_dim, bits) float32, that depends on nothing but seed and layer."""
    drawn = np.random.default_rng([seed, layer_idx]).standard_normal((head_dim, bits))
    return torch.from_numpy(drawn).float().to(device)


@functools.lru_cache(maxsize=8)
def ones_in_byte(device: torch.device) -> Tensor:
    """How many bits of each byte are set, (256,)."""
    return torch.tensor([byte.bit_count() for byte in range(256)], device=device)
