"""Codecs at work on whole models through `attach`: what must not change, what is refused, and one layer against the reference.

Groups and residuals are small, so that prompts of some sixty tokens fill several; windows are of 24 tokens.
"""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import set_seed

from conftest import random_ids, shared_model
from contracts.helpers import (
    GREEDY,
    PAD,
    Feed,
    assert_near,
    assert_true_positions,
    kv_heads_of,
    layers_of,
    padded,
    policy_for,
    positions_of,
    rows_of,
    stock_cache,
    storages,
    talk,
    tensors_in,
    windows_of,
)
from contracts.test_isolation import assert_same_state, state_of
from kvlab import Budget, attach, make_policy
from kvlab.cache.layer import KVLayer
from kvlab.codecs import CodecError, make_codec
from kvlab.policies import policy_names
from kvlab.tiny import tiny_families, tiny_tokenizer
from naive_codecs import NaiveCodecCache, attention

KIVI = {"group": 4, "residual": 12}
THINK = {"obs_window": 8, "recent": 6}
CODECS = {
    "kivi2": lambda: make_codec("kivi", **KIVI),
    "kivi4": lambda: make_codec("kivi", bits=4, **KIVI),
    "int4": lambda: make_codec("int"),
    "int by channel": lambda: make_codec("int", axis="channel", group=4),
    "think": lambda: make_codec("think", **THINK),
    "think+kivi2": lambda: (make_codec("think", **THINK), make_codec("kivi", **KIVI)),
}
CHAINS = ("kivi2", "int4", "think", "think+kivi2")
WIDE = torch.float64
"""Where two ways of computing the same are compared: a number on the border of two codes gets either in float32, and then all
that follows differs; in float64 none is that near."""


def models(*fast):
    """All families, these on each push."""
    return pytest.mark.parametrize(
        "tiny", [f if f in fast else pytest.param(f, marks=pytest.mark.slow) for f in tiny_families()]
    )


def models_and_codecs(*fast, codecs=("kivi2", "int4")):
    """All families with these codecs; on each push some, written family-codec."""
    pairs = [(f"{tiny}-{codec}", tiny, codec) for tiny in tiny_families() for codec in codecs]
    assert set(fast) <= {name for name, *_ in pairs}
    marked = [pytest.param(*pair, id=name, marks=[] if name in fast else pytest.mark.slow) for name, *pair in pairs]
    return pytest.mark.parametrize(("tiny", "codec"), marked)


@contextmanager
def coded(tiny, codec, policy="full", budget=None, dtype=torch.float32, **settings):
    """A session of a tiny model and a codec, by names."""
    codec = CODECS[codec]() if isinstance(codec, str) else codec
    made = policy_for(tiny, policy, **settings)
    model = shared_model(tiny) if dtype == torch.float32 else shared_model(tiny, dtype)
    with attach(model, made, budget, codec=codec, tokenizer=tiny_tokenizer()) as session:
        yield session


def feed_of(session, batch=1, **options):
    return Feed(session.model, session.new_cache(**options), batch)


def stores(cache):
    return [layer.store for layer in cache.layers]


def encoded(cache):
    """Tokens encoded: [layer][side] (batch, kv_heads)."""
    return [[side.encoded.tolist() for side in store.sides] for store in stores(cache)]


# ------------------------------------------------------------------------------------------------- what must not change


@models("llama", "opt", "gemma3", "mistral_swa")
def test_codes_of_16_bits_change_next_to_nothing(tiny):
    model, (prompt, more) = shared_model(tiny), talk(2, 60, 12)
    stock = Feed(model, stock_cache(model), 2)
    expected = torch.cat([stock(prompt), stock.each(more)], 1)
    with coded(tiny, make_codec("int", bits=16)) as session:
        feed = feed_of(session, 2)
        assert_near(torch.cat([feed(prompt), feed.each(more)], 1), expected, 1e-3)
        for counts, store in zip(encoded(feed.cache), stores(feed.cache), strict=True):
            assert counts == [store.lengths.tolist()] * 2, "not all is encoded"
    with coded(tiny, "kivi2") as session:  # 2 bits do, or else none of this would mean anything
        feed = feed_of(session, 2)
        assert float((torch.cat([feed(prompt), feed.each(more)], 1) - expected).abs().max()) > 0.01


