"""Settings: values against annotations, with messages that say what to use."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from kvlab.settings import SettingError, build, check, defaults


@dataclass(frozen=True)
class Settings:
    must: int
    share: float = 0.5
    kind: Literal["a", "b"] = "a"
    on: bool = False
    text: str = "x"
    maybe: int | None = None
    many: tuple[float, ...] = (1.0,)
    made: tuple[int, ...] = field(default_factory=lambda: (1, 2))


GOOD = {"must": 1, "share": 1, "kind": "b", "on": True, "text": "", "maybe": 3, "many": [0, 0.5], "made": []}


def test_good_values_are_taken_and_lists_become_tuples():
    built = build(Settings, GOOD, "x")
    assert (built.many, built.made, built.maybe) == ((0, 0.5), (), 3)
    assert [type(value) for value in (built.share, *built.many, built.maybe)] == [float, float, float, int]
    assert build(Settings, {"must": 0, "name": "ignored"}, "x", ignore=("name",)) == Settings(0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"must": -1}, "x.must=-1: use a whole number of at least 0"),
        ({"must": True}, "x.must=True: use a whole number"),
        ({"must": 1.0}, "x.must=1.0: use a whole number"),
        ({"must": None}, "x.must=None: use a whole number"),
        ({"must": "???"}, "x.must must be given"),
        ({"share": "a"}, "x.share='a': use a number"),
        ({"share": True}, "x.share=True: use a number"),
        ({"kind": "c"}, "x.kind='c': use one of a, b"),
        ({"on": 1}, "x.on=1: use true or false"),
        ({"text": 1}, "x.text=1: use text"),
        ({"maybe": "a"}, "x.maybe='a': use a whole number of at least 0 or null"),
        ({"many": 0.5}, r"x.many=0.5: use a list, such as \[0.1,0.5\]"),
        ({"many": ["a"]}, r"x.many=\('a',\): use a list, each a number"),
        ({"shar": 1}, r"x has no setting 'shar' \(did you mean share"),
    ],
)
def test_what_does_not_fit_is_named(change, says):
    with pytest.raises(SettingError, match=says):
        build(Settings, {**GOOD, **change}, "x")


def test_what_must_be_given_is_named():
    with pytest.raises(SettingError, match="x.must must be given"):
        build(Settings, {"share": 0.1}, "x")


def test_another_error_can_be_raised_and_defaults_are_plain_values():
    with pytest.raises(KeyError):
        check(Settings("a"), "x", KeyError)
    wanted = {"must": "???", "share": 0.5, "kind": "a", "on": False, "text": "x", "maybe": None, "many": [1.0], "made": [1, 2]}
    assert defaults(Settings) == wanted
