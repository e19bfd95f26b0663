"""`kvlab score`: a benchmark's own output files, scored without a model. One function for each benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Scorer = Callable[[Sequence[str], Mapping[str, str]], str]
"""Paths and options to what is printed. Raises SettingError, in one line that says what to change."""


def _longbench(paths: Sequence[str], options: Mapping[str, str]) -> str:
    from kvlab.evals.longbench_files import score_table

    return score_table(paths, options)


SCORES: dict[str, Scorer] = {"longbench": _longbench}
"""Benchmarks by name."""
