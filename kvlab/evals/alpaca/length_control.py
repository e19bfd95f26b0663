"""Length-controlled win rates: what the win rate would be if both outputs were equally long (Dubois et al. 2024, 2404.04475).

A logistic regression without intercept explains each win by three things:

    z           tanh(d / std(d)), d = characters of the reference's output minus those of the model's; std with ddof=1
    difficulty  of the instruction, a number that AlpacaEval publishes for each of its 805
    model       1: how good the model is; 0 for outputs of the reference itself under prompts that only change their length

and the length-controlled win rate is the mean of its predictions with z = 0. As in AlpacaEval's released code, a win between 0
and 1 counts as a won and a lost comparison with weights win and 1 - win, weights are penalised by the sum of their absolute
values, and the penalty is the best of ten in a cross-validation. The names of the variants are theirs:

    length_controlled          all of it; the reference's own long and short outputs ("gamed baselines"), weighed 0.2 / 2 each,
                               hold the weight of z where the model's own comparisons would exaggerate it
    length_controlled_noreg    without the gamed baselines
    length_controlled_minimal  without difficulties too
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.evals.rows import numbered
from kvlab.settings import SettingError

Array = npt.NDArray[np.float64]

VARIANTS = ("length_controlled", "length_controlled_noreg", "length_controlled_minimal")
LEAST = 10
"""Comparisons below which nothing is fitted: three weights, and five folds of two."""
FOLDS = 5
STRENGTHS = np.logspace(-4, 4, 10)
"""Inverse strengths of the penalty that are tried."""
GAMED_WEIGHT = 0.2 / 2
"""Of each comparison with one of the two gamed baselines."""
FILES = {
    "difficulty": "instruction_difficulty_recovered.json",
    "gamed": "df_gamed.csv",
    "weights": "lc_glm_weights_v1.csv",
}
"""What AlpacaEval's data is called, in <data folder>/alpaca_eval. Difficulties stand beside their instructions."""
COLUMNS = ("np.tanh(std_delta_len)", "instruction_difficulty", "not_gamed_baseline.astype(float)")
"""Of the file with fitted weights."""


@dataclass(frozen=True)
class Gamed:
    """Comparisons of the reference with itself under prompts that ask for long or short outputs: z, difficulty, win (n,)."""

    z: Array
    difficulty: Array
    win: Array


@dataclass(frozen=True)
class LengthControl:
    """A fit: its variant's name, its weights (z, difficulty, model), and what it predicts of each comparison at z = 0 (n,).

    moved  what each comparison adds to the mean of the predictions through the weights, to first order (n,); sums to 0
    """

    name: str
    weights: tuple[float, float, float]
    predicted: Array
    moved: Array

    @property
    def values(self) -> Array:
        """Shares (n,) whose mean is the win rate, and whose spread is its error, that of the weights included."""
        return self.predicted + self.moved

    @property
    def win_rate(self) -> float:
        """Percent."""
        return 100 * float(self.predicted.mean())

    @property
    def standard_error(self) -> float:
        """Percent; AlpacaEval's: of the predictions' mean, without the error of the weights. 0 without difficulties."""
        return 100 * float(self.predicted.std(ddof=1)) / float(np.sqrt(len(self.predicted)))

    @property
    def sampling_error(self) -> float:
        """Percent; with the error of the weights, but for what the penalty pulls them to 0."""
        return 100 * float(self.values.std(ddof=1)) / float(np.sqrt(len(self.values)))


def variant(difficulty: Sequence[float] | None, gamed: Gamed | None) -> str:
    """What a fit from this data is called."""
    if difficulty is None:
        return "length_controlled_minimal"
    return "length_controlled_noreg" if gamed is None else "length_controlled"


def by_construction(n: int, name: str) -> LengthControl:
    """A model against itself: a tie each time, whatever the lengths."""
    return LengthControl(name, (0.0, 0.0, 0.0), np.full(n, 0.5), np.zeros(n))


