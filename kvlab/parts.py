"""From the groups of a composed config to the checked parts of a cell: model, budget, codecs, sharing, how it is run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvlab.artefacts import Calibrated, find_for
from kvlab.budget import Budget, BudgetError
from kvlab.codecs import Codec, CodecError, codec_class
from kvlab.models import ModelSpec, model_names, spec_from_config
from kvlab.outline import fingerprint
from kvlab.policies import Policy
from kvlab.protocol import Protocol
from kvlab.settings import SettingError, build
from kvlab.sharing import Share, ShareError, share_class

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


def named(config: Mapping[str, Any], group: str) -> dict[str, Any]:
    """A group's settings, among them its name. Raises SettingError where none was chosen."""
    settings = config.get(group)
    if not isinstance(settings, Mapping) or not settings.get("name"):
        raise SettingError(
            f"{group}={settings!r}: choose one with {group}=NAME; in an experiment file with `override /{group}: NAME` under "
            "defaults, or several under hydra.sweeper.params"
        )
    return dict(settings)


def codecs_of(settings: Any) -> dict[str, Codec]:
    """Codecs by choice, in the order in which they are chosen; each has its settings below its own name."""
    if not settings:
        return {}
    chosen = isinstance(settings, Mapping) and all(isinstance(one, Mapping) and one.get("name") for one in settings.values())
    if not chosen:
        raise SettingError(
            f"codec={settings!r}: choose with codec=NAME; its settings are below the name, such as codec.kivi2.residual=32"
        )
    return {
        choice: build(codec_class(one["name"]), one, f"codec.{choice}", CodecError, ("name",))
        for choice, one in settings.items()
    }


def share_of(config: Mapping[str, Any], model: ModelSpec, protocol: Protocol, known: Mapping[str, str]) -> Share | None:
    """The way of sharing, None where each layer holds its own."""
    if not config.get("share"):
        return None
    settings = named(config, "share")
    share = build(share_class(settings["name"]), settings, "share", ShareError, ("name",))
    if protocol.simulated:
        raise ShareError(f"share={share.name}: protocol {protocol.name} holds nothing to share; use share=none")
    return settled(share, "share", model, known)


def label_of(method: Codec | Share, settings: Mapping[str, Any]) -> str:
    """A method's label; with the artefact where one was chosen by its key."""
    key = settings.get("artefact")
    return f"{method.label} {str(key)[:8]}" if key else method.label


def settled(method: Method, where: str, model: ModelSpec, known: Mapping[str, str]) -> Method:
    """With the artefact that fits the model's files, where one is needed. Raises ArtefactError where there is none."""
    if not method.calibrated:
        return method
    if getattr(method, "artefact") is None and where in known:  # noqa: B009 - a field of those that have `calibrated`
        method = dataclasses.replace(method, artefact=known[where])  # type: ignore[type-var]
    name = model.name if model.name in model_names() else model.source  # as `kvlab calibrate` takes it
    found = find_for(method, where, model=name, fingerprint=fingerprint(model))
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


def has_gpus(config: Mapping[str, Any]) -> bool:
    """Whether cells run in jobs that have GPUs, which the machine that submits them may lack."""
    launcher = config.get("launcher")
    return isinstance(launcher, Mapping) and bool(launcher.get("gpus"))


def model_of(settings: Mapping[str, Any] | None, runtime: Runtime, gpus: bool) -> ModelSpec:
    """The model, on the device and in the dtype that were asked for. gpus: in jobs that have some."""
    config = dict(settings or {})
    if config.get("path") == "???":
        raise SettingError("model.path must be given: model=path model.path=<folder, .gguf file or hub id>")
    if config.get("name") == "path" and config.get("path"):
        config["name"] = Path(str(config["path"])).expanduser().resolve().name
    if runtime.dtype != "auto":
        config["dtype"] = runtime.dtype
    if runtime.device is not None:
        config |= {"device": runtime.device, "device_map": None}
    spec = spec_from_config(config, elsewhere=gpus)
    if gpus and spec.device is None and spec.device_map is None:
        raise SettingError("launcher.gpus: cells would leave them idle: give runtime.device=cuda (or cpu, if that is meant)")
    return spec


def budget_of(settings: Mapping[str, Any], policy: Policy) -> Budget:
    """The budget; none for a policy that never evicts."""
    for name in ("ratio", "tokens", "bytes"):
        if settings.get(name) == "???":
            raise BudgetError(f"budget.{name} must be given")
    budget = build(Budget, settings, "budget", BudgetError)
    return budget if policy.evicts else Budget()


def checked_seed(seed: Any) -> int:
    """The seed. Raises SettingError."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise SettingError(f"seed={seed!r}: use a whole number of at least 0")
    return seed


def folder_name(name: Any) -> str:
    """The name of the experiment. Raises SettingError for one that can't be a folder's."""
    if not name or not re.fullmatch(r"[\w][\w.+-]*(/[\w][\w.+-]*)*", str(name)):
        raise SettingError(f"name={name!r}: use letters, digits, '.', '-', '_' and '/', since it names a folder")
    return str(name)
