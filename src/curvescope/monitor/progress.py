"""Progress of one measurement: a line on stderr for the first, and a count of products that `watch` reads."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import final

from torch import Tensor

from curvescope.algorithms.recorded_products import ProductRecorder
from curvescope.core.number_format import duration, plural
from curvescope.core.operator import LinearOperator
from curvescope.runs.live_history import MEASURING

WRITE_SECONDS = 1.0  # between two writes of the count
SURE_PRODUCTS = 8  # after which the time of a product is known
LONG_SECONDS = 5.0  # expected time of a first measurement that is worth a line


@final
class MeasurementProgress(ProductRecorder):
    """Counts the products of a measurement. Writing never raises: training does not depend on it.

    Args:
        step: Of the training loop.
        expected: Products that such a measurement usually takes.
        state: Folder that the count is written to; None writes nothing.
        announce: Print how long the measurement may take, once that is known to be some seconds.
        clock: Of seconds.
    """

    def __init__(
        self,
        step: int,
        expected: int,
        state: Path | None,
        *,
        announce: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock, self._last = clock, 0.0
        self._step, self._expected, self._announce = step, expected, announce
        self._path = None if state is None else state / MEASURING
        self._done, self._begun, self._written = 0, clock(), -WRITE_SECONDS
        self._first: tuple[int, float] | None = None  # products and seconds of the first, which takes longer
        self._write()

    def product(self, op: LinearOperator, V: Tensor) -> Tensor:
        """A V, counted."""
        product = op @ V
        self._done += V.shape[1]
        self._write()
        return product

    @property
    def product_seconds(self) -> float:
        """Seconds of a product behind the first ones, which take longer; 0 if there was none."""
        if self._first is None or self._done <= self._first[0]:
            return 0.0
        return (self._last - self._first[1]) / (self._done - self._first[0])

    def close(self) -> None:
        """Remove the count: the measurement is over."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        seconds = self._last = self._clock() - self._begun
        if self._done and self._first is None:
            self._first = self._done, seconds
        elif self._announce and self._first is not None:
            self._tell(seconds, *self._first)
        if self._path is None or seconds - self._written < WRITE_SECONDS:
            return
        self._written = seconds
        self._expected = max(self._expected, self._done)
        count = {"step": self._step, "products": self._done, "expected": self._expected}
        with suppress(OSError):
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(count), encoding="utf-8")
            partial.replace(self._path)

    def _tell(self, seconds: float, first: int, first_seconds: float) -> None:
        """Print how long the measurement takes, once the time of a product is known."""
        later = self._done - first
        if later < SURE_PRODUCTS and seconds < LONG_SECONDS:
            return
        self._announce = False
        expected = seconds + (seconds - first_seconds) / later * max(self._expected - self._done, 0)
        if expected > LONG_SECONDS:
            print(
                f"curvescope monitor: the first measurement, at step {self._step}, takes about "
                f"{plural(self._expected, 'product')}, {duration(expected)}, more if the spectrum is hard; "
                "later ones start from it",
                file=sys.stderr,
            )
