"""Model types that the README names and that have no tiny model: stock logits without eviction, and real eviction."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from conftest import random_ids
from kvlab import Budget, attach, make_policy

SIZES = {
    "vocab_size": 259,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "gpt2": {"vocab_size": 259, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    "gemma": {**SIZES, "head_dim": 16},
    "mixtral": {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1},
    "olmo2": SIZES,
    "phi": SIZES,
    "phi3": SIZES,
    "qwen2": SIZES,
    "starcoder2": SIZES,
}


def model_of(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind]), dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.2)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_stock_logits_without_eviction_and_the_budget_with_it(kind):
    model = model_of(kind)
    ids = random_ids(2, 70)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[0, :9] = 0  # left pads
    places = (mask.cumsum(1) - 1).clamp(min=0)
    for name in ("h2o", "snapkv"):
        with attach(model, make_policy(name), Budget(tokens=1000)) as session:
            cache, stock_cache = session.new_cache(), DynamicCache(config=model.config)
            for start, end in ((0, 60), (60, 61), (61, 68), (68, 69)):
                given = {"attention_mask": mask[:, :end], "position_ids": places[:, start:end]}
                ours = model(ids[:, start:end], cache=cache, **given).logits[:, -1]
                stock = model(ids[:, start:end], cache=stock_cache, **given).logits[:, -1]
                assert float((ours - stock).abs().max()) < 2e-5 * max(1.0, float(stock.abs().max()))
        with attach(model, make_policy(name), Budget(tokens=40)) as session:
            cache = session.new_cache()
            model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=5, eos_token_id=None, pad_token_id=0)
            assert cache.kept_len.unique().tolist() == [40]
            assert cache.seen_len.tolist() == [65, 74]
