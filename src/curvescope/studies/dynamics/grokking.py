"""When a model has memorized, when it has generalized, and its curvature in between and behind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvescope.studies.dynamics.course import Course

MEMORIZED, GENERALIZED = 0.99, 0.95  # accuracy on the data, and on what is held out


@dataclass(frozen=True)
class Phases:
    """Indices of measurements; None where it did not come to that."""

    memorized: int | None
    generalized: int | None

    @property
    def delayed(self) -> bool:
        """Whether the model generalized, and later than it memorized."""
        return (
            self.generalized is not None and self.memorized is not None and self.generalized > self.memorized
        )


def phases(course: Course) -> Phases:
    """The first measurements with enough accuracy."""
    first = [
        np.flatnonzero(course.accuracy >= MEMORIZED),
        np.flatnonzero(course.held_out_accuracy >= GENERALIZED),
    ]
    memorized, generalized = (int(found[0]) if len(found) else None for found in first)
    return Phases(memorized, generalized)


@dataclass(frozen=True)
class Change:
    """A number behind generalizing over the same before: geometric means, and the range of all ratios."""

    value: float
    low: float
    high: float

    @property
    def direction(self) -> int:
        """1 or −1 where the middle halves of both are apart, else 0."""
        return 1 if self.low > 1 else -1 if self.high < 1 else 0


def change(course: Course, name: str, *, per_loss: bool = False) -> Change | None:
    """Of a positive number of the monitor, from memorized to generalized; None where it did not grok.

    low and high are the ratios of opposite quartiles of the measurements before and behind.
    """
    found = phases(course)
    if not found.delayed:
        return None
    values = course.column(name) / (course.column("loss") if per_loss else 1.0)
    before, behind = values[found.memorized : found.generalized], values[found.generalized :]
    if not (before > 0).all() or not (behind > 0).all():
        return None
    quartile = lambda part, q: float(np.quantile(np.log(part), q))  # noqa: E731
    middle = np.log(behind).mean() - np.log(before).mean()
    low, high = (
        quartile(behind, 0.25) - quartile(before, 0.75),
        quartile(behind, 0.75) - quartile(before, 0.25),
    )
    return Change(float(np.exp(middle)), float(np.exp(low)), float(np.exp(high)))
