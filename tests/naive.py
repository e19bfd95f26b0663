"""A slow, plain reference of KV-cache eviction for one attention layer and one sequence.

The tests compare a fast implementation with this one.  Nothing here is clever: numpy float64 for the vectors and
plain Python loops over tokens, heads and keys.  It shares no code with the package under test.

Vocabulary
    H query heads, Hkv KV heads, g = H // Hkv; query head h reads KV head h // g.
    A *position* is a token's true index 0..T-1; it is never renumbered.
    A *segment* is a "prompt" (a whole turn, one decision at its end) or "step" (one decision after each token).
    A *decision* ranks the held tokens of a KV head by (tier, key, position) and keeps the B largest.

A token's tier, from lowest:  0 dead (outside the window)  1 normal (key = policy score)  2 recent  3 special  4 sink.
The highest tier that applies counts, except that dead wins over everything.

Fractions of a budget (heavy_share, alpha, the pyramid) are computed in exact decimal arithmetic, so that floors and
ties of remainders never depend on binary rounding: 0.29 of 100 is 29, and alpha = 0.2 means exactly one fifth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

import naive_corm
import naive_seeds

DEAD, NORMAL, RECENT, SPECIAL, SINK = 0, 1, 2, 3, 4

COMMON_SETTINGS = {"num_sink": 0, "recent_window": 0, "keep_special": False, "rolling": False}
SNAP_SETTINGS = {"obs_window": 32, "kernel": 7, "pool": "max", "group": "mean", "after_prompt": "rank"}
POLICY_SETTINGS: dict[str, dict] = {
    "full": {},
    "streaming_llm": {"num_sink": 4},
    "random": {},
    "h2o": {"heavy_share": 0.5, "group": "mean"},
    "tova": {},
    "knorm": {},
    "snapkv": SNAP_SETTINGS,
    "pyramidkv": {**SNAP_SETTINGS, "beta": 20},  # beta only matters to pyramid_budgets
    "adakv": {**SNAP_SETTINGS, "alpha": 0.2},
    "scissorhands": {
        "recent_window": 10,
        "obs_window": 400,
        "drop_share": 0.5,
        "count": "low",
        "threshold": "seen",
        "group": "mean",
        "layers": "uniform",  # this and persistence only matter to several layers
        "persistence": (),
    },
    "hashevict": {"num_sink": 4, "recent_window": 10, "bits": 16, "probe": "query", "prompt": "stream"},
    "hyde": {
        "action": "fade+evict",
        "attention_weight": 0.7,
        "norm_weight": 0.3,
        "decay": 0.97,
        "window_share": 0.25,
        "min_decay": 0.15,
        "power": 1.2,
        "group": "mean",
    },
    "fastgen": {
        "threshold": 0.95,
        "recovery": "tv",
        "local_share": 0.3,
        "frequent_share": 0.3,
        "members": ("special", "special+punct", "special+punct+frequent", "special+punct+frequent+local", "full"),
        "group": "mean",
    },
    "corm": {"obs_window": 256, "recent_window": 256, "threshold": "seen", "group": "max"},
}
SNAP_FAMILY = ("snapkv", "pyramidkv", "adakv")

Weights = dict[int, float]  # position -> softmax weight of one query head
Rank = tuple[int, float, int]  # (tier, key, position)


@dataclass
class Segment:
    """Tokens that arrive together ("prompt") or one by one ("step"), and the layer's budget from here on."""

    kind: str  # "prompt" | "step"
    length: int
    budget: int | None  # tokens per KV head; None = unlimited


@dataclass
class Result:
    """What a replay produced."""

    out: np.ndarray  # (H, T, dv)
    kept: list  # kept[t][kv_head] = sorted positions held after the decision following t; None inside a prompt
    read: list  # read[t][kv_head] = sorted positions that the query at t attended, itself included
    profile: list[int] | None = None  # fastgen: profile[kv_head] = index of the member that was chosen


