"""From a composed config to a checked cell: model x policy x budget x task under a protocol, and what identifies it.

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
from typing import Any, Literal, TypeVar

from kvlab.artefacts import Calibrated, find_for
from kvlab.budget import Budget, BudgetError
from kvlab.codecs import Codec, CodecError, chain, codec_class
from kvlab.evals import Task, task_class
from kvlab.hints import did_you_mean
from kvlab.models import ModelSpec, model_names, spec_from_config
from kvlab.outline import device_of, dtype_of, fingerprint
from kvlab.policies import Policy, PolicyError, policy_class
from kvlab.protocol import Protocol, protocol_class
from kvlab.results import CellStore
from kvlab.settings import SettingError, build
from kvlab.sharing import Share, ShareError, share_class
from kvlab.wandb_runs import TrackingSettings

RESULTS_VERSION = 1
"""Raised whenever the same cell gives other numbers than before, so that older results count as another run's."""


LONGEST_LABEL = 120
"""Characters of a policy's settings in a folder's name."""

GROUPS = (
    "model",
    "policy",
    "budget",
    "codec",
    "share",
    "task",
    "protocol",
    "runtime",
    "logger",
    "launcher",
    "experiment",
    "debug",
)
KEYS = (*GROUPS, "name", "output_dir", "seed")
"""Top-level keys of a config."""
Method = TypeVar("Method", bound=Calibrated)


