"""Win rates of annotation files in AlpacaEval's format, as text: what `kvlab score alpaca` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.evals.alpaca import length_control as lc
from kvlab.evals.alpaca.win_rates import win_of, win_rates
from kvlab.evals.rows import table_rows
from kvlab.paths import data_dir
from kvlab.settings import SettingError

REFERENCE = "gpt4_1106_preview"
"""The reference that the published weights are of."""


def report(paths: Sequence[str | Path]) -> str:
    """A block of lines on each file of annotations: win rate, standard error, discrete and length-controlled win rates.

    Difficulties and published weights are looked for in the data folder (KVLAB_DATA_DIR). Raises SettingError, naming file
    and row, for what is no file of annotations.
    """
    return "\n\n".join(_block(Path(path).expanduser()) for path in paths)


def _block(path: Path) -> str:
    rows = table_rows(path)
    try:
        rates = win_rates(row.get("preference") for row in rows)
    except ValueError as error:
        raise SettingError(f"{path}: {error}; is it a file of annotations?") from None
    model, reference = (_only(rows, name) for name in ("generator_2", "generator_1"))
    lines = [
        f"{path}: {model} against {reference}",
        f"  win rate           {_percent(rates.win_rate, rates.standard_error)}",
        f"  discrete win rate  {rates.discrete_win_rate:.4f} %",
        f"  won {rates.n_wins}, lost {rates.n_wins_base}, tied {rates.n_draws} of {rates.n_total}",
    ]
    if rates.left_out:
        lines.append(f"  {rates.left_out} without a preference, left out")
    return "\n".join(lines + _length_lines(rows, model, reference))


def _length_lines(rows: Sequence[Mapping[str, Any]], model: str, reference: str) -> list[str]:
    names = ("instruction", "output_1", "output_2")
    texts = [[str(row.get(name)) for row in rows] for name in names]
    if not all(isinstance(row.get(name), str) for row in rows for name in names):
        return ["  length-controlled  not known: rows lack instruction, output_1 or output_2"]
    folder = data_dir()
    files = {kind: lc.data_file(folder, kind) for kind in lc.FILES}
    difficulty = lc.difficulties_of(texts[0], lc.read_difficulties(files["difficulty"]) if files["difficulty"] else {})
    gamed = lc.read_gamed(files["gamed"]) if files["gamed"] else None
    lengths = [[len(text) for text in column] for column in texts[1:]]
    wins = [win_of(row.get("preference")) for row in rows]
    try:
        lines = [_line(lc.length_control(wins, lengths[0], lengths[1], difficulty, gamed), "fitted here")]
    except SettingError as error:
        lines = [f"  length-controlled  not given: {error}"]
    stored = lc.read_weights(files["weights"]) if files["weights"] and reference == REFERENCE else {}
    if difficulty is not None and model in stored:
        lines.append(_line(lc.published(stored[model], difficulty), "by the published weights"))
    return lines


def _line(control: lc.LengthControl, how: str) -> str:
    z, difficulty, quality = control.weights
    weights = f"length {z:.4f}, difficulty {difficulty:.4f}, model {quality:.4f}"
    rate = _percent(control.win_rate, control.sampling_error)
    if control.moved.any():
        rate += f" (AlpacaEval's error, which takes weights as given: {control.standard_error:.5f})"
    return f"  {control.name} ({how})  {rate}  weights: {weights}"


def _percent(value: float, error: float | None) -> str:
    return f"{value:.5f} %" + ("" if error is None else f" ± {error:.5f}")


def _only(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """The one value of a column, or how many there are."""
    values = list(dict.fromkeys(str(row.get(name, "?")) for row in rows))
    return values[0] if len(values) == 1 else f"{len(values)} generators"
