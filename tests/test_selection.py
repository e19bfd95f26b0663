"""Tiers, `select` and `victim` against a plain sort by (tier, key, position)."""

import math
import random

import pytest
import torch

from kvlab.selection import DEAD, EMPTY, NORMAL, RECENT, SINK, SPECIAL, assign_tiers, select, victim

FEW = [-math.inf, math.nan, -2.0, -0.0, 0.0, 0.5, 0.5, 3e4, math.inf]


def naive_tier(position, now, num_sink, recent, special, window):
    if position < 0:
        return EMPTY
    if window is not None and position <= now - window:
        return DEAD
    if position < num_sink:
        return SINK
    if special:
        return SPECIAL
    if recent is not None and position > now - recent:
        return RECENT
    return NORMAL


def naive_rank(tier, score, position):
    score = -math.inf if math.isnan(score) else score  # no number: the lowest
    key = {NORMAL: score, SINK: -position}.get(tier, position)
    return tier, key, position


class Case:
    """Random rows, and the answers that a sort gives."""

    def __init__(self, seed, dtype=torch.float32):
        rng = random.Random(seed)
        self.batch, self.heads, self.slots = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 14)
        self.now = [rng.randint(0, 40) for _ in range(self.batch)]
        self.num_sink = rng.choice([0, 0, 1, 4])
        self.window = rng.choice([None, None, 1, 5, 12])
        pool = FEW if rng.random() < 0.7 else [rng.gauss(0, 1) for _ in range(40)]
        self.positions = self.each(lambda b: self.draw_positions(rng, self.now[b]))
        self.scores = self.each(lambda b: [rng.choice(pool) for _ in range(self.slots)])
        self.scores = torch.tensor(self.scores).to(dtype).tolist()  # as the dtype rounds them
        self.special = self.each(lambda b: [rng.random() < 0.2 for _ in range(self.slots)]) if rng.random() < 0.5 else None
        sizes = [0, 1, 2, 5, 50]
        self.recent = [[rng.choice(sizes) for _ in range(self.heads)] for _ in self.now] if rng.random() < 0.7 else None
        self.dtype, self.rng = dtype, rng

    def each(self, make):
        return [[make(b) for _ in range(self.heads)] for b in range(self.batch)]

    def draw_positions(self, rng, now):
        """Distinct positions up to `now` in any order, the rest empty."""
        count = rng.randint(0, min(self.slots, now + 1))
        row = rng.sample(range(now + 1), count) + [-1] * (self.slots - count)
        rng.shuffle(row)
        return row

    def rows(self):
        for b in range(self.batch):
            for h in range(self.heads):
                yield b, h

    def naive_tiers(self):
        def tier(b, h, s):
            recent = None if self.recent is None else self.recent[b][h]
            special = self.special is not None and self.special[b][h][s]
            return naive_tier(self.positions[b][h][s], self.now[b], self.num_sink, recent, special, self.window)

        return [[[tier(b, h, s) for s in range(self.slots)] for h in range(self.heads)] for b in range(self.batch)]

    def worst_first(self, b, h):
        """Held slots of a row from the one to drop first to the one to drop last."""
        tiers, scores, positions = self.naive_tiers()[b][h], self.scores[b][h], self.positions[b][h]
        held = [s for s in range(self.slots) if positions[s] >= 0]
        return sorted(held, key=lambda s: naive_rank(tiers[s], scores[s], positions[s]))

    def tensors(self):
        positions = torch.tensor(self.positions, dtype=self.rng.choice([torch.int32, torch.int64]))
        tiers = assign_tiers(
            positions,
            torch.tensor(self.now),
            num_sink=self.num_sink,
            recent=None if self.recent is None else torch.tensor(self.recent),
            special=None if self.special is None else torch.tensor(self.special),
            window=self.window,
        )
        return torch.tensor(self.scores, dtype=self.dtype), positions, tiers


