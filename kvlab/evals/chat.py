"""From a context and a question to a prompt's token ids, in the model's chat template where it has one."""

from __future__ import annotations

from typing import Any

from kvlab.reading import Prompt
from kvlab.settings import SettingError


def uses_chat(tokenizer: Any, wanted: bool | None) -> bool:
    """Whether prompts go into the chat template: as wanted, else where there is one. Raises SettingError if there is none."""
    there = bool(getattr(tokenizer, "chat_template", None))
    if wanted and not there:
        raise SettingError("task.chat=true, but this model's tokenizer has no chat template: use task.chat=false")
    return there if wanted is None else wanted


def make_prompt(tokenizer: Any, context: str, question: str = "", answer_start: str = "", chat: bool = False) -> Prompt:
    """A prompt whose last part is the question, with what follows it: template, start of the answer.

    Context and question are tokenised apart, so that questions on one context share its ids. Raises SettingError for a
    prompt without text.
    """
    question = question.strip()
    if chat:
        messages = [{"role": "user", "content": context + question}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + answer_start
        cut = whole.rindex(question) if question else len(whole)
        before, after = whole[:cut], whole[cut:]
        ids = tokenizer(before, add_special_tokens=False).input_ids
    else:
        after = (question + " " + answer_start).strip() if question else answer_start
        ids = tokenizer(context).input_ids if context else list(start_ids(tokenizer))
    tail = tokenizer(after, add_special_tokens=False).input_ids if after else []
    if not ids and not tail:
        raise SettingError("a prompt has no text")
    return Prompt((*ids, *tail), question=len(tail) if question else 0)


def start_ids(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer puts in front of a text, such as a BOS token, without which some models collapse."""
    ids = tokenizer("").input_ids
    return tuple(token for token in ids if token != tokenizer.eos_token_id or token == tokenizer.bos_token_id)


def answer_ids(tokenizer: Any, text: str, after: str = "") -> tuple[int, ...]:
    """Token ids of an answer that follows `after`: with the space between them where `after` doesn't end in one."""
    space = " " if after and not after[-1].isspace() and not text[:1].isspace() else ""
    return tuple(tokenizer(space + text, add_special_tokens=False).input_ids)
