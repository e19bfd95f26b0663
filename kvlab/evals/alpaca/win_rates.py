"""Win rates of AlpacaEval: how often a judge prefers a model's outputs to a reference's. Pure: numbers in, numbers out.

A preference lies in [1, 2]: 1 the reference (output_1) wins, 2 the model's output (output_2) wins, 1.5 a tie. Rates are in
percent, as AlpacaEval prints them (Li et al. 2023, github.com/tatsu-lab/alpaca_eval).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class WinRates:
    """What comparisons add up to.

    win_rate           100 * mean(preference - 1); standard_error of it, std(ddof=1) / sqrt(n), None below two comparisons
    discrete_win_rate  100 * (wins + ties / 2) / n: each comparison counts as won, lost or tied
    n_wins, n_wins_base, n_draws, n_total  comparisons that the model won, that the reference won, ties, and all of these
    left_out           comparisons without a preference
    """

    win_rate: float
    standard_error: float | None
    n_wins: int
    n_wins_base: int
    n_draws: int
    n_total: int
    discrete_win_rate: float
    left_out: int

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def win_of(preference: Any) -> float | None:
    """A preference as a win in [0, 1], 1 for the model; None for what is no preference. 0 is an old way to write a tie."""
    if isinstance(preference, bool) or not isinstance(preference, int | float) or not math.isfinite(preference):
        return None
    if preference == 0:
        return 0.5
    return float(preference) - 1 if 1 <= preference <= 2 else None


def discrete(win: float) -> float:
    """A win as 1 (won), 0 (lost) or 0.5 (exactly tied)."""
    return 0.5 if win == 0.5 else float(win > 0.5)


def win_rates(preferences: Iterable[Any]) -> WinRates:
    """Of preferences in [1, 2]; whatever else is among them is left out and counted. ValueError where nothing is left."""
    every = [win_of(preference) for preference in preferences]
    wins = [win for win in every if win is not None]
    if not wins:
        raise ValueError(f"none of {len(every)} comparisons has a preference in [1, 2]")
    flags = [discrete(win) for win in wins]
    n = len(wins)
    return WinRates(
        win_rate=100 * statistics.fmean(wins),
        standard_error=100 * statistics.stdev(wins) / math.sqrt(n) if n > 1 else None,
        n_wins=flags.count(1.0),
        n_wins_base=flags.count(0.0),
        n_draws=flags.count(0.5),
        n_total=n,
        discrete_win_rate=100 * statistics.fmean(flags),
        left_out=len(every) - n,
    )
