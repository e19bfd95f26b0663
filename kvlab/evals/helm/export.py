"""HELM's five files of a run, as crfm-helm 0.5 writes and reads them.

    run_spec.json            what was run: scenario, adapter, metrics, perturbations
    scenario.json            what the scenario is
    scenario_state.json      every request with its result
    per_instance_stats.json  metrics of every instance; stats.json (see `stats.py`): over all of them

Fields without a value are left out, as HELM does. Tokens of long outputs have no log-probability, and aren't listed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.evals.base import Finished, Record
from kvlab.evals.helm.sample import HelmSample
from kvlab.evals.helm.spec import CORRECT, JOINT, SEPARATE, Adapter, Instance, Scenario
from kvlab.evals.helm.stats import Json, aggregated, per_instance, stat

NAMES = {"contractions": "contraction", "expansions": "expansion"}
"""HELM's names of perturbations, where they differ from ours."""
_METRICS = "helm.benchmark.metrics.basic_metrics."


def write(
    scenario: Scenario,
    adapter: Adapter,
    metrics: Sequence[str],
    trial: int,
    perturbations: Mapping[str, Mapping[str, Any]],
    finished: Finished,
    result: Mapping[str, Any],
) -> Path:
    """Write the files; the run's folder. perturbations: those that were asked for, with their settings."""
    name = run_name(scenario, finished.about)
    model = f"kvlab/{finished.about['model']}"
    suite = str(finished.about["name"]).replace("/", "_")
    folder = finished.shared / "helm" / "runs" / suite / name
    described = {own: description(own, settings) for own, settings in perturbations.items()}
    pairs: list[tuple[HelmSample, Record]] = []
    for sample, record in zip(finished.samples, finished.records, strict=True):
        assert isinstance(sample, HelmSample)
        pairs.append((sample, record))
    spec = adapter_spec(adapter, model, len(pairs))
    requests = [one for sample, record in pairs for one in _requests(sample, record, adapter, spec, trial, described)]
    instances = [per_instance(sample, record, trial, described) for sample, record in pairs]
    speed = result.get("speed") or {}
    whole = [
        stat(key, speed[key], "test") for key in ("decode_tokens_per_s", "policy_ms_per_step") if speed.get(key) is not None
    ]
    for file, content in {
        "run_spec": run_spec(name, scenario, spec, metrics, perturbations),
        "scenario": _scenario(scenario),
        "scenario_state": {"adapter_spec": spec, "request_states": requests},
        "per_instance_stats": instances,
        "stats": aggregated(instances, described) + whole,
    }.items():
        _write(folder / f"{file}.json", content)
    return folder


def run_name(scenario: Scenario, about: Mapping[str, Any]) -> str:
    """Such as 'xsum:model=llama,policy=h2o,budget=20pct,protocol=prompt,run=1a2b3c4d', fit for a folder."""
    argument = next((f"{key}={value}," for key, value in scenario.helm_args.items() if value == scenario.argument), "")
    budget = str(about["budget_label"]).replace(" %", "pct")
    rest = f"policy={about['policy_label']},budget={budget},protocol={about['protocol']},run={about['run_id'][:8]}"
    return re.sub(r"[^\w.,:=+-]+", "_", f"{scenario.name}:{argument}model={about['model']},{rest}")


def description(name: str, settings: Mapping[str, Any]) -> Json:
    """HELM's PerturbationDescription of a perturbed instance."""
    return {
        "name": NAMES.get(name, name),
        "robustness": True,
        "fairness": False,
        "computed_on": "perturbed",
        **({"prob": settings["share"]} if "share" in settings else {}),
    }


def adapter_spec(adapter: Adapter, model: str, instances: int) -> Json:
    """HELM's AdapterSpec."""
    return {
        "method": adapter.method,
        "global_prefix": adapter.global_prefix,
        "global_suffix": "",
        "instructions": adapter.instructions,
        "input_prefix": adapter.input_prefix,
        "input_suffix": adapter.input_suffix,
        "reference_prefix": adapter.reference_prefix,
        "reference_suffix": adapter.reference_suffix,
        "chain_of_thought_prefix": "",
        "chain_of_thought_suffix": "\n",
        "output_prefix": adapter.output_prefix,
        "output_suffix": adapter.output_suffix,
        "instance_prefix": adapter.instance_prefix,
        "substitutions": [],
        "max_train_instances": adapter.max_train_instances,
        "max_eval_instances": instances,
        "num_outputs": 1,
        "num_train_trials": 1,
        "num_trials": 1,
        "sample_train": True,
        "model_deployment": model,
        "model": model,
        "temperature": 0.0,
        "max_tokens": adapter.max_tokens,
        "stop_sequences": list(adapter.stop_sequences),
        "multi_label": False,
    }


