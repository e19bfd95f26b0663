"""What comes of analyses: CSV and JSON files, a picture where matplotlib is installed, and a short table to read."""

from __future__ import annotations

import importlib.util
import json
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.analyze.base import Analysis
from kvlab.render import number

DPI = 130
WIDTH = 120
"""Columns of printed sentences."""
NO_PICTURES = "pictures need matplotlib, which isn't installed: pip install 'kvlab[plots]'"


def check_writable(folder: Path, option: str = "--output") -> None:
    """Raises ValueError, which names the option, for a folder that can't be made or written. Makes nothing."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{option}={folder} can't be written: give another folder")


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def write_tables(name: str, analysis: Analysis, folder: Path) -> list[Path]:
    """Each table as CSV: NAME.csv the main one, NAME_OTHER.csv the others."""
    written = []
    for part, rows in analysis.tables().items():
        written.append(folder / f"{name}{part and '_'}{part}.csv")
        rows.to_csv(written[-1], index=False, float_format="%.8g")
    return written


def write_picture(name: str, analysis: Analysis, folder: Path, label: str) -> Path:
    """NAME.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    analysis.draw(figure)
    figure.suptitle(f"{analysis.title}\n{label}", fontsize=10)
    figure.savefig(folder / f"{name}.png", dpi=DPI)
    return folder / f"{name}.png"


def write_json(name: str, content: Mapping[str, Any], folder: Path) -> Path:
    """NAME.json: what `--json` prints, of one analysis; `kvlab dashboard` draws it."""
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    return folder / f"{name}.json"


def render(analysis: Analysis, label: str, files: list[Path]) -> str:
    """Its title, a short table, what the table means, what else there is to say, and where everything is."""
    meaning = textwrap.fill(analysis.meaning, WIDTH)
    lines = [analysis.title, label, "", _aligned(analysis.summary()), "", meaning, *analysis.lines()]
    return "\n".join([*lines, f"files: {', '.join(map(str, files))}"])


def as_dict(analysis: Analysis, files: list[Path]) -> dict[str, Any]:
    """For JSON: rows of the main table."""
    rows = analysis.tables()[""].to_dict("records")
    about = {"title": analysis.title, "meaning": analysis.meaning}
    return {**about, "rows": rows, "lines": analysis.lines(), "files": [str(file) for file in files]}


def _aligned(rows: pd.DataFrame) -> str:
    """Columns that stand under their names: words to the left, numbers to the right."""
    cells = [list(map(str, rows.columns)), *([_cell(value) for value in row] for row in rows.itertuples(index=False))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: list[str]) -> str:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return "  ".join([row[0].ljust(widths[0]), *rest]) if first else ""

    return "\n".join([line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:])])


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return number(None if pd.isna(value) else float(value)) if isinstance(value, float) else str(value)
