"""All steps of a known text at once against one forward pass for each token: same tokens kept, same log-probabilities.

Every policy on tiny models of all families (GQA, windows, soft-cap, sinks), padded batches and later turns, at random cuts.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch

from conftest import shared_model
from contracts.helpers import Feed, attached, padded, positions_of, rows_of, talk
from kvlab import Budget, attach, load_model, make_policy
from kvlab.embedded import is_fetched
from kvlab.evals.texts import embedded_text
from kvlab.kernels import cpu
from kvlab.kernels.contract import ScanRule
from kvlab.kernels.dispatch import choose
from kvlab.kernels.reference import AttentionRule
from kvlab.policies import policy_class, register
from kvlab.policies.base import rule_of
from kvlab.policies.corm import CORM
from kvlab.policies.fastgen import MEMBERS as FASTGEN_MEMBERS
from kvlab.policies.h2o import H2O
from kvlab.policies.streaming_llm import StreamingLLM
from kvlab.protocol import Chunked, PromptProtocol, Reader, Stream
from kvlab.reading import Prompt

THINNED = 4
EVERY_STEP = ("corm", "full", "h2o", "hashevict", "hyde", "knorm", "random", "scissorhands", "streaming_llm", "tova")
SMALL = {
    **dict.fromkeys(("snapkv", "pyramidkv", "adakv"), {"obs_window": 4, "kernel": 3}),
    "scissorhands": {"obs_window": 7, "recent_window": 2, "drop_share": 0.5},
    "hashevict": {"num_sink": 1, "recent_window": 2},
    "hyde": {"action": "fade+evict"},
    "fastgen": {"threshold": 0.8, "members": FASTGEN_MEMBERS},
    "corm": {"obs_window": 7, "recent_window": 2},
}


def settings_of(name):
    return SMALL.get(name, {})


def cuts(total, seed):
    """A text of `total` tokens cut at random places."""
    generator = torch.Generator().manual_seed(seed)
    places = sorted(set(torch.randint(1, total, (4,), generator=generator).tolist()))
    return list(itertools.pairwise([0, *places, total]))


def conversation(session, seed, together, stream):
    """Padded prompts, a text token by token, another turn, another text. Log-probabilities of all texts, and the cache."""
    rows = rows_of(31, 18, 25, seed=seed)
    ids, mask = padded(rows, "left")
    texts = talk(3, 40, 6, 30, seed=seed + 1)
    cache = session.new_cache(known_len=[90, 80, 85], sample_ids=["a", "b", "c"])
    feed, found = Feed(session.model, cache, 3), []
    if stream:
        found += stepwise(feed, ids, seed, together, mask)
    else:
        feed(ids, mask)
    for number, text in enumerate(texts):
        if number == 1:
            with cache.turn():
                feed(text)
        else:
            found += stepwise(feed, text, seed + number, together)
    real = torch.cat([mask.bool()] * stream + [torch.ones_like(texts[n]).bool() for n in (0, 2)], 1)
    return torch.cat(found, 1).log_softmax(-1)[real], cache


def stepwise(feed, ids, seed, together, mask=None):
    """Logits of tokens that count as decoded: in a few calls, or in one for each."""
    mask = torch.ones_like(ids) if mask is None else mask
    parts = cuts(ids.shape[1], seed) if together else [(t, t + 1) for t in range(ids.shape[1])]
    with feed.cache.stepwise():
        return [feed(ids[:, start:end], mask[:, start:end]) for start, end in parts]


def compare(model, family, name, budget, seed, stream=False, **settings):
    found = {}
    for kernels, together in (("auto", True), ("auto", False), ("reference", False)):
        options = {**settings_of(name), **settings}
        with attached(model, family, name, budget, kernels=kernels, **options) as session:
            logprobs, cache = conversation(session, seed, together, stream)
            found[kernels, together] = logprobs, [positions_of(cache, row) for row in range(3)], cache.memory().kv_bytes
    scan, *others = found.values()
    for logprobs, kept, _ in others:
        assert kept == scan[1]
        assert (logprobs - scan[0]).abs().max() < 1e-4
    assert others[0][2] == others[1][2]  # bytes held; a scan may leave rows without a limit more or less room to grow
    return scan


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("budget", [Budget(tokens=12), Budget(ratio=0.3)], ids=["tokens", "ratio"])
def test_scan_equals_steps(policy_name, family, model, budget, seed):
    _, kept, _ = compare(model, family, policy_name, budget, seed)
    held = {len(head) for row in kept for layer in row for head in layer}
    assert policy_name == "full" or max(held) < 95  # something was evicted


@pytest.mark.parametrize("name", EVERY_STEP)
def test_scan_equals_steps_from_the_first_token_on(name, family, model):
    compare(model, family, name, Budget(ratio=0.2), seed=7, stream=True)


VARIANTS = {
    "first": ("h2o", {"group": "first"}),
    "max": ("h2o", {"group": "max"}),
    "sum": ("h2o", {"group": "sum"}),
    "only heavy": ("h2o", {"heavy_share": 1.0}),
    "only recent": ("h2o", {"heavy_share": 0.0}),
    "sinks and recent": ("tova", {"num_sink": 2, "recent_window": 3}),
    "special": ("h2o", {"keep_special": True}),
    "special snapkv": ("snapkv", {"keep_special": True}),
    "grow": ("snapkv", {"after_prompt": "grow"}),
    "rolling": ("streaming_llm", {"rolling": True}),
    "rolling hashes": ("hashevict", {"rolling": True}),
    "low, window longer than the text": ("scissorhands", {"obs_window": 200}),
    "high": ("scissorhands", {"count": "high", "group": "max"}),
    "of held, one at a time": ("scissorhands", {"threshold": "held", "drop_share": 0.0, "num_sink": 4}),
    "special scissorhands": ("scissorhands", {"keep_special": True, "group": "first"}),
    "key probes": ("hashevict", {"probe": "key", "bits": 64}),
    "recent prompt": ("hashevict", {"prompt": "recent", "bits": 5}),
    "special hashes": ("hashevict", {"keep_special": True, "bits": 32}),
    "only fade": ("hyde", {"action": "fade", "window_share": 0.0}),
    "only evict": ("hyde", {"action": "evict", "power": 0.5, "norm_weight": 1.0}),
    "sinks don't fade": ("hyde", {"num_sink": 2, "recent_window": 3, "decay": 0.8, "min_decay": 0.01}),
    "special hyde": ("hyde", {"keep_special": True, "group": "sum"}),
    "held corm": ("corm", {"threshold": "held", "group": "mean", "num_sink": 1}),
    "special corm": ("corm", {"keep_special": True, "obs_window": 3}),
    "l1 fastgen": ("fastgen", {"recovery": "l1", "threshold": 0.5}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_scan_equals_steps_with_other_settings(variant, kind):
    name, settings = VARIANTS[variant]
    compare(shared_model(kind), kind, name, Budget(tokens=14), seed=3, **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ["h2o", "streaming_llm", "knorm", "scissorhands", "hashevict", "hyde", "corm"])
def test_scan_equals_steps_in_half_precision(name, dtype):
    """Logits are rounded to the type, so they and what is kept may differ by that."""
    model, found = shared_model("llama", dtype), []
    for together in (True, False):
        with attached(model, "llama", name, Budget(tokens=12), **settings_of(name)) as session:
            logprobs, cache = conversation(session, 1, together, stream=False)
            found.append((logprobs.float(), cache.kept_len))
    assert torch.equal(found[0][1], found[1][1])
    assert (found[0][0] - found[1][0]).abs().median() < (0.05 if dtype == torch.bfloat16 else 0.01)


PROTOCOLS = {"prompt": PromptProtocol, "stream": Stream, "chunked": lambda **options: Chunked(chunk=20, **options)}


@pytest.mark.parametrize("protocol", ["prompt", "stream", pytest.param("chunked", marks=pytest.mark.slow)])
def test_protocols_give_the_same_both_ways(protocol, policy_name, family, model):
    if protocol == "stream" and policy_class(policy_name).when == "prompt_end":
        pytest.skip("refused")
    rows, gold = rows_of(40, 27), [tuple(row[0].tolist()) for row in rows_of(30, 19, seed=50)]
    prompts = [Prompt(tuple(row[0].tolist()), question=3, text_len=70) for row in rows]
    found = {}
    for exact in ("scan", "step"):
        with attached(model, family, policy_name, Budget(ratio=0.4), **settings_of(policy_name)) as session:
            reading = Reader(session, PROTOCOLS[protocol](exact=exact)).read(prompts)
            calls = []
            handle = model.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(args[0].shape[1]))
            scored = reading.score(gold)
            handle.remove()
            found[exact] = [one.logprobs for one in scored], reading.feed.cache.kept_positions()
            assert set(calls) == ({30} if exact == "scan" else {1})
    assert found["scan"][1] == found["step"][1]
    for one, other in zip(found["scan"][0], found["step"][0], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


FAST_ON_REAL_TEXT = ("h2o", "scissorhands")


@pytest.mark.embedded
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST_ON_REAL_TEXT else pytest.mark.slow) for name in EVERY_STEP]
)
def test_scan_equals_steps_on_real_text(name):
    if not is_fetched():
        pytest.skip("the embedded model isn't fetched (make setup)")
    model, tokenizer = load_model("smollm2-135m")
    ids = tuple(tokenizer(embedded_text().text[:3000]).input_ids[:120])
    found = {}
    for exact in ("scan", "step"):
        with attach(model, make_policy(name, **settings_of(name)), Budget(ratio=0.2)) as session:
            reading = Reader(session, Stream(exact=exact)).read([Prompt(ids[:1], text_len=len(ids))])
            found[exact] = reading.score([ids[1:]])[0].logprobs, reading.feed.cache.kept_positions()
    differences = [one - other for one, other in zip(found["scan"][0], found["step"][0], strict=True)]
    assert found["scan"][1] == found["step"][1]
    assert max(map(abs, differences)) < 1e-3
    assert abs(sum(differences) / len(differences)) < 1e-5


# ------------------------------------------------------------------------------------------- which back end runs what


def test_back_ends_by_device_and_type():
    assert choose("auto", "cpu", torch.float32).name == "cpu"
    assert choose("auto", "cpu", torch.float64).name == "reference"
    assert choose("reference", "cpu", torch.float32).evict_scan is None
    for wrong in (("cpu", "cpu", torch.float64), ("gpu", "cpu", torch.float32), ("fast", "cpu", torch.float32)):
        with pytest.raises(ValueError, match="use"):
            choose(*wrong)


def test_every_policy_of_kvlab_has_a_rule_but_not_while_rolling(policy_name):
    cls = policy_class(policy_name)
    if cls.__module__.startswith("kvlab."):
        assert (rule_of(cls()) is None) == (policy_name == "fastgen")
    assert rule_of(cls(rolling=True)) is None


def test_a_class_that_decides_otherwise_has_no_inherited_rule():
    @dataclass(frozen=True)
    class AtTheEnd(H2O):
        when = "prompt_end"

    @dataclass(frozen=True)
    class Once(StreamingLLM):
        once = True

        def score(self, step):
            return -step.positions.float()

    @dataclass(frozen=True)
    class OnceForTheLayer(Once):
        coupling = "layer"

    class Mixin:
        def score(self, step):
            return -step.mass

    @dataclass(frozen=True)
    class Mixed(Mixin, H2O):
        pass

    assert rule_of(AtTheEnd()).order == "ranked"
    assert rule_of(Once()) == ScanRule(order="value", plane="score")
    assert rule_of(OnceForTheLayer()).coupled and not rule_of(Once()).coupled
    assert rule_of(Mixed()) is None


def test_a_class_that_chooses_otherwise_has_no_inherited_rule():
    class Everything:
        def select(self, step):
            return step.positions >= 0

    @dataclass(frozen=True)
    class Patient(CORM):
        obs_window: int = 9

    @dataclass(frozen=True)
    class Other(Everything, CORM):
        pass

    @dataclass(frozen=True)
    class Chooser(Everything, H2O):
        pass

    @dataclass(frozen=True)
    class AtTheEnd(CORM):
        when = "prompt_end"

    assert rule_of(Patient()).marks.window == 9
    assert [rule_of(policy()) for policy in (Other, Chooser, AtTheEnd)] == [None] * 3


@pytest.mark.parametrize(
    "wrong", [{"observe": "sum"}, {"order": "value"}, {"order": "ranked"}, {"group": "median"}, {"observe": "stamps"}], ids=str
)
def test_rules_that_can_not_be(wrong):
    with pytest.raises(ValueError, match="ScanRule"):
        ScanRule(**wrong)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_rows_of_other_lengths_have_room_for_the_next_token(kernels):
    """A row that is exactly full, next to one that has more to come, must not write into its neighbour's slots."""
    found = []
    for together in (kernels == "auto", False):
        with attached(shared_model("llama"), "llama", "h2o", Budget(tokens=8), kernels=kernels) as session:
            cache = session.new_cache(known_len=30)
            feed = Feed(session.model, cache, 2)
            ids, mask = padded(rows_of(8, 20), "right")
            logits = stepwise(feed, ids, 0, together, mask)
            with cache.stepwise():
                logits += [feed(token) for token in talk(2, 5)[0].split(1, 1)]
            found.append((torch.cat(logits, 1)[:, -5:], [positions_of(cache, row) for row in range(2)]))
            assert cache.kept_len.unique().tolist() == [8]
    assert found[0][1] == found[1][1]
    assert (found[0][0] - found[1][0]).abs().max() < 1e-4


