"""lm-eval-harness: its tasks in kvlab's loop, on local data or the hub's."""

from kvlab.evals.harness.task import LmEval

__all__ = ["LmEval"]
