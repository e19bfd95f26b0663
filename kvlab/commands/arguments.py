"""Arguments that commands have in common, and what values they take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

Add = Callable[..., argparse.ArgumentParser]
"""Makes a command of a name, what runs it, a line on it, and examples."""


def add_text(command: argparse.ArgumentParser, *, by_default: bool = True) -> None:
    """A text to measure on, and how much of it."""
    tokens, texts = (1024, 1) if by_default else (None, None)
    said = ("1024", "1") if by_default else ("as the method says", "as the method says")
    command.add_argument("--file", help="a text, or a table with a column `text` (default: prose that comes with Python)")
    command.add_argument("--tokens", type=positive, default=tokens, help=f"of each text (default: {said[0]})")
    command.add_argument(
        "--texts", type=positive, default=texts, help=f"pieces that are cut from the text (default: {said[1]})"
    )


def add_settings(command: argparse.ArgumentParser, whose: str) -> None:
    """`-o NAME=VALUE`, read by `settings_of`."""
    command.add_argument("-o", dest="settings", action="append", default=[], metavar="NAME=VALUE", help=f"an option of {whose}")


def add_model(command: argparse.ArgumentParser) -> None:
    """A model, its device and dtype."""
    command.add_argument(
        "--model", default="smollm2-135m", help="a configured name, a folder or a hub id (default: smollm2-135m)"
    )
    command.add_argument("--device", help="cpu, cuda (default: as the model says)")
    command.add_argument("--dtype", help="float32, bfloat16, float16 (default: as the model says)")


def add_own(command: argparse.ArgumentParser) -> None:
    """The user's own config files and modules."""
    command.add_argument("--config-dir", metavar="DIR", help="your own config files: DIR/model/x.yaml is model=x")
    command.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import your policies and tasks (.py file)",
    )


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """What `-o` gives. Raises ValueError where one isn't NAME=VALUE."""
    if wrong := next((setting for setting in options.settings if "=" not in setting), None):
        raise ValueError(f"-o {wrong}: use NAME=VALUE")
    return dict(setting.split("=", 1) for setting in options.settings)


def check_what(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a name that isn't known."""
    from kvlab.hints import did_you_mean

    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"{kind} {name}: there is no such {kind}{hint}; there are {', '.join(known)}")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number of at least 1")
    return int(text)


def port(text: str) -> int:
    """A number that a port may have; 0: any."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number from 0 to 65535")
    return int(text)


def lengths(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    return tuple(positive(part) for part in text.split(","))


def share(text: str) -> float:
    """A number above 0, at most 1."""
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number above 0, at most 1")
    return ratio


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)
