"""Protocols: what is read how, what a continuation sees, shared prefixes, and `stream` against a hand-written loop."""

import math

import pytest
import torch

import plain_loop
from conftest import random_ids, shared_model
from kvlab import Budget, attach, load_model, make_policy
from kvlab.embedded import is_fetched
from kvlab.evals.texts import embedded_text
from kvlab.protocol import Chunked, PromptProtocol, Reader, Stream
from kvlab.reading import Prompt
from kvlab.settings import SettingError

PROTOCOLS = {"prompt": PromptProtocol(), "stream": Stream(), "chunked": Chunked(chunk=7)}
EVERY_STEP = ("h2o", "streaming_llm", "tova", "knorm", "random", "full")


def row(length, seed=0):
    return tuple(random_ids(1, length, seed)[0].tolist())


def prompts(*lengths, question=3):
    return [Prompt(row(length, seed), question) for seed, length in enumerate(lengths)]


def session_for(policy="h2o", family="llama", **budget):
    return attach(shared_model(family), make_policy(policy), Budget(**(budget or {"ratio": 0.4})))


def scores(session, protocol, batch, continuations, **options):
    return Reader(session, protocol, **options).read(batch).score(continuations)


def close(one, other, digits=2e-5):
    return all(math.isclose(a, b, abs_tol=digits * 10) for a, b in zip(one.logprobs, other.logprobs, strict=True))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("policy", ["h2o", "random", "snapkv"])
def test_a_batch_gives_what_each_prompt_gives_alone(policy, protocol, family):
    if protocol == "stream" and policy == "snapkv":
        pytest.skip("refused")
    batch, gold = prompts(31, 18, 44), [row(6, 10), row(3, 11), row(5, 12)]
    with attach(shared_model(family), make_policy(policy, **SHORT.get(policy, {})), Budget(ratio=0.4)) as session:
        together = scores(session, PROTOCOLS[protocol], batch, gold)
        for prompt, ids, scored in zip(batch, gold, together, strict=True):
            (alone,) = scores(session, PROTOCOLS[protocol], [prompt], [ids])
            assert close(alone, scored), (alone.logprobs, scored.logprobs)
            assert alone.top1 == scored.top1


SHORT = {"snapkv": {"obs_window": 4, "kernel": 3}}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_full_gives_what_one_plain_forward_gives(protocol):
    model = shared_model("llama")
    batch, gold = prompts(20, 9), [row(5, 10), row(5, 11)]
    with attach(model, make_policy("full")) as session:
        scored = scores(session, PROTOCOLS[protocol], batch, gold)
    for prompt, ids, found in zip(batch, gold, scored, strict=True):
        whole = torch.tensor([[*prompt.ids, *ids]])
        logprobs = model(whole, use_cache=False).logits[0].log_softmax(-1)
        wanted = [logprobs[len(prompt.ids) + place - 1, token].item() for place, token in enumerate(ids)]
        assert found.logprobs == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o"])
@pytest.mark.parametrize("budget", [5, 12])
def test_stream_equals_a_hand_written_loop(policy, budget):
    model, ids = shared_model("llama"), row(48)
    compare_stream(model, ids, policy, budget, prompt_len=9, each=2e-4, mean=2e-5)


@pytest.mark.embedded
@pytest.mark.parametrize("policy", [pytest.param("streaming_llm", marks=pytest.mark.slow), "h2o"])
def test_stream_equals_a_hand_written_loop_on_real_text(policy):
    if not is_fetched():
        pytest.skip("the embedded model isn't fetched (make setup)")
    model, tokenizer = load_model("smollm2-135m")
    ids = tuple(tokenizer(embedded_text().text[:2000]).input_ids[:90])
    compare_stream(model, ids, policy, 24, prompt_len=1, each=1e-3, mean=1e-5)


def compare_stream(model, ids, policy, budget, prompt_len, each, mean):
    """Kept sets and the log-probability of each token after the prompt, against stock attention and an eviction by hand."""
    wanted, kept = plain_loop.stream(model, list(ids), policy, budget)
    wanted = wanted[prompt_len - 1 :]
    prompt = Prompt(ids[:prompt_len], text_len=len(ids))
    with attach(model, make_policy(policy), Budget(tokens=budget)) as session:
        reading = Reader(session, Stream()).read([prompt])
        (scored,) = reading.score([ids[prompt_len:]])
        reading.feed([ids[-1:]])  # the loop evicts after the last token too
        positions = reading.feed.cache.kept_positions()
    assert [list(layer[0]) for layer in positions] == kept
    differences = [ours - theirs for ours, theirs in zip(scored.logprobs, wanted, strict=True)]
    assert max(map(abs, differences)) < each
    assert abs(sum(differences) / len(differences)) < mean
    with attach(model, make_policy("full")) as session:  # eviction does change these numbers
        (full,) = Reader(session, Stream()).read([prompt]).score([ids[prompt_len:]])
    assert max(abs(a - b) for a, b in zip(full.logprobs, wanted, strict=True)) > 0.1


