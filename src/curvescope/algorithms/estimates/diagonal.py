"""The diagonal of an operator from random probes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import parts
from curvescope.algorithms.checks import check_choice, check_count, check_square, fixed_operator
from curvescope.algorithms.columns import columns_at_once, probe_batches, summing_dtype, to_numpy
from curvescope.algorithms.estimates.intervals import (
    ENOUGH,
    mean_interval,
    positive_interval,
    safe_scale,
    student,
)
from curvescope.algorithms.estimates.xdiag import leave_one_out
from curvescope.algorithms.vectors import own_entries
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import track
from curvescope.core.result import Tabular
from curvescope.core.seeds import Probe
from curvescope.viz import estimates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Method = Literal["hutchinson", "xdiag", "roots"]
FEWEST: dict[str, int] = {"hutchinson": 1, "xdiag": 4, "roots": 1}


@dataclass(frozen=True)
class DiagonalEstimate(Tabular):
    """Diagonal entries with their standard errors over probes (nan for one probe).

    For a positive semi-definite operator no value is negative: a mean below zero is noise, and the value is
    0.
    """

    values: Tensor  # (n,) in the operator's dtype and on its device
    stderr: Tensor  # (n,)
    num_products: int
    seed: int
    psd: bool = False
    method: str = "hutchinson"
    probe: str = "rademacher"
    num_samples: int = 0  # samples behind the error; 0 in results of version 0.1, which use the products
    row_norms: Tensor | None = None  # (n,) for few probes of signs, or for XDiag: bounds the intervals

    @property
    def is_bound(self) -> bool:
        """True if fewer than ten probes were drawn, so that the ends of `interval` are a bound."""
        return self.row_norms is not None

    @property
    def interval(self) -> tuple[Tensor, Tensor]:
        """Ends of 95 % intervals of the entries, (n,) each, see `intervals`; nan for one probe.

        If `is_bound`, too few probes were drawn for that: the ends are then a bound that holds at least as
        often.
        """
        degrees = (self.num_samples or self.num_products) - 1
        values, stderr = to_numpy(self.values), to_numpy(self.stderr)
        count, bound = degrees + 1, 0.0
        if self.row_norms is not None:
            bound = student(count) / math.sqrt(count) * to_numpy(self.row_norms)
        if self.method == "roots":
            low, high = positive_interval(values, stderr, degrees)
        else:
            low, high = mean_interval(values, stderr, degrees, nonnegative=self.psd, bound=bound)
        return torch.as_tensor(low).to(self.values), torch.as_tensor(high).to(self.values)

    def table(self) -> Any:
        """One row per entry."""
        names, columns = ("value", "stderr", "low", "high"), (self.values, self.stderr, *self.interval)
        return dict(zip(names, map(to_numpy, columns), strict=True))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Entries from the largest to the smallest."""
        return estimates.entries(ax, to_numpy(self.values), label="diagonal entry")


