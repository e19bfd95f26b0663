"""Layers of any model, to be called once more with another cache while the model runs. Knows no family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from kvlab.cache import KVCache
from kvlab.support import UnsupportedModel

Again = Callable[[KVCache], Tensor]
"""Calls a layer with what it was called with, but this cache: its output, (batch, tokens, hidden)."""


def decoder_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The outermost modules of a list that have one `layer_idx` each, by it. Raises UnsupportedModel if there is none."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            found: list[set[Any]] = [
                {getattr(part, "layer_idx", None) for part in layer.modules()} - {None} for layer in module
            ]
            if found and all(len(indices) == 1 for indices in found):
                return {indices.pop(): layer for indices, layer in zip(found, module, strict=True)}
    raise UnsupportedModel(f"{type(model).__name__} has no list of decoder layers, which calibration calls one by one")


@contextmanager
def replayed(model: nn.Module, show: Callable[[int, Tensor, Again], None]) -> Iterator[None]:
    """Inside, `show` is given each layer when it was called with a kvlab cache: index, output, and a way to call it again."""

    def hook(index: int) -> Callable[..., None]:
        def seen(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            def again(cache: KVCache) -> Tensor:
                own, named = [_other(one, cache) for one in args], {name: _other(one, cache) for name, one in kwargs.items()}
                return _hidden(layer.forward(*own, **named))

            show(index, _hidden(output), again)

        return seen

    handles = [layer.register_forward_hook(hook(index), with_kwargs=True) for index, layer in decoder_layers(model).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _other(argument: Any, cache: KVCache) -> Any:
    return cache if isinstance(argument, KVCache) else argument


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