@dataclass(frozen=True)
class Runtime:
    """How a cell is run; see conf/runtime/default.yaml."""

    device: str | None = None
    dtype: str = "auto"
    batch_size: int = 8
    prefill_chunk: int | None = None
    threads: int | None = None
    beyond_context: bool = False
    kernels: Literal["auto", "reference", "cpu", "gpu"] = "auto"
    oom: Literal["record", "retry"] = "record"
    share_prefill: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "prefill_chunk", "threads"):
            if getattr(self, name) == 0:
                raise SettingError(f"runtime.{name}=0: use at least 1")


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
        protocol_settings = _named(config, "protocol")
        protocol = build(protocol_class(protocol_settings["name"]), protocol_settings, "protocol", ignore=("name",))
        task_settings = _named(config, "task")
        task = build(task_class(task_settings["name"]), task_settings, "task", ignore=("name",))
        policy_settings = _named(config, "policy")
        policy = build(
            policy_class(policy_settings["name"]), policy_settings, f"policy {policy_settings['name']}", PolicyError, ("name",)
        )
        budget = _budget(config.get("budget") or {}, policy)
        model = _model(config.get("model"), runtime)
        codecs = _codecs(config.get("codec"))
        protocol.check(policy, budget)
        if (codec := chain(tuple(codecs.values()))) is not None:
            check_codec(codec, policy, budget, protocol)
        share = _share(config, model, protocol, known)
        return cls(
            name=_folder_name(config.get("name")),
            output_dir=Path(str(config.get("output_dir") or "outputs")).expanduser(),
            seed=_seed(config.get("seed", 0)),
            model=model,
            policy=policy,
            budget=budget,
            codecs=tuple(_settled(one, f"codec.{choice}", model, known) for choice, one in codecs.items()),
            share=share,
            task=task.resolved(protocol),
            protocol=protocol,
            runtime=runtime,
            tracking=build(TrackingSettings, _named(config, "logger"), "logger"),
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
            "device": device_of(self.model),
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
        return [_label(codec, settings) for codec, settings in zip(self.codecs, given, strict=True)]

    @property
    def share_label(self) -> str | None:
        """The way of sharing with those settings that aren't defaults."""
        return None if self.share is None else _label(self.share, self.config["share"])

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


def _named(config: Mapping[str, Any], group: str) -> dict[str, Any]:
    settings = config.get(group)
    if not isinstance(settings, Mapping) or not settings.get("name"):
        raise SettingError(
            f"{group}={settings!r}: choose one with {group}=NAME; in an experiment file with `override /{group}: NAME` under "
            "defaults, or several under hydra.sweeper.params"
        )
    return dict(settings)


def _codecs(settings: Any) -> dict[str, Codec]:
    """Codecs by choice, in the order in which they are chosen; each has its settings below its own name."""
    if not settings:
        return {}
    named = isinstance(settings, Mapping) and all(isinstance(one, Mapping) and one.get("name") for one in settings.values())
    if not named:
        raise SettingError(
            f"codec={settings!r}: choose with codec=NAME; its settings are below the name, such as codec.kivi2.residual=32"
        )
    return {
        choice: build(codec_class(one["name"]), one, f"codec.{choice}", CodecError, ("name",))
        for choice, one in settings.items()
    }


def _share(config: Mapping[str, Any], model: ModelSpec, protocol: Protocol, known: Mapping[str, str]) -> Share | None:
    """The way of sharing, None where each layer holds its own."""
    if not config.get("share"):
        return None
    settings = _named(config, "share")
    share = build(share_class(settings["name"]), settings, "share", ShareError, ("name",))
    if protocol.simulated:
        raise ShareError(f"share={share.name}: protocol {protocol.name} holds nothing to share; use share=none")
    return _settled(share, "share", model, known)


def _label(method: Codec | Share, settings: Mapping[str, Any]) -> str:
    """A method's label; with the artefact where one was chosen by its key."""
    key = settings.get("artefact")
    return f"{method.label} {str(key)[:8]}" if key else method.label


def _settled(method: Method, where: str, model: ModelSpec, known: Mapping[str, str]) -> Method:
    """With the artefact that fits the model's files, where one is needed. Raises ArtefactError where there is none."""
    if not method.calibrated:
        return method
    if getattr(method, "artefact") is None and where in known:  # noqa: B009 - a field of those that have `calibrated`
        method = dataclasses.replace(method, artefact=known[where])  # type: ignore[type-var]
    named = model.name if model.name in model_names() else model.source  # as `kvlab calibrate` takes it
    found = find_for(method, where, model=named, fingerprint=fingerprint(model))
    return dataclasses.replace(method, artefact=found.key)  # type: ignore[type-var]


def check_codec(codec: Codec, policy: Policy, budget: Budget, protocol: Protocol) -> None:
    """Raises CodecError for a codec that can't work with the policy or under the protocol."""
    if protocol.simulated:
        raise CodecError(f"codec={codec.label}: protocol {protocol.name} holds nothing to encode; use codec=none")
    if codec.needs_prompt and not protocol.compresses:
        raise CodecError(
            f"codec={codec.label}: protocol {protocol.name} has no prompt at whose end channels could be chosen: use "
            "protocol=prompt, or a codec that needs none (codec=int4)"
        )
    codec.check_policy(policy)
    if protocol.several_turns and policy.evicts and policy.drops and not (codec.sheds or budget.unlimited):
        raise CodecError(
            f"codec={codec.label}: protocol {protocol.name} evicts again after tokens were encoded, and single ones can't "
            "leave a group: use protocol=prompt, a codec that encodes each token by itself (codec=int4), or policy=full"
        )


def _model(settings: Mapping[str, Any] | None, runtime: Runtime) -> ModelSpec:
    config = dict(settings or {})
    if config.get("path") == "???":
        raise SettingError("model.path must be given: model=path model.path=<folder, .gguf file or hub id>")
    if config.get("name") == "path" and config.get("path"):
        config["name"] = Path(str(config["path"])).expanduser().resolve().name
    if runtime.dtype != "auto":
        config["dtype"] = runtime.dtype
    if runtime.device is not None:
        config |= {"device": runtime.device, "device_map": None}
    return spec_from_config(config)


def _budget(settings: Mapping[str, Any], policy: Policy) -> Budget:
    for name in ("ratio", "tokens", "bytes"):
        if settings.get(name) == "???":
            raise BudgetError(f"budget.{name} must be given")
    budget = build(Budget, settings, "budget", BudgetError)
    return budget if policy.evicts else Budget()


def _seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise SettingError(f"seed={seed!r}: use a whole number of at least 0")
    return seed


def _folder_name(name: Any) -> str:
    if not name or not re.fullmatch(r"[\w][\w.+-]*(/[\w][\w.+-]*)*", str(name)):
        raise SettingError(f"name={name!r}: use letters, digits, '.', '-', '_' and '/', since it names a folder")
    return str(name)


def _safe(part: str) -> str:
    """A part of a path, without what leads elsewhere."""
    return re.sub(r"[^\w.=+-]+|^\.+", "_", part)


def _hash(identity: Mapping[str, Any]) -> str:
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
