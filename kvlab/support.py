"""Which models kvlab can work on, and the geometry of their caches. Looks at a model, changes nothing."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvlab.budget import LayerGeometry

ROLLING_FAMILIES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "starcoder2",
)
"""Model types whose every layer rotates keys with the position embeddings it is given."""


class UnsupportedModel(ValueError):
    """A model that kvlab can't work on: the message says which and why."""


def check_model(model: PreTrainedModel) -> tuple[LayerGeometry, ...]:
    """Geometry of each layer's cache. Raises UnsupportedModel, naming the model and the reason, if kvlab can't work on it."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"{name} is not a transformers model; load one with load_model or AutoModelForCausalLM")
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder; kvlab works on decoder-only models")
    config = model.config.get_text_config(decoder=True)
    if reason := _other_cache(config):
        raise UnsupportedModel(f"{name} {reason}; use a model whose every layer caches keys and values of tokens")
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(
            f"{name} computes attention in its own code, past transformers' attention interface, so its cache can't be "
            "managed; use a model that goes through it (Llama, OPT, GPT-NeoX, Mistral, Qwen, Gemma, Phi, OLMo 2, GPT-OSS, ...)"
        )
    return geometry(config, model.dtype.itemsize)


def no_rolling(model: PreTrainedModel, instead: str = "rolling=false") -> str | None:
    """Why a model's keys can't be held without their rotation, if so, and what to use instead."""
    config = model.config.get_text_config(decoder=True)
    if config.model_type not in ROLLING_FAMILIES:
        return (
            f"needs rotary positions in every layer, which model type {config.model_type!r} isn't known to have; use "
            f"{instead} or one of: {', '.join(ROLLING_FAMILIES)}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if changing := kinds & {"dynamic", "longrope"}:
        return f"can't be: rotary tables of type {', '.join(sorted(changing))} change with the length; use {instead}"
    return None


def rotates(model: PreTrainedModel) -> bool:
    """Whether a model rotates keys and queries by their positions, in this or in a way that kvlab doesn't know."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "rope_parameters", None) or getattr(config, "rotary_dim", None):
        return True
    return any("Rotary" in type(module).__name__ for module in model.modules())


def _other_cache(config: Any) -> str | None:
    """Why a model's cache is not one of keys and values for each layer and token, if so."""
    if not getattr(config, "num_attention_heads", None):
        return "has no attention heads"
    if getattr(config, "kv_lora_rank", None):
        return "caches a latent vector from which keys and values are made"
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "kv_sharing_modes", None):
        return "shares keys and values between layers on its own"
    for kind in getattr(config, "layer_types", None) or []:
        if kind not in ("full_attention", "sliding_attention"):
            return f"has layers of type {kind}"
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"has layers whose cache is a {type(layer).__name__}"
    return None


def geometry(config: Any, itemsize: int) -> tuple[LayerGeometry, ...]:
    """Geometry of each layer's cache, from a text model's config and the bytes of one number."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    windows = [window if kind == "sliding_attention" else None for kind in types]
    return tuple(LayerGeometry(kv_heads, dim, dim, width, itemsize, itemsize) for width in windows)


def layer_kinds(model: PreTrainedModel) -> tuple[tuple[object, ...], ...]:
    """What each layer's config says of its window and its rotation, so that layers of one kind treat positions alike."""
    config = model.config.get_text_config(decoder=True)
    parts = [getattr(config, name, None) for name in ("layer_types", "no_rope_layers")]
    return tuple(tuple(part[layer] for part in parts if part) for layer in range(config.num_hidden_layers))
