"""A true norm next to a bound of it, many times: columns, ratios, and how often a bound is violated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curvescope.core.result import Result

if TYPE_CHECKING:
    import pandas as pd

ROOM = 1e-9  # relative: a true norm above a bound by less is rounding
GROUPS = ["instance", "varied", "quantity", "bound"]


class Row(NamedTuple):
    """One true norm and one bound of it; nan where there is none."""

    quantity: str
    bound: str
    true: float
    value: float


@dataclass(frozen=True)
class Comparisons(Result):
    """Columns of a table: a row is one bound of one quantity of one instance."""

    instance: list[str]  # what it is: random head, …
    varied: list[str]  # what `scale` is of: weights, data, …
    scale: np.ndarray
    seed: np.ndarray
    quantity: list[str]
    bound: list[str]
    true: np.ndarray
    value: np.ndarray

    @property
    def ratio(self) -> np.ndarray:
        """Bound over truth: below one it is violated; inf or nan where the truth is zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.value / self.true

    @property
    def violated(self) -> np.ndarray:
        """Whether the truth is above the bound, by more than rounding; never where there is no bound."""
        return self.true > self.value * (1 + ROOM)

    def chosen(self, **columns: str | Sequence[str]) -> Comparisons:
        """The rows whose columns have one of these values."""
        keep = np.ones(len(self.instance), dtype=bool)
        for name, wanted in columns.items():
            wanted = [wanted] if isinstance(wanted, str) else list(wanted)
            keep &= np.isin(np.array(getattr(self, name), dtype=str), wanted)
        index = np.flatnonzero(keep)
        taken: dict[str, Any] = {
            name: column[index] if isinstance(column, np.ndarray) else [column[i] for i in index]
            for name, column in self._columns().items()
        }
        return Comparisons(**taken)

    def _columns(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to_frame(self) -> pd.DataFrame:
        """One row per comparison, with ratio and violated."""
        import pandas as pd

        return pd.DataFrame(self._columns()).assign(ratio=self.ratio, violated=self.violated)


def tagged(instance: str, varied: str, scale: float, seeds: dict[int, list[Row]]) -> Comparisons:
    """Rows of several seeds of one instance at one scale."""
    rows = [(seed, row) for seed, found in seeds.items() for row in found]
    n = len(rows)
    return Comparisons(
        instance=[instance] * n,
        varied=[varied] * n,
        scale=np.full(n, float(scale)),
        seed=np.array([seed for seed, _ in rows], dtype=int),
        quantity=[row.quantity for _, row in rows],
        bound=[row.bound for _, row in rows],
        true=np.array([row.true for _, row in rows], dtype=float),
        value=np.array([row.value for _, row in rows], dtype=float),
    )


def joined(parts: Iterable[Comparisons]) -> Comparisons:
    """All rows, in order."""
    parts = list(parts)
    found: dict[str, Any] = {}
    for f in fields(Comparisons):
        columns = [getattr(part, f.name) for part in parts]
        arrays = isinstance(columns[0], np.ndarray)
        found[f.name] = np.concatenate(columns) if arrays else [x for column in columns for x in column]
    return Comparisons(**found)


def slack(found: Comparisons) -> pd.DataFrame:
    """Over each bound of each quantity: how many, how often violated, and the ratios to the truth.

    Ratios are over instances where the truth is not zero.
    """
    frame = found.to_frame().dropna(subset=["value"])
    frame["ratio"] = np.where(frame["true"] > 0, frame["ratio"], np.nan)
    groups = frame.groupby(GROUPS, sort=False)
    table = groups.agg(
        instances=("true", "size"),
        violated=("violated", "sum"),
        median_ratio=("ratio", "median"),
        least_ratio=("ratio", "min"),
        largest_ratio=("ratio", "max"),
    )
    return table.reset_index()
