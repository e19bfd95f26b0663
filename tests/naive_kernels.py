"""Attention over rows of slots, and decoding with eviction, as plain loops in float64: slow, and meant to be obviously right.

A row is a list of tokens in any order, each a dict: key, content (its value vector), position, value (the number that a rule
ranks by), norm, bits (one int), special, source, and while a step is replayed `observed`. Written from the semantics alone: no
slots, no offsets.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from kvlab.kernels.contract import HAIR

DEAD, NORMAL, RECENT, SPECIAL, SINK = range(5)
NO_NUMBER = -math.inf
MERGE = {"mean": lambda heads: sum(heads) / len(heads), "sum": sum, "max": max, "first": lambda heads: heads[0]}


@dataclass
class Scanned:
    """outputs (batch, kv_heads, group, tokens, value_dim); rows after the scan; margin: how clear the closest decision was,
    as the gap between the value that left and the next one, or between attention and a bound, relative to them; peaks: most
    tokens that each row held."""

    outputs: np.ndarray
    rows: list
    margin: float = math.inf
    peaks: list = field(default_factory=list)


def numbers(tensor):
    """float64 (or int, bool) copy of the very numbers that a kernel gets."""
    return (tensor.double() if tensor.is_floating_point() else tensor).cpu().numpy().copy()


def bits_of(row_of_bytes):
    """Packed bits as one int, the first bit the lowest."""
    return int.from_bytes(bytes(row_of_bytes.tolist()), "little")


def rows_of(slots):
    """Rows of a `Slots` as lists of tokens, in slot order."""
    planes = {"key": slots.keys, "content": slots.values, "position": slots.positions}
    planes |= {name: getattr(slots, name) for name in ("value", "norm", "bits", "special", "source")}
    arrays = {name: numbers(plane) for name, plane in planes.items() if plane is not None}
    arrays["position"] = arrays["position"].tolist()
    if "bits" in arrays:
        arrays["bits"] = [bits_of(packed) for packed in arrays["bits"]]
    spans = zip(slots.offsets.tolist(), slots.lengths.tolist(), strict=True)
    return [[{name: array[slot] for name, array in arrays.items()} for slot in range(o, o + n)] for o, n in spans]


def dense_rows(keys, values, positions):
    """Rows of dense (batch, kv_heads, slots, ...) tensors; a token of position -1 is an empty slot."""
    keys, values, positions = (numbers(tensor.flatten(0, 1)) for tensor in (keys, values, positions))
    return [
        [{"key": k, "content": v, "position": p} for k, v, p in zip(*row, strict=True)]
        for row in zip(keys, values, positions, strict=True)
    ]


def sees(now, position, window):
    return 0 <= position <= now and (window is None or position > now - window)


def capped(logit, rule):
    return logit if rule.softcap is None else rule.softcap * math.tanh(logit / rule.softcap)


def faded(age, rate, floor, grace):
    """What an old token's influence has come down to."""
    return max(floor, rate ** max(0, age - grace))


def lost(now, position, fade, grace):
    """What is added to a logit."""
    if fade is None or position < fade.num_sink:
        return 0.0
    return math.log(faded(now - position, fade.rate, fade.floor, grace))


def weights_of(query, row, now, rule, sink, grace):
    """One query head's weights over a row, 0 where it sees nothing. NaN if there is nothing at all that it sees."""
    dots = np.array([token["key"] for token in row]) @ query
    places = [token["position"] for token in row]
    logits = [
        capped(rule.scaling * dot, rule) + lost(now, place, rule.fade, grace) if sees(now, place, rule.window) else None
        for place, dot in zip(places, dots.tolist(), strict=True)
    ]
    terms = [logit for logit in [*logits, sink] if logit is not None]
    if not terms:
        return [math.nan] * len(row)
    top = max(terms)
    total = math.fsum(math.exp(term - top) for term in terms)
    return [0.0 if logit is None else math.exp(logit - top) / total for logit in logits]


def sink_of(rule, head, member):
    return None if rule.sinks is None else float(rule.sinks[head, member])


def grace_of(rule, b, head):
    return None if rule.fade is None else int(rule.fade.grace[b, head])


def mixed(weights, row):
    """Sum of weights times value vectors, whatever lies in slots that aren't seen."""
    return sum(weight * token["content"] for weight, token in zip(weights, row, strict=True) if weight != 0)


