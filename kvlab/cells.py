"""A cell: model x policy x budget x task under a protocol, checked; what identifies it, and what it is called.

Everything that can be known without a tokenizer is checked here. Nothing is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvlab.budget import Budget
from kvlab.codecs import Codec, chain
from kvlab.evals import Task, task_class
from kvlab.hints import did_you_mean
from kvlab.models import ModelSpec
from kvlab.outline import device_of, dtype_of, fingerprint
from kvlab.parts import (
    KEYS,
    Runtime,
    budget_of,
    check_codec,
    checked_seed,
    codecs_of,
    folder_name,
    has_gpus,
    label_of,
    model_of,
    named,
    settled,
    share_of,
)
from kvlab.policies import Policy, PolicyError, policy_class
from kvlab.protocol import Protocol, protocol_class
from kvlab.results import CellStore
from kvlab.settings import SettingError, build
from kvlab.sharing import Share
from kvlab.wandb_runs import TrackingSettings

RESULTS_VERSION = 1
"""Raised whenever the same cell gives other numbers than before, so that older results count as another run's."""

LONGEST_LABEL = 120
"""Characters of a policy's settings in a folder's name."""


@dataclass(frozen=True)
class Cell:
    """One cell of an experiment. `config` is what it was made from, with nothing left to resolve."""

    name: str
    output_dir: Path
    seed: int
    model: ModelSpec
    policy: Policy
    budget: Budget
    codecs: tuple[Codec, ...]
    share: Share | None
    task: Task
    protocol: Protocol
    runtime: Runtime
    tracking: TrackingSettings
    config: dict[str, Any] = dataclasses.field(repr=False)

    @classmethod
    def of(cls, config: Mapping[str, Any], artefacts: Mapping[str, str] | None = None) -> Cell:
        """The checked cell of a composed config. Raises ValueError, in one line that says what to change.

        artefacts  `artefacts` of the same cell, made before: these are taken where the config chooses none
        """
        known = artefacts or {}
        for key in config:
            if key not in KEYS:
                raise SettingError(f"{key}: there is no such setting{did_you_mean(key, KEYS)}; settings: {', '.join(KEYS)}")
        for key in ("experiment", "debug"):
            if config.get(key):
                raise SettingError(f"{key}: the file's first line must be `# @package _global_`, or its settings go nowhere")
        runtime = build(Runtime, config.get("runtime") or {}, "runtime")
        protocol_settings = named(config, "protocol")
        protocol = build(protocol_class(protocol_settings["name"]), protocol_settings, "protocol", ignore=("name",))
        task_settings = named(config, "task")
        task = build(task_class(task_settings["name"]), task_settings, "task", ignore=("name",))
        policy_settings = named(config, "policy")
        policy = build(
            policy_class(policy_settings["name"]), policy_settings, f"policy {policy_settings['name']}", PolicyError, ("name",)
        )
        budget = budget_of(config.get("budget") or {}, policy)
        model = model_of(config.get("model"), runtime, has_gpus(config))
        codecs = codecs_of(config.get("codec"))
        protocol.check(policy, budget)
        if (codec := chain(tuple(codecs.values()))) is not None:
            check_codec(codec, policy, budget, protocol)
        share = share_of(config, model, protocol, known)
        return cls(
            name=folder_name(config.get("name")),
            output_dir=Path(str(config.get("output_dir") or "outputs")).expanduser(),
            seed=checked_seed(config.get("seed", 0)),
            model=model,
            policy=policy,
            budget=budget,
            codecs=tuple(settled(one, f"codec.{choice}", model, known) for choice, one in codecs.items()),
            share=share,
            task=task.resolved(protocol),
            protocol=protocol,
            runtime=runtime,
            tracking=build(TrackingSettings, named(config, "logger"), "logger"),
            config={key: value for key, value in config.items() if value not in (None, {})},
        )

    # ------------------------------------------------------------------------------------------------ identity

    @cached_property
    def comparison(self) -> dict[str, Any]:
        """What cells that may be compared have in common."""
        return {
            "results_version": RESULTS_VERSION,
            "model": self.model.name,
            "weights": fingerprint(self.model),
            "dtype": dtype_of(self.model),
            "device": device_of(self.model, has_gpus(self.config)),
            "task": {"name": self.task.name, **chosen(self.task, leave_out=self.task.places), **own_code(self.task)},
            "data": self.task.data_hash(),
            "protocol": {"name": self.protocol.name, **chosen(self.protocol, leave_out=("exact",))},
            "seed": self.seed,
            **({"beyond_context": True} if self.runtime.beyond_context else {}),
        }

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that changes the cell's numbers. Batch size, chunks, threads and kernels don't, but for rounding."""
        policy = {"name": self.policy.name, **chosen(self.policy), **own_code(self.policy)}
        protocol = {"name": self.protocol.name, **chosen(self.protocol)}
        return {
            **self.comparison,
            "protocol": protocol,
            "policy": policy,
            "budget": self.budget_settings,
            "codec": [{"name": codec.name, **chosen(codec), **own_code(codec)} for codec in self.codecs],
            "share": self.share and {"name": self.share.name, **chosen(self.share), **own_code(self.share)},
        }

    @property
    def run_id(self) -> str:
        """Hash of the identity."""
        return _hash(self.identity)

    @property
    def comparison_id(self) -> str:
        """Hash of what comparable cells have in common."""
        return _hash(self.comparison)

    @property
    def folder(self) -> Path:
        """Where the cell's results are."""
        last = f"{self.budget_label.replace(' %', 'pct').replace(' ', '_')}-{self.run_id[:8]}"
        # A folder's name must fit; the hash tells cells apart.
        label = "+".join(self.parts)[:LONGEST_LABEL].replace(" %", "pct")
        parts = (self.model.name, self.task.label, self.protocol.name, label, last)
        return self.output_dir.joinpath(self.name, *map(_safe, parts))

    @property
    def is_full(self) -> bool:
        """Whether nothing is evicted, coded or shared: what other cells are compared with."""
        return self.policy.name == "full" and not self.codecs and self.share is None

    def full_cache_results(self) -> list[Path]:
        """Folders of finished full-cache cells beside this one, which it may be compared with."""
        beside = self.folder.parent.parent.glob("full/*/result.json")
        return [
            file.parent for file in beside if (CellStore(file.parent).result() or {}).get("comparison_id") == self.comparison_id
        ]

    # -------------------------------------------------------------------------------------------------- labels

    @property
    def budget_settings(self) -> dict[str, Any]:
        """The budget, empty where there is no limit."""
        return {name: value for name, value in dataclasses.asdict(self.budget).items() if value not in (None, "prompt")}

    @property
    def budget_label(self) -> str:
        """Such as '20 %', '512 tokens'."""
        budget = self.budget
        if budget.ratio is not None:
            return f"{100 * budget.ratio:g} %" + (" of total" if budget.of == "total" else "")
        if budget.tokens is not None:
            return f"{budget.tokens} tokens"
        return "no limit" if budget.bytes is None else f"{budget.bytes} bytes"

    @property
    def policy_label(self) -> str:
        """The policy's name and those settings that aren't defaults."""
        settings = {name: value for name, value in chosen(self.policy).items() if (name, value) != ("seed", self.seed)}
        return " ".join([self.policy.name, *(f"{name}={value}" for name, value in settings.items())])

    @property
    def codec_labels(self) -> list[str]:
        """Codecs with those settings that aren't defaults."""
        given = (self.config.get("codec") or {}).values()
        return [label_of(codec, settings) for codec, settings in zip(self.codecs, given, strict=True)]

    @property
    def share_label(self) -> str | None:
        """The way of sharing with those settings that aren't defaults."""
        return None if self.share is None else label_of(self.share, self.config["share"])

    @property
    def artefacts(self) -> dict[str, str]:
        """Keys of the artefacts at work, by config group."""
        methods = dict(zip((f"codec.{choice}" for choice in self.config.get("codec") or {}), self.codecs, strict=True))
        every: dict[str, Codec | Share | None] = {**methods, "share": self.share}
        found = {where: getattr(method, "artefact", None) for where, method in every.items()}
        return {where: key for where, key in found.items() if key is not None}

    @property
    def parts(self) -> list[str]:
        """Labels of what is at work: policy, codecs, sharing."""
        return [self.policy_label, *self.codec_labels, *([self.share_label] if self.share_label else [])]

    @property
    def label(self) -> str:
        """For progress lines."""
        budget = "" if self.budget == Budget() else f" {self.budget_label}"
        protocol = "" if self.protocol.name == "prompt" else f", {self.protocol.name}"
        return f"{' + '.join(self.parts)}{budget}, {self.task.label}{protocol}"

    @property
    def labels(self) -> list[str]:
        """What a reader of the results must know."""
        own = {
            "grow": not self.policy.holds_budget_after_prompt,
            "nothing leaves": self.policy.evicts and not self.policy.drops,
            "copy on the CPU": any(codec.offloads for codec in self.codecs),
        }
        return [*self.protocol.labels, *(name for name, holds in own.items() if holds)]

    @property
    def at_work(self) -> dict[str, Any]:
        """What `attach` is given."""
        codec = {"codec": self.codecs} if self.codecs else {}
        share = {"share": self.share} if self.share else {}
        return {**self.protocol.at_work(self.policy, self.budget), **codec, **share}

    def summary(self) -> dict[str, Any]:
        """What result.json and W&B say of a cell."""
        return {
            "run_id": self.run_id,
            "comparison_id": self.comparison_id,
            "name": self.name,
            "model": self.model.name,
            "task": self.task.label,
            "protocol": self.protocol.name,
            "policy": self.policy.name,
            "policy_label": self.policy_label,
            "codec": self.codec_labels,
            "share": self.share_label,
            "budget": self.budget_settings,
            "budget_label": self.budget_label,
            "labels": self.labels,
            "config": self.config,
            "identity": self.identity,
        }


def chosen(settings: Any, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Those settings of a dataclass that differ from their defaults, as plain values."""
    found = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.init and field.name not in leave_out and value != field.default:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def own_code(settings: Any) -> dict[str, str]:
    """Hash of the source of a policy or task that isn't kvlab's own, whose code may change at any time."""
    cls = type(settings)
    if cls.__module__.startswith("kvlab."):
        return {}
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or not Path(file).exists():
        return {}
    return {"source": hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()}


def _safe(part: str) -> str:
    """A part of a path, without what leads elsewhere."""
    return re.sub(r"[^\w.=+-]+|^\.+", "_", part)


def _hash(identity: Mapping[str, Any]) -> str:
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
