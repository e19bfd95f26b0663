"""Stored results of the task `helm` as HELM shows them: scenarios against policies, and the mean win rate of each policy.

Reads results through `kvlab.tables`, and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlab.hints import did_you_mean
from kvlab.metrics import column, paired_difference
from kvlab.settings import SettingError
from kvlab.tables import Samples, StoredCell, main_metric, read_groups, samples_of

OPTIONS = ("metric",)
"""What the report may be told: metric: another one than each scenario's main one, such as gold_logprob."""
SIDES = {"accuracy": "", "robustness": "{}/robustness", "calibration": "ece_10_bin"}
"""HELM's groups of metrics: the main one, its worst case over perturbations, its calibration error."""


@dataclass(frozen=True)
class Entry:
    """A metric of a policy: its value and 95 % interval (bootstrap over samples; None below two)."""

    value: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        return f"{self.value:.3f}" + (f" [{self.interval[0]:.3f}, {self.interval[1]:.3f}]" if self.interval else "")


@dataclass(frozen=True)
class Line:
    """A metric of a scenario for every policy that has it."""

    scenario: str
    metric: str
    better: str
    entries: Mapping[str, Entry]


def mean_win_rates(lines: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
    """For each policy the share of other policies that it beats, ties counting half, as a mean over scenarios.

    lines  for each scenario "higher" or "lower", whichever is better, and the policies' values
    Scenarios with fewer than two values are left out, and policies that have no value in any other.
    """
    rates: dict[str, list[float]] = {}
    for better, values in lines:
        if len(values) < 2:
            continue
        for policy, value in values.items():
            others = [other for name, other in values.items() if name != policy]
            beaten = sum(value < other if better == "lower" else value > other for other in others)
            ties = sum(value == other for other in others)
            rates.setdefault(policy, []).append((beaten + ties / 2) / len(others))
    return {policy: sum(each) / len(each) for policy, each in rates.items()}


def helm_report(paths: Sequence[str], options: Mapping[str, str] | None = None) -> str:
    """A table for each model and protocol, in plain text: scenarios with their metrics, policies side by side, win rates.

    paths  folders or globs with results, such as outputs/helm_xsum
    Raises ValueError where there are no results of the task `helm`, and for an option that there isn't.
    """
    for option in options or {}:
        if option not in OPTIONS:
            raise SettingError(f"kvlab score helm has no option {option!r}{did_you_mean(option, OPTIONS)}; it has: metric")
    wanted = (options or {}).get("metric")
    groups, titles, skipped = read_groups([*paths] or ["outputs"])
    done = {key: mine for key, cells in groups.items() if (mine := [cell for cell in cells if cell.ok and _is_helm(cell)])}
    if not done:
        places = ", ".join(paths) or "outputs"
        raise SettingError(f"no finished results of task=helm in {places}: run some, or name their folder")
    labels = _labels(done, titles)
    tables: dict[tuple[str, str], list[Line]] = {}
    for key, cells in done.items():
        place = str(cells[0].facts["model"]), str(cells[0].facts["protocol"])
        tables.setdefault(place, []).extend(_lines(labels[key], cells, wanted, skipped))
    if wanted and not any(line.metric == wanted for lines in tables.values() for line in lines):
        known = sorted({name for cells in done.values() for cell in cells for name in cell.result["metrics"]})
        raise SettingError(
            f"-o metric={wanted}: no scenario has it{did_you_mean(wanted, known)}; there are: {', '.join(known)}"
        )
    warnings = [f"Warning: {line}" for line in skipped]
    return "\n\n".join([*(_table(*place, lines) for place, lines in sorted(tables.items())), *warnings])


def _is_helm(cell: StoredCell) -> bool:
    return ((cell.result.get("config") or {}).get("task") or {}).get("name") == "helm"


def _labels(groups: Mapping[str, Sequence[StoredCell]], titles: Mapping[str, str]) -> dict[str, str]:
    """What each comparison is called in its table: its scenario, and what tells it from others of the same scenario."""
    places = {key: tuple(str(cells[0].facts[name]) for name in ("model", "task", "protocol")) for key, cells in groups.items()}
    found = {}
    for key, place in places.items():
        others = [part for part in titles[key].split(" · ") if part not in place]
        twice = list(places.values()).count(place) > 1
        found[key] = ", ".join([place[1].removeprefix("helm-"), *(others if twice else [])])
    return found


def _lines(label: str, cells: Sequence[StoredCell], wanted: str | None, warnings: list[str]) -> list[Line]:
    """The metrics of one comparison, whose cells have the same samples."""
    main = wanted or main_metric(cells)
    samples = {cell.path: samples_of(cell, warnings) for cell in cells}
    found = []
    for name in dict.fromkeys(form.format(main) or main for form in SIDES.values()):
        entries = {_column(cell): _entry(cell, name, samples[cell.path]) for cell in cells if cell.metric(name)}
        if entries:
            better = next(str(cell.metric(name)["better"]) for cell in cells if cell.metric(name))
            number = next(cell.metric(name)["n"] for cell in cells if cell.metric(name))
            found.append(Line(f"{label} (n = {number})", name, better, entries))
    return found


def _column(cell: StoredCell) -> str:
    return cell.policy if cell.is_full else cell.about


def _entry(cell: StoredCell, name: str, samples: Samples) -> Entry:
    """Of the samples that have the metric: with perturbations not all of them have each."""
    there = [sample for sample in samples.values() if name in sample["values"]]
    values = column(there, name)
    if len(values) < 2:
        return Entry(float(cell.metric(name)["value"]), None)
    found = paired_difference("mean", values, [0.0] * len(values))  # from nothing: the mean itself
    assert found.low is not None and found.high is not None
    return Entry(found.value, (found.low, found.high))


def _table(model: str, protocol: str, lines: Sequence[Line]) -> str:
    """Aligned columns, policies in order of first appearance; below them the mean win rates of each group of metrics."""
    policies = list(dict.fromkeys(policy for line in lines for policy in line.entries))
    rows = [["scenario", "metric", *policies]]
    rows += [
        [line.scenario, line.metric, *(str(line.entries[policy]) if policy in line.entries else "–" for policy in policies)]
        for line in lines
    ]
    for group in SIDES:
        mine = [line for line in lines if _group(line.metric) == group]
        rates = mean_win_rates([(line.better, {name: entry.value for name, entry in line.entries.items()}) for line in mine])
        if rates:
            rows.append(["mean win rate", group, *(f"{rates[policy]:.3f}" if policy in rates else "–" for policy in policies)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    drawn = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([f"{model} · {protocol} · values with 95 % bootstrap intervals", drawn[0], rule, *drawn[1:]])


def _group(metric: str) -> str:
    return "robustness" if metric.endswith("/robustness") else "calibration" if metric == SIDES["calibration"] else "accuracy"
