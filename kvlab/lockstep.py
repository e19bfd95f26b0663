"""Cells run at once, one or several that share their prompts' forward pass, each with its own records and result.

Several go side by side, batch by batch. A cell that fails leaves the others. Where samples of a batch are left to some and
not to others, after an interruption, those cells share that lack the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from kvlab.evals import Record, Sample
from kvlab.evaluation import evaluate_reading, new_tokens_of, prompts_of, reader_of, session_of
from kvlab.interrupt import finished_first
from kvlab.measure import PeakMemory, give_back, now, out_of_memory
from kvlab.protocol import Reader
from kvlab.results import StoreError
from kvlab.runner import CellRun, batches, end_run, run_batch
from kvlab.together import Prefilled, prefill_together


def run_together(runs: Sequence[CellRun]) -> None:
    """Run what is left of these cells, which `bundled` has put together, and write their results, also where they fail."""
    try:
        peak = PeakMemory()
        for run in runs:
            run.begin(peak, len(runs))
        begun = [run for run in runs if run.result is None]
        for batch in batches(begun[0].samples, begun[0].size) if begun else ():
            _run_batch(begun, batch)
        for run in runs:
            end_run(run)
    except (KeyboardInterrupt, SystemExit, StoreError):
        for run in runs:
            if run.result is None:
                run.tracker.abandon()
        raise


def _run_batch(runs: Sequence[CellRun], batch: Sequence[Sample]) -> None:
    alike: dict[tuple[str, ...], list[CellRun]] = {}
    for run in runs:
        alike.setdefault(tuple(sample.id for sample in run.left(batch)), []).append(run)
    for lacking, some in alike.items():
        left, alone = [sample for sample in batch if sample.id in lacking], list[CellRun]()
        while left and len(some) > 1:
            some = [run for run in some if run.ready()]
            with finished_first():
                some, short = _share(some, left)
            alone += short
        if alone:
            give_back()  # here, where nothing holds the caches of the others any more
        for run in (*some, *alone):
            run_batch(run, left)


def _share(runs: Sequence[CellRun], batch: Sequence[Sample]) -> tuple[list[CellRun], list[CellRun]]:
    """Evaluate a batch of several cells; those to try again without one that failed, and those short of memory so."""
    short: list[CellRun] = []
    with torch.inference_mode(), ExitStack() as sessions:
        readers = {run: reader for run in runs if (reader := _reader(run, sessions)) is not None}
        going = list(readers)
        if len(going) < 2:
            return going, short
        try:
            torch.manual_seed(going[0].cell.seed)
            shared = prefill_together(list(readers.values()), prompts_of(batch), new_tokens_of(batch))
        except Exception as error:  # of the model, or of what the first cell has at work: the others will tell
            if out_of_memory(error):
                return [], going
            going[0].fail(error)
            return going[1:], short
        for run in going:
            with run.attempt(short):
                run.add(_evaluated(run, batch, shared.pop(0)))  # its cache goes before the next one is filled
    return [], short


def _reader(run: CellRun, sessions: ExitStack) -> Reader | None:
    with run.attempt():
        return reader_of(run.cell, run.bench, sessions.enter_context(session_of(run.cell, run.bench)))
    return None


def _evaluated(run: CellRun, batch: Sequence[Sample], mine: Prefilled) -> list[Record]:
    if mine.error is not None:
        raise mine.error
    start = now(run.bench.model.device) - mine.seconds
    torch.manual_seed(run.cell.seed)
    return evaluate_reading(run.cell, run.bench, batch, mine.reader, mine.reading(), start, run.to_probe)