@dataclass
class Case:
    """The fixed inputs of one replay."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    policy: str
    settings: dict
    scaling: float
    window: int | None
    softcap: float | None
    sinks: np.ndarray | None
    layer_idx: int
    seed: int
    sample_id: int | None
    special: AbstractSet[int]
    rotate: Callable[[np.ndarray, int], np.ndarray] | None
    punctuation: AbstractSet[int] = frozenset()

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self.k.shape[0]

    def group(self, kv_head: int) -> list[int]:
        """The query heads that read this KV head."""
        g = self.q.shape[0] // self.num_kv_heads
        return list(range(kv_head * g, (kv_head + 1) * g))


@dataclass
class State:
    """What changes during one replay; every list is indexed by KV head."""

    held: list[list[int]]  # sorted positions in the cache
    mass: list[Weights]  # attention received so far by each held position
    rank: list[Weights] = field(default_factory=list)  # snapkv family: scores of the last prompt's end, of what was unprotected
    head_budgets: list[int] | None = None  # adakv: set at a prompt's end, used by the steps that follow
    lows: list[dict[int, dict[int, bool]]] = field(default_factory=list)  # scissorhands: key -> query -> was it low?
    important: list[list[dict[int, bool]]] = field(default_factory=list)  # corm: [query][key], what was looked at
    profile: list[int] | None = None  # fastgen: set at the first prompt's end
    given_budget: int | None = None  # of the decision that is due, before a sliding window caps it
    kept: list = field(default_factory=list)
    read: list = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------- attention


def softmax(logits: list[float], sink: float | None) -> list[float]:
    """Softmax over `logits`; `sink` adds one more term to the denominator only."""
    top = max(logits) if sink is None else max(max(logits), sink)
    numerators = [math.exp(logit - top) for logit in logits]
    denominator = sum(numerators)
    if sink is not None:
        denominator += math.exp(sink - top)
    return [numerator / denominator for numerator in numerators]


def attention_logit(query: np.ndarray, key: np.ndarray, scaling: float, softcap: float | None) -> float:
    """The scaled, optionally soft-capped, dot product."""
    logit = scaling * float(np.dot(query, key))
    if softcap:
        logit = softcap * math.tanh(logit / softcap)
    return logit


def visible(cache: list[int], t: int, window: int | None) -> list[int]:
    """The cached positions that the query at `t` may attend: causal and, if there is a window, inside it."""
    return [j for j in cache if j <= t and (window is None or j > t - window)]


def full_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention with no cache and no eviction; returns (H, T, dv)."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    num_heads, length, dim = q.shape
    g = num_heads // k.shape[0]
    scaling = dim**-0.5 if scaling is None else scaling
    out = np.zeros((num_heads, length, v.shape[2]))
    for h in range(num_heads):
        for t in range(length):
            seen = visible(list(range(length)), t, window)
            logits = [attention_logit(q[h, t], k[h // g, j], scaling, softcap) for j in seen]
            weights = softmax(logits, None if sinks is None else float(sinks[h]))
            for j, weight in zip(seen, weights, strict=True):
                out[h, t] += weight * v[h // g, j]
    return out


def attend_one_head(
    case: Case, h: int, kv_head: int, t: int, cache: list[int], fade: Weights | None = None
) -> tuple[np.ndarray, Weights]:
    """Query head `h` at token `t` over `cache` (everything in the cache then); returns the output and the weights."""
    rolling = case.settings["rolling"]
    rank = {position: index for index, position in enumerate(cache)}
    query = case.rotate(case.q[h, t], rank[t]) if rolling else case.q[h, t]
    seen = visible(cache, t, case.window)
    logits = []
    for j in seen:
        key = case.rotate(case.k[kv_head, j], rank[j]) if rolling else case.k[kv_head, j]
        logits.append(attention_logit(query, key, case.scaling, case.softcap) + (fade[j] if fade is not None else 0.0))
    weights = softmax(logits, None if case.sinks is None else float(case.sinks[h]))
    out = np.zeros(case.v.shape[2])
    for j, weight in zip(seen, weights, strict=True):
        out += weight * case.v[kv_head, j]
    return out, dict(zip(seen, weights, strict=True))


def attend_token(
    case: Case, state: State, t: int, caches: list[list[int]], out: np.ndarray, fades: list[Weights] | None = None
) -> list[Weights]:
    """All heads of token `t`: fills `out[:, t]`, records what was read, adds to the mass; returns weights per head."""
    weights: list[Weights] = []
    for kv_head in range(case.num_kv_heads):
        for h in case.group(kv_head):
            fade = None if fades is None else fades[kv_head]
            out[h, t], head_weights = attend_one_head(case, h, kv_head, t, caches[kv_head], fade)
            weights.append(head_weights)
    state.read.append([visible(cache, t, case.window) for cache in caches])
    for kv_head in range(case.num_kv_heads):
        for j in caches[kv_head]:
            gained = merge(case, kv_head, weights, j)
            state.mass[kv_head][j] = state.mass[kv_head].get(j, 0.0) + gained
    if case.policy == "scissorhands":
        naive_seeds.note_lows(case, state, t, weights)
    if case.policy == "corm":
        naive_corm.note_important(case, state, t, weights)
    return weights


def merge(case: Case, kv_head: int, weights: list[Weights], position: int) -> float:
    """One query's attention to `position`, merged over the query heads of the group (0 where not attended)."""
    values = [weights[h].get(position, 0.0) for h in case.group(kv_head)]
    how = case.settings.get("group", "mean")
    if how == "mean":
        return sum(values) / len(values)
    if how == "max":
        return max(values)
    if how == "sum":
        return sum(values)
    if how == "first":
        return values[0]
    raise ValueError(f"unknown group merge {how!r}")


