"""`attach`: give a model a policy and a budget for the length of a `with` block. The only code that touches a model.

Seams into transformers: the registered attention function (`attention.py`), a pre-hook on the model that puts token ids on
the cache, a pre-hook on attention modules that puts their rotation on the cache's layer, and a check in front of
`generate`. On leaving, also through an exception, the model is as before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvlab.attention import implementation_for
from kvlab.budget import Budget, LayerGeometry
from kvlab.cache import KVCache, Memory
from kvlab.cache.plan import Plan
from kvlab.cache.rotation import Rotation
from kvlab.policies.base import Policy, PolicyError
from kvlab.vocab import Vocab

ROLLING_FAMILIES = (
    "gemma", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "llama", "mistral", "mixtral", "olmo2", "phi", "phi3", "qwen2",
    "qwen3", "starcoder2",
)  # fmt: skip
"""Model types whose every layer rotates keys with the position embeddings it is given."""

_SEAM = "_kvlab_seam"


class UnsupportedModel(ValueError):
    """A model that kvlab can't work on: the message says which and why."""


@dataclass(frozen=True)
class Session:
    """A policy and a budget at work on a model; made by `attach`. Caches of one session are independent of each other."""

    model: PreTrainedModel
    plan: Plan

    @property
    def policy(self) -> Policy:
        """The policy at work."""
        return self.plan.policy

    @property
    def budget(self) -> Budget:
        """What caches may hold."""
        return self.plan.budget

    def new_cache(
        self,
        *,
        max_new_tokens: int | None = None,
        sample_ids: Sequence[int | str] | None = None,
        known_len: int | Sequence[int] | None = None,
    ) -> KVCache:
        """An empty cache for one batch of prompts.

        max_new_tokens  tokens to come, for a budget of the total
        sample_ids      a name or number for each prompt; random draws depend on it, so that batching changes nothing
        known_len       length of the text (one or for each prompt), for a ratio under `cache.stepwise()`
        """
        return KVCache(self.plan, max_new_tokens=max_new_tokens, sample_ids=sample_ids, known_len=known_len)

    def memory(self, cache: KVCache) -> Memory:
        """What a cache weighs now."""
        return cache.memory()


@contextmanager
def attach(
    model: PreTrainedModel,
    policy: Policy,
    budget: Budget | None = None,
    codec: Sequence[object] = (),
    share: object | None = None,
    tokenizer: Any = None,
) -> Iterator[Session]:
    """Let `model` work with caches that hold what `policy` keeps within `budget`.

    model      a transformers model whose attention goes through the attention interface
    policy     from `make_policy`; budget: None means no limit
    codec, share  reserved for codecs and for sharing between layers; nothing is available yet
    tokenizer  needed by policies that treat special tokens or punctuation apart

    Yields a Session: `cache = session.new_cache()`, then `model.generate(..., cache=cache)`. Calls without a kvlab cache
    behave as stock. Sessions may be nested and several caches may be alive at once.
    Raises UnsupportedModel, PolicyError or BudgetError, each with what to change.
    """
    if tuple(codec) or share is not None:
        raise ValueError("codec and share are not available yet; leave them out")
    layers = check_model(model)
    _check_policy(model, policy, tokenizer)
    if policy.rolling:  # keys without rotation are held in float32 at least
        layers = tuple(replace(layer, key_itemsize=max(4, layer.key_itemsize)) for layer in layers)
    plan = Plan(
        policy=policy,
        budget=budget or Budget(),
        layers=layers,
        itemsize=model.dtype.itemsize,
        vocab=None if tokenizer is None else Vocab(tokenizer),
    )
    seam = _Seam.of(model)
    try:
        yield Session(model, plan)
    finally:
        seam.release()


