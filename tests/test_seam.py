"""The seams where they could silently go wrong: keys that never arrive, shared configs, modes, failed calls; and policies
that use the wider interface (state of their own, decisions before attention, several victims at once)."""

import copy
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import random_ids, shared_model
from kvlab import Budget, Policy, UnsupportedModel, attach, make_policy
from kvlab.policies.base import TokenState
from kvlab.support import check_model
from kvlab.tiny import tiny_model, tiny_tokenizer

SMALL = Budget(tokens=40)

# ------------------------------------------------------------------------------------------------------ keys that must arrive


def test_a_cache_on_a_model_that_is_not_attached_is_an_error_and_not_a_wrong_answer():
    other = tiny_model("llama", seed=1)
    with attach(shared_model("llama"), make_policy("h2o"), SMALL) as session:
        cache = session.new_cache()
        with pytest.raises(ValueError, match="isn't attached"):
            other(random_ids(1, 1), cache=cache)


def test_a_cache_after_its_session_is_an_error():
    model = shared_model("llama")
    with attach(model, make_policy("h2o"), SMALL) as session:
        cache = session.new_cache()
        model(random_ids(1, 60), cache=cache)
    with pytest.raises(ValueError, match="session of this cache has ended"):
        model(random_ids(1, 1), cache=cache)


def test_a_model_that_changes_its_keys_on_the_way_is_refused_at_the_first_call():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8, "intermediate_size": 32}
    config = AutoConfig.for_model("jetmoe", vocab_size=259, num_local_experts=2, num_experts_per_tok=1, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with (
        attach(model, make_policy("full")) as session,
        pytest.raises(ValueError, match="changes keys between cache and attention"),
    ):
        model(random_ids(1, 1), cache=session.new_cache())


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 2, "num_hidden_layers": 2}, "latent vector"),
        ("gemma3n_text", {"num_hidden_layers": 4, "num_kv_shared_layers": 2}, "shares keys and values"),
    ],
)
def test_caches_of_another_kind_are_refused(kind, settings, reason):
    model = shared_model("llama")
    config = AutoConfig.for_model(kind, **settings)
    dressed = copy.copy(model)
    dressed.config = config
    with pytest.raises(UnsupportedModel, match=reason):
        check_model(dressed)


# ---------------------------------------------------------------------------------------------------------------- failed calls


def test_a_call_that_fails_midway_leaves_a_cache_that_says_so():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    ids = random_ids(1, 60)
    with attach(model, make_policy("h2o", keep_special=True), SMALL, tokenizer=tokenizer) as session:
        cache = session.new_cache()
        with pytest.raises(ValueError, match="call the model with input_ids"):
            model(inputs_embeds=model.get_input_embeddings()(ids), cache=cache)
        with pytest.raises(RuntimeError, match="failed midway"):
            model(ids, cache=cache)
        with pytest.raises(RuntimeError, match="failed midway"):
            cache.fork()
        cache.reset()
        ours = model(ids, cache=cache).logits
        assert torch.equal(ours, model(ids, cache=session.new_cache()).logits)
        assert cache.get_seq_length() == 60


def test_an_error_between_chunks_leaves_a_cache_that_says_so():
    model = shared_model("llama")
    with attach(model, make_policy("snapkv"), SMALL) as session:
        cache = session.new_cache()
        with pytest.raises(ZeroDivisionError), cache.turn():
            model(random_ids(1, 50), cache=cache)
            _ = 1 / 0
        with pytest.raises(RuntimeError, match="failed midway"):
            model(random_ids(1, 1), cache=cache)


def test_a_row_of_pads_only_is_refused():
    model = shared_model("llama")
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1] = 0
    with (
        attach(model, make_policy("h2o"), SMALL) as session,
        pytest.raises(ValueError, match="row 1 of the batch has pads only"),
    ):
        model(random_ids(2, 50), attention_mask=mask, cache=session.new_cache())


