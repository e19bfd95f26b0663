"""Tiny random models of every supported family, and a byte-level tokenizer for them, built in memory.

They exist so that everything else can be tried in milliseconds. Their weights are drawn wide enough that attention is
clearly non-uniform and logits lie well apart, which default initialisation doesn't give: with it every token gets the
same attention, and no eviction rule could be told from another. What they say is noise.

Knows nothing about caches, policies, files or the network.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, processors

from kvlab.hints import did_you_mean

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
VOCAB_SIZE = 3 + 256
WINDOW = 24
SPREAD = 0.2

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 512,
}
_SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = _SHARED | {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
_ALTERNATING = ["sliding_attention", "full_attention"]

# family -> (transformers' model type, config); layer_types are repeated to the number of layers
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GQA | {"rope_parameters": _ROPE}),
    "opt": ("opt", _SHARED | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_neox": (
        "gpt_neox",
        _SHARED | {"intermediate_size": 96, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "qwen3": ("qwen3", _GQA | {"rope_parameters": _ROPE}),
    "mistral": ("mistral", _GQA | {"rope_parameters": _ROPE, "sliding_window": None}),
    "mistral_swa": ("mistral", _GQA | {"rope_parameters": _ROPE, "sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        _GQA
        | {
            "rope_parameters": _ROPE,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 8.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3_text",
        _GQA
        | {
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        _GQA
        | {
            "rope_parameters": _YARN,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",  # the default has no float64 on the CPU
        },
    ),
}


def tiny_families() -> list[str]:
    """Names that `tiny_model` takes."""
    return list(_FAMILIES)


def tiny_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = SPREAD, **overrides: Any
) -> transformers.PreTrainedModel:
    """A random causal language model of this family on the CPU, in eval mode and without gradients.

    The same seed gives the same weights, in every dtype up to rounding; torch's global generator is left as it was.
    `spread` is the standard deviation of the weights: the larger, the more peaked the attention. `overrides` replace
    entries of the family's transformers config (`num_hidden_layers=4`, `sliding_window=8`,
    `attn_implementation="eager"`).

    Raises ValueError for an unknown family, or an override that this family's config doesn't have.
    """
    config = _config(family, overrides)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's only: other devices' generators are not restored
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw_weights(model, seed, spread)
    # Parameters only: rotary frequencies are buffers, and stay in float32 as they do in a loaded model.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.eval().requires_grad_(False)


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level tokenizer with 259 ids: `<pad>` 0, `<s>` 1, `</s>` 2, then byte b as id 3 + b.

    Text of n bytes gives `<s>` and n ids (n with `add_special_tokens=False`). Printable ASCII characters are tokens
    under their own name. Pads on the left.
    """
    vocab = {PAD: 0, BOS: 1, EOS: 2}
    for byte in range(256):
        vocab[chr(byte) if 32 <= byte < 127 else f"<0x{byte:02X}>"] = 3 + byte
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocab[BOS])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _config(family: str, overrides: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    if family not in _FAMILIES:
        raise ValueError(f"unknown tiny family {family!r}: choose one of {', '.join(_FAMILIES)}")
    model_type, settings = _FAMILIES[family]
    default = transformers.AutoConfig.for_model(model_type)
    for key in overrides:
        if key not in ("attn_implementation", "experts_implementation") and not hasattr(default, key):
            hint = did_you_mean(key, vars(default)) or ": see its config class in transformers"
            raise ValueError(f"tiny family {family!r} has no setting {key!r}{hint}")
    merged = settings | dict(overrides)
    if "layer_types" in settings and "layer_types" not in overrides:
        merged["layer_types"] = [_ALTERNATING[i % 2] for i in range(merged["num_hidden_layers"])]
    return transformers.AutoConfig.for_model(model_type, **merged)


def _draw_weights(model: transformers.PreTrainedModel, seed: int, spread: float) -> None:
    """Matrices from N(0, spread²); vectors (biases, norms, sinks) get noise too, so that dropping one is noticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * spread)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.add_(0.5 + 0.1 * noise)  # normed queries and keys would attend almost evenly
            elif name.endswith("sinks"):
                parameter.copy_(4 + noise)  # a tenth of the attention over 100 tokens, more over fewer
            else:
                parameter.add_(0.1 * noise)
