"""A reproduction as files: rows of a CSV that all tables of a paper share, Markdown, LaTeX, and a picture."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from kvlab.analyze.report import DPI, can_draw, check_writable
from kvlab.files import part_of, write_whole
from kvlab.render import csv_text
from kvlab.reproduce.join import Reproduction
from kvlab.reproduce.picture import draw
from kvlab.reproduce.report import records, render_reproduction
from kvlab.settings import SettingError

RESULT = "result.csv"
MINE = "path"
"""Of a row: where its cell is on the machine that ran it, which is no use in a file that is passed on."""


def check_place(folder: Path) -> None:
    """Raises ValueError for a folder that can't be written, or whose result.csv is of something else. Makes nothing."""
    check_writable(folder, "--save")
    _others(folder / RESULT, "", "")


def save(found: Reproduction, folder: Path) -> list[Path]:
    """Write a reproduction below a folder, which is made; returns the files.

    result.csv    rows of this table and scale replace those that were there, others stay
    TABLE.md, TABLE.tex, and with matplotlib TABLE.png; TABLE_paper with scale=paper
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{name: value for name, value in row.items() if name != MINE} for row in records(found)]
    others = _others(folder / RESULT, found.table.name, found.scale.name)
    whole = sorted([*others, *rows], key=lambda row: (row["table"], row["scale"]))  # stable: rows stay in their order
    write_whole(folder / RESULT, csv_text(whole) + "\n")
    stem = found.table.name.rpartition("/")[2] + ("" if found.scale.name == "cpu" else f"_{found.scale.name}")
    written = [folder / RESULT, folder / f"{stem}.md", folder / f"{stem}.tex"]
    for file, fmt in zip(written[1:], ("md", "latex"), strict=True):
        write_whole(file, render_reproduction(found, fmt) + "\n")
    return [*written, _picture(found, folder / f"{stem}.png")] if can_draw() else written


def kept_result(folder: Path, name: str, link: bool) -> str:
    """How many pairs of methods of a table at scale=cpu stand in the paper's order, of those it tells apart; "": not kept.

    folder  with a folder for each paper; link: as Markdown to the table there
    """
    path = folder / name.partition("/")[0] / RESULT
    try:
        rows = [row for row in _rows(path) if (row["table"], row["scale"]) == (name, "cpu")]
    except SettingError:  # of an older version, or something else
        return ""
    if not rows:
        return ""
    orders = {(row["model"], row["task"]): row for row in rows}.values()
    agree, reverse, pairs = (sum(int(row[part]) for row in orders) for part in ("agree", "reversed", "pairs"))
    said = f"{agree} of {pairs}" + (f", {reverse} reversed" if reverse else "") if pairs else "no pair told apart"
    return f"[{said}]({name}.md)" if link else said


def _picture(found: Reproduction, path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    draw(found, figure)
    figure.savefig(part_of(path), dpi=DPI, format="png")
    part_of(path).replace(path)
    return path


def _others(path: Path, table: str, scale: str) -> list[dict[str, str]]:
    """Rows of other tables and scales in a result.csv, if there is one. Raises SettingError for another sort of file."""
    return [row for row in _rows(path) if (row["table"], row["scale"]) != (table, scale)]


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    if not {"table", "scale", "ours", "pairs"} <= set(reader.fieldnames or ()):
        raise SettingError(f"--save: {path} isn't of `kvlab reproduce`: give another folder")
    return list(reader)
