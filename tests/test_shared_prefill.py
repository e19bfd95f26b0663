"""Sweeps at the price of one prefill: cells that share their prompts' forward pass end exactly as separate runs do."""

import json
import shutil
from contextlib import ExitStack

import pytest
import torch

from contracts.helpers import policy_for
from kvlab import Budget, attach, make_codec
from kvlab.policies import policy_names
from kvlab.protocol import PromptProtocol, Reader
from kvlab.reading import Feed, Prompt
from kvlab.tiny import tiny_model, tiny_tokenizer
from kvlab.together import prefill_together
from running import TINY, faulty_policy, kvlab, results, sample_lines

LENGTHS = (70, 41, 70, 56)
NAMES = policy_names()  # before other tests register their own
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "opt", "gemma2")]
PROTOCOL = PromptProtocol(hold_back=3)
BUDGETS = (Budget(ratio=0.7), Budget(tokens=36))
CODECS = (
    (("int", {"bits": 4}),),
    (("kivi", {"bits": 2, "residual": 16, "group": 16}),),
    (("think", {}),),
    (("qaq", {}),),
    (("decoquant", {"bits": 4, "rope": "post"}),),
    (("think", {}), ("kivi", {"bits": 2, "residual": 16, "group": 16})),
)


def prompts(lengths):
    generator = torch.Generator().manual_seed(3)
    return [Prompt(tuple(torch.randint(10, 250, (n,), generator=generator).tolist()), name=str(n)) for n in lengths]


def path_of(policy):
    return policy.group if "mass" in policy.needs else None


def left_by(reading):
    """All that a reading leaves behind: what is kept, its state and weight, and what a few steps say."""
    cache = reading.feed.cache
    memory = cache.memory()
    state = {
        "kept": cache.kept_positions(),
        "memory": [memory.as_dict(), cache.memory_by_row(), cache.heads_by_row(), cache.profile_cost[1]],
        "seen": [cache.seen_len.tolist(), cache.get_seq_length(), [layer.turn_start for layer in cache.layers]],
        "limits": [layer.limits.budget.tolist() for layer in cache.layers],
        "planes": [{name: plane.clone() for name, plane in layer.store.planes.items()} for layer in cache.layers],
    }
    tokens, logits = [[token] for token in reading.last], []
    for _ in range(4):
        logits.append(reading.feed(tokens, logits=True))
        tokens = logits[-1][:, -1].argmax(-1)[:, None].tolist()
    return state, logits, (cache.kept_positions(), cache.memory().as_dict())


def assert_equal(found, wanted, what):
    (state, logits, end), (wanted_state, wanted_logits, wanted_end) = found, wanted
    planes, wanted_planes = state.pop("planes"), wanted_state.pop("planes")
    assert state == wanted_state, what
    for mine, other in zip(planes, wanted_planes, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            assert torch.equal(mine[name], other[name]), (what, name)
    assert all(map(torch.equal, logits, wanted_logits)), what
    assert end == wanted_end, what


def check(family, settings, chunk=None):
    """Each bundle that these (policy, budget, codecs) make, against separate runs."""
    model, passes = tiny_model(family), []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    bundles = {}
    for policy, budget, codecs in settings:
        bundles.setdefault(path_of(policy), []).append((policy, budget, codecs))
    with torch.inference_mode():
        for bundle in bundles.values():
            check_bundle(model, bundle, prompts(LENGTHS), chunk, passes)
    hook.remove()


def check_bundle(model, bundle, texts, chunk, passes):
    def session(policy, budget, codecs):
        codec = [make_codec(name, **options) for name, options in codecs]
        return attach(model, policy, budget, codec=codec, tokenizer=tiny_tokenizer())

    wanted = []
    for settings in bundle:
        with session(*settings) as one:
            wanted.append(left_by(Reader(one, PROTOCOL, 0, chunk).read(texts)))
    with ExitStack() as stack:
        readers = [Reader(stack.enter_context(session(*settings)), PROTOCOL, 0, chunk) for settings in bundle]
        before = len(passes)
        shared = prefill_together(readers, texts)
        assert len(passes) - before == (1 if chunk is None else -(-(max(LENGTHS) - 3) // chunk))
        for settings, one, other in zip(bundle, shared, wanted, strict=True):
            assert one.error is None, one.error
            assert_equal(left_by(one.reading()), other, str(settings))


def every_policy(family, chunk):
    policies = [policy_for(family, name) for name in NAMES]
    fit = [policy for policy in policies if not policy.rolling and not (chunk and policy.profiles)]
    return [(policy, budget, ()) for policy in fit for budget in BUDGETS]


@pytest.mark.filterwarnings("ignore:a budget of")
@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.slow), 17])
@pytest.mark.parametrize("tiny", ["llama", *SLOW])
def test_every_policy_ends_as_alone(tiny, chunk):
    check(tiny, every_policy(tiny, chunk), chunk)


