"""FastGen on whole models: profiles belong to a sequence and a head, and what they leave out is really freed."""

import subprocess
import sys

import pytest
import torch

from conftest import shared_model
from contracts.helpers import Feed, kv_and_state, padded, positions_of, rows_of
from kvlab import Budget, attach, load_model, make_policy
from kvlab.embedded import is_fetched
from kvlab.evals.texts import embedded_text
from kvlab.tiny import tiny_tokenizer


def read(model, ids, mask=None, steps=4, tokenizer=None, **settings):
    """A prompt and a few decoded tokens: logits of the last, and the cache."""
    with attach(model, make_policy("fastgen", **settings), tokenizer=tokenizer or tiny_tokenizer()) as session:
        cache = session.new_cache()
        feed = Feed(model, cache, len(ids))
        logits = feed(ids, mask)
        for step in range(steps):
            logits = feed(ids[:, step : step + 1] + 1)
    return logits, cache


def profile(cache, name="member", row=0):
    return [layer.profile[name][row].tolist() for layer in cache.layers]


def test_a_threshold_of_one_is_the_full_cache(family, model):
    ids, mask = padded(rows_of(60, 41), "left")
    logits, cache = read(model, ids, mask, threshold=1.0)
    with attach(model, make_policy("full")) as session:
        other = session.new_cache()
        feed = Feed(model, other, 2)
        stock = feed(ids, mask)
        for step in range(4):
            stock = feed(ids[:, step : step + 1] + 1)
    assert torch.allclose(logits, stock, atol=1e-4)
    assert positions_of(cache, 0) == positions_of(other, 0)


def test_bytes_fall_with_the_threshold(family, model):
    ids = rows_of(80)[0]
    held = []
    for threshold in (1.0, 0.95, 0.8, 0.6, 0.3, 0.0):
        _, cache = read(model, ids, threshold=threshold)
        memory = cache.memory()
        assert memory.kv_bytes == kv_and_state(cache)[0]  # of the storages themselves
        slots = sum(int(layer.store.capacity.sum()) for layer in cache.layers)
        row = cache.layers[0].store.keys.shape[-1] + cache.layers[0].store.values.shape[-1]
        assert memory.kv_bytes == slots * row * 4
        held.append(int(memory.kept_len.sum()))
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-1]


@pytest.mark.parametrize("chunk", [None, 11])
def test_recovered_attention_is_what_falls_on_the_set(family, model, chunk):
    """Of a prompt that is read at once or in chunks: the share of attention that its last query pays to what is kept, at least,
    and in the mean over queries what the profile says, where the set is the same for all queries.
    """
    ids, looks = rows_of(70)[0], {}

    def watch(step):
        looks[step.layer_idx] = torch.cat([attention.mean(2) for attention, _ in step.looks()], 2)[0], step.positions[0]

    members = ("special+punct+frequent", "full")
    settings = {"threshold": 0.5, "members": members}
    with attach(model, make_policy("fastgen", **settings), tokenizer=tiny_tokenizer(), watch=watch) as session:
        cache = session.new_cache()
        with cache.turn():
            for start in range(0, 70, chunk or 70):
                model(ids[:, start : start + (chunk or 70)], cache=cache)
        chosen = 0
        for number, layer in enumerate(cache.layers):
            attention, positions = looks[number]
            for head, kept in enumerate(cache.kept_positions()[number][0]):
                total = attention[head].sum(-1).mean()  # below 1 where the model has attention sinks
                found = attention[head][:, torch.isin(positions[head], torch.tensor(kept))].sum(-1).mean()
                if layer.profile["member"][0, head] == 0 and layer.rule.window is None:
                    assert float(1 - (total - found)) == pytest.approx(float(layer.profile["recovery"][0, head]), abs=1e-4)
                    chosen += 1
        assert chosen or all(layer.rule.window for layer in cache.layers)


