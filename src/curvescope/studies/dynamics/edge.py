"""Where a run stands against its threshold: how it got there, and whether it stayed.

With r = η λ_max / 2 of plain descent, or η times the preconditioned sharpness over its threshold for Adam, a
run rises if r grows from its lowest value to 1, and stays if it is near 1 from there on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvescope.studies.dynamics.course import Course

NEAR = 0.25  # of the threshold
RISING = 1.05  # times the lowest value, at least


@dataclass(frozen=True)
class Approach:
    """A run against its threshold; `ratio` is (S,), of the measurements that have one."""

    steps: np.ndarray
    ratio: np.ndarray
    error: np.ndarray  # (S,) of the ratio, from that of the eigenvalue
    lowest: int  # index of the lowest ratio before it reaches 1
    reached: int | None  # index of the first ratio behind it that is 1 beyond its error

    @property
    def rises(self) -> bool:
        """Whether the ratio grew from its lowest value, as far as it came."""
        end = self.reached if self.reached is not None else len(self.ratio) - 1
        return bool(self.ratio[end] > RISING * self.ratio[self.lowest])

    @property
    def after(self) -> np.ndarray:
        """Ratios from where 1 is reached."""
        return self.ratio[self.reached :] if self.reached is not None else self.ratio[:0]

    @property
    def near(self) -> float:
        """Share of them within NEAR of 1."""
        return float((np.abs(self.after - 1) <= NEAR).mean()) if len(self.after) else float("nan")


def approach(course: Course) -> Approach:
    """How η λ went to its threshold."""
    h = course.seen.history
    ratio = h["lr_sharpness"] / h["sharpness_threshold"]
    error = h["lr"] * h["sharpness_error"] / h["sharpness_threshold"]
    known = np.isfinite(ratio)
    steps, ratio, error = h["step"][known].astype(int), ratio[known], error[known]
    begun = next((i for i in range(1, len(ratio)) if ratio[i] >= ratio[i - 1]), len(ratio)) - 1
    above = np.flatnonzero(ratio[begun:] - error[begun:] >= 1) + begun
    reached = int(above[0]) if len(above) else None
    before = ratio[begun : reached if reached else None]
    lowest = begun + int(np.argmin(before)) if len(before) else begun
    return Approach(steps, ratio, error, lowest, reached)


def later_loss(course: Course, step: int) -> tuple[float, float]:
    """Loss at the end over that at a step, by medians of ten; and the share of steps on which it rose."""
    loss = course.loss[step:]
    few = max(1, min(10, len(loss) // 2))
    return float(np.median(loss[-few:]) / np.median(loss[:few])), float((np.diff(loss) > 0).mean())
