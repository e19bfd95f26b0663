"""Capabilities: what can't be honest is refused before anything is computed, in one line that says why."""

import json
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from conftest import random_ids, shared_model
from contracts.helpers import Feed, attached, fresh_model, policy_for
from kvlab import Budget, BudgetError, Policy, PolicyError, UnsupportedModel, attach, make_policy, policy_names, register
from kvlab.tiny import tiny_tokenizer

THINNED = 4
SMALL = Budget(tokens=40)
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
OWN_ATTENTION = "computes attention in its own code"
UNSUPPORTED = {
    "falcon": (SIZES, OWN_ATTENTION),
    "bloom": ({**SIZES, "n_layer": 2, "n_head": 2}, OWN_ATTENTION),
    "mpt": ({"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 2}, OWN_ATTENTION),
    "gpt_neo": (
        {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
        OWN_ATTENTION,
    ),
    "t5": (
        {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
        "is an encoder-decoder",
    ),
    "mamba": ({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "Mamba"),
    "qwen3_next": (
        {
            **SIZES,
            "intermediate_size": 32,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "linear_attention",
    ),
    "jamba": (
        {
            **SIZES,
            "intermediate_size": 32,
            "num_key_value_heads": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "use_mamba_kernels": False,
        },
        "Jamba",
    ),
}


def refusal(kind, *args, **kwargs):
    """The one line with which `attach` refuses."""
    with pytest.raises(kind) as refused, attach(*args, **kwargs):
        pass
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("model_type", list(UNSUPPORTED))
def test_unsupported_models(model_type):
    settings, reason = UNSUPPORTED[model_type]
    config = AutoConfig.for_model(model_type, **settings)
    model = (AutoModelForSeq2SeqLM if model_type == "t5" else AutoModelForCausalLM).from_config(config)
    before = {name: id(value) for name, value in vars(model).items()}
    message = refusal(UnsupportedModel, model, policy=make_policy("h2o"), budget=SMALL)
    assert type(model).__name__ in message
    assert reason in message
    assert {name: id(value) for name, value in vars(model).items()} == before
    assert model.config._attn_implementation == config._attn_implementation
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_rolling_on_learned_positions():
    message = refusal(PolicyError, shared_model("opt"), policy=make_policy("streaming_llm", rolling=True), budget=SMALL)
    assert "'opt'" in message
    assert "rolling=false" in message


def test_keep_special_without_a_tokenizer():
    policy = make_policy("h2o", keep_special=True)
    message = refusal(PolicyError, shared_model("llama"), policy=policy, budget=SMALL)
    assert "tokenizer=tokenizer" in message
    assert "h2o" in message


def test_special_tokens_are_kept(policy_name, family, model):
    """With a tokenizer they are: wherever they stand, in every layer and head, within the window."""
    ids = random_ids(1, 100).clone()
    places = [0, 37, 41, 80]
    ids[0, places] = torch.tensor([1, 2, 1, 2])
    with attached(model, family, policy_name, SMALL, keep_special=True) as session:
        cache = session.new_cache()
        feed = Feed(model, cache)
        for piece in (ids, random_ids(1, 1, seed=1), random_ids(1, 1, seed=2)):
            feed(piece)
            for layer, geometry in zip(cache.kept_positions(), session.plan.layers, strict=True):
                alive = [p for p in places if geometry.window is None or p > int(cache.seen_len) - 1 - geometry.window]
                assert all(set(alive) <= set(head) for head in layer[0])
        with pytest.raises(ValueError, match="input_ids, not inputs_embeds"):
            model(inputs_embeds=model.get_input_embeddings()(ids), cache=session.new_cache())


def test_steps_with_a_policy_that_decides_at_prompt_end(policy_name, family, model):
    policy = policy_for(family, policy_name)
    with attached(model, family, policy_name, SMALL) as session:
        cache = session.new_cache()
        if policy.evicts and policy.when == "prompt_end":
            with pytest.raises(ValueError, match="decides at a prompt's end") as refused, cache.stepwise():
                model(random_ids(1, 5), cache=cache)
            assert policy_name in str(refused.value)
            assert "\n" not in str(refused.value)
        else:
            with cache.stepwise():
                model(random_ids(1, 5), cache=cache)
            assert cache.seen_len.tolist() == [5]


def test_ratio_from_the_first_token_on_without_the_length():
    with attach(shared_model("llama"), policy=make_policy("h2o"), budget=Budget(ratio=0.5)) as session:
        cache = session.new_cache()
        with pytest.raises(BudgetError, match=r"new_cache\(known_len=\.\.\.\)"), cache.stepwise():
            session.model(random_ids(1, 5), cache=cache)
    with attach(shared_model("llama"), policy=make_policy("h2o"), budget=Budget(ratio=0.5, of="total")) as session:
        cache = session.new_cache()
        with pytest.raises(BudgetError, match=r"new_cache\(max_new_tokens=\.\.\.\)"):
            session.model(random_ids(1, 5), cache=cache)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_4d_masks(implementation):
    model = fresh_model("llama", attn_implementation=implementation)
    with attach(model, policy=make_policy("h2o"), budget=SMALL) as session:
        for mask in (torch.zeros(1, 1, 9, 9), torch.ones(1, 1, 9, 9).tril().bool()):
            with pytest.raises(ValueError, match="2-D padding mask") as refused:
                model(random_ids(1, 9), attention_mask=mask, cache=session.new_cache())
            assert "\n" not in str(refused.value)


def test_masks_of_a_wrong_length():
    model = shared_model("llama")
    with attach(model, policy=make_policy("h2o"), budget=SMALL) as session:
        cache = session.new_cache()
        feed = Feed(model, cache)
        feed(random_ids(1, 50))
        with pytest.raises(ValueError, match="covers 7 tokens"):
            model(random_ids(1, 1), attention_mask=torch.zeros(1, 7, dtype=torch.long), cache=cache)


def test_another_batch_size_on_a_used_cache(policy_name, family, model):
    with attached(model, family, policy_name, SMALL) as session:
        cache = session.new_cache()
        Feed(model, cache, 2)(random_ids(2, 50))
        held = cache.kept_positions()
        with pytest.raises(ValueError, match="this cache holds 2 sequences, the call has 3; use a new cache"):
            model(random_ids(3, 1), cache=cache)
        assert cache.kept_positions() == held


def test_phases_do_not_nest_and_forks_wait():
    with attach(shared_model("llama"), policy=make_policy("h2o"), budget=SMALL) as session:
        cache = session.new_cache()
        with cache.turn():
            with pytest.raises(RuntimeError, match="'prompt' block"), cache.stepwise():
                pass
            with pytest.raises(RuntimeError, match="'prompt' block"):
                cache.fork()
        with cache.stepwise(), pytest.raises(RuntimeError, match="'step' block"), cache.turn():
            pass
        Feed(session.model, cache)(random_ids(1, 50))  # usable as ever
        assert set(cache.kept_len.flatten().tolist()) == {40}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"recent": 3}, ["no setting 'recent'", "did you mean recent_window"]),
        ({"num_sinks": 3}, ["did you mean num_sink"]),
        ({"num_sink": -1}, ["num_sink=-1", "at least 0"]),
        ({"num_sink": True}, ["num_sink=True", "whole number"]),
    ],
)
def test_wrong_settings(policy_name, settings, words):
    with pytest.raises(PolicyError) as refused:
        make_policy(policy_name, **settings)
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words)


def test_unknown_policies():
    with pytest.raises(PolicyError, match=r"unknown policy 'h20' \(did you mean h2o") as refused:
        make_policy("h20")
    assert all(name in str(refused.value) for name in policy_names())
    with pytest.raises(PolicyError, match="unknown policy 'zzz'; known"):
        make_policy("zzz")
    with pytest.raises(PolicyError, match=r"policy name 'h2o' is taken by kvlab\.policies\.h2o"):
        register("h2o")(type("Other", (Policy,), {"__module__": "elsewhere"}))
    with pytest.raises(PolicyError, match="frozen=True"):
        register("thawed")(type("Thawed", (Policy,), {}))
    assert "thawed" not in policy_names()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ratio": 0.0}, "budget.ratio=0.0"),
        ({"ratio": 1.5}, "budget.ratio=1.5"),
        ({"tokens": 0}, "budget.tokens=0"),
        ({"bytes": -1}, "budget.bytes=-1"),
        ({"ratio": 0.5, "tokens": 10}, "not ratio and tokens"),
        ({"tokens": 10, "of": "total"}, "goes with budget.ratio"),
    ],
)
def test_impossible_budgets(values, words):
    with pytest.raises(BudgetError, match=re.escape(words)) as refused:
        Budget(**values)
    assert "\n" not in str(refused.value)


