"""Four policies for `naive.py`: scissorhands, hashevict, hyde and fastgen, as plain loops over tokens and heads in float64.

Words are those of `naive.py`: B is a KV head's budget, capped by a sliding window; t is the newest position; every list is
indexed by KV head. The two modules import each other, so names of `naive` are looked up when a function runs.

scissorhands  A key is low at a query that gives it less attention than an even share. The most often low leaves first.
hashevict     Before a step's attention, the held token leaves whose key's sign code is the farthest from the arriving one's.
hyde          Attention received and key norm, times a decay with age; the decay also weakens the attention of steps.
fastgen       Each KV head keeps one of several sets of tokens: the first that loses little of the first prompt's attention.
"""

from __future__ import annotations

import math

import numpy as np

import naive


def floor_share(share: float, number: int) -> int:
    """floor(share * number) in exact decimal arithmetic."""
    return math.floor(naive.exact(share) * number)


def keep_only(state: naive.State, kv_head: int, positions: list[int]) -> None:
    """Of one KV head, hold these positions only."""
    state.held[kv_head] = sorted(positions)
    state.mass[kv_head] = {j: state.mass[kv_head][j] for j in state.held[kv_head]}


def before_step(case: naive.Case, state: naive.State, segment: naive.Segment, t: int) -> None:
    """What happens before the token `t` of a step is inserted."""
    if case.policy == "fastgen" and state.profile is None:
        raise ValueError("fastgen chooses what to keep at a prompt's end; a step came before any prompt")
    if case.policy == "hashevict":
        budget = naive.capped_by_window(case, segment.budget)
        for kv_head in range(case.num_kv_heads):
            keep_only(state, kv_head, make_room(case, kv_head, t, state.held[kv_head], budget))


# ------------------------------------------------------------------------------------------------- scissorhands


def note_lows(case: naive.Case, state: naive.State, t: int, weights: list[naive.Weights]) -> None:
    """Write down of every key that was held when the query at `t` came whether it was low."""
    for kv_head in range(case.num_kv_heads):
        held = [i for i in state.held[kv_head] if i <= t]  # without the prompt's tokens that come later
        if case.settings["threshold"] == "seen":
            bound = 1 / (t + 1)
        elif case.settings["threshold"] == "held":
            bound = 1 / len(held)
        else:
            raise ValueError(f"unknown threshold {case.settings['threshold']!r}")
        for i in held:
            attention = naive.merge(case, kv_head, weights, i)
            # by more than a thousandth, or so: equal attention is not low, whatever rounding makes of it
            state.lows[kv_head].setdefault(i, {})[t] = attention < bound * (1 - 1 / 1024)


def scissorhands_scores(case: naive.Case, state: naive.State, kv_head: int, t: int) -> naive.Weights:
    """Minus how often a key was low, or how often it was high, over the last obs_window queries."""
    scores = {}
    for i in state.held[kv_head]:
        low = high = 0
        for query, was_low in state.lows[kv_head][i].items():
            if query > t - case.settings["obs_window"]:
                low += was_low
                high += not was_low
        scores[i] = {"low": -float(low), "high": float(high)}[case.settings["count"]]
    return scores


def scissorhands_stay(case: naive.Case, held: int, capped: int, budget: int | None) -> int:
    """How many tokens a decision at a step leaves of `held`.  m is a part of the budget before a window cuts it."""
    if held <= capped:
        return held
    if budget is None:
        return capped
    dropped = max(1, floor_share(case.settings["drop_share"], budget))
    protected = case.settings["num_sink"] + case.settings["recent_window"]
    return min(capped, max(1, budget + 1 - dropped, min(budget, protected)))


# ---------------------------------------------------------------------------------------------------- hashevict


def projection(case: naive.Case) -> np.ndarray:
    """The layer's random directions, (head_dim, bits)."""
    rng = np.random.default_rng([case.seed, case.layer_idx])
    return rng.standard_normal((case.k.shape[2], case.settings["bits"]))


