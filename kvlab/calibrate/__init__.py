"""`kvlab calibrate`: what codecs must know of a model before they can be used, measured on real text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from kvlab.analyze.setup import Setup
from kvlab.calibrate.base import Calibration, artefact
from kvlab.calibrate.qaq import calibrate_qaq
from kvlab.results import write_whole

__all__ = ["CALIBRATIONS", "run_calibration"]

CALIBRATIONS: dict[str, Callable[[Setup], Calibration]] = {"qaq": calibrate_qaq}
"""codec -> what measures its settings"""


def run_calibration(name: str, setup: Setup, show: Callable[[str], None]) -> Path:
    """Measure what the codec needs, write it to the cache folder, and show it and how to use it. Returns the file."""
    found = CALIBRATIONS[name](setup)
    path, about = artefact(name, setup)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"codec": name, **about, "settings": found.settings, "measured": found.measured}
    write_whole(path, json.dumps(content, indent=1) + "\n")
    use = " ".join(f"codec.{name}.{key}={value}" for key, value in found.settings.items())
    show("\n".join([f"{name}: {setup.label}", *found.lines, f"use: {use}", f"file: {path}"]))
    return path
