"""A sample of the task `helm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlab.evals.base import Sample
from kvlab.evals.helm.adapter import Adapted
from kvlab.evals.helm.spec import Instance


@dataclass(frozen=True)
class HelmSample(Sample):
    """A sample, and what it was made of. mapping: letters to the choices that they stand for, where a letter is asked for."""

    instance: Instance = field(default_factory=lambda: Instance("", "", ()))
    adapted: Adapted | None = None
    mapping: Mapping[str, str] = field(default_factory=dict)