def test_stream_takes_its_ratio_of_the_whole_known_text():
    ids = row(40)
    with session_for("streaming_llm", ratio=0.5) as session:
        reading = Reader(session, Stream()).read([Prompt(ids[:1], text_len=40)])
        reading.score([ids[1:]])
        assert reading.feed.cache.kept_len.unique().tolist() == [20]


@pytest.mark.parametrize("hold_back", [1, 3, 8])
def test_prompt_compresses_all_but_what_is_held_back(hold_back):
    """The ratio is of the whole prompt; what follows the compressed part is read token by token."""
    model, ids, gold = shared_model("llama"), row(30), row(4, 9)
    with attach(model, make_policy("h2o"), Budget(ratio=0.4)) as session:
        (scored,) = scores(session, PromptProtocol(hold_back=hold_back), [Prompt(ids)], [gold])
    with attach(model, make_policy("h2o"), Budget(tokens=12)) as session:
        cache = session.new_cache()
        model(torch.tensor([ids[:-hold_back]]), cache=cache)
        wanted = []
        for place, token in enumerate([*ids[-hold_back:], *gold[:-1]], 1 - hold_back):
            logprobs = model(torch.tensor([[token]]), cache=cache).logits[0, -1].log_softmax(-1)
            wanted += [logprobs[gold[place]].item()] if place >= 0 else []
        assert cache.kept_len.unique().tolist() == [12]
    assert scored.logprobs == pytest.approx(wanted, abs=1e-4)


def test_chunked_evicts_after_each_chunk_to_the_budget_of_the_whole_prompt():
    model, ids, gold = shared_model("llama"), row(29), row(3, 9)
    with attach(model, make_policy("tova"), Budget(ratio=0.3)) as session:
        reading = Reader(session, Chunked(chunk=10, hold_back=2)).read([Prompt(ids)])
        kept = reading.feed.cache.kept_positions()
        (scored,) = reading.score([gold])
        long = [Prompt(row(150))]
        peaks = [Reader(session, one).read(long).memory()[1].kv_bytes_peak for one in (Chunked(chunk=10), PromptProtocol())]
        assert peaks[0] < peaks[1]
    with attach(model, make_policy("tova"), Budget(tokens=8)) as session:
        cache = session.new_cache()
        for start, end in ((0, 10), (10, 20), (20, 27)):
            model(torch.tensor([ids[start:end]]), cache=cache)
        model(torch.tensor([ids[27:28]]), cache=cache)
        assert cache.kept_positions() == kept
        logits = [model(torch.tensor([[token]]), cache=cache).logits[0, -1] for token in (ids[28], *gold[:-1])]
    wanted = [values.log_softmax(-1)[token].item() for values, token in zip(logits, gold, strict=True)]
    assert scored.logprobs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("prefill_chunk", [1, 5, 64])
def test_prefill_chunks_change_nothing(protocol, prefill_chunk):
    batch, gold = prompts(26, 11), [row(4, 10), row(4, 11)]
    with session_for("h2o") as session:
        whole = scores(session, PROTOCOLS[protocol], batch, gold)
        for one, other in zip(
            whole, scores(session, PROTOCOLS[protocol], batch, gold, prefill_chunk=prefill_chunk), strict=True
        ):
            assert close(one, other)


# ------------------------------------------------------------------------------------------- the trap of hold_back


def test_nothing_held_back_is_refused():
    with pytest.raises(SettingError, match="use at least 1"):
        PromptProtocol(hold_back=0)


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o", "snapkv", "knorm", "tova", "random", "adakv", "pyramidkv"])
def test_even_the_first_token_of_an_answer_sees_what_the_policy_left(policy):
    batch = [Prompt(row(60))]
    with attach(
        shared_model("llama"),
        make_policy(policy, **SHORT.get("snapkv" if "kv" in policy[1:] and policy != "knorm" else "", {})),
        Budget(tokens=6),
    ) as session:
        (evicted,) = scores(session, PromptProtocol(), batch, [row(1, 5)])
    with session_for("full") as session:
        (full,) = scores(session, PromptProtocol(), batch, [row(1, 5)])
    assert abs(evicted.logprobs[0] - full.logprobs[0]) > 1e-3


def test_the_question_is_held_back_where_there_is_one():
    marked, unmarked = Prompt(row(20), question=5), Prompt(row(20))
    assert (PromptProtocol().held(marked), PromptProtocol().held(unmarked)) == (5, 1)
    assert PromptProtocol(hold_back=50).held(marked) == 19
    assert not PromptProtocol().query_aware(marked)
    assert PromptProtocol(hold_back=2).query_aware(marked)
    assert not PromptProtocol(hold_back=2).query_aware(unmarked)
    assert not Stream().query_aware(marked)