def length_control(
    wins: Sequence[float | None],
    reference_lengths: Sequence[int],
    lengths: Sequence[int],
    difficulty: Sequence[float] | None = None,
    gamed: Gamed | None = None,
) -> LengthControl:
    """The fit on these comparisons; those without a win (None) are predicted all the same, as AlpacaEval does.

    wins in [0, 1]; lengths in characters; difficulty: one for each comparison, or None. Raises SettingError below LEAST
    comparisons with a win, and where scikit-learn is missing.
    """
    known = np.array([win is not None for win in wins])
    if known.sum() < LEAST:
        raise SettingError(f"{known.sum()} comparisons: a length-controlled win rate needs at least {LEAST}")
    gamed = None if difficulty is None else gamed
    n = len(wins)
    hard = np.zeros(n) if difficulty is None else np.asarray(difficulty, dtype=float)
    features = np.stack([length_feature(reference_lengths, lengths), hard, np.ones(n)], axis=1)
    x, y = features[known], np.array([win for win in wins if win is not None], dtype=float)
    weight = np.ones(len(y))
    if gamed is not None:  # they come first, as in AlpacaEval: which fold a comparison is in follows from its place
        x = np.concatenate([np.stack([gamed.z, gamed.difficulty, np.zeros(len(gamed.z))], axis=1), x])
        y = np.concatenate([gamed.win, y])
        weight = np.concatenate([np.full(len(gamed.z), GAMED_WEIGHT), weight])
    used = [0, 2] if difficulty is None else [0, 1, 2]
    weights = np.zeros(3)
    weights[used] = fitted(x[:, used], y, weight)
    found = (float(weights[0]), float(weights[1]), float(weights[2]))
    predicted = logistic(features[:, 1:] @ weights[1:])
    own = np.zeros((n, 3))  # each comparison's share of the likelihood's slope; the gamed baselines aren't drawn
    own[known] = (x * (y - logistic(x @ weights))[:, None])[-int(known.sum()) :]
    own[known] -= own[known].mean(axis=0)  # at the fit they add up to the penalty's slope
    moved = own @ _pull(x, weight, weights, features) * n
    return LengthControl(variant(difficulty, gamed), found, predicted, moved)


def _pull(x: Array, weight: Array, weights: Array, features: Array) -> Array:
    """How the likelihood's slope (3,) moves the mean prediction at z = 0, by Newton's step without the penalty: (3,)."""
    p, flat = logistic(x @ weights), features * np.array([0.0, 1.0, 1.0])
    at_zero = logistic(flat @ weights)
    curvature = (x * (weight * p * (1 - p))[:, None]).T @ x
    slope = (flat * (at_zero * (1 - at_zero))[:, None]).mean(axis=0)
    return np.asarray(np.linalg.pinv(curvature, rcond=1e-10) @ slope)


def length_feature(reference_lengths: Sequence[int], lengths: Sequence[int]) -> Array:
    """z of each comparison (n,); zeros where all differ equally."""
    delta = np.asarray(reference_lengths, dtype=float) - np.asarray(lengths, dtype=float)
    spread = delta.std(ddof=1)
    return np.tanh(delta / spread) if spread else np.zeros(len(delta))


def fitted(x: Array, y: Array, weight: Array) -> Array:
    """Weights of the features x (n, k) for wins y (n,) in [0, 1], comparisons weighed (n,): penalty by cross-validation."""
    folds = np.arange(len(y)) % FOLDS
    scores = [_score(x, y, weight, folds, strength) for strength in STRENGTHS]
    return _regression(x, y, weight, float(STRENGTHS[int(np.argmax(scores))]))


def _score(x: Array, y: Array, weight: Array, folds: npt.NDArray[np.int64], strength: float) -> float:
    """Mean over folds of the mean log-likelihood of what wasn't fitted."""
    found = []
    for fold in range(FOLDS):
        rest, held = folds != fold, folds == fold
        p = np.clip(logistic(x[held] @ _regression(x[rest], y[rest], weight[rest], strength)), 1e-15, 1 - 1e-15)
        found.append(np.mean(weight[held] * (y[held] * np.log(p) + (1 - y[held]) * np.log1p(-p))))
    return float(np.mean(found))


