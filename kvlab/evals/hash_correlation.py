"""Whether hash codes tell what prompts attend to, in numbers of each prompt (HashEvict: Liu et al. 2024, arXiv 2412.16187).

The measure of `kvlab analyze hash`, on the prompts of lm-eval's tasks, as a cell: so that it has errors over prompts and can
stand beside the paper's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kvlab.evals.base import Record, Sample, register_task
from kvlab.evals.harness.task import LmEval
from kvlab.hash_codes import HashSums
from kvlab.kernels import reference
from kvlab.metrics import Metric, make_metric
from kvlab.policies import make_policy
from kvlab.reading import Reading
from kvlab.session import attach
from kvlab.settings import SettingError
from kvlab.shapes import Step


@register_task("hash_correlation")
@dataclass(frozen=True)
class HashCorrelation(LmEval):
    """Pearson's r of attention with the bits that codes of query and key share, over the causal pairs of each prompt.

    bits         of a code, 1 to 1024
    projections  random ones, of which the mean is taken, as over layers and query heads
    The others are those of `lm_eval`, whose prompts are read; nothing is asked. Attention is the full cache's.
    """

    bits: int = 16
    projections: int = 3

    main_metric: ClassVar[str] = "pearson_r"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.bits <= 1024 or self.projections < 1:
            raise SettingError(
                f"task.bits={self.bits}, task.projections={self.projections}: use 1 to 1024 bits and at least 1 projection"
            )

    @property
    def label(self) -> str:
        """The tasks whose prompts are read, and the bits."""
        return f"{super().label} hash {self.bits} bits"

    def samples(self, tokenizer: Any) -> list[Sample]:
        """The first prompt of each document."""
        docs = super().samples(tokenizer)
        return [Sample(doc.id, replace(doc.prompt, asks=False), fields=doc.fields, where=doc.where) for doc in docs]

    def evaluate(self, reading: Reading, samples: Sequence[Sample], tokenizer: Any) -> list[Record]:
        """r of each prompt, which is read by itself. SettingError where the cell's cache isn't a full one."""
        plan = reading.feed.cache.plan
        if plan.policy.evicts or plan.codec is not None or plan.sources:
            raise SettingError("task=hash_correlation looks at a full cache: use policy=full codec=none share=none")
        model = reading.feed.model
        return [{"values": {"pearson_r": self._r(model, sample.prompt.ids)}} for sample in samples]

    def _r(self, model: Any, ids: Sequence[int]) -> float:
        found: list[float] = []

        def watch(step: Step) -> None:
            assert step.looks is not None
            sums, start = HashSums(step.keys, step.layer_idx, step.queries.shape[2], (self.bits,), self.projections), 0
            for attention, positions in step.looks():
                end = start + positions.shape[1]
                seen = reference.visible(positions, step.positions, step.window)[:, :, None]
                sums.add(step.queries[:, :, :, start:end], attention, seen)
                start = end
            found.append(float(sums.r().mean()))

        with attach(model, make_policy("full"), watch=watch) as session:
            model(torch.tensor([ids], device=model.device), cache=session.new_cache(), logits_to_keep=1)
        return statistics.fmean(found)

    def metrics(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Mean over prompts."""
        return {"pearson_r": make_metric(records, "pearson_r", "mean", "higher")}
