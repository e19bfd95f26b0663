"""What a calibration gives, and the file that it is kept in."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvlab.analyze.setup import Setup
from kvlab.paths import cache_dir

SAMPLE = 64
"""Numbers of each parameter that tell one model's weights from another's."""


@dataclass(frozen=True)
class Calibration:
    """settings  of the codec, by name; measured: what else was found; lines: the same, to be read"""

    settings: dict[str, float]
    measured: dict[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def artefact(name: str, setup: Setup) -> tuple[Path, dict[str, Any]]:
    """The file of a calibration, named by a hash of model, texts and what is measured, and what it was made from."""
    texts = hashlib.blake2b(digest_size=16)
    for ids in setup.texts:
        texts.update(ids.cpu().to(torch.int64).numpy().tobytes())
    about = {
        "model": setup.name,
        "weights": weights_hash(setup.model),
        "dtype": str(setup.model.dtype).removeprefix("torch."),
        "texts": len(setup.texts),
        "tokens": setup.texts[0].shape[1],
        "text": texts.hexdigest(),
    }
    key = hashlib.blake2b(json.dumps([name, about]).encode(), digest_size=8).hexdigest()
    return cache_dir() / "calibration" / f"{name}-{key}.json", about


def weights_hash(model: torch.nn.Module) -> str:
    """Hash of each parameter's name, shape and first numbers, so that big models cost nothing."""
    found = hashlib.blake2b(digest_size=16)
    for name, weight in model.named_parameters():
        first = weight.detach().flatten()[:SAMPLE].to("cpu", torch.float32)
        found.update(f"{name} {tuple(weight.shape)}".encode() + first.numpy().tobytes())
    return found.hexdigest()
