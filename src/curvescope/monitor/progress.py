"""Progress of one measurement: a line on stderr for the first, and a count of products that `watch` reads."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import final

from torch import Tensor

from curvescope.algorithms.recording import Recorder
from curvescope.core.numbers import duration, plural
from curvescope.core.operator import LinearOperator
from curvescope.runs.growing import MEASURING

WRITE_SECONDS = 1.0  # between two writes of the count
LONG_SECONDS = 5.0  # expected time of a first measurement that is worth a line


@final
class MeasurementProgress(Recorder):
    """Counts the products of a measurement. Writing never raises: training does not depend on it.

    Args:
        step: Of the training loop.
        expected: Products that the measurement may take.
        state: Folder that the count is written to; None writes nothing.
        announce: Print how long the measurement may take, once that is known to be some seconds.
    """

    def __init__(self, step: int, expected: int, state: Path | None, *, announce: bool):
        self._step, self._expected, self._announce = step, expected, announce
        self._path = None if state is None else state / MEASURING
        self._done, self._begun, self._written = 0, time.monotonic(), -WRITE_SECONDS
        self._first: tuple[int, float] | None = None  # products and seconds of the first, which takes longer
        self._write()

    def product(self, op: LinearOperator, V: Tensor) -> Tensor:
        """A V, counted."""
        found = op @ V
        self._done += V.shape[1]
        self._write()
        return found

    def close(self) -> None:
        """Remove the count: the measurement is over."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        seconds = time.monotonic() - self._begun
        if self._done and self._first is None:
            self._first = self._done, seconds
        elif self._announce and self._first is not None:
            self._announce = False
            most = (seconds - self._first[1]) / (self._done - self._first[0]) * self._expected
            if most > LONG_SECONDS:
                print(
                    f"curvescope monitor: the first measurement, at step {self._step}, takes at most "
                    f"{plural(self._expected, 'product')}, about {duration(most)}; later ones start from it",
                    file=sys.stderr,
                )
        if self._path is None or seconds - self._written < WRITE_SECONDS:
            return
        self._written = seconds
        count = {"step": self._step, "products": self._done, "expected": self._expected}
        with suppress(OSError):
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(count), encoding="utf-8")
            partial.replace(self._path)
