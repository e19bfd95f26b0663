"""Whether the GPU's kernels compute what they should on this machine, and how fast they are next to plain torch.

python experiments/gpu_check.py               checks and times on a CUDA device; some minutes
python experiments/gpu_check.py --interpret   the checks alone, on tiny shapes, by Triton's interpreter on the processor

Exits 1 if a check fails, 2 without a CUDA device. "floor" is the time to read what must be read at the bandwidth that
copying a large tensor reaches.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.kernels import reference
from kvlab.kernels.contract import Arrivals, Decay, Limits, Marks, ScanRule, Slots
from kvlab.kernels.reference import AttentionRule, Fade

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-4, torch.float16: 4e-5}
SECONDS = 280  # what is left out after that is said
DEVICE = "cuda"

Shape = dict[str, Any]
TINY = {"batch": 1, "heads": 2, "group": 2, "dim": 16, "length": 24}
USUAL = {"batch": 2, "heads": 2, "group": 4, "dim": 128, "length": 700}
RULES = {
    "plain": AttentionRule(0.1),
    "window": AttentionRule(0.1, window=13),
    "cap, sinks": AttentionRule(0.1, softcap=3.0),
    "cap, fade": AttentionRule(0.1, softcap=3.0),
}
COUNT = ScanRule("marks", "count", bits="marks", marks=Marks(400))
DECAYED = ScanRule("sum", "decayed", "mass", norm="norm", decay=Decay(0.97, 0.15, 1.2, 0.7, 0.3))
DISTANCE = ScanRule(order="distance", bits="codes")
SCANS = {
    "sum": (ScanRule("sum", "value", "mass"), False),
    "last, coupled": (ScanRule("last", "value", coupled=True), False),
    "ranked, before": (ScanRule("sum", "ranked", "mass", group="max"), True),
    "age": (ScanRule(), False),
    "count": (COUNT, False),
    "distance, before": (DISTANCE, True),
    "decayed, fade": (DECAYED, False),
}
FAMILIES = ("count", "distance, before", "decayed, fade")
"""What is timed alone: torch would need a loop of its own for each."""

# Each kind of number, shape and rule is compiled anew, for a second or two a kernel; so not all are crossed with all.
CHECKED: list[tuple[Shape, torch.dtype, tuple[str, ...], tuple[str, ...]]] = [
    (USUAL, torch.bfloat16, tuple(RULES), tuple(SCANS)),
    (USUAL, torch.float32, ("window",), ("sum", "last, coupled", "count", "decayed, fade")),
    ({"batch": 1, "heads": 2, "group": 1, "dim": 64, "length": 333}, torch.float16, ("cap, sinks",), ("sum",)),
    ({"batch": 1, "heads": 1, "group": 7, "dim": 80, "length": 260}, torch.bfloat16, ("plain",), ("age",)),
    ({"batch": 1, "heads": 1, "group": 2, "dim": 256, "length": 150}, torch.float32, ("cap, sinks",), ("sum",)),
    ({"batch": 1, "heads": 1, "group": 2, "dim": 256, "length": 150}, torch.bfloat16, ("plain",), ()),
]


def make(shape: Shape, tokens: int, dtype: torch.dtype, device: str, ragged: bool = False) -> tuple[Tensor, Slots]:
    """Queries, and slots that hold `length` tokens a row; the later rows ever fewer if they are to be ragged."""
    rows, room = shape["batch"] * shape["heads"], shape["length"] + tokens + 1
    lengths = shape["length"] // (1 + ragged * torch.arange(rows))
    positions = torch.arange(room, dtype=torch.int32).repeat(rows, 1)
    positions[torch.arange(room) >= lengths[:, None]] = -1
    numbers = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    slots = Slots(
        numbers(rows * room, shape["dim"]).to(dtype).to(device),
        numbers(rows * room, shape["dim"]).to(dtype).to(device),
        positions.view(-1).to(device),
        (torch.arange(rows) * room).to(device),
        lengths.to(device),
        room,
    )
    queries = numbers(shape["batch"], shape["heads"], shape["group"], tokens, shape["dim"]).to(dtype).to(device)
    return queries, slots


def dense(slots: Slots, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values, positions as (batch, kv_heads, widest, ...)."""
    shape = (batch, -1, slots.widest)
    return (
        slots.keys.view(*shape, slots.keys.shape[-1]),
        slots.values.view(*shape, slots.values.shape[-1]),
        slots.positions.view(shape),
    )