@models("llama", "gemma3")
def test_nothing_is_encoded_within_the_residual(tiny):
    model, (prompt, more) = shared_model(tiny), talk(2, 40, 12)
    stock = Feed(model, stock_cache(model), 2)
    expected = torch.cat([stock(prompt), stock.each(more)], 1)
    with coded(tiny, make_codec("kivi")) as session:
        feed = feed_of(session, 2)
        assert_near(torch.cat([feed(prompt), feed.each(more)], 1), expected)
        assert not np.any(encoded(feed.cache))


@models_and_codecs("opt-kivi2", "gemma3-int4")
def test_the_attention_of_a_prompt_is_exact(tiny, codec):
    (prompt,) = talk(2, 60)
    with coded(tiny, codec) as session:
        assert_near(feed_of(session, 2)(prompt), Feed(session.model, stock_cache(session.model), 2)(prompt))


@models_and_codecs("opt-int4", "gemma3-kivi2")
def test_the_model_is_as_before(tiny, codec):
    model, ids = shared_model(tiny), random_ids(1, 60)
    stock, before = model(ids).logits, state_of(model)
    with coded(tiny, codec) as session:
        model.generate(ids, cache=session.new_cache(), max_new_tokens=3, **GREEDY)
        assert torch.equal(model(ids).logits, stock)
    assert_same_state(before, state_of(model))
    assert torch.equal(model(ids).logits, stock)


# -------------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
@models_and_codecs("llama-kivi2", "gemma3-kivi2", "opt-int4", "llama-think+kivi2", codecs=CHAINS)
def test_padded_rows_equal_their_prompts_alone(tiny, codec, side):
    """One prompt is shorter than the residual; a second turn has pads too."""
    rows, more = rows_of(60, 43, 9), rows_of(7, 21, 13, seed=1)
    ids, mask = padded(rows, side)
    later, later_mask = padded(more, side)
    with coded(tiny, codec, dtype=WIDE) as session:
        feed = feed_of(session, 3)
        prompt = feed(ids, mask)
        last = torch.stack([logits[real.bool()][-1] for logits, real in zip(prompt, mask, strict=True)])
        tokens, logits = feed.greedy(last, 14)
        second = feed(later, later_mask)
        for row, alone in enumerate(rows):
            single = feed_of(session)
            expected_tokens, expected = single.greedy(single(alone)[:, -1], 14)
            assert tokens[row].tolist() == expected_tokens[0].tolist()
            assert_near(logits[row], expected[0], 1e-9)
            assert_near(second[row][later_mask[row].bool()], single(more[row])[0], 1e-9)
            assert positions_of(feed.cache, row) == positions_of(single.cache, 0)
            for together, apart in zip(encoded(feed.cache), encoded(single.cache), strict=True):
                assert [counts[row] for counts in together] == [counts[0] for counts in apart]


@models_and_codecs("llama-kivi2", codecs=CHAINS)
def test_generate(tiny, codec):
    """Greedy equals one call a token; samples of one prompt equal those of a repeated prompt."""
    ids, mask = padded(rows_of(40, 33), "left")
    sampling = {"do_sample": True, "max_new_tokens": 14, "pad_token_id": PAD, "eos_token_id": None, "temperature": 2.0}
    with coded(tiny, codec, dtype=WIDE) as session:
        out = session.model.generate(ids, attention_mask=mask, cache=session.new_cache(), max_new_tokens=14, **GREEDY)
        feed = feed_of(session, 2)
        assert out[:, 40:].tolist() == feed.greedy(feed(ids, mask)[:, -1], 14)[0].tolist()
        found = []
        for repeats, more in ((1, {"num_return_sequences": 2}), (2, {}), (1, {"num_return_sequences": 2})):
            set_seed(0)
            inputs = {"inputs": ids.repeat_interleave(repeats, 0), "attention_mask": mask.repeat_interleave(repeats, 0)}
            found.append(session.model.generate(**inputs, cache=session.new_cache(), **sampling, **more))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@models_and_codecs("llama-kivi2", codecs=CHAINS)
