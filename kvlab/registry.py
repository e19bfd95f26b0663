"""Classes by name: what `register` and `register_task` share. Plug-ins are loaded when names are first asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from kvlab.hints import did_you_mean

Kind = TypeVar("Kind")


class Registry(Generic[Kind]):
    """Frozen dataclasses of one kind, by name.

    kind       such as "policy", for messages; decorator: what registers one
    error      the ValueError that a mistake raises
    group      entry-point group of plug-ins
    """

    def __init__(self, kind: str, decorator: str, error: type[ValueError], group: str) -> None:
        self.kind, self.decorator, self.error, self.group = kind, decorator, error, group
        self.classes: dict[str, type[Kind]] = {}
        self.plugins_loaded = False

    def check(self, name: str, cls: type) -> None:
        """Raises the error if another module's class has that name, or if this is no frozen dataclass."""
        known = self.classes.get(name)
        if known is not None and known.__module__ != cls.__module__:
            raise self.error(f"{self.kind} name {name!r} is taken by {known.__module__}; register under another name")
        params = vars(cls).get("__dataclass_params__")
        if params is None or not params.frozen:
            raise self.error(f"{self.kind} {name!r}: put @dataclass(frozen=True) below @{self.decorator}({name!r})")

    def add(self, name: str, cls: type[Any]) -> None:
        """Make a class known by this name, which it is told. Raises the error as `check` does."""
        self.check(name, cls)
        cls.name = name
        self.classes[name] = cls

    def names(self) -> list[str]:
        """All names, those of installed plug-ins included."""
        if not self.plugins_loaded:
            self.plugins_loaded = True
            for entry in entry_points(group=self.group):
                entry.load()
        return sorted(self.classes)

    def find(self, name: str) -> type[Kind]:
        """The class of that name. Raises the error with near names if there is none."""
        names = self.names()
        if name not in self.classes:
            raise self.error(f"unknown {self.kind} {name!r}{did_you_mean(name, names)}; known: {', '.join(names)}")
        return self.classes[name]

    def make(self, name: str, settings: Mapping[str, object]) -> Kind:
        """An instance by name. Raises the error on an unknown name or setting, or a wrong value."""
        cls: Any = self.find(name)
        known = [field.name for field in dataclasses.fields(cls) if field.init]
        for setting in settings:
            if setting not in known:
                hint = did_you_mean(setting, known)
                raise self.error(f"{self.kind} {name} has no setting {setting!r}{hint}; it has: {', '.join(known)}")
        return cls(**settings)
