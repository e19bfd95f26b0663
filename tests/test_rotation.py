"""Rotations undone and put back, on the states that every family's own attention layers make."""

import functools
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_utils import AttentionInterface

from kvlab import Budget, PolicyError, attach, make_policy
from kvlab.cache.rotation import RotarySource, RotaryTable, Rotation
from kvlab.support import ROLLING_FAMILIES
from kvlab.tiny import tiny_model

SIZES = {
    "vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Model types that have no tiny model; their rotary settings are the family's defaults.
OTHERS = {
    "gemma": {"head_dim": 16},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    "olmo2": {},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "starcoder2": {},
}
# Further layouts and tables of the same families.
VARIANTS = {
    "phi, q and k normed": ("phi", {"qk_layernorm": True}),
    "phi3, half rotated": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "qwen2, linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "olmo2, yarn": (
        "olmo2",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}},
    ),
}
FAMILIES = [*ROLLING_FAMILIES, *VARIANTS]
NO_SOURCE = RotarySource(None, None)


@functools.cache
def model_of(name, dtype=torch.float32):
    """A tiny model of a model type or variant; weights wide and norms uneven."""
    if name not in OTHERS and name not in VARIANTS:
        return tiny_model({"gemma3_text": "gemma3"}.get(name, name), dtype=dtype, num_hidden_layers=3)
    kind, settings = VARIANTS.get(name, (name, OTHERS.get(name)))
    config = transformers.AutoConfig.for_model(kind, **SIZES | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.data = (noise * 0.2 if parameter.dim() > 1 else parameter + 0.1 * noise).to(dtype)
    return model.eval().requires_grad_(False)


@dataclass
class Seen:
    """What one attention layer did in a call. before, after: queries and keys, (batch, heads, tokens, head_dim)."""

    rotation: Rotation
    before: tuple
    after: tuple


def before_rotation(module, outputs, head_dim):
    """Queries and keys as they were right before the rotation, from what the module's projections and norms gave."""
    if "query_key_value" in outputs:  # each head's query, key and value side by side
        fused = outputs["query_key_value"].unflatten(-1, (-1, 3 * head_dim)).transpose(1, 2)
        return fused.split(head_dim, -1)[:2]
    if "qkv_proj" in outputs:
        sizes = [module.config.num_attention_heads * head_dim] + [module.config.num_key_value_heads * head_dim] * 2
        parts = outputs["qkv_proj"].split(sizes, -1)[:2]
    else:
        pairs = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("q_proj", "k_proj"))
        parts = [outputs[name] for name in next(pair for pair in pairs if pair[0] in outputs)]
    return [part if part.ndim == 4 else part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in parts]


