"""Models by name: `resolve_model` checks what can be checked without loading, `load_model` loads.

A name is that of a file in `conf/model/`, a model folder, a `.gguf` file, or a hub id. A file in `conf/model/` has a
`name`, exactly one of `embedded`, `tiny` and `path` (hub id, folder or `.gguf`), and may have `description`, `dtype`,
`device`, `device_map` and `revision`.

Knows nothing about attention, caches or policies: what it returns is a plain transformers model.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import omegaconf
import safetensors
import torch
import transformers
import yaml  # type: ignore[import-untyped]
from huggingface_hub import errors

from kvlab import embedded
from kvlab.embedded import EMBEDDED, ModelUnavailable, first_line
from kvlab.hints import did_you_mean
from kvlab.hub import settle_hub
from kvlab.paths import conf_dir
from kvlab.tiny import tiny_families, tiny_model, tiny_tokenizer

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
SOURCES = ("embedded", "tiny", "path")
KEYS = ("name", "description", *SOURCES, "dtype", "device", "device_map", "revision")
WAYS = "a configured name (`kvlab list models`), a model folder, a .gguf file or a hub id (owner/name)"
TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "*.tiktoken")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w-][\w.-]*", re.ASCII)

HUB_FIXES: dict[type[Exception], str] = {
    errors.GatedRepoError: "{hub} is gated: accept its terms on https://huggingface.co/{hub}, then set HF_TOKEN",
    errors.RepositoryNotFoundError: "{hub} is no folder and not on the hub: correct it, or set HF_TOKEN if private",
    errors.RevisionNotFoundError: "{hub} has no revision {revision!r} on the hub: correct or remove it",
    errors.LocalEntryNotFoundError: "{hub} is not in the local hub cache, and the hub can't be asked (no network, or "
    "HF_HUB_OFFLINE is set): run `hf download {hub}` where there is network, or give a local folder",
}

Kind = Literal["embedded", "tiny", "folder", "gguf", "hub"]
DeviceMap = str | dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What to load and how. `source` is a folder, a `.gguf` file, a hub id, a tiny family or the embedded model."""

    name: str
    kind: Kind
    source: str
    dtype: str = "auto"
    device: str | None = None
    device_map: DeviceMap | None = None
    revision: str | None = None
    description: str = ""


def model_names(config_dir: str | Path | None = None) -> dict[str, str]:
    """Configured models: name -> description, sorted. Those in `config_dir` hide kvlab's own of the same name."""
    return {name: _read_config(path).get("description", "") for name, path in sorted(_config_files(config_dir).items())}


def resolve_model(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    device_map: DeviceMap | None = None,
    config_dir: str | Path | None = None,
) -> ModelSpec:
    """What `load_model` would load for these arguments, checked as far as that goes without loading or the network.

    `name` is looked for in `<config_dir>/model/`, in kvlab's `conf/model/`, as a file or folder, and as a hub id, in
    this order; `./name` is always a file or folder. Arguments win over the configuration file; `dtype="auto"` leaves
    the file's.

    Raises ValueError, in one line that says what to change, for a name that can't be a model, a folder without config,
    weights or tokenizer, a file that is no GGUF, a wrong dtype, a device that torch doesn't have.
    """
    files = _config_files(config_dir)
    if name in files:
        settings = _read_config(files[name])
    else:
        settings = {"name": name, "path": name}
        if "/" not in name and not Path(name).expanduser().exists() and not name.endswith(".gguf"):
            raise ValueError(f"unknown model {name!r}{did_you_mean(name, files)}: give {WAYS}")
    if dtype != "auto":
        settings["dtype"] = dtype
    if device is not None or device_map is not None:
        settings |= {"device": device, "device_map": device_map}
    return spec_from_config(settings)


