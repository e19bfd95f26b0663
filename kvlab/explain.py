"""Hydra's errors in one line that says what to change."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException

from kvlab.choices import choices, default_choice, settings_of
from kvlab.hints import did_you_mean
from kvlab.parts import GROUPS, KEYS

OWN_WAY = {
    "model": "; a folder, .gguf file or hub id: model=path model.path={name}",
    "policy": "; your own: --import FILE",
    "task": "; your own: --import FILE",
}
"""What else a choice that is unknown may have meant."""
NO_CHOICE = "Config group override must be a string"
"""What Hydra says where a group is given nothing; the one complaint that isn't an exception of its own."""


def explain(error: Exception, arguments: Sequence[str], own: str | None = None) -> str:
    """What was wrong with a command line, and what to change, from Hydra's error."""
    text = str(error)
    if isinstance(error, MissingConfigException) and (group := _missing_group(text)):
        name, known = group[1], choices(group[0], own)
        own_way = OWN_WAY.get(group[0], "").format(name=name)
        return f"{group[0]}={name}: there is no such choice{did_you_mean(name, known)}; choices: {', '.join(known)}{own_way}"
    if found := re.search(r"Could not override '([\w./@-]+)'", text):
        return _unknown_key(found[1], arguments, own)
    if found := re.search(
        r"extraneous input|mismatched input|no viable alternative|token recognition|missing EQUAL|NoViableAlt", text
    ):
        return (
            f"{_unparsable(arguments)}: not of the form KEY=VALUE without blanks; several values as KEY=a,b, a list as "
            "KEY=[a,b], quotes around values with special characters, as in 'key=\"a=b\"'"
        )
    if found := re.search(r"Ambiguous value for argument '([^']*)'", text):
        return f"{found[1]}: --cfg and --info show one config, so give one value"
    if NO_CHOICE in text:
        culprit = next((a for a in arguments if _no_choice(a, own)), "a group")
        which, _, value = culprit.partition("=")
        way = f"; for a number: budget=tokens budget.tokens={value}" if which == "budget" and value.isdigit() else ""
        return f"{culprit}: choose one of {', '.join(choices(which, own))}{way}"
    if found := re.search(r"Multiple values for ([\w./]+)", text):
        return f"{found[1]} is given more than once: give it once, several values with commas between ({found[1]}=a,b)"
    if found := re.search(r"Error merging override (\S+)", text):
        return f"{found[1]}: {_last_line(text)}"
    return " ".join(text.split())


def _missing_group(text: str) -> tuple[str, str] | None:
    found = re.search(r"(?:In '[^']*': )?Could not (?:find|load) '?([\w]+)/([^'\s]*)'?", text)
    return (found[1], found[2].removesuffix(".yaml")) if found and found[1] in GROUPS else None


def _unknown_key(key: str, arguments: Sequence[str], own: str | None) -> str:
    """A key that the config does not have: a group misspelt, or a setting that its choice lacks."""
    group, _, setting = key.partition(".")
    if not setting or group not in GROUPS:
        return f"{key}: there is no such setting{did_you_mean(group, KEYS)}; settings: {', '.join(KEYS)}"
    if group == "budget" and setting in ("ratio", "tokens", "bytes"):
        value = next((a.partition("=")[2] for a in arguments if a.startswith(f"{key}=")), "...")
        return f"{key} goes with its own kind of budget: budget={setting} {key}={value}"
    if group == "budget" and (near := did_you_mean(setting, ("tokens", "bytes"))):
        return f"{key}: there is no such setting{near}; tokens go with budget=tokens, bytes with budget=bytes"
    if group == "codec":
        return _unknown_codec_key(setting, arguments, own)
    names = _chosen(group, arguments)
    lacking = next((name for name in names if setting not in settings_of(group, name, own)), names[0])
    if any(setting in settings_of(group, name, own) for name in names):
        return (
            f"{group}={lacking} has no setting {setting!r}, and others of the sweep have: run those that have it in a command "
            "of their own with the same name=..., and compare with `kvlab table`"
        )
    known = settings_of(group, lacking, own)
    if having := [choice for choice in choices(group, own) if not known and setting in settings_of(group, choice, own)]:
        return f"{key} goes with {' or '.join(f'{group}={choice}' for choice in having)}; {group}={lacking} has no settings"
    has = f"; it has: {', '.join(known)}" if known else ""
    return f"{group}={lacking} has no setting {setting!r}{did_you_mean(setting, known)}{has}"


def _unknown_codec_key(setting: str, arguments: Sequence[str], own: str | None) -> str:
    """Settings of codecs are below the codec's name."""
    names = [name.strip(" []") for name in _chosen("codec", arguments) if name.strip(" []") != "none"]
    choice, _, below = setting.partition(".")
    if choice in names:
        known = settings_of("codec", choice, own)
        if below in known:  # so another choice of the sweep lacks it
            return (
                f"codec.{setting} goes with codec={choice} alone: run that in a command of its own with the same name=..., and "
                "compare with `kvlab table`"
            )
        return f"codec={choice} has no setting {below!r}{did_you_mean(below, known)}; it has: {', '.join(known)}"
    having = next((name for name in names if choice in settings_of("codec", name, own)), None)
    if having is not None:
        return f"codec.{setting}: settings are below the codec's name: codec.{having}.{setting}=..."
    if preset := next((name for name in names if below and below in settings_of("codec", name, own)), None):
        return f"codec.{setting}: settings are below the name that was chosen: codec.{preset}.{below}=..."
    if not names or below:
        return f"codec.{setting} goes with codec={choice if below else 'NAME'} (`kvlab list codecs`)"
    return f"codec={names[0]} has no setting {setting!r}; it has: {', '.join(settings_of('codec', names[0], own))}"


def _chosen(group: str, arguments: Sequence[str]) -> list[str]:
    """What the arguments choose of a group, or what is chosen by default."""
    given = next((a.partition("=")[2] for a in arguments if a.startswith(f"{group}=")), None)
    return (given or default_choice(group) or "").split(",")


def _unparsable(arguments: Sequence[str]) -> str:
    """The first argument that Hydra's grammar doesn't take."""
    parser = OverridesParser.create()
    for argument in arguments:
        try:
            parser.parse_override(argument)
        except HydraException:
            return argument or "an empty argument"
    return "a setting"


def _no_choice(argument: str, own: str | None) -> bool:
    group, _, value = argument.partition("=")
    return group in GROUPS and value not in choices(group, own)


def _last_line(text: str) -> str:
    return [line.strip() for line in text.splitlines() if line.strip()][-1]
