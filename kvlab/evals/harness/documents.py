"""Raw rows as documents with the columns of the data set that lm-eval's own task reads; one function for each benchmark.

Each is given a row's fields, gives the document's columns, and raises BadRow for what can't be used. Texts are left as they
are: what is stripped, joined and put into prompts is lm-eval's matter.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvlab.evals.rows import BadRow, missing

Values = Mapping[str, Any]
Doc = dict[str, Any]
Convert = Callable[[Values], Doc]


def _text(row: Values, name: str) -> str:
    """A field that must be text with something in it."""
    if wrong := missing(row, name):
        raise BadRow(wrong)
    if not isinstance(row[name], str) or not row[name].strip():
        raise BadRow(f"the field {name!r} must be text that isn't empty")
    try:
        row[name].encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow(f"the field {name!r} has half a character (a lone surrogate)") from None
    return str(row[name])


def _texts(row: Values, *names: str) -> Doc:
    return {name: _text(row, name) for name in names}


def _one_of(row: Values, name: str, known: Sequence[Any]) -> int:
    """Number of a field's value among the known ones. True is not 1 here."""
    if name not in row:
        raise BadRow(missing(row, name))
    value = row[name]
    found = [number for number, other in enumerate(known) if other == value and type(other) is type(value)]
    if not found:
        raise BadRow(f"{name}={value!r} isn't among the choices: {', '.join(map(repr, known))}")
    return found[0]


# --------------------------------------------------------------------------------------------------- fields as they are


def copa(row: Values) -> Doc:
    """SuperGLUE's COPA: `premise`, `choice1`, `choice2`, `question`, `label`."""
    doc = _texts(row, "premise", "choice1", "choice2", "question")
    _one_of(row, "question", ("cause", "effect"))
    return {**doc, "label": _one_of(row, "label", (0, 1))}


def piqa(row: Values) -> Doc:
    """PIQA: `goal`, `sol1`, `sol2`, and `label` as it stands in the file of labels."""
    return {**_texts(row, "goal", "sol1", "sol2"), "label": _one_of(row, "label", ("0", "1"))}


def glue_rte(row: Values) -> Doc:
    """RTE with GLUE's columns, from SuperGLUE's."""
    doc = sglue_rte(row)
    return {"sentence1": doc["premise"], "sentence2": doc["hypothesis"], "label": doc["label"]}


def sglue_rte(row: Values) -> Doc:
    """SuperGLUE's RTE; the label becomes its number."""
    label = _one_of(row, "label", ("entailment", "not_entailment"))
    return {**_texts(row, "premise", "hypothesis"), "label": label}


def cb(row: Values) -> Doc:
    """SuperGLUE's CommitmentBank; the label becomes its number."""
    label = _one_of(row, "label", ("entailment", "contradiction", "neutral"))
    return {**_texts(row, "premise", "hypothesis"), "label": label}


def boolq(row: Values) -> Doc:
    """SuperGLUE's BoolQ; the label becomes 0 or 1."""
    return {**_texts(row, "question", "passage"), "label": _one_of(row, "label", (False, True))}


def lambada(row: Values) -> Doc:
    """LAMBADA: `text`, whose last word is asked for."""
    text = _text(row, "text")
    words = text.split(" ")
    if not words[-1].strip() or not "".join(words[:-1]).strip():
        raise BadRow("the text must be words with a space before the last, and none after it")
    return {"text": text}


def gsm8k(row: Values) -> Doc:
    """GSM8K: `question`, and `answer` that ends with `#### ` and a number."""
    doc = _texts(row, "question", "answer")
    if not re.search(r"#### -?[\d.,]*\d", doc["answer"]):
        raise BadRow("the answer must end with '#### ' and a number")
    return doc


def wikitext(row: Values) -> Doc:
    """WikiText's articles: `page`, its title on the first line."""
    page = _text(row, "page")
    if not "".join(page.split("\n")[1:]).strip():
        raise BadRow("an article without text")
    return {"page": page}


# ------------------------------------------------------------------------------------------------- fields put together


def mmlu(subject: str) -> Convert:
    """MMLU's rows of one subject: `question`, `A` to `D`, and `answer`, a letter."""

    def convert(row: Values) -> Doc:
        question, choices = _text(row, "question"), [_text(row, letter) for letter in "ABCD"]
        return {"question": question, "subject": subject, "choices": choices, "answer": _one_of(row, "answer", "ABCD")}

    return convert


