"""Tasks: what a model is asked, and how answers become numbers. One task, one file."""

from kvlab.evals import alpaca, harness, hash_correlation, helm, longbench, needle, perplexity, prompts  # noqa: F401  (registers them)
from kvlab.evals.base import Finished, Record, Sample, Task, register_task, task_class, task_names

__all__ = ["Finished", "Record", "Sample", "Task", "register_task", "task_class", "task_names"]