def test_ids_of_an_earlier_call_are_never_taken_for_this_ones():
    """The inner model is called by itself: its own ids count, and none are left behind."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    plain, special = random_ids(1, 50), torch.full((1, 50), tokenizer.bos_token_id)
    with attach(model, make_policy("streaming_llm", num_sink=0, keep_special=True), SMALL, tokenizer=tokenizer) as session:
        cache = session.new_cache()
        model(plain, cache=cache)
        assert cache.input_ids is None
        model.model(special, cache=cache)
        assert (cache.layers[0].store.state["token_ids"] == tokenizer.bos_token_id).sum() == 2 * 40


# ------------------------------------------------------------------------------------------------------------ models and modes


def test_models_that_share_a_config_are_restored_when_the_last_session_ends():
    one = tiny_model("llama")
    two = AutoModelForCausalLM.from_config(one.config)
    two.config = one.config
    ids = random_ids(1, 60)
    with attach(one, make_policy("h2o"), SMALL) as first:
        with attach(two, make_policy("h2o"), SMALL) as second:
            two(ids, cache=second.new_cache())
        cache = first.new_cache()
        one(ids, cache=cache)
        assert cache.kept_len.max() == 40
    assert one.config._attn_implementation == "sdpa"


def test_sessions_on_a_model_and_on_its_inner_model_may_overlap():
    model = tiny_model("llama")
    outer = attach(model, make_policy("h2o"), SMALL)
    outer.__enter__()
    with attach(model.model, make_policy("tova"), SMALL) as inner:
        outer.__exit__(None, None, None)
        cache = inner.new_cache()
        model.model(random_ids(1, 60), cache=cache)
        assert cache.kept_len.max() == 40
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_copy_made_inside_the_block_generates_with_its_own_weights():
    model = tiny_model("llama")
    ids = random_ids(1, 20)
    with attach(model, make_policy("full")):
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.mul_(-1)
        greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        ours, theirs = model.generate(ids, **greedy), twin.generate(ids, **greedy)
    assert not torch.equal(ours, theirs)


def test_a_prompt_read_in_inference_mode_can_be_continued_outside():
    model = shared_model("llama")
    ids = random_ids(1, 61)
    with attach(model, make_policy("h2o"), SMALL) as session:
        cache, plain = session.new_cache(), session.new_cache()
        with torch.inference_mode():
            model(ids[:, :60], cache=cache)
        model(ids[:, :60], cache=plain)
        assert torch.equal(model(ids[:, 60:], cache=cache).logits, model(ids[:, 60:], cache=plain).logits)


@pytest.mark.parametrize("policy", ["h2o", "adakv"])
def test_everything_works_in_inference_mode_and_leaves_it(policy):
    """Forks, beams, expansion and chunks make tensors of their own, which later calls write into."""
    model = shared_model("llama")
    ids = random_ids(1, 70)
    given = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 6}
    with attach(model, make_policy(policy), SMALL) as session:
        expected = model.generate(ids, cache=session.new_cache(), num_beams=3, **given)
        with torch.inference_mode():
            assert torch.equal(model.generate(ids, cache=session.new_cache(), num_beams=3, **given), expected)
            cache = session.new_cache()
            with cache.turn():
                model(ids[:, :30], cache=cache)
                model(ids[:, 30:60], cache=cache)
            fork = cache.fork()
            cache.batch_repeat_interleave(2)
            inside = model(ids[:, 60:61], cache=fork).logits
            model(ids[:, 60:61].expand(2, -1), cache=cache)
        plain = session.new_cache()
        model(ids[:, :60], cache=plain)
        assert torch.allclose(model(ids[:, 60:61], cache=plain).logits, inside, atol=1e-5)
        assert torch.allclose(model(ids[:, 61:62], cache=plain).logits, model(ids[:, 61:62], cache=fork).logits, atol=1e-5)


def test_generate_with_the_new_turn_alone_is_refused():
    model = shared_model("llama")
    with attach(model, make_policy("h2o"), SMALL) as session:
        cache = session.new_cache()
        first = model.generate(random_ids(1, 60), cache=cache, max_new_tokens=3, eos_token_id=None, pad_token_id=0)
        with pytest.raises(ValueError, match="got 7 token ids for a cache that has seen 62"):
            model.generate(random_ids(1, 7), cache=cache, max_new_tokens=3)
        both = torch.cat([first, random_ids(1, 7)], 1)
        out = model.generate(both, cache=cache, max_new_tokens=3, eos_token_id=None, pad_token_id=0)
        assert out.shape[1] == 73 and cache.seen_len.tolist() == [72]


def test_a_budget_that_is_none_is_refused():
    """In a process of its own, where types are not checked beforehand."""
    code = (
        "from kvlab import attach, make_policy; from kvlab.tiny import tiny_model\n"
        "try: attach(tiny_model('llama'), make_policy('h2o'), 0.2).__enter__()\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "budget=0.2: pass a Budget, such as Budget(ratio=0.2)\n", done.stderr


def test_a_gradient_through_the_cache_is_an_error():
    model = tiny_model("llama").requires_grad_(True)
    with torch.enable_grad(), attach(model, make_policy("h2o"), SMALL) as session:
        loss = model(random_ids(1, 60), cache=session.new_cache()).logits.sum()
        with pytest.raises(RuntimeError, match="no gradients"):
            loss.backward()
        model(random_ids(1, 60), use_cache=False).logits.sum().backward()  # training as ever
        assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


# ------------------------------------------------------------------------------------------- policies of a wider kind


@dataclass(frozen=True)
class Signs(Policy):
    """Drops, before attention, the token whose key has the signs least like the arriving key's. For these tests."""

    num_sink: int = 2
    name: ClassVar[str] = "signs"
    phase: ClassVar[str] = "before_attention"
    state: ClassVar[dict] = {"code": TokenState(torch.bool, (16,))}

    def arrive(self, arrival):
        return {"code": arrival.keys > 0}

    def score(self, step):
        if step.arriving is None:  # at a prompt's end: the newest
            return step.positions.float()
        probe = step.arriving.keys > 0  # (batch, kv_heads, 1, head_dim)
        return (step.state["code"] == probe).sum(-1).float()


