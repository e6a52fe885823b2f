"""Size of the sample that a number needs: predicted from a pilot and the error that was measured on it.

With n terms in the pilot and m in the sample that is asked about, f = m / n,

    relative error(m) = exp(h + h min(h, 1)/2) − 1 + |r| q^log₂ f    with h = t √(ν² P/P' + s² / f),

where ν and s are the numerical and the sampling error of the pilot relative to its value, P and P' the
probes of the pilot and of the run, r the change that more data would still make (`Sampled.remaining`), q the
share of it that a doubling leaves, and t Student's quantile for as many groups as a split has at most. The
least m with an error of at most `precision` is the size. Its range takes the ends of the 95 % interval of s,
whose variance is from G groups, together with the fastest and the slowest q. A measured error has noise too:
it is compared with the range that the ratio of two such variances has (Fisher's F).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from curvescope.algorithms.checks import check_number
from curvescope.algorithms.estimates.intervals import student
from curvescope.core.errors import UsageError
from curvescope.core.number_format import between, rounded
from curvescope.core.result import Result
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import OPERATORS
from curvescope.problem import Problem
from curvescope.sampling.errors import Quantity, sampling_errors
from curvescope.sampling.groups import MOST_GROUPS
from curvescope.sampling.statistics import FASTEST, PRECISION, SIZES, SLOWEST, Sampled, upper_end

SHARE = 0.5  # share of the precision that the probes may take, at most
FARTHEST = 2.0**30  # times the pilot: farther than that nothing is predicted
DIGITS = 2  # digits of a predicted size
LARGEST = 50.0  # half interval on a logarithmic scale; a longer one says nothing


@dataclass(frozen=True)
class SampleSize(Result):
    """The data that a number needs for a precision, with the range that the pilot's own noise leaves.

    The precision is relative and counts what `Sampled.settled` counts: the longer half of the 95 % interval
    and the change that more data would still make.
    """

    quantity: str
    precision: float
    num_terms: float  # counted targets; inf if no size within reach is enough
    num_sequences: float
    low: float  # terms; the range of 95 % that comes from the error of the pilot's error
    high: float
    num_probes: int  # probes that the numerical error needs; 0 if the number has no probes
    pilot: Sampled
    pilot_probes: int
    pilot_sequences: int

    @property
    def error(self) -> float:
        """Relative error of the pilot."""
        return _total(self.pilot)

    def error_at(self, num_terms: float, num_probes: int | None = None) -> tuple[float, float, float]:
        """Relative error that a sample of so many terms is expected to have, and the ends of its range.

        Args:
            num_probes: Probes of that measurement; by default those that were predicted.
        """
        from scipy.special import fdtri

        factor, own = num_terms / self.pilot.num_terms, self.pilot.num_groups - 1
        numerical = _numerical(self.pilot)
        if self.pilot_probes:
            numerical *= math.sqrt(self.pilot_probes / (num_probes or self.num_probes))
        ends = (math.sqrt(float(fdtri(MOST_GROUPS - 1, own, p))) for p in (0.025, 0.975))
        low, high = (_error(self.pilot, numerical, case, factor) for case in _cases(*ends))
        return _error(self.pilot, numerical, _Case(1.0, self.pilot.kept_per_doubling), factor), low, high

    @property
    def words(self) -> str:
        """One line: the tokens, their range, and what the pilot had."""
        what = f"{self.quantity} to {100 * self.precision:g} %"
        had = f"the pilot of {self.pilot.num_terms:,.0f} has an error of {_percent(self.error)}"
        if math.isinf(self.num_terms):
            return f"{what}: no size can be predicted; {had}"
        if self.pilot.settled(self.precision):
            return f"{what}: the pilot of {self.pilot.num_terms:,.0f} tokens is enough"
        more = self.num_probes > self.pilot_probes
        probes = f" and {self.num_probes} probes" if more else ""
        count = rounded(self.num_sequences, DIGITS)
        size = f"about {rounded(self.num_terms, DIGITS)} tokens ({count} sequences)"
        ends = between(self.low, self.high, DIGITS)
        likely = f", between {ends.replace(' to ', ' and ')}" if " to " in ends else ""
        return f"{what}: {size}{likely}{probes}; {had}"


@dataclass(frozen=True)
class SizeCheck(Result):
    """A prediction beside what was measured on data that the pilot did not see."""

    predicted: float  # relative error expected on so many terms
    low: float
    high: float
    measured: Sampled
    error: float  # relative error measured: interval and trend

    @property
    def held(self) -> bool:
        """True if the error that was measured is at most the upper end of what was predicted."""
        return self.error <= self.high

    @property
    def words(self) -> str:
        """Both errors, and the verdict."""
        outcome = "held" if self.held else "did not hold"
        return (
            f"on {self.measured.num_terms:,.0f} other tokens {_percent(self.error)}, predicted "
            f"{_percent(self.predicted)} ({_percent(self.low)} to {_percent(self.high)}): {outcome}"
        )


def sample_size(
    op: CurvatureOperator | Problem,
    quantity: Quantity = "largest",
    *,
    precision: float = PRECISION,
    num_probes: int = 8,
    unit: int = 1,
    seed: int = 0,
) -> SampleSize:
    """Data that a number needs for a relative precision, predicted from a pilot.

    Args:
        op: An operator on the pilot's data, or a problem, which stands for its Hessian.
        quantity: `trace`, `norm`, `largest` or `smallest`, as in `sampling_error`.
        precision: 0.1 for 10 %: half of the 95 % interval and what more data would still change, together.
        num_probes: Random vectors of `trace` and `norm` on the pilot, at least 2.
        unit: Consecutive sequences of the data that are drawn together.
        seed: Seed of the probes and of the search for eigenvectors.
    """
    how = {"precision": precision, "num_probes": num_probes, "unit": unit, "seed": seed}
    return sample_sizes(op, (quantity,), **how)[quantity]


def sample_sizes(
    op: CurvatureOperator | Problem,
    quantities: Sequence[Quantity] = ("trace", "norm", "largest", "smallest"),
    *,
    precision: float = PRECISION,
    num_probes: int = 8,
    unit: int = 1,
    seed: int = 0,
) -> dict[Quantity, SampleSize]:
    """Data that several numbers need, like `sample_size`, from one pilot."""
    check_number("precision", precision, above=0.0)
    matrix = OPERATORS["hessian"](op) if isinstance(op, Problem) else op
    pilots = sampling_errors(matrix, quantities, num_probes=num_probes, unit=unit, seed=seed)
    count = matrix.problem.batches.num_sequences
    return {
        quantity: size_from(
            pilot,
            precision=precision,
            num_sequences=count,
            num_probes=num_probes if quantity in ("trace", "norm") else 0,
        )
        for quantity, pilot in pilots.items()
    }


def size_from(
    pilot: Sampled, *, precision: float = PRECISION, num_sequences: int, num_probes: int = 0
) -> SampleSize:
    """Data that a number needs, like `sample_size`, from a number that was measured with its errors.

    Args:
        num_sequences: sequences of the pilot.
        num_probes: probes of the pilot; 0 if the number has none.
    """
    if math.isnan(pilot.sampling):
        raise UsageError(
            f"expected a pilot of at least two sequences, got {num_sequences}",
            hint=f"{SIZES[0]} or more sequences also show the trend",
        )
    probes, numerical = num_probes, _numerical(pilot)
    if num_probes and _half(numerical) > (most := math.log1p(SHARE * precision)):
        probes = math.ceil(num_probes * (_half(numerical) / most) ** 2)
        numerical *= math.sqrt(num_probes / probes)
    cases = [_Case(1.0, pilot.kept_per_doubling), *_cases(*_range_of_error(pilot.num_groups))]
    factors = [_factor(pilot, numerical, case, precision) for case in cases]
    least = SIZES[0] * pilot.unit / num_sequences  # quarters are needed for the trend
    size, low, high = (max(factor, least) * pilot.num_terms for factor in factors)
    each = pilot.num_terms / num_sequences
    return SampleSize(
        quantity=pilot.quantity,
        precision=precision,
        num_terms=size,
        num_sequences=math.ceil(size / each) if math.isfinite(size) else math.inf,
        low=low,
        high=high,
        num_probes=probes,
        pilot=pilot,
        pilot_probes=num_probes,
        pilot_sequences=num_sequences,
    )


def check_sample_sizes(
    sizes: Mapping[Quantity, SampleSize],
    op: CurvatureOperator | Problem,
    *,
    num_probes: int | None = None,
    seed: int = 1,
) -> dict[Quantity, SizeCheck]:
    """Compare predictions with the errors on data that the pilot did not see.

    Args:
        sizes: Predictions from one pilot, as `sample_sizes` returns them.
        op: The same operator on other data, of any size.
        num_probes: Random vectors of trace and norm; by default as many as were predicted.
        seed: Seed of the probes, different from the pilot's.
    """
    matrix = OPERATORS["hessian"](op) if isinstance(op, Problem) else op
    first = next(iter(sizes.values()))
    probes = num_probes or max(2, *(size.num_probes for size in sizes.values()))
    how = {"num_probes": probes, "unit": first.pilot.unit, "seed": seed}
    measured = sampling_errors(matrix, tuple(sizes), **how)
    return {
        quantity: SizeCheck(*sizes[quantity].error_at(number.num_terms, probes), number, _total(number))
        for quantity, number in measured.items()
    }


# ------------------------------------------------------------------------------------------------ the formula


class _Case(NamedTuple):
    """A possible error and trend of a pilot."""

    share: float  # its sampling error in units of the measured one
    kept: float  # q, the share of a change that the next doubling makes


def _cases(low: float, high: float) -> tuple[_Case, _Case]:
    """The best and the worst case of a sampling error between these multiples of the measured one."""
    return _Case(low, FASTEST), _Case(high, SLOWEST)


def _error(pilot: Sampled, numerical: float, case: _Case, factor: float) -> float:
    """Relative error at `factor` times the pilot's data."""
    if not pilot.value:
        return math.inf if pilot.sampling > 0 else 0.0
    sampling = case.share * pilot.sampling / abs(pilot.value) / math.sqrt(factor)
    half = _half(math.hypot(numerical, sampling))
    left = abs(pilot.left(case.kept)) * case.kept ** math.log2(factor)
    return (upper_end(half) if half < LARGEST else math.inf) + left


def _factor(pilot: Sampled, numerical: float, case: _Case, precision: float) -> float:
    """The least factor at which the error is at most the precision; inf if none is within reach."""
    low, high = 1 / FARTHEST, FARTHEST
    if _error(pilot, numerical, case, high) > precision:
        return math.inf
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        if _error(pilot, numerical, case, middle) > precision:
            low = middle
        else:
            high = middle
    return high


def _half(error: float) -> float:
    """Half of the 95 % interval, from a relative standard error."""
    return student(MOST_GROUPS - 1) * error


def _numerical(pilot: Sampled) -> float:
    return pilot.numerical / abs(pilot.value) if pilot.value else 0.0


def _range_of_error(groups: int) -> tuple[float, float]:
    """Ends of the 95 % interval of a standard deviation from so many groups, relative to its estimate."""
    from scipy.special import chdtri

    degrees = groups - 1
    return tuple(math.sqrt(degrees / float(chdtri(degrees, tail))) for tail in (0.025, 0.975))  # pyright: ignore[reportReturnType]


def _total(number: Sampled) -> float:
    return number.spread + abs(number.remaining)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if math.isfinite(share) and share < 10 else "over 1,000 %"