def test_chunks_that_fill_the_budget_exactly_leave_room():
    found = []
    for kernels in ("auto", "reference"):
        with attached(shared_model("llama"), "llama", "h2o", Budget(tokens=9), kernels=kernels) as session:
            cache = session.new_cache()
            ids, text = talk(2, 8, 20)
            feed = Feed(session.model, cache, 2)
            with cache.turn():
                feed(ids[:, :6])
                feed(ids[:, 6:])
            found.append((feed.each(text), cache.kept_positions(), cache.memory().kv_bytes))
    assert found[0][1:] == found[1][1:]
    assert (found[0][0] - found[1][0]).abs().max() < 1e-4


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_left_pads_in_every_row_change_nothing(kernels):
    """As `pad_to_multiple_of` makes them, under a turn and step by step; a first part of pads alone too."""
    (row,) = rows_of(12)
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), row], 1)
    mask = torch.tensor([[0] * 4 + [1] * 12])
    for steps in (False, True):
        found = []
        for text, real, parts in ((row, torch.ones_like(row), [12]), (ids, mask, [16]), (ids, mask, [3, 13])):
            with attached(shared_model("llama"), "llama", "h2o", Budget(tokens=5), kernels=kernels) as session:
                cache = session.new_cache(known_len=12)
                feed = Feed(session.model, cache, 1)
                with cache.stepwise() if steps else cache.turn():
                    logits = [feed(*pair) for pair in zip(text.split(parts, 1), real.split(parts, 1), strict=True)]
                found.append((torch.cat(logits, 1)[:, -12:], positions_of(cache, 0)))
        for logits, kept in found[1:]:
            assert kept == found[0][1]
            assert (logits - found[0][0]).abs().max() < 1e-4


