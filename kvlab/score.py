"""`kvlab score`: a benchmark's own output files, scored without a model. One function for each benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvlab.settings import SettingError

Scorer = Callable[[Sequence[str], Mapping[str, str]], str]
"""Paths and options to what is printed. Raises SettingError, in one line that says what to change."""


def _longbench(paths: Sequence[str], options: Mapping[str, str]) -> str:
    from kvlab.evals.longbench.files import score_table

    return score_table(paths, options)


def _alpaca(paths: Sequence[str], options: Mapping[str, str]) -> str:
    from kvlab.evals.alpaca.report import report

    if options:
        raise SettingError(f"-o {next(iter(options))}: alpaca has no options")
    return report(paths)


def _helm(paths: Sequence[str], options: Mapping[str, str]) -> str:
    from kvlab.helm_report import helm_report

    return helm_report(paths, options)


SCORES: dict[str, Scorer] = {"longbench": _longbench, "alpaca": _alpaca, "helm": _helm}
"""Benchmarks by name."""
