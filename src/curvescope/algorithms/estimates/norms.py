"""Norms of an operator, square or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from curvescope.algorithms.checks import (
    check_choice,
    check_count,
    check_operator,
    fixed_operator,
    relative_tolerance,
)
from curvescope.algorithms.columns import gather_samples, norms, probe_batches
from curvescope.algorithms.estimates.intervals import ENOUGH, NeighborCosines, column_norms, mean_square
from curvescope.algorithms.spectra.lanczos import eigsh
from curvescope.core.operator import FunctionOperator, LinearOperator
from curvescope.core.result import Result, Tabular
from curvescope.core.seeds import Probe
from curvescope.viz import estimates

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class FrobeniusNorm(Tabular):
    """Frobenius norm from random probes; `squared` is the estimate without bias.

    The norm lies between `low` and `high` 95 times in 100, see `intervals`; nan for one probe. If `is_bound`,
    too few probes were drawn for that: the ends are then a bound that holds at least as often. If the
    squares leave the range of float64, `squared` and `samples` are 0 or inf while `value` is right.
    """

    value: float  # √squared
    stderr: float  # squared_stderr / (2 value), to first order
    squared: float
    squared_stderr: float
    samples: np.ndarray  # (probes,) ‖A v‖²
    num_products: int
    seed: int
    low: float = math.nan
    high: float = math.nan
    probe: str = "rademacher"

    @property
    def is_bound(self) -> bool:
        """True if fewer than ten probes were drawn, so that `low` and `high` are a bound."""
        return len(self.samples) < ENOUGH

    def table(self) -> Any:
        """One row per sample."""
        return {"sample": np.arange(1, len(self.samples) + 1), "squared": self.samples}

    def plot(self, ax: Axes | None = None) -> Axes:
        """Samples, their mean and its 95 % interval."""
        return estimates.samples(ax, self.samples, self.squared, (self.low**2, self.high**2), label="‖A v‖²")


@dataclass(frozen=True)
class SpectralNorm(Result):
    """Largest singular value; the operator has a singular value within `error` of `value`."""

    value: float
    error: float  # residual ‖Aᵀ u − σ v‖ of unit vectors with A v = σ u
    converged: bool
    num_products: int  # products with A and with Aᵀ together
    tol: float
    seed: int


@fixed_operator
def frobenius_norm(
    op: LinearOperator, *, num_probes: int = 32, probe: Probe = "rademacher", seed: int = 0
) -> FrobeniusNorm:
    """‖A‖_F from E ‖A v‖² = ‖A‖_F² over random probes v. Needs no transposed products.

    Memory: 2c vectors, the probes and their products, for the c columns that one product takes
    (`columns_at_once`), whatever the number of probes; three vectors more for fewer than ten probes.
    """
    check_operator(op, "frobenius_norm")
    check_count("num_probes", num_probes, at_least=1)
    check_choice("probe", probe, get_args(Probe))
    batches = probe_batches(op, num_probes, seed=seed, kind=probe, what="Frobenius norm")
    lengths, cosines = [], NeighborCosines(num_probes)
    for V in batches:
        product = op @ V
        lengths.append(column_norms(product))
        cosines.add(product, lengths[-1])
        del product  # free it before the next product
    found = mean_square(gather_samples(lengths), cosines.gathered())
    return FrobeniusNorm(
        value=float(found.root),
        stderr=float(found.root_stderr),
        squared=float(found.squared),
        squared_stderr=float(found.squared_stderr),
        samples=found.samples,
        num_products=num_probes,
        seed=seed,
        low=float(found.low),
        high=float(found.high),
        probe=probe,
    )


@fixed_operator
def spectral_norm(
    op: LinearOperator, *, tol: float | None = None, max_products: int | None = None, seed: int = 0
) -> SpectralNorm:
    """Largest singular value of A: the largest |eigenvalue| if A is symmetric, else from AᵀA or AAᵀ.

    The value is ‖A v‖ for a unit vector v, hence a lower bound up to rounding. Squaring costs no digits of
    the largest singular value; the smaller of the two squares is used. Memory: as `eigsh` with k = 1.

    Args:
        tol: error that counts as converged, relative to the value; 1e-8 in float64, 1e-4 in float32.
        max_products: most products with A and Aᵀ together.
    """
    check_operator(op, "spectral_norm")
    tol = relative_tolerance(tol, op.dtype)
    if max_products is not None:
        check_count("max_products", max_products, at_least=6)
    if op.symmetric:
        pair = eigsh(op, 1, which="LM", tol=tol, max_products=max_products, vectors=False, seed=seed)
        value, error = float(abs(pair.values[0])), float(pair.residuals[0])
        return SpectralNorm(value, error, pair.converged, pair.num_products, tol, seed)
    A = op if op.shape[1] <= op.shape[0] else op.T
    n = A.shape[1]
    options = {"dtype": op.dtype, "device": op.device, "symmetric": True, "psd": True}
    square = FunctionOperator(lambda V: A.T @ (A @ V), (n, n), **options)
    square.shards = None if A.shards is None else (A.shards[1], A.shards[1])
    limit = None if max_products is None else max_products // 2 - 1
    pair = eigsh(square, 1, which="LA", tol=tol, max_products=limit, seed=seed)
    assert pair.vectors is not None
    v = pair.vectors[:, 0]
    u = A @ v
    value = float(norms(u))
    back = A.T @ (u / value) if value > 0 else torch.zeros_like(v)
    error = float(norms(back - value * v))
    products = 2 * pair.num_products + (2 if value > 0 else 1)
    return SpectralNorm(value, error, pair.converged and error <= tol * value, products, tol, seed)
