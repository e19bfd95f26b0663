"""What calibrations leave in the cache folder: what was found, what it was made from, and tensors in a file beside it.

An artefact is named by a hash of what it was made from, so the same calibration has the same name anywhere. What needs one (a
codec, a way of sharing) is found one that fits before any model is loaded, and checks the weights once there are some.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvlab.files import part_of, write_whole
from kvlab.paths import cache_dir

SAMPLE = 64
"""Numbers of each parameter that tell one model's weights from another's."""
DESCRIBED = ("model", "fingerprint", "weights", "dtype", "texts", "tokens", "text", "source")
"""What every artefact says of where it comes from; the rest of `about` are settings of the measurement."""


class ArtefactError(ValueError):
    """No artefact, or none that fits: the message says which command makes one."""


class Calibrated(Protocol):
    """A codec or a way of sharing that needs an artefact.

    artefact            its key; None: the one that fits
    calibrated          its kind, "" where none is needed; calibrated_version: raised when old ones can't be used any more
    calibrated_by       settings that are the measurement's too
    """

    calibrated: ClassVar[str]
    calibrated_version: ClassVar[int]
    calibrated_by: ClassVar[tuple[str, ...]]


@dataclass(frozen=True)
class Artefact:
    """kind: such as eigen; about: what it was made from; content: what was found; path: of the .json."""

    kind: str
    about: dict[str, Any]
    content: dict[str, Any]
    path: Path
    version: int = 1
    made: str = ""
    tensors_hash: str | None = field(default=None, repr=False)

    @property
    def key(self) -> str:
        """16 hex digits: hash of kind, version and about."""
        return _key(self.kind, self.version, self.about)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the measurement."""
        return {name: value for name, value in self.about.items() if name not in DESCRIBED}

    @property
    def use(self) -> str:
        """What to add to a command that uses it."""
        return str(self.content.get("use", "")).replace("KEY", self.key)

    @property
    def origin(self) -> str:
        """What it was made from, in words."""
        count, tokens = self.about["texts"], self.about["tokens"]
        settings = [f"{name}={value}" for name, value in self.settings.items()]
        return ", ".join([f"{count} {'text' if count == 1 else 'texts'} of {tokens} tokens", self.about["source"], *settings])

    @property
    def broken(self) -> str | None:
        """What is wrong with the tensors' file, None if nothing is."""
        file = self.path.with_suffix(".safetensors")
        if self.tensors_hash is None:
            return None
        if not file.is_file():
            return f"{file.name} is missing"
        stat = file.stat()
        return None if _file_hash(file, stat.st_size, stat.st_mtime_ns) == self.tensors_hash else f"{file.name} is damaged"

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, on the CPU. Raises ArtefactError where their file isn't what was written."""
        if self.broken:
            raise ArtefactError(f"{self.kind} artefact {self.key}: {self.broken} in {self.path.parent}; calibrate again")
        return {} if self.tensors_hash is None else load_file(self.path.with_suffix(".safetensors"))


def folder() -> Path:
    """Where artefacts are."""
    return cache_dir() / "calibration"


def save(
    kind: str,
    about: Mapping[str, Any],
    content: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    version: int = 1,
) -> Artefact:
    """Write an artefact, the tensors' file first; each file appears whole. One of the same key is replaced.

    about    all of DESCRIBED, and settings of the measurement; content: what JSON can hold. `use` in it is what to add to a
             command, with KEY for the key
    tensors  by name, of any dtype and device
    """
    assert set(DESCRIBED) <= set(about), f"about lacks {set(DESCRIBED) - set(about)}"
    about, content = json.loads(json.dumps([about, content], allow_nan=False))
    path = folder() / f"{kind}-{_key(kind, version, about)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors_hash = _save_tensors(path.with_suffix(".safetensors"), tensors) if tensors else None
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    whole = {
        "kind": kind,
        "version": version,
        "made": made,
        "about": about,
        "content": content,
        "content_hash": _hash(content),
        "tensors_hash": tensors_hash,
    }
    write_whole(path, json.dumps(whole, indent=1) + "\n")
    return Artefact(kind, dict(about), dict(content), path, version, made, tensors_hash)


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    part = part_of(path)
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, part)
    part.replace(path)
    return _file_hash(path, path.stat().st_size, path.stat().st_mtime_ns)


def artefacts(kind: str | None = None) -> list[Artefact]:
    """Those of the cache folder that can be read, the newest first."""
    found = [artefact for artefact in _read_all(kind).values() if isinstance(artefact, Artefact)]
    return sorted(found, key=lambda artefact: (artefact.made, artefact.key), reverse=True)


def damaged(kind: str | None = None) -> dict[Path, str]:
    """Files of the cache folder that are no whole artefacts, and why."""
    found = _read_all(kind)
    faults = {path: one if isinstance(one, str) else one.broken for path, one in found.items()}
    return {path: fault for path, fault in faults.items() if fault}


def _read_all(kind: str | None) -> dict[Path, Artefact | str]:
    return {path: _read(path) for path in sorted(folder().glob(f"{kind or '[!.]*'}-*.json"))}


