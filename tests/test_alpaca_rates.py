"""Win rates: against their definitions in loops, and against AlpacaEval's leaderboard where its data is at hand."""

import csv
import json
import math
import os
import random
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

from kvlab.evals.alpaca import length_control as lc
from kvlab.evals.alpaca.report import report
from kvlab.evals.alpaca.win_rates import discrete, win_of, win_rates
from kvlab.settings import SettingError

DATA = Path(os.environ.get("KVLAB_DATA_DIR") or "/nowhere") / "alpaca_eval"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="KVLAB_DATA_DIR has no alpaca_eval")


def naive_rates(preferences):
    """By the definition: pairwise loops, sample variance by hand."""
    wins = won = lost = tied = 0.0
    good = []
    for p in preferences:
        if isinstance(p, int | float) and not isinstance(p, bool) and p == 0:
            p = 1.5
        if isinstance(p, int | float) and not isinstance(p, bool) and 1 <= p <= 2:
            good.append(p)
            wins += p - 1
            won, lost, tied = won + (p > 1.5), lost + (p < 1.5), tied + (p == 1.5)
    n = len(good)
    variance = sum((p - 1 - wins / n) ** 2 for p in good) / (n - 1)
    return 100 * wins / n, 100 * (variance / n) ** 0.5, 100 * (won + tied / 2) / n, won, lost, tied, n


def test_win_rates_are_their_definition():
    rng = random.Random(0)
    odd = [None, 0, 0.0, 3, -1, math.nan, math.inf, "2", True, 0.99, 2.01, 1, 2, 1.5, 1.4999999]
    preferences = [rng.choice([rng.uniform(1, 2), 1, 2, 1.5, *odd]) for _ in range(300)] + odd
    found = win_rates(preferences)
    rate, error, whole, won, lost, tied, n = naive_rates(preferences)
    assert (found.n_wins, found.n_wins_base, found.n_draws, found.n_total) == (won, lost, tied, n)
    assert found.left_out == len(preferences) - n
    assert (found.win_rate, found.standard_error, found.discrete_win_rate) == pytest.approx((rate, error, whole), rel=1e-12)


def test_edges_of_win_rates():
    assert win_rates([2]).standard_error is None and win_rates([2]).win_rate == 100
    assert [win_of(p) for p in (1, 2, 1.25, 0, None, True, 2.5)] == [0, 1, 0.25, 0.5, None, None, None]
    assert [discrete(win) for win in (0.0, 0.4999, 0.5, 0.5001, 1.0)] == [0, 0, 0.5, 1, 1]
    with pytest.raises(ValueError, match="none of 2 comparisons"):
        win_rates([None, 7])


# --------------------------------------------------------------------------------------------------- length control


def naive_fit(x, y, weight, strength):
    """argmin |b|_1 + strength * sum of weighted log losses: b as a difference of two parts that are at least 0."""
    k = x.shape[1]

    def loss(parts):
        b = parts[:k] - parts[k:]
        m = x @ b
        p = 1 / (1 + np.exp(-m))
        value = parts.sum() + strength * (weight * (np.logaddexp(0, m) - y * m)).sum()
        slope = strength * x.T @ (weight * (p - y))
        return value, np.concatenate([1 + slope, 1 - slope])

    options = {"maxiter": 10_000, "ftol": 1e-15, "gtol": 1e-10}
    found = minimize(loss, np.zeros(2 * k), jac=True, method="L-BFGS-B", bounds=[(0, None)] * 2 * k, options=options).x
    return found[:k] - found[k:]


