"""Medians of draws with intervals that hold the true median in 95 of 100 repetitions, by the bootstrap."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NUM_RESAMPLES = 1000
PERCENTILES = (2.5, 97.5)


class Median(NamedTuple):
    """A median and the ends of its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def median(draws: np.ndarray, *, seed: int = 0) -> Median:
    """The median of independent draws; nan where there is none."""
    draws = draws[np.isfinite(draws)]
    if not len(draws):
        return Median(np.nan, np.nan, np.nan)
    low, high = np.percentile(_resampled(draws, np.random.default_rng(seed)), PERCENTILES)
    return Median(float(np.median(draws)), float(low), float(high))


def median_difference(one: np.ndarray, other: np.ndarray, *, seed: int = 0) -> Median:
    """Median of `one` minus median of `other`, which are independent of each other."""
    source = np.random.default_rng(seed)
    low, high = np.percentile(_resampled(one, source) - _resampled(other, source), PERCENTILES)
    return Median(float(np.median(one) - np.median(other)), float(low), float(high))


def _resampled(draws: np.ndarray, source: np.random.Generator) -> np.ndarray:
    """Medians of draws that were drawn again, with replacement."""
    return np.median(source.choice(draws, (NUM_RESAMPLES, len(draws))), axis=1)
