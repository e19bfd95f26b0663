"""Comparisons and their breakdowns as Markdown, LaTeX, CSV and plain text.

Rows stay in the order they come in and none is set off: what a reader may conclude is said by the intervals.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from kvlab.breakdown import Breakdown
from kvlab.hints import did_you_mean
from kvlab.metrics import Difference
from kvlab.tables import Comparison, Row, error_of, one_line

FORMATS = ("md", "csv", "latex", "text")
NOISE = "≈: the 95 % interval contains 0, so the difference is within noise"
_NONE = "–"
_EMPTY = ("", _NONE)
_LATEX = {
    **{char: f"\\{char}" for char in "{}$&#_%"},
    **{"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},
    **{"Δ": r"$\Delta$", "±": r"$\pm$", "≈": r"$\approx$", "×": r"$\times$", "·": r"$\cdot$", "–": "--", "…": r"\ldots{}"},
}


class Sheet(NamedTuple):
    """A table as text: what every format but CSV starts from. `right` says which columns are numbers."""

    title: str
    about: str
    header: list[str]
    right: list[bool]
    rows: list[list[str]]
    notes: list[str]


def render(items: Sequence[Comparison | Breakdown], fmt: str = "md") -> str:
    """Tables with their warnings: "md" (Markdown), "latex" (`tabular` with booktabs) or "text" (aligned, for a terminal).

    They leave out columns that are empty, and say above the table what is the same in all rows. "csv" is one table of all rows
    with raw numbers. The last line has no newline. Raises ValueError for another format.
    """
    if fmt not in FORMATS:
        raise ValueError(f"table format {fmt!r}{did_you_mean(fmt, FORMATS)}; there are: {', '.join(FORMATS)}")
    if fmt == "csv":
        return csv_text([record for item in items for record in _records(item)])
    return sheets_text([comparison_sheet(i) if isinstance(i, Comparison) else _breakdown_sheet(i) for i in items], fmt)


def sheets_text(sheets: Iterable[Sheet], fmt: str) -> str:
    """Sheets one below the other: "md", "latex" or "text"."""
    write = {"md": _markdown, "latex": _latex, "text": _text}[fmt]
    return "\n\n".join(map(write, sheets))


def number(value: float | None, digits: int = 3) -> str:
    """A number to some significant digits, without an exponent where that is readable."""
    if value is None:
        return _NONE
    return f"{value:.{_places_for(value, digits)}f}" if _readable(value) else f"{value:.{digits}g}"


def with_error(value: float | None, stderr: float | None) -> str:
    """'23.1 ± 1.2': as many digits as the error supports (two if it starts below 3.55, else one)."""
    if value is None or stderr is None or not (_readable(value) and _readable(stderr)):
        return number(value) if stderr is None or value is None else f"{value:.3g} ± {stderr:.2g}"
    places = _supported(stderr, value)
    return f"{value:.{places}f} ± {stderr:.{places}f}"


def difference(found: Difference | None, n: int | None = None) -> str:
    """'≈ -0.04 [-0.12, +0.04]', ≈ if that is within noise; '(n = 22)' where fewer samples are paired than n."""
    if found is None:
        return _NONE
    fewer = f" (n = {found.n})" if n is not None and found.n < n else ""
    if found.low is None or found.high is None:
        return f"{found.value:+.3g} (no interval){fewer}"
    numbers = (found.value, found.low, found.high)
    if all(map(_readable, numbers)):
        places = _supported((found.high - found.low) / 2, found.value)
        while not found.within_noise and places < 6 and 0 in (round(x, places) for x in numbers):
            places += 1  # an interval that excludes 0 must not read as if it touched it
        value, low, high = (f"{round(x, places) + 0.0:+.{places}f}" for x in numbers)  # + 0.0: never -0.00
    else:
        value, low, high = (f"{x:+.3g}" for x in numbers)
    return f"{'≈ ' if found.within_noise else ''}{value} [{low}, {high}]{fewer}"


def _readable(value: float) -> bool:
    return value == 0 or 1e-5 <= abs(value) < 1e6


def _places_for(value: float, digits: int) -> int:
    """Decimal places that show so many significant digits."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 2