def watch(model, input_ids, position_ids):
    """Run the model and see what each of its attention layers did."""
    modules = [m for m in model.modules() if hasattr(m, "layer_idx") and "Attention" in type(m).__name__]
    tables, outputs, after, handles = {}, {m: {} for m in modules}, {}, []

    def attention(module, query, key, value, attention_mask, **kwargs):
        after[module] = query.clone(), key.clone()
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def keep_tables(module, args, kwargs):
        tables[module] = kwargs["position_embeddings"]

    def keep_output(name, kept):
        return lambda module, args, output: kept.update({name: output.clone()})

    stock = model.config._attn_implementation
    AttentionInterface.register("watched", attention)
    try:
        for module in modules:
            handles.append(module.register_forward_pre_hook(keep_tables, with_kwargs=True))
            handles += [
                child.register_forward_hook(keep_output(name, outputs[module])) for name, child in module.named_children()
            ]
        model.set_attn_implementation("watched")
        model(input_ids, position_ids=position_ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(stock)
        del AttentionInterface._global_mapping["watched"]

    layers, tokens = [], input_ids.shape[1]
    for module in modules:
        queries, keys = after[module]
        before = before_rotation(module, outputs[module], queries.shape[-1])
        before = [states if states.shape[2] == tokens else states.transpose(1, 2) for states in before]
        apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
        rotation = Rotation(*tables[module], apply, NO_SOURCE, getattr(module, "rotary_ndims", None))
        layers.append(Seen(rotation, tuple(before), (queries, keys)))
    return layers


@functools.cache
def layers_of(name, dtype=torch.float32):
    """Every attention layer of a tiny model at near and far positions."""
    ids = torch.randint(10, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    position_ids = torch.stack([torch.arange(40), 700 + 3 * torch.arange(40)])
    model = model_of(name, dtype)
    layers = watch(model, ids, position_ids)
    assert len(layers) == model.config.num_hidden_layers == 3
    return layers


# ------------------------------------------------------------------------------------------------------------------- undo


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_rotates_as_told_and_it_can_be_undone(name):
    for layer in layers_of(name):
        for before, after in zip(layer.before, layer.after, strict=True):
            size = float(before.abs().max())
            assert float((after - before).abs().max()) > 0.1 * size  # it did rotate
            undone = layer.rotation.undo(after)
            assert undone.dtype == torch.float32 and undone.shape == before.shape
            assert float((undone - before).abs().max()) <= 1e-6 * max(1.0, size)


@pytest.mark.parametrize("name", FAMILIES)
def test_undo_in_bfloat16_is_as_good_as_the_models_rounding(name):
    """The model rotates in bfloat16, three roundings; undoing adds none of its own."""
    for layer in layers_of(name, torch.bfloat16):
        for before, after in zip(layer.before, layer.after, strict=True):
            assert after.dtype == torch.bfloat16
            undone = layer.rotation.undo(after)
            assert undone.dtype == torch.float32
            size = float(before.float().abs().max())
            assert float((undone - before.float()).abs().max()) <= 3 * 2**-8 * size
            again = layer.rotation.turn(undone, layer.rotation.cos.float(), layer.rotation.sin.float())
            assert float((again - after.float()).abs().max()) <= 2e-6 * size


@pytest.mark.parametrize("name", FAMILIES)
def test_undo_in_float64(name):
    for layer in layers_of(name):
        rotation = layer.rotation
        keys = layer.before[1].double()
        rotated = rotation.turn(keys, rotation.cos.double(), rotation.sin.double())
        undone = rotation.undo(rotated)
        assert undone.dtype == torch.float64
        assert float((undone - keys).abs().max()) <= 1e-13 * max(1.0, float(keys.abs().max()))


def test_scaled_tables_are_not_only_turned_back():
    """YaRN makes rotated states longer; undoing must make them shorter again."""
    for name in ("gpt_oss", "olmo2, yarn"):
        rotation = layers_of(name)[0].rotation
        assert float((rotation.cos.square() + rotation.sin.square()).min()) > 1.1


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_rolling_cache_stores_is_not_rotated(name):
    """The same through `attach`: the keys in the store are those before the rotation."""
    model = model_of(name)
    ids = torch.randint(10, 250, (1, 12), generator=torch.Generator().manual_seed(1))
    expected = watch(model, ids, torch.arange(12)[None])[0].before[1]
    with attach(model, make_policy("streaming_llm", rolling=True)) as session:
        cache = session.new_cache()
        model(ids, cache=cache)
        view = cache.layers[0].store.view()
    order = view.positions[0, 0].argsort()
    stored = view.keys[:, :, order]
    assert stored.dtype == torch.float32
    assert float((stored - expected).abs().max()) <= 1e-6 * max(1.0, float(expected.abs().max()))


# ------------------------------------------------------------------------------------------------------------------ table


def half_turns(calls):
    """A source whose angle at place p is p, for heads of 4 channels; counts how often it is asked."""

    def make(places, dtype):
        calls.append(places)
        angles = torch.arange(places, dtype=torch.float64)[:, None].expand(-1, 4)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def apply(q, k, cos, sin):
        def one(x):
            first, second = x.chunk(2, -1)
            return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

        return one(q), one(k)

    none = torch.zeros(1, 1, 4)
    return Rotation(none, none, apply, RotarySource("half turns", make))


def turned(vector, angle):
    """A vector of 4 channels, whose first and second halves turn together, by an angle."""
    first, second = vector[:2], vector[2:]
    return torch.cat([first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)])


def test_keys_are_turned_by_their_rank_and_queries_by_that_of_their_own_token():
    table = RotaryTable(half_turns([]))
    table.cover(4, torch.float64)
    positions = torch.tensor([[[70, -1, 3, 50], [5, 9, 8, -1]]])
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 4, 4, generator=generator, dtype=torch.float64)
    queries = torch.randn(1, 2, 3, 2, 4, generator=generator, dtype=torch.float64)
    placed = table.place_keys(keys, positions)
    for head, slot, rank in ((0, 2, 0), (0, 3, 1), (0, 0, 2), (1, 0, 0), (1, 2, 1), (1, 1, 2)):
        assert torch.allclose(placed[0, head, slot], turned(keys[0, head, slot], rank))
    own = torch.tensor([[50, 70]])  # the queries' own tokens; head 1 holds three earlier ones, so both stand behind them
    placed = table.place_queries(queries, own, positions)
    for head, ranks in ((0, (1, 2)), (1, (2, 2))):
        for group in range(3):
            for query, rank in enumerate(ranks):
                assert torch.allclose(placed[0, head, group, query], turned(queries[0, head, group, query], rank))