def with_heads(name: str, shape: Shape, device: str) -> AttentionRule:
    """The rule of this name, plain if there is none; sinks and a fade's grace have the shape's heads."""
    rule = RULES.get(name, RULES["plain"])
    if "sinks" in name:
        sinks = torch.linspace(-1, 2, shape["heads"] * shape["group"], device=device).view(shape["heads"], shape["group"])
        rule = dataclasses.replace(rule, sinks=sinks)
    return dataclasses.replace(rule, fade=Fade(0.97, 0.15, 2, graces(shape, device))) if "fade" in name else rule


def graces(shape: Shape, device: str) -> Tensor:
    """Ages from which heads fade, (batch, kv_heads)."""
    return 5 + torch.arange(shape["batch"] * shape["heads"], device=device).view(shape["batch"], shape["heads"])


def worst(found: Tensor, expected: Tensor) -> float:
    """The largest difference, next to the expected number where that is above 1; infinite where NaN is found."""
    error = (found.double().cpu() - expected.double().cpu()).abs() / expected.double().cpu().abs().clamp(min=1)
    return float("inf") if error.isnan().any() else float(error.max())


def check_decode(gpu: Any, shape: Shape, dtype: torch.dtype, name: str, device: str) -> float:
    """The largest error of outputs and weights."""
    rule = with_heads(name, shape, device)
    # Where a window would hide all of a short row there is nothing to compare.
    queries, slots = make(shape, 2, dtype, device, ragged=rule.window is None)
    where = torch.tensor([[shape["length"] - 3, shape["length"] - 1]], device=device).expand(shape["batch"], 2)
    keys, values, positions = dense(slots, shape["batch"])
    expected = reference.weights(queries.float(), keys.float(), where, positions, rule)
    output, found = gpu.decode_attend(queries, slots, where, rule, want_weights=True)
    return max(worst(found, expected), worst(output, expected @ values.float()[:, :, None]))


def check_prefill(gpu: Any, shape: Shape, dtype: torch.dtype, name: str, device: str) -> float:
    """The largest error of outputs and mass, causal or not."""
    count, rule, errors = shape["length"], with_heads(name, shape, device), []
    queries, slots = make(shape, count, dtype, device)
    keys, values, _ = (part[:, :, :count] for part in dense(slots, shape["batch"]))
    where = torch.arange(count, device=device).expand(shape["batch"], -1)
    positions = where[:, None].expand(-1, shape["heads"], -1).int()
    for causal, group in ((True, "mean"), (False, "max")):
        inputs = (keys, values, where, positions, rule)
        expected, mass = reference.attend_with_mass(queries.float(), *inputs, group=group, causal=causal)
        output, found = gpu.prefill_stats(queries, *inputs, group=group, causal=causal)
        errors += [worst(output, expected), worst(found, mass)]
    return max(errors)


