"""Results on disk to comparisons: which cells may be compared, and what each policy changed against the full cache.

Reads `result.json` and `samples.jsonl` of every cell (a folder) and nothing else. `kvlab.render` prints what this returns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from kvlab.hints import did_you_mean
from kvlab.metrics import Difference, at_chance, compare_records
from kvlab.paths import BENCHMARK_FILES, conf_dir
from kvlab.results import SCHEMA, read_records

if TYPE_CHECKING:
    import pandas as pd

Where = str | Path | Sequence[str | Path]
"""A folder or glob with results, or several."""
Samples = dict[str, dict[str, Any]]
"""Sample records by id."""

FEW = 10
"""Below so many samples a bootstrap's interval says too much."""
UNITS = ("ratio", "tokens", "bytes")
MEMORY = ("kept_fraction", "kv_bytes", "kv_bytes_peak", "kv_bytes_full", "state_bytes")
SPEED = ("prefill_s", "prefill_tokens_per_s", "decode_tokens_per_s", "policy_ms_per_step", "batch_size")
NAMES = ("name", "model", "task", "protocol", "policy", "policy_label", "budget_label")
METRIC = ("metric", "value", "stderr", "n")
COLUMNS = (
    *(*NAMES, *UNITS, "codec", "share", "query_aware", "labels", "status", "error"),
    *(*METRIC, *MEMORY, *SPEED, "run_id", "comparison_id", "path"),
)
"""Columns of `load_results`."""
_OWN_KEYS = {"name", "output_dir", "policy", "budget", "codec", "share", "logger", "launcher", "experiment", "debug"}
"""Config keys that don't tell comparisons apart: cells of one differ in them, or they don't bear on results."""


@dataclass(frozen=True)
class StoredCell:
    """One run on disk: its folder, what `result.json` says, and that in flat columns (`facts`: COLUMNS without METRIC)."""

    path: Path
    result: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Whether the run came to its end."""
        return self.facts["status"] == "ok"

    @property
    def is_full(self) -> bool:
        """Whether nothing was evicted, coded or shared: what other cells are compared with."""
        return self.facts["policy"] == "full" and not self.facts["codec"] and not self.facts["share"]

    @property
    def policy(self) -> str:
        """Policy with its settings, codecs and sharing."""
        return " + ".join(str(self.facts[name]) for name in ("policy_label", "codec", "share") if self.facts[name])

    @property
    def about(self) -> str:
        """Policy and budget, for messages."""
        return ", ".join(str(part) for part in (self.policy, self.facts["budget_label"]) if part)

    def metric(self, name: str) -> Mapping[str, Any]:
        """A metric as the run wrote it, or nothing."""
        return (self.result.get("metrics") or {}).get(name) or {}

    def order(self) -> tuple[Any, ...]:
        """Full first, then by policy, then from large budgets to small: never by how well a row does."""
        sizes = [-(self.facts[unit] or 0) for unit in UNITS]
        return not (self.is_full and self.ok), self.facts["policy"] != "full", self.policy, *sizes, str(self.path)


@dataclass(frozen=True)
class Row:
    """One cell of a comparison; what is not known, or does not apply, is None.

    facts             the cell's columns (COLUMNS without METRIC)
    value, stderr, n  of the comparison's metric, over all samples of the cell
    delta             that metric minus the full cache's, over the samples both have
    mcnemar_p         exact p of the same difference, if all values are 0 or 1
    gold_logprob      mean log-probability per gold token minus the full cache's
    agreement         mean share of positions with the same token as with the full cache
    """

    facts: Mapping[str, Any]
    value: float | None = None
    stderr: float | None = None
    n: int | None = None
    delta: Difference | None = None
    mcnemar_p: float | None = None
    gold_logprob: Difference | None = None
    agreement: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Cells that differ in policy, budget, codec or sharing only.

    baseline  the row that others are compared with, None where there is none: the full cache's unless `base` names another
              policy; where that has several budgets the first, though each row is compared with the one of its own budget
    """

    comparison_id: str
    title: str
    metric: str
    better: str
    rows: Sequence[Row]
    baseline: Row | None
    warnings: list[str] = field(default_factory=list)
    base: str = "full"


def places_of(where: Where) -> list[Path]:
    """The folders and globs that were given."""
    return [Path(place) for place in ([where] if isinstance(where, str | Path) else where)]


def matching(place: Path) -> list[Path]:
    """What a path is, or a glob leads to."""
    anchor = Path(place.anchor)
    return [place] if place.exists() else list(anchor.glob(str(place.relative_to(anchor))))