def _read(path: Path) -> Artefact | str:
    """An artefact, or what is wrong with its file."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        what = (whole["kind"], whole["about"], whole["content"])
        found = Artefact(*what, path, whole["version"], whole["made"], whole["tensors_hash"])
        intact = path.stem == f"{found.kind}-{found.key}" and whole["content_hash"] == _hash(found.content)
        lacks = set(DESCRIBED) - set(found.about)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path.name} can't be read ({type(error).__name__})"
    return found if intact and not lacks else f"{path.name} isn't as it was written"


def find(
    kind: str,
    *,
    key: str | None = None,
    weights: str | None = None,
    fingerprint: str | None = None,
    version: int = 1,
    command: str,
    setting: str = "artefact",
    **settings: Any,
) -> Artefact:
    """The artefact that fits.

    key          the one that was chosen; None: the only one that fits
    weights      `weights_hash` of the model, fingerprint: of its files; None: not compared. An artefact that lacks one, or
                 a model whose weights say nothing (""), goes by its key or by the other
    command      that makes the right one; setting: that chooses one of several by its key
    settings     those that the measurement was made with
    Raises ArtefactError where there is none or there are several, or where the one that was chosen is another model's, another
    version's, made with other settings or damaged: one line that ends with the command.
    """
    found = [artefact for artefact in artefacts(kind) if key in (None, artefact.key)]
    if not found:
        raise ArtefactError(f"{_none(kind, key)}: make one with `{command}`")
    if key is None:
        if weights == "" and not fingerprint:
            raise ArtefactError(
                f"the weights can't say which {kind} artefact is theirs: choose with {setting}=KEY, or `{command}`"
            )
        found = [one for one in found if not (_foreign(one, weights, fingerprint, strict=True) or _other(one, settings))]
        found = [one for one in found if one.version == version] or found
        if len(found) > 1:  # what is damaged is no choice
            found = [one for one in found if not one.broken] or found
        if not found:
            raise ArtefactError(f"{_none(kind, key)} for this model and these settings: make one with `{command}`")
    if fault := _fault(found[0], weights, fingerprint, version, settings):
        raise ArtefactError(f"{kind} artefact {found[0].key} {fault} with `{command}`")
    if len(found) > 1:
        keys = "; ".join(f"{one.key} ({one.origin})" for one in found)
        raise ArtefactError(
            f"{len(found)} {kind} artefacts fit, choose with {setting}=KEY: {keys}; they are made with `{command}`"
        )
    return found[0]


def _fault(
    artefact: Artefact, weights: str | None, fingerprint: str | None, version: int, settings: Mapping[str, Any]
) -> str | None:
    """Why an artefact can't be used, and what to do with a command."""
    if _foreign(artefact, weights, fingerprint, strict=False):
        return f"is of another model ({artefact.about['model']}): make one"
    if other := _other(artefact, settings):
        return f"was made with {other}: change that setting, or make one"
    if artefact.version != version:
        return f"is of version {artefact.version}, and this kvlab needs {version}: make it anew"
    return f"can't be used, since {artefact.broken}: make it anew" if artefact.broken else None


def find_for(
    method: Calibrated, where: str, *, model: str = "NAME", weights: str | None = None, fingerprint: str | None = None
) -> Artefact:
    """The artefact of a codec or a way of sharing, by its settings. where: its config group; model: as `--model` takes it.

    Raises ArtefactError as `find` does.
    """
    key: str | None = getattr(method, "artefact")  # noqa: B009 - a field of those that have `calibrated`
    settings = {name: getattr(method, name) for name in method.calibrated_by}
    defaults = {one.name: one.default for one in fields(method)}  # type: ignore[arg-type]
    options = [f"-o {name}={value}" for name, value in settings.items() if value != defaults[name]]
    return find(
        method.calibrated,
        key=key,
        weights=weights,
        fingerprint=fingerprint,
        version=method.calibrated_version,
        command=" ".join(["kvlab calibrate", method.calibrated, f"--model {model}", *options]),
        setting=f"{where}.artefact",
        **settings,
    )


def _none(kind: str, key: str | None) -> str:
    """There is none; or its file is there and can't be read."""
    faults = damaged(kind)
    which = {path: fault for path, fault in faults.items() if key is None or path.stem == f"{kind}-{key}"}
    why = f" ({'; '.join(which.values())})" if which else ""
    return f"there is no {kind} artefact{f' {key}' if key else ''} in {folder()}{why}"


def _foreign(artefact: Artefact, weights: str | None, fingerprint: str | None, *, strict: bool) -> bool:
    """Whether an artefact is another model's. strict: so it is too where it doesn't say whose."""
    wanted = {"fingerprint": fingerprint, "weights": weights}
    return any(
        value and artefact.about[name] != value and (strict or artefact.about[name] != "") for name, value in wanted.items()
    )


def _other(artefact: Artefact, settings: Mapping[str, Any]) -> str | None:
    """What of these settings an artefact was made with otherwise."""
    made = artefact.settings
    differing = [f"{name}={made.get(name)}" for name, value in settings.items() if made.get(name) != value]
    return ", ".join(differing) or None


def weights_hash(model: torch.nn.Module) -> str:
    """Hash of each parameter's name, shape and first numbers (big models cost nothing); the same in float32 and bfloat16.

    "" where nothing can be said: without weights (meta), and in float16, from which bfloat16 can't be had as it was.
    """
    found = hashlib.blake2b(digest_size=16)
    for name, weight in model.named_parameters():
        if weight.is_meta or weight.dtype == torch.float16:
            return ""
        first = weight.detach().flatten()[:SAMPLE].to("cpu", torch.bfloat16)
        found.update(f"{name} {tuple(weight.shape)}".encode() + first.view(torch.int16).numpy().tobytes())
    return found.hexdigest()


@cache
def _file_hash(file: Path, size: int, changed: int) -> str:
    """Of a file as it was at that time."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _key(kind: str, version: int, about: Mapping[str, Any]) -> str:
    return _hash([kind, version, about], 8)


def _hash(value: Any, size: int = 16) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=size).hexdigest()
