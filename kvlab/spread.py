"""Where the cells of a sweep run: in this process, in several of this machine (joblib), or in jobs of a cluster (submitit).

Every worker walks over all cells and takes those that nobody runs (`kvlab.work.Work`), so one that is slow or late holds up
nothing but the cell that it has, and so does a job that is killed. A process that is killed ends the others of its sweep; fewer
new ones go on, once. This module knows no cell.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from kvlab.hints import did_you_mean
from kvlab.settings import SettingError, build

Worker = Callable[[int, int], None]
"""Called with its number and how many there are; can be pickled."""


@dataclass(frozen=True)
class Spread:
    """Base of the launchers: settings, and a way to have several workers run."""

    name: ClassVar[str] = ""

    @property
    def here(self) -> bool:
        """Whether everything runs in this process."""
        return False

    @property
    def waits(self) -> bool:
        """Whether `run` returns only when the workers have ended."""
        return True

    @property
    def where(self) -> str:
        """Over what cells are spread, in words."""
        return self.name

    def check(self) -> None:
        """Raises SettingError where this can't be had."""

    def run(self, worker: Worker, workers: int, folder: Path) -> str | None:
        """Have at most so many workers run, and wait for them; or say how to follow them. folder: for logs of jobs."""
        raise NotImplementedError


@dataclass(frozen=True)
class Local(Spread):
    """All in this process."""

    name: ClassVar[str] = "local"

    @property
    def here(self) -> bool:
        """Yes."""
        return True


