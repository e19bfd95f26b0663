"""`kvlab calibrate`: what codecs and ways of sharing must know of a model before they can be used, measured on real text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvlab.analyze.setup import Setup
from kvlab.artefacts import Artefact
from kvlab.calibrate.base import Calibration, Measured, keep
from kvlab.calibrate.eigen import EigenCalibration
from kvlab.calibrate.kvsharer import KVSharerCalibration
from kvlab.calibrate.qaq import QaqCalibration
from kvlab.settings import build

__all__ = ["CALIBRATIONS", "Calibration", "Measured", "make_calibration", "run_calibration"]

CALIBRATIONS: dict[str, type[Calibration]] = {
    "eigen": EigenCalibration,
    "kvsharer": KVSharerCalibration,
    "qaq": QaqCalibration,
}
"""kind of artefact -> what measures it"""


def make_calibration(name: str, settings: Mapping[str, object]) -> Calibration:
    """A calibration by name with its settings. Raises SettingError on an unknown setting, or a wrong value."""
    return build(CALIBRATIONS[name], settings, f"calibrate {name}")


def run_calibration(name: str, calibration: Calibration, setup: Setup, show: Callable[[str], None]) -> Artefact:
    """Measure, write what was found to the cache folder, and show it and how to use it."""
    measured = calibration.measure(setup)
    artefact = keep(name, calibration, setup, measured)
    show("\n".join([f"{name}: {setup.label}", *measured.lines, f"use: {artefact.use}", f"file: {artefact.path}"]))
    return artefact