def hellaswag(row: Values) -> Doc:
    """HellaSwag's rows without their activity: `question` (the context), `choices` by letter, `answer`.

    lm-eval begins the unfinished sentence at the context's end with a capital letter, and finds it as `ctx_b`. It is all
    after the last full stop, if that begins small; contexts from WikiHow are whole sentences.
    """
    context, choices = _text(row, "question"), row.get("choices")
    if not isinstance(choices, dict) or list(choices) != list("ABCD"):
        raise BadRow("'choices' must hold the four choices A, B, C and D")
    endings = [_text(choices, letter) for letter in choices]
    label = _one_of(row, "answer", "ABCD")
    parts = re.fullmatch(r"(?s)(.*[.!?]) ([a-z][^.!?]*)", context)
    start, rest = (parts[1], parts[2]) if parts else (context, "")
    return {"activity_label": "", "ctx_a": start, "ctx_b": rest, "ctx": context, "endings": endings, "label": str(label)}


# -------------------------------------------------------------------------- fields taken out of an instruction's text


ASKS = "Please choose the correct answer to the question: "
FILLS = "Please choose the correct answer to fill in the blank to complete the given sentence: "


def _question(row: Values) -> tuple[str, list[str], int]:
    """Question, choices and the right one's number, of an instruction that lists `Answer1: ... Answer2: ...`."""
    parts = re.fullmatch(rf"(?s){ASKS}(.+?)\n\nAnswer1: ?(.*)\n\nAnswer format: (\S+)", _text(row, "instruction"))
    if not parts:
        raise BadRow(f"the instruction must be '{ASKS}', the question, 'Answer1: ...' and so on, 'Answer format: ...'")
    choices, named = [parts[2]], parts[3].split("/")
    for number in range(2, len(named) + 1):
        last, mark, rest = choices.pop().partition(f" Answer{number}: ")
        choices += [last, rest] if mark else [last]
    if len(choices) < 2 or len(choices) != len(named):
        raise BadRow(f"the instruction must have two choices or more, and as many as its 'Answer format' ({parts[3]})")
    if not all(choice.strip() for choice in choices):
        raise BadRow("the instruction has a choice without text")
    return parts[1], choices, _one_of(row, "answer", [f"answer{number + 1}" for number in range(len(choices))])


def openbookqa(row: Values) -> Doc:
    """OpenBookQA, out of an instruction."""
    question, choices, right = _question(row)
    return {"question_stem": question, **_lettered(choices, right)}


def arc(row: Values) -> Doc:
    """ARC, out of an instruction. Its choices have letters, also where the original numbers them."""
    question, choices, right = _question(row)
    return {"question": question, **_lettered(choices, right)}


def _lettered(choices: list[str], right: int) -> Doc:
    labels = list(string.ascii_uppercase[: len(choices)])
    return {"choices": {"text": choices, "label": labels}, "answerKey": labels[right]}


def winogrande(row: Values) -> Doc:
    """WinoGrande, out of an instruction: `sentence` with a blank, `option1`, `option2`, `answer` 1 or 2."""
    layout = rf"(?s){FILLS}(.+)\n\nOption1: (.+) Option2: (.+) Answer format: option1/option2"
    parts = re.fullmatch(layout, _text(row, "instruction"))
    if not parts or parts[1].count("_") != 1:
        raise BadRow(f"the instruction must be '{FILLS}', a sentence with one blank _, 'Option1: ... Option2: ...'")
    if not (parts[2].strip() and parts[3].strip()):
        raise BadRow("the instruction has an option without text")
    right = _one_of(row, "answer", ("option1", "option2"))
    return {"sentence": parts[1], "option1": parts[2], "option2": parts[3], "answer": str(right + 1)}


def mathqa(row: Values) -> Doc:
    """MathQA, out of an instruction: `Problem`, `options` in one text (`a ) 38 , b ) 27 , ...`), `correct`, a letter.

    The file has the letters a to f of all options in capitals; the original knows only small ones.
    """
    problem, mark, options = _text(row, "instruction").partition(" The options: ")
    options = options.lower()
    if not mark or not problem.strip() or not re.search(r"a \) .+, .*b \) .+, .*c \) .+, .*d \) .+, .*e \) .", options):
        raise BadRow("the instruction must be a problem, ' The options: ', and 'A ) ... , B ) ...' to E")
    return {"Problem": problem, "options": options, "correct": "abcde"[_one_of(row, "answer", "ABCDE")]}