@pytest.mark.filterwarnings("ignore:a budget of")
@pytest.mark.parametrize("chunk", [17, pytest.param(None, marks=pytest.mark.slow)])
def test_every_codec_ends_as_alone(chunk):
    grows = policy_for("llama", "snapkv", obs_window=8, after_prompt="grow")  # lets groups of tokens stay whole
    settings = [(grows, budget, codecs) for codecs in ((), *CODECS) for budget in BUDGETS]
    check("llama", [*settings, (policy_for("llama", "knorm"), BUDGETS[0], CODECS[0])], chunk)


@pytest.mark.parametrize("chunk", [None, 17])
def test_followers_never_hold_whole_prompts(chunk):
    """Looked at after each layer of the model: only what is to stay is there."""
    model, (text,) = tiny_model("llama"), prompts([70])
    held = []
    with ExitStack() as stack:
        sessions = [stack.enter_context(attach(model, policy_for("llama", "knorm"), Budget(tokens=n))) for n in (30, 20, 10)]
        leader, *caches = [session.new_cache() for session in sessions]
        for layer in model.model.layers:
            handle = layer.register_forward_hook(lambda *_: held.append([cache.memory().kv_bytes for cache in caches]))
            stack.callback(handle.remove)
        feed = Feed(model, leader, 1, 0)
        with leader.leading(caches):
            PROTOCOL.read_context(feed, [text.ids], chunk)
        end = [cache.memory().kv_bytes for cache in caches]
    assert all(now <= last for some in held for now, last in zip(some, end, strict=True))
    assert end[0] > end[1] > 0 and held


# ------------------------------------------------------------------------------------------------------------ sweeps

SWEEP = [*TINY, "runtime.batch_size=2", "budget.ratio=0.5,0.8", "--no-table"]
FAULTY = faulty_policy("faulty_leader")


@pytest.fixture
def prefills(monkeypatch):
    """How often a batch's prompts were read."""
    counted, read = [], PromptProtocol.read_context
    monkeypatch.setattr(PromptProtocol, "read_context", lambda *given: [counted.append(1), read(*given)])
    return counted


def numbers(folder):
    """All records and figures of memory by cell, without times and what the process held."""
    lines = {
        path: sorted((json.loads(line) for line in some), key=lambda r: r["id"]) for path, some in sample_lines(folder).items()
    }
    for record in (record for some in lines.values() for record in some):
        del record["speed"]
    process = ("peak_process_bytes", "peak_device_bytes")
    held = {path: {k: v for k, v in one["memory"].items() if k not in process} for path, one in results(folder).items()}
    return lines, held, {path: one["metrics"] for path, one in results(folder).items()}


def test_sweep(tmp_path, monkeypatch, prefills):
    monkeypatch.chdir(tmp_path)
    sweep = ("run", "-m", *SWEEP, "policy=full,h2o,knorm,random")
    assert kvlab(*sweep, "runtime.share_prefill=false", "output_dir=alone") == 0
    assert len(prefills) == 7 * 2, "cells times batches"
    prefills.clear()
    assert kvlab(*sweep, "output_dir=together") == 0
    assert len(prefills) == 2 * 2, "those that count attention, and the others"
    assert numbers(tmp_path / "together") == numbers(tmp_path / "alone")
    prefills.clear()
    finished = sorted((tmp_path / "together").rglob("result.json"))
    for file in finished[:4]:  # as if interrupted: after the second sample, or the first, or before any
        file.unlink()
    for file, left in zip(finished[1:4], (2, 2, 0), strict=True):
        lines = file.with_name("samples.jsonl").read_text().splitlines(keepends=True)
        file.with_name("samples.jsonl").write_text("".join(lines[:left]))
    assert kvlab(*sweep, "output_dir=together") == 0
    assert numbers(tmp_path / "together") == numbers(tmp_path / "alone")
    assert 2 <= len(prefills) <= 4


def test_a_cell_that_fails_leaves_the_others(tmp_path, monkeypatch):
    """The first of its bundle too, whose cache is the model's; that one behind others may fail is seen in test_run.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty.py").write_text(FAULTY)
    assert kvlab("run", "-m", *SWEEP, "policy=knorm,tova", "runtime.share_prefill=false", "output_dir=alone") == 0
    sweep = ("run", "-m", *SWEEP, "policy=faulty_leader,knorm,tova", "--import", "faulty.py", "output_dir=together")
    assert kvlab(*sweep) == 1
    found = results(tmp_path / "together")
    faulty = [path for path in found if found[path]["policy"] == "faulty_leader"]
    assert len(faulty) == 2
    for path in faulty:
        assert found[path]["error"] == "RuntimeError: no score today"
        assert "faulty.py" in (tmp_path / "together" / path / "error.txt").read_text()
        shutil.rmtree(tmp_path / "together" / path)
    assert numbers(tmp_path / "together") == numbers(tmp_path / "alone")