def _supported(spread: float, value: float) -> int:
    """Decimal places that a spread supports: the Particle Data Group's rule."""
    if not _readable(spread) or spread == 0:
        return _places_for(value, 3)
    return _places_for(spread, 2 if spread / 10 ** math.floor(math.log10(spread)) < 3.55 else 1)


def _word(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.facts[name] is None else one_line(row.facts[name])


def _number(name: str, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: number(None if row.facts[name] is None else row.facts[name] * scale)


def _optional(value: float | None, form: str) -> str:
    return _NONE if value is None else format(value, form)


def _share_of_full(row: Row) -> str:
    held, full = row.facts["kv_bytes"], row.facts["kv_bytes_full"]
    return f"{held / full:.2f}" if held is not None and full else _NONE


def _p_value(row: Row) -> str:
    return "<0.001" if row.mcnemar_p is not None and row.mcnemar_p < 0.001 else _optional(row.mcnemar_p, ".3f")


class _Column(NamedTuple):
    """A column of comparisons. rule: "keep", "drop" where it is empty, or "say" above the table where all rows agree."""

    header: str
    right: bool
    rule: str
    text: Callable[[Row], str]


def _columns(metric: str, base: str) -> list[_Column]:
    def failed(row: Row) -> bool:
        return row.facts["status"] != "ok"

    def value(row: Row) -> str:
        return "failed" if failed(row) else with_error(row.value, row.stderr)

    return [
        _Column("policy", False, "keep", _word("policy_label")),
        _Column("budget", False, "keep", _word("budget_label")),
        _Column("codec", False, "say", _word("codec")),
        _Column("sharing", False, "say", _word("share")),
        _Column("kept %", True, "drop", _number("kept_fraction", 100)),
        _Column("KV MB", True, "drop", _number("kv_bytes", 1e-6)),
        _Column("× full", True, "drop", _share_of_full),
        _Column("n", True, "say", lambda row: _optional(row.n, "d")),
        _Column(metric or "metric", True, "keep", value),
        _Column(f"Δ to {base} [95 %]", True, "keep", lambda row: difference(row.delta, row.n)),
        _Column("McNemar p", True, "drop", _p_value),
        _Column("Δ gold logp [95 %]", True, "drop", lambda row: difference(row.gold_logprob, row.n)),
        _Column("agree", True, "drop", lambda row: _optional(row.agreement, ".3f")),
        _Column("prefill s", True, "drop", _number("prefill_s")),
        _Column("decode tok/s", True, "drop", _number("decode_tokens_per_s")),
        _Column("policy ms", True, "drop", _number("policy_ms_per_step")),
        _Column("batch", True, "say", _word("batch_size")),
        _Column("query-aware", False, "say", lambda row: {True: "yes", False: "no"}.get(row.facts["query_aware"], "")),
        _Column("labels", False, "say", _word("labels")),
        _Column("note", False, "drop", lambda row: f"failed: {error_of(row.facts)}" if failed(row) else ""),
    ]


def comparison_sheet(item: Comparison) -> Sheet:
    """A comparison's rows as text, in its order; without columns that are empty or, said above it, the same in all rows."""
    about = [_metricone_line(item)]
    shown = []
    for found in _columns(item.metric, item.base):
        texts = [(found.text(row), row.facts["status"] == "ok") for row in item.rows]
        values = {text for text, ran in texts if ran or text not in _EMPTY}  # a failed run need not know everything
        if found.rule == "say" and len(values) == 1:
            about += [f"{found.header}: {value}" for value in values - {*_EMPTY, "no"}]
        elif found.rule == "keep" or values - {*_EMPTY}:
            shown.append(found)
    rows = [[found.text(row) for found in shown] for row in item.rows]
    notes = [NOISE] if any(cell.startswith("≈") for row in rows for cell in row) else []
    return Sheet(
        item.title,
        " · ".join(filter(None, about)),
        [found.header for found in shown],
        [found.right for found in shown],
        rows,
        notes + [f"Warning: {one_line(warning)}" for warning in item.warnings],
    )


def _breakdown_sheet(item: Breakdown) -> Sheet:
    counts = {n for _, _, found in item.rows for _, _, n in found.values()}
    samples = f"n: {' to '.join(map(str, sorted({min(counts), max(counts)})))} a place" if counts else ""
    rows = []
    for facts, keys, found in item.rows:
        policy = " + ".join(one_line(facts[name]) for name in ("policy_label", "codec", "share") if facts[name])
        values = [with_error(*found[value][:2]) if value in found else _NONE for value in item.columns]
        rows.append([policy, one_line(facts["budget_label"]), *map(str, keys), *values])
    header = ["policy", "budget", *item.by[:-1], *(f"{item.by[-1]}={value}" for value in item.columns)]
    right = [index >= 2 for index in range(len(header))]
    notes = [f"Warning: {one_line(warning)}" for warning in item.warnings]
    return Sheet(item.title, " · ".join(filter(None, [_metricone_line(item), samples])), header, right, rows, notes)


def _metricone_line(item: Comparison | Breakdown) -> str:
    return f"{item.metric}, {item.better} is better" if item.metric and item.better else item.metric


def _markdown(sheet: Sheet) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(_md(cell) for cell in cells) + " |"

    rule = "|" + "|".join("---:" if right else "---" for right in sheet.right) + "|"
    table = [line(sheet.header), rule, *map(line, sheet.rows)]
    parts = [
        f"### {_md(sheet.title)}" if sheet.title else "",
        _md(sheet.about),
        "\n".join(table),
        "\n".join(f"- {_md(note)}" for note in sheet.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _md(text: str) -> str:
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text.replace("|", "\\|"))  # what would be taken for a tag


def _text(sheet: Sheet) -> str:
    widths = [max(map(len, cells)) for cells in zip(sheet.header, *sheet.rows, strict=True)]

    def line(cells: Iterable[str]) -> str:
        sized = zip(cells, widths, sheet.right, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in sized).rstrip()

    rule = "  ".join("-" * min(width, 40) for width in widths)
    return "\n".join(
        filter(None, [sheet.title, sheet.about, "", line(sheet.header), rule, *map(line, sheet.rows), *sheet.notes])
    )


def _latex(sheet: Sheet) -> str:
    def line(cells: Iterable[str]) -> str:
        text = " & ".join(map(_tex, cells))
        return ("{}" if text.startswith(("[", "*")) else "") + text + r" \\"  # after \\ they would be an option of it

    columns = "".join("r" if right else "l" for right in sheet.right)
    table = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(sheet.header), r"\midrule", *map(line, sheet.rows)]
    above = [rf"\noindent {_tex(text)}\par" for text in (sheet.title, sheet.about) if text]
    below = [rf"\noindent {_tex(note)}\par" for note in sheet.notes]
    return "\n".join([*above, *table, r"\bottomrule", r"\end{tabular}\par", *below])


def _tex(text: str) -> str:
    """Escaped for LaTeX text; signed numbers in math, where - is a minus."""
    escaped = "".join(_LATEX.get(char, char) for char in text)
    return re.sub(r"(?<![\w.}$-])([+-]\d+(?:\.\d+)?)(?![\w-])", r"$\1$", escaped)


def _records(item: Comparison | Breakdown) -> list[dict[str, Any]]:
    """Raw numbers of every row, for CSV."""
    about = {"comparison": item.title, "metric": item.metric, "better": item.better}
    warnings = {"warnings": "; ".join(map(one_line, item.warnings))}
    if isinstance(item, Breakdown):
        return [
            {**about, **facts, **{f"field.{k}": v for k, v in zip(item.by, (*keys, last), strict=True)}}
            | dict(zip(("value", "stderr", "n"), numbers, strict=True))
            | warnings
            for facts, keys, found in item.rows
            for last, numbers in found.items()
        ]
    rows = []
    for row in item.rows:
        found: dict[str, Any] = {"value": row.value, "stderr": row.stderr, "n": row.n}
        for name, delta in (("delta", row.delta), ("gold_logprob_delta", row.gold_logprob)):
            found |= dict(zip((name, f"{name}_low", f"{name}_high", f"{name}_n"), delta or [None] * 4, strict=True))
            found[f"{name}_within_noise"] = delta and delta.within_noise
        rows.append({**about, **row.facts, **found, "mcnemar_p": row.mcnemar_p, "agreement": row.agreement, **warnings})
    return rows


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV, a column for every name that occurs; without a newline at the end."""
    names = list(dict.fromkeys(chain.from_iterable(records)))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().rstrip("\n")
