"""Configurations: frozen dataclasses that refuse unknown keys and wrong choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from curvescope.core.errors import UsageError, near_misses


@dataclass(frozen=True)
class Config:
    """Base of every configuration. A `Literal` field takes one of its choices, a number is a number."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            _check_value(name, kind, getattr(self, name))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A configuration from names and values; an unknown name is an error."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise UsageError(f"unknown setting {name!r}", hint=near_misses(name, known))
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Names and values of everything that is set (TOML has no None)."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if value is not None
        }


def as_tuples(cfg: Config, *names: str) -> None:
    """In a frozen configuration, let fields that hold several values be given a single one."""
    for name in names:
        value: Any = getattr(cfg, name)
        if not isinstance(value, tuple):
            object.__setattr__(cfg, name, (value,))


def at_least(cfg: Config, fewest: int, *names: str) -> None:
    """Raise unless the numbers are large enough."""
    for name in names:
        if getattr(cfg, name) < fewest:
            raise UsageError(f"{name}: expected at least {fewest}, got {getattr(cfg, name)}")


def _check_value(name: str, kind: Any, value: Any) -> None:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(f"{name}: expected one of {', '.join(map(str, get_args(kind)))}, got {value!r}")
        return
    plain = {t for t in (get_args(kind) or (kind,)) if t in (int, float, str, bool, type(None))}
    if not plain or len(plain) != len(get_args(kind) or (kind,)):
        return
    allowed = tuple(plain | ({int} if float in plain else set()))
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in plain):
        names = " or ".join(sorted("nothing" if t is type(None) else t.__name__ for t in plain))
        raise UsageError(f"{name}: expected {names}, got {value!r}")
