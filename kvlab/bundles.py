"""Which cells of a sweep may read their prompts in one forward pass, with the same results as each by itself.

Under protocol `prompt` attention is full until the prompt's end, whatever is kept of it then. But outputs are the same to the
last bit only where the same kernel computes them: policies that count attention have theirs from another one than the rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvlab.cells import Cell


def bundled(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of one model in bundles, of one where a cell shares with none; in the order of their first cells."""
    found: dict[Hashable, list[Cell]] = {}
    for number, cell in enumerate(cells):
        found.setdefault(_shared_by(cell) or number, []).append(cell)
    return list(found.values())


def _shared_by(cell: Cell) -> Hashable:
    """What a cell must have in common with others to be read with them, None where it can't be."""
    runtime, policy = cell.runtime, cell.policy
    alone = (
        not runtime.share_prefill,
        runtime.oom == "retry",  # each finds the size of its batches by itself
        cell.protocol.name != "prompt",
        cell.share is not None,
        policy.rolling,
        any(codec.projects or codec.pre_rope for codec in cell.codecs),
        # What a profile costs is counted over layers whose queries are there at once, which followers' aren't.
        policy.profiles and runtime.prefill_chunk is not None,
    )
    if any(alone):
        return None
    counts = policy.group if "mass" in policy.needs else None
    same = (runtime.batch_size, runtime.prefill_chunk, runtime.threads, runtime.kernels)
    return cell.comparison_id, same, cell.budget.of, counts
