"""LongBench, LongBench-E, MiniLongBench and LongBench v2."""

from kvlab.evals.longbench.task import LongBench

__all__ = ["LongBench"]
