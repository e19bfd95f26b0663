"""HELM's statistics of a run: of each instance, and over instances with the worst case over perturbations.

Beside HELM's own stand kvlab's: bytes that the cache held, the share of tokens kept, seconds of prefill.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvlab.evals.base import Record
from kvlab.evals.helm.metrics import CALIBRATION, calibration
from kvlab.evals.helm.sample import HelmSample

Json = dict[str, Any]
_COPIED = ("kv_bytes", "kv_bytes_peak", "kv_bytes_full")
_ROBUSTNESS: Json = {"name": "robustness", "robustness": True, "fairness": False, "computed_on": "worst"}


def stat(
    name: str, values: float | Sequence[float], split: str, sub: str | None = None, perturbation: Json | None = None
) -> Json:
    """HELM's Stat over these values; variance and stddev are the population's."""
    found = [values] if isinstance(values, int | float) else list(values)
    mean = math.fsum(found) / len(found)
    variance = max(0.0, math.fsum(value * value for value in found) / len(found) - mean * mean)
    place = {"name": name, "split": split, "sub_split": sub, "perturbation": perturbation}
    return {
        "name": {key: value for key, value in place.items() if value is not None},
        "count": len(found),
        "sum": math.fsum(found),
        "sum_squared": math.fsum(value * value for value in found),
        "min": min(found),
        "max": max(found),
        "mean": mean,
        "variance": variance,
        "stddev": math.sqrt(variance),
    }


def per_instance(sample: HelmSample, record: Record, trial: int, described: Mapping[str, Json]) -> Json:
    """HELM's PerInstanceStats of a sample. Values that are about several instances (calibration, robustness) stay out."""
    assert sample.adapted is not None
    instance, memory = sample.instance, record["memory"]
    own = f"/{instance.perturbation}" if instance.perturbation else ""
    values = {
        "num_references": len(instance.references),
        "num_train_instances": sample.adapted.shots,
        "prompt_truncated": int(sample.adapted.truncated),
        "num_prompt_tokens": len(sample.prompt.ids),
        "num_output_tokens": len(record["trace"]) if "output" in record else 0,
        **{key.removesuffix(own): value for key, value in record["values"].items() if ("/" in key) == bool(own)},
        **({"predicted_index": record["choice"]} if "choice" in record else {}),
        "inference_runtime": record["speed"]["seconds"],
        "prefill_seconds": record["speed"]["prefill_s"],
        **{key: memory[key] for key in _COPIED},
        "kept_fraction": memory["kept"] / memory["seen"] if memory["seen"] else 1.0,
    }
    perturbation = described.get(instance.perturbation) if instance.perturbation else None
    kept = {key: value for key, value in values.items() if key not in CALIBRATION and not math.isnan(value)}
    stats = [stat(key, value, instance.split, instance.sub_split, perturbation) for key, value in kept.items()]
    found: Json = {"instance_id": instance.id, "train_trial_index": trial, "stats": stats}
    return found if perturbation is None else {**found, "perturbation": perturbation}


def aggregated(instances: Sequence[Json], described: Mapping[str, Json]) -> list[Json]:
    """HELM's stats.json: the mean over instances of each statistic, one value for a trial, in each context.

    A context is a split with a perturbation, and for each perturbation also its instances as they were (`original`) and the
    lower of both (`worst`); `robustness` is the lowest over all versions. As in HELM, for every statistic alike. Calibration
    is over the instances of a split and perturbation, where they have probabilities.
    """
    found: dict[str, list[float]] = {}

    def add(name: Json, value: float) -> None:
        found.setdefault(json.dumps(name, sort_keys=True), []).append(value)

    versions: dict[str, dict[str, float]] = {}
    for entry in instances:
        for each in entry["stats"]:
            add(each["name"], each["mean"])
            plain = {key: value for key, value in each["name"].items() if key != "perturbation"}
            key = json.dumps([plain, entry["instance_id"]], sort_keys=True)
            versions.setdefault(key, {})[each["name"].get("perturbation", {}).get("name", "")] = each["mean"]
    contexts: dict[str, int] = {}
    for entry in instances:
        name = {"name": "num_instances", **{k: v for k, v in entry["stats"][0]["name"].items() if k != "name"}}
        contexts[json.dumps(name, sort_keys=True)] = contexts.get(json.dumps(name, sort_keys=True), 0) + 1
    if described:
        for key, means in versions.items():
            for name, value in _worst(json.loads(key)[0], means, described.values()):
                add(name, value)
    means_of = {key: math.fsum(values) / len(values) for key, values in found.items()}
    stats = [_from_name(json.loads(key), value) for key, value in [*means_of.items(), *contexts.items()]]
    return stats + _calibration(instances)


def _calibration(instances: Sequence[Json]) -> list[Json]:
    """Calibration in each context: split and perturbation."""
    contexts: dict[str, list[tuple[float, float]]] = {}
    for entry in instances:
        means = {each["name"]["name"]: each["mean"] for each in entry["stats"]}
        if "max_prob" in means and "exact_match" in means:
            place = {key: value for key, value in entry["stats"][0]["name"].items() if key != "name"}
            contexts.setdefault(json.dumps(place, sort_keys=True), []).append((means["max_prob"], means["exact_match"]))
    stats = []
    for context, pairs in contexts.items():
        added = calibration(*zip(*pairs, strict=True))
        for name in CALIBRATION:
            values = [each[name] for each in added if name in each]
            stats.append(_from_name({"name": name, **json.loads(context)}, math.fsum(values) / len(values)))
    return stats


def _worst(plain: Json, means: Mapping[str, float], described: Iterable[Json]) -> list[tuple[Json, float]]:
    """Names and values of an instance's worst cases; means: by perturbation, '' for none."""
    if "" not in means:
        return []
    changed = {key: value for key, value in means.items() if key}
    found = [({**plain, "perturbation": _ROBUSTNESS}, min(means.values()))]
    for each in described:
        if each["name"] in changed:
            found.append(({**plain, "perturbation": {**each, "computed_on": "original"}}, means[""]))
            worst = min(means[""], changed[each["name"]])
            found.append(({**plain, "perturbation": {**each, "computed_on": "worst"}}, worst))
    return found


def _from_name(name: Json, value: float) -> Json:
    return stat(name["name"], value, name["split"], name.get("sub_split"), name.get("perturbation"))
