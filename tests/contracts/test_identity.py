"""Identity: with a budget that is never reached, a kvlab cache gives what the stock cache gives."""

import pytest
import torch

from conftest import random_ids, shared_model
from contracts.helpers import (
    UNREACHABLE,
    Feed,
    assert_near,
    attached,
    fresh_model,
    padded,
    policy_for,
    rows_of,
    stock_cache,
)
from kvlab import Budget, attach

THINNED = 4


def conversation(feed):
    """Logits of real tokens in a left-padded prompt of two, three decoded tokens, a second turn, and one more token."""
    ids, mask = padded(rows_of(70, 47), "left")
    logits = [feed(ids, mask)[mask.bool()]]
    logits += [feed.each(random_ids(2, 3, seed=1)).flatten(0, 1)]
    logits += [feed(random_ids(2, 30, seed=2)).flatten(0, 1)]  # no pads: stock sliding windows count pads amid tokens
    return torch.cat([*logits, feed(random_ids(2, 1, seed=3))[:, 0]])


@pytest.fixture(scope="module")
def stock_conversation():
    """The stock cache's conversation with each model, once."""
    known = {}

    def of(family):
        if family not in known:
            model = shared_model(family)
            known[family] = conversation(Feed(model, stock_cache(model), 2))
        return known[family]

    return of


@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(UNREACHABLE, id="tokens"),
        pytest.param(Budget(), id="none", marks=pytest.mark.slow),
        pytest.param(Budget(ratio=1.0), id="ratio"),
    ],
)
def test_logits_equal_the_stock_cache(policy_name, family, model, budget, stock_conversation):
    with attached(model, family, policy_name, budget) as session:
        cache = session.new_cache()
        if budget.ratio:  # of the prompt: reached by the first decoded token, so the prompt alone is compared
            ids, mask = padded(rows_of(70, 47), "left")
            logits = Feed(model, cache, 2)(ids, mask)[mask.bool()]
        else:
            logits = conversation(Feed(model, cache, 2))
            assert cache.seen_len.tolist() == [70 + 3 + 30 + 1, 47 + 3 + 30 + 1]
    # 1e-5 of the largest logit (about 7), since float32 rounds relative to size.
    assert_near(logits, stock_conversation(family)[: len(logits)])


def test_prompt_in_bfloat16_is_as_close_as_rounding_allows(policy_name, family):
    ids, mask = padded(rows_of(70, 47), "left")
    exact = Feed(shared_model(family), None, 2)(ids, mask)[mask.bool()]
    model = shared_model(family, torch.bfloat16)
    stock = Feed(model, stock_cache(model), 2)(ids, mask)[mask.bool()].float()
    with attached(model, family, policy_name, UNREACHABLE) as session:
        ours = Feed(model, session.new_cache(), 2)(ids, mask)[mask.bool()].float()
    rounding = (stock - exact).square().mean().sqrt()
    assert (ours - exact).square().mean().sqrt() <= 1.2 * rounding
    assert (ours - stock).square().mean().sqrt() <= 1.2 * rounding


def model_with(family, implementation):
    if implementation == "sdpa" and not type(shared_model(family))._supports_sdpa:
        pytest.skip(f"{family} has no sdpa in transformers")
    return fresh_model(family, attn_implementation=implementation)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_calls_without_a_kvlab_cache_are_bit_equal_to_stock(family, implementation):
    model = model_with(family, implementation)
    ids, mask = padded(rows_of(70, 47), "left")

    def outputs():
        yield model(ids, attention_mask=mask, use_cache=False).logits
        yield model(ids, use_cache=False).logits
        yield model(ids).logits
        feed = Feed(model, stock_cache(model), 2)
        yield feed(ids, mask)
        yield feed.each(random_ids(2, 2, seed=1))
        yield feed(random_ids(2, 9, seed=2))
        yield model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        yield model.generate(ids, attention_mask=mask, max_new_tokens=5, num_beams=2, do_sample=False)

    stock = list(outputs())
    with attach(model, policy=policy_for(family, "h2o"), budget=Budget(tokens=8)):
        inside = list(outputs())
    assert [torch.equal(*pair) for pair in zip(inside, stock, strict=True)] == [True] * len(stock)


def test_attention_weights_and_gradients_inside_attach_are_stock(family):
    model = fresh_model(family, attn_implementation="eager")
    ids = random_ids(2, 30)

    def outputs():
        with torch.enable_grad():
            embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
            logits = model(inputs_embeds=embedded, use_cache=False).logits
            gradient = torch.autograd.grad(logits.square().mean(), embedded)[0]
        return [gradient, *model(ids, use_cache=False, output_attentions=True).attentions]

    stock = outputs()
    with attach(model, policy=policy_for(family, "h2o"), budget=Budget(tokens=8)):
        inside = outputs()
    assert len(stock) == 1 + model.config.num_hidden_layers
    assert all(torch.equal(*pair) for pair in zip(inside, stock, strict=True))


def test_eager_and_sdpa_models_give_the_same_under_kvlab(family):
    ids = random_ids(2, 70)
    logits = []
    for implementation in ("eager", "sdpa"):
        model = model_with(family, implementation)
        with attached(model, family, "h2o", Budget(tokens=40)) as session:
            feed = Feed(model, session.new_cache(), 2)
            logits.append(torch.cat([feed(ids), feed.each(random_ids(2, 3, seed=1))], 1))
    assert torch.equal(*logits)