# ------------------------------------------------------------------------------------------------------- scores


def mix(x: int) -> int:
    """A 32-bit finaliser."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    x ^= x >> 16
    return x


def random_score(seed: int, sample_id: int | None, layer_idx: int, kv_head: int, position: int) -> float:
    """A number in [0, 1) that depends only on the arguments."""
    h = mix(seed % 2**32)
    parts = [layer_idx, kv_head, position] if sample_id is None else [sample_id, layer_idx, kv_head, position]
    for part in parts:
        h = mix(h ^ mix((part + 0x9E3779B9) % 2**32))
    return (h >> 8) / 2**24


def tova_score(weights: list[Weights], position: int) -> float:
    """The newest query's attention to `position`, averaged over all query heads of the layer."""
    return sum(head_weights.get(position, 0.0) for head_weights in weights) / len(weights)


def pool_along(raw: list[float], kernel: int, how: str) -> list[float]:
    """Centred pooling with stride 1; max ignores missing neighbours, avg counts them as zeros."""
    if kernel % 2 == 0:
        raise ValueError("kernel must be odd")
    half = kernel // 2
    pooled = []
    for i in range(len(raw)):
        neighbours = [raw[j] for j in range(i - half, i + half + 1) if 0 <= j < len(raw)]
        if how == "max":
            pooled.append(max(neighbours))
        elif how == "avg":
            pooled.append(sum(neighbours) / kernel)
        else:
            raise ValueError(f"unknown pool {how!r}")
    return pooled


def snap_scores(case: Case, held: list[int], kv_head: int, t: int, segment_weights: list[list[Weights]]) -> Weights:
    """Pooled attention from the segment's last queries to the prefix; what is not in the prefix is tier recent."""
    w = case.settings["obs_window"]
    observers = segment_weights[max(0, len(segment_weights) - w) :]
    prefix = [j for j in sorted(held) if j <= t - max(case.settings["recent_window"], w)]
    raw = [sum(merge(case, kv_head, weights, j) for weights in observers) for j in prefix]
    pooled = pool_along(raw, case.settings["kernel"], case.settings["pool"])
    scores = dict.fromkeys(held, 0.0)
    scores.update(zip(prefix, pooled, strict=True))
    return scores


