"""The reference kernels against loops over batch, head, query and slot in float64."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab.kernels import reference
from kvlab.kernels.reference import AttentionRule, attend, attend_with_mass, merge_group, weights

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
MERGE = {"mean": np.mean, "sum": np.sum, "max": np.max, "first": lambda heads: heads[0]}


def naive_logit(query, key, rule):
    logit = rule.scaling * float(np.dot(query, key))
    return logit if rule.softcap is None else rule.softcap * math.tanh(logit / rule.softcap)


def naive_weights(queries, keys, query_positions, positions, rule):
    """(batch, kv_heads, group, queries, slots) float64; rows of pads are zero, rows that see nothing are NaN."""
    batch, kv_heads, group, count, _ = queries.shape
    result = np.zeros((batch, kv_heads, group, count, keys.shape[2]))
    for b, h, g, q in np.ndindex(batch, kv_heads, group, count):
        now = query_positions[b, q]
        if now < 0:
            continue
        seen = [s for s, p in enumerate(positions[b, h]) if 0 <= p <= now and (rule.window is None or p > now - rule.window)]
        logits = [naive_logit(queries[b, h, g, q], keys[b, h, s], rule) for s in seen]
        terms = logits if rule.sinks is None else [*logits, float(rule.sinks[h, g])]
        if not seen:
            result[b, h, g, q] = math.nan
            continue
        top = max(terms)
        total = math.fsum(math.exp(term - top) for term in terms)
        for s, logit in zip(seen, logits, strict=True):
            result[b, h, g, q, s] = math.exp(logit - top) / total
    return result


def naive_output(attention, values):
    """(batch, kv_heads, group, queries, value_dim)."""
    result = np.zeros((*attention.shape[:4], values.shape[-1]))
    for b, h, g, q, s in np.ndindex(attention.shape):
        result[b, h, g, q] += attention[b, h, g, q, s] * values[b, h, s]
    return result


def naive_mass(attention, group):
    """(batch, kv_heads, slots): merged over the group for each query, then summed over queries."""
    result = np.zeros((*attention.shape[:2], attention.shape[4]))
    for b, h, q, s in np.ndindex(*attention.shape[:2], *attention.shape[3:]):
        result[b, h, s] += MERGE[group](attention[b, h, :, q, s])
    return result


@dataclass
class Case:
    """Inputs of one call, as tensors of one dtype."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    query_positions: torch.Tensor
    positions: torch.Tensor
    rule: AttentionRule

    @property
    def inputs(self):
        return self.queries, self.keys, self.values, self.query_positions, self.positions, self.rule

    def expected(self):
        """Weights and output by loops, from the very numbers that the kernels get."""
        arrays = [tensor.double().numpy() for tensor in (self.queries, self.keys, self.values)]
        attention = naive_weights(*arrays[:2], self.query_positions.numpy(), self.positions.numpy(), self.rule)
        return attention, naive_output(attention, arrays[2])


