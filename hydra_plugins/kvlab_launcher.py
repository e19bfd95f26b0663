"""Hydra's way to kvlab's launcher. Hydra imports everything in this namespace for any program, so nothing heavy is here."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class KvlabLauncher(Launcher):
    """Gets all cells of a sweep at once and hands their composed configs to `kvlab.launcher`."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before `launch`."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the cells; what sweepers get of each is its main metric."""
        loader = self.hydra_context.config_loader
        configs = []
        for overrides in job_overrides:
            config = loader.load_sweep_config(self.config, list(overrides))
            OmegaConf.set_struct(config, False)
            config.pop("hydra", None)
            configs.append(config)
        values = self.task_function(configs)
        return [
            JobReturn(overrides=list(overrides), cfg=config, status=JobStatus.COMPLETED, _return_value=value)
            for overrides, config, value in zip(job_overrides, configs, values, strict=True)
        ]
