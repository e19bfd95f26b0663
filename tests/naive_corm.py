"""CORM for `naive.py`, as plain loops: a matrix of yes and no for each KV head, and what its last rows say of a token.

A row is a query, a column a key that was held when the query came: did it get its share of the attention? A token leaves when
w queries have looked at it and the last w rows all say no, unless it is protected.
"""

from __future__ import annotations

import naive
import naive_seeds


def note_important(case: naive.Case, state: naive.State, t: int, weights: list[naive.Weights]) -> None:
    """Add the row of the query at `t` to each KV head's matrix."""
    for kv_head in range(case.num_kv_heads):
        held = [i for i in state.held[kv_head] if i <= t]  # without the prompt's tokens that come later
        share = 1 / {"seen": t + 1, "held": len(held)}[case.settings["threshold"]]
        row = {}
        for i in held:
            # short of its share by no more than a thousandth, or so: equal attention is enough, whatever rounding makes of it
            row[i] = naive.merge(case, kv_head, weights, i) >= share * (1 - 1 / 1024)
        assert len(state.important[kv_head]) == t
        state.important[kv_head].append(row)


def expired(case: naive.Case, matrix: list[dict[int, bool]], token: int) -> bool:
    """Have w queries looked at the token, the last w of all, and none found it important?"""
    looks = [row[token] for row in matrix[-case.settings["obs_window"] :] if token in row]
    return len(looks) == case.settings["obs_window"] and not any(looks)


def last_important(matrix: list[dict[int, bool]], token: int) -> int:
    """The last query that found the token important; the one before it came if none did."""
    return max((query for query, row in enumerate(matrix) if row.get(token)), default=token - 1)


def decide(case: naive.Case, state: naive.State, segment: naive.Segment, t: int) -> None:
    """What has expired leaves, and what the sliding window has left behind; then the lowest, if a budget is exceeded."""
    budget = naive.capped_by_window(case, segment.budget)
    for kv_head in range(case.num_kv_heads):
        matrix, ranks = state.important[kv_head], []
        for i in state.held[kv_head]:
            rank = naive.rank_token(case, i, t, case.settings["recent_window"], last_important(matrix, i))
            if rank[0] == naive.DEAD or (rank[0] == naive.NORMAL and expired(case, matrix, i)):
                continue
            ranks.append(rank)
        best = sorted(ranks, reverse=True)[:budget]
        naive_seeds.keep_only(state, kv_head, [position for _, _, position in best])