@pytest.mark.parametrize("block", range(4))
def test_tiers(block):
    for seed in range(100 * block, 100 * block + 100):
        case = Case(seed)
        assert case.tensors()[2].tolist() == case.naive_tiers(), seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_select_keeps_the_largest(dtype):
    for seed in range(120):
        case = Case(seed, dtype)
        budgets = [[case.rng.randint(0, case.slots + 2) for _ in range(case.heads)] for _ in range(case.batch)]
        kept = select(*case.tensors(), torch.tensor(budgets))
        assert kept.dtype == torch.bool
        for b, h in case.rows():
            order = case.worst_first(b, h)
            best = sorted(order[max(0, len(order) - budgets[b][h]) :])
            assert kept[b, h].nonzero()[:, 0].tolist() == best, (seed, b, h)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_victim_is_the_smallest_and_what_select_drops(dtype):
    compared = 0
    for seed in range(120):
        case = Case(seed, dtype)
        scores, positions, tiers = case.tensors()
        slots = victim(scores, positions, tiers)
        held = (positions >= 0).sum(-1)
        kept = select(scores, positions, tiers, held - 1)
        for b, h in case.rows():
            if not held[b, h]:
                continue
            compared += 1
            assert int(slots[b, h]) == case.worst_first(b, h)[0], (seed, b, h)
            dropped = (~kept[b, h] & (positions[b, h] >= 0)).nonzero()[:, 0].tolist()
            assert dropped == [int(slots[b, h])], (seed, b, h)
    assert compared > 300


def test_every_budget_keeps_one_token_more():
    for seed in range(30):
        case = Case(seed)
        scores, positions, tiers = case.tensors()
        before = torch.zeros_like(positions, dtype=torch.bool)
        for budget in range(case.slots + 1):
            kept = select(scores, positions, tiers, torch.full(positions.shape[:2], budget))
            held = (positions >= 0).sum(-1)
            assert torch.equal(kept.sum(-1), held.clamp(max=budget))
            assert not (before & ~kept).any()
            before = kept


def test_the_order_of_slots_means_nothing():
    for seed in range(40):
        case = Case(seed)
        scores, positions, tiers = case.tensors()
        budget = torch.full(positions.shape[:2], case.slots // 2)
        shuffled = torch.tensor(case.rng.sample(range(case.slots), case.slots))
        kept = select(scores, positions, tiers, budget)
        again = select(scores[..., shuffled], positions[..., shuffled], tiers[..., shuffled], budget)
        assert torch.equal(kept[..., shuffled], again)


def one_row(positions, scores=None, **settings):
    positions = torch.tensor([[positions]])
    scores = torch.zeros(positions.shape) if scores is None else torch.tensor([[scores]])
    tiers = assign_tiers(positions, torch.tensor([int(positions.max())]), **settings)
    return scores, positions, tiers


def test_no_score_pushes_out_a_sink():
    row = one_row([0, 1, 2, 3], [-math.inf, math.inf, math.inf, math.inf], num_sink=1)
    assert select(*row, torch.tensor([[1]])).tolist() == [[[True, False, False, False]]]
    assert victim(*row).tolist() == [[1]]


def test_late_sinks_leave_before_early_ones():
    row = one_row([2, 0, 1], [3.0, 1.0, 2.0], num_sink=3)
    assert victim(*row).tolist() == [[0]]
    assert select(*row, torch.tensor([[1]])).tolist() == [[[False, True, False]]]


def test_a_sink_that_left_the_window_is_dead():
    row = one_row([0, 8, 9], [math.inf, 0.0, 0.0], num_sink=1, window=9)
    assert row[2].tolist() == [[[DEAD, NORMAL, NORMAL]]]
    assert victim(*row).tolist() == [[0]]


def test_the_oldest_recent_token_leaves_when_only_recent_ones_are_left():
    row = one_row([7, 5, 6], [0.0, 9.0, 3.0], recent=torch.tensor([[3]]))
    assert row[2].tolist() == [[[RECENT, RECENT, RECENT]]]
    assert victim(*row).tolist() == [[1]]


def test_age_is_exact_at_far_positions_whatever_the_scores_dtype():
    """bfloat16 tells apart no neighbours beyond 256, float16 none beyond 2048."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        scores, positions, tiers = one_row([100_002, 100_000, 100_001, 100_003], recent=torch.tensor([[4]]))
        assert victim(scores.to(dtype), positions, tiers).tolist() == [[1]]
        kept = select(scores.to(dtype), positions, tiers, torch.tensor([[2]]))
        assert kept.tolist() == [[[True, False, False, True]]]
        scores, positions, tiers = one_row(list(range(3000)), num_sink=3000)
        assert victim(scores.to(dtype), positions, tiers).tolist() == [[2999]]
