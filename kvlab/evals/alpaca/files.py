"""AlpacaEval's files: outputs that are read, and outputs, annotations and leaderboards that are written."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.evals.alpaca.length_control import LengthControl
from kvlab.evals.alpaca.win_rates import WinRates
from kvlab.evals.rows import missing, numbered
from kvlab.settings import SettingError


@dataclass(frozen=True)
class Output:
    """What a generator answered."""

    text: str
    generator: str


def read_outputs(path: Path) -> dict[str, Output]:
    """Outputs by instruction, of a file in AlpacaEval's format; rows that can't be used are left out, they have no output.

    Raises SettingError for a file without rows, and where two rows answer one instruction differently.
    """
    found: dict[str, Output] = {}
    for row in numbered(path):
        if isinstance(row, str) or missing(row.values, "instruction") or not isinstance(row.values.get("output"), str):
            continue
        output = Output(row.values["output"], str(row.values.get("generator", path.stem)))
        if found.setdefault(row.values["instruction"], output) != output:
            raise SettingError(f"{row.where}: another row has the same instruction with another output: keep one of them")
    return found


def safe(part: str) -> str:
    """A part of a folder's name."""
    return re.sub(r"[^\w.=+-]+|^\.+", "_", part)[:120]


def write_json(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A list of objects, as AlpacaEval writes its files."""
    _write(path, json.dumps(rows, indent=2, ensure_ascii=False) + "\n")


def write_leaderboard(
    path: Path, generator: str, rates: WinRates, lengths: Sequence[int], control: LengthControl | None
) -> None:
    """One line, with AlpacaEval's columns in percent.

    Its length-controlled columns are filled by the whole of its regression only; another variant has a column of its name.
    """
    own = control is not None and control.name == "length_controlled"
    row: dict[str, Any] = {
        "": generator,
        "win_rate": rates.win_rate,
        "standard_error": rates.standard_error,
        "n_wins": rates.n_wins,
        "n_wins_base": rates.n_wins_base,
        "n_draws": rates.n_draws,
        "n_total": rates.n_total,
        "discrete_win_rate": rates.discrete_win_rate,
        "mode": "kvlab",
        "avg_length": int(sum(lengths) / len(lengths)),
        "length_controlled_winrate": control.win_rate if own and control else None,
        "lc_standard_error": control.standard_error if own and control else None,
    }
    if control and not own:
        row |= {f"{control.name}_winrate": control.win_rate, f"{control.name}_standard_error": control.sampling_error}
    text = io.StringIO()
    writer = csv.DictWriter(text, list(row), lineterminator="\n")
    writer.writeheader()
    writer.writerow(row)
    _write(path, text.getvalue())


def _write(path: Path, text: str) -> None:
    """All of a file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