@dataclass(frozen=True)
class InLumps(Policy):
    """The newest, dropping a quarter of the budget at once."""

    name: ClassVar[str] = "in_lumps"

    def score(self, step):
        return step.positions.float()

    def target(self, budget):
        return budget - budget // 4


@dataclass(frozen=True)
class LayerWide(Policy):
    """Heads disagree, the layer decides."""

    name: ClassVar[str] = "layer_wide"
    coupling: ClassVar[str] = "layer"

    def score(self, step):
        heads = torch.arange(step.positions.shape[1])[None, :, None]
        return torch.sin(step.positions.float() * (heads + 1))


def test_a_policy_that_decides_before_attention_never_holds_more_than_the_budget():
    model = shared_model("llama")
    ids = random_ids(2, 100)
    with attach(model, Signs(), Budget(tokens=30)) as session:
        cache = session.new_cache()
        model(ids[:, :60], cache=cache)
        for t in range(60, 100):
            before = cache.kept_positions()
            stores = [
                (layer.store.view().positions.clone(), layer.store.view().state["code"].clone()) for layer in cache.layers
            ]
            model(ids[:, t : t + 1], cache=cache)
            for layer, (positions, codes) in zip(cache.layers, stores, strict=True):
                view = layer.store.view()
                assert view.positions.shape[-1] == 30 and view.full  # it read 30 tokens, its own included
                assert torch.equal(view.state["code"], view.keys > 0)  # state moves with its token
                for row in range(2):
                    for head in range(2):
                        newest = (view.positions[row, head] == t).nonzero().item()
                        probe = view.keys[row, head, newest] > 0
                        alike = {
                            int(p): int((code == probe).sum())
                            for p, code in zip(positions[row, head], codes[row, head], strict=True)
                            if p >= 2
                        }
                        gone = set(before[layer.layer_idx][row][head]) - set(view.positions[row, head].tolist())
                        assert gone == {min(alike, key=lambda p: (alike[p], p))}
        numbers = sum(layer.store.keys.shape[0] for layer in cache.layers)
        assert numbers == 30 * 2 * 2 * len(cache.layers)
        assert session.memory(cache).state_bytes >= numbers * 16


def test_a_policy_may_drop_several_tokens_at_once():
    model = shared_model("llama")
    with attach(model, InLumps(), SMALL) as session:
        cache = session.new_cache()
        model(random_ids(1, 60), cache=cache)
        held = []
        for t in range(25):
            model(random_ids(1, 1, seed=t), cache=cache)
            held.append(int(cache.kept_len.max()))
    assert held == [30, *range(31, 41), 30, *range(31, 41), 30, 31, 32]


def test_a_layer_wide_policy_keeps_the_same_tokens_in_all_heads():
    model = shared_model("llama")
    with attach(model, LayerWide(), SMALL) as session:
        cache = session.new_cache()
        model(random_ids(1, 60), cache=cache)
        for t in range(10):
            model(random_ids(1, 1, seed=t), cache=cache)
            assert all(head == row[0] for layer in cache.kept_positions() for row in layer for head in row)
    mean = np.mean([np.sin(np.arange(70) * (h + 1)) for h in range(2)], axis=0)
    assert set(cache.kept_positions()[0][0][0]) == set(np.argsort(mean)[-40:].tolist())
