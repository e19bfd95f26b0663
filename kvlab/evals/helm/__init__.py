"""HELM-style evaluation: scenario + adapter + metrics, robustness and calibration, and the files that HELM's tools read."""

from kvlab.evals.helm.task import Helm

__all__ = ["Helm"]