def scan_inputs(shape: Shape, tokens: int, dtype: torch.dtype, rule: ScanRule, before: bool, device: str) -> tuple[Any, ...]:
    """Queries, arrivals, slots, limits: rows are full."""
    queries, slots = make(shape, tokens, dtype, device)
    batch, heads, length = shape["batch"], shape["heads"], shape["length"]
    if rule.plane is not None:
        value = torch.arange(len(slots.positions), device=device) * 7919 % 1009 / 1009  # far apart: no decision is a close call
        slots = dataclasses.replace(slots, value=value, norm=None if rule.norm is None else value.flip(0).contiguous())
    bits = None if rule.bits is None else drawn_bytes(rule, len(slots.positions)).to(device)
    slots = dataclasses.replace(slots, bits=bits)
    probes = drawn_bytes(rule, batch, heads, shape["group"], tokens).to(device) if rule.order == "distance" else None
    new = torch.randn(2, batch, heads, tokens, shape["dim"], generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    places = torch.arange(tokens, device=device).expand(batch, -1) + length
    limit, recent = (torch.full((batch, heads), number, device=device) for number in (length, 4))
    limits = Limits(limit, limit, recent, 2, before, graces(shape, device))
    return queries, Arrivals(new[0], new[1], places, probes=probes), slots, limits


def drawn_bytes(rule: ScanRule, *shape: int) -> Tensor:
    """Random bits, as many as a rule needs: marks, or codes of 16 bits."""
    width = 2 if rule.marks is None else -(-rule.marks.window // 8)
    return torch.randint(256, (*shape, width), generator=torch.Generator().manual_seed(3)).to(torch.uint8)


def on_processor(thing: Any) -> Any:
    """Copies of all tensors that a dataclass holds."""
    if isinstance(thing, Tensor):
        return thing.cpu().clone()
    parts = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init}
    return dataclasses.replace(thing, **{name: on_processor(part) for name, part in parts.items() if isinstance(part, Tensor)})


def check_scan(gpu: Any, shape: Shape, dtype: torch.dtype, name: str, tokens: int, device: str) -> float:
    """The largest error of outputs and values against the processor's kernels; infinite if other tokens are kept."""
    from kvlab.kernels import cpu

    rule, before = SCANS[name]
    queries, arrivals, slots, limits = scan_inputs(shape, tokens, dtype, rule, before, device)
    theirs = on_processor(slots)
    attention, theirs_too = (with_heads(name if "fade" in name else "plain", shape, place) for place in (device, "cpu"))
    expected = cpu.evict_scan(queries.cpu(), on_processor(arrivals), theirs, on_processor(limits), theirs_too, rule)
    output = gpu.evict_scan(queries, arrivals, slots, limits, attention, rule)
    same = torch.equal(slots.positions.cpu(), theirs.positions) and torch.equal(slots.lengths.cpu(), theirs.lengths)
    held = theirs.positions >= 0
    if not same or not torch.equal(slots.keys.cpu()[held], theirs.keys[held]):
        return float("inf")
    if slots.bits is not None and not torch.equal(slots.bits.cpu()[held], theirs.bits[held]):
        return float("inf")
    error = worst(output, expected)
    return error if slots.value is None else max(error, worst(slots.value.cpu()[held], theirs.value[held]))


def run_checks(gpu: Any, checked: list[Any], device: str, out_of_time: Callable[[], bool]) -> int:
    """How many checks fail. Each is one line."""
    failures = 0
    for shape, dtype, rules, scans in checked:
        jobs: list[tuple[str, Callable[[], float]]] = []
        for name in rules:
            jobs.append((f"decode_attend, {name}", functools.partial(check_decode, gpu, shape, dtype, name, device)))
            if "fade" not in name:  # nothing fades within a prompt
                jobs.append((f"prefill_stats, {name}", functools.partial(check_prefill, gpu, shape, dtype, name, device)))
        for name in scans:
            for tokens in (1, 5):
                job = functools.partial(check_scan, gpu, shape, dtype, name, tokens, device)
                jobs.append((f"evict_scan, {name}, tokens: {tokens}", job))
        for title, check in jobs:
            what = f"{title}, {str(dtype)[6:]}, {', '.join(f'{key} {size}' for key, size in shape.items())}"
            if out_of_time():
                print(f"left out, no time: {what}")
                continue
            error = check()
            failed = not error <= TOLERANCE[dtype]
            failures += failed
            print(f"{'FAILED' if failed else 'ok':6} {error:.1e} {what}", flush=True)
    return failures


# --------------------------------------------------------------------------------------------------------- timing


def milliseconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of a call on the device, after three that don't count."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same launches as a CUDA graph, so that Python's time isn't measured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def bandwidth() -> float:
    """Bytes a second that copying half a gigabyte moves."""
    source = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source)) / 1000)