def rank_between_prompts(rank: Weights, held: list[int], budget: int) -> Weights:
    """Fewest votes first, until those with votes fill half of the budget; then the oldest of the others."""
    voted = [j for j in held if j in rank]
    if len(voted) > budget // 2:
        return {j: rank.get(j, math.inf) for j in held}
    return {j: math.inf if j in rank else float(j) for j in held}


def policy_scores(
    case: Case, state: State, kv_head: int, t: int, kind: str, segment_weights: list[list[Weights]], budget: int
) -> Weights:
    """The policy's score of every held position of one KV head."""
    held = state.held[kv_head]
    if case.policy in ("full", "streaming_llm", "hashevict"):
        return {j: float(j) for j in held}
    if case.policy == "random":
        return {j: random_score(case.seed, case.sample_id, case.layer_idx, kv_head, j) for j in held}
    if case.policy == "h2o":
        return {j: state.mass[kv_head][j] for j in held}
    if case.policy == "tova":
        return {j: tova_score(segment_weights[-1], j) for j in held}
    if case.policy == "knorm":
        return {j: -to_14_bits(math.sqrt(sum(float(x) ** 2 for x in case.k[kv_head, j]))) for j in held}
    if case.policy == "scissorhands":
        return naive_seeds.scissorhands_scores(case, state, kv_head, t)
    if case.policy == "hyde":
        return naive_seeds.hyde_scores(case, state, kv_head, t)
    if kind == "step":  # the snapkv family looks at attention at a prompt's end; what wasn't scored there goes last
        return rank_between_prompts(state.rank[kv_head], held, budget)
    return snap_scores(case, held, kv_head, t, segment_weights)


# ---------------------------------------------------------------------------------------------------- decisions


def exact(number: float) -> Fraction:
    """The decimal number as written, without binary rounding."""
    return Fraction(str(number))


def protected_recent(case: Case, budget: int) -> int:
    """How many of the newest positions the policy protects."""
    recent = case.settings["recent_window"]
    if case.policy == "h2o":
        heavy = math.floor(exact(case.settings["heavy_share"]) * budget)
        recent = max(recent, budget - heavy)
    if case.policy in SNAP_FAMILY:
        recent = max(recent, case.settings["obs_window"])
    return recent


def rank_token(case: Case, position: int, t: int, recent: int, score: float) -> Rank:
    """(tier, key, position) of one held token when `t` is the newest position."""
    if case.window is not None and position <= t - case.window:
        return DEAD, position, position
    if position < case.settings["num_sink"]:
        return SINK, -position, position
    if case.settings["keep_special"] and position in case.special:
        return SPECIAL, position, position
    if position > t - recent:
        return RECENT, position, position
    return NORMAL, score, position


def largest_remainder(shares: list[Fraction], total: int) -> list[int]:
    """Floor every share, then hand out what is missing from `total`, largest fractional part first."""
    whole = [math.floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (-(shares[i] - whole[i]), i))
    missing = total - sum(whole)
    for turn in range(missing):
        whole[order[turn % len(order)]] += 1
    return whole


def pyramid_budgets(budget: int, obs_window: int, length: int, num_layers: int, beta: float = 20) -> list[int]:
    """PyramidKV: a budget per layer, falling linearly with depth, that sums to num_layers * budget."""
    if budget <= obs_window or length <= budget or num_layers == 1:
        return [budget] * num_layers
    base = Fraction(budget - obs_window)
    low = base / exact(beta)
    high = 2 * base - low
    if high >= length - obs_window:
        high = Fraction(length - obs_window)
        low = 2 * base - high
    shares = [obs_window + high - layer * (high - low) / (num_layers - 1) for layer in range(num_layers)]
    return largest_remainder(shares, num_layers * budget)