def sign_code(x: np.ndarray, directions: np.ndarray) -> list[bool]:
    """On which side of each direction the vector lies."""
    return [float(np.dot(x, directions[:, j])) > 0 for j in range(directions.shape[1])]


def hamming(a: list[bool], b: list[bool]) -> int:
    """In how many bits two codes differ."""
    return sum(1 for x, y in zip(a, b, strict=True) if x != y)


def hashevict_scores(case: naive.Case, kv_head: int, t: int, held: list[int]) -> naive.Weights:
    """Minus the distance of each held key's code to what arrives at `t`: its key, or the group's queries on average."""
    directions = projection(case)
    if case.settings["probe"] == "key":
        arriving = [case.k[kv_head, t]]
    elif case.settings["probe"] == "query":
        arriving = [case.q[h, t] for h in case.group(kv_head)]
    else:
        raise ValueError(f"unknown probe {case.settings['probe']!r}")
    probes = [sign_code(vector, directions) for vector in arriving]
    scores = {}
    for i in held:
        code = sign_code(case.k[kv_head, i], directions)
        scores[i] = -sum(hamming(code, probe) for probe in probes) / len(probes)
    return scores


def make_room(case: naive.Case, kv_head: int, t: int, held: list[int], budget: int | None) -> list[int]:
    """What is left of `held` so that the token `t` fits in."""
    if budget is None or len(held) < budget:
        return held
    scores = hashevict_scores(case, kv_head, t, held)
    recent = naive.protected_recent(case, budget)
    ranks = [naive.rank_token(case, j, t, recent, scores[j]) for j in held]
    best = sorted(ranks, reverse=True)[: max(0, budget - 1)]
    return sorted(position for _, _, position in best)


def decide_hashevict(case: naive.Case, state: naive.State, segment: naive.Segment, t: int) -> None:
    """A prompt's end with prompt="stream": what would be held if its tokens had come one by one. Steps: nothing more."""
    budget = naive.capped_by_window(case, segment.budget)
    if segment.kind == "step" or budget is None:
        return
    start = t - segment.length + 1
    for kv_head in range(case.num_kv_heads):
        held = [j for j in state.held[kv_head] if j < start]
        for token in range(start, t + 1):
            held = [*make_room(case, kv_head, token, held, budget), token]
        keep_only(state, kv_head, held)


# --------------------------------------------------------------------------------------------------------- hyde


def hyde_decay(case: naive.Case, age: int, budget: int | None) -> float:
    """1 within the window, then smaller with every token, but never less than min_decay; 1 where there is no budget."""
    if budget is None:
        return 1.0
    grace = max(floor_share(case.settings["window_share"], budget), case.settings["recent_window"])
    return max(case.settings["min_decay"], case.settings["decay"] ** max(0, age - grace))


def hyde_scores(case: naive.Case, state: naive.State, kv_head: int, t: int) -> naive.Weights:
    """decay * importance ** power, where importance mixes the attention received and the norm of the key."""
    budget = state.given_budget  # before a sliding window caps it
    held = state.held[kv_head]
    mass = {i: state.mass[kv_head][i] for i in held}
    norm = {i: math.sqrt(sum(float(x) ** 2 for x in case.k[kv_head, i])) for i in held}
    most, longest = max(mass.values()), max(norm.values())
    scores = {}
    for i in held:
        importance = 0.0
        if most > 0:
            importance += case.settings["attention_weight"] * mass[i] / most
        if longest > 0:
            importance += case.settings["norm_weight"] * norm[i] / longest
        scores[i] = hyde_decay(case, t - i, budget) * importance ** case.settings["power"]
    return scores


def fades_of_step(case: naive.Case, state: naive.State, segment: naive.Segment, t: int) -> list[naive.Weights] | None:
    """hyde: what is added to the logit of each held key at a step, log(influence)."""
    if case.policy != "hyde" or "fade" not in case.settings["action"] or segment.budget is None:
        return None
    budget = segment.budget
    fades: list[naive.Weights] = []
    for held in state.held:
        fade = {}
        for i in held:
            influence = 1.0 if i < case.settings["num_sink"] else hyde_decay(case, t - i, budget)
            fade[i] = math.log(influence) if influence > 0 else -math.inf
        fades.append(fade)
    return fades


