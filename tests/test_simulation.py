"""The mask simulations of H2O's released code against loops written from their description, and the protocol around them."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from conftest import shared_model
from contracts.helpers import rows_of
from kvlab import Budget, attach, make_policy
from kvlab.cells import Cell
from kvlab.kernels.reference import AttentionRule
from kvlab.protocol import PROTOCOLS, H2OGlobal, H2OLocal, Reader
from kvlab.reading import Prompt
from kvlab.simulation import H2OSimulation


def softmax(logits, seen, sink):
    """Weights of one row over the keys in `seen`."""
    top = max([logits[j] for j in seen] + ([] if sink is None else [sink]))
    numerators = {j: math.exp(logits[j] - top) for j in seen}
    total = sum(numerators.values()) + (0.0 if sink is None else math.exp(sink - top))
    return {j: numerators[j] / total for j in seen}


def naive(q, k, v, heavy_ratio, recent_ratio, oracle, scaling, softcap=None, window=None, sink=None):
    """One query head: q, k (T, d), v (T, dv). Token by token, as the description says."""
    length = len(q)
    logits = scaling * q @ k.T
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    heavy, recent = int(heavy_ratio * length), int(recent_ratio * length)
    causal = [[j for j in range(i + 1) if window is None or j > i - window] for i in range(length)]
    full = [softmax(logits[i], causal[i], sink) for i in range(length)]
    sets = [set() for _ in range(length)]
    if oracle:
        columns = [sum(row.get(j, 0.0) for row in full) for j in range(length)]
        best = sorted(range(length), key=lambda j: -columns[j])[:heavy]
        sets = [set(best) for _ in range(length)]
    elif heavy:
        total = [sum(full[i].get(j, 0.0) for i in range(min(heavy, length))) for j in range(length)]
        for i in range(length):
            if i < heavy:
                sets[i] = set(range(heavy))
                continue
            chosen = set(sorted(range(i), key=lambda j: (-total[j], -j))[: heavy - 1]) | {i}
            sets[i] = chosen
            total = [total[j] + full[i].get(j, 0.0) if j in chosen else 0.0 for j in range(length)]
    out = np.zeros((length, v.shape[1]))
    for i in range(length):
        seen = [j for j in causal[i] if j in sets[i] or i - j <= recent]
        for j, weight in softmax(logits[i], seen, sink).items():
            out[i] += weight * v[j]
    return out


@pytest.mark.parametrize("oracle", [False, True])
@pytest.mark.parametrize(
    "parts", [(0.1, 0.1), (0.3, 0.0), (0.0, 0.3), (0.04, 0.04), (1.0, 0.0), (0.0, 1.0), (0.02, 0.0)], ids=str
)
@pytest.mark.parametrize("rule", [{}, {"softcap": 3.0}, {"window": 9}, {"sinks": True}], ids=str)
def test_masks_equal_the_description(parts, oracle, rule):
    """A batch of texts padded on the left, GQA; the cache holds each row's own tokens in its first slots."""
    rng = np.random.default_rng(5)
    lengths, heads, group, dim = (26, 17), 2, 3, 4
    width = max(lengths)
    positions = torch.full((2, width), -1)
    for row, length in enumerate(lengths):
        positions[row, width - length :] = torch.arange(length)
    q, k, v = (
        torch.from_numpy(rng.standard_normal((2, heads, *part))) for part in ((group, width, dim), (width, dim), (width, 5))
    )
    slots = torch.stack([torch.cat([torch.arange(n), torch.full((width - n,), -1)]) for n in lengths])
    held = [
        torch.cat([part[row, :, width - n :], part[row, :, : width - n]], 1) for part in (k, v) for row, n in enumerate(lengths)
    ]
    keys, values = torch.stack(held[:2]), torch.stack(held[2:])
    sinks = torch.from_numpy(rng.standard_normal((heads, group))) if rule.get("sinks") else None
    attention = AttentionRule(scaling=1.3, softcap=rule.get("softcap"), window=rule.get("window"), sinks=sinks)
    simulation = H2OSimulation(*parts, oracle=oracle)
    out = simulation(q, keys, values, positions, slots[:, None].expand(-1, heads, -1), attention)
    for row, length in enumerate(lengths):
        for head in range(heads):
            for g in range(group):
                start = width - length
                expected = naive(
                    q[row, head, g, start:].numpy(),
                    k[row, head, start:].numpy(),
                    v[row, head, start:].numpy(),
                    *parts,
                    oracle,
                    1.3,
                    rule.get("softcap"),
                    rule.get("window"),
                    None if sinks is None else float(sinks[head, g]),
                )
                assert np.abs(out[row, head, g, start:].numpy() - expected).max() < 1e-9


