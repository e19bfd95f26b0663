"""Every policy with every codec, and every codec under every protocol: what runs, and why the rest is refused.

Nothing here decides anything: the answers are those that policies, codecs and protocols give, asked of all pairs. Sharing
layers goes with all of them. docs/compositions.md is made of it (`kvlab list compositions --markdown`).
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvlab.budget import Budget
from kvlab.codecs import Codec, chain, make_codec
from kvlab.parts import check_codec
from kvlab.policies import Policy, make_policy, policy_class, policy_names
from kvlab.protocol import PROTOCOLS

CHOICES: dict[str, tuple[Codec, ...]] = {
    "int4": (make_codec("int"),),
    "kivi2": (make_codec("kivi"),),
    "decoquant4": (make_codec("decoquant"),),
    "qaq": (make_codec("qaq"),),
    "think": (make_codec("think"),),
    "eigen": (make_codec("eigen"),),
    "think+int4": (make_codec("think"), make_codec("int")),
    "think+kivi2": (make_codec("think"), make_codec("kivi")),
    "think+kivi4": (make_codec("think"), make_codec("kivi", bits=4)),
    "eigen+int4": (make_codec("eigen"), make_codec("int")),
    "eigen+kivi2": (make_codec("eigen"), make_codec("kivi")),
}
"""Codecs alone, and the chains that papers name, by what tables call them."""
PROTOCOL_POLICIES = ("full", "snapkv, grow", "knorm")
"""One that drops nothing, one that drops when a prompt ends and one that drops wherever it may, to ask protocols with."""
MARK = "runs"


@dataclass(frozen=True)
class Answer:
    """row, column  of the table; why: None where it runs, else what is said to the user"""

    row: str
    column: str
    why: str | None


def every_policy() -> dict[str, Policy]:
    """Policies at their defaults, and those that may keep all decoded tokens also so, by what tables call them."""
    found = {}
    for name in policy_names():
        found[name] = make_policy(name)
        if hasattr(policy_class(name), "after_prompt"):
            found[f"{name}, grow"] = make_policy(name, after_prompt="grow")
    return found


def of_policies() -> Iterator[Answer]:
    """Every policy with every choice of codecs."""
    for row, policy in every_policy().items():
        for column, codecs in CHOICES.items():
            yield Answer(row, column, _why(partial(_one(codecs).check_policy, policy)))


def of_protocols() -> Iterator[Answer]:
    """Every choice of codecs under every protocol, with a policy that drops nothing and with one that does."""
    budget = Budget(ratio=0.5)
    for name, cls in PROTOCOLS.items():
        for row in PROTOCOL_POLICIES:
            protocol, policy = cls(), every_policy()[row]
            limit = budget if policy.evicts else Budget()
            against = _why(partial(protocol.check, policy, limit))
            for column, codecs in CHOICES.items():
                why = against or _why(partial(check_codec, _one(codecs), policy, limit, protocol))
                yield Answer(f"{name}, {row}", column, why)


def _one(codecs: Sequence[Codec]) -> Codec:
    found = chain(codecs)
    assert found is not None
    return found


def _why(ask: Callable[[], None]) -> str | None:
    """What is said against it."""
    try:
        ask()
    except ValueError as error:
        return str(error)
    return None


def as_markdown(answers: Sequence[Answer], corner: str) -> str:
    """A table, with a letter for each reason and the reasons below it."""
    columns = list(dict.fromkeys(answer.column for answer in answers))
    rows: dict[str, list[str]] = {}
    letters: dict[str, str] = {}
    for answer in answers:
        mark = MARK if answer.why is None else letters.setdefault(_general(answer), string.ascii_lowercase[len(letters)])
        rows.setdefault(answer.row, []).append(mark)
    lines = [f"| {corner} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| `{row}` | {' | '.join(marks)} |" for row, marks in rows.items()]
    return "\n".join([*lines, "", *(f"- **{letter}**: {reason}" for reason, letter in letters.items())])


def _general(answer: Answer) -> str:
    """A reason without the names of its pair, so that pairs refused for the same reason share it."""
    assert answer.why is not None
    text, codecs = answer.why, CHOICES[answer.column]
    for name in (_one(codecs).label, *(codec.label for codec in codecs), *(codec.name for codec in codecs)):
        text = text.replace(f"codec={name}:", "this codec:").replace(f"codec {name} ", "this codec ")
    for name in answer.row.split(", "):
        text = text.replace(f"policy {name} ", "this policy ").replace(f"protocol {name} ", "this protocol ")
    return text


def tables() -> str:
    """Both tables, as docs/compositions.md has them."""
    return "\n\n".join([as_markdown(list(of_policies()), "policy"), as_markdown(list(of_protocols()), "protocol, policy")])
