"""The dashboard's page on Weights & Biases: one run in the group of its experiment, with an artefact of all figures.

The run has the page to look at (`dashboard`), a table of all cells (`comparison`), of which W&B draws charts of its own, and an
artefact of type `figures`: the page, the tables as Markdown and CSV, pictures of `kvlab analyze`.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.dashboard import write_page
from kvlab.dashboard.analyses import analysis_files
from kvlab.render import render
from kvlab.tables import Where, compare, places_of, stored_references
from kvlab.wandb_runs import NAME_LENGTH, NotTracked, RunFolder, TrackingSettings, pass_over, run_folder

COLUMNS = (
    *("name", "model", "task", "protocol", "policy", "policy_label", "codec", "share", "budget_label", "ratio", "tokens"),
    *("metric", "value", "low", "high", "n", "delta", "delta_low", "delta_high", "noise", "mcnemar_p", "agreement"),
    *("kept_fraction", "kv_bytes", "kv_bytes_full", "decode_tokens_per_s", "status", "run_id"),
)
"""Of the table `comparison`, a row for each cell; `delta` is the paired difference to the full cache with its 95 % interval."""
Plain = Mapping[str, Any]


class NotUploaded(OSError):
    """W&B failed; the page itself is written."""


def upload_dashboard(where: Where, output: Path, settings: TrackingSettings | None = None, folder: Path | None = None) -> str:
    """Write the page of all results below folders and globs to `output`, and upload it; a line on each.

    settings  by default the cells' project and entity, online where a key is known, else offline
    folder    W&B's files come into its `wandb`; by default the page's own folder
    The run is in the group of the cells' experiment, in none where there are several; it takes the place of an earlier one.
    Raises ValueError as `write_dashboard`, and where W&B is missing or has no key for online mode; NotUploaded if it fails.
    """
    said, page = write_page(where, output)
    chosen = settings or settings_of([cell["config"].get("logger") or {} for cell in page["cells"]])
    try:
        place = run_folder(chosen, folder or output.absolute().parent)
    except NotTracked as error:
        raise ValueError(f"{output} is written and not uploaded; {error}") from error
    names = list(dict.fromkeys(cell["name"] for cell in page["cells"]))
    about = names[0] if len(names) == 1 else f"{len(names)} experiments"
    try:
        address = _upload(place, where, output, page, names, about)
    except Exception as error:  # whatever W&B may raise
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise NotUploaded(f"W&B: {output} is written and not uploaded; {why}") from error
    return f"{said}\n{address or place.notice}"


def settings_of(loggers: Sequence[Plain]) -> TrackingSettings:
    """Project and entity of cells by their configs, where they had W&B and agree; kvlab's own otherwise."""
    found = {(one.get("project"), one.get("entity")) for one in loggers if one.get("name") == "wandb"}
    project, entity = found.pop() if len(found) == 1 else (None, None)
    return TrackingSettings("wandb", project or TrackingSettings.project, entity)


def _upload(place: RunFolder, where: Where, output: Path, page: Plain, names: Sequence[str], about: str) -> str:
    """The run's address, empty offline."""
    digest = hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest()
    run_id = f"figures-{digest}"
    earlier = place.attempts(run_id)
    run = place.open(
        run_id,
        group=names[0][:NAME_LENGTH] if len(names) == 1 else None,
        job_type="figures",
        name=f"figures of {about}"[:NAME_LENGTH],
        tags=["figures", *place.settings.tags],
        config={"names": list(names)},
    )
    try:
        artefact = place.wandb.Artifact(f"figures-{_safe(about)}", type="figures", metadata={"made": page["made"]})
        for file in _files(where, output, Path(run.dir).parent / "figures"):
            artefact.add_file(str(file), name=file.name, policy="immutable", skip_cache=True)  # read where it lies
        html = place.wandb.Html(str(output), inject=False)  # the page allows no style but its own
        table = place.wandb.Table(columns=list(COLUMNS), data=_rows(page))
        place.log(run, {"dashboard": html, "comparison": table})
        run.log_artifact(artefact)
    except BaseException:
        run.finish(1)
        raise
    run.summary.update({"cells": len(page["cells"]), "comparisons": len(page["comparisons"])})
    run.finish(0)
    pass_over(earlier)
    return "" if place.offline else f"W&B: {run.url}"


def _files(where: Where, page: Path, folder: Path) -> list[Path]:
    """What the artefact holds, in a folder of the run's own: the page may be written again before it is uploaded."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [Path(shutil.copyfile(page, folder / "dashboard.html"))]
    items = compare(where, stored_references())
    for fmt in ("md", "csv"):
        found.append(folder / f"tables.{fmt}")
        found[-1].write_text(render(items, fmt) + "\n", encoding="utf-8")
    pictures = [file.with_suffix(".png") for file in analysis_files(places_of(where))]
    for number, picture in enumerate(filter(Path.is_file, pictures)):
        found.append(Path(shutil.copyfile(picture, folder / f"{number}-{picture.name}")))
    return found


def _rows(page: Plain) -> list[list[Any]]:
    metrics = {one["id"]: one["metric"] for one in page["comparisons"]}
    return [_row({**cell, "metric": metrics[cell["comparison"]]}) for cell in page["cells"]]


def _row(cell: Plain) -> list[Any]:
    delta = cell["delta"] or {}
    flat = {
        **cell,
        "delta": delta.get("value"),
        "delta_low": delta.get("low"),
        "delta_high": delta.get("high"),
        "noise": delta.get("noise"),
    }
    return [flat[name] if isinstance(flat[name], bool | int | float | None) else str(flat[name]) for name in COLUMNS]


def _safe(text: str) -> str:
    """As W&B allows an artefact to be named."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII)[:NAME_LENGTH]
