"""Intervals of means over a few random probes, which cover the true value 95 times in 100.

`stderr` in a result is always the standard error, s/√P over P probes. `low` and `high` are the ends of the
stated interval, which is wider than two standard errors if there are few probes:

- means of any sign: mean ± t · stderr, with Student's quantile t for P − 1 degrees of freedom;
- means of samples that cannot be negative (‖A v‖², or vᵀ A v of a positive semi-definite A). These are
  weighted sums of squares, Σ wᵢ zᵢ². Their skewness is at least twice their coefficient of variation, as for
  a Gamma distribution, and more if one weight dominates. With h = t · stderr / mean the interval is from mean
  · (1 + h/3)⁻³, which is Student's on the scale mean^(−1/3) where the skewness of Gamma samples cancels, to
  mean · exp(h + h min(h, 1) / 2), which is longer to allow for dominating weights;
- means that cannot be negative from samples that can (a block of such an A from probes shared with other
  blocks): a negative mean is replaced by zero, and so is a negative low end.

The scatter of fewer than ten samples (`ENOUGH`) is not reliable. One large eigenvalue makes the samples
skewed. One dominating pair of entries gives them only two values, so all are often equal. The products A v
give an upper bound of the variance that needs no mean. Few samples therefore give a bound instead, which is
never narrower than the interval above and holds more often:

- vᵀ A v has a variance of at most 2 ‖A‖_F², and E ‖A v‖² = ‖A‖_F². The half width is at least t √(2/P) times
  the root mean square of ‖A v‖ (`form_interval`). More samples use this bound if it is at most three times
  Student's half width: one eigenvalue dominates then, and the samples are skewed.
- ‖A v‖² has a variance of at most 2 ‖AᵀA‖_F², and E ((A v)ᵀ A w)² = ‖AᵀA‖_F² for two independent probes. The
  half width is at least t √(2/P) times the root mean square of (A v)ᵀ A w over neighboring probes.
- entry i of v ∘ (A v) has a variance of at most the squared norm of row i, which is E (A v)ᵢ². The half width
  is at least t/√P times the root mean square of (A v)ᵢ, for XDiag at most the norm outside its sketch. Few
  signs cannot distinguish a large diagonal entry from a large off-diagonal one in the same row, so the
  interval is wide for a nearly diagonal matrix. Gaussian probes can, and need no bound.

The bounds fail if every probe of signs misses the matrix. P probes miss (e₁ + e₂)(e₁ + e₂)ᵀ with probability
2^(−P), so that intervals from two or three probes hold less often there.

A median lies between order statistics (`median_interval`). One probe says nothing about its error: both ends
are nan. benchmarks/coverage.py measures how often the intervals hold.

The jackknife gives the error of a number computed from a few samples by leaving out each sample in turn.

With J the number from P samples, J_i that without sample i and J̄ the mean of these,

    standard error √((P − 1)/P Σ (J_i − J̄)²),    bias (P − 1)(J̄ − J).

Frobenius norms from random probes, E ‖A v‖² = ‖A‖_F², at any scale of A.

Squares overflow or underflow long before A does: those of a float32 product of size 1e-30 are zero. So
products are scaled by a power of two, which is exact, before their lengths are computed, and lengths are
averaged relative to the largest.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import DotSum, chunks, column_dots
from curvescope.algorithms.columns import gather_samples, mean_and_stderr
from curvescope.core.ranks.shard_layout import current_shard_group

FEW = 6  # with fewer samples that are all equal, the interval is unknown
ENOUGH = 10  # samples from which their own scatter gives the interval
SKEWED = 3.0  # one eigenvalue dominates if the bound from norms is at most so many half widths
CONFIDENCE = 0.95


def student(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Half width, in standard errors, of Student's interval: 12.7, 4.3, 3.2, … to 1.96; nan for 0."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + confidence) / 2)) if degrees > 0 else math.nan


def mean_interval(
    mean: np.ndarray,
    stderr: np.ndarray,
    degrees: int,
    *,
    nonnegative: bool = False,
    bound: np.ndarray | float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """mean ± t · stderr.

    Args:
        bound: Smallest half width.
        nonnegative: The true value is not negative, but samples may be. The low end is at least zero, and the
            high end is a half width above zero even if the mean is below.
    """
    half = _half_width(np.asarray(stderr, dtype=float), np.asarray(mean, dtype=float), degrees)
    half = np.maximum(half, bound)
    if not nonnegative:
        return mean - half, mean + half
    return np.maximum(mean - half, 0.0), np.maximum(mean, 0.0) + half


def form_interval(
    mean: float,
    stderr: float,
    norm: float,
    degrees: int,
    *,
    nonnegative: bool = False,
    positive: bool = False,
) -> tuple[float, float]:
    """Return the interval of a mean of forms vᵀ A v, at least as long as Student's; few forms give a bound.

    Args:
        norm: Root mean square of ‖A v‖ over the same probes.
        nonnegative: Like in `mean_interval`.
        positive: If True, no form is negative and the mean is above zero; use `positive_interval`.
    """
    bound = student(degrees + 1) * math.sqrt(2 / (degrees + 1)) * norm
    if degrees + 1 >= ENOUGH and bound > SKEWED * student(degrees) * stderr:
        bound = 0.0
    if positive:
        low, high = positive_interval(np.asarray(mean), np.asarray(stderr), degrees, bound=bound)
    else:
        options: Any = {"nonnegative": nonnegative, "bound": bound}
        low, high = mean_interval(np.asarray(mean), np.asarray(stderr), degrees, **options)
    return float(low), float(high)


def median_interval(values: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the k-th smallest and k-th largest of (n,) values; the median of any distribution lies between
    them.

    Each value is below the median with probability ½, so that it is missed on either side with P(B < k), B
    binomial (n, ½); k is the largest with 2 P(B < k) ≤ 1 − confidence. nan if there is no such k: n < 6.
    """
    ordered, count, k, missed = np.sort(values), len(values), 0, 1
    while 2 * missed <= (1 - confidence) * 2**count:  # missed: 2ⁿ P(B ≤ k)
        k += 1
        missed += math.comb(count, k)
    return (float(ordered[k - 1]), float(ordered[-k])) if k else (math.nan, math.nan)


