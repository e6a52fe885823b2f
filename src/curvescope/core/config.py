"""Configurations: frozen dataclasses that describe their settings and reject unknown ones."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from curvescope.core.errors import UsageError, near_misses

T = TypeVar("T")
Plain = str | int | float | bool
Value = Plain | Sequence[Plain] | None
"""Value of a setting."""
Settings = Mapping[str, Value]
"""Settings by name, as a user gives them."""

MEANING, OPTION, LEAST = "meaning", "option", "least"
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def setting(default: T, meaning: str, *, option: bool = False, least: float | None = None) -> T:
    """Field of a configuration with its default and a one-line description.

    Args:
        option: If True, `curvescope run STUDY` has an option `--name VALUE` for this setting.
        least: Smallest allowed number; a value of None is not checked.
    """
    return cast(T, field(default=default, metadata={MEANING: meaning, OPTION: option, LEAST: least}))


class Setting(NamedTuple):
    """Description of one setting for users."""

    name: str
    kind: str
    default: Value
    meaning: str
    option: bool


@dataclass(frozen=True)
class Config:
    """Base of every configuration, which checks the types of its fields.

    A field for several values is a tuple; a list or a single value is converted.
    """

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if _holds_several(kind) and value is not None and not isinstance(value, tuple):
                value = tuple(value) if isinstance(value, list) else (value,)
                object.__setattr__(self, name, value)
            _check_value(name, kind, value)
        for entry in fields(self):
            if (least := entry.metadata.get(LEAST)) is not None and getattr(self, entry.name) is not None:
                at_least(self, least, entry.name)

    @classmethod
    def from_dict(cls, values: Settings) -> Self:
        """Make a configuration from names and values; an unknown name is an error."""
        for name in values:
            cls.check_known(name)
        hints = get_type_hints(cls)
        converted: dict[str, Any] = {name: _as_field(value, hints[name]) for name, value in values.items()}
        return cls(**converted)

    @classmethod
    def check_known(cls, name: str) -> None:
        """Raise unless there is a setting with this name."""
        known = [field.name for field in fields(cls)]
        if name not in known:
            raise UsageError(f"unknown setting {name!r}", hint=near_misses(name, known))

    @classmethod
    def read(cls, name: str, text: str) -> Value:
        """Parse the value of a setting as typed by a user: a TOML value or text; a list may be `0,1`."""
        cls.check_known(name)
        value = typed_value(text)
        if _holds_several(get_type_hints(cls)[name]) and isinstance(value, str) and value == text:
            return [typed_value(part.strip()) for part in text.split(",") if part.strip()]
        return value

    @classmethod
    def settings(cls) -> list[Setting]:
        """Return all settings: name, kind, default, meaning."""
        hints = get_type_hints(cls)
        return [
            Setting(
                f.name,
                _words(hints[f.name]),
                _default(f.default),
                f.metadata.get(MEANING, ""),
                f.metadata.get(OPTION, False),
            )
            for f in fields(cls)
        ]

    def to_dict(self) -> dict[str, Plain | list[Plain]]:
        """Names and values of all settings that are not None (TOML has no None)."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if value is not None
        }


def at_least(cfg: Config, fewest: float, *names: str) -> None:
    """Raise unless the named settings are at least `fewest`."""
    for name in names:
        if getattr(cfg, name) < fewest:
            raise UsageError(f"{name}: expected at least {fewest}, got {getattr(cfg, name)}")


def _holds_several(kind: Any) -> bool:
    return any(get_origin(alternative) is tuple for alternative in _kinds(kind))


def _as_field(value: Value, kind: Any) -> Any:
    """Convert a list to a tuple, and a single value to a tuple if the field holds several."""
    if isinstance(value, list):
        return tuple(value)
    single = value is not None and not isinstance(value, tuple)
    return (value,) if single and _holds_several(kind) else value


def typed_value(text: str) -> Any:
    """A TOML value, or the text itself."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _default(value: Any) -> Value:
    return None if value is MISSING else value


def _kinds(kind: Any) -> tuple[Any, ...]:
    """Alternatives of a union; the type itself otherwise."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _words(kind: Any) -> str:
    """Describe a type in words: `whole number`, `quick | full`, `list of text`."""
    words = []
    for alternative in _kinds(kind):
        if get_origin(alternative) is Literal:
            words += map(str, get_args(alternative))
        elif get_origin(alternative) is tuple:
            words.append(f"list of {_words(get_args(alternative)[0])}s".replace("texts", "text"))
        elif alternative is not NoneType:
            words.append(WORDS.get(alternative, getattr(alternative, "__name__", str(alternative))))
    return " | ".join(words)


def _check_value(name: str, kind: Any, value: Any) -> None:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(f"{name}: expected one of {', '.join(map(str, get_args(kind)))}, got {value!r}")
        return
    parts = [get_args(alternative)[0] for alternative in _kinds(kind) if get_origin(alternative) is tuple]
    if parts and isinstance(value, tuple):
        for item in value:
            _check_value(name, parts[0], item)
        return
    plain = {t for t in _kinds(kind) if t in (int, float, str, bool, NoneType)}
    if not plain or len(plain) != len(_kinds(kind)):
        return
    allowed = tuple(plain | ({int} if float in plain else set()))
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in plain):
        names = " or ".join(sorted("nothing" if t is NoneType else t.__name__ for t in plain))
        raise UsageError(f"{name}: expected {names}, got {value!r}")
