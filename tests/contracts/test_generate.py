"""Generate: greedy, sampling, beams, several sequences a prompt, early ends, long outputs; what can't be is refused."""

import pytest
import torch
from transformers import set_seed

from conftest import random_ids
from contracts.helpers import (
    GREEDY,
    PAD,
    UNREACHABLE,
    Feed,
    assert_holds,
    assert_near,
    assert_true_positions,
    attached,
    expected_hold,
    padded,
    policy_for,
    positions_of,
    rows_of,
    talk,
)
from kvlab import Budget, attach, make_policy
from kvlab.tiny import tiny_model

THINNED = 4
SMALL = Budget(tokens=40)
BEAMS = {**GREEDY, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 6, "output_scores": True}
FULL = {"return_dict_in_generate": True}


def prompt_of_two():
    return padded(rows_of(80, 66), "left")


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_greedy_equals_one_call_a_token(policy_name, family, model):
    ids, mask = prompt_of_two()
    with attached(model, family, policy_name, SMALL) as session:
        cache, manual = session.new_cache(), session.new_cache()
        out = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=8, output_logits=True, **GREEDY, **FULL)
        feed = Feed(model, manual, 2)
        last = feed(ids, mask)[:, -1]
        tokens, logits = feed.greedy(last, 8)
        older = session.new_cache()
        named = model.generate(ids, attention_mask=mask, past_key_values=older, max_new_tokens=8, **GREEDY)
    assert out.sequences[:, ids.shape[1] :].tolist() == tokens.tolist()
    assert_near(torch.stack(out.logits, 1), logits)
    assert torch.equal(named, out.sequences)
    assert older.kept_positions() == cache.kept_positions()
    assert cache.seen_len.tolist() == [87, 73]  # the last token is chosen, and never seen


def test_sampling(policy_name, family, model):
    """The same seed gives the same, another seed something else; several sequences a prompt equal a repeated prompt."""
    ids, mask = prompt_of_two()
    options = {"do_sample": True, "max_new_tokens": 8, "pad_token_id": PAD, "eos_token_id": None, "temperature": 2.0}
    with attached(model, family, policy_name, SMALL) as session:

        def sampled(seed, ids=ids, mask=mask, **more):
            set_seed(seed)
            cache = session.new_cache()
            return model.generate(ids, attention_mask=mask, cache=cache, **options, **more), cache

        several, cache = sampled(0, num_return_sequences=2)
        repeated, single = sampled(0, ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0))
        again, _ = sampled(0, num_return_sequences=2)
        other, _ = sampled(1, num_return_sequences=2)
    assert several.shape == (4, 88)
    assert torch.equal(several, repeated)
    assert cache.kept_positions() == single.kept_positions()
    assert torch.equal(several, again)
    assert not torch.equal(several, other)
    assert_true_positions(cache, [87, 87, 73, 73])


def test_beams_equal_stock_beams_under_an_unreachable_budget(policy_name, family, model):
    ids, mask = prompt_of_two()
    stock = model.generate(ids, attention_mask=mask, **BEAMS, **FULL)
    with attached(model, family, policy_name, UNREACHABLE) as session:
        ours = model.generate(ids, attention_mask=mask, cache=session.new_cache(), **BEAMS, **FULL)
    assert torch.equal(ours.sequences, stock.sequences)
    assert_near(ours.sequences_scores, stock.sequences_scores)


def test_beams_under_a_small_budget_score_what_their_tokens_score(policy_name, family, model):
    """Each returned sequence, fed again token by token, has the score that the search gave it: no beam's cache was mixed up."""
    ids, mask = prompt_of_two()
    with attached(model, family, policy_name, SMALL) as session:
        cache = session.new_cache()
        out = model.generate(ids, attention_mask=mask, cache=cache, **BEAMS, **FULL)
        assert_true_positions(cache, [85] * 3 + [71] * 3)
        assert bool((out.beam_indices[:, :6] % 3 != torch.arange(3).repeat(2)[:, None]).any()), "no beam changed its place"
        for sequence, score in enumerate(out.sequences_scores):
            row = sequence // 3
            prompt, answer = rows_of(80, 66)[row], out.sequences[sequence : sequence + 1, 80:]
            feed = Feed(model, session.new_cache())
            logits = torch.cat([feed(prompt)[:, -1:], feed.each(answer[:, :-1])], 1).log_softmax(-1)
            assert_near(logits.gather(2, answer[..., None]).sum() / answer.shape[1], score, 1e-4)


def test_reordered_rows_hold_what_their_tokens_leave(policy_name, family, model):
    """`reorder_cache` amid decoding: the rows afterwards equal runs of their own."""
    ids, steps, more = talk(3, 70, 3, 3)
    order = torch.tensor([2, 0, 0, 1, 2])
    with attached(model, family, policy_name, SMALL) as session:
        cache = session.new_cache()
        feed = Feed(model, cache, 3)
        feed(ids)
        feed.each(steps)
        cache.reorder_cache(order)
        feed.mask = feed.mask[order]
        logits = feed.each(more[order])
        for row, source in enumerate(order.tolist()):
            alone = session.new_cache()
            single = Feed(model, alone)
            single(ids[source : source + 1])
            single.each(steps[source : source + 1])
            assert_near(logits[row : row + 1], single.each(more[source : source + 1]), 1e-4)
            assert positions_of(cache, row) == positions_of(alone, 0)


