"""Tasks: what a model is asked, and how answers become numbers. One task, one file."""

from kvlab.evals import needle, perplexity, prompts  # noqa: F401  (registers them)
from kvlab.evals.base import Record, Sample, Task, register_task, task_class, task_names

__all__ = ["Record", "Sample", "Task", "register_task", "task_class", "task_names"]