def spec_from_config(config: Mapping[str, Any], elsewhere: bool = False) -> ModelSpec:
    """The checked spec of one model configuration (a `conf/model/` file as a mapping). Raises as `resolve_model`.

    elsewhere  it is loaded on another machine, which has GPUs whatever there is here
    """
    settings = {key: value for key, value in config.items() if value is not None}
    label = f"model {settings.get('name', '')!r}"
    for key in settings:
        if key not in KEYS:
            raise ValueError(f"{label} has no setting {key!r}{did_you_mean(key, KEYS)}: use {', '.join(KEYS)}")
    given = [key for key in SOURCES if key in settings]
    if "name" not in settings or len(given) != 1:
        raise ValueError(f"{label} must have a name and exactly one of {', '.join(SOURCES)}, has {given or 'none'}")
    if settings[given[0]] == "???":
        raise ValueError(f"{label} is a form to fill in: model=path model.path=<folder, .gguf file or hub id>")
    kind, source = _find(given[0], str(settings[given[0]]))
    device_map = settings.get("device_map")
    if device_map is not None:
        _check_device_map(device_map, kind, "device" in settings)
    if "revision" in settings and kind != "hub":
        raise ValueError(f"{label} has a revision but is not from the hub: remove the revision")
    return ModelSpec(
        name=str(settings["name"]),
        kind=kind,
        source=source,
        dtype=_checked_dtype(settings.get("dtype", "auto")),
        device=_checked_device(str(settings["device"]), elsewhere) if "device" in settings else None,
        device_map=device_map,
        revision=str(settings["revision"]) if "revision" in settings else None,
        description=str(settings.get("description", "")),
    )


def load_model(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    device_map: DeviceMap | None = None,
    config_dir: str | Path | None = None,
) -> tuple[transformers.PreTrainedModel, Any]:
    """(model, tokenizer): the model in eval mode without gradients, the tokenizer padding on the left.

    `dtype="auto"` is the configuration's dtype, else float32 for the embedded model, tiny models and GGUF files, else
    the dtype that the weights are stored in. `device=None` is the CPU, `"auto"` the accelerator where there is one.
    `device_map` is spread over devices by accelerate.

    Raises what `resolve_model` raises, and ModelUnavailable where the model can't be had or isn't complete.
    """
    return load_spec(resolve_model(name, dtype=dtype, device=device, device_map=device_map, config_dir=config_dir))


def load_spec(spec: ModelSpec) -> tuple[transformers.PreTrainedModel, Any]:
    """Loads what `resolve_model` or `spec_from_config` has checked; returns and raises as `load_model`."""
    if spec.kind == "hub":
        settle_hub()
    float_dtype = torch.float32 if spec.dtype == "auto" else getattr(torch, spec.dtype)
    model: Any
    try:
        if spec.kind == "tiny":
            model, tokenizer = tiny_model(spec.source, dtype=float_dtype), tiny_tokenizer()
        elif spec.kind == "gguf":
            model, tokenizer = embedded.load_gguf(Path(spec.source), float_dtype)
        elif spec.kind == "embedded":
            folder = str(embedded.fetch_embedded())
            with embedded.no_progress_bars():
                model, tokenizer = _load_pretrained(folder, spec, float_dtype)
        else:
            model, tokenizer = _load_pretrained(spec.source, spec, "auto" if spec.dtype == "auto" else float_dtype)
    except (OSError, ValueError, ImportError, safetensors.SafetensorError) as error:
        if isinstance(error, ModelUnavailable):
            raise
        raise ModelUnavailable(explain_load(error, spec)) from error
    if spec.device is not None and spec.kind in ("tiny", "gguf"):
        model = model.to(spec.device)
    _settle_padding(model, tokenizer)
    return model.eval().requires_grad_(False), tokenizer


def _load_pretrained(source: str, spec: ModelSpec, dtype: torch.dtype | str) -> tuple[Any, Any]:
    # The smallest files first, so that a model that can't be had is refused before its weights are read.
    common: dict[str, Any] = {"revision": spec.revision, "trust_remote_code": False}
    transformers.AutoConfig.from_pretrained(source, **common)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **common)
    except ValueError as error:
        raise ModelUnavailable(
            f"no tokenizer can be read for {source} ({first_line(error)}): save one beside the model"
        ) from error
    device_map = spec.device_map if spec.device in (None, "cpu") else {"": spec.device}
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, device_map=device_map, output_loading_info=True, **common
    )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ModelUnavailable(
            f"the weights of {source} lack {len(missing)} of the model's parameters (such as {missing[0]}): "
            "get them again, or give a folder that holds a causal language model"
        )
    return model, tokenizer