def test_sequences_of_a_batch_have_profiles_of_their_own():
    model, rows = shared_model("llama"), rows_of(70, 12, seed=3)
    _, both = read(model, *padded(rows, "left"), threshold=0.75, steps=0)
    found = []
    for number, ids in enumerate(rows):
        _, alone = read(model, ids, threshold=0.75, steps=0)
        found.append(profile(alone))
        assert profile(both, row=number) == found[-1]
        assert positions_of(both, number) == positions_of(alone, 0)
    assert found[0] != found[1]


def test_profiles_follow_their_sequences():
    model = shared_model("llama")
    with attach(model, make_policy("fastgen", threshold=0.75), tokenizer=tiny_tokenizer()) as session:
        cache = session.new_cache()
        Feed(model, cache, 2)(*padded(rows_of(70, 12, seed=3), "left"))
        before = [profile(cache, row=row) for row in range(2)]
        assert before[0] != before[1]
        fork = cache.fork()
        cache.reorder_cache(torch.tensor([1, 0, 1]))
        assert [profile(cache, row=row) for row in range(3)] == [before[1], before[0], before[1]]
        assert [profile(fork, row=row) for row in range(2)] == before
        cache.reset()
        assert cache.layers[0].profile == {}


SCRIPT = """
import torch
torch.set_grad_enabled(False); torch.set_num_threads(1)
from kvlab import attach, make_policy
from kvlab.tiny import tiny_model, tiny_tokenizer
model = tiny_model("llama")
for seed in SEEDS:
    ids = torch.randint(10, 250, (1, 60), generator=torch.Generator().manual_seed(seed))
    with attach(model, make_policy("fastgen", threshold=0.6), tokenizer=tiny_tokenizer()) as session:
        cache = session.new_cache()
        model(ids, cache=cache)
        print([layer.profile["member"].tolist() for layer in cache.layers], cache.kept_positions())
"""


@pytest.mark.slow
def test_two_prompts_in_one_process_equal_two_processes():
    def lines(seeds):
        script = SCRIPT.replace("SEEDS", repr(seeds))
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()

    together = lines((1, 2))
    assert len(together) == 2 and together[0] != together[1]
    assert together == [*lines((1,)), *lines((2,))]


def test_a_profile_is_made_once():
    model = shared_model("llama")
    with attach(model, make_policy("fastgen", threshold=0.6), tokenizer=tiny_tokenizer()) as session:
        cache = session.new_cache()
        feed = Feed(model, cache)
        feed(rows_of(50)[0])
        before = profile(cache)
        feed(rows_of(40, seed=5)[0])
        assert profile(cache) == before


def test_a_budget_is_a_cap():
    model, ids = shared_model("llama"), rows_of(80)[0]
    for tokens in (5, 20, 60):
        with attach(model, make_policy("fastgen"), Budget(tokens=tokens), tokenizer=tiny_tokenizer()) as session:
            cache = session.new_cache()
            feed = Feed(model, cache)
            feed(ids)
            for step in range(4):
                assert int(cache.kept_len.max()) <= tokens
                assert tokens == 60 or int(cache.kept_len.min()) >= min(tokens, 4)
                feed(ids[:, step : step + 1])
            assert int(cache.kept_len.max()) <= tokens


@pytest.mark.embedded
def test_bytes_fall_with_the_threshold_on_real_text():
    if not is_fetched():
        pytest.skip("the embedded model isn't fetched (make setup)")
    model, tokenizer = load_model("smollm2-135m")
    ids = tokenizer(embedded_text().text, return_tensors="pt").input_ids[:, :128]
    held = []
    for threshold in (1.0, 0.95, 0.8):
        _, cache = read(model, ids, tokenizer=tokenizer, threshold=threshold)
        assert cache.memory().kv_bytes == kv_and_state(cache)[0]
        held.append(cache.memory().kept_fraction)
    assert held[0] == 1.0 and held[0] > held[1] > held[2]