def test_beams_score_what_their_tokens_score(tiny, codec):
    ids, mask = padded(rows_of(40, 31), "left")
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 14, "output_scores": True}
    with coded(tiny, codec, dtype=WIDE) as session:
        cache = session.new_cache()
        out = session.model.generate(ids, attention_mask=mask, cache=cache, return_dict_in_generate=True, **options)
        assert bool((out.beam_indices[:, :14] % 3 != torch.arange(3).repeat(2)[:, None]).any()), "no beam changed its place"
        for row in range(2):
            answers = out.sequences[3 * row : 3 * row + 3, 40:]
            feed = feed_of(session, 3)
            prompt = rows_of(40, 31)[row].expand(3, -1)
            logits = torch.cat([feed(prompt)[:, -1:], feed.each(answers[:, :-1])], 1).log_softmax(-1)
            scores = logits.gather(2, answers[..., None])[..., 0].mean(1)
            assert_near(scores, out.sequences_scores[3 * row : 3 * row + 3], 1e-6)  # added up in float32


@models_and_codecs("mistral_swa-kivi2", codecs=CODECS)
def test_reordered_rows(tiny, codec):
    """Rows of different lengths taken in another order, one twice, go on as the sequences that they are."""
    rows, order = rows_of(50, 33, 20), torch.tensor([2, 0, 0, 1])
    steps, more = talk(3, 5, 14, seed=1)
    with coded(tiny, codec, dtype=WIDE) as session:
        feed = feed_of(session, 3)
        feed(*padded(rows, "left"))
        feed.each(steps)
        feed.cache.reorder_cache(order)
        feed.mask = feed.mask[order]
        logits = feed.each(more[order])
        for row, source in enumerate(order.tolist()):
            single = feed_of(session)
            single(rows[source])
            single.each(steps[source : source + 1])
            assert_near(logits[row : row + 1], single.each(more[source : source + 1]), 1e-9)


# ----------------------------------------------------------------------------------------------- turns, forks, one by one


@models_and_codecs("gemma3-kivi2", codecs=CHAINS)
def test_forks(tiny, codec):
    prompt, first, second = talk(2, 50, 14, 14)
    with coded(tiny, codec, dtype=WIDE) as session:
        feed = feed_of(session, 2)
        feed(prompt)
        runs = []
        for policy in (None, make_policy("full")):
            fork = Feed(session.model, feed.cache.fork(policy), 2)
            fork.mask = feed.mask
            assert not storages(tensors_in(stores(fork.cache))).keys() & storages(tensors_in(stores(feed.cache))).keys()
            runs.append(fork.each(first))
        assert torch.equal(*runs)
        other = feed_of(session, 2)
        other(prompt)
        assert torch.equal(feed.each(second), other.each(second)), "a fork changed what it was made from"
        other = feed_of(session, 2)
        other(prompt)
        assert torch.equal(other.each(first), runs[0])


@pytest.mark.parametrize(("codec", "name"), [("int4", "streaming_llm"), ("kivi2", "snapkv")])
def test_a_fork_under_no_budget_holds_on_to_all(codec, name):
    prompt, steps = talk(1, 60, 14)
    settings = {"after_prompt": "grow", "obs_window": 4} if name == "snapkv" else {}
    with coded("llama", codec, name, Budget(tokens=20), **settings) as session:
        feed = feed_of(session)
        feed(prompt)
        fork = Feed(session.model, feed.cache.fork(make_policy("full")))
        fork.mask, kept = feed.mask, feed.cache.kept_positions()
        fork.each(steps)
        for before, after in zip(kept, fork.cache.kept_positions(), strict=True):
            assert after == [[[*head, *range(60, 74)] for head in row] for row in before]
        assert feed.cache.kept_positions() == kept
        assert feed.cache.memory().kv_bytes < fork.cache.memory().kv_bytes


@models_and_codecs("gemma3-kivi2", "opt-int4", "llama-think", codecs=CHAINS)
def test_chunks_make_one_turn(tiny, codec):
    """Nothing is encoded before the turn ends, in whatever chunks it comes."""
    prompt, more = talk(2, 60, 14)
    with coded(tiny, codec, dtype=WIDE) as session:
        feed, whole = feed_of(session, 2), feed_of(session, 2)
        with feed.cache.turn():
            chunks = []
            for piece in prompt.split([25, 1, 34], 1):
                chunks.append(feed(piece))
                assert not np.any(encoded(feed.cache))
        assert_near(torch.cat(chunks, 1), whole(prompt), 1e-9)
        assert encoded(feed.cache) == encoded(whole.cache)
        assert feed.cache.kept_positions() == whole.cache.kept_positions()
        assert_near(feed.each(more), whole.each(more), 1e-9)