WRONG_TYPES = {
    "make_policy('h2o', num_sink=1.5)": "policy.num_sink=1.5: use a whole number of at least 0",
    "make_policy('h2o', num_sink='4')": "policy.num_sink='4': use a whole number of at least 0",
    "make_policy('h2o', rolling=1)": "policy.rolling=1: use true or false",
    "make_policy('h2o', heavy_share='half')": "policy.heavy_share='half': use a number",
    "make_policy('h2o', group='median')": "policy.group='median': use one of mean, max, sum, first",
    "Budget(ratio=0)": "budget.ratio=0: use a number above 0",
    "Budget(ratio=True)": "budget.ratio=True: use a number above 0",
    "Budget(ratio='0.2')": "budget.ratio='0.2': use a number above 0",
    "Budget(tokens=2.5)": "budget.tokens=2.5: use a whole number of at least 1",
    "Budget(tokens=10, of='all')": "budget.of='all': use 'prompt' or 'total'",
    "attach(torch.nn.Linear(2, 2), make_policy('h2o')).__enter__()": "Linear is not a transformers model",
    "attach(model, Policy).__enter__()": "pass a policy, such as make_policy('h2o')",
    "attach(model, make_policy('full'), codec='kivi2').__enter__()": "codec='kivi2': pass a codec, such as",
    "attach(model, make_policy('full'), codec=[3]).__enter__()": "codec=3: pass a codec",
    "attach(model, 'h2o').__enter__()": "policy='h2o': pass a policy, such as make_policy('h2o')",
}