def naive_control(wins, theirs, ours, difficulty=None, gamed=None):
    """Weights and predictions, from the published description, row by row."""
    gaps = [a - b for a, b in zip(theirs, ours, strict=True)]
    spread = statistics.stdev(gaps)
    rows = [[math.tanh(gap / spread), *([] if difficulty is None else [difficulty[i]]), 1.0] for i, gap in enumerate(gaps)]
    x, y, w = [], [], []
    for z, hard, win in gamed or []:
        x.append([math.tanh(z), hard, 0.0])
        y.append(win)
        w.append(0.1)
    for row, win in zip(rows, wins, strict=True):
        if win is not None:
            x.append(row)
            y.append(win)
            w.append(1.0)
    x, y, w = np.array(x), np.array(y), np.array(w)
    best, weights = -math.inf, None
    for power in range(10):
        strength = 10 ** (-4 + 8 * power / 9)
        scores = []
        for fold in range(5):
            held = [i for i in range(len(y)) if i % 5 == fold]
            rest = [i for i in range(len(y)) if i % 5 != fold]
            b = naive_fit(x[rest], y[rest], w[rest], strength)
            total = 0.0
            for i in held:
                p = 1 / (1 + math.exp(-float(x[i] @ b)))
                total += w[i] * (y[i] * math.log(p) + (1 - y[i]) * math.log(1 - p))
            scores.append(total / len(held))
        if statistics.fmean(scores) > best:
            best, weights = statistics.fmean(scores), naive_fit(x, y, w, strength)
    predicted = []
    for row in rows:
        predicted.append(1 / (1 + math.exp(-sum(b * v for b, v in zip(weights[1:], row[1:], strict=True)))))
    return weights, predicted


def drawn(n=60, seed=1):
    """Comparisons whose wins depend on length, difficulty and luck."""
    rng = np.random.default_rng(seed)
    theirs, ours, hard = rng.integers(50, 900, n), rng.integers(50, 900, n), rng.normal(size=n)
    wins = 1 / (1 + np.exp((theirs - ours) / 200 - hard - 0.3 * rng.normal(size=n) + 0.5))
    return [float(win) for win in wins], theirs.tolist(), ours.tolist(), hard.tolist()


@pytest.mark.parametrize("kind", lc.VARIANTS)
def test_the_fit_is_its_definition(kind):
    wins, theirs, ours, hard = drawn()
    wins[7] = None
    rng = np.random.default_rng(3)
    rows = [(float(z), float(h), float(1 / (1 + np.exp(2 * z)))) for z, h in rng.normal(size=(24, 2))]
    gamed = lc.Gamed(*(np.array(column) for column in zip(*[(math.tanh(z), h, w) for z, h, w in rows], strict=True)))
    difficulty = None if kind.endswith("minimal") else hard
    found = lc.length_control(wins, theirs, ours, difficulty, gamed if kind == "length_controlled" else None)
    weights, predicted = naive_control(wins, theirs, ours, difficulty, rows if kind == "length_controlled" else None)
    assert found.name == kind
    assert [b for b in found.weights if b or difficulty is not None] == pytest.approx(list(weights), abs=2e-3)
    assert found.predicted.tolist() == pytest.approx(predicted, abs=5e-4)
    assert found.win_rate == pytest.approx(100 * statistics.fmean(predicted), abs=0.03)
    error = statistics.stdev(found.predicted) / math.sqrt(len(predicted))
    assert found.standard_error == pytest.approx(100 * error, rel=1e-9, abs=1e-9)
    assert found.weights[0] < -0.5, "a longer reference wins more often"


@pytest.mark.parametrize("hard", [True, False])
def test_the_error_is_that_of_fits_on_other_comparisons(hard):
    wins, theirs, ours, difficulty = map(np.array, drawn(200))
    found = lc.length_control(wins.tolist(), theirs, ours, difficulty if hard else None)
    assert found.values.mean() == pytest.approx(found.win_rate / 100) and abs(found.moved.sum()) < 1e-9
    rng, rates = np.random.default_rng(0), []
    x = np.stack([lc.length_feature(theirs, ours), difficulty * hard, np.ones(200)], axis=1)
    for _ in range(200):
        rows = rng.integers(0, 200, 200)
        b = naive_fit(x[rows], wins[rows], np.ones(200), 1e4)
        rates.append(100 * np.mean(1 / (1 + np.exp(-x[rows, 1:] @ b[1:]))))
    assert found.sampling_error == pytest.approx(np.std(rates), rel=0.15)
    assert found.standard_error < 0.9 * found.sampling_error, "AlpacaEval's takes the weights as given"


