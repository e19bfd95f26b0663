"""Reproductions and the list of tables as Markdown, CSV, LaTeX and text, by the writers of `kvlab table`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.render import NOISE, Sheet, csv_text, difference, number, sheets_text, with_error
from kvlab.reproduce.join import Beside, Reproduction
from kvlab.reproduce.measures import interval_name
from kvlab.reproduce.published import PaperTable
from kvlab.tables import one_line

MEANS = {
    "values": "the paper's model, data and measure: values compare",
    "changes": "another model or data, the paper's measure: changes against the full cache compare",
    "order": "another measure: only the order of methods compares",
}
UNTOLD = "order: ≈ where the paper's numbers differ by no more than {tie:g}, or where our {spread} contains 0"


def render_reproduction(found: Reproduction, fmt: str) -> str:
    """Ours beside theirs, and the order of methods: "text", "md" or "latex"; "csv" is one table with raw numbers."""
    if fmt == "csv":
        return csv_text(records(found))
    return sheets_text([_numbers(found), _orders(found)], fmt)


def records(found: Reproduction) -> list[dict[str, Any]]:
    """A row for each number, with the verdict on its order."""
    orders = {(order.model, order.task): order for order in found.orders}
    return [_record(found, row, orders[row.planned.key[:2]]) for row in found.rows]


def index(tables: Sequence[PaperTable], fmt: str, kept: Mapping[str, str]) -> str:
    """All tables, with what they cost; "text" begins each line with the name.

    kept  of tables that `--save` has written here, by name: what came out
    """
    if fmt == "text":
        width = max((len(table.name) for table in tables), default=0)
        return "\n".join(f"{table.name:<{width}}  {table.title}" for table in tables)
    rows = [
        {
            "table": table.name,
            "what": table.title,
            "numbers": str(table.numbers),
            **{f"scale={scale.name}": scale.cost for scale in sorted(table.scales, key=lambda one: one.name)},
            "pairs in the published order": kept.get(table.name, "not run"),
        }
        for table in tables
    ]
    if fmt == "csv":
        return csv_text(rows)
    header = list(dict.fromkeys(name for row in rows for name in row))
    right = [name == "numbers" for name in header]
    return sheets_text([Sheet("", "", header, right, [[row.get(name, "–") for name in header] for row in rows], [])], fmt)


def _numbers(found: Reproduction) -> Sheet:
    """Every number, ours and theirs."""
    measured = {row.metric for row in found.rows if row.metric}
    counts = {row.n for row in found.rows if row.n is not None}
    ours = ", ".join(sorted({str(row.planned.config.model.name) for row in found.rows}))
    about = [
        f"scale={found.scale.name}: {MEANS[found.scale.compares]}",
        f"ours: {ours}",
        *(measured if len(measured) == 1 else ()),
    ]
    if len(counts) == 1:
        about.append(f"n: {counts.pop()}")
    spread = interval_name(row.metric for row in found.rows)
    header = ["model", "task", "method", "budget", "published", "ours", "Δ published", f"Δ ours [{spread}]", "deviation"]
    rows = [
        [
            *row.planned.key,
            row.published.budget if row.published else "",
            number(row.published.value if row.published else None, 4),
            "–" if row.value is None else with_error(row.value, row.stderr),
            "–" if row.their_change is None else f"{row.their_change:+.4g}",
            difference(row.change),
            row.words,
        ]
        for row in found.rows
    ]
    notes = [NOISE.replace("95 %", spread)] if any(row[7].startswith("≈") for row in rows) else []
    notes += [f"differs: {one_line(found.scale.differs)}"]
    notes += [f"published: {source}" for source in dict.fromkeys(row.source for row in found.table.used(found.scale))]
    notes += [f"Warning: {one_line(warning)}" for warning in found.warnings]
    return Sheet(found.table.title, " · ".join(about), header, [4 <= place < 8 for place in range(9)], rows, notes)


def _orders(found: Reproduction) -> Sheet:
    """For each model and task, whether methods stand in the same order."""
    spread = interval_name(row.metric for row in found.rows)
    note = UNTOLD.format(tie=found.table.tie, spread="paired 95 % interval" if spread == "95 %" else f"interval ({spread})")
    header = ["model", "task", "published order", "our order", "pairs", "agree", "reversed", "tau", "order"]
    rows = [
        [
            *(order.model, order.task, order.theirs or "–", order.ours or "–"),
            *map(str, (order.pairs, order.agree, order.reversed)),
            "–" if order.tau is None else f"{order.tau:+.2f}",
            order.verdict,
        ]
        for order in found.orders
    ]
    right = [4 <= place < 8 for place in range(9)]
    return Sheet("Does the order of methods agree?", "", header, right, rows, [note])


def _record(found: Reproduction, row: Beside, order: Any) -> dict[str, Any]:
    change = row.change
    return {
        "table": found.table.name,
        "scale": found.scale.name,
        "compares": found.scale.compares,
        **dict(zip(("model", "task", "method"), row.planned.key, strict=True)),
        "budget": row.published.budget if row.published else None,
        "published": row.published.value if row.published else None,
        "published_change": row.their_change,
        "our_model": str(row.planned.config.model.name),
        "metric": row.metric,
        "ours": row.value,
        "stderr": row.stderr,
        "n": row.n,
        **dict(zip(("change", "change_low", "change_high", "change_n"), change or [None] * 4, strict=True)),
        "change_within_noise": change and change.within_noise,
        "deviation": row.words,
        "order": order.verdict,
        "pairs": order.pairs,
        "agree": order.agree,
        "reversed": order.reversed,
        "tau": order.tau,
        "source": row.published.source if row.published else None,
        "path": row.path,
        "warnings": "; ".join(map(one_line, found.warnings)),
    }
