"""Runs of Weights & Biases: where they go, with which settings, where their files lie. Only `run_folder` imports wandb."""

import configparser
import contextlib
import importlib
import netrc
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

TAG_LENGTH, NAME_LENGTH = 64, 128  # W&B refuses longer ones
_UNRECORDED = ("disable_git", "disable_code", "label_disable", "x_disable_meta", "x_disable_stats", "x_disable_machine_info")
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("silent", "quiet"), True),  # no banners
    **dict.fromkeys(_UNRECORDED, True),  # what ran is in the config and with the results
    **dict.fromkeys(("save_code", "x_save_requirements", "use_dot_wandb", "symlink"), False),
    "console": "off",  # stdout stays ours
    "reinit": "create_new",  # neither takes over nor hands out another run of this process
    "stop_fn": lambda: None,  # the web page's stop button would interrupt the whole sweep for one cell
    "init_timeout": 30.0,  # a dead network costs a cell this long at its start and its end, not forever
    "finish_timeout": 60.0,
}


@dataclass(frozen=True)
class TrackingSettings:
    """Where results go, one `conf/logger/*.yaml`."""

    name: Literal["wandb", "none"]
    project: str = "kvlab"
    entity: str | None = None
    mode: Literal["auto", "online", "offline"] = "auto"  # auto: as WANDB_MODE says, else online where a key is known
    tags: tuple[str, ...] = ()
    sample_rows: int = 200  # rows of the sample table; 0: no table
    figures: bool = False  # at a sweep's end the dashboard's page goes there too, as an artefact of its group


class NotTracked(Exception):
    """Nothing goes to W&B; the message says why, and is empty where that was asked for."""


@dataclass(frozen=True)
class RunFolder:
    """Opens W&B runs with kvlab's settings, with their files in `folder`/wandb. wandb: the package."""

    wandb: Any
    settings: TrackingSettings
    offline: bool
    folder: Path

    @property
    def notice(self) -> str:
        """One line on where runs go."""
        if not self.offline:
            return f"W&B: online, project {self.settings.project}"
        files = shlex.quote(str(self.folder / "wandb"))
        return f"W&B: offline, files in {files}; `wandb sync {files}/offline-*` uploads them"

    def attempts(self, run_id: str) -> list[Path]:
        """Files of offline runs of that id, which a new one replaces."""
        return list(self.folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))

    def open(self, run_id: str, **given: Any) -> Any:
        """The run of that id, the one there is where W&B has it already. given: further arguments of `wandb.init`."""
        wandb = self.wandb
        self.folder.mkdir(parents=True, exist_ok=True)
        known = wandb.Settings.model_fields  # settings come and go between releases, and unknown ones are refused
        quiet = wandb.Settings(**{name: value for name, value in SETTINGS.items() if name in known})
        hooks = sys.exit, sys.excepthook
        try:
            wandb.setup(settings=wandb.Settings(silent=True, quiet=True))  # warnings outside of runs go by global settings
            return wandb.init(
                project=self.settings.project,
                entity=self.settings.entity,
                id=run_id,
                resume=None if self.offline else "allow",
                dir=str(self.folder),
                mode="offline" if self.offline else "online",
                settings=quiet,
                **given,
            )
        finally:
            sys.exit, sys.excepthook = hooks  # wandb wraps both to learn the exit code, which `finish` tells it

    def log(self, run: Any, media: Mapping[str, Any]) -> None:
        """Log tables and other media; offline into the run's own files.

        Else tables would be artifacts too, staged in the home folder, and outputs that are copied elsewhere would lack them.
        """
        for name, one in media.items() if self.offline else ():
            one.bind_to_run(run, name, run.step)
        run.log(dict(media))


def run_folder(settings: TrackingSettings, folder: Path) -> RunFolder:
    """Where runs with these settings are opened. Raises NotTracked, or ValueError for online mode without a key."""
    mode = "none" if settings.name == "none" else _mode(settings)
    if mode in ("none", "disabled"):
        raise NotTracked("W&B: disabled by WANDB_MODE" if mode == "disabled" else "")
    try:
        wandb = importlib.import_module("wandb")
        _ = wandb.init  # a folder named wandb in the working directory passes for a package without it
    except Exception as error:  # a broken installation fails in many ways
        why = "not installed" if isinstance(error, (ImportError, AttributeError)) else f"broken ({error!r:.200})"
        raise NotTracked(f"W&B: {why}, results aren't tracked; `pip install wandb`, or set logger=none") from error
    return RunFolder(wandb, settings, mode == "offline", folder.absolute())


def pass_over(attempts: Sequence[Path]) -> None:
    """Have `wandb sync` pass over these files of runs."""
    for file in attempts:
        file.with_name(f"{file.name}.synced").touch()


def _mode(settings: TrackingSettings) -> str:
    """online, offline or disabled, from the settings and the environment; ValueError for online without a key."""
    mode = os.environ.get("WANDB_MODE", "").strip().lower() if settings.mode == "auto" else settings.mode
    if mode not in ("online", "offline", "disabled"):
        return "online" if _key_known() else "offline"
    if mode == "online" and not _key_known():
        raise ValueError("W&B has no key for online mode: run `wandb login`, or set logger.mode=offline or logger=none")
    return mode


def _key_known() -> bool:
    """Whether wandb would find credentials for its server by itself, without asking."""
    known = os.environ.get
    if known("WANDB_API_KEY") or known("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    stored = configparser.ConfigParser(interpolation=None)  # where `wandb login --host` notes the server
    with contextlib.suppress(configparser.Error, netrc.NetrcParseError, OSError, UnicodeDecodeError):  # wandb fails there too
        stored.read(Path(known("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser() / "settings")
        url = known("WANDB_BASE_URL") or stored.get("default", "base_url", fallback="") or "https://api.wandb.ai"
        found = netrc.netrc(Path(known("NETRC") or "~/.netrc").expanduser()).authenticators(urlsplit(url).netloc)
        return bool(found and found[2])
    return False
