"""The numerical and the sampling error of a number, and whether the sample is large enough for it.

An operator is a weighted mean C = Σ_g w_g C_g over G groups of sequences, w_g = N_g / N. A number T of C is
a ratio estimate, because its numerator and N both depend on the sample. Leaving out one group at a time gives
the influence of each group,

    d_g = (1 − 1/G) (T − T_(−g)),    which is (1 − 1/G) w_g (T_g − T) / (1 − w_g) if T is linear in C,

and the variance of T over samples of this kind and size is G/(G − 1) Σ_g (d_g − d̄)² (the jackknife). A group
with most of the weight hardly changes T_g − T, but T_(−g) shows the difference to the others. If T is a mean
over P probes, each probe j has its own influences d_jg. Let V_probes be the variance over the values
of the probes, V_groups that over the mean influences, and V_both that over influences of single probes,
divided by P. Then

    numerical² = V_probes,    sampling² = max(V_groups − V_both, V_groups / 4).

V_groups alone would count the noise of the probes twice. The difference of two estimates may be near zero by
chance, so the sampling error is never less than half of √V_groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from curvescope.algorithms.estimates.intervals import student
from curvescope.core.number_format import between, rounded, with_error
from curvescope.core.result import Result

PRECISION = 0.1  # relative precision of a settled number, unless the caller asks for another
FASTEST, SLOWEST = 0.5, 0.8  # change by the next doubling of the data over that by the last one
MOST_LOG = 300.0  # largest exponent of an upper end
SIZES = (4, 2, 1)  # a trend is measured on quarters, on halves, and on the whole sample


@dataclass(frozen=True)
class Sampled(Result):
    """A number with its numerical error and its sampling error.

    The interval from `low` to `high` includes both errors. With other samples of this kind and size and other
    probes, 95 of 100 such intervals are meant to contain the mean of the number over these samples.
    Measured: 0.90 to 0.99 with 8 sequences and 0.88 to 0.98 with 128 for trace, norm and λ_max, but 0.81 to
    0.85 for norm and λ_max of 8 sequences if rare ones carry the curvature (docs/uncertainty.md).

    A number that is linear in the data has this mean on unlimited data too; for others `trend` shows how the
    number changes as the sample grows.
    """

    quantity: str
    value: float
    numerical: float  # standard error over probes, or a residual; 0 if exact
    sampling: float  # standard error over samples of this kind and size; nan for a single group
    low: float
    high: float
    num_groups: int
    unit: int  # consecutive sequences that are drawn together
    num_terms: float
    trend: np.ndarray  # (3,) mean over quarters, mean over halves, and the whole; nan if not measured
    influences: np.ndarray  # (G,) change of the number that each group causes, d_g
    num_probes: int = 0  # of the numerical error; 0 if that is a residual, or not known
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0))  # (G,) of the groups; empty if equal

    @property
    def stderr(self) -> float:
        """One standard error: both errors together; nan if the sampling error is not known."""
        return math.hypot(self.numerical, self.sampling)

    @property
    def relative(self) -> Sampled:
        """The number in units of itself: 1, with relative errors and influences; for ratios."""
        v = abs(self.value)
        return replace(
            self,
            value=math.copysign(1.0, self.value),
            numerical=self.numerical / v,
            sampling=self.sampling / v,
            low=self.low / v,
            high=self.high / v,
            trend=self.trend / v,
            influences=self.influences / v,
        )

    @property
    def spread(self) -> float:
        """The longer half of the interval, relative to the value; nan if it is not known."""
        if math.isnan(self.low) or math.isnan(self.high):
            return math.nan
        wider = max(self.high - self.value, self.value - self.low)
        return wider / abs(self.value) if self.value else math.inf if wider > 0 else 0.0

    @property
    def per_doubling(self) -> float:
        """Value on the whole sample divided by that on half of it; nan if it was not measured."""
        return float(self.trend[2] / self.trend[1]) if self.trend[1] else math.nan

    @property
    def kept_per_doubling(self) -> float:
        """The share q of what one doubling of the data changes that the next one does; 1/n has q = ½.

        A q between 0.5 and 0.8 is taken from the two doublings that were measured.
        """
        quarter, half, whole = self.trend.tolist()
        last, before = half - whole, quarter - half
        q = last / before if not math.isnan(quarter) and before * last > 0 else FASTEST
        return min(max(q, FASTEST), SLOWEST)

    @property
    def remaining(self) -> float:
        """Expected change from here to unlimited data, relative to the value; 0 if there is no trend."""
        return self.left(self.kept_per_doubling)

    def left(self, kept: float) -> float:
        """Expected change if the last doubling changed the value by D and the next ones by q D, q² D, …"""
        _, half, whole = self.trend.tolist()
        if math.isnan(half) or not whole:
            return 0.0
        return (half - whole) * kept / (1 - kept) / whole

    def settled(self, precision: float = PRECISION) -> bool:
        """True if half the interval plus the expected change by more data is at most `precision`."""
        return self.spread + abs(self.remaining) <= precision

    def verdict(self, precision: float = PRECISION) -> str:
        """`settled to 10 %`, or `not settled` with the reason."""
        if self.settled(precision):
            return f"settled to {100 * precision:g} %"
        if math.isnan(self.spread):
            return "not settled: one sequence, or one group of them, says nothing about others; use more data"
        if abs(self.remaining) > precision / 2:
            direction = "falling" if self.remaining > 0 else "rising"
            size = " in size" if self.value < 0 else ""
            change = f"×{self.per_doubling:.2f} per doubling"
            return f"not settled: still {direction}{size}, {change}; use more data"
        more = "data" if self.sampling > self.numerical else "probes" if self.num_probes else "steps"
        changed = {
            "data": "on other data of this size",
            "probes": "with other probes",
            "steps": "with more steps",
        }
        ends = between(self.low, self.high, 2)
        return f"not settled: {ends} (95 %) {changed[more]}; use more {more}"

    @property
    def headline(self) -> str:
        """The value with one standard error, or its order of magnitude if it is not settled."""
        return with_error(self.value, self.stderr) if self.settled() else f"about {rounded(self.value, 1)}"

    @property
    def words(self) -> str:
        """The verdict, the 95 % interval and both standard errors."""
        if math.isnan(self.spread):
            return self.verdict()
        ends = f"{between(self.low, self.high, 2)} (95 %) on other data of this size"
        interval = "" if ends in self.verdict() else f"; {ends}"
        errors = f"numerical {rounded(self.numerical, 2)}, sampling {rounded(self.sampling, 2)}"
        return f"{self.verdict()}{interval}; {errors}"

    def columns(self, name: str) -> dict[str, float | str]:
        """The number as columns of a table: value, both errors, interval and verdict."""
        return {
            name: self.value,
            f"{name}_numerical": self.numerical,
            f"{name}_sampling": self.sampling,
            f"{name}_low": self.low,
            f"{name}_high": self.high,
            f"{name}_verdict": self.verdict(),
        }

    def inverse(self, factor: float, quantity: str) -> Sampled:
        """`factor` divided by the number, such as the learning-rate ceiling 2/λ_max."""
        scale = factor / self.value**2
        low, high = sorted((factor / self.high, factor / self.low))
        return replace(
            self,
            quantity=quantity,
            value=factor / self.value,
            numerical=scale * self.numerical,
            sampling=scale * self.sampling,
            low=low,
            high=high,
            trend=factor / self.trend,
            influences=-scale * self.influences,
        )


def half_of_difference(first: Sampled, second: Sampled, *, paired: bool) -> float:
    """Half of the 95 % interval over samples of first − second, without numerical errors; nan if unknown.

    Args:
        first: A number.
        second: Another number.
        paired: True if both were measured on the same groups of sequences. Effects that both share cancel.
    """
    groups = min(first.num_groups, second.num_groups)
    if groups < 2:
        return math.nan
    if paired and len(first.influences) == len(second.influences):
        influences = first.influences - second.influences
        return student(degrees_of(influences, first.weights)) * _spread_of(influences)  # pyright: ignore[reportArgumentType]
    degrees = min(degrees_of(number.influences, number.weights) for number in (first, second))
    return student(degrees) * math.hypot(first.sampling, second.sampling)  # pyright: ignore[reportArgumentType]


def log_ratio(first: Sampled, second: Sampled) -> tuple[float, float, float]:
    """log(first / second) of two numbers of one sample, with its 95 % interval.

    The influences of a group on both numbers are compared group by group, so an effect that both share
    cancels. The ends are nan if a number is not positive, or if there is a single group.
    """
    if not (first.value > 0 and second.value > 0) or len(first.influences) != len(second.influences):
        return math.nan, math.nan, math.nan
    value = math.log(first.value / second.value)
    numerical = math.hypot(first.numerical / first.value, second.numerical / second.value)
    influences = first.influences / first.value - second.influences / second.value
    sampling = _spread_of(influences)
    degrees = degrees_of(influences, first.weights)
    low, high = interval(value, numerical, sampling, 0, degrees, positive=False)
    return value, low, high


def influences_of(values: np.ndarray, without: np.ndarray) -> np.ndarray:
    """Influences d_g of G groups, (…, G), from the values without each group, (…, G)."""
    return (1 - 1 / without.shape[-1]) * (values - without)


def linear_influences(parts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Influences d_g of a weighted mean, (…, G), from its values on each group, (…, G)."""
    G = len(weights)
    if G < 2:
        return np.zeros_like(parts)
    means = (parts @ weights)[..., None]
    return (1 - 1 / G) * weights / others(weights) * (parts - means)


