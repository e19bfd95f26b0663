"""One model and what cells need of it: tokenizer and outline before the weights, samples by task, checks of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvlab.budget import BudgetError
from kvlab.cells import Cell
from kvlab.evals import Sample
from kvlab.measure import give_back
from kvlab.models import ModelSpec, load_spec
from kvlab.outline import outline
from kvlab.session import attach
from kvlab.settings import SettingError
from kvlab.vocab import Vocab


class Workbench:
    """A model that several cells share. The weights are loaded when they are first asked for."""

    def __init__(self, spec: ModelSpec) -> None:
        self._vocab: Vocab | None = None
        self.spec = spec
        self._samples: dict[str, tuple[list[Sample], list[str]]] = {}

    @cached_property
    def shape(self) -> tuple[PreTrainedModel, Any]:
        """The model without its weights, and its tokenizer."""
        return outline(self.spec)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.shape[1]

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model itself, warmed up, so that the first cell isn't charged for it."""
        model, tokenizer = load_spec(self.spec)
        with torch.inference_mode():
            model(torch.tensor([[tokenizer.eos_token_id or 0] * 8], device=model.device))
        return model

    def release(self) -> None:
        """Give the weights back."""
        self.__dict__.pop("model", None)
        give_back()

    def vocab(self, cell: Cell) -> Vocab:
        """Sets of tokens of the model's tokenizer, made once; before any prompt is timed where a policy needs them."""
        if self._vocab is None:
            self._vocab = Vocab(self.tokenizer)
        if "token_ids" in cell.policy.needs:
            self._vocab.kinds(torch.zeros(1, dtype=torch.long, device=self.model.device))
        return self._vocab

    def samples(self, cell: Cell) -> list[Sample]:
        """The samples of a cell's task; made once for all cells that share it."""
        return self._made(cell)[0]

    def left_out(self, cell: Cell) -> list[str]:
        """A line on each sample that can't be used: bad rows, and what is longer than the model's context."""
        return self._made(cell)[1]

    def _made(self, cell: Cell) -> tuple[list[Sample], list[str]]:
        if cell.comparison_id not in self._samples:
            task = cell.task.fitted(self.context)
            every = task.samples(self.tokenizer)
            names = [sample.id for sample in every]
            if not every or len(set(names)) < len(names):
                raise SettingError(f"task {cell.task.name} must give at least one sample, and each an id of its own")
            long = {} if cell.runtime.beyond_context else {s.id: self._too_long(s) for s in every if s.tokens > self.context}
            if long and (len(long) == len(every) or getattr(cell.task, "bad_rows", "stop") == "stop"):
                raise SettingError(long[max(every, key=lambda sample: sample.tokens).id])
            samples = [sample for sample in every if sample.id not in long]
            self._samples[cell.comparison_id] = samples, [*task.left_out, *long.values()]
        return self._samples[cell.comparison_id]

    def _too_long(self, sample: Sample) -> str:
        place = f"{sample.where}: " if sample.where else ""
        return (
            f"{place}sample {sample.id} needs {sample.tokens} tokens, and {self.spec.name} has a context of {self.context}: "
            "use shorter prompts or fewer new tokens (runtime.beyond_context=true to try it all the same)"
        )

    def check(self, cell: Cell) -> None:
        """Whether a cell can be run on the model, as far as that is known without weights.

        Raises ValueError, in one line that says what to change.
        """
        samples = self.samples(cell)
        if cell.protocol.simulated and any(sample.new_tokens for sample in samples):
            raise SettingError(
                f"task {cell.task.name} generates, and protocol {cell.protocol.name} can only score given texts: its masks "
                "need all of a text; use protocol=prompt, or a task such as perplexity"
            )
        self.check_budget(cell, samples)

    def check_budget(self, cell: Cell, samples: Sequence[Sample]) -> None:
        """Whether a cell's budget holds what its policy protects of the shortest prompt. Raises BudgetError."""
        model, tokenizer = self.shape
        lengths = [cell.protocol.known_len(prompt) for sample in samples for prompt in sample.prompts]
        with attach(model, tokenizer=tokenizer, **cell.at_work) as session:
            plan = session.plan
            held = plan.budget.resolve([min(lengths)], [plan.layers[layer] for layer in plan.holders], new_tokens=0)
            if held is not None and held[0] < plan.least and cell.policy.evicts:
                raise BudgetError(
                    f"budget.ratio={cell.budget.ratio} holds {held[0]} of the shortest prompt's {min(lengths)} tokens, fewer "
                    f"than policy {cell.policy.name} protects ({plan.protection}): raise the ratio or lower these settings"
                )
            plan.tokens(np.array([max(lengths)]), new_tokens=0)  # budgets of layers that don't fit the model

    @property
    def context(self) -> int:
        """Tokens that the model can read; very many where it doesn't say."""
        return getattr(self.shape[0].config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 40
