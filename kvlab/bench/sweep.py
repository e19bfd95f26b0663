"""Sweeps: cells that share their prompts' forward pass, against the same cells one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from kvlab.bench.setup import Setup
from kvlab.bench.timing import Line, Work, alternate
from kvlab.budget import Budget
from kvlab.policies import Policy, make_policy
from kvlab.protocol import PromptProtocol, Reader
from kvlab.reading import Prompt, Reading
from kvlab.session import Session, attach
from kvlab.together import prefill_together

POLICIES = ("streaming_llm", "random", "knorm", "tova", "snapkv", "pyramidkv", "adakv", "h2o")
"""Whose attention is counted comes last."""
NEW_TOKENS = 32
LENGTH, TARGET = 4096, 4.0
"""Prompt length that the target is for."""
Cell = tuple[Policy, Budget]


def sweep(setup: Setup) -> list[Line]:
    """Eight policies at two budgets, the bench's and twice that, on one prompt of the longest length."""
    length = max(setup.lengths)
    budgets = [Budget(ratio=ratio) for ratio in (setup.ratio, min(1.0, 2 * setup.ratio))]
    cells = [(make_policy(name), budget) for name in POLICIES for budget in budgets]
    prompts = [Prompt(tuple(setup.ids(length)[0].tolist()))]
    found: dict[str, list[Any]] = {}

    def apart() -> None:
        found["apart"] = [_alone(setup, cell, prompts) for cell in cells]

    def shared() -> None:
        others = [cell for cell in cells if "mass" not in cell[0].needs]
        counting = cells[len(others) :]  # attention comes from another kernel
        found["shared"] = [end for some in (others, counting) for end in _together(setup, some, prompts)]

    works: dict[str, Work] = {"shared": shared, "apart": apart}
    with torch.inference_mode():
        for policy, _ in cells[::2]:  # compiles and loads kernels, which a whole round would take long for
            _alone(setup, (policy, Budget(tokens=48)), [Prompt(prompts[0].ids[:64])])
        seconds = alternate(works, max(1, setup.repeats // 5), setup.device, warm_up=0)
    alike = sum(mine == other for mine, other in zip(found["shared"], found["apart"], strict=True))
    what = f"{len(POLICIES)} policies × 2 budgets, {length} tokens and {NEW_TOKENS} new ones: one sweep over {len(cells)} runs"
    note = "tokens and kept positions are identical" if alike == len(cells) else f"{alike} of {len(cells)} ended alike"
    target = TARGET if setup.usual and length == LENGTH else None
    return [Line(what, seconds["shared"], seconds["apart"], target, True, note=note)]


def _session(setup: Setup, cell: Cell) -> Any:
    return attach(setup.model, *cell, tokenizer=setup.tokenizer)


def _reader(session: Session) -> Reader:
    return Reader(session, PromptProtocol())


def _alone(setup: Setup, cell: Cell, prompts: Sequence[Prompt]) -> Any:
    with _session(setup, cell) as session:
        return _end(_reader(session).read(prompts))


def _together(setup: Setup, cells: Sequence[Cell], prompts: Sequence[Prompt]) -> list[Any]:
    with ExitStack() as stack:
        readers = [_reader(stack.enter_context(_session(setup, cell))) for cell in cells]
        shared = prefill_together(readers, prompts)
        return [_end(shared.pop(0).reading()) for _ in cells]  # each cache goes before the next one is filled


def _end(reading: Reading) -> Any:
    """What a run comes to: new tokens, and what is kept of all."""
    tokens = reading.generate(NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    return tokens, reading.feed.cache.kept_positions()
