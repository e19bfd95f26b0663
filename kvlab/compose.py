"""The way through Hydra: groups and choices of the config tree, its sweeps, and its errors in one line.

Every registered policy and task is a choice of its group, made from its dataclass; files in conf/ are presets. A single cell
is a sweep of one, so that there is one path.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvlab.cells import GROUPS, KEYS
from kvlab.evals import task_class, task_names
from kvlab.hints import did_you_mean
from kvlab.paths import conf_dir
from kvlab.policies import policy_class, policy_names
from kvlab.settings import SettingError, defaults

SHOWS: dict[str, tuple[str, ...]] = {
    "--cfg": ("job", "hydra", "all"),
    "--resolve": (),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--hydra-help": (),
    "--shell-completion": (),
}
"""Hydra's options that show something, and what may follow them."""
NO_CHOICE = "Config group override must be a string"
"""What Hydra says where a group is given nothing; the one complaint that isn't an exception of its own."""

Sweep = Callable[[Sequence[DictConfig]], Sequence[Any]]


def register_choices() -> None:
    """Make every policy and task a choice of its config group. Plain values, since frozen dataclasses can't be overridden."""
    store = ConfigStore.instance()
    for group, names, find in (("policy", policy_names(), policy_class), ("task", task_names(), task_class)):
        for name in names:
            values = defaults(find(name))
            if "seed" in values:
                values["seed"] = "${seed}"
            store.store(group=group, name=name, node=OmegaConf.create({"name": name, **values}), provider="kvlab")


def config_dirs(own: str | None = None) -> list[Path]:
    """Folders of config files, those that win first: the user's own, plug-ins' (group `kvlab.conf`), kvlab's.

    Raises SettingError if the user's own is no folder.
    """
    found = []
    if own is not None:
        found.append(Path(own).expanduser().resolve())
        if not found[0].is_dir():
            raise SettingError(
                f"--config-dir {own}: there is no such folder; give one with subfolders such as model/ and task/"
            )
    for entry in entry_points(group="kvlab.conf"):
        module = entry.load()
        found.append(Path(module if isinstance(module, str) else module.__path__[0]))
    return [*found, conf_dir()]


def choices(group: str, own: str | None = None) -> dict[str, Path | None]:
    """Choices of a config group, by name; the file, or None for those that registered dataclasses give."""
    found: dict[str, Path | None] = dict.fromkeys({"policy": policy_names, "task": task_names}.get(group, list)())
    for folder in reversed(config_dirs(own)):
        for path in sorted((folder / group).rglob("*.yaml")):
            found[path.relative_to(folder / group).with_suffix("").as_posix()] = path
    return dict(sorted(found.items()))


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


# --------------------------------------------------------------------------------------------- errors in one line


def explain(error: Exception, arguments: Sequence[str], own: str | None = None) -> str:
    """What was wrong with a command line, and what to change, from Hydra's error."""
    text = str(error)
    if isinstance(error, MissingConfigException) and (group := _missing_group(text)):
        name, known = group[1], choices(group[0], own)
        return f"{group[0]}={name}: there is no such choice{did_you_mean(name, known)}; choices: {', '.join(known)}"
    if found := re.search(r"Could not override '([\w./@-]+)'", text):
        return _unknown_key(found[1], text, arguments, own)
    if found := re.search(r"extraneous input|mismatched input|no viable alternative|token recognition|missing EQUAL", text):
        culprit = _culprit(text, arguments)
        return f"{culprit}: not of the form KEY=VALUE; put quotes around values with special characters, as in 'key=\"a=b\"'"
    if found := re.search(r"Ambiguous value for argument '([^']*)'", text):
        return f"{found[1]}: --cfg and --info show one config, so give one value"
    if NO_CHOICE in text:
        culprit = next((a for a in arguments if a.split("=")[0] in GROUPS and a.endswith(("=null", "="))), "a group")
        return f"{culprit}: choose one of {', '.join(choices(culprit.split('=')[0], own)) or 'its choices'}"
    if found := re.search(r"Multiple values for ([\w./]+)", text):
        return f"{found[1]} is given more than once: give it once, several values with commas between ({found[1]}=a,b)"
    if found := re.search(r"Error merging override (\S+)", text):
        return f"{found[1]}: {_last_line(text)}"
    return " ".join(text.split())


def _missing_group(text: str) -> tuple[str, str] | None:
    found = re.search(r"(?:In '[^']*': )?Could not (?:find|load) '?([\w]+)/([^'\s]+)'?", text)
    return (found[1], found[2].removesuffix(".yaml")) if found and found[1] in GROUPS else None


def _unknown_key(key: str, text: str, arguments: Sequence[str], own: str | None) -> str:
    """A key that the config does not have: a group misspelt, or a setting that its choice lacks."""
    group, _, setting = key.partition(".")
    if not setting or group not in GROUPS:
        return f"{key}: there is no such setting{did_you_mean(group, KEYS)}; settings: {', '.join(KEYS)}"
    if group == "budget" and setting in ("ratio", "tokens", "bytes"):
        value = next((a.partition("=")[2] for a in arguments if a.startswith(f"{key}=")), "...")
        return f"{key} goes with its own kind of budget: budget={setting} {key}={value}"
    names = _chosen(group, arguments)
    lacking = next((name for name in names if setting not in _settings_of(group, name, own)), names[0])
    known = _settings_of(group, lacking, own)
    has = f"; it has: {', '.join(known)}" if known else ""
    return f"{group}={lacking} has no setting {setting!r}{did_you_mean(setting, known)}{has}"


def _chosen(group: str, arguments: Sequence[str]) -> list[str]:
    """What the arguments choose of a group, or what is chosen by default."""
    given = next((a.partition("=")[2] for a in arguments if a.startswith(f"{group}=")), None)
    return (given or _default(group) or "").split(",")


def _settings_of(group: str, name: str, own: str | None) -> list[str]:
    """Settings of one choice of a group."""
    find: Any = {"policy": policy_class, "task": task_class}.get(group)
    try:
        path = choices(group, own).get(name)
        if find is not None and path is None:
            return list(defaults(find(name)))
        config: Any = OmegaConf.load(path) if path else {}
    except (ValueError, OSError, OmegaConfBaseException):
        return []
    keys = [str(key) for key in config if key not in ("defaults", "name")]
    for base in config.get("defaults", []):
        if isinstance(base, str) and base != "_self_":
            keys += [key for key in _settings_of(group, base, own) if key not in keys]
    return keys


def _default(group: str) -> str | None:
    config = OmegaConf.load(conf_dir() / "config.yaml")
    return next((entry[group] for entry in config.defaults if isinstance(entry, DictConfig) and group in entry), None)


def _culprit(text: str, arguments: Sequence[str]) -> str:
    return next((argument for argument in arguments if argument and argument in text), "a setting")


def _last_line(text: str) -> str:
    return [line.strip() for line in text.splitlines() if line.strip()][-1]
