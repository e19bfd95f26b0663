"""From a table's description to composed cells: model x task x method, each a command line of `kvlab run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from kvlab.compose import run_hydra
from kvlab.reproduce.published import PaperTable, Scale
from kvlab.settings import SettingError


@dataclass(frozen=True)
class Planned:
    """A cell that stands for a number: the paper's model, task and method, our settings, and what they compose to."""

    model: str
    task: str
    method: str
    settings: tuple[str, ...]
    config: DictConfig

    @property
    def key(self) -> tuple[str, str, str]:
        """The paper's names."""
        return self.model, self.task, self.method


def plan(table: PaperTable, scale: Scale, overrides: Sequence[str] = ()) -> list[Planned]:
    """The cells of a scale; `overrides` win over the description. Raises SettingError where one isn't exactly one cell.

    Where a table has no row for a model, task and method there is no cell, unless it is the full cache's beside others.
    """
    for item in overrides:
        if "=" not in item:
            raise SettingError(f"{item}: settings are KEY=VALUE, as of `kvlab run`")
    found: list[Planned] = []
    known: dict[tuple[str, ...], DictConfig] = {}
    wanted = {(row.model, row.task, row.method) for row in table.rows}
    wanted |= {(row.model, row.task, table.full) for row in table.rows}
    for model, on in scale.models.items():
        for task, of in scale.tasks.items():
            for method, by in scale.methods.items():
                if (model, task, method) not in wanted:
                    continue
                settings = merged([*scale.run, *on, *of, *by, *overrides])
                if settings not in known:  # a cell may stand for several numbers
                    known[settings] = _composed(settings, f"{table.name}, {method} on {task}")
                found.append(Planned(model, task, method, settings, known[settings]))
    return found


def merged(settings: Sequence[str]) -> tuple[str, ...]:
    """Settings of which each key occurs once, with the last value."""
    return tuple({item.partition("=")[0]: item for item in settings}.values())


def distinct(cells: Sequence[Planned]) -> list[DictConfig]:
    """The configs to run, each once."""
    return list({cell.settings: cell.config for cell in cells}.values())


def _composed(settings: Sequence[str], about: str) -> DictConfig:
    configs: list[DictConfig] = []

    def keep(composed: Sequence[DictConfig]) -> list[None]:
        configs.extend(composed)
        return [None] * len(composed)

    run_hydra(settings, keep)
    if len(configs) != 1:
        raise SettingError(f"{about}: {len(configs)} cells where one is wanted: give every swept setting one value")
    return configs[0]