# ------------------------------------------------------------------------------------------------------ fastgen


def column_sets(case: naive.Case, state: naive.State, kv_head: int, t: int) -> dict[str, set[int]]:
    """The sets of held positions that do not depend on a query, at time `t`."""
    held = state.held[kv_head]
    number = floor_share(case.settings["frequent_share"], t + 1)
    by_mass = sorted(((state.mass[kv_head][i], i) for i in held), reverse=True)  # ties: the newer first
    return {
        "special": {i for i in held if i in case.special},
        "punct": {i for i in held if i in case.punctuation},
        "frequent": {i for _, i in by_mass[:number]},
        "full": set(held),
    }


def belongs(member: str, columns: dict[str, set[int]], key: int, query: int, reach: int) -> bool:
    """Is `key` in the member's set, as seen from `query`?  Members are parts joined by "+"."""
    for part in member.split("+"):
        if part == "local":
            if query - key <= reach:
                return True
        elif key in columns[part]:
            return True
    return False


def lost_mass(
    case: naive.Case, state: naive.State, kv_head: int, member: str, t: int, segment_weights: list[list[naive.Weights]]
) -> float:
    """The attention that fell on keys outside of the member's set, averaged over the group's heads and the queries."""
    columns = column_sets(case, state, kv_head, t)
    reach = floor_share(case.settings["local_share"], t + 1)
    first = t - len(segment_weights) + 1
    lost = []
    for h in case.group(kv_head):
        for query, weights in enumerate(segment_weights, start=first):
            outside = [weight for key, weight in weights[h].items() if not belongs(member, columns, key, query, reach)]
            lost.append(sum(outside))
    return min(1.0, sum(lost) / len(lost))  # rounding may say more than all


def choose_member(
    case: naive.Case, state: naive.State, kv_head: int, t: int, segment_weights: list[list[naive.Weights]]
) -> int:
    """The index of the first member that loses little enough, else of the last."""
    members = case.settings["members"]
    times = {"tv": 1, "l1": 2}[case.settings["recovery"]]
    for index, member in enumerate(members):
        if times * lost_mass(case, state, kv_head, member, t, segment_weights) <= 1 - case.settings["threshold"]:
            return index
    return len(members) - 1


def fastgen_kept(case: naive.Case, state: naive.State, kv_head: int, t: int, budget: int | None) -> list[int]:
    """The member's set and what tiers protect, without what left the window; the best of them if there are too many."""
    member = case.settings["members"][state.profile[kv_head]]
    columns = column_sets(case, state, kv_head, t)
    reach = floor_share(case.settings["local_share"], t + 1)
    recent = case.settings["recent_window"]
    ranks = []
    for i in state.held[kv_head]:
        tier, key, _ = naive.rank_token(case, i, t, recent, 0.0)
        if tier == naive.DEAD:
            continue
        if tier == naive.NORMAL and not belongs(member, columns, i, t, reach):
            continue
        if tier == naive.NORMAL:
            token_class = 2 if i in case.special else 1 if i in case.punctuation else 0
            ranks.append((tier, token_class, state.mass[kv_head][i], i))
        else:
            ranks.append((tier, key, 0.0, i))
    best = sorted(ranks, reverse=True)
    if budget is not None:
        best = best[:budget]
    return [position for _, _, _, position in best]


def decide_fastgen(
    case: naive.Case, state: naive.State, segment: naive.Segment, t: int, segment_weights: list[list[naive.Weights]]
) -> None:
    """Choose the members, at the first prompt's end, then keep their sets."""
    heads = range(case.num_kv_heads)
    if state.profile is None:
        state.profile = [choose_member(case, state, kv_head, t, segment_weights) for kv_head in heads]
    budget = naive.capped_by_window(case, segment.budget)
    for kv_head in heads:
        keep_only(state, kv_head, fastgen_kept(case, state, kv_head, t, budget))
