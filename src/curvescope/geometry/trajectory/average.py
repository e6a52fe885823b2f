"""Averages over tokens, with errors that know that tokens of one sequence are not independent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvescope.core.result import Result


@dataclass(frozen=True)
class Curve(Result):
    """One quantity along the depth, averaged over tokens.

    Where the quantity has a target token, `shuffled` is the same with the targets of other tokens, `excess`
    the mean of real − shuffled, token by token, and `change` the excess at the last point less that at the
    first; `falling` is the share of tokens whose own change is negative.
    """

    mean: np.ndarray  # (N,)
    stderr: np.ndarray
    shuffled: np.ndarray | None = None
    shuffled_stderr: np.ndarray | None = None
    excess: np.ndarray | None = None
    excess_stderr: np.ndarray | None = None
    change: float = np.nan
    change_stderr: float = np.nan
    falling: float = np.nan


def curve(values: np.ndarray, sequence: np.ndarray, shuffled: np.ndarray | None = None) -> Curve:
    """The curve of values (M, N) of M tokens; `sequence` (M,) numbers the sequence of each."""
    mean, stderr = average(values, sequence)
    if shuffled is None:
        return Curve(mean, stderr)
    excess = values - shuffled
    change = excess[:, -1] - excess[:, 0]
    total, total_stderr = average(change[:, None], sequence)
    return Curve(
        mean,
        stderr,
        *average(shuffled, sequence),
        *average(excess, sequence),
        change=float(total[0]),
        change_stderr=float(total_stderr[0]),
        falling=float((change < 0).mean()),
    )


def average(values: np.ndarray, sequence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over tokens of (M, N) and its standard error (N,), entries that are NaN left out.

    The error treats sequences as the independent units: with residual sums r_s of m sequences,
    SE² = m / (m − 1) · Σ_s r_s² / count². A single sequence falls back on its tokens as units.
    """
    counted = np.isfinite(values)
    count = counted.sum(0)
    clean = np.where(counted, values, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = clean.sum(0) / count
        units = np.unique(sequence, return_inverse=True)[1]
        if units.max(initial=0) == 0:
            units = np.arange(len(values))
        m = int(units.max(initial=0)) + 1
        residuals = np.zeros((m, values.shape[1]))
        np.add.at(residuals, units, np.where(counted, values - mean, 0.0))
        stderr = np.sqrt(m / (m - 1) * (residuals**2).sum(0)) / count if m > 1 else np.full(len(mean), np.nan)
    return mean, stderr