def time_decode(gpu: Any, dtype: torch.dtype, batch: int, length: int, per_second: float) -> list[str]:
    """One line without and one with weights."""
    shape = {"batch": batch, "heads": 8, "group": 4, "dim": 128, "length": length}
    queries, slots = make(shape, 1, dtype, DEVICE)
    where = torch.full((batch, 1), length, device=DEVICE)
    rule = AttentionRule(0.09)
    keys, values, _ = (part[:, :, :length].contiguous() for part in dense(slots, batch))
    plain = graphed(lambda: F.scaled_dot_product_attention(queries[..., 0, :], keys, values, scale=0.09))
    floor = 1000 * 2 * keys.numel() * keys.element_size() / per_second
    theirs, lines = milliseconds(plain), []
    for want_weights in (False, True):
        ours = milliseconds(
            graphed(functools.partial(gpu.decode_attend, queries, slots, where, rule, want_weights=want_weights))
        )
        title = f"decode {'+ weights ' if want_weights else ''}{batch} x {length} {str(dtype)[6:]}"
        lines.append(f"{title:38} {ours:9.3f} {theirs:9.3f} {floor:9.3f}")
    return lines


def time_prefill(gpu: Any, dtype: torch.dtype, length: int) -> str:
    """Outputs and mass, next to SDPA's outputs alone."""
    shape = {"batch": 1, "heads": 8, "group": 4, "dim": 128, "length": length}
    queries, slots = make(shape, length, dtype, DEVICE)
    keys, values, _ = (part[:, :, :length].contiguous() for part in dense(slots, 1))
    where = torch.arange(length, device=DEVICE)[None]
    positions, rule = where[:, None].expand(-1, 8, -1).int(), AttentionRule(0.09)
    ours = milliseconds(lambda: gpu.prefill_stats(queries, keys, values, where, positions, rule, group="mean", causal=True), 5)
    wide_keys, wide_values = (part.repeat_interleave(4, 1) for part in (keys, values))
    theirs = milliseconds(
        lambda: F.scaled_dot_product_attention(queries.flatten(1, 2), wide_keys, wide_values, is_causal=True, scale=0.09), 5
    )
    return f"{f'prefill_stats {length} {str(dtype)[6:]}':38} {ours:9.3f} {theirs:9.3f} {'':>9}"


def torch_steps(inputs: tuple[Any, ...], tokens: int) -> Callable[[], Any]:
    """A torch loop over dense rows that does what the scan of a `sum` rule does, without ragged rows, pads and protection."""
    queries, arrivals, slots, limits = inputs
    batch, heads = limits.limit.shape
    length = int(limits.limit[0, 0])
    keys, values, _ = (part[:, :, : length + 1].clone() for part in dense(slots, batch))
    value = slots.value.view(batch, heads, -1)[:, :, : length + 1].clone()

    def call() -> None:
        gap = torch.full((batch, heads, 1), length, device=DEVICE)
        for t in range(tokens):
            index = gap[..., None].expand(-1, -1, -1, keys.shape[-1])
            keys.scatter_(2, index, arrivals.keys[:, :, t : t + 1])
            values.scatter_(2, index, arrivals.values[:, :, t : t + 1])
            value.scatter_(2, gap, 0.0)
            weights = (queries[..., t, :] @ keys.transpose(-1, -2) * 0.1).float().softmax(-1)
            torch.matmul(weights.to(values.dtype), values)
            value.add_(weights.mean(2))
            gap = value[:, :, :length].argmin(-1, keepdim=True)

    return call


