"""The command line: `kvlab run`, `table`, `dashboard`, `score`, `list`, `bench`, `analyze` and others. Prints, no more."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence

from kvlab.commands import listing, measuring, running, showing

EXAMPLES = """examples:
  kvlab run policy=h2o budget.ratio=0.2 task=passkey         one cell
  kvlab run -m policy=full,h2o budget.ratio=0.1,0.2          a sweep, with the comparison at its end
  kvlab table outputs/runs --format latex                    the same table again
  kvlab dashboard                                            the same as one HTML page, with samples
  kvlab reproduce h2o/table2                                 a paper's table, ours beside theirs
  kvlab list policies                                        what there is
  kvlab score longbench pred/my-model                        a benchmark's own output files
  kvlab lm_eval --model kvlab --model_args policy=h2o,ratio=0.2 --tasks piqa    lm-eval-harness drives kvlab
  kvlab bench decode                                         speed against transformers' own cache
  kvlab analyze heads                                        what a model's attention looks like
  kvlab calibrate qaq                                        what a method must know of a model
  kvlab doctor                                               what this machine can run, and why not
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 where something failed, 2 for a command that can't be."""
    if "OMP_WAIT_POLICY" not in os.environ:  # before torch loads OpenMP: its threads must soon leave cores to the kernels
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    options, rest = _parser().parse_known_args(arguments)
    if rest and not options.takes_rest:
        way = f" (settings: -o {rest[0]})" if hasattr(options, "settings") and re.match(r"\w+=", rest[0]) else ""
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}{way}")
    options.rest = rest
    try:
        return options.run(options)
    except ValueError as error:  # a user's mistake: one line that says what to change
        if "KVLAB_DEBUG" in os.environ:
            raise
        print(f"kvlab: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `kvlab table | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that can't be read
        if "KVLAB_DEBUG" in os.environ:
            raise
        print(f"kvlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        same = "the same command without --force" if getattr(options, "force", False) else "the same command"
        print(f"kvlab: interrupted; nothing finished is lost, {same} goes on from here", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlab",
        description="Study what KV-cache eviction and compression do to language models.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, epilog: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=epilog,
            formatter_class=parser.formatter_class,
            allow_abbrev=False,
        )
        command.set_defaults(run=run, parser=command, takes_rest=name in ("run", "lm_eval", "reproduce"))
        return command

    for group in (running, showing, listing, measuring):
        group.register(add)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from kvlab import __version__

        print(f"kvlab {__version__}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