def test_wrong_types_as_a_user_sees_them():
    """In a process of its own, since here the types of every argument are checked before kvlab sees it."""
    script = """
import json, sys, torch
from kvlab import *
from kvlab.tiny import tiny_model
model = tiny_model("llama")
said = {}
for call in json.loads(sys.argv[1]):
    try:
        eval(call)
    except Exception as error:
        said[call] = [isinstance(error, ValueError), str(error)]
print(json.dumps(said))
"""
    command = [sys.executable, "-c", script, json.dumps(list(WRONG_TYPES))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    said = json.loads(done.stdout.splitlines()[-1])
    for call, words in WRONG_TYPES.items():
        is_value_error, message = said[call]
        assert is_value_error, f"{call}: {message}"
        assert words in message
        assert "\n" not in message


def test_budgets_smaller_than_what_is_protected():
    model = shared_model("llama")
    policy = make_policy("h2o", num_sink=4, recent_window=8)
    message = refusal(BudgetError, model, policy=policy, budget=Budget(tokens=11))
    assert all(word in message for word in ("11 tokens", "num_sink=4", "recent_window=8"))
    with attach(model, policy=policy, budget=Budget(tokens=12)):
        pass
    message = refusal(BudgetError, model, policy=make_policy("snapkv"), budget=Budget(tokens=31))
    assert all(word in message for word in ("31 tokens", "obs_window=32"))
    assert "holds no token" in refusal(BudgetError, model, policy=make_policy("h2o"), budget=Budget(bytes=100))
    with attach(model, policy=make_policy("full", num_sink=4), budget=Budget(tokens=2)):  # protects nothing: it evicts nothing
        pass


def test_the_tokenizer_of_tiny_models_has_the_special_tokens_that_tests_rely_on():
    assert sorted(tiny_tokenizer().all_special_ids) == [0, 1, 2]