def to_14_bits(x: float) -> float:
    """Rounded to 14 significant bits (half to even), so that norms that differ by rounding errors tie."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 2**14) / 2**14, exponent)


def adakv_budgets(case: Case, ranks: list[list[Rank]], budget: int) -> list[int]:
    """AdaKV: a budget per KV head, from how many of the layer's best normal tokens each head owns."""
    heads = range(len(ranks))
    held = [len(ranks[h]) for h in heads]
    protected = [sum(1 for tier, _, _ in ranks[h] if tier >= RECENT) for h in heads]
    bases = [budget - protected[h] for h in heads]  # equal unless the heads hold different protected tokens
    if min(bases) <= 0 or max(held) <= budget:
        return [budget for _ in heads]

    pool = [(-score, -position, h) for h in heads for tier, score, position in ranks[h] if tier == NORMAL]
    winners = sorted(pool)[: sum(bases)]
    alpha = exact(case.settings["alpha"])
    shares = []
    for h in heads:
        count = sum(1 for _, _, owner in winners if owner == h)
        shares.append((1 - alpha) * count + alpha * bases[h])
    # Fewer normal tokens than places: all can be kept, so start from an even split.
    extra = bases if len(winners) < sum(bases) else largest_remainder(shares, sum(bases))

    budgets = [protected[h] + extra[h] for h in heads]
    for giver in heads:  # a place that a head can't fill goes to the first head that can, one by one
        for taker in heads:
            while budgets[giver] > held[giver] and budgets[taker] < held[taker]:
                budgets[giver] -= 1
                budgets[taker] += 1
    return budgets


def capped_by_window(case: Case, budget: int | None) -> int | None:
    """min(budget, window), where None means no limit."""
    limits = [limit for limit in (budget, case.window) if limit is not None]
    return min(limits) if limits else None


def budgets_before_ranking(case: Case, state: State, segment: Segment) -> list[int | None]:
    """The budget of each KV head that this decision starts from."""
    is_step = segment.kind == "step"
    budget = segment.budget
    if case.policy == "full" or (case.policy == "hyde" and "evict" not in case.settings["action"]):
        budget = None
    if is_step and case.settings.get("after_prompt") == "grow":
        budget = None
    elif is_step and state.head_budgets is not None:
        return [capped_by_window(case, head_budget) for head_budget in state.head_budgets]
    return [capped_by_window(case, budget)] * case.num_kv_heads


def decide(case: Case, state: State, segment: Segment, t: int, segment_weights: list[list[Weights]]) -> None:
    """Drop every KV head to its budget.  `segment_weights` is per query of the segment (a step: of `t` alone)."""
    if case.policy == "fastgen":
        naive_seeds.decide_fastgen(case, state, segment, t, segment_weights)
        return
    if case.policy == "corm":
        naive_corm.decide(case, state, segment, t)
        return
    if case.policy == "hashevict" and (segment.kind == "step" or case.settings["prompt"] == "stream"):
        naive_seeds.decide_hashevict(case, state, segment, t)
        return
    state.given_budget = segment.budget
    if segment.kind == "prompt":
        state.head_budgets = None
    budgets = budgets_before_ranking(case, state, segment)
    if None in budgets:  # then all are None: nothing is limited
        return

    ranks: list[list[Rank]] = []
    for kv_head in range(case.num_kv_heads):
        scores = policy_scores(case, state, kv_head, t, segment.kind, segment_weights, budgets[kv_head])
        recent = protected_recent(case, budgets[kv_head])
        ranks.append([rank_token(case, j, t, recent, scores[j]) for j in state.held[kv_head]])

    if case.policy in SNAP_FAMILY and segment.kind == "prompt":
        state.rank = [{j: score for tier, score, j in head if tier == NORMAL} for head in ranks]
    if case.policy == "adakv" and segment.kind == "prompt":
        state.head_budgets = adakv_budgets(case, ranks, budgets[0])
        budgets = [capped_by_window(case, head_budget) for head_budget in state.head_budgets]

    if case.policy == "scissorhands" and segment.kind == "step":
        budgets = [
            naive_seeds.scissorhands_stay(case, len(ranks[h]), budgets[h], segment.budget) for h in range(case.num_kv_heads)
        ]
    for kv_head in range(case.num_kv_heads):
        best = sorted(ranks[kv_head], reverse=True)[: budgets[kv_head]]
        state.held[kv_head] = sorted(position for _, _, position in best)
        state.mass[kv_head] = {j: state.mass[kv_head][j] for j in state.held[kv_head]}


