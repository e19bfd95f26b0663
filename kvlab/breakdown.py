"""A comparison's metric by fields of its samples, such as depth and length: the grid of a retrieval task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvlab.hints import did_you_mean
from kvlab.metrics import make_metric
from kvlab.tables import Samples, StoredCell, Where, better_of, error_of, having, main_metric, read_groups, samples_of


@dataclass(frozen=True)
class Breakdown:
    """A comparison's metric by sample fields: the last field's values are `columns`, the other fields' belong to the rows.

    rows  (facts of the cell, values of the fields but the last, {value of the last field: (value, stderr, n)})
    """

    title: str
    metric: str
    better: str
    by: Sequence[str]
    columns: Sequence[Any]
    rows: Sequence[tuple[Mapping[str, Any], tuple[Any, ...], Mapping[Any, tuple[float, float | None, int]]]]
    warnings: list[str] = field(default_factory=list)


def breakdown(where: Where, by: str | Sequence[str]) -> list[Breakdown]:
    """The main metric by sample fields, such as `["depth", "length"]`, for each comparison and cell.

    Raises ValueError if there are no results, or if no sample has such a field.
    """
    by = [by] if isinstance(by, str) else list(by)
    if not by:
        raise ValueError("breakdown by no fields: give at least one, such as 'length'")
    groups, titles, skipped = read_groups(where)
    known: set[str] = set()
    found = [_break_down(titles[key], cells, by, known) for key, cells in groups.items()]
    for name in by:
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise ValueError(f"samples have no field {name!r}{did_you_mean(name, known)}; there are: {there}")
    found = [item for item in found if item.rows] or found  # a comparison whose samples lack the fields has no grid
    found[-1].warnings.extend(skipped)
    return found


def _break_down(title: str, cells: Sequence[StoredCell], by: Sequence[str], known: set[str]) -> Breakdown:
    """Metric over the samples of each combination of field values; adds the fields there are to `known`."""
    name, warnings = main_metric(cells), [f"{c.about}: failed: {error_of(c.facts)}" for c in cells if not c.ok]
    rows: list[Any] = []
    for cell in (cell for cell in cells if cell.ok):
        samples = having(cell.metric(name), samples_of(cell, warnings))
        known.update(chain.from_iterable(sample.get("fields") or {} for sample in samples.values()))
        try:
            places = _places(cell.metric(name), samples, by)
        except ValueError as error:
            warnings.append(f"{cell.about}: {error}")
            continue
        rows += [(cell.facts, keys, found) for keys, found in places.items()]
        placed = sum(n for found in places.values() for _, _, n in found.values())
        if placed < len(samples):
            warnings.append(f"{cell.about}: {len(samples) - placed} samples without {' or '.join(by)} are left out")
    columns = sorted({value for _, _, found in rows for value in found}, key=_field_order)
    return Breakdown(title, name, better_of(cells, name), by, columns, rows, warnings)


def _places(metric: Mapping[str, Any], samples: Samples, by: Sequence[str]) -> dict[tuple[Any, ...], dict[Any, Any]]:
    """{values of the fields but the last: {value of the last: (value, stderr, n)}}, of samples that have all the fields."""
    if not metric:
        raise ValueError("the run wrote no main metric")
    places: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for sample in samples.values():
        values = [(sample.get("fields") or {}).get(key) for key in by]
        if None not in values:
            place = tuple(value if isinstance(value, str | int | float) else json.dumps(value) for value in values)
            places.setdefault(place, []).append(sample)
    rows: dict[tuple[Any, ...], dict[Any, Any]] = {}
    for place in sorted(places, key=lambda place: [_field_order(value) for value in place]):
        found = make_metric(places[place], metric["of"], metric["kind"], metric["better"], metric.get("weight"))
        rows.setdefault(place[:-1], {})[place[-1]] = found.value, found.stderr, found.n
    return rows


def _field_order(value: Any) -> tuple[bool, Any]:
    return isinstance(value, str), value