def check_model(model: PreTrainedModel) -> tuple[LayerGeometry, ...]:
    """Geometry of each layer's cache. Raises UnsupportedModel, naming the model and the reason, if kvlab can't work on it."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"{name} is not a transformers model")
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder; kvlab works on decoder-only models")
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or []
    if other := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(f"{name} has layers of type {', '.join(other)}, whose cache is not keys and values of tokens")
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(
            f"{name} computes attention in its own code and not through transformers' attention interface, so its cache can't "
            "be managed; use a model that does (Llama, OPT, GPT-NeoX, GPT-2, Mistral, Qwen, Gemma, Phi, OLMo 2, GPT-OSS, ...)"
        )
    return geometry(config, model.dtype.itemsize)


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


def _check_policy(model: PreTrainedModel, policy: Policy, tokenizer: Any) -> None:
    if not isinstance(policy, Policy):
        raise PolicyError(f"policy={policy!r}: pass a policy, such as make_policy('h2o')")
    needs_vocab = policy.keep_special or "token_ids" in policy.needs
    if needs_vocab and tokenizer is None:
        raise PolicyError(f"policy {policy.name} must know the special tokens: pass attach(..., tokenizer=tokenizer)")
    kind = model.config.get_text_config(decoder=True).model_type
    if policy.rolling and kind not in ROLLING_FAMILIES:
        raise PolicyError(
            f"rolling=true needs rotary positions in every layer, which model type {kind!r} isn't known to have; use "
            f"rolling=false or one of: {', '.join(ROLLING_FAMILIES)}"
        )


class _Seam:
    """Everything that kvlab changes on one model, undone when its last session ends."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.sessions = 0
        self.before = [(config, config._attn_implementation_internal) for config in _configs(model)]
        self.handles: list[RemovableHandle] = []
        try:
            self._install()
        except BaseException:
            self._undo()
            raise

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Seam:
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
        wanted = implementation_for(config._attn_implementation)
        self.model.set_attn_implementation(wanted)
        if config._attn_implementation != wanted:  # transformers keeps the old one without an error
            raise UnsupportedModel(f"{type(self.model).__name__} does not take another attention implementation")
        self.handles.append(self.model.register_forward_pre_hook(_leave_token_ids, with_kwargs=True))
        for module in self.model.modules():
            if "position_embeddings" in inspect.signature(module.forward).parameters and hasattr(module, "layer_idx"):
                self.handles.append(module.register_forward_pre_hook(_leave_rotation, with_kwargs=True))
        if hasattr(self.model, "generate"):
            vars(self.model)["generate"] = _checked_generate(self.model.generate)

    def _undo(self) -> None:
        for config, implementation in self.before:
            config._attn_implementation_internal = implementation
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


def _leave_token_ids(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Attention never sees token ids, so they are left on the cache."""
    cache = _kvlab_cache(args, kwargs)
    if cache is not None:
        cache.input_ids = kwargs.get("input_ids", args[0] if args else None)


def _leave_rotation(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keys reach the cache rotated; the rotation is left on the cache's layer, so that it can be undone."""
    cache = _kvlab_cache(args, kwargs)
    tables = kwargs.get("position_embeddings")
    if cache is not None and cache.plan.policy.rolling and tables is not None:
        apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
        cos, sin = tables
        cache.layers[module.layer_idx].rotation = Rotation(cos, sin, apply)


def _checked_generate(generate: Any) -> Any:
    """`generate`, refusing what can't be honest on a kvlab cache."""

    @wraps(generate)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if _kvlab_cache(args, kwargs) is not None:
            config = kwargs.get("generation_config")

            def given(name: str) -> Any:
                return kwargs.get(name, getattr(config, name, None))

            if given("prefill_chunk_size"):
                raise ValueError(
                    "generate(prefill_chunk_size=...) would count every chunk as a turn of its own; prefill the chunks inside "
                    "`with cache.turn():` (command line: runtime.prefill_chunk), then call generate"
                )
            if given("assistant_model") is not None or given("prompt_lookup_num_tokens"):
                raise ValueError(
                    "assisted decoding rolls the cache back, which a kvlab cache can't do (evicted tokens are gone); call "
                    "generate without assistant_model and prompt_lookup_num_tokens"
                )
        return generate(*args, **kwargs)

    return checked
