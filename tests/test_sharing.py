"""Layers that read another layer's cache: what they attend to, when decisions fall, what scores are of, and what is held."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from contracts.helpers import GREEDY, Feed, assert_near, padded, positions_of, rows_of, talk, windows_of
from kvlab import Budget, attach, make_codec, make_policy
from kvlab.kernels.dispatch import choose
from kvlab.protocol import PromptProtocol, Reader, Stream
from kvlab.reading import Prompt
from kvlab.sharing import FixedMap, Share, ShareError, make_share, map_of, register_share, resolve, share_class, share_names
from kvlab.tiny import tiny_model, tiny_tokenizer
from naive_codecs import NaiveCodecCache
from naive_sharing import CodedLoop, LentCache, Loop, at_work, merged

CHAIN = {3: 2, 2: 0}
"""Layers 0 and 1 hold, 0 is read by 2 and 3."""
RESOLVED = {2: 0, 3: 0}
WIDE = torch.float64


@functools.cache
def deep_model(tiny="llama", dtype=torch.float32, **overrides):
    return tiny_model(tiny, dtype=dtype, num_hidden_layers=4, **overrides)


def shared(model, policy="full", budget=None, share=CHAIN, codec=(), kernels="auto", **settings):
    made = make_policy(policy, **settings)
    return attach(model, made, budget or Budget(), codec=codec, share=share, tokenizer=tiny_tokenizer(), kernels=kernels)


SMALL = {
    **dict.fromkeys(("snapkv", "pyramidkv", "adakv"), {"obs_window": 4, "kernel": 3}),
    "scissorhands": {"obs_window": 7, "recent_window": 2},
    "hashevict": {"num_sink": 1, "recent_window": 2},
    "corm": {"obs_window": 7, "recent_window": 2},
}

# ------------------------------------------------------------------------------------------------------------ the map


def test_chains_end_at_the_layer_that_holds():
    assert resolve([(3, 2), (5, 3), (2, 0)]) == resolve([(5, 3), (2, 0), (3, 2)]) == resolve({2: 0, 3: 2, 5: 3})
    assert resolve({5: 3, 3: 2, 2: 0}) == {2: 0, 3: 0, 5: 0}
    assert resolve({1: 3, 3: 0}) == {1: 0, 3: 0}


@pytest.mark.parametrize(
    ("tiny", "share", "words"),
    [
        ("llama", {1: 2}, "layer 1 can't read layer 2, which comes after it"),
        ("llama", {2: 1, 1: 2}, "in a circle"),
        ("llama", {2: 2}, "leave out"),
        ("llama", {4: 0}, "there is no layer 4"),
        ("llama", FixedMap({-1: 0}), "there is no layer -1"),
        ("llama", FixedMap({3: 1.0}), "there is no layer 1.0"),
        ("gemma3", {3: 2}, "sliding windows differ"),
    ],
)
def test_pairs_that_cannot_be_are_refused(tiny, share, words):
    with pytest.raises(ShareError, match=words) as refused, shared(deep_model(tiny), share=share):
        pass
    assert "\n" not in str(refused.value)


def test_what_is_no_map_is_refused():
    with pytest.raises(ShareError, match="pass a way of sharing, or the pairs"):
        map_of("kvsharer", deep_model(), ())
    with pytest.raises(ShareError, match="can't read both layer 0 and layer 2"):
        resolve([(3, 0), (3, 2)])


def test_what_looks_at_single_layers_is_refused():
    for extra in ({"watch": print}, {"simulation": print}):
        with pytest.raises(ShareError, match="share"), attach(deep_model(), make_policy("full"), share=CHAIN, **extra):
            pass


def test_a_way_of_sharing_of_ones_own():
    @register_share("every_other")
    @dataclass(frozen=True)
    class EveryOther(Share):
        step: int = 2

        def layer_map(self, model, layers):
            return {layer: layer - layer % self.step for layer in range(len(layers)) if layer % self.step}

    assert "every_other" in share_names() and share_class("every_other") is EveryOther
    share = make_share("every_other", step=3)
    assert share.label == "every_other step=3"
    with shared(deep_model(), share=share) as session:
        assert session.plan.sources == {1: 0, 2: 0}
    with pytest.raises(ShareError, match="no setting 'stp'"):
        make_share("every_other", stp=3)


# ------------------------------------------------------------------------------------------------------ what is attended


@pytest.mark.parametrize(
    "tiny", ["llama", "opt", *[pytest.param(f, marks=pytest.mark.slow) for f in ("gemma2", "gpt_oss", "gpt_neox")]]
)
def test_a_layer_reads_anothers_keys_and_values(tiny):
    """Prompt, cached steps and a second prompt of a padded batch, against the stock cache with lent tensors."""
    model, pairs = deep_model(tiny), {"gemma2": {2: 0, 3: 1}, "gpt_oss": {2: 0, 3: 1}}.get(tiny, CHAIN)
    ids, mask = padded(rows_of(15, 11), "left")
    steps, turn = talk(2, 4, 3, seed=5)
    stock = Feed(model, LentCache(model, resolve(pairs)), 2)
    expected = [stock(ids, mask), stock.each(steps), stock(turn)]
    assert float((stock.model(ids, attention_mask=mask).logits - expected[0]).abs().max()) > 0.1, (
        "sharing must change something"
    )
    with shared(model, share=pairs) as session:
        feed = Feed(model, session.new_cache(), 2)
        found = [feed(ids, mask), feed.each(steps), feed(turn)]
        for one, other in zip(found, expected, strict=True):
            assert_near(one[:, -3:], other[:, -3:], 1e-4)


def test_the_order_of_pairs_does_not_matter():
    model, (ids, steps) = deep_model(), talk(1, 20, 4)
    found = []
    for pairs in ({3: 2, 2: 0}, {2: 0, 3: 2}, {2: 0, 3: 0}):
        with shared(model, "h2o", Budget(tokens=8), share=pairs) as session:
            feed = Feed(model, session.new_cache())
            found.append(torch.cat([feed(ids), feed.each(steps)], 1))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_without_pairs_nothing_changes():
    model, (ids, steps) = deep_model(), talk(1, 20, 4)
    found = []
    for pairs in (None, {}):
        with shared(model, "h2o", Budget(tokens=8), share=pairs) as session:
            feed = Feed(model, session.new_cache())
            found.append(
                (torch.cat([feed(ids), feed.each(steps)], 1), feed.cache.kept_positions(), feed.cache.memory().as_dict())
            )
    assert torch.equal(found[0][0], found[1][0]) and found[0][1:] == found[1][1:]


def test_beams_equal_those_of_lent_tensors():
    model, (ids,) = deep_model(), talk(1, 12)
    options = {**GREEDY, "num_beams": 3, "max_new_tokens": 8}
    expected = model.generate(ids, cache=LentCache(model, RESOLVED), **options)
    with shared(model) as session:
        assert torch.equal(model.generate(ids, cache=session.new_cache(), **options), expected)


# ------------------------------------------------------------------------------------------- when and by what is decided


@pytest.mark.parametrize("group", ["mean", "max", pytest.param("first", marks=pytest.mark.slow)])
def test_a_decision_waits_for_the_last_reader(group):
    """H2O against a slow loop: prompt, steps, a second turn. Deciding before the readers have attended is another thing."""
    model, (prompt, steps, turn, more) = deep_model(dtype=WIDE), talk(1, 14, 5, 6, 3)
    found = {}
    for late in (True, False):
        loop = Loop(RESOLVED, budget=8, group=group, late=late)
        with at_work(model, loop) as feed:
            logits = [feed(prompt), *[feed(t) for t in steps.split(1, 1)], feed(turn), *[feed(t) for t in more.split(1, 1)]]
        found[late] = torch.cat(logits, 1), loop.positions(4)
    with shared(model, "h2o", Budget(tokens=8), group=group) as session:
        feed = Feed(model, session.new_cache())
        logits = torch.cat([feed(prompt), feed.each(steps), feed(turn), feed.each(more)], 1)
        assert_near(logits, found[True][0], 1e-9)
        assert positions_of(feed.cache, 0) == found[True][1]
        assert float((logits - found[False][0]).abs().max()) > 0.01
        assert group != "mean" or found[True][1] != found[False][1]


def test_readers_vote():
    """SnapKV's kept set is by the last queries of all readers."""
    model, (prompt, steps) = deep_model(dtype=WIDE), talk(1, 16, 2)
    loop, early = (Loop(RESOLVED, budget=9, rule="votes", late=late) for late in (True, False))
    with at_work(model, early) as feed:
        feed(prompt)
    with at_work(model, loop) as feed:
        expected = torch.cat([feed(prompt), *[feed(t) for t in steps.split(1, 1)]], 1)
    settings = {"obs_window": 4, "kernel": 1, "after_prompt": "grow"}
    with shared(model, "snapkv", Budget(tokens=9), **settings) as session:
        feed = Feed(model, session.new_cache())
        assert_near(torch.cat([feed(prompt), feed.each(steps)], 1), expected, 1e-9)
        assert positions_of(feed.cache, 0) == loop.positions(4)
        assert [sorted(set(head) & set(range(16))) for head in positions_of(feed.cache, 0)[0]] != early.positions(4)[0]