def _regression(x: Array, y: Array, weight: Array, strength: float) -> Array:
    """argmin_b |b|_1 + strength * sum of weight * (log loss of y under logistic(x b)), (k,)."""
    need_sklearn()
    from sklearn.linear_model import LogisticRegression

    # liblinear draws the order of its coordinates; at this tolerance the seed no longer matters.
    options: dict[str, Any] = {
        "solver": "liblinear",
        "fit_intercept": False,
        "tol": 1e-8,
        "max_iter": 5000,
        "random_state": 123,
    }
    options |= {"l1_ratio": 1.0} if _release() >= (1, 8) else {"penalty": "l1"}
    both, labels = np.concatenate([x, x]), np.repeat([1, 0], len(y))
    model = LogisticRegression(C=strength, **options)
    model.fit(both, labels, sample_weight=np.concatenate([weight * y, weight * (1 - y)]))
    return np.asarray(model.coef_[0], dtype=np.float64)


def need_sklearn() -> None:
    """Raises SettingError where scikit-learn isn't installed."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        fix = "pip install 'kvlab[evals]', or use task.length_controlled=false"
        raise SettingError(f"length-controlled win rates need scikit-learn: {fix}") from None


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in version("scikit-learn").split(".")[:2])


def logistic(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


# -------------------------------------------------------------------------------------------------- published data


def data_file(folder: Path | None, kind: str) -> Path | None:
    """AlpacaEval's file of a kind (see FILES) in a data folder, None where there is none."""
    place = folder / "alpaca_eval" / FILES[kind] if folder else None
    return place if place and place.is_file() else None


def read_difficulties(path: Path) -> dict[str, float]:
    """Difficulty by instruction. Raises SettingError naming file and row for one that can't be used."""
    found = {}
    for row in numbered(path):
        if isinstance(row, str):
            raise SettingError(row)
        try:
            found[str(row.values["instruction"])] = float(row.values["instruction_difficulty"])
        except (KeyError, ValueError, TypeError):
            raise SettingError(f"{row.where}: give 'instruction' and 'instruction_difficulty', a number") from None
    return found


def read_gamed(path: Path) -> Gamed:
    """Comparisons with the gamed baselines, AlpacaEval's df_gamed.csv. Raises SettingError as `read_difficulties`."""
    names = ("std_delta_len", "instruction_difficulty", "preference")
    found: list[tuple[float, ...]] = []
    for row in numbered(path):
        if isinstance(row, str):
            raise SettingError(row)
        try:
            found.append(tuple(float(row.values[name]) for name in names))
            if not 0 <= found[-1][2] <= 1:
                raise ValueError
        except (KeyError, ValueError, TypeError):
            raise SettingError(f"{row.where}: give {', '.join(map(repr, names))}, numbers, the last from 0 to 1") from None
    delta, difficulty, win = np.array(found, dtype=float).T
    return Gamed(np.tanh(delta), difficulty, win)


def read_weights(path: Path) -> dict[str, tuple[float, float, float]]:
    """Published weights (z, difficulty, model) by model. Raises SettingError as `read_difficulties`."""
    found = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 1):
            try:
                z, difficulty, model = (float(row[name]) for name in COLUMNS)
            except (KeyError, ValueError, TypeError):
                raise SettingError(f"{path}, row {number}: give {', '.join(COLUMNS)}, numbers") from None
            found[row[""]] = (z, difficulty, model)
    return found


def published(weights: tuple[float, float, float], difficulty: Sequence[float]) -> LengthControl:
    """What published weights predict over these instructions (AlpacaEval: all 805)."""
    hard = np.asarray(difficulty, dtype=float)
    return LengthControl("length_controlled", weights, logistic(weights[1] * hard + weights[2]), np.zeros(len(hard)))


def difficulties_of(instructions: Sequence[str], known: Mapping[str, float]) -> list[float] | None:
    """One for each instruction, None unless all are known."""
    return [known[text] for text in instructions] if instructions and all(text in known for text in instructions) else None
