"""Isolation: no session, cache, fork or policy leaves a trace in the model, in another cache or in the process."""

import copy
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, fields

import pytest
import torch

from conftest import random_ids, shared_model
from contracts.helpers import GREEDY, Feed, attached, fresh_model, policy_for, positions_of, talk
from kvlab import Budget, attach

THINNED = 4
SMALL = Budget(tokens=40)


def state_of(model):
    """Everything of a model that a session could change: attributes, hooks and configs of every module."""
    modules = [
        {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for module in model.modules()
    ]
    configs = {id(module.config): vars(module.config).copy() for module in model.modules() if hasattr(module, "config")}
    return modules, configs, model.generation_config.to_dict()


def assert_same_state(before, after):
    for module, other in zip(before[0], after[0], strict=True):
        assert module.keys() == other.keys()
        for name, value in module.items():
            same = value == other[name] if isinstance(value, dict) else value is other[name]
            assert same, f"attribute {name} changed"
    assert before[1:] == after[1:]


def decoded(session, ids, steps=4):
    """Greedy tokens, logits and kept positions of one run."""
    cache = session.new_cache()
    feed = Feed(session.model, cache, len(ids))
    tokens, logits = feed.greedy(feed(ids)[:, -1], steps)
    return tokens.tolist(), logits, cache.kept_positions()


def assert_same_run(first, second):
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
    assert first[2] == second[2]


class Interruption(Exception):
    """Raised by the tests inside a session."""


@pytest.mark.parametrize("ending", ["quiet", "error"])
def test_the_model_is_as_before(policy_name, family, ending):
    model = shared_model(family) if ending == "quiet" else fresh_model(family, attn_implementation="eager")
    ids = random_ids(1, 60)
    stock, before = model(ids).logits, state_of(model)
    try:
        with attached(model, family, policy_name, SMALL) as session:
            model.generate(ids, cache=session.new_cache(), max_new_tokens=2, **GREEDY)
            if ending == "error":
                raise Interruption
    except Interruption:
        assert ending == "error"
    assert_same_state(before, state_of(model))
    assert torch.equal(model(ids).logits, stock)


def test_an_error_inside_a_call_leaves_the_model_as_before(family):
    model = fresh_model(family)
    before = state_of(model)
    with pytest.raises(ValueError), attach(model, policy=policy_for(family, "h2o"), budget=SMALL) as session:
        model(random_ids(1, 20), attention_mask=torch.zeros(1, 1, 20, 20), cache=session.new_cache())
    assert_same_state(before, state_of(model))


def test_nested_sessions_end_in_any_order(policy_name, family, model):
    ids, before = random_ids(1, 70), state_of(model)
    other = "streaming_llm" if policy_name != "streaming_llm" else "h2o"
    with attached(model, family, policy_name, SMALL) as session:
        expected = decoded(session, ids)
    with attached(model, family, other, Budget(tokens=20)) as session:
        expected_other = decoded(session, ids)
    for first_out in (0, 1):
        stacks = [ExitStack(), ExitStack()]
        ours = stacks[0].enter_context(attached(model, family, policy_name, SMALL))
        others = stacks[1].enter_context(attached(model, family, other, Budget(tokens=20)))
        assert_same_run(decoded(ours, ids), expected)
        assert_same_run(decoded(others, ids), expected_other)
        stacks[first_out].close()
        left = (others, expected_other) if first_out == 0 else (ours, expected)
        assert_same_run(decoded(left[0], ids), left[1])
        stacks[1 - first_out].close()
        assert_same_state(before, state_of(model))


def test_interleaved_caches_give_what_each_gives_alone(policy_name, family, model):
    prompts, answers = [talk(1, count, 4, seed=count) for count in (90, 62, 75)], []
    with attached(model, family, policy_name, SMALL) as session:
        for prompt, answer in prompts:
            cache = session.new_cache()
            feed = Feed(model, cache)
            answers.append((torch.cat([feed(prompt), feed.each(answer)], 1), cache.kept_positions()))
        caches = [session.new_cache() for _ in prompts]
        feeds = [Feed(model, cache) for cache in caches]
        logits = [[feed(prompt)] for feed, (prompt, _) in zip(feeds, prompts, strict=True)]
        for step in range(4):
            for number in (2, 0, 1):
                logits[number].append(feeds[number](prompts[number][1][:, step : step + 1]))
        for cache, parts, (expected, kept) in zip(caches, logits, answers, strict=True):
            assert torch.equal(torch.cat(parts, 1), expected)
            assert cache.kept_positions() == kept


def test_policies_are_values(policy_name, family, model):
    policy = policy_for(family, policy_name)
    before, twin = asdict(policy), policy_for(family, policy_name)
    with attached(model, family, policy_name, SMALL) as session:
        decoded(session, random_ids(2, 70))
        assert session.policy == policy
        used = session.policy
    assert (asdict(policy), vars(used)) == (before, vars(twin))
    assert policy == twin == used
    assert hash(policy) == hash(twin) == hash(used)
    with pytest.raises(AttributeError):
        policy.num_sink = 7
    assert all(field.name in before for field in fields(policy))


def test_forks_are_independent(policy_name, family, model):
    """Two forks and a fork of a fork go their own ways; each equals a run of its own, and the original is untouched."""
    prompt, step, *answers = talk(2, 80, 2, 3, 3, 3)
    with attached(model, family, policy_name, SMALL) as session:

        def start():
            feed = Feed(model, session.new_cache(), 2)
            feed(prompt)
            feed.each(step)
            return feed

        def fork(feed):
            copied = Feed(model, feed.cache.fork(), 2)
            copied.mask = feed.mask
            return copied

        original = start()
        held = original.cache.kept_positions()
        weight = session.memory(original.cache)
        first, second = fork(original), fork(original)
        third = fork(first)
        assert session.memory(third.cache).kv_bytes == weight.kv_bytes
        said = []
        for token in range(3):  # in turns, so that shared storage would show
            for feed, answer in ((first, answers[0]), (second, answers[1]), (third, answers[2])):
                said.append(feed(answer[:, token : token + 1]))
        assert original.cache.kept_positions() == held
        assert session.memory(original.cache).as_dict() == weight.as_dict()
        original.each(answers[1])
        for number, feed in enumerate((first, second, third)):
            fresh = start()
            assert torch.equal(torch.cat(said[number::3], 1), fresh.each(answers[number]))
            assert feed.cache.kept_positions() == fresh.cache.kept_positions()
            assert feed.cache.seen_len.tolist() == [85, 85]
        assert original.cache.kept_positions() == second.cache.kept_positions()


def test_forks_of_a_rolling_cache():
    model = shared_model("llama")
    prompt, *answers = talk(1, 80, 3, 3)
    with attached(model, "llama", "streaming_llm", SMALL, rolling=True) as session:

        def start():
            feed = Feed(model, session.new_cache())
            feed(prompt)
            return feed

        original = start()
        copied = Feed(model, original.cache.fork())
        copied.mask = original.mask
        logits = [copied.each(answers[0]), original.each(answers[1])]
        for part, answer in zip(logits, answers, strict=True):
            assert torch.equal(part, start().each(answer))


def test_rows_repeated_selected_and_forgotten(policy_name, family, model):
    prompt, answer, again = talk(2, 80, 3, 3)
    with attached(model, family, policy_name, SMALL) as session:
        cache = session.new_cache()
        feed = Feed(model, cache, 2)
        feed(prompt)
        feed.each(answer)
        held = [positions_of(cache, row) for row in range(2)]
        cache.batch_repeat_interleave(2)
        assert [positions_of(cache, row) for row in range(4)] == [held[0], held[0], held[1], held[1]]
        cache.batch_select_indices(torch.tensor([2, 0]))
        assert [positions_of(cache, row) for row in range(2)] == [held[1], held[0]]
        feed.mask = feed.mask[[1, 0]]
        swapped = feed.each(again[[1, 0]])
        fresh = session.new_cache()
        feed = Feed(model, fresh, 2)
        feed(prompt)
        feed.each(answer)
        assert (swapped[[1, 0]] - feed.each(again)).abs().max() <= 1e-4
        assert [positions_of(cache, row) for row in (1, 0)] == [positions_of(fresh, row) for row in range(2)]
        cache.reset()
        assert cache.get_seq_length() == 0
        assert session.memory(cache).kv_bytes == session.memory(cache).kv_bytes_peak == 0
        feed = Feed(model, cache, 1)  # another batch size: nothing is remembered
        feed(prompt[:1])
        alone = session.new_cache()
        Feed(model, alone)(prompt[:1])
        assert cache.kept_positions() == alone.kept_positions()


SCRIPT = """
import json, sys, torch
from kvlab import Budget, attach, make_policy
from kvlab.tiny import tiny_model

def runs(*names):
    found = []
    for name in names:
        model = tiny_model("llama")
        ids = torch.randint(10, 250, (2, 90), generator=torch.Generator().manual_seed(0))
        with attach(model, policy=make_policy(name), budget=Budget(tokens=40)) as session:
            cache = session.new_cache()
            out = model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
            found.append([out.tolist(), cache.kept_positions()])
    return found

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    print(json.dumps(runs(*sys.argv[1:])))
"""


def test_a_run_after_others_equals_one_in_a_process_of_its_own():
    here = {"__name__": "script"}
    exec(SCRIPT, here)
    together = here["runs"]("h2o", "random", "adakv")
    done = subprocess.run([sys.executable, "-c", SCRIPT, "adakv"], capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(json.dumps(together[2:]))
    assert together[0][1] != together[1][1]