def run_spec(
    name: str, scenario: Scenario, spec: Json, metrics: Sequence[str], perturbations: Mapping[str, Mapping[str, Any]]
) -> Json:
    """HELM's RunSpec."""
    changes = [
        {"class_name": f"kvlab.evals.helm.perturbations.{own}", "args": dict(args)} for own, args in perturbations.items()
    ]
    return {
        "name": name,
        "scenario_spec": {"class_name": scenario.helm_class, "args": dict(scenario.helm_args)},
        "adapter_spec": spec,
        "metric_specs": [
            {"class_name": f"{_METRICS}BasicGenerationMetric", "args": {"names": list(metrics)}},
            {"class_name": f"{_METRICS}BasicReferenceMetric", "args": {}},
            {"class_name": f"{_METRICS}InstancesPerSplitMetric", "args": {}},
        ],
        "data_augmenter_spec": {
            "perturbation_specs": changes,
            "should_augment_train_instances": False,
            "should_include_original_train": False,
            "should_skip_unchanged_train": False,
            "should_augment_eval_instances": bool(changes),
            "should_include_original_eval": bool(changes),
            "should_skip_unchanged_eval": bool(changes),
            "seeds_per_instance": 1,
        },
        "groups": [scenario.name],
    }


def _scenario(scenario: Scenario) -> Json:
    where = scenario.helm_class.rpartition(".")[0].replace(".", "/")
    return {
        "name": scenario.name,
        "description": scenario.description,
        "tags": list(scenario.tags),
        "definition_path": f"{where}.py",
    }


def _instance(instance: Instance, described: Mapping[str, Json]) -> Json:
    found: Json = {
        "input": {"text": instance.text},
        "references": [
            {"output": {"text": reference.text}, "tags": [CORRECT] if reference.correct else []}
            for reference in instance.references
        ],
        "split": instance.split,
        "id": instance.id,
    }
    if instance.sub_split is not None:
        found["sub_split"] = instance.sub_split
    if instance.perturbation is not None:
        found["perturbation"] = described[instance.perturbation]
    return found


def _requests(
    sample: HelmSample, record: Record, adapter: Adapter, spec: Json, trial: int, described: Mapping[str, Json]
) -> list[Json]:
    """HELM's RequestStates of a sample: one, or one for each choice."""
    assert sample.adapted is not None
    prompt = sample.adapted.text
    asked: Json = {
        **{key: spec[key] for key in ("model_deployment", "model", "temperature")},
        **{"embedding": False, "num_completions": 1, "top_k_per_token": 1, "top_p": 1},
        **{"presence_penalty": 0, "frequency_penalty": 0, "stop_sequences": list(sample.stop)},
    }
    common: Json = {
        "instance": _instance(sample.instance, described),
        "train_trial_index": trial,
        "num_train_instances": sample.adapted.shots,
        "prompt_truncated": sample.adapted.truncated,
        "num_conditioning_tokens": 0,
    }
    if adapter.method != SEPARATE:
        request = {**asked, "prompt": prompt, "max_tokens": sample.new_tokens, "echo_prompt": False}
        state = {**common, "request": request, "result": _result(record["output"], record.get("pieces", []), record)}
        return [{**state, "output_mapping": dict(sample.mapping)} if adapter.method == JOINT else state]
    found = []
    for place, (reference, pieces) in enumerate(zip(sample.instance.references, record["references"], strict=True)):
        space = "" if prompt[-1:].isspace() or not prompt else " "
        whole = prompt + space + reference.text
        request = {**asked, "prompt": whole, "max_tokens": 0, "echo_prompt": True}
        state = {**common, "request": request, "result": _result(whole, pieces, record)}
        found.append({**state, "reference_index": place, "request_mode": "original"})
    return found


def _result(text: str, pieces: Sequence[Sequence[Any]], record: Record) -> Json:
    """HELM's RequestResult."""
    tokens = [{"text": piece, "logprob": logprob} for piece, logprob in pieces]
    completion = {"text": text, "logprob": sum(logprob for _, logprob in pieces), "tokens": tokens}
    seconds = record["speed"]["seconds"]
    return {"success": True, "embedding": [], "completions": [completion], "cached": False, "request_time": seconds}


def _write(path: Path, content: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)
