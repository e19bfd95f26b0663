"""The attention function and the mask function that kvlab registers with transformers.

A call whose key tensor carries a kvlab layer goes to that layer; any other call behaves as stock. The mask function passes
on the 2-D padding mask of the new tokens; causality, padding and windows are built from stored positions, never from a
4-D mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvlab.cache.layer import KVLayer
from kvlab.cache.state import KVLength
from kvlab.kernels.reference import AttentionRule

_masks = AttentionMaskInterface()


def implementation_for(stock: str) -> str:
    """Name under which kvlab's attention is registered over the stock implementation `stock`; registers it if need be."""
    name = f"kvlab_over_{stock.replace('flash_attention_', 'fa')}"
    if name not in AttentionInterface._global_mapping:
        AttentionInterface.register(name, partial(attention, stock=stock))
        AttentionMaskInterface.register(name, partial(padding_mask, stock=stock))
    return name


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    stock: str,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it: states (batch, heads, tokens, dim), output (batch, tokens, heads, dim)."""
    layer: KVLayer | None = getattr(key, "kvlab_layer", None)
    if layer is None:  # no kvlab cache
        options = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        kwargs.update({name: option for name, option in options.items() if option is not None})
        return _stock_attention(module, stock)(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError("a kvlab cache takes the 2-D padding mask (1 for tokens, 0 for pads), not a 4-D attention mask")
    if layer.cache.pending is not layer:
        raise ValueError(f"{type(module).__name__} attends twice over the keys of one layer; kvlab can't manage such a cache")
    layer.cache.pending = None
    rule = AttentionRule(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.view(key.shape[1], -1),
    )
    output = layer.attend(query, key, value, attention_mask, rule).transpose(1, 2).contiguous()
    if torch.is_grad_enabled() and query.requires_grad:
        output = _NoGradient.apply(query, output)
    return output, None


class _NoGradient(torch.autograd.Function):
    """Passes the output on, and says no when somebody asks for its gradient."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, output: Tensor) -> Tensor:
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise RuntimeError("a kvlab cache has no gradients; train without a cache (use_cache=False)")


def padding_mask(
    *, stock: str, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """For a kvlab cache: which of the new tokens are real, (batch, q_length) bool, None if all; otherwise the stock mask."""
    if not isinstance(kv_length, KVLength):
        make = _masks.get(stock, eager_mask)
        return make(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)
    if kwargs.get("use_vmap"):
        raise ValueError(
            "this model asks for a custom attention mask (such as bidirectional image tokens); kvlab has causal ones"
        )
    if attention_mask is None:
        return None
    if attention_mask.shape[1] not in (q_length, kv_length):
        raise ValueError(
            f"the attention mask covers {attention_mask.shape[1]} tokens; give one for the {q_length} new tokens or for all "
            f"{int(kv_length)}"
        )
    real = attention_mask[:, -q_length:].bool()
    return None if bool(real.all()) else real


def _stock_attention(module: nn.Module, stock: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """What the model itself would have called."""
    own_eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(stock, own_eager)
