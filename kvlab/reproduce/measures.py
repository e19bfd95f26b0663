"""What stands beside a published number: a metric of our cell, how many times smaller its cache is, or a speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvlab.metrics import Difference, make_metric
from kvlab.settings import SettingError
from kvlab.tables import Samples, StoredCell, having, samples_of

COMPRESSION = "compression"
"""Bytes of a full cache over the bytes held, the mean over samples: scales, codes and what else is billed included."""

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

    name  of a metric that the cell's task gives, COMPRESSION, or one of SPEEDS, which have no samples
    """
    speed = (cell.result.get("speed") or {}).get(name) if name in SPEEDS else None
    if speed is not None:
        warnings.append(SPEED_WARNING)
        return {"value": speed, "better": SPEEDS[name]}, {}
    if name == COMPRESSION:
        samples = {key: _with_ratio(sample) for key, sample in samples_of(cell, warnings).items()}
        return make_metric(list(samples.values()), COMPRESSION, "mean", "higher").as_dict(), samples
    if not cell.metric(name):
        known = ", ".join([*(cell.result.get("metrics") or {}), COMPRESSION, *SPEEDS])
        raise SettingError(f"metrics: {cell.path} has no {name!r} for {task}; it has {known}")
    return cell.metric(name), having(cell.metric(name), samples_of(cell, warnings))


def interval_name(metrics: Iterable[str]) -> str:
    """What stands around differences of such metrics, for headings."""
    kinds = dict.fromkeys(SPREAD if name in SPEEDS else "95 %" for name in metrics if name)
    return " or ".join(kinds) or "95 %"


def faster(ours: float, base: float) -> Difference:
    """Ours minus base of two speeds, which the larger's SPEED_NOISE surrounds in place of an interval."""
    noise = SPEED_NOISE * max(abs(ours), abs(base))
    return Difference(ours - base, ours - base - noise, ours - base + noise, 1)


def _with_ratio(sample: Mapping[str, Any]) -> dict[str, Any]:
    held = sample["memory"]
    return {**sample, "values": {COMPRESSION: held["kv_bytes_full"] / held["kv_bytes"]}}