def test_a_penalty_that_leaves_no_weights_leaves_an_error():
    wins = [0.7, 0.3, 0.35, 0.69] * 5
    found = lc.length_control(wins, range(20), [10] * 20)
    assert found.weights == (0, 0, 0) and found.win_rate == 50 and found.standard_error == 0
    assert found.sampling_error == pytest.approx(100 * statistics.stdev(wins) / 20**0.5, rel=0.2)


def test_control_takes_the_advantage_of_length_away():
    rng = np.random.default_rng(0)
    theirs, ours = rng.integers(100, 300, 200), rng.integers(300, 700, 200)
    wins = (rng.random(200) < 1 / (1 + np.exp((theirs - ours) / 250))).astype(float).tolist()
    found = lc.length_control(wins, theirs.tolist(), ours.tolist())
    assert statistics.fmean(wins) > 0.7 and found.win_rate < 100 * statistics.fmean(wins) - 5


def test_equal_lengths_and_too_few_comparisons():
    assert lc.length_feature([5, 6, 7], [5, 6, 7]).tolist() == [0, 0, 0]
    even = lc.length_control([0.2, 0.4] * 10, [9] * 20, [9] * 20)
    assert even.win_rate == pytest.approx(30, abs=1) and even.weights[0] == 0
    with pytest.raises(SettingError, match="9 comparisons: .* at least 10"):
        lc.length_control([0.5] * 9 + [None], [1] * 10, [2] * 10)


def test_data_of_length_control_that_is_wrong(tmp_path, monkeypatch):
    (tmp_path / "d.json").write_text('[{"instruction": "a", "instruction_difficulty": 1}, {"instruction": "b"}]')
    with pytest.raises(SettingError, match=r"d.json, row 2: give 'instruction' and 'instruction_difficulty', a number"):
        lc.read_difficulties(tmp_path / "d.json")
    (tmp_path / "df_gamed.csv").write_text("std_delta_len,instruction_difficulty,preference\n0.5,1,0.25\n1,2,1.5\n")
    with pytest.raises(SettingError, match=r"df_gamed.csv, row 2: .* from 0 to 1"):
        lc.read_gamed(tmp_path / "df_gamed.csv")
    (tmp_path / "df_gamed.csv").write_text("std_delta_len,instruction_difficulty,preference\n0.5,1,0.25\n")
    gamed = lc.read_gamed(tmp_path / "df_gamed.csv")
    assert (gamed.z[0], gamed.difficulty[0], gamed.win[0]) == (math.tanh(0.5), 1, 0.25)
    (tmp_path / "w.csv").write_text(f",{','.join(lc.COLUMNS)}\nme,1,2,x\n")
    with pytest.raises(SettingError, match=r"w.csv, row 1: give"):
        lc.read_weights(tmp_path / "w.csv")
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    with pytest.raises(SettingError, match=r"pip install 'kvlab\[evals\]'"):
        lc.length_control(*drawn()[:3])


# --------------------------------------------------------------------------------------------------------- reports


def annotations(tmp_path, rows, name="annotations.json"):
    (tmp_path / name).write_text(json.dumps(rows))
    return tmp_path / name


def made_up(n=12):
    return [
        {
            "instruction": f"task {i}",
            "output_1": "a" * (i + 1),
            "output_2": "b" * (3 * i % 7 + 1),
            "generator_1": "base",
            "generator_2": "mine",
            "preference": None if i == 3 else 1 + (i % 5) / 4,
        }
        for i in range(n)
    ]


