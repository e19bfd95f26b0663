"""Log-probabilities of a known text under per-step eviction from its first token on: all steps of a layer at once, against
one forward pass for each token, and against a plain forward pass without eviction."""

from __future__ import annotations

import torch

from kvlab.bench.setup import Setup
from kvlab.bench.timing import Line, Work, alternate
from kvlab.protocol import Reader, Stream
from kvlab.reading import Prompt

LENGTH = 1024
STEP_TARGET, PLAIN_TARGET = 15.0, 1.2


def loglik(setup: Setup) -> list[Line]:
    """h2o over 1,024 tokens."""
    ids = setup.ids(LENGTH)
    found: dict[str, list[float]] = {}

    def plain() -> None:
        logits = setup.model(ids, use_cache=False).logits[0, :-1].float()
        found["plain"] = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()

    def evicting(exact: str) -> Work:
        def run() -> None:
            text = tuple(ids[0].tolist())
            with setup.session("h2o") as session:
                reader = Reader(session, Stream(exact=exact))  # type: ignore[arg-type]
                reading = reader.read([Prompt(text[:1], text_len=len(text))])
                found[exact] = reading.score([text[1:]])[0].logprobs

        return run

    with torch.inference_mode():
        both = alternate({"scan": evicting("scan"), "plain": plain}, 2 * setup.repeats, setup.device)
        slow = alternate({"scan": evicting("scan"), "step": evicting("step")}, max(1, setup.repeats // 2), setup.device, 0)
    apart = max(abs(one - other) for one, other in zip(found["scan"], found["step"], strict=True))
    means = {name: -sum(values) / len(values) for name, values in found.items()}
    what = f"h2o at {setup.ratio:.0%}, each of {LENGTH} tokens"
    same = f"log-probabilities at most {apart:.0e} apart, their means {abs(means['scan'] - means['step']):.0e}"
    loss = f"loss {means['scan']:.4f}, without eviction {means['plain']:.4f}"
    by_step, by_plain = (STEP_TARGET, PLAIN_TARGET) if setup.usual else (None, None)
    return [
        Line(f"{what}: scan over token by token", slow["scan"], slow["step"], by_step, True, note=same),
        Line(f"{what}: scan over a plain forward pass", both["scan"], both["plain"], by_plain, note=loss),
    ]
