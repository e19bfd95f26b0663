"""What can be known of a model without its weights: its tokenizer, a copy on torch's meta device, a hash of its files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml  # type: ignore[import-untyped]

from kvlab import embedded
from kvlab.embedded import ModelUnavailable
from kvlab.hub import settle_hub
from kvlab.models import ModelSpec, accelerator_here, explain_load
from kvlab.paths import conf_dir
from kvlab.tiny import tiny_model, tiny_tokenizer

PIECE = 1 << 20
"""Bytes that are hashed at the start, the middle and the end of a large file."""


def outline(spec: ModelSpec) -> tuple[transformers.PreTrainedModel, Any]:
    """(model without weights, tokenizer): enough to check what can be run on it. Fetches the embedded model if need be.

    Raises ModelUnavailable where the model can't be had.
    """
    if spec.kind == "tiny":
        return tiny_model(spec.source), tiny_tokenizer()
    try:
        source, options = _source(spec)
        config = transformers.AutoConfig.from_pretrained(source, **options)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, **options)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=_dtype(spec, config))
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, ModelUnavailable):
            raise
        raise ModelUnavailable(explain_load(error, spec)) from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def sketch(spec: ModelSpec) -> transformers.PreTrainedModel | None:
    """The model without weights and tokenizer, the hub not asked; None where only the hub knows its size.

    Sizes of models on the hub are those of conf/model_sizes.yaml.
    """
    if spec.kind != "hub":
        return outline(spec)[0]
    sizes = yaml.safe_load((conf_dir() / "model_sizes.yaml").read_text()).get(spec.source)
    if sizes is None:
        return None
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**sizes)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=_dtype(spec, config))


def _source(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    if spec.kind == "embedded":
        return str(embedded.fetch_embedded()), {}
    if spec.kind == "gguf":
        path = Path(spec.source)
        return str(path.parent), {"gguf_file": path.name}
    settle_hub()
    return spec.source, {"revision": spec.revision}


def _dtype(spec: ModelSpec, config: Any) -> torch.dtype:
    if spec.dtype != "auto":
        return getattr(torch, spec.dtype)
    stored = config.dtype if spec.kind in ("folder", "hub") else None
    return stored or torch.float32


def fingerprint(spec: ModelSpec) -> str:
    """What tells a model from another of the same name: hub id and revision, or a hash of the files of a local one."""
    if spec.kind == "tiny":
        return f"tiny {spec.source}"
    if spec.kind == "embedded":
        return f"embedded {embedded.embedded_folder().name}"
    if spec.kind == "hub":
        return f"{spec.source}@{spec.revision or 'main'}"
    path = Path(spec.source)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file() and _matters(file))
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        _update(digest, file)
    return digest.hexdigest()


def _matters(file: Path) -> bool:
    return file.suffix in (".json", ".safetensors", ".bin", ".model", ".jinja") or file.name in ("merges.txt", "vocab.txt")


def dtype_of(spec: ModelSpec) -> str:
    """The dtype that a model is loaded in; "auto" where only the hub knows."""
    if spec.dtype != "auto":
        return spec.dtype
    if spec.kind != "folder":
        return "auto" if spec.kind == "hub" else "float32"
    config = json.loads((Path(spec.source) / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def device_of(spec: ModelSpec, elsewhere: bool = False) -> str:
    """The kind of device that a model runs on: cpu, cuda, mps. elsewhere: on a machine that has GPUs."""
    if spec.device_map is not None:
        return accelerator_here(elsewhere)
    return (spec.device or "cpu").split(":")[0]


def _update(digest: Any, file: Path) -> None:
    """Hash a file; of a large one its start, middle and end, since weights differ everywhere when they differ."""
    size = file.stat().st_size
    starts = [0] if size <= 3 * PIECE else [0, size // 2, size - PIECE]
    with file.open("rb") as data:
        for start in starts:
            data.seek(start)
            digest.update(data.read(3 * PIECE if len(starts) == 1 else PIECE))
