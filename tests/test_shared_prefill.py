"""Sweeps at the price of one prefill: cells that share their prompts' forward pass end exactly as separate runs do."""

import json

import pytest
import torch

from contracts.helpers import EXACT, policy_for
from kvlab import Budget, attach, make_codec
from kvlab.policies import policy_names
from kvlab.protocol import PromptProtocol, Reader
from kvlab.reading import Prompt
from kvlab.tiny import tiny_model, tiny_tokenizer
from kvlab.together import prefill_together
from running import kvlab, results

LENGTHS = (70, 41, 70, 56)
BUDGETS = (Budget(ratio=0.7), Budget(tokens=36))
CODECS = ((), ("int4",), ("kivi2",), ("think",), ("qaq",), ("decoquant4",), ("think", "kivi2"))


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


def check(family, settings, lengths=LENGTHS, chunk=None, protocol=None, **model):
    """Each bundle that these (policy, budget, codecs) make, against separate runs. Returns how many forward passes it took."""
    model, protocol, passes = tiny_model(family, **model), protocol or PromptProtocol(), []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    bundles = {}
    for policy, budget, codecs in settings:
        bundles.setdefault(path_of(policy), []).append((policy, budget, codecs))
    with torch.inference_mode():
        for bundle in bundles.values():
            check_bundle(model, bundle, prompts(lengths), chunk, protocol, passes)
    hook.remove()


def check_bundle(model, bundle, texts, chunk, protocol, passes):
    from contextlib import ExitStack

    def session(policy, budget, codecs):
        codec = [make_codec(name) for name in codecs]
        return attach(model, policy, budget, codec=codec, tokenizer=tiny_tokenizer())

    wanted = []
    for settings in bundle:
        with session(*settings) as one:
            wanted.append(left_by(Reader(one, protocol, 0, chunk).read(texts)))
    with ExitStack() as stack:
        readers = [Reader(stack.enter_context(session(*settings)), protocol, 0, chunk) for settings in bundle]
        before = len(passes)
        shared = prefill_together(readers, texts)
        assert len(passes) - before == (1 if chunk is None else -(-(max(map(lambda p: len(p.ids), texts)) - 1) // chunk))
        for settings, one, other in zip(bundle, shared, wanted, strict=True):
            assert one.error is None, one.error
            assert_equal(left_by(one.reading()), other, str(settings))


def every_policy(family="llama"):
    names = [name for name in policy_names() if name not in EXACT or True]
    return [(policy_for(family, name), budget, ()) for name in names for budget in BUDGETS if not policy_for(family, name).rolling]


@pytest.mark.filterwarnings("ignore:a budget of")
@pytest.mark.parametrize("chunk", [None, 17])
def test_every_policy(chunk):
    settings = [one for one in every_policy() if chunk is None or not one[0].profiles]
    check("llama", settings, chunk=chunk)
