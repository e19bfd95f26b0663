"""Which part of a big grid each push runs: few cases, but each value of each parameter, and pairs where there is room."""

import itertools

import pytest

from conftest import covering


def grid(*sizes):
    names = "abcd"[: len(sizes)]
    values = [[object() for _ in range(size)] for size in sizes]
    return [dict(zip(names, place, strict=True)) for place in itertools.product(*values)]


@pytest.mark.parametrize("sizes", [(20, 3), (20, 3, 2), (2, 2), (1, 3), (7, 2, 5, 3), (10, 4)], ids=str)
def test_each_value_is_there(sizes):
    cases = grid(*sizes)
    for parts, start in itertools.product((2, 3, 4), range(4)):
        check(sizes, cases, parts, start)


def check(sizes, cases, parts, start):
    kept = [cases[number] for number in covering(cases, parts, start)]
    for name in cases[0]:
        assert {id(case[name]) for case in kept} == {id(case[name]) for case in cases}
    assert len(kept) <= len(cases) / parts + sum(sizes)
    if len(sizes) == 3 and sizes[1] >= parts:  # as policies, families and budgets
        pairs = {(id(case["a"]), id(case["c"])) for case in kept}
        assert len(pairs) == sizes[0] * sizes[2]


@pytest.mark.parametrize(("count", "kept"), [(5, 5), (6, 2), (30, 10)])
def test_of_a_list_one_in_so_many_unless_it_is_short(count, kept):
    values = [{"number": object()} for _ in range(count)]  # held, since a value is known by where it is
    assert len(covering(values, 3, 7)) == kept