def find_cells(where: Where) -> list[Path]:
    """Folders with a `result.json` at or below the given folders and globs, sorted, each once.

    Raises ValueError for a folder or glob that leads to none.
    """
    cells: dict[Path, Path] = {}
    for place in places_of(where):
        files = [file for start in matching(place) for file in ([start] if start.is_file() else start.rglob("result.json"))]
        files = [file for file in files if not (file.parent / BENCHMARK_FILES).exists()]
        here = {file.parent.resolve(): file.parent for file in files if file.name == "result.json"}
        if not here:
            raise ValueError(f"no results in {place}: run `kvlab run ...` first, or name the folder it wrote to")
        cells = here | cells
    return sorted(cells.values())


def read_cell(path: Path) -> StoredCell:
    """The cell of a folder. Raises ValueError, KeyError, TypeError or AttributeError for a result that can't be used."""
    result = json.loads((path / "result.json").read_bytes())
    if result["schema"] != SCHEMA:
        raise ValueError(f"schema {result['schema']}, not {SCHEMA}")
    return StoredCell(path, result, _facts(path, result))


def read_cells(where: Where, read: Callable[[Path], StoredCell] = read_cell) -> tuple[list[StoredCell], list[str]]:
    """All readable cells, and a line for each that is left out (broken, or of another version).

    read  reads one as `read_cell` does, or knows it
    Raises ValueError if none is readable.
    """
    cells, skipped = [], []
    for path in find_cells(where):
        try:
            cells.append(read(path))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            lacks = f"lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            skipped.append(f"{path / 'result.json'} is left out ({lacks}): delete it and run this cell again")
    if not cells:
        raise ValueError(f"no readable results: {skipped[0]}")
    return cells, skipped


def load_results(where: Where = "outputs") -> pd.DataFrame:
    """One row for each cell and metric (COLUMNS); a failed cell has one row without a metric.

    Results that can't be read are left out and named in `frame.attrs["warnings"]`. Raises ValueError if there are none.
    """
    import pandas as pd

    cells, skipped = read_cells(where)
    rows: list[dict[str, Any]] = []
    for cell in cells:
        metrics = cell.result.get("metrics") or {} if cell.ok else {}
        found = [{"metric": name, **{key: values.get(key) for key in METRIC[1:]}} for name, values in metrics.items()]
        rows += [{**cell.facts, **metric} for metric in found or [{}]]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    for name in (*UNITS, *METRIC[1:], *MEMORY, *SPEED):
        frame[name] = pd.to_numeric(frame[name])
    frame.attrs["warnings"] = skipped
    return frame


def compare(
    where: Where, references: Mapping[str, tuple[float, float]] | None = None, base: str | None = None
) -> list[Comparison]:
    """One comparison for each comparison_id: every cell against the full cache, paired on sample ids.

    references  comparison_id to (value, tolerance): what the full cache should score on the main metric
    base        a policy, as tables call it (with its settings), to compare with instead; where it has several budgets, each
                cell is compared with its cell of the same budget
    Raises ValueError if there are no results. Anything that makes a table doubtful is in its `warnings`; results that can't be
    read are named in those of the last comparison.
    """
    groups, titles, skipped = read_groups(where)
    if base is not None and base not in (known := {cell.policy: None for cells in groups.values() for cell in cells}):
        raise ValueError(f"--base {base!r}: no cell has this policy{did_you_mean(base, known)}; there are: {', '.join(known)}")
    found = [_compare(key, titles[key], cells, (references or {}).get(key), base) for key, cells in groups.items()]
    found[-1].warnings.extend(skipped)
    return found


def stored_references() -> dict[str, tuple[float, float]]:
    """What full caches scored where kvlab was checked (conf/references.yaml): comparison_id to (value, tolerance)."""
    known = yaml.safe_load((conf_dir() / "references.yaml").read_text())
    return {key: (entry["value"], entry["tolerance"]) for key, entry in (known or {}).items()}


