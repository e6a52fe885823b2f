"""Tables: results whose fields are columns of equal length (arrays or lists), and rows from attributes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from curvescope.algorithms.blocks.probes import OwnProbes
from curvescope.core.result import Result

T = TypeVar("T", bound=Result)


def columns_of(table: Result) -> dict[str, Any]:
    """Return the columns by name."""
    return {field.name: getattr(table, field.name) for field in fields(table)}


def stack_tables(parts: Iterable[T]) -> T:
    """Join all rows, in order; other fields are those of the first part."""
    first, *others = parts
    joined: dict[str, Any] = {}
    for name, column in columns_of(first).items():
        rest = [getattr(part, name) for part in others]
        if isinstance(column, np.ndarray):
            joined[name] = np.concatenate([column, *rest])
        elif isinstance(column, list):
            joined[name] = [entry for each in (column, *rest) for entry in each]
    return replace(first, **joined)


def select_rows(table: T, keep: np.ndarray) -> T:
    """Return the rows where `keep` is true."""
    index = np.flatnonzero(keep)
    taken = {
        name: column[index] if isinstance(column, np.ndarray) else [column[i] for i in index]
        for name, column in columns_of(table).items()
    }
    return replace(table, **taken)


def pick(one: Any, *names: str) -> dict[str, Any]:
    """Return attributes by name, as a row of a table."""
    return {name: getattr(one, name) for name in names}


def probe_columns(own: OwnProbes, end: str = "") -> dict[str, float]:
    """Return trace and Frobenius norm with standard errors and 95 % intervals; names get `end`."""
    return {
        f"{name}{end}{part}": getattr(own, f"{key}{part}")
        for name, key in (("trace", "trace"), ("frobenius", "norm"))
        for part in ("", "_stderr", "_low", "_high")
    }
