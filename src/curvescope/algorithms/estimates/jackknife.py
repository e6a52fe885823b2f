"""How sure a number is that is made of a few samples: leave out one after the other.

With J the number from P samples, J_i that without sample i and J̄ the mean of these,

    standard error √((P − 1)/P Σ (J_i − J̄)²),    bias (P − 1)(J̄ − J).
"""

from __future__ import annotations

import numpy as np


def jackknife(value: np.ndarray | float, without: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Standard error and bias of `value` from the values without each sample, along the first axis.

    One sample says nothing: both are nan.
    """
    count = without.shape[0]
    mean = without.mean(axis=0)
    if count == 1:
        return np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    stderr = np.sqrt((count - 1) / count * ((without - mean) ** 2).sum(axis=0))
    return stderr, (count - 1) * (mean - value)


def ratio_of_norms(top: np.ndarray, bottom: np.ndarray) -> tuple[float, float]:
    """√(Σ top / Σ bottom) over samples of two squared norms from the same probes, (P,) each, and its error.

    Where the bottom is zero there is no ratio: nan.
    """
    if not bottom.sum() > 0:
        return float("nan"), float("nan")
    value = float(np.sqrt(top.sum() / bottom.sum()))
    if len(top) == 1:
        return value, float("nan")
    left = bottom.sum() - bottom
    without = np.sqrt(np.maximum(top.sum() - top, 0.0) / np.where(left > 0, left, np.nan))
    return value, float(jackknife(value, without)[0])