def _settle_padding(model: transformers.PreTrainedModel, tokenizer: Any) -> None:
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    generation = model.generation_config
    if generation is not None and generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id


def _config_files(config_dir: str | Path | None) -> dict[str, Path]:
    folders = [conf_dir()]
    if config_dir is not None:
        folders.append(Path(config_dir).expanduser())
        if not folders[-1].is_dir():
            raise ValueError(f"config_dir is no folder: {config_dir}; give the folder that holds model/<name>.yaml")
    return {path.stem: path for folder in folders for path in (folder / "model").glob("*.yaml")}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(path), resolve=True)
    except (omegaconf.errors.OmegaConfBaseException, yaml.YAMLError, OSError) as error:
        raise ValueError(f"cannot read model configuration {path}: {first_line(error)}") from error
    if not isinstance(config, dict) or config.get("name") != path.stem:
        raise ValueError(f"model configuration {path} must be a mapping with `name: {path.stem}`, its file's name")
    return {str(key): value for key, value in config.items()}


def _find(key: str, value: str) -> tuple[Kind, str]:
    if key == "embedded":
        if value != EMBEDDED:
            raise ValueError(f"there is no embedded model {value!r}: the only one is {EMBEDDED}")
        return "embedded", value
    if key == "tiny":
        if value not in tiny_families():
            raise ValueError(f"unknown tiny family {value!r}: choose one of {', '.join(tiny_families())}")
        return "tiny", value
    path = Path(value).expanduser()
    if path.suffix == ".gguf":
        embedded.check_gguf(path)
        return "gguf", str(path)
    if path.is_dir():
        _check_folder(path)
        return "folder", str(path)
    if path.exists() or not HUB_ID.fullmatch(value):
        raise ValueError(f"{value!r} is no model folder and can't be a hub id: give {WAYS}")
    return "hub", value


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        files = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"give the file {folder / files[0]}" if files else "give a folder written by save_pretrained"
        raise ValueError(f"model folder {folder} has no config.json: {hint}")
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
        raise ValueError(f"model folder {folder} has no weights: put its .safetensors or .bin files there")
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ValueError(f"model folder {folder} has no tokenizer: save one there (tokenizer.save_pretrained)")


def _checked_dtype(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported: choose one of {', '.join(DTYPES)}")
    return name


def accelerator_here(elsewhere: bool = False) -> str:
    """The kind of accelerator that torch finds, "cpu" without one; `elsewhere`, where there are GPUs, "cuda" then."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cuda" if elsewhere else "cpu"


def _checked_device(name: str, elsewhere: bool) -> str:
    if name == "auto":
        return accelerator_here(elsewhere)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if elsewhere and accelerator is None and re.fullmatch(r"cuda(:\d+)?", name):
        return name
    found = ["cpu"]
    if accelerator is not None:
        found += [accelerator.type] + [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())]
    if name not in found:
        raise ValueError(f"torch has no device {name!r} here: choose one of auto, {', '.join(found)}")
    return name


def _check_device_map(device_map: Any, kind: str, has_device: bool) -> None:
    if has_device:
        raise ValueError("device and device_map exclude each other: give one of them")
    if kind in ("tiny", "gguf"):
        raise ValueError(f"device_map can't be used with a {kind} model: give device")
    embedded.require_packages("accelerate", what="device_map")
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        raise ValueError(f"device_map {device_map!r} is not one of {', '.join(DEVICE_MAPS)}: correct it, or give device")


def explain_load(error: Exception, spec: ModelSpec) -> str:
    """One line on why the load failed and what helps."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    if spec.kind == "hub":
        for kind, text in HUB_FIXES.items():
            if any(isinstance(item, kind) for item in chain):
                return text.format(hub=spec.source, revision=spec.revision)
    return f"cannot load model {spec.name} from {spec.source}: {first_line(error)}"
