"""Checks of the options of a task."""

from __future__ import annotations

from math import isfinite
from numbers import Integral, Real
from typing import Any

from curvescope.core.errors import UsageError, near_misses


def check_counts(at_least: int = 1, **counts: Any) -> None:
    """Check that every count is an integer of at least `at_least`."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, Integral) or count < at_least:
            raise UsageError(f"expected {name} to be an integer of at least {at_least}, got {count!r}")


def check_not_negative(**numbers: Any) -> None:
    """Check that every number is real, finite and not negative."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Real) or not isfinite(number) or number < 0:
            raise UsageError(f"expected {name} to be a number that is not negative, got {number!r}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless the value is one of the choices."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise UsageError(
            f"expected {name} to be one of {listed}, got {value!r}",
            hint=near_misses(str(value), list(choices)),
        )
