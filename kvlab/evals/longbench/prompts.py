"""LongBench's prompts: a template filled in, the middle of what is too long taken out, the chat template, the question's place.

As the benchmark's pred.py does it: a prompt of more than `max_length` tokens keeps its first and last half of that; each is
decoded to text, they are put together, and the text is tokenised anew, in a chat template where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.reading import Prompt
from kvlab.settings import SettingError

MINI_QUESTIONS = {
    "narrativeqa": "Question:",
    "qasper": "Question:",
    "multifieldqa_en": "Question:",
    "multifieldqa_zh": "问题：",
    "hotpotqa": "Question:",
    "2wikimqa": "Question:",
    "musique": "Question:",
    "dureader": "问题：",
    "qmsum": "Query:",
    "trec": "Question:",
    "triviaqa": "Passage:",
    "samsum": "Dialogue:",
    "lsht": "新闻内容：",
    "passage_retrieval_en": "The following is an abstract.",
    "passage_retrieval_zh": "下面是一个摘要",
}
"""Where the question begins in MiniLongBench's whole prompts: at the last of these words."""
V2_MARKS = {"$DOC$": "context", "$Q$": "question", **{f"$C_{letter}$": f"choice_{letter}" for letter in "ABCD"}}
"""What LongBench v2's template has in the places of a row's fields."""
OWN_V2_TEMPLATE = """Here is a text, and after it a question with four choices.

$DOC$

Question: $Q$
(A) $C_A$
(B) $C_B$
(C) $C_C$
(D) $C_D$

Reply with nothing but this sentence, the right letter in it: The correct answer is (LETTER)."""
"""For LongBench v2 where the benchmark's template isn't at hand; figures with it are not comparable."""


@dataclass(frozen=True)
class Filled:
    """A prompt's text, and at which character the question begins that follows the context; None where that isn't known."""

    text: str
    question: int | None = None


def fill(template: str, values: Mapping[str, Any]) -> Filled:
    """A template with {context} and {input}. Raises SettingError for a template with other fields.

    The question is what follows the context, where {input} is there.
    """
    before, mark, after = template.partition("{context}")
    fields = {name: values.get(name, "") for name in ("context", "input")}
    try:
        head, tail = (before + mark).format(**fields), after.format(**fields)
    except (KeyError, IndexError, ValueError) as error:
        raise SettingError(
            f"the template {template[:40]!r}... has other fields than {{context}} and {{input}}: {error}"
        ) from None
    return Filled(head + tail, len(head) if mark and "{input}" in after else None)


def fill_v2(template: str, values: Mapping[str, Any]) -> Filled:
    """LongBench v2's template. Marks are replaced one after the other, as the benchmark does."""
    before, mark, after = template.partition("$DOC$")
    found = []
    for part in (before + mark, after):
        for name, field in V2_MARKS.items():
            part = part.replace(name, str(values[field]).strip())
        found.append(part)
    return Filled("".join(found), len(found[0]) if mark else None)


def fill_mini(name: str, values: Mapping[str, Any]) -> Filled:
    """A prompt that is whole already."""
    text, word = str(values["prompt"]), MINI_QUESTIONS.get(name)
    place = text.rfind(word) if word else -1
    return Filled(text, place if place > 0 else None)


@dataclass(frozen=True)
class Middle:
    """A text of which the middle may have been taken out; `tokens` it had before."""

    filled: Filled
    tokens: int
    cut: bool


def without_middle(tokenizer: Any, filled: Filled, max_length: int, at_once: bool = False) -> Middle:
    """Take the middle out of a text of more than max_length tokens, those in front of every text counted.

    at_once  as LongBench v2: the halves are decoded together, and the second has the odd token
    """
    ids = tokenizer(filled.text).input_ids
    if len(ids) <= max_length:
        return Middle(filled, len(ids), False)
    half = max_length // 2
    parts = [ids[:half], ids[-half:]] if not at_once else [ids[:half] + ids[half - max_length :]]
    decoded = [tokenizer.decode(part, skip_special_tokens=True) for part in parts]
    first = len(decoded[0]) if not at_once else len(tokenizer.decode(ids[:half], skip_special_tokens=True))
    text = "".join(decoded)
    return Middle(Filled(text, _question_after_cut(filled, text, first)), len(ids), True)


def _question_after_cut(filled: Filled, text: str, first: int) -> int | None:
    """Where the question begins in a text whose first part ends at `first`: what is left of the question is its end."""
    if filled.question is None:
        return None
    if filled.question < first:  # the cut is inside the question
        return filled.question
    return max(first, len(text) - (len(filled.text) - filled.question))


def to_prompt(tokenizer: Any, filled: Filled, chat: bool) -> Prompt:
    """Token ids of a text, as one message of the chat template if wanted; its question marked, with what follows it."""
    whole = filled.text
    if chat:
        message = [{"role": "user", "content": whole}]
        whole = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    start = None
    if filled.question is not None:
        asked = filled.text[filled.question :].strip()  # templates may trim messages
        start = whole.rfind(asked) if asked else -1
    ids = tuple(tokenizer(whole, add_special_tokens=not chat).input_ids)
    question = 0 if start is None or start < 0 else _tokens_from(tokenizer, whole, start, chat)
    return Prompt(ids, question=min(question, len(ids)))


def _tokens_from(tokenizer: Any, text: str, start: int, chat: bool) -> int:
    """How many tokens of a text reach beyond a character."""
    if not getattr(tokenizer, "is_fast", False):
        return len(tokenizer(text[start:], add_special_tokens=False).input_ids)
    offsets = tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True).offset_mapping
    first = next((number for number, (_, end) in enumerate(offsets) if end > start), len(offsets))
    return len(offsets) - first
