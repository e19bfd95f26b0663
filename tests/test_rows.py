"""Rows that grow at the end and lose at the front, against lists: rows that are alike, ragged ones, and both in turn."""

import numpy as np
import pytest
import torch

from kvlab.rows import RowPlanes, alike

KINDS = {"positions": (torch.int32, ()), "x": (torch.float16, (3,))}


def incoming(numbers):
    x = torch.tensor(numbers, dtype=torch.float32)  # another type than the plane's
    return {"positions": x.to(torch.int64), "x": x[:, None].repeat(1, 3)}


def check(rows, lists):
    offsets = rows.row_offsets.tolist()
    assert rows.row_lengths.tolist() == [len(held) for held in lists]
    assert len(rows.planes["x"]) == rows.capacity.sum() and (rows.capacity >= rows.lengths).all()
    for start, slots, held in zip(offsets, rows.capacity.ravel(), lists, strict=True):
        row = slice(start, start + slots)
        assert rows.planes["positions"][row].tolist() == held + [-1] * (slots - len(held))
        assert rows.planes["x"][row][: len(held)].tolist() == [[number] * 3 for number in held]


@pytest.mark.parametrize("ragged", [0.0, 0.2, 1.0])
def test_queues(ragged):
    draw = np.random.default_rng(int(10 * ragged))
    rows, lists, came = RowPlanes.none((2, 3), KINDS, torch.device("cpu")), [[] for _ in range(6)], 0
    uniform = 0

    def counts(most):
        """For each row, at most what it has of `most`."""
        if draw.random() < ragged:
            return np.minimum(draw.integers(0, 7, (2, 3)), most)
        return np.full((2, 3), min(draw.integers(0, 7), most.min()))

    for turn in range(150):
        if draw.random() < 0.6:
            new = counts(np.full((2, 3), 9))
            parts = [[(came := came + 1) % 2000 for _ in range(count)] for count in new.ravel()]
            rows.extend(incoming([number for part in parts for number in part]), new)
            for held, part in zip(lists, parts, strict=True):
                held.extend(part)
        else:
            front = counts(rows.lengths) if turn % 25 else rows.lengths
            taken = rows.take_front(front, more_to_come=bool(draw.random() < 0.5))
            gone = [[held.pop(0) for _ in range(count)] for held, count in zip(lists, front.ravel(), strict=True)]
            assert taken["positions"].tolist() == [number for part in gone for number in part]
            assert taken["x"][:, 1].tolist() == taken["positions"].tolist()
        check(rows, lists)
        uniform += rows.uniform and alike(rows.lengths) and bool(rows.lengths.any())
    assert uniform > 100 if not ragged else uniform < 75


def test_what_is_taken_is_not_written_to_again():
    for front, more in ((3, True), (2, True), (3, False)):
        rows = RowPlanes.none((1, 2), KINDS, torch.device("cpu"))
        rows.extend(incoming([1, 2, 3, 4, 5, 6]), np.full((1, 2), 3))
        taken = rows.take_front(np.full((1, 2), front), more_to_come=more)["positions"]
        before = taken.tolist()
        rows.extend(incoming([7, 8, 9, 10]), np.full((1, 2), 2))
        assert taken.tolist() == before == ([1, 2, 3, 4, 5, 6] if front == 3 else [1, 2, 4, 5])


def test_alike():
    assert alike(np.full((2, 3), 4), np.zeros((1, 1)))
    assert not alike(np.full((2, 3), 4), np.array([[0, 1]]))