def test_numbers_that_have_gone_wrong_show():
    """A model whose keys are NaN must not get plausible outputs."""
    queries, keys = torch.randn(1, 1, 2, 4, 16), torch.randn(1, 1, 4, 16)
    keys[0, 0, 1] = float("nan")
    positions = torch.arange(4)[None]
    rule = AttentionRule(0.25)
    outputs, _ = cpu.prefill_stats(queries, keys, keys.nan_to_num(), positions, positions[:, None].int(), rule, group="mean")
    assert outputs[..., 0, :].isfinite().all() and outputs[..., 1:, :].isnan().all()


def test_a_score_of_ones_own_makes_an_inherited_rule_void():
    @dataclass(frozen=True)
    class Flipped(H2O):
        def score(self, step):
            return -step.mass

    @dataclass(frozen=True)
    class Deeper(StreamingLLM):
        num_sink: int = 2

    assert rule_of(Flipped()) is None
    assert rule_of(Deeper()) is not None


def test_a_policy_without_a_rule_runs_step_by_step():
    """Its scores are asked for at each step, and it keeps what the same policy with a rule keeps."""

    @register("test_own_h2o")
    @dataclass(frozen=True)
    class Own(H2O):
        def score(self, step):
            return 2 * step.mass

    try:
        model = shared_model("llama")
        found = []
        for policy in (make_policy("h2o"), make_policy("test_own_h2o")):
            with attach(model, policy, Budget(tokens=12)) as session:
                found.append(conversation(session, 2, True, stream=False))
        assert positions_of(found[0][1], 0) == positions_of(found[1][1], 0)
        assert (found[0][0] - found[1][0]).abs().max() < 1e-4
    finally:
        from kvlab.policies.base import POLICIES

        POLICIES.classes.pop("test_own_h2o")
