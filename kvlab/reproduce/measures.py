"""What stands beside a published number: a metric of our cell, or how many times smaller its cache is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlab.metrics import make_metric
from kvlab.settings import SettingError
from kvlab.tables import Samples, StoredCell, having, samples_of

COMPRESSION = "compression"
"""Bytes of a full cache over the bytes held, the mean over samples: scales, codes and what else is billed included."""


def measured(cell: StoredCell, name: str, task: str, warnings: list[str]) -> tuple[Mapping[str, Any], Samples]:
    """A metric of a finished cell, as results have them, and the samples that it is of. SettingError where it has none such.

    name  of a metric that the cell's task gives, or COMPRESSION
    """
    if name == COMPRESSION:
        samples = {key: _with_ratio(sample) for key, sample in samples_of(cell, warnings).items()}
        return make_metric(list(samples.values()), COMPRESSION, "mean", "higher").as_dict(), samples
    if not cell.metric(name):
        known = ", ".join([*(cell.result.get("metrics") or {}), COMPRESSION])
        raise SettingError(f"metrics: {cell.path} has no {name!r} for {task}; it has {known}")
    return cell.metric(name), having(cell.metric(name), samples_of(cell, warnings))


def _with_ratio(sample: Mapping[str, Any]) -> dict[str, Any]:
    held = sample["memory"]
    return {**sample, "values": {COMPRESSION: held["kv_bytes_full"] / held["kv_bytes"]}}
