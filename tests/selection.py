"""Which parameters of a test run every time; the others are slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def some(values: Sequence[Any], few: int) -> list[Any]:
    """All values, which may be tuples of several; those after the first few are slow."""
    return [_param(value, often=i < few) for i, value in enumerate(values)]


def most(values: Sequence[Any], *, but: Sequence[Any]) -> list[Any]:
    """All values; those in `but`, whose kinds others show too, are slow."""
    unknown = [value for value in but if value not in values]
    assert not unknown, unknown
    return [_param(value, often=value not in but) for value in values]


def a_half(values: Sequence[Any], *, shift: int) -> list[Any]:
    """All values; those whose place is not `shift` modulo two are slow, so two tests meet all of them."""
    return [_param(value, often=i % 2 == shift % 2) for i, value in enumerate(values)]


def one_in(values: Sequence[Any], every: int, *, shift: int) -> list[Any]:
    """All values; those whose place is not `shift` modulo `every` are slow."""
    return [_param(value, often=i % every == shift % every) for i, value in enumerate(values)]


def a_third(values: Sequence[Any], *, shift: int) -> list[Any]:
    """All values; those whose place is not `shift` modulo three are slow, so three tests meet all of them."""
    return [_param(value, often=i % 3 == shift % 3) for i, value in enumerate(values)]


def pairs(first: Sequence[Any], second: Sequence[Any], *, shift: int = 0, every: int = 1) -> list[Any]:
    """All pairs; entry i of one in `every` of `first` is met with entry i // every + shift of `second`.

    The places in `second` count modulo its length, those in `first` begin with `shift` modulo `every`; all
    other pairs are slow. Tests with different shifts meet different pairs.
    """
    return [
        _param((one, other), often=i % every == shift % every and (i // every + shift) % len(second) == j)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]


def _param(value: Any, *, often: bool) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=() if often else pytest.mark.slow)