def naive_attend(queries, rows, query_positions, rule):
    """outputs (batch, kv_heads, group, queries, value_dim), weights (batch, kv_heads, group, queries, longest row)."""
    batch, kv_heads, group, count, _ = queries.shape
    queries, query_positions = numbers(queries), numbers(query_positions)
    value_dim = next((len(token["content"]) for row in rows for token in row), 0)
    outputs = np.zeros((batch, kv_heads, group, count, value_dim))
    weights = np.zeros((batch, kv_heads, group, count, max(len(row) for row in rows)))
    for b, h, g, q in np.ndindex(batch, kv_heads, group, count):
        row, now = rows[b * kv_heads + h], query_positions[b, q]
        if now < 0:
            continue
        found = weights_of(queries[b, h, g, q], row, now, rule, sink_of(rule, h, g), grace_of(rule, b, h))
        weights[b, h, g, q, : len(row)] = found
        outputs[b, h, g, q] = mixed(found, row)
    return outputs, weights


def naive_prefill(queries, keys, values, query_positions, positions, rule, group):
    """outputs, and mass (batch, kv_heads, slots): each query's weights merged over its group, summed over queries."""
    outputs, weights = naive_attend(queries, dense_rows(keys, values, positions), query_positions, rule)
    mass = np.zeros(positions.shape)
    for b, h, q, slot in np.ndindex(*weights.shape[:2], *weights.shape[3:]):
        mass[b, h, slot] += MERGE[group](list(weights[b, h, :, q, slot]))
    return outputs, mass


def naive_scan(queries, arrivals, rows, limits, attention, rule):
    """Each token comes in, attends, and lets tokens leave."""
    batch, kv_heads, group, count, _ = queries.shape
    outputs = np.zeros((batch, kv_heads, group, count, arrivals.values.shape[-1]))
    scanned = Scanned(outputs, [[dict(token) for token in row] for row in rows], peaks=[len(row) for row in rows])
    every = range(kv_heads)
    for b in range(batch):
        for heads in [list(every)] if rule.coupled else [[h] for h in every]:
            for t in range(count):
                _step(scanned, numbers(queries[b, :, :, t]), arrivals, limits, attention, rule, (b, heads, t))
    return scanned


def _step(scanned, queries, arrivals, limits, attention, rule, where):
    b, heads, t = where
    kv_heads = len(queries)
    unit = [scanned.rows[b * kv_heads + h] for h in heads]
    now, first = int(arrivals.positions[b, t]), heads[0]
    limit, target, recent = (int(plane[b, first]) for plane in (limits.limit, limits.target, limits.recent))
    grace = None if limits.grace is None else int(limits.grace[b, first])
    probes = [] if arrivals.probes is None else [bits_of(packed) for packed in arrivals.probes[b, first, :, t]]

    def make_room(room):
        keys = None
        while len(unit[0]) > room:
            if keys is None or rule.order == "ranked":
                keys = _keys(unit, rule, now, limit, grace, probes)
            _drop(scanned, unit, keys, now, recent, limits.num_sink, attention.window, rule)

    def expire():
        if rule.order == "expired":
            _expire(scanned, unit[0], now, recent, limits.num_sink, attention.window, rule)

    if now < 0:
        return
    if limits.before:
        expire()
        if len(unit[0]) >= limit:
            make_room(min(target, limit - 1))
    for h, row in zip(heads, unit, strict=True):
        row.append(_arriving(arrivals, b, h, t))
        scanned.peaks[b * kv_heads + h] = max(scanned.peaks[b * kv_heads + h], len(row))
        if queries.shape[-1] > 0:
            merged = _attend(scanned.outputs[b, h, :, t], queries[h], row, now, attention, rule, (b, h))
            _observe(scanned, row, merged, now, rule)
    if not limits.before:
        expire()
        if len(unit[0]) > limit:
            make_room(min(target, limit))


def _arriving(arrivals, b, h, t):
    token = {"key": numbers(arrivals.keys[b, h, t]), "content": numbers(arrivals.values[b, h, t])}
    token["position"] = int(arrivals.positions[b, t])
    token["value"] = 0.0 if arrivals.value is None else float(arrivals.value[b, h, t])
    token["norm"] = 0.0 if arrivals.norm is None else float(arrivals.norm[b, h, t])
    token["bits"] = 0 if arrivals.bits is None else bits_of(arrivals.bits[b, h, t])
    token["special"] = False if arrivals.special is None else bool(arrivals.special[b, t])
    token["source"] = 0 if arrivals.source is None else int(arrivals.source[b, h, t])
    return token


def _attend(out, queries, row, now, attention, rule, where):
    """Write outputs of the group's query heads; return each token's weight, merged over them."""
    head, grace = where[1], grace_of(attention, *where)
    weights = [weights_of(query, row, now, attention, sink_of(attention, head, g), grace) for g, query in enumerate(queries)]
    for g, of_head in enumerate(weights):
        out[g] = mixed(of_head, row)
    return [MERGE[rule.group](list(of_token)) for of_token in zip(*weights, strict=True)]