@dataclass(frozen=True)
class Processes(Spread):
    """jobs: processes; threads: of each, by default the machine's cores shared out."""

    jobs: int = 2
    threads: int | None = None

    name: ClassVar[str] = "processes"

    def __post_init__(self) -> None:
        _at_least_one(self, "jobs", "threads")

    def check(self) -> None:
        """joblib is an extra."""
        _needs("joblib", "launchers", self.name)

    def run(self, worker: Worker, workers: int, folder: Path) -> str | None:
        """Waits for all of them. joblib ends them all when one is killed: half as many go on with what is left, once."""
        jobs = min(self.jobs, workers)
        fewer = max(1, jobs // 2)
        killed = "a process was killed (out of memory?), which ended the others"
        if self._ended(worker, jobs):
            return None
        if self._ended(worker, fewer):
            return f"{killed}; {fewer} new went on with what was left: next time set launcher.jobs={fewer}"
        return f"{killed}, and once more with {fewer}: lower launcher.jobs, or give the same command"

    def _ended(self, worker: Worker, jobs: int) -> bool:
        """Have so many processes run; False where one was killed."""
        import joblib  # type: ignore[import-untyped]

        threads = self.threads or max(1, (os.cpu_count() or 1) // jobs)
        try:
            # At least two, of which one may have nothing to do: a single one would be this process.
            with joblib.parallel_config(backend="loky", n_jobs=max(2, jobs), inner_max_num_threads=threads):
                joblib.Parallel(batch_size=1)(joblib.delayed(worker)(number, jobs) for number in range(jobs))
        except BrokenProcessPool:
            return False
        return True


@dataclass(frozen=True)
class Slurm(Spread):
    """Jobs of a SLURM cluster, or of submitit's stand-ins on this machine; see conf/launcher/slurm.yaml."""

    jobs: int = 4
    cluster: Literal["slurm", "local", "debug"] | None = None
    wait: bool = True
    minutes: int = 240
    partition: str | None = None
    gpus: int = 0
    cpus: int = 4
    memory_gb: int = 16
    setup: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    name: ClassVar[str] = "slurm"

    def __post_init__(self) -> None:
        _at_least_one(self, "jobs", "minutes", "cpus", "memory_gb")
        if not isinstance(self.options, Mapping):
            raise SettingError(f"launcher.options={self.options!r}: use names and values, such as {{account: nlp}}")

    @property
    def waits(self) -> bool:
        """As the settings say."""
        return self.wait

    @property
    def where(self) -> str:
        """Whose jobs: without a cluster submitit's stand-ins on this machine."""
        import submitit

        cluster = self.cluster or submitit.AutoExecutor.which()
        return f"{cluster} jobs" + ("" if self.cluster or cluster == "slurm" else ", since there is no SLURM here")

    def check(self) -> None:
        """submitit is an extra, and says what a cluster doesn't take; a node without a GPU may start jobs that have some."""
        _needs("submitit", "launchers", self.name)
        cluster = self._executor(Path(".jobs")).cluster
        if self.gpus and cluster != "slurm" and torch.accelerator.current_accelerator(check_available=True) is None:
            raise SettingError(
                f"launcher.gpus={self.gpus}: {cluster} jobs run on this machine, which has none but its CPU: give the command "
                "where there is SLURM, or launcher.gpus=0"
            )

    def run(self, worker: Worker, workers: int, folder: Path) -> str | None:
        """Waits for all jobs, unless `wait` is false."""
        jobs, executor = min(self.jobs, workers), self._executor(folder)
        try:
            with executor.batch():
                submitted = [executor.submit(Resumed(worker), number, jobs) for number in range(jobs)]
        except RuntimeError as refused:  # a partition that isn't there, an account that may not
            why = " ".join(str(refused).split())
            raise SettingError(
                f"launcher=slurm: jobs can't be submitted ({why}): correct launcher.partition or options"
            ) from refused
        if not self.wait:
            names = ",".join(job.job_id for job in submitted)
            look = f"`squeue --jobs={names}`" if executor.cluster == "slurm" else f"processes {names}"
            return (
                f"submitted to {executor.cluster}: look after them with {look} and their logs in {folder}; the same command "
                "with --dry-run says what is left, `kvlab table` and `kvlab dashboard --serve` show what is there"
            )
        try:
            for job in submitted:
                job.wait()
        except BaseException:
            for job in submitted:
                job.cancel()
            raise
        failed = [job for job in submitted if (error := job.exception()) is not None and not _was_cut(error)]
        return f"{len(failed)} of {jobs} jobs ended badly: {failed[0].paths.stderr}" if failed else None

    def _executor(self, folder: Path) -> Any:
        """submitit's, which submits nothing yet. Raises SettingError where it can't be had with these settings."""
        import submitit

        try:
            executor = submitit.AutoExecutor(folder=folder / "%j", cluster=self.cluster)
            executor.update_parameters(**self._parameters(executor.cluster))
        except (RuntimeError, ValueError, TypeError, NameError, AssertionError) as error:
            why = str(error).strip().split("\n")[0] or type(error).__name__
            raise SettingError(
                f"launcher=slurm can't be had ({why}): correct launcher.cluster or its other settings"
            ) from error
        return executor

    def _parameters(self, cluster: str) -> dict[str, Any]:
        """For submitit; what only a cluster knows is left out elsewhere."""
        plain = {"timeout_min": self.minutes, "cpus_per_task": self.cpus, "gpus_per_node": self.gpus, "name": "kvlab"}
        if cluster != "slurm":
            return plain
        slurm = {
            "mem_gb": self.memory_gb,
            "slurm_partition": self.partition,
            "slurm_array_parallelism": self.jobs,
            "slurm_setup": list(self.setup) or None,
            "slurm_additional_parameters": dict(self.options) or None,
        }
        return plain | {name: value for name, value in slurm.items() if value is not None}


@dataclass(frozen=True)
class Resumed:
    """A worker that a cluster may stop at any time: submitted anew it finds what is left by itself."""

    worker: Worker

    def __call__(self, number: int, of: int) -> None:
        """Work."""
        self.worker(number, of)

    def checkpoint(self, number: int, of: int) -> Any:
        """What submitit submits when a job's time is over or another takes its place."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, number, of)


SPREADS: dict[str, type[Spread]] = {cls.name: cls for cls in (Local, Processes, Slurm)}


def spread_of(settings: Mapping[str, Any] | None) -> Spread:
    """The launcher that a config's `launcher` says. Raises SettingError on what isn't there."""
    given = dict(settings or {"name": "local"})
    name = given.get("name")
    if name not in SPREADS:
        raise SettingError(f"launcher={name}: unknown{did_you_mean(str(name), SPREADS)}; known: {', '.join(SPREADS)}")
    return build(SPREADS[name], given, "launcher", ignore=("name",))


def _at_least_one(settings: Spread, *names: str) -> None:
    for name in names:
        if getattr(settings, name) == 0:
            raise SettingError(f"launcher.{name}=0: use at least 1")


def _needs(package: str, extra: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise SettingError(f"launcher={name} needs {package}: pip install 'kvlab[{extra}]'")


def _was_cut(error: BaseException) -> bool:
    """Whether a job was stopped from outside, which leaves cells to the next run and isn't a fault."""
    return type(error).__name__ == "UncompletedJobError"
