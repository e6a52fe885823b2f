"""How many samples a tolerance needs: from one half of the data, checked on the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvescope.closed_form.landscape import mean_square_increment, samples_for
from curvescope.core.result import Result
from curvescope.studies.landscape.growth import ENDS, RESAMPLES


@dataclass(frozen=True)
class Budget(Result):
    """One row per tolerance τ: the least k with root mean square |L_{k+1} − L_k| ≤ τ."""

    tolerance: np.ndarray  # (T,)
    k: np.ndarray  # (T,) from the pilot half
    low: np.ndarray  # (T,) ends of its interval, by resampling the pilot
    high: np.ndarray
    held_out: np.ndarray  # (T,) rms at k over all orders of the other half; nan where that is too small
    held_low: np.ndarray  # (T,) its interval, by resampling that half
    held_high: np.ndarray
    num_pilot: int
    num_held_out: int

    @property
    def verdicts(self) -> list[str]:
        """Whether the tolerance is met on the held-out half, as far as its interval can tell."""
        pairs = zip(self.tolerance, self.held_low, self.held_out, strict=True)
        return [
            "not checked: too few samples" if np.isnan(found) else "met" if low <= tau else "missed"
            for tau, low, found in pairs
        ]


def budget(losses: np.ndarray, tolerances: tuple[float, ...], *, seed: int) -> Budget:
    """k for every tolerance."""
    source = np.random.default_rng([seed, 1])
    mixed = source.permutation(losses)
    pilot, rest = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
    drawn = [source.choice(pilot, len(pilot)).var(ddof=1) for _ in range(RESAMPLES)]
    others = np.array([source.choice(rest, len(rest)).var(ddof=1) for _ in range(RESAMPLES)])
    rows = []
    for tau in tolerances:
        k = samples_for(float(pilot.var(ddof=1)), tau)
        ends = np.percentile([samples_for(float(v), tau) for v in drawn], ENDS)
        if k >= len(rest):
            rows.append((tau, k, *ends, np.nan, np.nan, np.nan))
            continue
        found = np.sqrt(mean_square_increment(np.array([rest.var(ddof=1), *others]), k))
        rows.append((tau, k, *ends, found[0], *np.percentile(found[1:], ENDS)))
    columns = [np.array(column, dtype=float) for column in zip(*rows, strict=True)]
    return Budget(*columns, num_pilot=len(pilot), num_held_out=len(rest))