def positive_interval(
    mean: np.ndarray, stderr: np.ndarray, degrees: int, *, bound: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """mean · (1 + h/3)⁻³ to mean · exp(h + h min(h, 1) / 2), h = t · stderr / mean; a mean of zero is exact.

    Args:
        mean: Mean of samples that are not negative.
        bound: Smallest half width t · stderr.
    """
    mean, stderr = np.asarray(mean, dtype=float), np.asarray(stderr, dtype=float)
    ratio = np.divide(stderr, mean, out=np.zeros_like(mean), where=mean > 0)
    with np.errstate(over="ignore"):
        h = _half_width(ratio, (mean > 0).astype(float), degrees)
        h = np.maximum(h, np.divide(bound, mean, out=np.zeros_like(mean), where=mean > 0))
        return mean * (1 + h / 3) ** -3, mean * np.exp(h + h * np.minimum(h, 1.0) / 2)


def may_be_largest(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[int]:
    """Return the positions of values that may be the largest, by size: their intervals overlap that of the
    largest. An unknown interval overlaps every other.
    """
    order = np.argsort(-values, kind="stable").tolist()
    return [i for i in order if i == order[0] or not high[i] < low[order[0]]]


def _half_width(stderr: np.ndarray, size: np.ndarray, degrees: int) -> np.ndarray:
    """t · stderr; nan if fewer than six probes agree to the last digits, which may be chance. A form with two
    equally likely values has m equal samples with probability 2^(1 − m).
    """
    half = student(degrees) * stderr
    equal = (stderr <= 1e-12 * np.abs(size)) & (size != 0)
    return np.where(equal & (degrees + 1 < FEW), np.nan, half) if degrees + 1 < FEW else half


def jackknife(value: np.ndarray | float, without: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Standard error and bias of `value` from the values without each sample, along the first axis.

    For one sample both are nan.
    """
    count = without.shape[0]
    mean = without.mean(axis=0)
    if count == 1:
        return np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    stderr = np.sqrt((count - 1) / count * ((without - mean) ** 2).sum(axis=0))
    return stderr, (count - 1) * (mean - value)


def ratio_of_norms(top: np.ndarray, bottom: np.ndarray) -> tuple[float, float]:
    """√(Σ top / Σ bottom) over samples of two squared norms from the same probes, (P,) each, and its error.

    The ratio is nan if the bottom is zero.
    """
    if not bottom.sum() > 0:
        return float("nan"), float("nan")
    value = float(np.sqrt(top.sum() / bottom.sum()))
    if len(top) == 1:
        return value, float("nan")
    left = bottom.sum() - bottom
    without = np.sqrt(np.maximum(top.sum() - top, 0.0) / np.where(left > 0, left, np.nan))
    return value, float(jackknife(value, without)[0])


SAFE = {torch.float64: 120, torch.float32: 14}  # decades around one in which squares are normal numbers


class MeanSquare(NamedTuple):
    """The root of a mean of squares and the mean itself, with standard errors and 95 % intervals."""

    root: np.ndarray
    root_stderr: np.ndarray  # to first order
    low: np.ndarray  # of the root
    high: np.ndarray
    squared: np.ndarray  # zero or infinite if outside the range of float64
    squared_stderr: np.ndarray
    samples: np.ndarray  # the squares, likewise


def column_norms(X: Tensor) -> Tensor:
    """Lengths of the columns (m, k), in float64 on their device, without a float64 copy of them: (k,)."""
    scale, squares = safe_scale(X), DotSum(X)
    for (part,) in chunks(X):
        squares.add(part if scale == 1.0 else part * scale)
    return squares.root() / scale


def safe_scale(X: Tensor) -> float:
    """Return a power of two that scales the largest entry to about one; 1 if squares are in range anyway."""
    ends, dtype, group = X.aminmax() if X.numel() else (), X.dtype, current_shard_group()
    largest = max((abs(float(end)) for end in ends), default=0.0)
    largest = largest if group is None else group.max(largest, X.device)
    if largest == 0 or not math.isfinite(largest) or abs(math.log10(largest)) <= SAFE[dtype]:
        return 1.0
    limit = 1000 if dtype == torch.float64 else 120
    return 2.0 ** max(-limit, min(limit, -math.frexp(largest)[1]))


class NeighborCosines:
    """Cosines between neighboring columns of products that arrive in batches; input of `mean_square`.

    Args:
        count: Total number of columns. From `ENOUGH` on nothing is stored.
    """

    def __init__(self, count: int):
        self._stores_cosines, self._cosines = count < ENOUGH, list[Tensor]()
        self._previous: Tensor | None = None

    def add(self, product: Tensor, lengths: Tensor) -> None:
        """Take the next columns (m, k) and their lengths (k,)."""
        if not self._stores_cosines:
            return
        for column, length in zip(product.T, lengths.tolist(), strict=True):
            unit = column[:, None] / max(length, torch.finfo(product.dtype).tiny)
            if self._previous is not None:
                self._cosines.append(column_dots(self._previous, unit))
            self._previous = unit

    def gathered(self) -> np.ndarray | None:
        """Return all cosines, (count − 1,); None from `ENOUGH` columns on."""
        return gather_samples(self._cosines) if self._cosines else None


def mean_square(lengths: np.ndarray, cosines: np.ndarray | None = None) -> MeanSquare:
    """Mean of the squared lengths ‖A v‖² along the first axis, and its root.

    Args:
        lengths: (P, …) of P probes.
        cosines: (P − 1, …) between neighboring products A v. If given, they bound the interval from below,
            see `intervals`.
    """
    top = lengths.max(axis=0)
    unit = np.where((top > 0) & np.isfinite(top), np.exp2(np.frexp(top)[1].clip(-1000, 1000)), 1.0)
    mean, error = mean_and_stderr((lengths / unit) ** 2)
    root = np.sqrt(mean)
    bound = 0.0
    if cosines is not None and len(cosines):
        dots = cosines * (lengths[:-1] / unit) * (lengths[1:] / unit)
        bound = student(len(dots)) * np.sqrt(2 / len(lengths) * (dots**2).mean(axis=0))
    low, high = positive_interval(mean, error, len(lengths) - 1, bound=bound)
    slope = np.divide(error, 2 * root, out=np.zeros_like(root), where=(root > 0) | np.isnan(error))
    with np.errstate(over="ignore", under="ignore"):
        squared, squared_error = mean * unit**2, error * unit**2
        low, high = np.sqrt(low) * unit, np.sqrt(high) * unit
        return MeanSquare(root * unit, slope * unit, low, high, squared, squared_error, lengths**2)
