"""The command line: `kvlab list` and `kvlab doctor`. Knows how to print, and leaves the rest to the library."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlab.policies import Policy

EXAMPLES = """examples:
  kvlab list policies                      every policy, with what it keeps
  kvlab list policies --markdown           the same as a table, with sources and properties
  kvlab list policies --import my_module   your own policies too
  kvlab list models                        models that conf/model/ names
  kvlab doctor                             what this machine can run, and why not
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 where something failed, 2 for a command that can't be."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except ValueError as error:  # a user's mistake: one line that says what to change
        print(f"kvlab: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlab",
        description="Study what KV-cache eviction and compression do to language models.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="list policies or models, one name a line")
    listing.add_argument("what", choices=["policies", "models"])
    listing.add_argument("--markdown", action="store_true", help="print a Markdown table, as in the README")
    listing.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help="import your module")
    listing.set_defaults(run=_list)

    doctor = commands.add_parser("doctor", help="say what this machine can run, and why not")
    doctor.set_defaults(run=_doctor)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from kvlab import __version__

        print(f"kvlab {__version__}")
        parser.exit()


def _list(options: argparse.Namespace) -> int:
    if options.what == "policies":
        from kvlab.policies import import_modules, policy_class, policy_names

        import_modules(options.modules)
        classes = [policy_class(name) for name in policy_names()]
        print(policy_table(classes) if options.markdown else _columns((cls.name, summary(cls)) for cls in classes))
    else:
        from kvlab.models import model_names

        rows = model_names().items()
        print(_markdown(["model", "what it is"], rows) if options.markdown else _columns(rows))
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