@models_and_codecs("llama-kivi2")
def test_steps_from_the_first_token_on(tiny, codec):
    (ids,) = talk(2, 40)
    with coded(tiny, codec, dtype=WIDE) as session:
        single, many = feed_of(session, 2), feed_of(session, 2)
        with single.cache.stepwise():
            expected = single.each(ids)
        with many.cache.stepwise():
            assert_near(torch.cat([many(piece) for piece in ids.split([25, 1, 14], 1)], 1), expected, 1e-9)
        assert encoded(many.cache) == encoded(single.cache)
        plain = feed_of(session, 2)
        assert_near(plain.each(ids), expected, 1e-9)


def test_a_cache_that_was_reset_is_as_new():
    prompt, more = talk(2, 50, 14)
    with coded("llama", "kivi2") as session:
        feed = feed_of(session, 2)
        expected = torch.cat([feed(prompt), feed.each(more)], 1)
        feed.cache.reset()
        assert feed.cache.memory().kv_bytes == 0
        again = Feed(session.model, feed.cache, 2)
        assert torch.equal(torch.cat([again(prompt), again.each(more)], 1), expected)


# ------------------------------------------------------------------------------------------------------ sliding windows


@pytest.mark.parametrize(
    ("tiny", "codec"),
    [
        ("mistral_swa", "kivi2"),
        *(pytest.param("gemma3", codec, marks=pytest.mark.slow) for codec in ("int4", "kivi2", "int by channel")),
    ],
)
def test_tokens_outside_the_window_leave_as_whole_groups(tiny, codec, monkeypatch):
    """A prompt within the window, then many steps: the same as if nothing left, since nobody sees what has left."""
    prompt, more = talk(2, 20, 50)
    with coded(tiny, codec, dtype=WIDE) as session:
        windows = windows_of(session.model)
        feed = feed_of(session, 2)
        logits = [feed(prompt)]
        for token in more.split(1, 1):
            logits.append(feed(token))
            seen = int(feed.cache.seen_len[0])
            for store, window in zip(stores(feed.cache), windows, strict=True):
                most = seen if window is None else min(seen, window + (0 if codec == "int4" else 3))
                assert (store.lengths <= most).all(), "more than the window and a part of a group"
        for layer, window in zip(feed.cache.kept_positions(), windows, strict=True):
            assert all(set(range(70 - (window or 70), 70)) <= set(head) for row in layer for head in row)
        if codec == "int4":  # tokens leave one by one there: the codec has no part in it
            return
        monkeypatch.setattr(KVLayer, "_expire", lambda *args: None)
        whole = feed_of(session, 2)
        assert_near(torch.cat(logits, 1), torch.cat([whole(prompt), whole.each(more)], 1), 1e-9)
        assert whole.cache.kept_len.min() == 70
        assert feed.cache.memory().kv_bytes < whole.cache.memory().kv_bytes


class WindowedNaive(NaiveCodecCache):
    """The reference under a sliding window. Before anything is encoded, the oldest tokens that no later one sees leave:
    as many as are whole groups on both sides, or all that are encoded and any others.
    """

    def __init__(self, codec, window, scaling):
        super().__init__(codec.bits, codec.group, codec.residual, codec.key_axis, codec.value_axis, scaling)
        self.window, self.seen, self.first = window or 10**6, 0, 0

    def event(self, kind, keys, values, queries=None):
        self.keys.insert(keys)
        self.values.insert(values)
        self.seen += keys.shape[1]
        out = self._attend(queries)
        gone = max(0, self.seen - self.window - self.first)
        while not all(self._can_leave(side, gone) for side in (self.keys, self.values)):
            gone -= 1
        for side in (self.keys, self.values):
            self._drop(side, gone)
        self.first += gone
        self.keys.seal()
        self.values.seal()
        return out

    def _attend(self, queries):
        held, count = (self.keys.held(), self.values.held()), queries.shape[1]
        outs = []
        for i in range(count):
            position = self.seen - count + i
            seen = slice(max(0, position - self.window + 1 - self.first), position + 1 - self.first)
            outs.append(attention(queries[:, i : i + 1], held[0][:, seen], held[1][:, seen], self.scaling)[0])
        return np.concatenate(outs, 1)

    @staticmethod
    def _can_leave(side, count):
        held = sum(unit.stop - unit.start for unit in side.units)
        return count >= held or count % (side.group if side.axis == "channel" else 1) == 0

    @staticmethod
    def _drop(side, count):
        while side.units and count:
            unit = side.units.pop(0)
            count -= unit.stop - unit.start
        side.full = side.full[count:]