def test_a_table_is_made_when_more_places_are_needed_and_not_again():
    calls = []
    table = RotaryTable(half_turns(calls))
    for places in (3, 2, 6, 7, 12, 13):
        table.cover(places, torch.bfloat16)
        assert len(table.cos) >= places and table.cos.dtype == torch.float32
    assert calls == [6, 14]
    assert table.nbytes == 2 * 14 * 4 * 4


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_says_what_the_model_says_of_the_same_positions(name):
    """Every layer's table, through `attach`, in float32 and wider."""
    model = model_of(name)
    ids = torch.randint(10, 250, (1, 12), generator=torch.Generator().manual_seed(1))
    expected = watch(model, ids, torch.arange(12)[None])
    with attach(model, make_policy("streaming_llm", rolling=True)) as session:
        cache = session.new_cache()
        model(ids, cache=cache)
        for layer, seen in zip(cache.layers, expected, strict=True):
            for dtype in (torch.float32, torch.float64):
                cos, sin = layer.table.rotation.source.make(12, dtype)
                assert cos.dtype == dtype
                assert torch.equal(cos.float(), seen.rotation.cos[0]) and torch.equal(sin.float(), seen.rotation.sin[0])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "gpt_oss", "phi"])
def test_rolling_equals_stock_as_long_as_nothing_is_evicted(name):
    """Prompt, steps, a second turn longer than all before; padded on the left, positions counted from the pads or not."""
    model = model_of(name)
    ids = torch.randint(10, 250, (2, 90), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[0, :7] = 0
    for position_ids in (None, (mask.cumsum(1) - 1).clamp(min=0)):
        stock_cache = transformers.DynamicCache(config=model.config)
        with attach(model, make_policy("streaming_llm", rolling=True)) as session:
            cache = session.new_cache()
            for start, end in ((0, 15), (15, 16), (16, 17), (17, 80), (80, 81)):
                given = {"attention_mask": mask[:, :end]}
                if position_ids is not None:
                    given["position_ids"] = position_ids[:, start:end]
                ours = model(ids[:, start:end], cache=cache, **given).logits[:, -1]
                stock = model(ids[:, start:end], cache=stock_cache, **given).logits[:, -1]
                assert float((ours - stock).abs().max()) < 2e-4 * float(stock.abs().max())


CHANGING = {
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, {"max_position_embeddings": 32}),
    "longrope": (
        "phi3",
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 32,
        },
        {"max_position_embeddings": 128, "original_max_position_embeddings": 32},
    ),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_tables_that_change_with_the_length_are_refused(kind):
    """Such a model rotates the same place in another way once the text is longer, so places in a cache mean nothing."""
    model_type, rope, settings = CHANGING[kind]
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | settings), rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(PolicyError, match=f"rotary tables of type {kind} change with the length"):
        attach(model, make_policy("streaming_llm", rolling=True)).__enter__()
    with attach(model, make_policy("streaming_llm")):
        pass


def test_a_later_turn_needs_more_places_than_positions_that_were_kept():
    """Between two turns tokens go by at positions far beyond the places in use; the second turn needs more places."""
    model = model_of("llama")
    ids = torch.randint(10, 250, (1, 220), generator=torch.Generator().manual_seed(2))
    with attach(model, make_policy("streaming_llm", rolling=True), Budget(tokens=10)) as session:
        cache = session.new_cache()
        model(ids[:, :20], cache=cache)
        for step in range(20, 60):
            model(ids[:, step : step + 1], cache=cache)
        for start, end in ((60, 100), (100, 220)):
            model(ids[:, start:end], cache=cache)
            cos, sin = cache.layers[0].table.cos, cache.layers[0].table.sin
            assert len(cos) >= 10 + end - start
            assert torch.allclose(cos.square() + sin.square(), torch.ones(()))