def _observe(scanned, row, merged, now, rule):
    """What a query's attention does to the tokens of a row, its own included."""
    for token, received in zip(row, merged, strict=True):
        token["observed"] = received
        if rule.observe == "sum":
            token["value"] = token["value"] + received
        if rule.observe in ("marks", "stamps"):
            bound = (1 - HAIR) / (len(row) if rule.marks.of == "held" else now + 1)
            scanned.margin = min(scanned.margin, abs(received - bound) / bound)
        if rule.observe == "stamps" and not received < bound:
            token["value"] = float(now)
        if rule.observe == "marks":
            place = now % rule.marks.window
            token["bits"] = token["bits"] & ~(1 << place) | ((received < bound) != rule.marks.high) << place


def _keys(unit, rule, now, limit, grace, probes):
    """What orders a unit's unprotected tokens, the lowest first: {position: number}."""
    row, name = unit[0], "observed" if rule.observe == "last" else "value"
    places = [token["position"] for token in row]
    if rule.order == "age":
        return dict(zip(places, places, strict=True))
    if rule.order == "count":
        sign = 1 if rule.marks.high else -1
        return {token["position"]: sign * token["bits"].bit_count() for token in row}
    if rule.order == "distance":
        return {token["position"]: -sum((token["bits"] ^ probe).bit_count() for probe in probes) for token in row}
    if rule.order == "decayed":
        return _left_of_importance(row, rule.decay, now, grace, name)
    values = {}  # of each position: its mean over the unit's rows
    for place in places:
        same = [other for of_head in unit for other in of_head if other["position"] == place]
        assert len(same) == len(unit), "rows of a unit must hold the same tokens"
        values[place] = sum(other.get(name, 0.0) for other in same) / len(unit)
    if rule.order == "ranked" and sum(map(math.isfinite, values.values())) <= limit // 2:
        return {place: math.inf if math.isfinite(value) else place for place, value in values.items()}
    return {place: NO_NUMBER if math.isnan(value) else value for place, value in values.items()}


def _left_of_importance(row, decay, now, grace, name):
    """influence * importance ** power; a number that is none counts as the lowest."""
    left = {}
    for token, value, norm in zip(row, _shares(row, name), _shares(row, "norm"), strict=True):
        importance = decay.value_weight * value + decay.norm_weight * norm
        influence = faded(now - token["position"], decay.rate, decay.floor, grace)
        left[token["position"]] = NO_NUMBER if math.isnan(importance) else influence * importance**decay.power
    return left


def _shares(row, name):
    """Each token's number as a part of the row's largest one; 0 if none is above 0."""
    held = [token.get(name, 0.0) for token in row]
    most = max((number for number in held if not math.isnan(number)), default=0.0)
    return [number / most if most > 0 else 0 * number for number in held]


def _drop(scanned, unit, keys, now, recent, num_sink, window, rule):
    """One token of the unit leaves all of its rows."""

    def standing(token):
        position = token["position"]
        tier = _tier(token, now, recent, num_sink, window)
        key = keys[position] if tier == NORMAL else -position if tier == SINK else position
        return tier, key, position

    order = sorted(standing(token) for token in unit[0])
    victim = order[0][2]
    for row in unit:
        row[:] = [token for token in row if token["position"] != victim]
    if rule.order == "decayed" or (rule.order in ("value", "ranked", "expired") and rule.observe in ("sum", "last")):
        scanned.margin = min(scanned.margin, _margin(order))


def _expire(scanned, row, now, recent, num_sink, window, rule):
    """All leave that are in nobody's protection and whose value lies too far behind, and all that left the window."""
    name, stay = "observed" if rule.observe == "last" else "value", []
    for token in row:
        tier, behind = _tier(token, now, recent, num_sink, window), now - token.get(name, 0.0)
        if rule.observe in ("sum", "last") and tier == NORMAL:
            scanned.margin = min(scanned.margin, abs(behind - rule.marks.window) / max(1, now))
        if tier > NORMAL or (tier == NORMAL and behind < rule.marks.window):
            stay.append(token)
    row[:] = stay


def _tier(token, now, recent, num_sink, window):
    if window is not None and token["position"] <= now - window:
        return DEAD
    if token["position"] < num_sink:
        return SINK
    if token.get("special", False):
        return SPECIAL
    return RECENT if token["position"] > now - recent else NORMAL


def _margin(order):
    """How far the normal token that leaves is below the next one, relative to both."""
    keys = [key for tier, key, _ in order[:2] if tier == NORMAL and math.isfinite(key)]
    return abs(keys[1] - keys[0]) / max(abs(keys[0]), abs(keys[1]), 1e-6) if len(keys) == 2 else math.inf
