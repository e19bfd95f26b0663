"""Multiple choice: one shared context read once and its choices scored on forks, against reading it anew for each choice."""

from __future__ import annotations

import torch

from kvlab.bench.setup import Setup
from kvlab.bench.timing import Line, Work, alternate
from kvlab.protocol import PromptProtocol, Protocol, Reader, Stream
from kvlab.reading import Prompt

CONTEXT, CHOICES, LENGTHS = 500, 4, (4, 8, 12, 16)
"""Tokens of a context, choices of a question, and tokens of each."""
TARGET = 2.5


def choices(setup: Setup) -> list[Line]:
    """A batch of questions, under full cache after a prompt and under h2o from the first token on."""
    return [_line(setup, policy, protocol) for policy, protocol in (("full", PromptProtocol()), ("h2o", Stream()))]


def _line(setup: Setup, policy: str, protocol: Protocol) -> Line:
    rows = max(1, setup.batch // 2)
    ids = setup.ids(CONTEXT + sum(LENGTHS))[0].tolist()
    # Contexts that differ from their first token on, so that nothing is shared between questions.
    prompts = [Prompt(tuple(ids[row:CONTEXT] + ids[:row]), name=str(row)) for row in range(rows)]
    starts = [CONTEXT + sum(LENGTHS[:number]) for number in range(CHOICES)]
    options = [tuple(ids[start : start + size]) for start, size in zip(starts, LENGTHS, strict=True)]
    found: dict[str, list[float]] = {}

    with setup.session(policy) as session, torch.inference_mode():
        reader = Reader(session, protocol)

        def shared() -> None:
            scored = reader.read(prompts).score_choices([options] * rows)
            found["shared"] = [choice.logprob for question in scored for choice in question]

        def apart() -> None:
            by_choice = [reader.read(prompts).score([option] * rows) for option in options]
            found["apart"] = [by_choice[number][row].logprob for row in range(rows) for number in range(CHOICES)]

        works: dict[str, Work] = {"shared": shared, "apart": apart}
        seconds = alternate(works, max(1, setup.repeats // 2), setup.device)
    gap = max(abs(a - b) for a, b in zip(found["shared"], found["apart"], strict=True))
    what = f"{policy}, {protocol.name}: {CHOICES} choices of {rows} contexts of {CONTEXT} tokens, read once over four times"
    target = TARGET if setup.usual else None
    return Line(what, seconds["shared"], seconds["apart"], target, True, note=f"log-probabilities at most {gap:.0e} apart")
