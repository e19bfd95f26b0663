"""The fast path of one attention layer equals the slow reference of `naive.py`: kept tokens exactly, outputs closely.

A `Case` says everything about one comparison. Its script is a list of calls; after every call the kept positions of every
row and KV head, and the outputs of its tokens, are compared with a replay of that row alone.

All dtypes get numbers that bfloat16 holds, so one replay is the reference of all three. Statistics of bfloat16 inputs are
float32, which is why kept sets must be equal there too.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import warnings
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch

import naive
from kvlab import attach, load_model
from kvlab.budget import Budget, LayerGeometry
from kvlab.cache.kv_cache import KVCache
from kvlab.cache.plan import Plan
from kvlab.cache.rotation import RotarySource, Rotation
from kvlab.embedded import is_fetched
from kvlab.evals.texts import embedded_text
from kvlab.kernels.reference import AttentionRule
from kvlab.policies import make_policy, policy_class, policy_names
from kvlab.vocab import Vocab

THINNED = 4
POLICIES = list(naive.POLICY_SETTINGS)
SNAPS = list(naive.SNAP_FAMILY)
PROMPT_END = [*SNAPS, "fastgen"]
CAPPED = ["fastgen", "corm"]  # which decide themselves how much stays: a budget is a cap
EVERY_STEP = [name for name in POLICIES if name not in PROMPT_END]
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
SPECIAL = frozenset({0, 1})  # ids of special tokens; pads are special too, as in real tokenizers
PUNCTUATION = frozenset({2, 3})


class SpecialTokens(Vocab):
    """A vocabulary that knows its special tokens and punctuation without a tokenizer."""

    special = SPECIAL
    punctuation = PUNCTUATION
    markers = ()

    def __init__(self):
        super().__init__(tokenizer=None)


HEADS = {1: 3, 2: 2, 3: 2, 4: 2, 8: 1}  # group size -> KV heads: MHA, GQA, MQA

# Windows whose defaults are longer than most budgets here.
SMALL_SNAP = {"obs_window": 4, "kernel": 3}
SMALL = {
    **dict.fromkeys(SNAPS, SMALL_SNAP),
    "scissorhands": {"obs_window": 6, "recent_window": 2},
    "hashevict": {"num_sink": 1, "recent_window": 2},
    "fastgen": {"threshold": 0.7},
    "corm": {"obs_window": 4, "recent_window": 2},
}


# --------------------------------------------------------------------------------------------------------- scripts


@dataclass(frozen=True)
class Call:
    """Tokens that arrive in one go; `real[row][column]` is False for pads. `cuts` split a prompt into chunks of a turn."""

    kind: str  # "prompt" | "step"
    real: tuple[tuple[bool, ...], ...]
    cuts: tuple[int, ...] = ()

    @property
    def counts(self):
        return [sum(row) for row in self.real]

    @property
    def width(self):
        return len(self.real[0])


def padded(lengths, side):
    width = max(lengths)
    fill = [(False,) * (width - length) for length in lengths]
    rows = [(True,) * length for length in lengths]
    return tuple(pad + row if side == "left" else row + pad for pad, row in zip(fill, rows, strict=True))


def prompt(*lengths, side="left", cuts=()):
    return (Call("prompt", padded(lengths, side), tuple(cuts)),)


def steps(count, batch=1):
    """One-token calls."""
    return (Call("step", ((True,),) * batch),) * count


def stream(*lengths, side="left"):
    """One call with many tokens, taken step by step."""
    return (Call("step", padded(lengths, side)),)


def gappy_stream(seed, batch, width, share=0.3):
    """A stream in which pads are anywhere."""
    return (Call("step", tuple(map(tuple, (np.random.default_rng(seed).random((batch, width)) > share).tolist()))),)


PROMPT_AND_STEPS = (*prompt(50), *steps(25))
ONLY_STEPS = steps(30)
TURNS = (*prompt(18), *steps(6), *prompt(11), *steps(6), *prompt(9), *steps(3))
ONE_TOKEN_PROMPT = (*prompt(1), *steps(20), *prompt(5), *steps(2), *prompt(1), *steps(2))
CHUNKS = (*prompt(24, cuts=(3, 4, 15)), *steps(5), *prompt(12, cuts=(6,)), *steps(4))
SCRIPTS = {
    "prompt_and_steps": PROMPT_AND_STEPS,
    "only_steps": ONLY_STEPS,
    "turns": TURNS,
    "one_token_prompt": ONE_TOKEN_PROMPT,
    "chunks": CHUNKS,
}


# ------------------------------------------------------------------------------------------------------------ cases


@dataclass(frozen=True)
class Case:
    """One comparison. `settings` is a tuple of items, so that cases can be keys."""

    policy: str
    script: tuple[Call, ...]
    settings: tuple = ()
    tokens: int | None = None
    ratio: float | None = None
    known: tuple[int, ...] | None = None  # lengths that a ratio is of from the first token on
    kv_heads: int = 2
    group: int = 2
    dim: int = 8
    value_dim: int = 8
    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    layer: int = 0
    layers: int = 1
    rope: str | None = None
    offsets: tuple[int, ...] | None = None  # by how much the model's positions are ahead of the true ones, per row
    sample_ids: tuple | None = None
    inputs: str = "random"
    seed: int = 0

    @property
    def batch(self):
        return len(self.script[0].real)

    @property
    def lengths(self):
        return [sum(call.counts[row] for call in self.script) for row in range(self.batch)]

    @property
    def all_settings(self):
        return naive.complete_settings(self.policy, {k: v for k, v in self.settings if k != "seed"})

    def layer_tokens(self, length):
        """Tokens per head of this layer when `length` tokens have been seen."""
        budget = self.tokens
        if self.ratio is not None:
            budget = max(1, math.floor(Fraction(str(self.ratio)) * length))
        if budget is None or self.policy != "pyramidkv":
            return budget
        snap = self.all_settings
        return naive.pyramid_budgets(budget, snap["obs_window"], length, self.layers, snap["beta"])[self.layer]


def make_case(policy, script, tokens=None, settings=None, **rest):
    """A case; the snapkv family gets small windows unless the settings say otherwise."""
    full = {**SMALL.get(policy, {}), **(settings or {})}
    if policy == "streaming_llm" and "num_sink" not in full and (tokens is None or tokens < 4):
        full["num_sink"] = 1
    return Case(policy, tuple(script), tuple(sorted(full.items())), tokens=tokens, **rest)


def bfloat(array):
    """Rounded to what bfloat16 holds, as float64."""
    return torch.from_numpy(np.asarray(array)).bfloat16().double().numpy()


@functools.lru_cache(maxsize=256)
def row_inputs(case, row):
    """Unrotated q (H, T, d), k (Hkv, T, d), v (Hkv, T, dv) and token ids (T,) of one row."""
    rng = np.random.default_rng([case.seed, row, case.layer])
    length, heads = case.lengths[row], case.kv_heads * case.group
    q = 3 * rng.standard_normal((heads, length, case.dim))
    k = rng.standard_normal((case.kv_heads, length, case.dim))
    v = rng.standard_normal((case.kv_heads, length, case.value_dim))
    ids = rng.integers(0, 12, length)
    if case.inputs == "zero_queries":
        q[:] = 0
    elif case.inputs == "equal_keys":
        k[:] = k[:, :1]
    elif case.inputs == "one_focus":  # every query attends to the first token alone, the others get exact zeros
        q[:], k[:] = 0, 0
        q[..., 0], k[..., 0] = 64, -64
        k[:, 0, 0] = 64
    elif case.inputs == "some_zero_queries":  # all heads but the last KV head's are indifferent
        q[: -case.group] = 0
    elif case.inputs == "smollm2":
        q, k, v = (part[:, :length] for part in smollm2_inputs(case.layer, row))
    elif case.inputs == "tied_norms":  # few different norms
        k = np.sign(k) * rng.integers(1, 3, (case.kv_heads, length, 1))
    else:
        assert case.inputs == "random"
    return bfloat(q), bfloat(k), bfloat(v), ids


@functools.cache
def smollm2_inputs(layer, row, tokens=160):
    """q (9, T, 64), k and v (3, T, 64) of SmolLM2-135M on real text, as its attention is handed them."""
    model, tokenizer = load_model("smollm2-135m")
    ids = tokenizer(embedded_text().text, return_tensors="pt").input_ids[:, row * tokens : (row + 1) * tokens]
    found = []

    def watch(step):
        if step.layer_idx == layer:
            found.extend([step.queries[0].flatten(0, 1), step.keys[0], step.values[0]])

    with attach(model, make_policy("full"), watch=watch) as session:
        model(ids, cache=session.new_cache(), logits_to_keep=1)
    return [part.double().numpy() for part in found]


def attention_sinks(case):
    """A logit for each query head, (H,)."""
    return bfloat(np.random.default_rng(99).standard_normal(case.kv_heads * case.group)) if case.sinks else None


# -------------------------------------------------------------------------------------------------------- rotations
# Two independent writings of each: numpy on single pairs for the reference, and what models do for kvlab.


@dataclass(frozen=True)
class Rope:
    """rotary: how many of the head's dimensions turn; paired: halves | neighbours; factor: what cos and sin are scaled by."""

    rotary: int
    paired: str = "halves"
    factor: float = 1.0

    def pairs(self):
        half = self.rotary // 2
        return [(i, i + half) if self.paired == "halves" else (2 * i, 2 * i + 1) for i in range(half)]

    def table(self, positions):
        """cos and sin per pair, (len(positions), rotary / 2), float64."""
        speeds = 50.0 ** (-np.arange(self.rotary // 2) / (self.rotary // 2))
        angles = np.asarray(positions)[:, None] * speeds
        return self.factor * np.cos(angles), self.factor * np.sin(angles)

    def turn(self, vectors, cos, sin):
        """vectors (..., d) by cos and sin of each pair."""
        turned = np.array(vectors, dtype=np.float64)
        for n, (i, j) in enumerate(self.pairs()):
            turned[..., i] = vectors[..., i] * cos[..., n] - vectors[..., j] * sin[..., n]
            turned[..., j] = vectors[..., j] * cos[..., n] + vectors[..., i] * sin[..., n]
        return turned

    def widened(self, table):
        """(n, rotary / 2) -> (n, rotary), as models make it."""
        return np.concatenate([table, table], -1) if self.paired == "halves" else np.repeat(table, 2, axis=-1)

    def apply(self, q, k, cos, sin):
        """What a model's apply_rotary_pos_emb does."""
        cos, sin = cos[:, None], sin[:, None]

        def swapped(x):
            if self.paired == "halves":
                first, second = x.chunk(2, dim=-1)
                return torch.cat((-second, first), dim=-1)
            return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

        def one(x):
            turning, still = x[..., : self.rotary], x[..., self.rotary :]
            return torch.cat((turning * cos + swapped(turning) * sin, still), dim=-1)

        return one(q), one(k)


ROPES = {
    "halves": Rope(8),
    "partial": Rope(4),
    "neighbours": Rope(8, "neighbours"),
    "partial_neighbours": Rope(4, "neighbours"),
    "scaled": Rope(8, factor=1.25),
}


def rounded(array, dtype):
    return torch.from_numpy(np.ascontiguousarray(array)).to(getattr(torch, dtype)).double().numpy()


@functools.lru_cache(maxsize=256)
def rotated_inputs(case, row, dtype):
    """(q, k) as the model hands them over, and the unrotated (q, k) that these stand for, all float64 numpy."""
    q, k, _, _ = row_inputs(case, row)
    if case.rope is None:
        return (q, k), (q, k)
    rope = ROPES[case.rope]
    cos, sin = model_table(case, row, dtype)
    handed = [rounded(rope.turn(x, cos, sin), dtype) for x in (q, k)]
    norm = cos**2 + sin**2
    return tuple(handed), tuple(rope.turn(x, cos / norm, -sin / norm) for x in handed)


@functools.lru_cache(maxsize=256)
def model_table(case, row, dtype):
    """cos and sin per pair at all positions of a row, as the model rounds them: (T, rotary / 2)."""
    offset = case.offsets[row] if case.offsets else 0
    cos, sin = ROPES[case.rope].table(np.arange(max(1, case.lengths[row])) + offset)
    return rounded(cos, dtype), rounded(sin, dtype)


# -------------------------------------------------------------------------------------------------------- reference


def reference(case, dtype="float64"):
    """Replays of all rows."""
    return _reference(case, dtype if case.rope else "any")


@functools.lru_cache(maxsize=64)
def _reference(case, dtype):
    return [replay_row(case, row, dtype) for row in range(case.batch)]


def replay_row(case, row, dtype="any"):
    if case.lengths[row] == 0:
        return None
    _, (q, k) = rotated_inputs(case, row, dtype)
    v, ids = row_inputs(case, row)[2:]
    segments, seen, budget = [], 0, None
    known = case.known[row] if case.known else 0
    for number, call in enumerate(case.script):
        count = call.counts[row]
        seen += count
        if call.kind == "prompt" and (count or not segments):
            budget = case.layer_tokens(max(seen, known))
        elif number == 0:
            budget = case.layer_tokens(known)
        segments.append(naive.Segment(call.kind, count, budget))
    rotate = None
    if case.rope:
        cos, sin = model_table(case, row, dtype)
        rope = ROPES[case.rope]

        def rotate(vector, place):
            return rope.turn(vector, cos[place], sin[place])

    settings = dict(case.settings)
    return naive.replay(
        q,
        k,
        v,
        segments,
        case.policy,
        {name: value for name, value in settings.items() if name != "seed"},
        scaling=case.scaling,
        window=case.window,
        softcap=case.softcap,
        sinks=attention_sinks(case),
        layer_idx=case.layer,
        seed=settings.get("seed", 0),
        sample_id=case.sample_ids[row] if case.sample_ids else None,
        special=frozenset(np.flatnonzero(np.isin(ids, list(SPECIAL))).tolist()),
        punctuation=frozenset(np.flatnonzero(np.isin(ids, list(PUNCTUATION))).tolist()),
        rotate=rotate,
    )


# -------------------------------------------------------------------------------------------------------- fast path


def make_cache(case, dtype):
    size = getattr(torch, dtype).itemsize
    geometry = LayerGeometry(case.kv_heads, case.dim, case.value_dim, case.window, size, size)
    plan = Plan(
        policy=make_policy(case.policy, **dict(case.settings)),
        budget=Budget(tokens=case.tokens, ratio=case.ratio),
        layers=(geometry,) * case.layers,
        itemsize=size,
        vocab=SpecialTokens(),
    )
    return KVCache(plan, sample_ids=case.sample_ids, known_len=case.known)


class Driver:
    """Feeds a case's calls to a layer of a kvlab cache."""

    def __init__(self, case, dtype, cache=None):
        self.case, self.dtype = case, dtype
        self.cache = cache or make_cache(case, dtype)
        self.layer = self.cache.layers[case.layer]
        self.seen = [0] * case.batch
        self.inputs = [(*rotated_inputs(case, row, dtype)[0], *row_inputs(case, row)[2:]) for row in range(case.batch)]
        self.tables = [model_table(case, row, dtype) for row in range(case.batch)] if case.rope else None
        self.garbage = np.random.default_rng(7)
        sinks = attention_sinks(case)
        self.rule = AttentionRule(
            scaling=case.dim**-0.5 if case.scaling is None else case.scaling,
            window=case.window,
            softcap=case.softcap,
            sinks=None if sinks is None else self.tensor(sinks).view(case.kv_heads, case.group),
        )

    def tensor(self, array):
        return torch.from_numpy(np.ascontiguousarray(array)).to(getattr(torch, self.dtype))

    def call(self, call):
        """Outputs of the real tokens of each row, [row] -> (H, count, dv)."""
        if call.kind == "step":
            block = contextlib.nullcontext() if call.width == 1 and any(self.seen) else self.cache.stepwise()
        else:
            joined = call.cuts or (call.width == 1 and any(self.seen))
            block = self.cache.turn() if joined else contextlib.nullcontext()
        real = np.array(call.real)
        edges = [0, *call.cuts, call.width]
        with block:
            parts = [self.part(real[:, start:end]) for start, end in zip(edges, edges[1:], strict=False)]
        output = torch.cat(parts, 2).double().numpy()
        return [output[row][:, real[row]] for row in range(self.case.batch)]

    def part(self, real):
        case, (batch, width) = self.case, real.shape
        heads = case.kv_heads * case.group
        shapes = [(heads, case.dim), (case.kv_heads, case.dim), (case.kv_heads, case.value_dim)]
        q, k, v = (5 * self.garbage.standard_normal((batch, h, width, d)) for h, d in shapes)
        ids = np.zeros((batch, width), dtype=np.int64)  # pads are special tokens
        positions = np.zeros((batch, width), dtype=np.int64)
        for row in range(batch):
            here, now = real[row], slice(self.seen[row], self.seen[row] + real[row].sum())
            row_q, row_k, row_v, row_ids = self.inputs[row]
            q[row][:, here], k[row][:, here], v[row][:, here] = row_q[:, now], row_k[:, now], row_v[:, now]
            ids[row, here] = row_ids[now]
            positions[row, here] = np.arange(now.start, now.stop)
            self.seen[row] = now.stop
        self.cache.input_ids = torch.from_numpy(ids)
        if case.rope:
            rope = ROPES[case.rope]
            placed = [[table[at] for table in pair] for pair, at in zip(self.tables, positions, strict=True)]
            cos, sin = (self.tensor(np.stack([rope.widened(pair[i]) for pair in placed])) for i in (0, 1))

            def make(places, dtype):
                return tuple(self.tensor(rope.widened(part)).to(dtype) for part in rope.table(np.arange(places)))

            self.layer.rotation = Rotation(cos, sin, rope.apply, RotarySource(case.rope, make))
        padding = None if real.all() else torch.from_numpy(real)
        q, k, v = self.tensor(q), self.tensor(k), self.tensor(v)
        output = self.layer.attend(q, k, v, padding, self.rule)
        assert output.dtype == q.dtype
        assert output.shape == (batch, heads, width, case.value_dim)
        return output

    def kept(self):
        """[row][kv_head] -> positions."""
        filled = [layer.layer_idx for layer in self.cache.layers if layer.store is not None]
        return self.cache.kept_positions()[filled.index(self.case.layer)]


def check(case, dtype="float64"):
    """Run a case and compare after every call. Returns the driver."""
    driver = Driver(case, dtype)
    results = reference(case, dtype)
    for number, call in enumerate(case.script):
        compare_call(driver, results, number, call)
    return driver


def compare_call(driver, results, number, call):
    case, before = driver.case, list(driver.seen)
    outputs = driver.call(call)
    kept = driver.kept()
    for row, result in enumerate(results):
        now = driver.seen[row]
        where = f"call {number} ({call.kind}), row {row}, tokens {before[row]} to {now - 1}, {driver.dtype}"
        if result is not None and result.profile is not None:
            assert driver.layer.profile["member"][row].tolist() == result.profile, where
        expected = result.kept[now - 1] if now else [[]] * case.kv_heads
        assert kept[row] == expected, where
        if now > before[row]:
            difference = np.abs(outputs[row] - result.out[:, before[row] : now]).max()
            assert difference < TOLERANCE[driver.dtype], f"outputs differ by {difference:.1e}: {where}"


UNPROTECTED = {
    **dict.fromkeys(SNAPS, {"obs_window": 1}),
    "scissorhands": {"recent_window": 0},
    "hashevict": {"num_sink": 0, "recent_window": 0},
    "corm": {"recent_window": 0},
}
"""Settings under which policies protect as little as they can."""


def by_age(case):
    """What tells newest-first from anything else: the last tokens, for one row."""
    length = case.lengths[0]
    return list(range(length - case.tokens, length))


# ----------------------------------------------------------------------------------------------------- the basic grid


def test_reference_knows_every_builtin_policy_and_its_defaults():
    builtin = {name for name in policy_names() if policy_class(name).__module__.startswith("kvlab.policies.")}
    assert set(POLICIES) == builtin
    for name in POLICIES:
        defaults = {field.name: field.default for field in dataclasses.fields(policy_class(name))}
        defaults.pop("seed", None)
        assert defaults == naive.complete_settings(name, None), name


FAST_GROUPS = {"float64": (1, 2), "float32": (4,), "bfloat16": (8,)}


def slow_if(condition, *values):
    return pytest.param(*values, marks=pytest.mark.slow) if condition else pytest.param(*values)


@pytest.mark.parametrize(
    ("group", "dtype"),
    [slow_if(group not in FAST_GROUPS[dtype], group, dtype) for group in HEADS for dtype in TOLERANCE],
)
@pytest.mark.parametrize("script", list(SCRIPTS))
@pytest.mark.parametrize("policy", POLICIES)
def test_policy(policy, script, group, dtype):
    if script == "only_steps" and policy in PROMPT_END:
        pytest.skip("decides at a prompt's end; see test_prompt_end_policies_refuse_streams")
    tokens = 16 if script == "prompt_and_steps" else 9
    layers, layer = (3, 1) if policy in ("random", "pyramidkv") else (1, 0)
    case = make_case(
        policy, SCRIPTS[script], tokens, kv_heads=HEADS[group], group=group, layers=layers, layer=layer, seed=group
    )
    check(case, dtype)


@pytest.mark.parametrize("after_prompt", ["rank", "grow"])
@pytest.mark.parametrize("policy", SNAPS)
def test_prompt_end_policies_refuse_streams(policy, after_prompt):
    with pytest.raises(ValueError, match="prompt's end"):
        check(make_case(policy, ONLY_STEPS, 9, {"after_prompt": after_prompt}))
    with pytest.raises(ValueError, match="prompt's end"):
        check(make_case(policy, stream(12), 9, {"after_prompt": after_prompt}))


@pytest.mark.parametrize("policy", EVERY_STEP)
def test_stream_in_one_call_and_after_a_prompt(policy):
    check(make_case(policy, (*stream(30), *steps(3), *prompt(12), *stream(14), *steps(2)), 9))


@pytest.mark.parametrize("policy", SNAPS)
@pytest.mark.parametrize("after_prompt", ["rank", "grow"])
def test_multi_token_steps_after_a_prompt(policy, after_prompt):
    check(make_case(policy, (*prompt(25), *stream(14), *steps(2), *prompt(6), *stream(7)), 9, {"after_prompt": after_prompt}))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_budget_keeps_everything(policy):
    case = make_case(policy, TURNS, settings={"fastgen": {"members": ("full",)}, "corm": {"obs_window": 1000}}.get(policy))
    driver = check(case)
    assert driver.kept()[0] == [list(range(case.lengths[0]))] * case.kv_heads


@pytest.mark.parametrize("policy", ["full", "h2o", "snapkv", "adakv"])
def test_value_dim_scaling_and_long_prompts(policy):
    """Prompts longer than the kernels' chunk of queries."""
    script = (*prompt(150), *steps(3), *prompt(70, cuts=(66,)), *steps(2))
    check(
        make_case(policy, script, 40, value_dim=5, scaling=0.5, kv_heads=1, group=2, settings={} if policy == "full" else None)
    )


@pytest.mark.filterwarnings("error")
def test_nothing_warns():
    """Of a batch of one with one head, too. torch warns once a process otherwise."""
    torch.set_warn_always(True)
    try:
        for script in (TURNS, ONLY_STEPS, PADDED_SCRIPTS["turns_mixed"]):
            check(make_case("h2o", script, 9, kv_heads=1))
            check(make_case("full", script, 9, kv_heads=1))
    finally:
        torch.set_warn_always(False)


# ------------------------------------------------------------------------------------------------------------ budgets


@pytest.mark.parametrize("script", ["turns", "only_steps"])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_tiny_budgets(policy, tokens, script):
    if script == "only_steps" and policy in PROMPT_END:
        pytest.skip("decides at a prompt's end")
    layers, layer = (3, 2) if policy == "pyramidkv" else (1, 0)
    settings = UNPROTECTED.get(policy, {})
    check(make_case(policy, SCRIPTS[script], tokens, settings, layers=layers, layer=layer))


@pytest.mark.parametrize("difference", [-1, 0, 1, 100])
@pytest.mark.parametrize("policy", POLICIES)
def test_budgets_near_the_length(policy, difference):
    check(make_case(policy, (*prompt(20), *steps(4)), 20 + difference))
    check(make_case(policy, (*prompt(16), *steps(4)), 20 + difference))
    if policy in EVERY_STEP:
        check(make_case(policy, steps(20), 20 + difference))


@pytest.mark.parametrize("heavy_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("script", [(*prompt(14), *steps(6)), steps(20)], ids=["prompt", "steps"])
def test_h2o_with_room_for_all_is_full_attention(script, heavy_share):
    case = make_case("h2o", script, 20, {"heavy_share": heavy_share})
    q, k, v, _ = row_inputs(case, 0)
    driver = Driver(case, "float64")
    output = np.concatenate([driver.call(call)[0] for call in script], axis=1)
    assert np.abs(output - naive.full_attention(q, k, v)).max() < 1e-9
    assert driver.kept()[0] == [list(range(20))] * 2
    check(dataclasses.replace(case, tokens=19))


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("beta", [1, 2, 7, 20])
def test_pyramid_budgets(layers, beta):
    policy = make_policy("pyramidkv", obs_window=4, beta=beta)
    for budget in range(1, 40):
        for length in (1, 5, 20, 21, 39, 40, 41, 200):
            expected = naive.pyramid_budgets(budget, 4, length, layers, beta)
            assert policy.layer_budget(budget, layers, length) == expected, (budget, length)


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("beta", [1, 5, 20])
def test_pyramid_layers(layer, beta):
    check(make_case("pyramidkv", TURNS, 9, {"beta": beta}, layers=4, layer=layer))
    check(make_case("pyramidkv", TURNS, None, {"beta": beta}, layers=4, layer=layer, ratio=0.5))


@pytest.mark.parametrize("ratio", [0.29, 0.5, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_ratio(policy, ratio):
    script = (*prompt(24), *steps(8), *prompt(10), *steps(4))
    check(make_case(policy, script, ratio=ratio, settings={"num_sink": 1}))
    if policy in EVERY_STEP:
        check(make_case(policy, (*stream(20), *steps(4), *prompt(6), *steps(3)), ratio=ratio, known=(24,)))


@pytest.mark.parametrize("known", [(40, 25, 31), (21, 14, 18)])
@pytest.mark.parametrize("policy", POLICIES)
def test_ratio_of_a_text_that_comes_in_parts(policy, known):
    """Chunks that are evicted one by one: a ratio is of the whole text as soon as it begins, where that is known."""
    settings = {"obs_window": 2, "kernel": 3} if policy in SNAPS else {"num_sink": 1}
    script = (*prompt(9, 6, 9, side="right"), *prompt(9, 6, 4, side="right"), *steps(4, 3))
    with tight_budgets_allowed():
        check(make_case(policy, script, ratio=0.4, known=known, settings=settings))


# ------------------------------------------------------------------------------------------------------ padded batches

PADDED_SCRIPTS = {
    "left": (*prompt(20, 13, 17), *steps(8, 3)),
    "right": (*prompt(20, 13, 17, side="right"), *steps(8, 3)),
    "turns_left": (*prompt(20, 13, 17), *steps(4, 3), *prompt(5, 11, 8), *steps(4, 3)),
    "turns_mixed": (*prompt(12, 20, 15, side="right"), *steps(3, 3), *prompt(14, 4, 9), *steps(4, 3)),
    "one_token_rows": (*prompt(1, 12, 6), *steps(4, 3), *prompt(9, 1, 1, side="right"), *steps(3, 3)),
    "chunks": (*prompt(20, 13, 17, cuts=(2, 9)), *steps(3, 3), *prompt(4, 11, 9, side="right", cuts=(5,)), *steps(3, 3)),
}
PADDED_STREAMS = {
    "left": (*stream(20, 13, 17), *steps(3, 3)),
    "right": (*stream(13, 20, 17, side="right"), *steps(3, 3)),
    "gaps": (*gappy_stream(1, 3, 24), *steps(3, 3), *gappy_stream(2, 3, 9, 0.6), *steps(2, 3)),
    "then_turn": (*stream(13, 20, 17), *prompt(9, 4, 12), *steps(4, 3)),
}


@pytest.mark.parametrize(
    ("script", "budget"),
    [
        slow_if("tokens" in budget and script not in ("turns_mixed", "chunks"), script, budget)
        for script in PADDED_SCRIPTS
        for budget in ({"ratio": 0.4}, {"tokens": 7})
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_padded_prompts(policy, script, budget):
    settings = {"obs_window": 2, "kernel": 3} if policy in SNAPS else {"num_sink": 1}
    layers, layer = (2, 1) if policy in ("random", "pyramidkv") else (1, 0)
    with tight_budgets_allowed():
        check(make_case(policy, PADDED_SCRIPTS[script], settings=settings, layers=layers, layer=layer, **budget))


@pytest.mark.parametrize("budget", [{"ratio": 0.4}, {"tokens": 7}], ids=["ratio", "tokens"])
@pytest.mark.parametrize("script", list(PADDED_STREAMS))
@pytest.mark.parametrize("policy", EVERY_STEP)
def test_padded_streams(policy, script, budget):
    case = make_case(policy, PADDED_STREAMS[script], settings={"num_sink": 1}, **budget)
    known = tuple(case.lengths) if case.ratio else None
    check(dataclasses.replace(case, known=known))


@pytest.mark.parametrize("policy", SNAPS)
@pytest.mark.parametrize("after_prompt", ["rank", "grow"])
def test_padded_steps_after_prompts(policy, after_prompt):
    script = (*prompt(20, 13, 17), *gappy_stream(3, 3, 9), *prompt(6, 9, 3), *gappy_stream(4, 3, 6))
    for budget in ({"ratio": 0.5}, {"tokens": 8}):
        check(make_case(policy, script, settings={"after_prompt": after_prompt, "num_sink": 1}, **budget))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_padded_low_precision(policy, dtype):
    check(make_case(policy, PADDED_SCRIPTS["turns_mixed"], 7, {"num_sink": 1}), dtype)


@pytest.mark.parametrize("policy", POLICIES)
def test_padded_with_window_softcap_and_sinks(policy):
    script = PADDED_SCRIPTS["turns_mixed"]
    for window in (5, 11):
        check(make_case(policy, script, 8, {"num_sink": 1}, window=window, softcap=4.0, sinks=True))


@pytest.mark.parametrize("budget", [{"ratio": 0.5}, {"tokens": 8}], ids=["ratio", "tokens"])
@pytest.mark.parametrize("settings", [{}, {"after_prompt": "grow"}], ids=["rank", "grow"])
@pytest.mark.parametrize("policy", POLICIES)
def test_turn_that_has_nothing_for_a_row(policy, settings, budget):
    """Such a turn changes nothing for that row."""
    if settings and policy not in SNAPS:
        pytest.skip("has no after_prompt")
    script = (*prompt(20, 17), *steps(6, 2), *prompt(0, 5), *steps(4, 2))
    check(make_case(policy, script, settings={"num_sink": 1, **settings}, kv_heads=3, **budget))


@pytest.mark.parametrize("policy", EVERY_STEP)
def test_row_that_starts_late(policy):
    """A row of pads only, at first."""
    script = (*stream(9, 0), *prompt(5, 12), *steps(4, 2))
    check(make_case(policy, script, 6, {"num_sink": 1}))


# ----------------------------------------------------------------------------------------------------------- settings


@contextlib.contextmanager
def tight_budgets_allowed():
    """Budgets by ratio may be smaller than what settings protect: a warning, and the tiers' order decides."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a budget of")
        yield


@pytest.mark.parametrize(
    "settings",
    [
        {"num_sink": 1},
        {"num_sink": 3},
        {"recent_window": 1},
        {"recent_window": 6},
        {"num_sink": 2, "recent_window": 6},
        {"keep_special": True},
        {"keep_special": True, "num_sink": 2, "recent_window": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", POLICIES)
def test_protection(policy, settings):
    layers, layer = (2, 1) if policy == "pyramidkv" else (1, 0)
    settings = {"num_sink": 0, **settings}
    check(make_case(policy, TURNS, 9, settings, layers=layers, layer=layer))
    if policy in EVERY_STEP:
        check(make_case(policy, (*stream(20), *steps(4)), 9, settings))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_more_protected_than_fits(policy, dtype):
    """Sinks outlast special tokens, these outlast recent ones, and of each kind but sinks the newest stay."""
    settings = {"num_sink": 3, "recent_window": 6, "keep_special": True}
    with tight_budgets_allowed():
        for ratio in (0.05, 0.12, 0.3):
            check(make_case(policy, (*prompt(24), *steps(6), *prompt(8), *steps(3)), ratio=ratio, settings=settings), dtype)


@pytest.mark.parametrize("policy", POLICIES)
def test_special_tokens_of_padded_rows(policy):
    check(make_case(policy, PADDED_SCRIPTS["turns_mixed"], 7, {"keep_special": True}))


@pytest.mark.parametrize(
    ("policy", "rope"),
    [
        slow_if(rope in ("partial", "neighbours", "scaled") and policy not in ("streaming_llm", "h2o", "adakv"), policy, rope)
        for policy in POLICIES
        for rope in ROPES
    ],
)
def test_rolling(policy, rope):
    layers, layer = (2, 1) if policy in ("random", "pyramidkv") else (1, 0)
    check(make_case(policy, (*prompt(24), *steps(14)), 9, {"rolling": True}, rope=rope, layers=layers, layer=layer))
    if policy in EVERY_STEP:
        check(make_case(policy, (*stream(20), *steps(4)), 9, {"rolling": True, "num_sink": 2}, rope=rope))


@pytest.mark.parametrize("rope", ["halves", "partial_neighbours"])
@pytest.mark.parametrize("policy", POLICIES)
def test_rolling_over_turns(policy, rope):
    check(make_case(policy, CHUNKS, 9, {"rolling": True}, rope=rope))
    check(make_case(policy, TURNS, 9, {"rolling": True, "num_sink": 1}, rope=rope))


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o", "tova", "snapkv"])
def test_rolling_with_a_later_turn_longer_than_all_before(policy):
    """Places that no earlier call needed."""
    check(make_case(policy, (*prompt(10), *steps(3), *prompt(20), *steps(2)), 5, {"rolling": True}, rope="halves"))
    if policy in EVERY_STEP:
        check(make_case(policy, (*stream(12), *prompt(20), *steps(2)), 5, {"rolling": True}, rope="halves"))


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o", "adakv"])
def test_rolling_with_window_softcap_and_sinks(policy):
    for window in (6, 12):
        check(make_case(policy, CHUNKS, 9, {"rolling": True}, rope="halves", window=window, softcap=5.0, sinks=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_rolling_low_precision(policy, dtype):
    check(make_case(policy, (*prompt(24), *steps(14)), 9, {"rolling": True}, rope="scaled"), dtype)


@pytest.mark.parametrize("script", ["left", "right", "chunks"])
@pytest.mark.parametrize("policy", POLICIES)
def test_rolling_padded(policy, script):
    """Rows of different lengths, and rows whose positions the model counts from their pads."""
    for offsets in (None, (0, 7, 3)):
        check(make_case(policy, PADDED_SCRIPTS[script], 7, {"rolling": True, "num_sink": 1}, rope="halves", offsets=offsets))


@pytest.mark.parametrize("rope", [None, "halves"])
def test_stream_that_starts_with_pads_in_all_rows(rope):
    script = (Call("step", ((False, False, True, True, True), (False, True, False, True, True))), *steps(6, 2))
    check(make_case("streaming_llm", script, 4, {"rolling": rope is not None, "num_sink": 1}, rope=rope))


@pytest.mark.parametrize("group", ["mean", "max", "sum", "first"])
@pytest.mark.parametrize("policy", ["h2o", *SNAPS])
def test_group(policy, group):
    for size in (3, 4):
        check(make_case(policy, TURNS, 9, {"group": group}, group=size))


# One setting at a time, each at the values that differ from the default or lie at an end.
SEEDS = {
    "scissorhands": {
        "obs_window": (1, 3, 8, 17, 400),
        "recent_window": (0, 1, 8),
        "num_sink": (2,),
        "drop_share": (0.0, 0.1, 0.29, 1.0),
        "count": ("high",),
        "threshold": ("held",),
        "group": ("max", "sum", "first"),
    },
    "hashevict": {
        "bits": (1, 4, 8, 24, 64),
        "probe": ("key",),
        "prompt": ("recent",),
        "num_sink": (0, 4),
        "recent_window": (0, 1, 8),
        "seed": (7,),
    },
    "hyde": {
        "action": ("fade", "evict"),
        "attention_weight": (0.0, 2.0),
        "norm_weight": (0.0, 2.0),
        "decay": (0.5, 1.0),
        "window_share": (0.0, 0.5, 1.0),
        "min_decay": (0.01, 1.0),
        "power": (0.0, 0.5, 3.0),
        "group": ("max", "sum", "first"),
        "num_sink": (2,),
        "recent_window": (4,),
    },
    "fastgen": {
        "threshold": (0.0, 0.4, 0.85, 1.0),
        "recovery": ("l1",),
        "local_share": (0.0, 0.1, 1.0),
        "frequent_share": (0.0, 0.1, 1.0),
        "members": (
            ("full",),
            ("local", "full"),
            ("frequent", "special"),
            ("special+punct", "special+punct+local"),
            ("special", "special+frequent", "special+frequent+local", "full"),
        ),
        "group": ("max", "sum", "first"),
        "num_sink": (2,),
        "recent_window": (3,),
        "keep_special": (True,),
    },
    "corm": {
        "obs_window": (1, 2, 9, 17, 400),
        "recent_window": (0, 1, 8),
        "threshold": ("held",),
        "group": ("mean", "sum", "first"),
        "num_sink": (2,),
        "keep_special": (True,),
    },
}
VARIED = [(policy, name, value) for policy, settings in SEEDS.items() for name, values in settings.items() for value in values]


@pytest.mark.parametrize(("policy", "name", "value"), VARIED, ids=str)
def test_each_setting(policy, name, value):
    """Over turns, padded batches, chunks and streams, under a budget and (where it is only a cap) without one."""
    for script in (TURNS, (*prompt(21, 30, 12, side="left"), *steps(9, 3), *prompt(5, 0, 8), *steps(2, 3)), CHUNKS):
        check(make_case(policy, script, 11, {name: value}, group=3))
    if policy in CAPPED:
        check(make_case(policy, TURNS, None, {name: value}, group=2, seed=3), "float32")
        check(make_case(policy, (*prompt(25), *stream(14), *steps(2), *prompt(6), *stream(7)), None, {name: value}))
    if policy in EVERY_STEP:
        check(make_case(policy, (*stream(30), *steps(3)), 11, {name: value}, group=2), "float32")
        check(make_case(policy, ONLY_STEPS, 14, {name: value}, kv_heads=1, group=4), "bfloat16")


REAL = {
    "h2o": [{}, {"heavy_share": 1.0}, {"group": "first"}],
    "scissorhands": [{"obs_window": 40}, {"obs_window": 40, "count": "high"}, {"threshold": "held", "drop_share": 0.0}],
    "hashevict": [{}, {"probe": "key", "bits": 32}, {"prompt": "recent"}],
    "hyde": [{}, {"action": "evict"}, {"action": "fade"}],
    "fastgen": [{}, {"threshold": 0.8}, {"recovery": "l1"}],
    "corm": [{"obs_window": 24}, {"obs_window": 40, "threshold": "held", "group": "mean"}],
}


@pytest.mark.embedded
@pytest.mark.parametrize(
    ("policy", "settings"), [(name, some) for name, variants in REAL.items() for some in variants], ids=str
)
def test_real_inputs(policy, settings):
    """Queries, keys and values of a real model on real text, two sequences of a batch."""
    if not is_fetched():
        pytest.skip("the embedded model isn't fetched (make setup)")
    case = make_case(
        policy,
        (*prompt(100, 90), *steps(20, 2)),
        None if policy in CAPPED else 30,
        settings,
        kv_heads=3,
        group=3,
        dim=64,
        value_dim=64,
        layer=11,
        layers=30,
        inputs="smollm2",
    )
    check(case, "float32")
    if policy in EVERY_STEP:
        check(dataclasses.replace(case, script=(*stream(60, 50), *steps(5, 2))), "float32")


@pytest.mark.parametrize("heavy_share", [0.0, 0.25, 0.29, 0.5, 1.0])
def test_heavy_share(heavy_share):
    for tokens in (9, 10):
        check(make_case("h2o", TURNS, tokens, {"heavy_share": heavy_share}))
        check(make_case("h2o", ONLY_STEPS, tokens, {"heavy_share": heavy_share, "recent_window": 3, "num_sink": 1}))


@pytest.mark.parametrize("settings", [{"obs_window": 1}, {"obs_window": 8}, {"obs_window": 4, "recent_window": 6}], ids=str)
@pytest.mark.parametrize("policy", SNAPS)
def test_obs_window(policy, settings):
    """Turns shorter than the voting window included."""
    for script in (TURNS, CHUNKS, ONE_TOKEN_PROMPT):
        check(make_case(policy, script, 9, settings, layers=2, layer=0))


@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("kernel", [1, 3, 7, 21])
@pytest.mark.parametrize("policy", SNAPS)
def test_pooling(policy, kernel, pool):
    check(make_case(policy, TURNS, 9, {"kernel": kernel, "pool": pool}))


@pytest.mark.parametrize("after_prompt", ["rank", "grow"])
@pytest.mark.parametrize("policy", SNAPS)
def test_after_prompt(policy, after_prompt):
    for window in (None, 7, 14):
        check(make_case(policy, TURNS, 9, {"after_prompt": after_prompt, "num_sink": 1}, window=window))


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 5])
def test_alpha(alpha, kv_heads):
    for tokens in (6, 9, 14):
        check(make_case("adakv", TURNS, tokens, {"alpha": alpha}, kv_heads=kv_heads, group=1))


SHORT_TURNS = (*prompt(24), *steps(9), *prompt(2), *steps(5), *prompt(4), *steps(3), *prompt(3), *steps(2))


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("extra", [{}, {"num_sink": 2}, {"keep_special": True}, {"recent_window": 7}], ids=str)
def test_adakv_over_turns(alpha, extra):
    """Short later turns meet heads that hold different numbers of tokens."""
    for budget in ({"tokens": 12, "window": 16}, {"tokens": 12}, {"ratio": 0.5}):
        check(make_case("adakv", SHORT_TURNS, settings={"alpha": alpha, **extra}, kv_heads=3, group=1, **budget))


@pytest.mark.parametrize(
    ("lengths", "alpha", "ratio", "window", "seed"),
    [
        # A head's share is more than it holds: [4, 6, 5] of a mean of 5. Another head takes the difference.
        ((6, 0, 1), 0.5, 0.75, None, 46),
        # Fewer normal tokens than budget for them, for one of [5, 3, 4] is out of the window; the mean is 4.
        ((5, 0, 1), 0.2, 0.75, 5, 0),
        # Fewer normal tokens than budget for them, for the ratio is of a longer text: [3, 3, 6] of a mean of 5.
        ((5, 1, 1), 0.2, 0.75, None, 20),
    ],
    ids=["share_above_held", "out_of_window", "longer_text"],
)
def test_adakv_where_heads_hold_less_than_their_share(lengths, alpha, ratio, window, seed):
    """Nothing is dropped from a head while the layer's budget has room for it."""
    first, between, second = lengths
    script = (*prompt(first), *steps(between), *prompt(second), *steps(2))
    settings = {"alpha": alpha, "obs_window": 1, "kernel": 1}
    check(make_case("adakv", script, ratio=ratio, settings=settings, kv_heads=3, group=1, window=window, seed=seed))


def test_adakv_where_heads_hold_different_special_tokens():
    """What is left of a head's budget after its protected tokens then differs from head to head."""
    script = (*prompt(23), *steps(27), *prompt(2), *steps(6))
    settings = {"alpha": 0.1, "obs_window": 1, "kernel": 1, "keep_special": True}
    check(make_case("adakv", script, 8, settings, kv_heads=2, group=1, seed=334))


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 1])
def test_random_seed_and_layer(seed, layer):
    check(make_case("random", (*prompt(20), *steps(8)), 7, {"seed": seed}, layers=3, layer=layer))


@pytest.mark.parametrize("sample_ids", [(0, 1, 2), (-1, 5, 5), (2**32 + 3, 3, 2**31)], ids=str)
def test_random_sample_ids(sample_ids):
    driver = check(make_case("random", PADDED_SCRIPTS["turns_mixed"], 7, {"seed": 3}, sample_ids=sample_ids))
    check(make_case("random", PADDED_STREAMS["gaps"], 7, {"seed": 3}, sample_ids=sample_ids))
    assert driver.kept()[0] != driver.kept()[1]


def test_random_sample_ids_by_name_and_expanded():
    """A name stands for 32 bits of its hash; sequences that were expanded share their sample's id."""
    case = make_case("random", (*prompt(20, 20, 20, 20), *steps(5, 4)), 7)
    cache = KVCache(make_cache(case, "float64").plan, sample_ids=["one", "two"])
    driver = Driver(case, "float64", cache)
    for call in case.script:
        driver.call(call)
    one, two = (int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big") for name in (b"one", b"two"))
    expected = [result.kept[-1] for result in reference(dataclasses.replace(case, sample_ids=(one, one, two, two)))]
    assert driver.kept() == expected
    assert expected[0] == expected[1] != expected[2]


def test_layers_of_one_cache_do_not_meet():
    """Three layers fed in turn, as a model does, with one rotation for all."""
    for policy in ("random", "h2o", "pyramidkv"):
        script = (*prompt(20, 14), *steps(6, 2))
        cases = [
            make_case(policy, script, 9, {"rolling": True}, layers=3, layer=layer, rope="halves", seed=layer)
            for layer in range(3)
        ]
        cache = make_cache(cases[0], "float64")
        runs = [(Driver(case, "float64", cache), reference(case)) for case in cases]
        for number, call in enumerate(script):
            for driver, results in runs:
                compare_call(driver, results, number, call)


# -------------------------------------------------------------------------------------- windows, softcap, attention sinks


@pytest.mark.parametrize("window", [1, 4, 9, 14])
@pytest.mark.parametrize("script", ["turns", "only_steps", pytest.param("chunks", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", POLICIES)
def test_window(policy, script, window):
    if script == "only_steps" and policy in PROMPT_END:
        pytest.skip("decides at a prompt's end")
    check(make_case(policy, SCRIPTS[script], 9, window=window))


@pytest.mark.parametrize("settings", [{"num_sink": 3}, {"keep_special": True}, {"recent_window": 5}], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_window_and_protection(policy, settings):
    """What left the window goes first, whatever protects it."""
    for window in (6, 12):
        check(make_case(policy, TURNS, 9, settings, window=window))


@pytest.mark.parametrize("policy", POLICIES)
def test_window_without_budget(policy):
    check(make_case(policy, TURNS, window=7))


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize(
    "rule", [{"softcap": 2.0}, {"sinks": True}, {"softcap": 3.0, "sinks": True, "window": 8}], ids=["softcap", "sinks", "all"]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_softcap_and_sinks(policy, rule, dtype):
    check(make_case(policy, TURNS, 9, group=3, **rule), dtype)


# --------------------------------------------------------------------------------------------------------------- ties


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("inputs", ["zero_queries", "equal_keys"])
@pytest.mark.parametrize("policy", ["tova", "knorm", "snapkv", "pyramidkv", "adakv"])
@pytest.mark.parametrize("group", [1, 3])
def test_ties_go_to_the_newer_token(policy, inputs, dtype, group):
    if policy == "knorm" and inputs == "zero_queries":
        pytest.skip("norms do not depend on queries")
    for script in ((*prompt(41), *steps(12)), (*prompt(7), *steps(19), *prompt(5), *steps(3)), steps(37)):
        if policy in PROMPT_END and script[0].kind == "step":
            continue
        case = make_case(policy, script, 11, {"kernel": 1} if policy in SNAPS else None, inputs=inputs, kv_heads=2, group=group)
        driver = check(case, dtype)
        if policy not in SNAPS:  # half of the budget stays with what had votes, so these do not go by age alone
            assert driver.kept()[0] == [by_age(case)] * 2


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("group", [4, 7, 8])
@pytest.mark.parametrize("policy", ["tova", *SNAPS])
def test_ties_survive_sums_over_many_heads_and_queries(policy, group, dtype):
    """Equal numbers have equal sums, in whatever order they are added."""
    settings = {"obs_window": 32, "kernel": 1} if policy in SNAPS else None
    for length in (41, 70):
        case = make_case(policy, prompt(length), 39, settings, inputs="zero_queries", kv_heads=3, group=group)
        assert check(case, dtype).kept()[0] == [by_age(case)] * 3


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("policy", ["h2o", "tova", *SNAPS])
def test_ties_at_zero_go_to_the_newer_token(policy, dtype):
    """The first token gets all attention."""
    settings = {"h2o": {"heavy_share": 1.0}, "tova": {}}.get(policy, {"kernel": 1})
    for group in ("mean", "max", "sum", "first") if policy != "tova" else (None,):
        for script in ((*prompt(33), *steps(12)), steps(30)):
            if policy in PROMPT_END and script[0].kind == "step":
                continue
            extra = {"group": group} if group else {}
            driver = check(make_case(policy, script, 9, {**settings, **extra}, inputs="one_focus"), dtype)
            length = sum(driver.case.lengths)
            # The snapkv family keeps 9 // 2 tokens of those that had votes at the prompt's end, before its window of 4.
            first = [0, 26, 27, 28] if policy in SNAPS else [0]
            assert driver.kept()[0] == [[*first, *range(length - 9 + len(first), length)]] * 2


@pytest.mark.parametrize("alpha", [0.0, 0.2])
@pytest.mark.parametrize("inputs", ["some_zero_queries", "zero_queries", "one_focus"])
def test_ties_between_heads(inputs, alpha):
    """Newer first, then the lower head."""
    for kv_heads in (2, 3, 5):
        for tokens in (6, 7, 8):
            settings = {"alpha": alpha, "kernel": 1, "num_sink": 1}
            check(make_case("adakv", (*prompt(20), *steps(3)), tokens, settings, inputs=inputs, kv_heads=kv_heads))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("group", ["max", "mean"])
def test_even_attention_expires_nothing(group, dtype):
    """All tokens get 1 / their number exactly, but for rounding."""
    for count, size in (("seen", 1), ("held", 3), ("seen", 8)):
        settings = {"obs_window": 1, "recent_window": 0, "threshold": count, "group": group}
        for script in ((*prompt(41), *steps(12)), (*stream(33), *prompt(9), *steps(3))):
            case = make_case("corm", script, settings=settings, inputs="zero_queries", group=size)
            assert check(case, dtype).kept()[0] == [list(range(case.lengths[0]))] * case.kv_heads


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_what_all_queries_look_at_never_expires(dtype):
    """The first token gets all attention; the others leave when four queries have passed over them."""
    for script in ((*prompt(33), *steps(12)), (*stream(30), *steps(2)), (*prompt(3), *steps(3), *prompt(20))):
        for recent in (0, 6):
            settings = {"obs_window": 4, "recent_window": recent}
            driver = check(make_case("corm", script, settings=settings, inputs="one_focus"), dtype)
            length = sum(driver.case.lengths)
            assert driver.kept()[0] == [[0, *range(length - max(3, recent), length)]] * 2


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_tied_norms(dtype):
    for script in (TURNS, ONLY_STEPS, PADDED_SCRIPTS["turns_mixed"]):
        check(make_case("knorm", script, 9, inputs="tied_norms"), dtype)


# -------------------------------------------------------------------------------------------------------------- sweep


def random_case(number):
    """Everything at once."""
    rng = np.random.default_rng([2024, number])

    def pick(*options):
        return options[rng.integers(len(options))]

    def chance(share):
        return rng.random() < share

    policy = POLICIES[number % len(POLICIES)]
    batch = pick(1, 1, 2, 3)
    calls = []
    for turn in range(pick(1, 2, 3)):
        lengths = rng.integers(1, 26 if turn == 0 else 12, batch).tolist()
        cuts = sorted(set(rng.integers(1, max(lengths), 2).tolist())) if chance(0.3) and max(lengths) > 1 else ()
        if turn > 0 or policy in PROMPT_END or chance(0.7):
            calls += prompt(*lengths, side=pick("left", "right"), cuts=cuts)
        kind = pick("steps", "stream", "gaps")
        if kind == "steps":
            calls += steps(int(rng.integers(1, 9)), batch)
        elif kind == "stream":
            calls += stream(*rng.integers(1, 9, batch).tolist(), side=pick("left", "right"))
        else:
            calls += gappy_stream(number, batch, int(rng.integers(1, 9)))
    settings = {"num_sink": pick(0, 0, 1, 3), "recent_window": pick(0, 0, 2, 5), "keep_special": chance(0.25)}
    if policy in SNAPS:
        settings |= {"obs_window": pick(1, 2, 5), "kernel": pick(1, 3, 7), "pool": pick("max", "avg")}
        settings |= {"group": pick("mean", "max", "sum", "first"), "after_prompt": pick("rank", "rank", "grow")}
    if policy == "h2o":
        settings |= {"heavy_share": pick(0.0, 0.25, 0.5, 0.8, 1.0), "group": pick("mean", "max", "sum", "first")}
    if policy == "adakv":
        settings |= {"alpha": pick(0.0, 0.1, 0.2, 0.5, 1.0)}
    if policy == "pyramidkv":
        settings |= {"beta": pick(1, 3, 20)}
    if policy == "random":
        settings |= {"seed": int(rng.integers(100))}
    if policy in SEEDS:
        own = [name for name in SEEDS[policy] if name not in settings]
        settings |= {name: pick(*SEEDS[policy][name]) for name in rng.permutation(own).tolist()[:3]}
    layers = pick(1, 2, 4)
    case = Case(
        policy,
        tuple(calls),
        kv_heads=pick(1, 2, 3),
        group=pick(1, 2, 3, 4),
        value_dim=pick(8, 5),
        scaling=pick(None, 0.5),
        window=pick(None, None, 5, 12),
        softcap=pick(None, None, 3.0),
        sinks=chance(0.3),
        layers=layers,
        layer=int(rng.integers(layers)),
        sample_ids=tuple(rng.integers(-5, 50, batch).tolist()) if chance(0.4) else None,
        seed=number,
    )
    if chance(0.25):
        settings["rolling"] = True
        case = dataclasses.replace(case, rope=pick(*ROPES))
    if chance(0.5):
        ratio = pick(0.2, 0.5, 0.9)
        case = dataclasses.replace(case, ratio=ratio, known=tuple(case.lengths) if calls[0].kind == "step" else None)
    else:
        protected = settings["num_sink"] + max(settings["recent_window"], settings.get("obs_window", 0))
        case = dataclasses.replace(case, tokens=max(1, protected) + pick(0, 1, 4, 9))
    return dataclasses.replace(case, settings=tuple(sorted(settings.items())))


def sweep(number, dtype):
    with tight_budgets_allowed():
        check(random_case(number), dtype)


@pytest.mark.parametrize("number", range(54))
def test_sweep(number):
    for dtype in TOLERANCE:
        sweep(number, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(30))
def test_big_sweep(block):
    failures = {}
    for number in range(1000 + 50 * block, 1050 + 50 * block):
        for dtype in TOLERANCE:
            try:
                sweep(number, dtype)
            except AssertionError as failure:
                failures.setdefault(number, str(failure).splitlines()[0])
    assert not failures, "\n".join(f"{number}: {text}" for number, text in failures.items())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("policy", POLICIES)
def test_long(policy, dtype):
    """More tokens than the kernels take at a time."""
    script = (*prompt(560), *steps(60), *prompt(120), *steps(40))
    check(make_case(policy, script, 128, {"obs_window": 32, "kernel": 7} if policy in SNAPS else None, layers=2), dtype)
