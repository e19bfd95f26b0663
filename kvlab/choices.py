"""Choices of the config groups: files in the user's folder, in plug-ins and in conf/, and what registered dataclasses give."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvlab.codecs import codec_class, codec_names
from kvlab.evals import task_class, task_names
from kvlab.paths import conf_dir
from kvlab.policies import policy_class, policy_names
from kvlab.settings import SettingError, defaults
from kvlab.sharing import share_class, share_names

REGISTERED: dict[str, tuple[Callable[[], list[str]], Callable[[str], type]]] = {
    "policy": (policy_names, policy_class),
    "codec": (codec_names, codec_class),
    "share": (share_names, share_class),
    "task": (task_names, task_class),
}
"""Groups whose choices are registered dataclasses: their names, and what finds one."""


def register_choices() -> None:
    """Make every registered class a choice of its config group. Plain values, since frozen dataclasses can't be overridden."""
    store = ConfigStore.instance()
    for name in codec_names():  # each below its own name, so that several can be chosen
        node = OmegaConf.create({"name": name, **defaults(codec_class(name))})
        store.store(group="codec", name=name, package=f"codec.{name}", node=node, provider="kvlab")
    for group in ("policy", "share", "task"):
        names, find = REGISTERED[group]
        for name in names():
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
    names = REGISTERED[group][0]() if group in REGISTERED else []
    found: dict[str, Path | None] = dict.fromkeys(names)
    for folder in reversed(config_dirs(own)):
        for path in sorted((folder / group).rglob("*.yaml")):
            found[path.relative_to(folder / group).with_suffix("").as_posix()] = path
    return dict(sorted(found.items()))


def settings_of(group: str, name: str, own: str | None) -> list[str]:
    """Settings of one choice of a group."""
    try:
        path = choices(group, own).get(name)
        if group in REGISTERED and path is None:
            return list(defaults(REGISTERED[group][1](name)))
        config: Any = OmegaConf.load(path) if path else {}
    except (ValueError, OSError, OmegaConfBaseException):
        return []
    keys = [str(key) for key in config if key not in ("defaults", "name")]
    for base in config.get("defaults", []):
        if isinstance(base, str) and base != "_self_":
            name = base.partition("@")[0]
            keys += [key for key in settings_of(group, name, own) if key not in keys]
    return keys


def default_choice(group: str) -> str | None:
    """What is chosen where nothing is said."""
    config = OmegaConf.load(conf_dir() / "config.yaml")
    return next((entry[group] for entry in config.defaults if isinstance(entry, DictConfig) and group in entry), None)
