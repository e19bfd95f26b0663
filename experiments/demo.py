"""The embedded model reads a real text of about 1,000 tokens and answers a question on it, with every policy at 20 %.

    python experiments/demo.py [--policies h2o,snapkv] [--ratio 0.2] [--new-tokens 40]

The text is read first and evicted to the budget before the question comes, so no policy sees the question while it
decides what to keep of the text. Prints a Markdown table. One answer proves nothing about a policy: this shows that caches
really shrink and what that does to one answer.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch

from kvlab import Budget, PolicyError, attach, load_model, make_policy, policy_names

TOPIC = "objects"
QUESTION = "According to the text, which three things does every object have?"


@dataclass(frozen=True)
class Row:
    """One policy's line of the table. Bytes are of keys and values; `answer_s` includes reading the question."""

    policy: str
    kept: float
    seen: int
    kv_bytes: int
    full_bytes: int
    read_s: float
    answer_s: float
    new_tokens: int
    answer: str


def prompt_ids(tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (1, tokens) of the text, and of the question with the start of the answer, in the model's chat template."""
    text = f"Read this text.\n\n{topics[TOPIC]}\n\n"
    chat = [{"role": "user", "content": text + QUESTION}]
    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    cut = whole.index(QUESTION)
    parts = (tokenizer(part, return_tensors="pt", add_special_tokens=False).input_ids for part in (whole[:cut], whole[cut:]))
    context, question = parts
    return context, question


def answer(model: Any, tokenizer: Any, name: str, budget: Budget, new_tokens: int) -> Row:
    """Let one policy read the text, then answer."""
    context, question = prompt_ids(tokenizer)
    with attach(model, policy=make_policy(name), budget=budget, tokenizer=tokenizer) as session:
        cache = session.new_cache()
        start = time.perf_counter()
        model(context, cache=cache, logits_to_keep=1)
        read_s = time.perf_counter() - start
        ids = torch.cat([context, question], 1)
        start = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=new_tokens, do_sample=False)
        answer_s = time.perf_counter() - start
        memory = session.memory(cache)
    new = out[0, ids.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    return Row(
        policy=name,
        kept=memory.kept_len.float().mean().item(),
        seen=int(cache.seen_len),
        kv_bytes=memory.kv_bytes,
        full_bytes=memory.kv_bytes_full,
        read_s=read_s,
        answer_s=answer_s,
        new_tokens=len(new),
        answer=" ".join(text.split()),
    )


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| policy | kept / seen tokens | K and V held / full (MB) | reads in (s) | answers in (s) | new tokens | answer |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        held = f"{row.kv_bytes / 1e6:.1f} / {row.full_bytes / 1e6:.1f}"
        times = f"{row.read_s:.2f} | {row.answer_s:.2f} | {row.new_tokens}"
        lines.append(f"| {row.policy} | {row.kept:.0f} / {row.seen} | {held} | {times} | {row.answer} |")
    return "\n".join(lines)


def show_progress(text: str) -> None:
    """Replace the progress line, where somebody watches it."""
    if sys.stderr.isatty():
        print(f"\r{text:<32}\r{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="any model that load_model knows (default: %(default)s)")
    parser.add_argument("--policies", help="comma-separated names (default: all, the full cache first)")
    parser.add_argument("--ratio", type=float, default=0.2, help="share of the tokens that may be held (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=40, help="longest answer (default: %(default)s)")
    options = parser.parse_args()
    names = options.policies.split(",") if options.policies else sorted(policy_names(), key=lambda name: (name != "full", name))
    try:
        budget = Budget(ratio=options.ratio)
        for name in names:
            make_policy(name)
        model, tokenizer = load_model(options.model)
    except (PolicyError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    torch.set_grad_enabled(False)
    model(prompt_ids(tokenizer)[1])  # warm up, so that the first policy isn't charged for it
    rows = []
    for number, name in enumerate(names, 1):
        show_progress(f"[{number}/{len(names)}] {name}")
        rows.append(answer(model, tokenizer, name, budget, options.new_tokens))
    show_progress("")
    length = prompt_ids(tokenizer)[0].shape[1]
    print(f"{options.model}, budget {options.ratio:.0%}: reads {length} tokens, and only then the question: {QUESTION}\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