@pytest.fixture
def seen_by_layers(monkeypatch):
    """All that layers are given and what they answer: (layer, query, key, value, padding, rule, output)."""
    calls, attend = [], KVLayer.attend

    def watched(layer, query, key, value, padding, rule):
        output = attend(layer, query, key, value, padding, rule)
        calls.append((layer.layer_idx, *(x.numpy().copy() for x in (query, key, value)), padding, rule, output.numpy().copy()))
        return output

    monkeypatch.setattr(KVLayer, "attend", watched)
    return calls


AXES = {
    "keys by channel": {},
    "keys by token": {"key_axis": "token"},
    "values by channel": {"value_axis": "channel"},
    "the other way round": {"key_axis": "token", "value_axis": "channel"},
}


@pytest.mark.parametrize(
    ("tiny", "axes"),
    [
        ("llama", "keys by channel"),
        ("mistral_swa", "keys by channel"),
        *(pytest.param(t, axes, marks=pytest.mark.slow) for t in ("opt", "mistral_swa", "qwen3", "gpt_neox") for axes in AXES),
    ],
)
def test_a_layer_equals_the_reference(tiny, axes, seen_by_layers):
    """Queries, keys and values of a real layer, over a padded prompt, 40 steps, a second turn and steps again."""
    codec = make_codec("kivi", **KIVI, **AXES[axes])
    rows, more = rows_of(46, 13), rows_of(9, 15, seed=1)
    steps, last = talk(2, 40, 6, seed=2)
    with coded(tiny, codec) as session:
        feed = feed_of(session, 2)
        feed(*padded(rows, "left"))
        feed.each(steps)
        feed(*padded(more, "right"))
        feed.each(last)
        layer = 1
        heads = kv_heads_of(session.model)
        naive = [WindowedNaive(codec, windows_of(session.model)[layer], None) for _ in range(2)]
        for index, query, key, value, padding, rule, output in seen_by_layers:
            if index != layer:
                continue
            for row, reference in enumerate(naive):
                reference.scaling = rule.scaling
                real = slice(None) if padding is None else padding[row].bool().numpy()
                kind = "step" if query.shape[2] == 1 else "turn"
                wanted = reference.event(kind, key[row][:, real], value[row][:, real], query[row][:, real])
                np.testing.assert_allclose(output[row][:, real], wanted, atol=1e-5 * max(1, abs(wanted).max()))
        store = feed.cache.layers[layer].store
        for row, reference in enumerate(naive):
            assert store.lengths[row].tolist() == [reference.seen - reference.first] * heads
            for side, expected in zip(store.sides, (reference.keys, reference.values), strict=True):
                assert side.recent.lengths[row].tolist() == [len(expected.full)] * heads


# -------------------------------------------------------------------------------------------------------------- policies

INDEPENDENT = ("streaming_llm", "random", "knorm")
"""Their scores don't look at attention: a prompt leaves what it leaves without a codec."""
TOKENS = 30


