"""Which samples of a cell came out otherwise than with the full cache, and what the page shows of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvlab.tables import Samples

CUT = (1200, 800)
"""Characters that are shown of a long text's start and end."""
Record = Mapping[str, Any]


def changed(metric: Record, base: Samples, ours: Samples) -> list[str]:
    """Ids of samples that both have and that differ, those first that lost most by the metric, then by the gold answer.

    Another output or another choice is a change; where nothing is chosen or generated, another value is.
    """
    sign = -1 if metric.get("better") == "lower" else 1

    def gain(name: str) -> tuple[float, float]:
        value, gold = (_gain(read(ours[name]), read(base[name])) for read in (lambda one: value_of(metric, one), _gold))
        return sign * value, gold

    names = [name for name in base if name in ours and _differs(metric, base[name], ours[name])]
    return sorted(names, key=gain)


def value_of(metric: Record, record: Record) -> float | None:
    """The sample's part in a metric: its value, for each unit of weight where the metric has weights."""
    values = record.get("values") or {}
    value = values.get(metric.get("of"))
    weight = values.get(metric["weight"]) if metric.get("weight") else 1
    return None if value is None or not weight else value / weight


def about_sample(metric: Record, record: Record, cut: bool) -> dict[str, Any]:
    """What the page shows of a record: value, gold_logprob, and where there is such, output or choice."""
    found: dict[str, Any] = {"value": value_of(metric, record), "gold_logprob": _gold(record)}
    if "output" in record:
        found["output"] = shortened(record["output"]) if cut else record["output"]
    if "choice" in record:
        found["choice"] = record["choice"]
    return {name: value for name, value in found.items() if value is not None}


def about_question(record: Record, prompt: Record, cut: bool) -> dict[str, Any]:
    """What was asked and what is right: a record's answers and fields, a prompt's texts."""
    shown = {name: record[name] for name in ("answers", "fields") if record.get(name)}
    for name in ("prompt", "question", "gold", "choices", "right"):
        if name in prompt:
            shown[name] = _each(prompt[name], shortened) if cut else prompt[name]
    if prompt.get("others"):
        shown["others"] = len(prompt["others"]) if cut else prompt["others"]
    return shown


def shortened(text: str) -> str:
    """A text without its middle, where that is long."""
    left_out = len(text) - sum(CUT)
    if left_out <= 100:
        return text
    return f"{text[: CUT[0]]}\n[… {left_out:,} characters left out …]\n{text[-CUT[1] :]}"


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    return [change(one) for one in value] if isinstance(value, list) else value


def _differs(metric: Record, base: Record, ours: Record) -> bool:
    for name in ("output", "choice"):
        if name in base and name in ours:
            return bool(base[name] != ours[name])
    return value_of(metric, base) != value_of(metric, ours)


def _gold(record: Record) -> float | None:
    return (record.get("values") or {}).get("gold_logprob")


def _gain(ours: float | None, base: float | None) -> float:
    return 0.0 if ours is None or base is None else ours - base


def by_id(records: Iterable[Record]) -> dict[str, Record]:
    """Records by their ids."""
    return {record["id"]: record for record in records}