@pytest.mark.parametrize("tiny", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@pytest.mark.parametrize("group", ["mean", "max", "first", "sum"])
def test_the_mass_of_a_shared_store_is_of_all_its_readers(tiny, group):
    """Against the weights that the model itself gives with lent keys; gpt_oss has sinks, each layer its own."""
    model, pairs = deep_model(tiny, attn_implementation="eager"), {"llama": CHAIN, "gpt_oss": {2: 0, 3: 1}}[tiny]
    sources, (prompt, steps) = resolve(pairs), talk(2, 14, 4)
    cache, mass = LentCache(model, sources), [torch.zeros(2, 2, 18) for _ in range(4)]
    for ids in (prompt, *steps.split(1, 1)):
        weights = [one.unflatten(1, (2, -1)) for one in model(ids, cache=cache, output_attentions=True).attentions]
        for layer in sorted(set(range(4)) - set(sources)):
            readers = [layer, *[target for target, source in sorted(sources.items()) if source == layer]]
            joint = torch.cat([weights[reader] for reader in readers], 2)  # (batch, kv_heads, members, queries, slots)
            mass[layer][..., : joint.shape[-1]] += merged(joint.movedim(2, 0), group).sum(2)
    for kernels in ("auto", "reference"):
        with shared(model, "h2o", Budget(tokens=100), share=pairs, group=group, kernels=kernels) as session:
            feed = Feed(model, session.new_cache(), 2)
            feed(prompt)
            feed.each(steps)
            for layer in feed.cache.layers:
                if layer.store is not None:
                    view = layer.store.view()
                    assert_near(view.state["mass"].gather(-1, view.positions.argsort(-1)), mass[layer.layer_idx], 1e-4)


# ------------------------------------------------------------------------------------------------------- what is held


@pytest.mark.parametrize("tiny", ["llama", *[pytest.param(f, marks=pytest.mark.slow) for f in ("opt", "gemma3", "gpt_oss")]])
def test_every_policy_runs_and_targets_hold_nothing(policy_name, tiny):
    """Or a codec refuses it, as it does without sharing. A prompt, steps, a second turn, more steps, on a fork too."""
    (prompt, steps, turn), model = talk(2, 24, 3, 9), deep_model(tiny)
    pairs, heads = (CHAIN if windows_of(model)[0] is None else {2: 0, 3: 1}), 4 if tiny == "opt" else 2
    settings = SMALL.get(policy_name, {}) | ({"rolling": False} if tiny == "opt" else {})
    policy = make_policy(policy_name, **settings)
    for codec in ((), make_codec("int", bits=4), make_codec("kivi", bits=2, residual=32)):
        try:
            with shared(model, policy_name, Budget(tokens=12), pairs, codec, **settings) as session:
                feed = Feed(session.model, session.new_cache(), 2)
                feed(prompt)
                feed.each(steps)
                fork = Feed(session.model, feed.cache.fork(), 2)
                fork.mask, other = feed.mask, fork.cache
                first, second = ((one(turn), one.each(steps)) for one in (feed, fork))
                assert all(torch.equal(one, same) for one, same in zip(first, second, strict=True)), "a fork is the same"
                kept, memory = other.kept_len, session.memory(other)
                assert (kept[2:] == 0).all() and (kept[:2] > 0).all()
                assert all(layer.store is None for layer in other.layers[2:])
                if not policy.ragged and policy.drops and policy_name != "scissorhands":
                    assert (
                        int(kept.sum()) == round(memory.kept_fraction * int(other.seen_len.sum()) * 4 * heads) <= 12 * 4 * heads
                    )
                assert [row == [[]] * heads for layer in other.kept_positions() for row in layer] == [False] * 4 + [True] * 4
                assert memory.kv_bytes == sum(row.kv_bytes for row in other.memory_by_row())
                assert [len(row["kept_len"]) for row in other.heads_by_row()] == [4, 4]
        except ValueError as error:
            assert codec and "\n" not in str(error) and codec.name in str(error), error


def test_bytes_are_those_of_the_layers_that_hold():
    model, (ids,) = deep_model(), talk(2, 20)
    for pairs, holding in (({}, 4), ({3: 1}, 3), (CHAIN, 2)):
        with shared(model, share=pairs) as session:
            cache = session.new_cache()
            model(ids, cache=cache)
            memory = session.memory(cache)
            assert memory.kv_bytes * 4 == memory.kv_bytes_full * holding
            assert memory.kept_fraction == holding / 4
            assert cache.memory_by_row()[0].kept * 4 == cache.memory_by_row()[0].seen * holding
    token = session.plan.layers[0].token_bytes
    with shared(model, "pyramidkv", Budget(bytes=2 * 12 * token), obs_window=4, kernel=3) as session:  # of one sequence
        cache = session.new_cache()
        model(ids, cache=cache)
        assert (
            cache.kept_len[:, 0].tolist()
            == [[n, n] for n in make_policy("pyramidkv", obs_window=4).layer_budget(12, 2, 20)] + [[0, 0]] * 2
        )


def test_a_codec_encodes_when_the_last_reader_has_attended():
    model, (prompt, steps) = deep_model(dtype=WIDE), talk(1, 34, 4)
    loop = CodedLoop(RESOLVED, lambda: NaiveCodecCache(2, 32, 32, "channel", "token"))
    with at_work(model, loop) as feed:
        expected = torch.cat([feed(prompt), *[feed(t) for t in steps.split(1, 1)]], 1)
    with shared(model, codec=make_codec("kivi", bits=2, residual=32)) as session:
        feed = Feed(model, session.new_cache())
        assert_near(torch.cat([feed(prompt), feed.each(steps)], 1), expected, 1e-6)
        assert feed.cache.layers[0].store.sides[0].encoded.min() == 32


# --------------------------------------------------------------------------------------------------- batches and calls


@pytest.mark.parametrize(
    "policy", ["h2o", pytest.param("snapkv", marks=pytest.mark.slow), pytest.param("hashevict", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_padded_rows_equal_their_prompts_alone(policy, side):
    rows, more = rows_of(22, 13), rows_of(9, 4, seed=1)
    (ids, mask), (later, later_mask) = padded(rows, side), padded(more, side)
    with shared(deep_model(dtype=WIDE), policy, Budget(tokens=10), **SMALL.get(policy, {})) as session:
        feed = Feed(session.model, session.new_cache(), 2)
        last = torch.stack([logits[real.bool()][-1] for logits, real in zip(feed(ids, mask), mask, strict=True)])
        tokens, logits = feed.greedy(last, 4)
        second = feed(later, later_mask)
        for row, alone in enumerate(rows):
            single = Feed(session.model, session.new_cache())
            assert_near(logits[row], single.greedy(single(alone)[:, -1], 4)[1][0], 1e-9)
            assert_near(second[row][later_mask[row].bool()], single(more[row])[0], 1e-9)
            assert positions_of(feed.cache, row) == positions_of(single.cache, 0)


@pytest.mark.parametrize(
    "policy", ["h2o", "hashevict", *[pytest.param(p, marks=pytest.mark.slow) for p in ("snapkv", "corm", "fastgen")]]
)
def test_chunks_of_a_prompt_change_nothing(policy):
    model, (ids, steps) = deep_model(dtype=WIDE), talk(1, 24, 3)
    with shared(model, policy, Budget(tokens=10), **SMALL.get(policy, {})) as session:
        whole, parts = Feed(model, session.new_cache()), Feed(model, session.new_cache())
        expected = whole(ids)
        with parts.cache.turn():
            found = torch.cat([parts(part) for part in ids.split(7, 1)], 1)
        assert_near(found, expected, 1e-9)
        assert_near(parts.each(steps), whole.each(steps), 1e-9)
        assert parts.cache.kept_positions() == whole.cache.kept_positions()


@pytest.mark.parametrize(
    "policy", ["h2o", *[pytest.param(p, marks=pytest.mark.slow) for p in ("full", "streaming_llm", "corm", "hyde")]]
)
def test_known_texts_are_scored_as_generation_would_read_them(policy):
    """Calls have as many tokens as can come before one leaves, and one each from there on."""
    prompts = [Prompt(tuple(row[0].tolist())) for row in rows_of(20, 13)]
    answers = [tuple(row[0].tolist()) for row in rows_of(9, 12, seed=3)]
    with shared(deep_model(dtype=WIDE), policy, Budget(tokens=16), **SMALL.get(policy, {})) as session:
        for protocol in (PromptProtocol, Stream):
            found = []
            for exact in ("scan", "step"):
                reading = Reader(session, protocol(exact=exact)).read(prompts, [12, 12])
                found.append(([one.logprobs for one in reading.score(answers)], reading.feed.cache.kept_positions()))
            for one, other in zip(found[0][0], found[1][0], strict=True):
                assert_near(torch.tensor(one), torch.tensor(other), 1e-9)
            assert found[0][1] == found[1][1]


def test_a_call_with_more_tokens_than_can_come_is_refused():
    model, (ids, more) = deep_model(), talk(1, 10, 8)
    with shared(model, "h2o", Budget(tokens=12)) as session:
        feed = Feed(model, session.new_cache())
        feed(ids)
        assert feed.cache.step_tokens(8) == 2
        with feed.cache.stepwise(), pytest.raises(ValueError, match=r"layer 0 is read by .* give one token a call"):
            feed(more)
    with shared(model, "h2o", Budget(tokens=12), share=None) as session:
        assert session.new_cache().step_tokens(8) == 8


def test_a_prompt_is_decided_as_steps_would():
    """HashEvict compares with the source's queries alone, at a prompt's end as at steps, where the others aren't known yet."""
    model, (ids,), kept = deep_model(), talk(1, 24), []
    for protocol in (PromptProtocol(), Stream()):
        with shared(model, "hashevict", Budget(tokens=10), **SMALL["hashevict"]) as session:
            reading = Reader(session, protocol).read([Prompt((*ids[0].tolist(), 7))])
            kept.append(reading.feed.cache.kept_positions()[0])
    assert kept[0] == kept[1]


def test_a_pass_without_the_last_reader_is_noticed():
    model, (ids,) = deep_model(), talk(1, 10)
    with shared(model) as session:
        cache = session.new_cache()
        model.config.num_hidden_layers = 3
        try:
            with pytest.raises(ValueError, match="not all layers that read the cache of layer 0"):
                model(ids, cache=cache)
        finally:
            model.config.num_hidden_layers = 4


def test_an_error_before_the_last_reader_is_noticed():
    model, (ids, more) = deep_model(), talk(1, 10, 1)

    def fail(module, args):
        raise KeyboardInterrupt

    with shared(model, "h2o", Budget(tokens=8)) as session:
        feed = Feed(model, session.new_cache())
        handle = model.model.layers[3].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            feed(ids)
        handle.remove()
        with pytest.raises(RuntimeError, match="failed midway"):
            feed(more)
        feed.cache.reset()
        again, fresh = Feed(model, feed.cache), Feed(model, session.new_cache())
        assert torch.equal(again(ids), fresh(ids)) and torch.equal(again(more), fresh(more))


def test_half_precision_and_later_rows():
    """bfloat16 runs; rows of a batch can be taken, repeated and forked with another policy."""
    model, (ids, steps) = deep_model(dtype=torch.bfloat16), talk(2, 20, 3)
    with shared(model, "h2o", Budget(tokens=10)) as session:
        feed = Feed(model, session.new_cache(), 2)
        assert feed(ids).isfinite().all() and feed.each(steps).isfinite().all()
        assert feed.cache.kept_len.tolist() == [[[10, 10]] * 2] * 2 + [[[0, 0]] * 2] * 2
        feed.cache.reorder_cache(torch.tensor([1, 1, 0]))
        feed.mask = feed.mask[[1, 1, 0]]
        logits = feed(steps[:1, :1].expand(3, 1))
        assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
        full = Feed(model, feed.cache.fork(make_policy("full")), 3)
        full.mask = feed.mask
        full(ids[:1, :4].expand(3, 4))
        assert full.cache.kept_len.tolist() == [[[14, 14]] * 3] * 2 + [[[0, 0]] * 3] * 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["streaming_llm", "h2o", "snapkv"])
@pytest.mark.parametrize("codec", [None, "int4"])
def test_keys_placed_anew(policy, codec):
    """rolling: readers' queries are placed as the source's; chunks and steps agree with the whole."""
    model, (ids, steps) = deep_model(dtype=WIDE), talk(1, 24, 4)
    coding = () if codec is None else make_codec("int", bits=4)
    with shared(model, policy, Budget(tokens=50), codec=coding, rolling=True, **SMALL.get(policy, {})) as session:
        feed = Feed(model, session.new_cache())
        found = torch.cat([feed(ids), feed.each(steps)], 1)
    lent = Feed(model, LentCache(model, RESOLVED))
    expected = torch.cat([lent(ids), lent.each(steps)], 1)
    assert_near(found[:, : 24 if codec else None], expected[:, : 24 if codec else None], 1e-9)  # codes of keys come later


@pytest.mark.slow
def test_a_codec_of_whole_layers():
    model, (ids, steps) = deep_model(), talk(2, 40, 6)
    lent = Feed(model, LentCache(model, RESOLVED), 2)
    expected = [lent(ids), lent.each(steps)]
    with shared(model, codec=make_codec("decoquant", bits=8)) as session:
        feed = Feed(model, session.new_cache(), 2)
        assert_near(feed(ids), expected[0], 1e-4)
        assert float((feed.each(steps) - expected[1]).abs().max()) < 0.3


@pytest.mark.slow
def test_a_codec_watches_the_attention_of_all_readers():
    """QAQ's bits are by the most that any of the last queries gave, of any reader."""
    model, (ids,) = deep_model(attn_implementation="eager"), talk(1, 20)
    weights = model(ids, cache=LentCache(model, RESOLVED), output_attentions=True).attentions
    codec = make_codec("qaq", dynamic=True)
    joint = torch.cat([weights[layer].unflatten(1, (2, -1)) for layer in (0, 2, 3)], 2)[..., -codec.window :, :]
    with shared(model, codec=codec) as session:
        feed = Feed(model, session.new_cache())
        feed(ids)
        found = feed.cache.layers[0].store.sides[1].attended.largest()
        assert_near(found.view(1, 2, 20), joint.amax((2, 3)), 1e-4)


@pytest.mark.slow
def test_layers_that_scale_in_their_own_way():
    config = GPT2Config(n_embd=64, n_layer=4, n_head=4, scale_attn_by_inverse_layer_idx=True, attn_implementation="eager")
    torch.manual_seed(0)
    model, (ids,) = AutoModelForCausalLM.from_config(config).eval(), talk(1, 14)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2) if parameter.dim() > 1 else None
    lent = model(ids, cache=LentCache(model, RESOLVED), output_attentions=True)
    joint = torch.cat([lent.attentions[layer].unflatten(1, (4, -1)) for layer in (0, 2, 3)], 2)
    with shared(model, "h2o", Budget(tokens=100)) as session:
        feed = Feed(model, session.new_cache())
        assert_near(feed(ids), lent.logits, 1e-4)
        assert_near(feed.cache.layers[0].store.view().state["mass"], joint.mean(2).sum(2), 1e-4)
    with shared(model, "snapkv", Budget(tokens=6), obs_window=4, kernel=1) as session:
        feed = Feed(model, session.new_cache())
        with feed.cache.turn():
            feed(ids)
            layer = feed.cache.layers[0]
            view = layer.store.view()
            ((votes, _),) = layer.voters.looks(view.keys, view.positions, layer.rule)
            assert_near(votes, joint[..., -4:, :], 1e-4)


@pytest.mark.slow
def test_keys_held_without_rotation():
    model, (ids, steps) = deep_model(dtype=WIDE), talk(1, 24, 4)
    lent = Feed(model, LentCache(model, RESOLVED))
    expected = torch.cat([lent(ids), lent.each(steps)], 1)
    with shared(model, codec=make_codec("decoquant", bits=8, rope="pre")) as session:
        feed = Feed(model, session.new_cache())
        assert_near(feed(ids), expected[:, :24], 1e-9)
        assert float((feed.each(steps) - expected[:, 24:]).abs().max()) < 0.3


def test_windows_may_be_shared():
    """Layers with the same window: the oldest leave the window once all readers have attended."""
    model, (ids, steps) = deep_model("gemma3"), talk(1, 30, 3)
    assert windows_of(model)[0] == windows_of(model)[2] == 24
    with shared(model, share={2: 0}) as session:
        assert choose("auto", "cpu", torch.float32).name != "reference"
        feed = Feed(model, session.new_cache())
        lent = Feed(model, LentCache(model, {2: 0}))
        assert_near(feed(ids), lent(ids), 1e-4)
        assert_near(feed.each(steps), lent.each(steps), 1e-4)
        assert feed.cache.kept_len[0].tolist() == [[24, 24]] and feed.cache.kept_len[2].tolist() == [[0, 0]]
