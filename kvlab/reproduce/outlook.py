"""What a dry run says of a table: commands, models with bytes of their weights, datasets, bytes of caches.

The hub is not asked and no data is read.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from typing import Any

import transformers

from kvlab.artefacts import ArtefactError
from kvlab.cells import Cell
from kvlab.estimate import cache_bytes
from kvlab.evals import Task, task_class
from kvlab.launcher import plain
from kvlab.models import ModelSpec
from kvlab.outline import dtype_of, sketch
from kvlab.reproduce.plan import Planned
from kvlab.reproduce.published import PaperTable, Scale
from kvlab.settings import build
from kvlab.tiny import tiny_tokenizer


def planned_lines(table: PaperTable, scale: Scale, cells: Sequence[Planned]) -> list[str]:
    """What would be run: each number's command, what it takes, and what must be done before."""
    stand_for: dict[tuple[str, ...], list[Planned]] = {}
    for cell in cells:
        stand_for.setdefault(cell.settings, []).append(cell)
    numbers = len([row for row in table.used(scale) if row.value is not None])
    lines = [f"{table.name}, scale={scale.name}: {len(stand_for)} cells for {numbers or 'no'} published numbers"]
    lines += [f"differs   {scale.differs}", f"cost      {scale.cost}", *(f"before    {need}" for need in scale.needs)]
    lines += [f"model     {text}" for text in dict.fromkeys(map(weights_text, cells))]
    lines += [f"data      {text}" for text in dict.fromkeys(_task(cell).reads for cell in cells)]
    for settings, same in stand_for.items():
        names = "; ".join(", ".join(cell.key) for cell in same)
        held = f"  {cache_text(same[0])}" if scale.name == "paper" else ""  # of others the sweep's own plan says it
        lines.append(f"{names}:  kvlab run {shlex.join(settings)}{held}")
    return lines


def weights_text(planned: Planned) -> str:
    """A cell's model, in which dtype, and how many bytes its weights are."""
    spec = _stand_in(planned, codec=None, share=None).model
    model = _sketched(spec.kind, spec.source, spec.dtype)
    if model is None:
        return f"{spec.source}: size unknown without the hub (conf/model_sizes.yaml)"
    dtype = str(model.dtype).removeprefix("torch.") if dtype_of(spec) == "auto" else dtype_of(spec)
    return f"{spec.source}, {dtype}: ~{_gigabytes(sum(one.numel() * one.itemsize for one in model.parameters()))} of weights"


def cache_text(planned: Planned) -> str:
    """What a cell holds for a batch of the task's longest texts; "at most" where these are as long as the model can read."""
    try:
        cell = _stand_in(planned)
    except ArtefactError:
        return "KV known once calibrated"
    model = _sketched(cell.model.kind, cell.model.source, cell.model.dtype)
    if model is None:
        return "KV unknown without the hub"
    longest = _task(planned).longest
    tokens = longest or int(model.config.get_text_config(decoder=True).max_position_embeddings)
    held = cell.runtime.batch_size * cache_bytes(cell, model, tiny_tokenizer(), tokens, tokens)
    most = "" if longest else "at most "
    return f"{most}~{_gigabytes(held)} KV per batch of {cell.runtime.batch_size} x {tokens:,} tokens"


def _task(planned: Planned) -> Task:
    settings = plain(planned.config)["task"]
    return build(task_class(settings["name"]), settings, "task", ignore=("name",))


def _stand_in(planned: Planned, **replaced: Any) -> Cell:
    """The cell with a task that needs no data in the place of its own: what is held doesn't depend on it."""
    return Cell.of({**plain(planned.config), "task": {"name": "perplexity"}, **replaced})


@cache
def _sketched(kind: Any, source: str, dtype: str) -> transformers.PreTrainedModel | None:
    return sketch(ModelSpec(source, kind, source, dtype))


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