def make_case(
    seed=0,
    dtype=torch.float32,
    batch=2,
    kv_heads=2,
    group=2,
    count=5,
    slots=9,
    dim=16,
    value_dim=None,
    empty=0.0,
    pads=0,
    sinks=False,
    **rule,
):
    """Tokens 0.. in shuffled slots, the last `count` of them the queries; `empty` slots beyond; `pads` leading queries."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    positions = torch.stack([torch.randperm(slots, generator=generator) for _ in range(batch * kv_heads)])
    positions = positions.view(batch, kv_heads, slots).int()
    query_positions = torch.arange(slots - count, slots).repeat(batch, 1)
    query_positions[batch - 1, :pads] = -1
    # Never the queries' own tokens, so that every query sees something.
    gone = (torch.rand(positions.shape, generator=generator) < empty) & (positions < slots - count)
    positions[gone] = -1
    logits = numbers(kv_heads, group).float() + 1 if sinks else None
    rule = AttentionRule(scaling=rule.pop("scaling", dim**-0.5), sinks=logits, **rule)
    value_dim = dim if value_dim is None else value_dim
    states = numbers(batch, kv_heads, group, count, dim), numbers(batch, kv_heads, slots, dim)
    return Case(*states, numbers(batch, kv_heads, slots, value_dim), query_positions, positions, rule)


def check(case, causal=False, all_visible=False):
    """All three functions against the loops."""
    dtype = case.queries.dtype
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    attention, output = case.expected()
    real = (case.query_positions >= 0)[:, None, None, :, None].expand(output.shape).numpy()
    sharp = TOLERANCE[exact]

    got = weights(case.queries, case.keys, case.query_positions, case.positions, case.rule)
    assert got.dtype == exact
    np.testing.assert_allclose(got.numpy(), attention, rtol=0, atol=sharp)

    result = attend(*case.inputs, causal=causal, all_visible=all_visible)
    assert result.dtype == dtype and result.isfinite().all()
    size = max(1.0, np.abs(output).max())
    np.testing.assert_allclose(result.double().numpy()[real], output[real], rtol=0, atol=TOLERANCE[dtype] * size)

    for how in MERGE:
        result, mass = attend_with_mass(*case.inputs, group=how, causal=causal)
        assert result.dtype == dtype and result.isfinite().all()
        np.testing.assert_allclose(result.double().numpy()[real], output[real], rtol=0, atol=TOLERANCE[dtype] * size)
        assert mass.dtype == exact
        expected = naive_mass(attention, how)
        np.testing.assert_allclose(mass.numpy(), expected, rtol=0, atol=sharp * max(1.0, expected.max()))
        assert (mass[case.positions < 0] == 0).all()


# ------------------------------------------------------------------------------------------------------- the definition

RULES = {
    "plain": {},
    "window": {"window": 3},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 4, "softcap": 2.0, "sinks": True},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_groups_and_rules(group, rule):
    check(make_case(seed=group, group=group, empty=0.3, pads=2, **RULES[rule]))


@pytest.mark.parametrize("dim, value_dim", [(16, 16), (16, 24), (24, 8), (64, 64), (80, 48), (128, 128), (256, 256)])
def test_head_dims(dim, value_dim):
    check(make_case(dim=dim, value_dim=value_dim, count=3, slots=6, empty=0.2))
    check(make_case(dim=dim, value_dim=value_dim, count=3, slots=6, softcap=3.0))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(dtype, rule):
    check(make_case(dtype=dtype, slots=20, count=6, dim=32, empty=0.2, pads=1, scaling=0.4, **RULES[rule]))


@pytest.mark.parametrize("window", [1, 2, 5, 9, 10, 100])
def test_windows(window):
    check(make_case(window=window, count=9, slots=9))


def test_scaling_is_the_rules():
    check(make_case(scaling=0.9))
    check(make_case(scaling=0.01))


def test_one_of_everything():
    check(make_case(batch=1, kv_heads=1, group=1, count=1, slots=1, dim=16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [{}, {"softcap": 50.0}])
def test_sums_are_not_in_the_inputs_dtype(dtype, rule):
    """Thousands of equal weights: a running sum in bfloat16 stands still long before 1."""
    case = make_case(dtype=dtype, batch=1, kv_heads=1, count=2, slots=6000, dim=16, **rule)
    case.keys.zero_()
    case.values.fill_(1.0)
    expected = torch.ones(1, 1, 2, 2, 16)
    torch.testing.assert_close(attend(*case.inputs).float(), expected, rtol=0, atol=2**-8)
    output, mass = attend_with_mass(*case.inputs, group="sum")
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=2**-8)
    assert float(mass.sum()) == pytest.approx(4, abs=1e-4)


def test_weights_of_low_precision_inputs_are_exact_to_float32():
    case = make_case(dtype=torch.bfloat16, dim=256, slots=40, count=4, scaling=0.5)
    got = weights(case.queries, case.keys, case.query_positions, case.positions, case.rule)
    np.testing.assert_allclose(got.numpy(), case.expected()[0], rtol=1e-4, atol=1e-7)


# --------------------------------------------------------------------------------------------- what must change nothing


@pytest.mark.parametrize("rule", RULES)
def test_slot_order_means_nothing(rule):
    case = make_case(slots=14, empty=0.3, **RULES[rule])
    order = torch.randperm(14, generator=torch.Generator().manual_seed(9))
    moved = dataclasses.replace(
        case, keys=case.keys[:, :, order], values=case.values[:, :, order], positions=case.positions[:, :, order]
    )
    torch.testing.assert_close(attend(*moved.inputs), attend(*case.inputs), rtol=0, atol=2e-6)
    for (output, mass), (other, other_mass) in [
        (attend_with_mass(*case.inputs, group=how), attend_with_mass(*moved.inputs, group=how)) for how in MERGE
    ]:
        torch.testing.assert_close(other, output, rtol=0, atol=2e-6)
        torch.testing.assert_close(other_mass, mass[:, :, order], rtol=0, atol=5e-6)


@pytest.mark.parametrize("empty", [0.0, 0.5])
def test_what_an_empty_slot_holds_means_nothing(empty):
    case = make_case(slots=12, empty=empty)
    gone = case.positions < 0
    assert bool(gone.any()) == (empty > 0)
    other = dataclasses.replace(case, keys=case.keys.clone(), values=case.values.clone())
    other.keys[gone], other.values[gone] = 1e4, -1e4
    torch.testing.assert_close(attend(*other.inputs), attend(*case.inputs), rtol=0, atol=1e-6)
    torch.testing.assert_close(attend_with_mass(*other.inputs, group="sum"), attend_with_mass(*case.inputs, group="sum"))


def causal_case(count, **rule):
    case = make_case(count=count, slots=count, group=3, value_dim=24, scaling=0.4, **rule)
    case.positions[:] = torch.arange(count)
    return case


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_the_causal_shortcut(count, rule):
    case = causal_case(count, **RULES[rule])
    check(case, causal=True)
    torch.testing.assert_close(attend(*case.inputs, causal=True), attend(*case.inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("count, window", [(5, 4), (5, 5), (5, 6)])
def test_the_causal_shortcut_at_the_windows_edge(count, window):
    check(causal_case(count, window=window), causal=True)


@pytest.mark.parametrize("group", [1, 4])
def test_the_all_visible_shortcut(group):
    check(make_case(group=group, count=1, slots=8), all_visible=True)
    case = make_case(group=group, count=3, slots=8)
    case.positions -= 2
    case.positions.clamp_(min=0)  # nothing later than the first query
    case.query_positions[:] = 7
    check(case, all_visible=True)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 7, 8, 9, 13])
@pytest.mark.parametrize("rule", RULES)
def test_chunk_boundaries(monkeypatch, count, rule):
    monkeypatch.setattr(reference, "CHUNK", 4)
    monkeypatch.setattr(reference, "MASKED_CHUNK", 4)
    check(make_case(batch=2, kv_heads=1, count=count, slots=count + 3, empty=0.2, pads=min(2, count), **RULES[rule]))
    check(causal_case(count, **RULES[rule]), causal=True)


@pytest.mark.parametrize("constant", ["CHUNK", "MASKED_CHUNK"])
def test_real_chunk_boundaries(constant):
    size = getattr(reference, constant)
    for count in (size - 1, size, size + 1):
        case = make_case(batch=1, kv_heads=1, group=1, count=count, slots=count + 2, scaling=0.25)
        case.keys, case.values = case.keys[:, :, :6], case.values[:, :, :6]
        case.positions = torch.arange(case.query_positions[0, 0], count + 2, max(1, count // 6))[None, None, :6].int()
        check(case)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_nothing_of_size_queries_times_slots_exists():
    case = make_case(batch=1, kv_heads=1, group=1, count=1500, slots=1500, dim=16)
    for call in (lambda: attend_with_mass(*case.inputs, group="sum"), lambda: attend(*case.inputs)):
        with Largest() as largest:
            call()
        assert 1500 * 64 <= largest.numel < 1500 * 1500 / 2


def test_masks_stay_small_where_rows_are_long(monkeypatch):
    case = make_case(batch=1, kv_heads=1, group=8, count=100, slots=1200, dim=16)
    expected = attend(*case.inputs)
    monkeypatch.setattr(reference, "MASK_BYTES", 2**18)
    with Largest() as largest:
        output = attend(*case.inputs)
    assert largest.numel <= 2**18
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    monkeypatch.setattr(reference, "MASK_BYTES", 0)
    torch.testing.assert_close(attend(*case.inputs), expected, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------- queries without a view


@pytest.mark.parametrize("rule", RULES)
def test_a_query_that_sees_nothing_stays_finite(rule):
    """All slots empty, or later than the query, or before its window."""
    case = make_case(batch=3, count=2, slots=5, **{"window": 3, **RULES[rule]})
    case.query_positions[:] = torch.tensor([[0, 1], [50, 51], [7, 8]])
    case.positions[0] += 2
    case.positions[2] = -1
    assert weights(case.queries, case.keys, case.query_positions, case.positions, case.rule).isfinite().all()
    assert attend(*case.inputs).isfinite().all()
    output, mass = attend_with_mass(*case.inputs, group="max")
    assert output.isfinite().all() and mass.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_pads_give_no_mass(rule):
    case = make_case(batch=2, count=4, slots=6, pads=4, empty=0.5, **RULES[rule])
    output, mass = attend_with_mass(*case.inputs, group="sum")
    assert (mass[1] == 0).all() and (mass[0].sum(-1) > 0).all()
    assert output.isfinite().all() and attend(*case.inputs).isfinite().all()
    got = weights(case.queries, case.keys, case.query_positions, case.positions, case.rule)
    assert (got[1] == 0).all()


def test_weights_sum_to_one_less_what_the_sinks_take():
    plain, sunk = make_case(empty=0.3), make_case(empty=0.3, sinks=True)
    total = weights(plain.queries, plain.keys, plain.query_positions, plain.positions, plain.rule).sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))
    total = weights(sunk.queries, sunk.keys, sunk.query_positions, sunk.positions, sunk.rule).sum(-1)
    assert (total < 1).all() and (total > 0).all() and total.mean() < 0.9


# ----------------------------------------------------------------------------------------------------------------- merging


@pytest.mark.parametrize("how", MERGE)
def test_merge_rules(how):
    attention = torch.rand(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    merged = merge_group(attention, how)
    assert merged.shape == (2, 3, 5, 6)
    for b, h, q, s in np.ndindex(2, 3, 5, 6):
        assert float(merged[b, h, q, s]) == pytest.approx(MERGE[how](attention[b, h, :, q, s].numpy()), abs=1e-14)


def test_an_unknown_merge_rule_is_refused():
    with pytest.raises(AssertionError, match="median"):
        merge_group(torch.zeros(1, 1, 1, 1, 1), "median")


def test_mass_is_not_counted_unless_asked_for():
    case = make_case()
    output, mass = attend_with_mass(*case.inputs, group=None)
    torch.testing.assert_close(output, attend_with_mass(*case.inputs, group="mean")[0])
    assert mass is None or not mass.any()


def test_inputs_are_left_alone():
    case = make_case(empty=0.3, pads=1, softcap=2.0, sinks=True)
    before = [tensor.clone() for tensor in case.inputs[:5]]
    attend(*case.inputs)
    attend_with_mass(*case.inputs, group="sum")
    assert all(torch.equal(now, then) for now, then in zip(case.inputs[:5], before, strict=True))