def test_rows_that_finish_early_leave_the_others_alone(policy_name, family, model):
    ids, mask = prompt_of_two()
    with attached(model, family, policy_name, SMALL) as session:
        plain = model.generate(ids, attention_mask=mask, cache=session.new_cache(), max_new_tokens=12, **GREEDY)[:, 80:]
        assert plain.shape == (2, 12)
        candidates = [token for token in plain[0, 2:8].tolist() if token not in plain[1].tolist() and token not in plain[0, :2]]
        end = candidates[0] if candidates else int(plain[0, 2])
        cache = session.new_cache()
        options = {**GREEDY, "eos_token_id": end}
        out = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=12, **options)[:, 80:]
    for row in range(2):
        until = plain[row].tolist().index(end) + 1 if end in plain[row] else 12
        assert out[row, :until].tolist() == plain[row, : min(until, out.shape[1])].tolist()
        assert set(out[row, until:].tolist()) <= {PAD}
    assert end in out[0]
    assert_true_positions(cache, [80 + out.shape[1] - 1, 66 + out.shape[1] - 1])


def test_200_tokens_at_a_budget_of_64(policy_name, family, model):
    policy = policy_for(family, policy_name)
    ids = random_ids(1, 80)
    with attached(model, family, policy_name, Budget(tokens=64)) as session:
        cache = session.new_cache()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=201, **GREEDY)
        assert out.shape == (1, 281)
        assert cache.seen_len.tolist() == [280]
        if policy.holds_budget_after_prompt or not policy.evicts:
            # A split over layers is made for the prompt's length; without eviction everything within the window is held.
            hold = expected_hold(model, policy, 64, 80) if policy.evicts else expected_hold(model, policy, None, 280)
            assert_holds(cache, policy, hold)
        assert_true_positions(cache, [280])
        assert session.memory(cache).kept_fraction <= 1


def test_inputs_embeds(policy_name, family, model):
    policy = policy_for(family, policy_name)
    ids, mask = prompt_of_two()
    embedded = model.get_input_embeddings()(ids)
    with attached(model, family, policy_name, SMALL) as session:
        expected = model.generate(ids, attention_mask=mask, cache=session.new_cache(), max_new_tokens=5, **GREEDY)
        if "token_ids" in policy.needs or policy.keep_special:
            with pytest.raises(ValueError, match="input_ids, not inputs_embeds"):
                model(inputs_embeds=embedded, attention_mask=mask, cache=session.new_cache())
            return
        cache = session.new_cache()
        out = model.generate(inputs_embeds=embedded, attention_mask=mask, cache=cache, max_new_tokens=5, **GREEDY)
    assert torch.equal(out[:, -5:], expected[:, -5:])
    assert cache.seen_len.tolist() == [84, 70]


@pytest.mark.parametrize("how", ["argument", "config"])
def test_prefill_in_generates_own_chunks_is_refused(family, model, how):
    ids = random_ids(1, 40)
    options = {"prefill_chunk_size": 16}
    if how == "config":
        options = {"generation_config": _config(model, **options)}
    with attach(model, policy=policy_for(family, "h2o"), budget=SMALL) as session:
        with pytest.raises(ValueError, match=r"cache\.turn\(\)") as refusal:
            model.generate(ids, cache=session.new_cache(), max_new_tokens=3, **options)
        assert "\n" not in str(refusal.value)
        # Without a kvlab cache, generate does what it always did.
        assert model.generate(ids, max_new_tokens=3, pad_token_id=PAD, **options).shape[1] <= 43


@pytest.mark.parametrize("how", ["assistant", "lookup", "lookup_in_config"])
def test_assisted_decoding_is_refused(family, model, how):
    ids = random_ids(1, 40)
    options = {
        "assistant": {"assistant_model": model},
        "lookup": {"prompt_lookup_num_tokens": 2},
        "lookup_in_config": {"generation_config": _config(model, prompt_lookup_num_tokens=2)},
    }[how]
    with attach(model, policy=policy_for(family, "h2o"), budget=SMALL) as session:
        with pytest.raises(ValueError, match="assisted decoding") as refusal:
            model.generate(ids, cache=session.new_cache(), max_new_tokens=3, do_sample=False, **options)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("where", ["second argument", "model"])
@pytest.mark.parametrize(
    ("setting", "reason"), [("prefill_chunk_size", r"cache\.turn\(\)"), ("prompt_lookup_num_tokens", "(?i)assisted decoding")]
)
def test_refused_settings_are_found_wherever_generate_takes_them_from(where, setting, reason):
    model = tiny_model("llama")
    config = _config(model, **{setting: 8})
    positional = [random_ids(1, 40), config]
    if where == "model":
        model.generation_config = positional.pop()
    with attach(model, policy=make_policy("h2o"), budget=SMALL) as session, pytest.raises(ValueError, match=reason):
        model.generate(*positional, cache=session.new_cache(), max_new_tokens=3, do_sample=False)


def test_a_cache_can_not_be_rolled_back(model, family):
    with attach(model, policy=policy_for(family, "h2o"), budget=SMALL) as session:
        cache = session.new_cache()
        Feed(model, cache)(random_ids(1, 60))
        with pytest.raises(NotImplementedError, match="evicted tokens are gone"):
            cache.crop(-5)


def _config(model, **settings):
    config = type(model.generation_config)(**model.generation_config.to_dict())
    config.update(pad_token_id=PAD, eos_token_id=None, **settings)
    return config
