"""The way through Hydra: it composes configs and expands sweeps. A single cell is a sweep of one, so that there is one path."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvlab.choices import config_dirs, register_choices
from kvlab.explain import NO_CHOICE, explain
from kvlab.hints import did_you_mean
from kvlab.paths import conf_dir
from kvlab.settings import SettingError

SHOWS: dict[str, tuple[str, ...]] = {
    "--cfg": ("job", "hydra", "all"),
    "--resolve": (),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--hydra-help": (),
    "--shell-completion": (),
}
"""Hydra's options that show something, and what may follow them."""

Sweep = Callable[[Sequence[DictConfig]], Sequence[Any]]


def run_hydra(arguments: Sequence[str], sweep: Sweep, own: str | None = None) -> None:
    """Let Hydra compose what the arguments ask for, and hand all cells to `sweep`.

    arguments  overrides, and Hydra's own options: `--cfg job`, `--info`, `-m`
    Raises SettingError where Hydra can't, in one line that says what to change.
    """
    folders = config_dirs(own)
    register_choices()
    overrides, options = _sorted_out(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        own_first = ",".join(f"'file://{folder}'" for folder in folders[:-1])
        extra = [f"hydra.sweep.dir={scratch}", f"hydra.searchpath=[{own_first}]"]
        try:
            _call_hydra(["kvlab run", *extra, *overrides, *(options or ["-m"])], sweep)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            if isinstance(error, ValueError) and NO_CHOICE not in str(error):
                raise  # not Hydra's
            raise SettingError(explain(error, overrides, own)) from error


def _sorted_out(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides, and those of Hydra's own options that show something, with their values."""
    overrides: list[str] = []
    options: list[str] = []
    for argument in arguments:
        if argument.startswith("-"):
            if argument not in SHOWS:
                raise SettingError(
                    f"{argument}: there is no such option{did_you_mean(argument, SHOWS)}; settings are KEY=VALUE, no dashes"
                )
            options.append(argument)
        elif options and argument in SHOWS.get(options[-1], ()):
            options.append(argument)
        else:
            overrides.append(argument)
    return overrides, options


def _call_hydra(argv: Sequence[str], sweep: Sweep) -> None:
    """Hydra reads the command line and the environment, and prints errors by itself unless told to raise them."""

    def entry(configs: Any) -> Any:
        return sweep(configs)

    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = list(argv), "1"
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(entry)()
    finally:
        sys.argv = before
        GlobalHydra.instance().clear()
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
