"""What a calibration is: settings, a measurement on texts, and what it leaves."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvlab.analyze.setup import Setup
from kvlab.artefacts import Artefact, save, weights_hash


@dataclass(frozen=True)
class Measured:
    """What was found.

    content  for the artefact's JSON; tensors: for the file beside it
    use      what to add to `kvlab run`, with KEY for the artefact's key
    lines    the same, to be read
    """

    content: Mapping[str, Any]
    use: str
    lines: tuple[str, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Calibration:
    """Base of all calibrations. The fields are settings of the measurement: `-o name=value`, and part of what it's named by."""

    texts: ClassVar[int] = 1
    tokens: ClassVar[int] = 1024
    """How many texts, and tokens of each, where the user says nothing."""
    version: ClassVar[int] = 1
    """Raised when artefacts that were made before can't be used any more."""

    def measure(self, setup: Setup) -> Measured:
        """Measure a model on texts."""
        raise NotImplementedError


def keep(kind: str, calibration: Calibration, setup: Setup, measured: Measured) -> Artefact:
    """Write what was measured to the cache folder."""
    about = {
        "model": setup.name,
        "fingerprint": setup.fingerprint,
        "weights": weights_hash(setup.model),
        "dtype": str(setup.model.dtype).removeprefix("torch."),
        "texts": len(setup.texts),
        "tokens": setup.texts[0].shape[1],
        "text": _hash(setup.texts),
        "source": setup.source,
        **dataclasses.asdict(calibration),
    }
    content = {"use": measured.use, **measured.content}
    return save(kind, about, content, measured.tensors, calibration.version)


def _hash(texts: tuple[Tensor, ...]) -> str:
    """Hash of token ids."""
    found = hashlib.blake2b(digest_size=16)
    for ids in texts:
        found.update(ids.cpu().to(torch.int64).numpy().tobytes())
    return found.hexdigest()
