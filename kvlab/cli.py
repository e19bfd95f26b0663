"""The command line: `kvlab list` and `kvlab doctor`. Knows how to print, and leaves the rest to the library."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

EXAMPLES = """examples:
  kvlab list policies                      every policy, with what it does
  kvlab list models                        models that conf/model/ names
  kvlab list policies --import my_module   your own policies too
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
    except BrokenPipeError:
        return 0


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
        rows = [(name, summary(policy_class(name))) for name in policy_names()]
    else:
        from kvlab.models import model_names

        rows = list(model_names().items())
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}".rstrip())
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from kvlab.doctor import checks

    found = checks()
    width = max(len(check.name) for check in found)
    for check in found:
        print(f"{check.mark:<4}  {check.name:<{width}}  {check.text}")
    return int(any(check.failed for check in found))


def summary(cls: type) -> str:
    """First line of a class's docstring."""
    return (cls.__doc__ or "").strip().split("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
