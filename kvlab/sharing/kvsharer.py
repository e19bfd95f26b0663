"""KVSharer (Yang et al. 2024, arXiv 2410.18517): layers whose caches differ most share one; a search says which may."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from kvlab.artefacts import find_for, weights_hash
from kvlab.budget import LayerGeometry, exact_share
from kvlab.sharing.base import Share, ShareError, register_share

MOST = 0.5
"""Share of the layers at which the search stops."""


@register_share("kvsharer")
@dataclass(frozen=True)
class KVSharer(Share):
    """Layers that differ most share a cache, as many as asked for; `kvlab calibrate kvsharer` finds which.

    drop      share of the layers that hold nothing, rounded to whole layers, half up; at most a half
    order     in which the search tried pairs: dissimilar as in the paper, similar and random to compare with
    artefact  key of what the search has left; null: the one of this model and this order
    """

    drop: float = 0.25
    order: Literal["dissimilar", "similar", "random"] = "dissimilar"
    artefact: str | None = None

    calibrated: ClassVar[str] = "kvsharer"
    calibrated_by: ClassVar[tuple[str, ...]] = ("order",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.drop <= MOST:
            raise ShareError(f"share.drop={self.drop!r}: use a share from 0 to {MOST}")

    def layer_map(self, model: Any, layers: Sequence[LayerGeometry]) -> dict[int, int]:
        """The first pairs that the search accepted. Raises ArtefactError, or ShareError where it accepted fewer."""
        found = find_for(self, "share", weights=weights_hash(model))
        pairs, wanted = found.content["pairs"], dropped(self.drop, len(layers))
        if found.content["layers"] != len(layers):
            raise ShareError(
                f"kvsharer artefact {found.key} is of a model with {found.content['layers']} layers, not {len(layers)}: "
                "leave out share.artefact"
            )
        if self.drop and not wanted:
            raise ShareError(f"share.drop={self.drop:g} of {len(layers)} layers is none: use {0.5 / len(layers):.2g} or more")
        if wanted > len(pairs):
            raise ShareError(
                f"share.drop={self.drop:g} of {len(layers)} layers is {wanted}, and artefact {found.key} has "
                f"{len(pairs)} pairs: use {_at_most(len(pairs), len(layers))}, or let it accept more with "
                f"`kvlab calibrate kvsharer -o threshold=...`, below {found.about['threshold']}"
            )
        return dict(pairs[:wanted])

    @property
    def label(self) -> str:
        """Such as 'kvsharer 25 %'."""
        order = "" if self.order == "dissimilar" else f" {self.order}"
        return f"{self.name} {100 * self.drop:g} %{order}"


def dropped(share: float, layers: int) -> int:
    """Layers that hold nothing: a share of all, half up."""
    return math.floor(exact_share(share) * layers + Fraction(1, 2))


def _at_most(pairs: int, layers: int) -> str:
    """The largest share of two places that asks for no more than these."""
    most = max(hundredths / 100 for hundredths in range(51) if dropped(hundredths / 100, layers) <= pairs)
    return f"share.drop={most} or less" if pairs else "share=none"
