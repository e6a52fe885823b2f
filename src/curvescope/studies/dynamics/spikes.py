"""Spikes of the loss, and which number of the monitor warned of them.

A spike is a step whose loss is at least `SPIKE` times the lowest before it. A number warns while it is beyond
its threshold, at every measurement up to the last one before the spike; the lead is how many steps before the
spike that began. The same number beyond its threshold in a run without a spike is a false alarm.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from curvescope.studies.dynamics.course import Course

SPIKE = 3.0
SIGNALS = {
    "sharpness": "η times the sharpness that the optimizer sees is above its threshold",
    "along_gradient": "η gᵀHg/‖g‖² is above the threshold",
    "grad_share": "more than half of ‖g‖² is in the top eigenspace",
    "grad_norm": "‖g‖ is more than twice the median of the measurements before",
    "loss": "the loss is more than 1.2 times the lowest before",
}
"""What may warn, in words."""
SHARE, TWICE, RISEN, FEWEST = 0.5, 2.0, 1.2, 3


class Warned(NamedTuple):
    """A number before the spike of a run."""

    signal: str
    lead: int  # steps; 0 where it did not warn


def rises(course: Course) -> np.ndarray:
    """(S,) loss behind every step over the lowest before; infinite where it is not finite."""
    loss = np.where(np.isfinite(course.loss), course.loss, np.inf)
    return loss[1:] / np.minimum.accumulate(loss)[:-1]


def rise(course: Course) -> float:
    """The largest of them."""
    return float(rises(course).max(initial=0.0))


def onset(course: Course) -> int | None:
    """The first step of the first spike."""
    found = np.flatnonzero(rises(course) >= SPIKE) + 1
    return int(found[0]) if len(found) else None


def alarms(course: Course) -> dict[str, np.ndarray]:
    """(S,) of every signal: whether it was beyond its threshold at each measurement."""
    h = course.seen.history
    norm, loss = h["grad_norm"], h["loss"]
    medians = np.array([np.median(norm[:i]) if i >= FEWEST else np.inf for i in range(len(norm))])
    lowest = np.concatenate([[np.inf], np.minimum.accumulate(loss)[:-1]])
    with np.errstate(invalid="ignore"):
        return {
            "sharpness": h["lr_sharpness"] > h["sharpness_threshold"],
            "along_gradient": h["lr"] * h["curvature_along_gradient"] > h["threshold"],
            "grad_share": h["grad_share"] > SHARE,
            "grad_norm": norm > TWICE * medians,
            "loss": loss > RISEN * lowest,
        }


def warned(course: Course) -> list[Warned]:
    """The lead of every signal, in a run with a spike."""
    step = onset(course)
    assert step is not None
    before = course.measured < step
    found = []
    for signal, on in alarms(course).items():
        steps, on = course.measured[before], on[before]
        quiet = np.flatnonzero(~on)
        first = quiet[-1] + 1 if len(quiet) else 0
        found.append(Warned(signal, int(step - steps[first]) if first < len(steps) else 0))
    return found


def false_alarms(courses: list[Course]) -> dict[str, tuple[int, int]]:
    """Of every signal, over runs without a spike: alarms, of how many measurements."""
    found: dict[str, tuple[int, int]] = dict.fromkeys(SIGNALS, (0, 0))
    for course in courses:
        for signal, on in alarms(course).items():
            count, total = found[signal]
            found[signal] = count + int(on.sum()), total + len(on)
    return found
