"""Fewer combinations of two lists: each of one with one of the other; the full product is slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def pairs(first: Sequence[Any], second: Sequence[Any], *, shift: int = 0) -> list[Any]:
    """All pairs; those of entries i and j with i + shift ≡ j modulo the length of `second` are not slow.

    So each of `first` is met once. Tests with different shifts meet different pairs.
    """
    return [
        pytest.param(one, other, marks=() if (i + shift) % len(second) == j else pytest.mark.slow)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]