def _facts(path: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """What a result says, in flat columns. KeyError for what every result must have."""
    budget, memory, speed = (result.get(part) or {} for part in ("budget", "memory", "speed"))
    return {
        **{name: result.get(name) for name in NAMES},
        "policy": result["policy"],
        "policy_label": result.get("policy_label") or result["policy"],
        **{unit: budget.get(unit) for unit in UNITS},
        "codec": "+".join(str(codec) for codec in result.get("codec") or []),
        "share": None if not result.get("share") else str(result["share"]),
        "query_aware": result.get("query_aware"),
        "labels": ", ".join(str(label) for label in result.get("labels") or []),
        "status": result["status"],
        "error": result.get("error"),
        **{name: memory.get(name) for name in MEMORY},
        **{name: speed.get(name) for name in SPEED},
        "run_id": result.get("run_id"),
        "comparison_id": result["comparison_id"],
        "path": str(path),
    }


def read_groups(
    where: Where, read: Callable[[Path], StoredCell] = read_cell
) -> tuple[dict[str, list[StoredCell]], dict[str, str], list[str]]:
    """Cells by comparison_id, in the rows' order; titles; what could not be read. read: as for `read_cells`."""
    cells, skipped = read_cells(where, read)
    groups: dict[str, list[StoredCell]] = {}
    for cell in cells:
        groups.setdefault(cell.facts["comparison_id"], []).append(cell)
    groups = {key: sorted(group, key=StoredCell.order) for key, group in groups.items()}
    return groups, _titles(groups), skipped


def _titles(groups: Mapping[str, Sequence[StoredCell]]) -> dict[str, str]:
    """A title for each comparison; those that would be equal also say in which settings they differ."""
    titles = {}
    for key, cells in groups.items():
        names = ", ".join(dict.fromkeys(str(cell.facts["name"]) for cell in cells if cell.facts["name"]))
        titles[key] = " · ".join(str(part) for part in (names, *(cells[0].facts[n] for n in NAMES[1:4])) if part)
    for title in set(titles.values()):
        same = [key for key in titles if titles[key] == title]
        if len(same) > 1:
            settings = {key: _settings(groups[key]) for key in same}
            every = sorted({name for each in settings.values() for name in each})
            differ = [name for name in every if len({settings[key].get(name) for key in same}) > 1]
            for key in same:
                titles[key] = " · ".join([title, *(f"{name}={settings[key].get(name, 'null')}" for name in differ)])
    twice = [key for key in titles if list(titles.values()).count(titles[key]) > 1]
    return {key: f"{title} · {key[:8]}" if key in twice else title for key, title in titles.items()}


def _settings(cells: Sequence[StoredCell]) -> dict[str, str]:
    """Dotted config keys that all cells of a comparison have in common, without those that cells are there to vary."""
    flat = [dict(_flatten(cell.result.get("config") or {})) for cell in cells]
    return {name: value for name, value in flat[0].items() if all(other.get(name) == value for other in flat)}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in config.items():
        if not prefix and name in _OWN_KEYS:
            continue
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def samples_of(cell: StoredCell, warnings: list[str]) -> Samples:
    """Samples by id; of those with the same id the last one. What is wrong with the file becomes a warning."""
    file = cell.path / "samples.jsonl"
    if not file.is_file():
        warnings.append(f"{file} is missing: run this cell again")
    records, broken = read_records(file)
    if broken:
        lines = "1 line is" if broken == 1 else f"{broken} lines are"
        warnings.append(f"{file}: {lines} no sample (an interrupted write?) and left out")
    return {record["id"]: record for record in records}


def _compare(
    key: str, title: str, cells: Sequence[StoredCell], reference: tuple[float, float] | None, base_policy: str | None
) -> Comparison:
    policy = base_policy or "full"
    bases = [cell for cell in cells if cell.ok and (cell.is_full if policy == "full" else cell.policy == policy)]
    if policy == "full":  # without a budget; more than one is warned of
        bases = bases[:1]
    metric = main_metric(cells)
    warnings: list[str] = []
    samples = [samples_of(base, warnings) for base in bases]
    rows, alone = [], []
    for cell in cells:
        place = _base_place(cell, bases)
        if place is None and bases and cell.ok:
            alone.append(cell.about)
        paired = place is not None and bases[place] is not cell
        against = "the full cache" if policy == "full" else policy
        rows.append(_row(cell, metric, samples[place] if paired and place is not None else {}, against, warnings))
    if len(bases) > 1:
        without = f"; there is none for: {'; '.join(alone)}" if alone else ""
        warnings.append(f"{policy} has {len(bases)} budgets, so differences are to its cell of the same budget{without}")
    baseline = rows[cells.index(bases[0])] if bases else None
    comparison = Comparison(key, title, metric, better_of(cells, metric), rows, baseline, warnings, policy)
    warnings += _doubts(comparison, cells, reference)
    return comparison


def _base_place(cell: StoredCell, bases: Sequence[StoredCell]) -> int | None:
    """Which of the cells to compare with: the only one, or that of the same budget, if there is one."""
    if len(bases) == 1:
        return 0
    budget = cell.facts["budget_label"]
    return next((place for place, base in enumerate(bases) if base.facts["budget_label"] == budget), None)


def main_metric(cells: Sequence[StoredCell]) -> str:
    """The metric that a comparison is about, or nothing if no cell says."""
    return next((str(cell.result["main_metric"]) for cell in cells if cell.ok and cell.result.get("main_metric")), "")


def better_of(cells: Sequence[StoredCell], metric: str) -> str:
    """Whether "higher" or "lower" is better, or nothing if no cell says."""
    return next((str(cell.metric(metric)["better"]) for cell in cells if cell.metric(metric).get("better")), "")


def _row(cell: StoredCell, name: str, base: Samples, against: str, warnings: list[str]) -> Row:
    """A cell's own numbers, and its differences from the samples `base`, if there are any, which messages call `against`."""
    if not cell.ok:
        return Row(cell.facts)
    metric = cell.metric(name)
    own: dict[str, Any] = {key: metric.get(key) for key in METRIC[1:]}
    if not (base and metric):
        return Row(cell.facts, **own)
    base, samples = (having(metric, side) for side in (base, samples_of(cell, warnings)))
    ids = [key for key in base if key in samples]
    if len(ids) < max(len(base), len(samples)):
        counts = f"{len(samples)} here, {len(base)} with {against}"
        warnings.append(f"{cell.about}: compared on the {len(ids)} samples in common ({counts})")
    try:
        return Row(cell.facts, **own, **compare_records(metric, [samples[key] for key in ids], [base[key] for key in ids]))
    except ValueError as error:
        warnings.append(f"{cell.about}: no difference from {against}: {error}")
        return Row(cell.facts, **own)


def having(metric: Mapping[str, Any], samples: Samples) -> Samples:
    """Samples that a metric is about: some are about a part of them, and else a broken record is not to pass unseen."""
    return {key: one for key, one in samples.items() if metric["of"] in one["values"]} if metric.get("some") else samples


def _doubts(comparison: Comparison, cells: Sequence[StoredCell], reference: tuple[float, float] | None) -> list[str]:
    """What a reader must know before believing any difference."""
    doubts = []
    simulated = [cell.about for cell in cells if "simulated" in cell.facts["labels"]]
    if simulated:
        doubts.append(f"simulated, so bytes and speed are not those of a real implementation: {'; '.join(simulated)}")
    bad = next((left for cell in cells if (left := cell.result.get("left_out") or {}).get("rows")), None)
    if bad:
        rows = "1 row was" if bad["rows"] == 1 else f"{bad['rows']} rows were"
        doubts.append(f"{rows} left out, as bad data or longer than the context; the first: {bad['why'][0]}")
    doubts += dict.fromkeys(note for cell in cells for note in cell.result.get("notes") or [])
    full = comparison.baseline
    if full is None and comparison.base != "full":
        return [*doubts, f"there is no cell of {comparison.base} to compare with"]
    if full is None:
        failed = any(cell.is_full for cell in cells)
        why = "the full cache failed" if failed else "there is no full cache to compare with"
        return [*doubts, f"{why}: run policy=full with the same settings"]
    if (full.n or 0) < FEW and len(comparison.rows) > 1:
        doubts.append(f"{full.n} samples: intervals of fewer than {FEW} are too narrow to be believed")
    metric = next((cell.metric(comparison.metric) for cell in cells if cell.ok and cell.is_full), {})
    if at_chance(metric):
        doubts.append("full cache is at chance on this task: differences mean nothing")
    others = sum(cell.ok and cell.is_full for cell in cells) - 1
    if comparison.base != "full":
        return doubts
    if others:
        doubts.append(f"{others + 1} cells have the full cache; differences are from {full.facts['path']}")
    if reference is not None and full.value is not None:
        wanted, tolerance = reference
        if not abs(full.value - wanted) <= tolerance + 1e-9 * abs(wanted):  # also warns of nan
            off = f"{comparison.metric} {full.value:.6g}, the reference is {wanted:g} ± {tolerance:g}"
            doubts.append(f"full cache has {off}: check the setup before reading differences")
    return doubts


def one_line(text: Any) -> str:
    """A text on one line."""
    return " ".join(str(text).split())


def error_of(facts: Mapping[str, Any]) -> str:
    """Why a cell failed."""
    return one_line(facts["error"] or "no error was written")
