"""Which parameters of a test run every time; the others are slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def some(values: Sequence[Any], few: int) -> list[Any]:
    """All values, which may be tuples of several; those after the first few are slow."""
    rest = (value if isinstance(value, tuple) else (value,) for value in values[few:])
    return [*values[:few], *(pytest.param(*value, marks=pytest.mark.slow) for value in rest)]


def pairs(first: Sequence[Any], second: Sequence[Any], *, shift: int = 0) -> list[Any]:
    """All pairs; those of entries i and j with i + shift ≡ j modulo the length of `second` are not slow.

    So each of `first` is met once. Tests with different shifts meet different pairs.
    """
    return [
        pytest.param(one, other, marks=() if (i + shift) % len(second) == j else pytest.mark.slow)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]


def a_third(values: Sequence[Any], *, shift: int) -> list[Any]:
    """All values; those whose place is not `shift` modulo three are slow, so three tests meet all of them."""
    return [
        pytest.param(value, marks=() if i % 3 == shift % 3 else pytest.mark.slow)
        for i, value in enumerate(values)
    ]
