"""Win rates in the manner of AlpacaEval."""

from kvlab.evals.alpaca.task import Alpaca

__all__ = ["Alpaca"]