def others(weights: np.ndarray) -> np.ndarray:
    """Weight 1 − w_g of all other groups together, (G,); at least the rounding error of 1."""
    return np.maximum(1 - weights, np.finfo(float).eps)


def jackknife(value: float, without: np.ndarray) -> float:
    """Standard error over samples, from the values without each group, (G,); nan for one group."""
    return _spread_of(influences_of(np.array(value), without))


def two_way(values: np.ndarray, influences: np.ndarray) -> tuple[float, float]:
    """Numerical and sampling standard error of the mean over P probes.

    Args:
        values: The number from each probe, (P,).
        influences: Influence of each group on each of these, (P, G). With a single probe the sampling error
            includes the noise of that probe.
    """
    P = len(values)
    groups = _spread_of(influences.mean(axis=0))
    if P == 1:
        return math.nan, groups
    G = influences.shape[1]
    both = G / (G - 1) * float(influences.var(axis=0, ddof=1).sum()) / P if G > 1 else math.nan
    numerical = float(values.std(ddof=1)) / math.sqrt(P)
    return numerical, math.sqrt(max(groups**2 - both, groups**2 / 4)) if G > 1 else math.nan


def degrees_of(influences: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Degrees of freedom of a sampling error: G − 1 for normal influences, fewer if a few groups dominate.

    The variance of a sample variance of G values with excess kurtosis κ is (2/(G − 1) + κ/G) σ⁴; a χ² with as
    much has 2/(2/(G − 1) + κ/G) degrees of freedom. Groups of unequal weight have at most
    (1 − 1/G) (Σ w²)² / Σ w⁴ (Satterthwaite), but at least one.

    Args:
        influences: Influences of the groups, (G,).
        weights: Their weights, (G,), by default equal.
    """
    G = len(influences)
    squares = (influences - influences.mean()) ** 2 if G else np.zeros(0)
    if G < 2 or not squares.sum() > 0:
        return float(G - 1)
    kurtosis = float((squares**2).mean() / squares.mean() ** 2) - 3
    degrees = 2 / (2 / (G - 1) + max(kurtosis, 0.0) / G)
    if weights is None or len(weights) != G:
        return degrees
    most = (1 - 1 / G) * float((weights**2).sum() ** 2 / (weights**4).sum())
    return min(degrees, max(most, 1.0))


def upper_end(half: float) -> float:
    """Upper end over value, minus one, of a positive number whose logarithm has this half interval."""
    return math.expm1(min(half + half * min(half, 1.0) / 2, MOST_LOG))


def interval(
    value: float,
    numerical: float,
    sampling: float,
    probes: int,
    degrees: float,
    *,
    positive: bool,
    crossing: bool = False,
) -> tuple[float, float]:
    """95 % interval from both errors, by Student's t with Welch–Satterthwaite degrees of freedom.

    With h = t · error / value, the interval of a number that cannot be negative goes from value · exp(−h) to
    value · exp(h + h min(h, 1)/2). It is longer above because samples without the rare sequences of a large
    curvature give a number and an error that are both too small.

    Args:
        value: The number.
        numerical: Its numerical error.
        sampling: Its sampling error.
        probes: Number of probes of the numerical error, or 0 if that is a bound such as a residual.
        degrees: Degrees of freedom of the sampling error, see `degrees_of`.
        positive: True if the number cannot be negative, or is skewed as such a number is.
        crossing: True if a skewed number may be negative on other data; the lower end is then value (1 − h).
    """
    if degrees <= 0 or math.isnan(sampling) or math.isnan(numerical):
        return math.nan, math.nan
    total = numerical**2 + sampling**2
    if total == 0:
        return value, value
    shares = sampling**4 / degrees + (numerical**4 / (probes - 1) if probes > 1 else 0.0)
    freedom = total**2 / shares if shares > 0 else math.inf
    half = student(freedom) * math.sqrt(total)  # pyright: ignore[reportArgumentType]
    if positive and value > 0:
        h = half / value
        return value * (1 - h if crossing else math.exp(-h)), value * (1 + upper_end(h))
    return value - half, value + half


def _spread_of(influences: np.ndarray) -> float:
    """√(G/(G − 1) Σ_g (d_g − d̄)²): the jackknife's standard error; nan for one group."""
    G = len(influences)
    if G < 2:
        return math.nan
    return math.sqrt(G / (G - 1) * float(((influences - influences.mean()) ** 2).sum()))