@fixed_operator
def diagonal(
    op: LinearOperator,
    *,
    num_probes: int = 64,
    method: Method = "hutchinson",
    probe: Probe = "rademacher",
    seed: int = 0,
) -> DiagonalEstimate:
    """Diagonal of a square operator from `num_probes` products, or squares, without bias.

    Memory: 2c vectors for the c columns of one product (`columns_at_once`), probes and products, for any
        number of probes; two vectors in float64, or three for Gaussian probes or fewer than ten of signs; and
        the result. "xdiag" takes the three vectors of its result, num_probes vectors, and its probes: one
        byte per sign, or full Gaussian vectors.

    Args:
        num_probes: Number of products; at least 4 for XDiag, which takes an even number.
        method: "hutchinson", Σ v ∘ (A v) over Σ v ∘ v (Bekas, Kokiopoulou and Saad 2007). For one probe of
            signs the variance of entry i is the sum of squares of the other entries of row i, so one probe
            suffices for a diagonal operator. P Gaussian probes divide this by P − 2: entry i is the slope of
            a regression of (A v)ᵢ on vᵢ, whose interval is exact. "xdiag" (Epperly, Tropp and Webber 2024)
            removes the dominant eigenspace first, see `xdiag`; an operator that is not symmetric needs a
            transposed product. "roots" takes no products: it averages squares that an operator with
            `random_squares`, such as `cs.GGN`, draws itself. S of them have a relative error of at most
            √(2/S) in every entry, for any matrix.
    """
    check_square(op, "diagonal")
    check_choice("method", method, get_args(Method))
    check_choice("probe", probe, get_args(Probe))
    what = "num_probes" if method == "hutchinson" else f"num_probes for {method}"
    check_count(what, num_probes, at_least=FEWEST[method])
    if method == "xdiag":
        return _xdiag(op, num_probes // 2, probe, seed)
    row_norms = None
    if method == "hutchinson" and probe == "gaussian":
        values, stderr = _slopes(op, num_probes, seed)
    else:
        samples = _drawn if method == "roots" else _products
        values, stderr = _mean(op, samples(op, num_probes, probe, seed))
        if method == "hutchinson" and 1 < num_probes < ENOUGH:
            row_norms = _root_mean_square(values, stderr, num_probes).to(op.dtype)
    products = 0 if method == "roots" else num_probes
    estimates = _as_dtype(op, values), stderr.to(op.dtype)
    return DiagonalEstimate(*estimates, products, seed, op.psd, method, probe, num_probes, row_norms)


def _root_mean_square(mean: Tensor, stderr: Tensor, count: int) -> Tensor:
    """Return the root mean square of the samples vᵢ (A v)ᵢ; for signs it estimates the norm of row i."""
    return torch.hypot(mean, math.sqrt(count - 1) * stderr)


def _as_dtype(op: LinearOperator, values: Tensor) -> Tensor:
    """Cast to the operator's dtype, and clip noise below zero if the operator is PSD."""
    return (values.clamp_(min=0.0) if op.psd else values).to(op.dtype)


def _xdiag(op: LinearOperator, count: int, kind: Probe, seed: int) -> DiagonalEstimate:
    """Estimate the diagonal by XDiag; with as many products as rows, compute it exactly."""
    if count >= op.shape[0]:
        values = own_entries(op, op.to_dense(chunk=columns_at_once(op)).diagonal()).clone()
        products, stderr, row_norms = op.shape[0], torch.zeros_like(values), None
    else:
        values, stderr, row_norms = leave_one_out(op, count, kind=kind, seed=seed)
        products, row_norms = 2 * count, row_norms if count < ENOUGH else None
    return DiagonalEstimate(
        _as_dtype(op, values), stderr, products, seed, op.psd, "xdiag", kind, count, row_norms
    )


def _products(op: LinearOperator, num_probes: int, kind: Probe, seed: int) -> Iterator[Tensor]:
    """Yield v ∘ (A v) for signs v, in columns (n, c)."""
    for V in probe_batches(op, num_probes, seed=seed, kind=kind, what="diagonal"):
        yield V.mul_(op @ V)


def _drawn(op: LinearOperator, count: int, kind: Probe, seed: int) -> Iterator[Tensor]:
    """Return the operator's random squares, in columns (n, c)."""
    squares = getattr(op, "random_squares", None)
    if squares is None:
        raise UsageError(f"{op!r} has no random_squares, which method='roots' needs", hint="cs.GGN does")
    width = min(columns_at_once(op), count)
    return track(squares(count, probe=kind, seed=seed, at_once=width), "diagonal", total=-(-count // width))


def _mean(op: LinearOperator, samples: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean of columns of samples and its standard error, (n,) each; nan for a single column."""
    wide = summing_dtype(op.device)
    mean = torch.zeros(op.local_shape[0], dtype=wide, device=op.device)
    squares = torch.zeros_like(mean)  # sum of squared deviations from the mean
    count, scale = 0, 1.0
    for V in samples:
        scale = safe_scale(V) if count == 0 else scale  # squares stay in range
        for part in parts(len(mean), mean.device, width=V.shape[1]):
            _add(mean[part], squares[part], V[part].to(wide).mul_(scale), count)
        count += V.shape[1]
    if count == 1:
        return mean.div_(scale), torch.full_like(mean, math.nan)
    return mean.div_(scale), squares.div_(count - 1).div_(count).sqrt_().div_(scale)


def _slopes(op: LinearOperator, num_probes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the slope of (A v)ᵢ on vᵢ over Gaussian v and its standard error, (n,) each; nan for one v."""
    wide = summing_dtype(op.device)
    slope, rest, weight = (torch.zeros(op.local_shape[0], dtype=wide, device=op.device) for _ in range(3))
    scale = 0.0
    for V in probe_batches(op, num_probes, seed=seed, kind="gaussian", what="diagonal"):
        product = op @ V
        scale = scale or safe_scale(product)
        for part in parts(len(slope), slope.device, width=2 * V.shape[1]):
            y = product[part].to(wide).mul_(scale)
            for j, x in enumerate(V[part].to(wide).T):
                _fit(slope[part], rest[part], weight[part], x, y[:, j])
    if num_probes == 1:
        return slope.div_(scale), torch.full_like(slope, math.nan)
    return slope.div_(scale), rest.div_(num_probes - 1).div_(weight).sqrt_().div_(scale)


def _fit(slope: Tensor, rest: Tensor, weight: Tensor, x: Tensor, y: Tensor) -> None:
    """Add a point (x, y) to the fit of a line through the origin: update slope, Σ (y − slope x)² and Σ x² in
    place.
    """
    error, before = y - slope * x, weight.clone()
    weight += x**2
    slope += error * x / weight
    rest += error**2 * before / weight


def _add(mean: Tensor, squares: Tensor, samples: Tensor, num_earlier: int) -> None:
    """Add columns of samples (n, c) to the mean and squared deviations of `seen` others, in place.

    Chan, Golub and LeVeque 1983.
    """
    count = samples.shape[1]
    batch_mean = samples.mean(dim=1)
    shift = batch_mean - mean
    squares += ((samples - batch_mean[:, None]) ** 2).sum(dim=1) + shift**2 * (
        num_earlier * count / (num_earlier + count)
    )
    mean += shift * (count / (num_earlier + count))
