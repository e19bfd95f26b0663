"""A picture of a reproduction: for each model and task, what methods change against the full cache, ours beside theirs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from kvlab.reproduce.join import Beside, Reproduction
from kvlab.reproduce.measures import interval_name

ACROSS = 4
"""Panels side by side."""
THEIRS, OURS = "#b25d00", "#1f5fa8"
TITLE = 34
"""Characters of a panel's title that stand on a line."""


def draw(found: Reproduction, figure: Any) -> None:
    """A panel for each model and task, into an empty matplotlib figure; further right is better.

    Where the measures differ (`compares: order`), ours have the axis below and theirs that above, with the same zero.
    """
    keys = list(dict.fromkeys(row.planned.key[:2] for row in found.rows))
    across = min(ACROSS, len(keys))
    down = -(-len(keys) // across)
    methods = len(found.scale.methods)
    figure.set_size_inches(max(5.0, 1.5 + 3.1 * across), 1.3 + down * (1.5 + 0.3 * methods))
    panels = figure.subplots(down, across, squeeze=False, sharey=True).flat
    for key, panel in zip(keys, panels, strict=False):
        rows = [row for row in found.rows if row.planned.key[:2] == key and row.planned.method != found.table.full]
        panel.set_title("\n".join(textwrap.wrap(", ".join(key), TITLE)), fontsize=9)
        _panel(found, rows, panel)
    for panel in list(panels):  # what `zip` left of the iterator: places without a panel
        panel.set_axis_off()
    about = f"scale={found.scale.name}, ours: {', '.join(sorted({str(row.planned.config.model.name) for row in found.rows}))}"
    figure.suptitle(f"{found.table.title}\n{about}; further right is better", fontsize=10)
    _legend(figure, interval_name(row.metric for row in found.rows))


def _panel(found: Reproduction, rows: Sequence[Beside], panel: Any) -> None:
    ours = {place: row for place, row in enumerate(rows) if row.change is not None}
    theirs = {place: row.their_change for place, row in enumerate(rows) if row.their_change is not None}
    better = next((row.better for row in rows if row.better), found.table.better)
    apart = found.scale.compares == "order" and bool(theirs)
    above = panel.twiny() if apart else panel
    above.plot(list(theirs.values()), [place - 0.14 for place in theirs], "D", color=THEIRS, markersize=5)
    for place, row in ours.items():
        assert row.change is not None
        value, low, high, _ = row.change
        ends = None if low is None or high is None else [[max(0.0, value - low)], [max(0.0, high - value)]]
        fill = "white" if row.change.within_noise else OURS
        panel.errorbar([value], [place + 0.14], xerr=ends, fmt="o", color=OURS, mfc=fill, markersize=5, capsize=2.5)
    panel.axvline(0, color="0.6", linewidth=1, zorder=0)
    panel.set_yticks(range(len(rows)), [row.planned.method for row in rows])
    panel.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    spread = [end for row in ours.values() if row.change for end in row.change[:3] if end is not None]
    metric = next((row.metric for row in rows if row.metric), "")
    panel.set_xlabel(f"Δ {metric}" if metric else "Δ", fontsize=8, color=OURS if apart else "black")
    if apart:
        above.set_xlabel(f"Δ {next(row.published.metric for row in rows if row.published)}", fontsize=8, color=THEIRS)
        _same_zero([(panel, spread, better), (above, list(theirs.values()), found.table.better)])
    else:
        _same_zero([(panel, [*spread, *theirs.values()], better)])
    for axis in {panel, above}:
        axis.tick_params(labelsize=8)


def _same_zero(axes: Sequence[tuple[Any, Sequence[float], str]]) -> None:
    """Limits of axes, with zero at the same place and what is better to the right."""
    scaled: list[float] = [0.0]
    sizes = []
    for _, values, better in axes:
        sizes.append((max(map(abs, values), default=0.0) or 1.0) * (1 if better == "higher" else -1))
        scaled += [value / sizes[-1] for value in values]
    left, right = min(scaled) - 0.12, max(scaled) + 0.12
    for (axis, _, _), size in zip(axes, sizes, strict=True):
        axis.set_xlim(left * size, right * size)


def _legend(figure: Any, spread: str) -> None:
    from matplotlib.lines import Line2D

    figure.legend(
        handles=[
            Line2D([], [], color=THEIRS, marker="D", linestyle="", label="published"),
            Line2D([], [], color=OURS, marker="o", label=f"ours, interval: {spread}"),
            Line2D([], [], color=OURS, marker="o", mfc="white", label="ours, within noise"),
        ],
        loc="outside lower center",
        ncols=3,
        fontsize=8,
    )