def test_policies_that_decide_at_a_prompts_end_are_refused_under_stream():
    Stream().check(make_policy("h2o"), Budget())
    for name in ("snapkv", "fastgen"):
        with pytest.raises(SettingError, match="protocol=prompt"):
            Stream().check(make_policy(name), Budget())
    Chunked().check(make_policy("snapkv"), Budget())
    with pytest.raises(SettingError, match="protocol=prompt"):
        Chunked().check(make_policy("fastgen"), Budget())


# --------------------------------------------------------------------------------------- shared prefixes and forks


@pytest.mark.parametrize("policy", ["h2o", "random", "adakv"])
def test_prompts_that_share_a_context_read_it_once(policy):
    context = row(30)
    batch = [Prompt((*context, *row(4, seed)), question=4) for seed in (1, 2, 3)]
    gold = [row(3, seed) for seed in (4, 5, 6)]
    with attach(
        shared_model("llama"), make_policy(policy, **({"obs_window": 4} if policy == "adakv" else {})), Budget(tokens=9)
    ) as session:
        reader = Reader(session, PromptProtocol())
        reading = reader.read(batch)
        assert reading.prefill_tokens == 30
        together = reading.score(gold)
        alone = [reader.read([prompt]).score([ids])[0] for prompt, ids in zip(batch, gold, strict=True)]
    assert all(close(one, other) for one, other in zip(together, alone, strict=True))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("policy", ["h2o", "random"])
def test_the_order_of_choices_does_not_matter(policy, protocol):
    batch = prompts(25, 18)
    choices = [[row(2, 1), row(5, 2), row(3, 3)], [row(4, 4), row(1, 5)]]
    with session_for(policy) as session:
        reading = Reader(session, PROTOCOLS[protocol]).read(batch)
        forward = reading.score_choices(choices)
        backward = reading.score_choices([options[::-1] for options in choices])
        single = reading.fork().score([choices[0][1], choices[1][1]])
    for one, other in zip(forward, backward, strict=True):
        assert all(close(a, b) for a, b in zip(one, other[::-1], strict=True))
    assert close(forward[0][1], single[0]) and close(forward[1][1], single[1])


def test_generation_equals_decoding_by_hand_and_stops_at_the_end_token():
    model, batch = shared_model("llama"), prompts(22, 13)
    with session_for("h2o") as session:
        reader = Reader(session, PromptProtocol())
        outputs = reader.read(batch).generate(12)
        for prompt, output in zip(batch, outputs, strict=True):
            reading, token, wanted = reader.read([prompt]), prompt.ids[-1], []
            for _ in range(12):
                token = int(reading.feed([[token]], logits=True)[0, -1].argmax())
                if token == model.generation_config.eos_token_id:
                    break
                wanted.append(token)
            assert output == wanted
        end = outputs[0][4]
        before = model.generation_config.eos_token_id
        model.generation_config.eos_token_id = [end]
        try:
            shorter = reader.read(batch).generate(12)
        finally:
            model.generation_config.eos_token_id = before
        assert shorter[0] == outputs[0][: outputs[0].index(end)]


def test_what_each_row_holds_adds_up_to_what_the_batch_holds():
    with attach(shared_model("llama"), make_policy("adakv", obs_window=4), Budget(tokens=20)) as session:
        reading = Reader(session, PromptProtocol()).read(prompts(60, 41, 50))
        rows, batch = reading.memory()
        memory = reading.feed.cache.memory()
    assert sum(one.kv_bytes for one in rows) == memory.kv_bytes
    assert sum(one.kv_bytes_full for one in rows) == memory.kv_bytes_full
    assert sum(one.kept for one in rows) == int(memory.kept_len.sum())
    assert [one.seen for one in rows] == [59 * 4, 40 * 4, 49 * 4]  # 2 layers, 2 KV heads; the last token is not read yet
    assert batch.kv_bytes_peak == memory.kv_bytes_peak > memory.kv_bytes


def test_a_fork_under_another_policy_holds_on_to_what_is_held():
    with session_for("h2o", tokens=8) as session:
        reading = Reader(session, PromptProtocol()).read(prompts(30))
        kept = reading.feed.cache.kept_positions()
        fork = reading.fork(make_policy("full"))
        fork.feed([row(5, 7)])
        after = fork.feed.cache.kept_positions()
        assert reading.feed.cache.kept_positions() == kept
    assert [[[*head, *range(29, 34)] for head in layer[0]] for layer in kept] == [layer[0] for layer in after]