# ------------------------------------------------------------------------------------------------------- replay


def complete_settings(policy: str, settings: dict | None) -> dict:
    """The policy's defaults overridden by `settings`; an unknown name is an error."""
    complete = {**COMMON_SETTINGS, **POLICY_SETTINGS[policy]}
    for name, value in (settings or {}).items():
        if name not in complete:
            raise ValueError(f"policy {policy!r} has no setting {name!r}")
        complete[name] = value
    return complete


def run_prompt(case: Case, state: State, segment: Segment, start: int, out: np.ndarray) -> None:
    """A whole turn: every token attends with nothing evicted, then one decision."""
    tokens = list(range(start, start + segment.length))
    state.held = [held + tokens for held in state.held]
    segment_weights = [attend_token(case, state, t, state.held, out) for t in tokens]
    decide(case, state, segment, tokens[-1], segment_weights)
    state.kept += [None] * (segment.length - 1)
    state.kept.append([list(held) for held in state.held])


def run_step(case: Case, state: State, segment: Segment, t: int, out: np.ndarray) -> None:
    """One token: insert it, attend, decide (hashevict decides first)."""
    naive_seeds.before_step(case, state, segment, t)
    state.held = [[*held, t] for held in state.held]
    weights = attend_token(case, state, t, state.held, out, naive_seeds.fades_of_step(case, state, segment, t))
    decide(case, state, segment, t, [weights])
    state.kept.append([list(held) for held in state.held])


def replay(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    segments: list[Segment],
    policy: str,
    settings: dict | None = None,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    layer_idx: int = 0,
    seed: int = 0,
    sample_id: int | None = None,
    special: AbstractSet[int] = frozenset(),
    punctuation: AbstractSet[int] = frozenset(),
    rotate: Callable[[np.ndarray, int], np.ndarray] | None = None,
) -> Result:
    """Run the segments through one layer's cache: q (H, T, d), k (Hkv, T, d), v (Hkv, T, dv)."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    num_heads, length, dim = q.shape
    if sum(segment.length for segment in segments) != length:
        raise ValueError("the segments do not add up to the sequence")
    complete = complete_settings(policy, settings)
    if complete["rolling"] and rotate is None:
        raise ValueError("rolling needs rotate")
    scaling = dim**-0.5 if scaling is None else scaling
    inputs = (q, k, v, policy, complete, scaling, window, softcap, sinks, layer_idx, seed, sample_id)
    case = Case(*inputs, special, rotate, punctuation)
    state = State(held=[[] for _ in range(case.num_kv_heads)], mass=[{} for _ in range(case.num_kv_heads)])
    state.rank = [{} for _ in range(case.num_kv_heads)]
    state.lows = [{} for _ in range(case.num_kv_heads)]
    state.important = [[] for _ in range(case.num_kv_heads)]
    out = np.zeros((num_heads, length, v.shape[2]))
    start = 0
    for segment in segments:
        if segment.kind == "prompt" and segment.length > 0:
            run_prompt(case, state, segment, start, out)
        elif segment.kind == "step":
            for t in range(start, start + segment.length):
                run_step(case, state, segment, t, out)
        elif segment.kind != "prompt":
            raise ValueError(f"unknown segment kind {segment.kind!r}")
        start += segment.length
    return Result(out=out, kept=state.kept, read=state.read, profile=state.profile)