@pytest.mark.parametrize("name", ["h2o_local", "h2o_global"])
def test_with_room_for_all_it_is_the_model_itself(name, family, model):
    prompts = [Prompt(tuple(row[0].tolist())) for row in rows_of(30, 21)]
    gold = [tuple(row[0].tolist()) for row in rows_of(9, 12, seed=9)]
    protocol = PROTOCOLS[name]()
    with attach(model, **protocol.at_work(make_policy("h2o", heavy_share=1.0), Budget(ratio=1.0))) as session:
        scored = Reader(session, protocol).read(prompts).score(gold)
    for prompt, ids, one in zip(prompts, gold, scored, strict=True):
        logits = model(torch.tensor([[*prompt.ids, *ids]]), use_cache=False).logits[0, len(prompt.ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(one.logprobs), expected, atol=2e-4)


def test_choices_are_scored_alike_alone_and_in_a_batch():
    model, protocol = shared_model("llama"), H2OLocal()
    prompts = [Prompt(tuple(row[0].tolist())) for row in rows_of(40, 33)]
    options = [
        [tuple(row[0].tolist()) for row in rows_of(4, 7, seed=3)],
        [tuple(row[0].tolist()) for row in rows_of(5, seed=8)],
    ]
    with attach(model, **protocol.at_work(make_policy("h2o"), Budget(ratio=0.3))) as session:
        reader = Reader(session, protocol)
        together = reader.read(prompts).score_choices(options)
        for row, prompt in enumerate(prompts):
            for choice, found in zip(options[row], together[row], strict=True):
                alone = reader.read([prompt]).score([choice])[0]
                assert alone.logprobs == pytest.approx(found.logprobs, abs=1e-4)
        fork = reader.read(prompts)
        held = [row.kv_bytes for row in fork.memory()[0]]
        assert held == [row.kv_bytes_full for row in fork.memory()[0]] and held[0] > held[1] > 0
        with pytest.raises(ValueError, match="can't generate"):
            reader.read(prompts).generate(3)
        cache = session.new_cache()
        model(torch.tensor([prompts[0].ids]), cache=cache)
        with pytest.raises(ValueError, match="decodes nothing"):
            model(torch.tensor([[5]]), cache=cache)
    with pytest.raises(ValueError, match="evicts nothing"), attach(model, make_policy("h2o"), simulation=lambda *_: None):
        pass


def test_shares_of_the_budget_are_exact():
    work = H2OGlobal().at_work(make_policy("h2o", heavy_share=0.25), Budget(ratio=0.4))
    simulation = work["simulation"]
    assert (Fraction(str(simulation.heavy)), Fraction(str(simulation.recent)), simulation.oracle) == (
        Fraction(1, 10),
        Fraction(3, 10),
        True,
    )
    assert work["policy"].name == "full"
    plain = H2OLocal().at_work(make_policy("full"), Budget())
    assert "simulation" not in plain


@pytest.mark.parametrize("wrong", [("tova", {}), ("h2o", {"group": "first"}), ("h2o", {"rolling": True})], ids=str)
def test_only_h2o_is_simulated(wrong):
    name, settings = wrong
    with pytest.raises(ValueError, match="simulates policy=h2o"):
        H2OLocal().check(make_policy(name, **settings), Budget(ratio=0.2))
    with pytest.raises(ValueError, match=r"budget\.ratio"):
        H2OLocal().check(make_policy("h2o"), Budget(tokens=5))


def test_results_say_so():
    config = {
        "name": "x", "model": {"name": "tiny-llama", "tiny": "llama"}, "policy": {"name": "h2o"}, "budget": {"ratio": 0.2},
        "task": {"name": "perplexity"}, "protocol": {"name": "h2o_global"}, "logger": {"name": "none"},
    }  # fmt: skip
    cell = Cell.of(config)
    assert cell.labels == ["simulated", "oracle"]
    assert Cell.of({**config, "protocol": {"name": "h2o_local"}}).labels == ["simulated"]
    assert Cell.of({**config, "protocol": {"name": "stream"}}).labels == []
    assert cell.run_id != Cell.of({**config, "protocol": {"name": "h2o_local"}}).run_id
