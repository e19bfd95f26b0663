"""What stands beside a published number: a metric of our cell, what its samples held or took, or a speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvlab.metrics import Difference, make_metric
from kvlab.settings import SettingError
from kvlab.tables import Samples, StoredCell, having, samples_of

Sample = Mapping[str, Any]


def _compression(sample: Sample) -> float:
    return float(sample["memory"]["kv_bytes_full"] / sample["memory"]["kv_bytes"])


def _pruned(sample: Sample) -> float:
    return 100 * (1 - float(sample["memory"]["kept"] / sample["memory"]["seen"]))


def _seconds(sample: Sample) -> float:
    return float(sample["speed"]["seconds"])


def _profiling(sample: Sample) -> float:
    return 100 * float(sample.get("heads", {}).get("profile_s", 0.0)) / _seconds(sample)


OF_SAMPLES: dict[str, tuple[str, Callable[[Sample], float]]] = {
    "compression": ("higher", _compression),
    "pruned": ("higher", _pruned),
    "seconds": ("lower", _seconds),
    "profiling": ("lower", _profiling),
}
"""Means over samples, with what is better.

compression  bytes of a full cache over the bytes held: scales, codes and what else is billed included
pruned       tokens that heads have dropped, in percent of those seen
seconds      reading and scoring or generating; profiling: the percentage of it in which heads were profiled
"""
SPEEDS = {
    "decode_tokens_per_s": "higher",
    "prefill_tokens_per_s": "higher",
    "prefill_s": "lower",
    "policy_ms_per_step": "lower",
}
"""Of a cell's `speed`, and what is better. One probe or one pass: they have no samples."""
SPEED_NOISE = 0.1
"""What stands for a speed's interval, as a share of the larger of the two: a convention, since nothing measures it."""
SPREAD = f"± {SPEED_NOISE * 100:.0f} %"
SPEED_WARNING = (
    f"speeds are of one probe on the machine that ran them, without an interval: {SPREAD} of the larger stands for it"
)


def measured(cell: StoredCell, name: str, task: str, warnings: list[str]) -> tuple[Mapping[str, Any], Samples]:
    """A metric of a finished cell, as results have them, and the samples that it is of. SettingError where it has none such.

    name  of a metric that the cell's task gives, one of OF_SAMPLES, or one of SPEEDS, which have no samples
    """
    if metric := cell.metric(name):
        return metric, having(metric, samples_of(cell, warnings))
    speed = (cell.result.get("speed") or {}).get(name) if name in SPEEDS else None
    if speed is not None:
        warnings.append(SPEED_WARNING)
        return {"value": speed, "better": SPEEDS[name]}, {}
    if name not in OF_SAMPLES:
        known = ", ".join([*(cell.result.get("metrics") or {}), *OF_SAMPLES, *SPEEDS])
        raise SettingError(f"metrics: {cell.path} has no {name!r} for {task}; it has {known}")
    better, value_of = OF_SAMPLES[name]
    samples = {key: {**sample, "values": {name: value_of(sample)}} for key, sample in samples_of(cell, warnings).items()}
    return make_metric(list(samples.values()), name, "mean", better).as_dict(), samples


def interval_name(metrics: Iterable[str]) -> str:
    """What stands around differences of such metrics, for headings."""
    kinds = dict.fromkeys(SPREAD if name in SPEEDS else "95 %" for name in metrics if name)
    return " or ".join(kinds) or "95 %"


def faster(ours: float, base: float) -> Difference:
    """Ours minus base of two speeds, which the larger's SPEED_NOISE surrounds in place of an interval."""
    noise = SPEED_NOISE * max(abs(ours), abs(base))
    return Difference(ours - base, ours - base - noise, ours - base + noise, 1)