def int4_bytes(model):
    """Bytes of an encoded token of one head, key and value: 4 bits a number, a scale and a zero for each 32."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * (dim // 2 + 4 * -(-dim // 32))


@pytest.mark.filterwarnings("ignore:a budget of")
@models("llama")
@pytest.mark.parametrize("name", policy_names())
def test_every_policy_holds_its_budget_in_codes_of_4_bits(tiny, name):
    """Bytes of encoded tokens for a token more than the budget at most, and none in full precision."""
    model, rows, (steps, more) = shared_model(tiny), rows_of(60, 47), talk(2, 12, 20, seed=1)
    small = {field: value for field, value in {"obs_window": 4, "kernel": 3}.items() if field in vars(make_policy(name))}
    with coded(tiny, "int4", name, Budget(tokens=TOKENS), **small) as session:
        feed = feed_of(session, 2)
        per_token = int4_bytes(model) * kv_heads_of(model) * 2
        for piece in ((*padded(rows, "left"),), *((token,) for token in steps.split(1, 1)), (more,), (more[:, :1],)):
            feed(*piece)
            memory, policy = feed.cache.memory(), session.policy
            assert_true_positions(feed.cache, feed.cache.seen_len.tolist())
            assert not any(side.recent.lengths.any() for store in stores(feed.cache) for side in store.sides)
            if policy.evicts and policy.holds_budget_after_prompt:
                kept = feed.cache.kept_len.float().mean(2).sum(0)
                assert (kept <= layers_of(model) * TOKENS).all()
                assert memory.kv_bytes <= layers_of(model) * (TOKENS + 1) * per_token
                assert memory.kv_bytes >= int(feed.cache.kept_len.sum()) * int4_bytes(model)


@pytest.mark.parametrize("name", INDEPENDENT)
@models("llama")
def test_kept_sets_are_those_without_a_codec(tiny, name):
    """Where scores don't come from attention: after a prompt in all layers, at steps in all that read the same keys."""
    rows, (steps,) = rows_of(60, 47), talk(2, 12, seed=1)
    kept = []
    for codec in ("int4", ()):
        with coded(tiny, codec, name, Budget(tokens=TOKENS)) as session:
            feed = feed_of(session, 2, sample_ids=["a", "b"])
            feed(*padded(rows, "left"))
            kept.append([feed.cache.kept_positions()])
            for token in steps.split(1, 1):
                feed(token)
                kept[-1].append(feed.cache.kept_positions())
    layers = 1 if name == "knorm" else None  # keys of later layers follow from attention to decoded keys
    assert kept[0][0] == kept[1][0]
    assert [layer[:layers] for layer in kept[0]] == [layer[:layers] for layer in kept[1]]


@pytest.mark.parametrize("codec", ["kivi2", "int by channel"])
@pytest.mark.parametrize("name", [name for name in policy_names() if name != "full"])
def test_policies_that_drop_single_tokens_are_refused_for_groups(name, codec):
    policy = make_policy(name)
    says = f"policy {name} drops single tokens.*codec=int4.*policy=full"
    with pytest.raises(CodecError, match=says) as refusal, coded("llama", codec, name, Budget(tokens=TOKENS)):
        pass
    assert "\n" not in str(refusal.value)
    assert ("policy.after_prompt=grow" in str(refusal.value)) == hasattr(policy, "after_prompt")


def test_what_keeps_tokens_for_a_while_is_refused_too():
    """A residual in front of plain integers: a token can't leave before it is encoded."""
    with pytest.raises(CodecError, match="h2o drops single tokens"), coded("llama", make_codec("int", residual=8), "h2o"):
        pass


@pytest.mark.parametrize("name", ["snapkv", pytest.param("pyramidkv", marks=pytest.mark.slow), "adakv"])
@models("llama", "gemma3")
def test_a_prompt_evicted_before_it_is_encoded(tiny, name):
    """after_prompt=grow with KIVI: kept as without a codec, then encoded; decoded tokens join them and wait for their group."""
    rows, (steps,) = rows_of(60, 47), talk(2, 16, seed=1)
    settings = {"after_prompt": "grow", "obs_window": 4, "kernel": 3}
    caches = []
    for codec in ("kivi2", ()):
        with coded(tiny, codec, name, Budget(tokens=24), **settings) as session:
            feed = feed_of(session, 2)
            feed(*padded(rows, "left"))
            caches.append(feed.cache.kept_positions())
            lengths = feed.cache.kept_len
            feed.each(steps)
            full = [layer for layer, window in enumerate(windows_of(session.model)) if window is None]
            assert torch.equal(feed.cache.kept_len[full], lengths[full] + 16)
            if codec:
                for store in stores(feed.cache):
                    keys, values = (side.recent.lengths for side in store.sides)
                    assert (keys < 12).all()
                    assert (values <= 12).all()
                    assert np.any(store.sides[0].encoded)
    shown = [layer for layer, window in enumerate(windows_of(session.model)) if window is None]
    assert [caches[0][layer] for layer in shown] == [caches[1][layer] for layer in shown]


