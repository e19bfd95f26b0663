"""What sharing is: which layers read the cache of an earlier layer and hold none. One paper, one file.

A way of sharing is a frozen dataclass registered by name; its fields are its settings (and its Hydra config). It names pairs of
layers, target and source; the cache does the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from kvlab.budget import LayerGeometry
from kvlab.registry import Registry
from kvlab.settings import check, label_of

Pairs = Mapping[int, int] | Iterable[tuple[int, int]]
"""Target and source of each pair of layers."""


class ShareError(ValueError):
    """A way of sharing, one of its settings or a pair of layers that cannot be: the message says what to change."""


@dataclass(frozen=True)
class Share:
    """Base of all ways of sharing. Override `layer_map`."""

    name: ClassVar[str] = ""
    calibrated: ClassVar[str] = ""
    """Kind of artefact that it needs (`kvlab.artefacts`); such a way has a setting `artefact: str | None = None`."""
    calibrated_by: ClassVar[tuple[str, ...]] = ()
    """Settings with which the artefact must have been made."""
    calibrated_version: ClassVar[int] = 1
    """Of the artefact."""

    def __post_init__(self) -> None:
        check(self, "share", ShareError)

    def layer_map(self, model: Any, layers: Sequence[LayerGeometry]) -> dict[int, int]:
        """Target -> source, for a model whose layers are like these; chains allowed. Raises ShareError."""
        raise NotImplementedError(f"share {self.name or type(self).__name__} has no layer_map()")

    @property
    def label(self) -> str:
        """For tables and folders: the name and the settings that aren't defaults, but no artefact's key."""
        return label_of(self, self.name)


@dataclass(frozen=True)
class FixedMap(Share):
    """The pairs that are given: target -> source."""

    pairs: Mapping[int, int]

    name: ClassVar[str] = "map"

    def layer_map(self, model: Any, layers: Sequence[LayerGeometry]) -> dict[int, int]:
        """As given."""
        return dict(self.pairs)


SHARES: Registry[Share] = Registry("share", "register_share", ShareError, "kvlab.sharing")
ShareType = TypeVar("ShareType", bound=type[Share])


def register_share(name: str) -> Callable[[ShareType], ShareType]:
    """Class decorator: make a way of sharing known by `name`. Raises ShareError if another module's has that name."""

    def add(cls: ShareType) -> ShareType:
        SHARES.add(name, cls)
        return cls

    return add


def share_names() -> list[str]:
    """Names of all registered ways, those of installed plug-ins (entry-point group `kvlab.sharing`) included."""
    return SHARES.names()


def share_class(name: str) -> type[Share]:
    """The way of sharing registered by `name`. Raises ShareError with near names if there is none."""
    return SHARES.find(name)


def make_share(name: str, **settings: object) -> Share:
    """A way of sharing by name with its settings. Raises ShareError on an unknown name or setting, or a wrong value."""
    return SHARES.make(name, settings)


def resolve(pairs: Pairs) -> dict[int, int]:
    """Target -> the layer that holds what it reads, by target: sources that are targets are followed to their own.

    The order of pairs doesn't matter. Raises ShareError for a target with two sources, or if pairs lead in a circle.
    """
    given: dict[int, int] = {}
    for target, source in pairs.items() if isinstance(pairs, Mapping) else pairs:
        if given.setdefault(target, source) != source:
            raise ShareError(
                f"layer {target} can't read both layer {given[target]} and layer {source}; leave out one of the two"
            )
    return {target: _holder(target, given) for target in sorted(given)}


def _holder(target: int, given: Mapping[int, int]) -> int:
    passed, source = [target], given[target]
    while source in given:
        if source in passed:
            circle = ", ".join(map(str, [*passed, source]))
            raise ShareError(f"layers {circle} read each other in a circle; leave out one pair")
        passed.append(source)
        source = given[source]
    if source == target:
        raise ShareError(f"layer {target} can't read its own cache as another's; leave out that pair")
    return source


def check_map(sources: Mapping[int, int], layers: Sequence[LayerGeometry]) -> None:
    """Raises ShareError if a resolved map names a layer that isn't there, a later source, or layers that aren't alike."""
    for target, source in sources.items():
        for layer in (target, source):
            if not isinstance(layer, int) or not 0 <= layer < len(layers):
                raise ShareError(f"share: there is no layer {layer!r}; the model's are 0 to {len(layers) - 1}")
        if source > target:
            raise ShareError(f"share: layer {target} can't read layer {source}, which comes after it; take an earlier source")
        if layers[source] != layers[target]:
            what, ours, theirs = _difference(layers[target], layers[source])
            raise ShareError(
                f"share: layer {target} can't read layer {source}, since their {what} differ ({ours} and {theirs}); pair "
                "layers that are alike"
            )


def _difference(target: LayerGeometry, source: LayerGeometry) -> tuple[str, object, object]:
    """The first thing in which they differ, and what it is in both."""
    words = {"window": "sliding windows", "num_kv_heads": "numbers of KV heads"}
    for field in dataclasses.fields(LayerGeometry):
        ours, theirs = getattr(target, field.name), getattr(source, field.name)
        if ours != theirs:
            return words.get(field.name, "sizes"), ours, theirs
    raise AssertionError("they differ in nothing")


def map_of(share: Share | Mapping[int, int] | None, model: Any, layers: Sequence[LayerGeometry]) -> dict[int, int]:
    """Target -> layer that holds what it reads, resolved and checked; empty for None. Raises ShareError."""
    if share is None:
        return {}
    if isinstance(share, Mapping):
        share = FixedMap(share)
    if not isinstance(share, Share):
        raise ShareError(f"share={share!r}: pass a way of sharing, or the pairs as {{target: source}}")
    sources = resolve(share.layer_map(model, layers))
    check_map(sources, layers)
    return sources
