"""Settings as dataclass fields: build one from a mapping, and check every value against its annotation.

A policy, a task, a protocol: each is a frozen dataclass whose fields are its Hydra config. Messages name the config key.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from kvlab.hints import did_you_mean

Built = TypeVar("Built")


class SettingError(ValueError):
    """A setting that can't be: the message says what to change."""


def build(
    cls: type[Built],
    values: Mapping[str, Any],
    where: str,
    error: type[ValueError] = SettingError,
    ignore: tuple[str, ...] = (),
) -> Built:
    """An instance of a dataclass from a mapping; lists become tuples. `where` is the config group, such as `task`.

    Raises `error` for an unknown key, a missing one, or a wrong value, in one line that says what to change.
    """
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls)) if field.init}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key not in ignore}
    for key, value in given.items():
        if key not in fields:
            raise error(f"{where} has no setting {key!r}{did_you_mean(key, fields)}; it has: {', '.join(fields) or 'none'}")
        if value == "???":
            raise error(f"{where}.{key} must be given")
    for name, field in fields.items():
        if name not in given and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise error(f"{where}.{name} must be given")
    hints = typing.get_type_hints(cls)
    built = cls(**{key: _fitted(value, hints[key]) for key, value in given.items()})
    check(built, where, error)
    return built


def _fitted(value: Any, kind: Any) -> Any:
    """Whole numbers as floats where a setting is one, so that 1 and 1.0 are the same value."""
    if isinstance(value, int) and not isinstance(value, bool):
        options = typing.get_args(kind) or (kind,)
        return float(value) if float in options and int not in options else value
    if isinstance(value, tuple) and typing.get_origin(kind) is tuple:
        return tuple(_fitted(item, typing.get_args(kind)[0]) for item in value)
    return value


def defaults(cls: type) -> dict[str, Any]:
    """Settings of a dataclass with their defaults, as plain config values; `???` where one must be given."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        found[field.name] = "???" if value is dataclasses.MISSING else list(value) if isinstance(value, tuple) else value
    return found


def label_of(settings: Any, name: str) -> str:
    """For tables and folders: the name and the settings that aren't defaults, but no artefact's key."""
    every = [field for field in dataclasses.fields(settings) if field.name != "artefact"]
    given = [(field.name, getattr(settings, field.name)) for field in every if getattr(settings, field.name) != field.default]
    return " ".join([name, *(f"{key}={value}" for key, value in given)])


def check(settings: Any, where: str, error: type[ValueError] = SettingError) -> None:
    """Check every field of a dataclass against its annotation; whole numbers are at least 0. Raises `error`."""
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        if field.init and (wanted := _wrong(getattr(settings, field.name), hints[field.name])):
            raise error(f"{where}.{field.name}={getattr(settings, field.name)!r}: use {wanted}")


def _wrong(value: Any, kind: Any) -> str | None:
    """What to use instead, where a value does not fit an annotation. Annotations of other kinds are not checked."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        options = [_wrong(value, option) for option in arguments]
        return None if None in options else " or ".join(text for text in options if text)
    if origin is Literal:
        fits = any(value == option and type(value) is type(option) for option in arguments)
        return None if fits else f"{'one of ' if len(arguments) > 1 else ''}{', '.join(map(str, arguments))}"
    if origin is tuple:
        if not isinstance(value, tuple):
            return f"a list, such as [{_example(arguments[0])}]"
        return next((f"a list, each {wanted}" for item in value if (wanted := _wrong(item, arguments[0]))), None)
    return _wrong_plain(value, kind)


def _wrong_plain(value: Any, kind: Any) -> str | None:
    if kind is type(None):
        return None if value is None else "null"
    if kind is int:
        return None if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else "a whole number of at least 0"
    if kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return None if fits else "a number"
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if kind is str:
        return None if isinstance(value, str) else "text"
    return None


def _example(kind: Any) -> str:
    return {int: "1,2", float: "0.1,0.5"}.get(kind, "a,b")
