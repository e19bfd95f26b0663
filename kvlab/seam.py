"""Everything that kvlab changes on a model while a session lives, and how it is undone.

The attention implementation in its configs; hooks on the model that put token ids on the cache and refuse calls that can't
be; hooks on rotary embeddings and attention modules that put the rotation on the cache's layer; a check in front of
`generate`.
Several sessions on one model share one seam; models that share a config share its attention implementation.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, PreTrainedModel

from kvlab.attention import implementation_for
from kvlab.cache import KVCache
from kvlab.cache.rotation import RotarySource, Rotation
from kvlab.support import UnsupportedModel

_SEAM = "_kvlab_seam"


@dataclass
class _Borrowed:
    """A config whose attention implementation is kvlab's for now."""

    config: Any
    stock: str | None
    users: int = 0


_borrowed: dict[int, _Borrowed] = {}  # by id of the config, which is alive as long as its entry


class Seam:
    """What is changed on one model. `Seam.of` installs it, the last `release` undoes it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.sessions = 0
        self.configs = _configs(model)
        self.handles: list[RemovableHandle] = []
        for config in self.configs:
            entry = _borrowed.setdefault(id(config), _Borrowed(config, config._attn_implementation_internal))
            entry.users += 1
        try:
            self._install()
        except BaseException:
            self._undo()
            raise

    @classmethod
    def of(cls, model: PreTrainedModel) -> Seam:
        """The model's seam, made if there is none, counting one more session."""
        seam = vars(model).get(_SEAM)
        if seam is None:
            seam = cls(model)
            vars(model)[_SEAM] = seam
        seam.sessions += 1
        return seam

    def release(self) -> None:
        """One session less; the last one leaves the model as it was."""
        self.sessions -= 1
        if not self.sessions:
            self._undo()
            vars(self.model).pop(_SEAM, None)

    def _install(self) -> None:
        config = self.model.config.get_text_config(decoder=True)
        wanted = implementation_for(_borrowed[id(config)].stock or "eager")
        self.model.set_attn_implementation(wanted)
        if config._attn_implementation != wanted:  # transformers keeps the old one without an error
            raise UnsupportedModel(f"{type(self.model).__name__} does not take another attention implementation")
        for module in {id(m): m for m in (self.model, self.model.base_model)}.values():
            self.handles.append(module.register_forward_pre_hook(_before_forward, with_kwargs=True))
            self.handles.append(module.register_forward_hook(_after_forward, with_kwargs=True))
        for module in self.model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                self.handles.append(module.register_forward_hook(_mark_tables, with_kwargs=True))
            if hasattr(module, "layer_idx") and "position_embeddings" in inspect.signature(module.forward).parameters:
                self.handles.append(module.register_forward_pre_hook(_leave_rotation, with_kwargs=True))
        if hasattr(self.model, "generate"):
            vars(self.model)["generate"] = MethodType(_generate, self.model)

    def _undo(self) -> None:
        for config in self.configs:
            entry = _borrowed[id(config)]
            entry.users -= 1
            if not entry.users:
                config._attn_implementation_internal = entry.stock
                del _borrowed[id(config)]
        for handle in self.handles:
            handle.remove()
        vars(self.model).pop("generate", None)


def _configs(model: PreTrainedModel) -> list[Any]:
    """All configs inside a model, each once."""
    found = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    queue = list(found.values())
    while queue:
        config = queue.pop()
        for name in config.sub_configs:
            inner = getattr(config, name, None)
            if inner is not None and id(inner) not in found:
                found[id(inner)] = inner
                queue.append(inner)
    return list(found.values())


def _kvlab_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> KVCache | None:
    return next((value for value in (*kwargs.values(), *args) if isinstance(value, KVCache)), None)


def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Attention never sees token ids, so they are left on the cache."""
    cache = _kvlab_cache(args, kwargs)
    if cache is None:
        return
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True: a kvlab cache never forms whole attention matrices; leave it out")
    if kwargs.get("use_cache") is False:
        raise ValueError("use_cache=False with a kvlab cache: leave out one of the two")
    cache.input_ids = kwargs.get("input_ids", args[0] if args else None)


def _after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """The ids are this call's alone; and all keys must have reached kvlab's attention."""
    cache = _kvlab_cache(args, kwargs)
    if cache is not None:
        cache.call_over()


def _leave_rotation(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keys reach the cache rotated; the rotation is left on the cache's layer, so that it can be undone."""
    cache = _kvlab_cache(args, kwargs)
    tables = kwargs.get("position_embeddings")
    if cache is not None and cache.plan.unrotates and tables is not None:
        cos, sin = tables
        apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
        dims = getattr(module, "rotary_ndims", None)
        cache.layers[module.layer_idx].rotation = Rotation(cos, sin, apply, cos.kvlab_source, dims)


def _mark_tables(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Mark the tables that a rotary embedding makes with how to make them for other places."""
    call = inspect.signature(module.forward).bind(*args, **kwargs)
    options = {name: value for name, value in call.arguments.items() if name not in ("x", "position_ids")}
    cos, device = output[0], output[0].device

    def make(places: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=dtype, device=device)
        ids = torch.arange(places, device=device)[None]
        new_cos, new_sin = module.forward(x=like, position_ids=ids, **options)
        return new_cos[0].to(dtype), new_sin[0].to(dtype)

    cos.kvlab_source = RotarySource((id(module), tuple(sorted(options.items()))), make)


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate`, refusing what can't be honest on a kvlab cache."""
    cache = _kvlab_cache(args, kwargs)
    if cache is not None:
        _check_generate(model, cache, args, kwargs)
    return type(model).generate(model, *args, **kwargs)


def _check_generate(model: Any, cache: KVCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    config = next((value for value in (*args, *kwargs.values()) if isinstance(value, GenerationConfig)), None)
    config = config or model.generation_config

    def given(name: str) -> Any:
        return kwargs.get(name, getattr(config, name, None))

    if given("prefill_chunk_size"):
        raise ValueError(
            "generate(prefill_chunk_size=...) would count every chunk as a turn of its own; prefill the chunks inside "
            "`with cache.turn():` (command line: runtime.prefill_chunk), then call generate"
        )
    if given("assistant_model") is not None or given("prompt_lookup_num_tokens"):
        raise ValueError(
            "assisted decoding rolls the cache back, which a kvlab cache can't do (evicted tokens are gone); call generate "
            "without assistant_model and prompt_lookup_num_tokens"
        )
    if given("use_cache") is False:
        raise ValueError("generate(use_cache=False) with a kvlab cache: leave out one of the two")
    ids = next((value for value in (kwargs.get("input_ids"), kwargs.get("inputs"), *args[:1]) if value is not None), None)
    mask, seen = kwargs.get("attention_mask"), cache.get_seq_length()
    if seen and ids is not None and ids.shape[1] <= seen and (mask is None or mask.shape[1] == ids.shape[1]):
        raise ValueError(
            f"generate got {ids.shape[1]} token ids for a cache that has seen {seen}: give the ids (and the mask) of the whole "
            "text so far with the new turn at its end"
        )
    if cache.phase == "prompt":
        raise ValueError("generate inside `with cache.turn():` would never evict; leave the block first")
