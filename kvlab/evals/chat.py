"""From a context and a question to a prompt's token ids, in the model's chat template where it has one."""

from __future__ import annotations

from typing import Any

from kvlab.reading import Prompt
from kvlab.settings import SettingError

_MARK = "kvlabQuestionStandsHere"
"""Rendered in the question's place, so that it is found however often its words occur elsewhere."""


def uses_chat(tokenizer: Any, wanted: bool | None) -> bool:
    """Whether prompts go into the chat template: as wanted, else where there is one. Raises SettingError if there is none."""
    there = bool(getattr(tokenizer, "chat_template", None))
    if wanted and not there:
        raise SettingError("task.chat=true, but this model's tokenizer has no chat template: use task.chat=false")
    return there if wanted is None else wanted


def make_prompt(tokenizer: Any, context: str, question: str = "", answer_start: str = "", chat: bool = False) -> Prompt:
    """A prompt whose last part is the question, with what follows it: template, start of the answer.

    Between context and question stands a blank line. They are tokenised apart, so that questions on one context share its ids.
    Raises SettingError for a prompt without text, and for a template that changes it.
    """
    question = question.strip()
    if question and context:
        context = context.rstrip() + "\n\n"
    if chat:
        before, after = _rendered(tokenizer, context, question)
        after += answer_start
        ids = tokenizer(before, add_special_tokens=False).input_ids
    else:
        after = (question + " " + answer_start).strip() if question else answer_start
        ids = tokenizer(context).input_ids if context else list(start_ids(tokenizer))
    tail = tokenizer(after, add_special_tokens=False).input_ids if after else []
    if not ids and not tail:
        raise SettingError("a prompt has no text")
    return Prompt((*ids, *tail), question=len(tail) if question else 0)


def _rendered(tokenizer: Any, context: str, question: str) -> tuple[str, str]:
    """The template's text up to the question, and from there on; all of it and nothing where there is no question."""
    content = context + (_MARK if question else "")
    whole = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    if not question:
        return whole, ""
    before, mark, after = whole.partition(_MARK)
    if not mark:
        raise SettingError("this model's chat template changes the text of messages: use task.chat=false")
    return before, question + after


def start_ids(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer puts in front of a text, such as a BOS token, without which some models collapse."""
    ids = tokenizer("").input_ids
    return tuple(token for token in ids if token != tokenizer.eos_token_id or token == tokenizer.bos_token_id)


def answer_ids(tokenizer: Any, text: str, after: str = "") -> tuple[int, ...]:
    """Token ids of an answer that follows `after`: with a space between them where `after` doesn't end in one.

    Tokenised together where the ids of `after` stay as they are: alone, an answer may begin otherwise (a space more in
    tokenizers that put one in front of every text).
    """
    space = " " if after and not after[-1].isspace() and not text[:1].isspace() else ""
    before = tokenizer(after, add_special_tokens=False).input_ids
    whole = tokenizer(after + space + text, add_special_tokens=False).input_ids
    if after and whole[: len(before)] == before and len(whole) > len(before):
        return tuple(whole[len(before) :])
    return tuple(tokenizer(space + text, add_special_tokens=False).input_ids)