def test_a_report_says_what_was_won(tmp_path, monkeypatch):
    monkeypatch.delenv("KVLAB_DATA_DIR", raising=False)
    rows = made_up()
    told = report([annotations(tmp_path, rows)])
    rate, error, whole, won, lost, tied, n = naive_rates([row["preference"] for row in rows])
    assert "mine against base" in told and f"won {won:g}, lost {lost:g}, tied {tied:g} of {n}" in told
    assert f"{rate:.5f} % ± {error:.5f}" in told and f"{whole:.4f} %" in told
    assert "1 without a preference, left out" in told and "length_controlled_minimal (fitted here)" in told
    assert "at least 10" in report([annotations(tmp_path, made_up(8))])
    bare = annotations(tmp_path, [{"preference": 1.2}, {"preference": 2}])
    assert "rows lack instruction" in report([bare])
    two = report([annotations(tmp_path, rows), annotations(tmp_path, rows, "b.json")])
    assert two.count("win rate  ") == 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no rows"),
        ("[]", "has no rows"),
        ("{}", "holds no list of rows"),
        ('[{"instruction": "a"}]', "none of 1 comparisons has a preference"),
        ("[3]", "row 1: no JSON object"),
        ("[{", "no JSON"),
    ],
)
def test_files_that_are_no_annotations(tmp_path, text, problem):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SettingError, match=f"a.json.*{problem}"):
        report([tmp_path / "a.json"])


# ------------------------------------------------------------------------------------------- AlpacaEval's own data


def leaderboard():
    with (DATA / "weighted_alpaca_eval_gpt4_turbo_leaderboard.csv").open() as file:
        return {row[""]: row for row in csv.DictReader(file)}


@needs_data
def test_real_annotations_give_the_leaderboards_figures():
    rows = json.loads((DATA / "annotations_gemma-2b-it.json").read_text())
    found, wanted = win_rates(row["preference"] for row in rows), leaderboard()["gemma-2b-it"]
    for name in ("win_rate", "standard_error", "discrete_win_rate"):
        assert getattr(found, name) == pytest.approx(float(wanted[name]), abs=1e-10)
    assert found.win_rate == pytest.approx(3.4019714381366457, abs=1e-10)
    for name in ("n_wins", "n_wins_base", "n_draws", "n_total"):
        assert getattr(found, name) == int(float(wanted[name]))


@needs_data
def test_published_weights_give_the_leaderboards_length_controlled_figures():
    known = lc.read_difficulties(lc.data_file(DATA.parent, "difficulty"))
    weights, board = lc.read_weights(lc.data_file(DATA.parent, "weights")), leaderboard()
    wanted = {
        m: float(board[m]["length_controlled_winrate"]) for m in weights if board.get(m, {}).get("length_controlled_winrate")
    }
    off = sorted(abs(lc.published(weights[m], list(known.values())).win_rate - value) for m, value in wanted.items())
    assert len(known) == 805 and len(off) >= 199
    assert statistics.median(off) < 1e-8
    assert sum(error < 0.013 for error in off) >= 196
    gemma = lc.published(weights["gemma-2b-it"], list(known.values()))
    assert gemma.win_rate == pytest.approx(5.437453620377121, abs=1e-7)


@needs_data
def test_a_fit_without_the_gamed_baselines_says_so_and_is_near():
    """The published weights are -1.7134, 0.8908, -3.6281, and 5.437 %; without gamed baselines the weight of length is less."""
    told = report([DATA / "annotations_gemma-2b-it.json"])
    assert "win rate           3.40197 % ± 0.53900" in told and "5.43745 %" in told
    fitted = re.search(
        r"length_controlled_noreg \(fitted here\)  (\S+) % .*: length (\S+), difficulty (\S+), model (\S+)", told
    )
    assert [float(number) for number in fitted.groups()] == pytest.approx([4.72336, -1.1632, 1.0471, -4.0944], abs=2e-3)