def test_a_second_turn_that_would_break_groups_is_refused():
    prompt, more = talk(1, 60, 20)
    with coded("llama", "kivi2", "snapkv", Budget(tokens=24), after_prompt="grow", obs_window=4) as session:
        feed = feed_of(session)
        feed(prompt)
        with pytest.raises(
            ValueError, match=r"codec kivi2 .*holds earlier turns in groups.*codec=int4.*one turn only"
        ) as refusal:
            feed(more)
        assert "\n" not in str(refusal.value)
        with pytest.raises(RuntimeError, match="cache.reset"):
            feed(more)
        feed.cache.reset()
        Feed(session.model, feed.cache)(prompt)


def test_heads_encoded_together_lose_the_same():
    """Where they hold different tokens: a window takes as many of each, a later turn that would take others is refused."""
    prompt, steps, more = talk(2, 60, 40, 20)
    codec = make_codec("qaq", level="layer")
    with coded("gemma3", codec, "snapkv", Budget(ratio=0.5), after_prompt="grow", obs_window=4) as session:
        feed = feed_of(session, 2)
        feed(prompt)
        feed.each(steps)
        side = stores(feed.cache)[0].sides[0]
        first = np.arange(side.encoded.size).reshape(side.encoded.shape) + 15
        assert (side.droppable(first) == first[:, :1] // 16 * 16).all()
        with pytest.raises(ValueError, match="can't leave"):
            feed(more)


@pytest.mark.parametrize("tiny", ["llama", pytest.param("mistral_swa", marks=pytest.mark.slow)])
def test_rolling(tiny):
    """Keys are encoded without their rotation; codes of 16 bits give what no codec gives, and so do positions in 4 bits."""
    prompt, steps = talk(2, 60, 14)
    found = []
    for codec in ((), make_codec("int", bits=16), "int4"):
        with coded(tiny, codec, "streaming_llm", Budget(tokens=20), rolling=True) as session:
            feed = feed_of(session, 2)
            found.append((torch.cat([feed(prompt), feed.each(steps)], 1), feed.cache.kept_positions()))
    assert_near(found[1][0], found[0][0], 1e-3)
    assert found[0][1] == found[1][1] == found[2][1]
    assert float((found[2][0] - found[0][0]).abs().max()) > 1e-3


# ---------------------------------------------------------------------------------------------------------------- memory


@models_and_codecs("llama-kivi2", "gemma3-int4", codecs=CODECS)
def test_memory_is_what_a_walk_finds(tiny, codec):
    rows, (steps, more) = rows_of(60, 47), talk(2, 15, 20, seed=1)
    with coded(tiny, codec) as session:
        feed, peak = feed_of(session, 2), 0
        for piece in ((*padded(rows, "left"),), *((token,) for token in steps.split(1, 1)), (more,)):
            feed(*piece)
            memory = feed.cache.memory()
            planes = [p for s in stores(feed.cache) for side in s.sides for p in tensors_in(side) if p.dtype != torch.int64]
            assert memory.kv_bytes == sum(storages(planes).values())
            assert memory.kv_bytes == sum(sum(store.parts.values()) for store in stores(feed.cache))
            assert memory.kv_bytes == sum(row.kv_bytes for row in feed.cache.memory_by_row())
            peak = max(peak, memory.kv_bytes)
            assert memory.kv_bytes_peak >= peak


@pytest.mark.parametrize(
    "codec",
    [make_codec("decoquant", block=8), make_codec("qaq"), make_codec("qaq", level="layer")],
    ids=lambda codec: codec.label,
)
def test_bookkeeping_of_all_parts_is_counted(codec):
    """Indices and lengths of blocks, widths, outliers and windows too."""
    prompt, steps = talk(2, 30, 10)
    with coded("llama", codec) as session:
        feed = feed_of(session, 2)
        feed(prompt)
        feed.each(steps)
        for store in stores(feed.cache):
            assert store.kv_bytes + store.state_bytes == sum(storages(tensors_in(store)).values())


def test_the_peak_counts_what_waits_to_be_encoded():
    """A turn is in full precision until it ends, a token until it has attended."""
    prompt, steps = talk(1, 60, 1)
    with coded("llama", "int4", "streaming_llm", Budget(tokens=20)) as session:
        feed = feed_of(session)
        feed(prompt)
        token = 2 * 16 * 4  # a key and a value of a head in float32
        heads = kv_heads_of(session.model)
        assert feed.cache.memory().kv_bytes_peak >= 60 * heads * token
        feed.cache._peak = 0
        feed(steps)
        assert feed.cache.memory().kv_bytes_peak >= feed.cache.memory().kv_bytes + heads * token
