"""`kvlab list` and `doctor`: what there is, and what this machine can run."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.commands.arguments import Add, add_own

if TYPE_CHECKING:
    from kvlab.policies import Policy


LISTS = ("policies", "codecs", "shares", "compositions", "models", "tasks", "experiments", "artefacts")


def register(add: Add) -> None:
    """Add them."""
    listing = add("list", _list, "list what there is, one name a line")
    listing.add_argument("what", choices=LISTS)
    listing.add_argument("--markdown", action="store_true", help="print a Markdown table, as in the README")
    add_own(listing)
    add("doctor", _doctor, "say what this machine can run, and why not")


def _list(options: argparse.Namespace) -> int:
    from kvlab.policies import import_modules

    import_modules(options.modules)
    if options.what == "policies" and options.markdown:
        from kvlab.policies import policy_class, policy_names

        print(policy_table([policy_class(name) for name in policy_names()]))
        return 0
    if options.what == "compositions":
        from kvlab.compositions import tables

        print(tables())
        return 0
    rows = _artefacts() if options.what == "artefacts" else _described(options.what, options.config_dir)
    if rows:
        print(_markdown([options.what, "what it is"], rows) if options.markdown else _columns(rows))
    return 0


def _described(what: str, own: str | None) -> list[tuple[str, str]]:
    """Choices of a config group with a line on each: a docstring's, a model's description, or a file's first comment."""
    from kvlab.choices import REGISTERED, choices

    group = {"policies": "policy"}.get(what, what.removesuffix("s"))
    found = choices(group, own)
    return [(name, summary(REGISTERED[group][1](name)) if path is None else _about(path)) for name, path in found.items()]


def _artefacts() -> list[tuple[str, str]]:
    """What calibrations have left, the newest first; then files that are damaged."""
    from kvlab.artefacts import artefacts, damaged

    found = [
        (one.key, f"{one.kind} of {one.about['model']}, {one.made[:10]}, {one.origin}; use: {one.use}") for one in artefacts()
    ]
    return [*found, *((path.stem, f"damaged: {fault}; delete {path}") for path, fault in damaged().items())]


def _about(path: Path) -> str:
    text = path.read_text()
    described = re.search(r"^description: (.*)$", text, re.M)
    comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#") and "@package" not in line]
    return described[1] if described else comments[0] if comments else ""


def _doctor(options: argparse.Namespace) -> int:
    from kvlab.doctor import checks

    found = checks()
    width = max(len(check.name) for check in found)
    for check in found:
        print(f"{check.mark:<4}  {check.name:<{width}}  {check.text}")
    return int(any(check.failed for check in found))


def policy_table(classes: Sequence[type[Policy]]) -> str:
    """Markdown table of policies, from what they declare."""
    rows = []
    for cls in classes:
        decides = "never" if not cls.evicts else "each step" if cls.when == "every_step" else "prompt end"
        scope = "layer" if cls.coupling == "layer" else "head, ragged" if cls.ragged else "head"
        needs = ", ".join(sorted(cls.needs)) or "nothing"
        question = "yes" if cls.query_aware else "no"
        rows.append((f"`{cls.name}`", summary(cls), decides, scope, needs, question, _source(cls)))
    head = ["policy", "what it keeps", "decides", "per", "needs", "last query steers it", "source"]
    return _markdown(head, rows)


def summary(cls: type) -> str:
    """First line of a class's docstring."""
    return (cls.__doc__ or "").strip().split("\n")[0]


def _source(cls: type) -> str:
    """Link to the paper that the policy's module names, if any."""
    found = re.search(r"arXiv (\d{4}\.\d{5})", sys.modules[cls.__module__].__doc__ or "")
    return f"[{found[1]}](https://arxiv.org/abs/{found[1]})" if found else ""


def _columns(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