def time_scan(gpu: Any, dtype: torch.dtype, tokens: int, length: int) -> str:
    """A scan of many tokens, or of one at a time, next to a loop in torch over few, extrapolated."""
    shape = {"batch": 1, "heads": 8, "group": 4, "dim": 128, "length": length}
    rule, few = ScanRule("sum", "value", "mass"), 8
    queries, arrivals, slots, limits = scan_inputs(shape, tokens, dtype, rule, False, DEVICE)
    steps = torch_steps(scan_inputs(shape, few, dtype, rule, False, DEVICE), few)

    def call() -> None:  # rows are full already, and stay full
        gpu.evict_scan(queries, arrivals, slots, limits, AttentionRule(0.1), rule)

    ours, theirs = milliseconds(call, 5), milliseconds(steps, 5) * tokens / few
    return f"{f'evict_scan {tokens} tokens over {length} {str(dtype)[6:]}':38} {ours:9.3f} {theirs:8.3f}* {'':>9}"


def time_family(gpu: Any, dtype: torch.dtype, name: str, tokens: int, length: int) -> str:
    """A scan of another rule, on its own."""
    shape = {"batch": 1, "heads": 8, "group": 4, "dim": 128, "length": length}
    rule, before = SCANS[name]
    inputs = scan_inputs(shape, tokens, dtype, rule, before, DEVICE)
    attention = with_heads(name if "fade" in name else "plain", shape, DEVICE)
    ours = milliseconds(lambda: gpu.evict_scan(*inputs, attention, rule), 5)
    return f"{f'evict_scan {tokens} over {length}, {name}':38} {ours:9.3f} {'':>9} {'':>9}"


def run_timing(gpu: Any, out_of_time: Callable[[], bool]) -> list[str]:
    """The table's lines."""
    per_second = bandwidth()
    print(f"copying reaches {per_second / 1e9:.0f} GB/s on {torch.cuda.get_device_name()}")
    lines = [f"{'median milliseconds':38} {'ours':>9} {'torch':>9} {'floor':>9}"]
    bf16 = torch.bfloat16
    jobs: list[Callable[[], list[str]]] = [
        *(functools.partial(time_decode, gpu, bf16, batch, length, per_second) for batch, length in ((1, 4096), (16, 4096))),
        functools.partial(time_decode, gpu, torch.float32, 1, 4096, per_second),
        *(lambda length=length: [time_prefill(gpu, bf16, length)] for length in (2048, 8192)),
        lambda: [time_prefill(gpu, torch.float32, 2048)],
        *(lambda tokens=tokens: [time_scan(gpu, bf16, tokens, 1024)] for tokens in (1, 256)),
        lambda: [time_scan(gpu, bf16, 64, 16384)],
        *(lambda name=name: [time_family(gpu, bf16, name, 256, 1024)] for name in FAMILIES),
    ]
    for job in jobs:
        lines += ["left out, no time"] if out_of_time() else job()
    return [*lines, "torch: SDPA alone, without weights or mass; * a loop over 8 tokens, extrapolated"]


def main() -> int:
    """Checks, and times on a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="tiny checks on the processor, no timing")
    interpret = parser.parse_args().interpret
    if not interpret and not torch.cuda.is_available():
        print("There is no CUDA device here; --interpret runs the checks on the processor.", file=sys.stderr)
        return 2
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton's first import, so kernels are imported only now
    from kvlab.kernels import gpu

    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")
    start = time.monotonic()
    out_of_time = lambda part=1.0: time.monotonic() - start > SECONDS * part  # noqa: E731
    if interpret:
        failures = run_checks(gpu, [(TINY, torch.float32, tuple(RULES), tuple(SCANS))], "cpu", out_of_time)
    else:
        failures = run_checks(gpu, CHECKED, "cuda", functools.partial(out_of_time, 0.6))
        print(*run_timing(gpu, out_of_time), sep="\n")
    print(f"{failures} checks failed" if failures else "all checks passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
