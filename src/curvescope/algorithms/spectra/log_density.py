"""The density of a positive semi-definite operator's eigenvalues on a logarithmic axis.

With the measures Σ wᵢ δ(λ − θᵢ) of the probes and a threshold τ, the density of x = log₁₀ λ is

    f(x) = Σ_{θᵢ > τ} wᵢ N(x; log₁₀ θᵢ, width²),    ∫ f dx = 1 − (share of the eigenvalues up to τ).

Eigenvalues below the threshold do not appear on such an axis: they are reported as a share, with bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms.checks import check_count, check_number
from curvescope.algorithms.columns import mean_and_stderr
from curvescope.algorithms.estimates.intervals import mean_interval, positive_interval
from curvescope.algorithms.spectra.distribution import SpectrumShare, cumulative
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.result import Tabular
from curvescope.viz import spectrum

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUNDING = 1e-7  # relative to the largest node: smaller nodes are rounding of float32 products
NARROWEST = 0.05  # decades


@dataclass(frozen=True)
class LogDensity(Tabular):
    """Density of log₁₀ λ, per decade, of the eigenvalues above a threshold, and the share that is not."""

    grid: np.ndarray  # (G,) eigenvalues, evenly in their logarithm
    density: np.ndarray  # (G,) mean over probes; its integral over log₁₀ λ is 1 − below.value
    stderr: np.ndarray  # (G,) over probes; nan for one, zero when exact
    width: float  # standard deviation of the Gaussian, in decades
    threshold: float
    below: SpectrumShare  # of the eigenvalues up to the threshold, with certain bounds for the probes' mean
    num_probes: int
    exact: bool

    @property
    def below_interval(self) -> tuple[float, float]:
        """Ends of the 95 % interval of the share below: Student's around the certain bounds of the probes."""
        ends = [
            mean_interval(np.asarray(end), np.asarray(self.below.stderr), self._degrees, nonnegative=True)
            for end in (self.below.low, self.below.high)
        ]
        if self.exact:
            return self.below.value, self.below.value
        return float(ends[0][0]), min(1.0, float(ends[1][1]))

    @property
    def _degrees(self) -> int:
        return 1 if self.exact else self.num_probes - 1

    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the 95 % interval at each point, (G,) each; nan for one probe."""
        return positive_interval(self.density, self.stderr, self._degrees)

    def table(self) -> Any:
        """One row per point of the grid."""
        low, high = self.band()
        columns = {"eigenvalue": self.grid, "density": self.density, "stderr": self.stderr}
        return {**columns, "low": low, "high": high}

    def plot(self, ax: Axes | None = None, *, label: str | None = None) -> Axes:
        """Plot the density per decade with a 95 % band over probes; a note gives the share below the
        threshold.
        """
        low, high = (100 * end for end in (self.below.low, self.below.high))
        words = f"kernel width {self.width:.2g} decades\n"
        words += f"λ ≤ {self.threshold:.2g}: {100 * self.below.value:.3g} % of eigenvalues"
        words += "" if self.exact else f"\n({low:.3g} to {high:.3g} % for these probes)"
        ax = spectrum.density(ax, self.grid, self.density, self.band(), label=label)
        ax.set_xscale("log")
        ax.set_ylabel("density of eigenvalues per decade")
        spectrum.note(ax, words, where="left")
        return ax


def log_density(
    nodes: np.ndarray,
    weights: np.ndarray,
    *,
    exact: bool,
    threshold: float | None = None,
    width: float | None = None,
    points: int = 512,
) -> LogDensity:
    """Density on a logarithmic axis from nodes and weights (P, S); see `SpectralDensity.on_log_axis`."""
    largest = float(nodes.max())
    tau = ROUNDING * largest if threshold is None else check_number("threshold", threshold, above=0.0)
    check_count("points", points, at_least=2)
    if not largest > tau > 0:
        raise UsageError(
            f"no eigenvalue was found above the threshold {tau:.3g}; the largest is {largest:.3g}",
            hint="threshold=…, below the largest eigenvalue",
        )
    included = np.where(nodes > tau, weights, 0.0)
    positions = np.log10(np.maximum(nodes, tau))
    low, high = float(np.log10(nodes[nodes > tau].min())), float(np.log10(largest))
    decades = max(NARROWEST, (high - low) / nodes.shape[1]) if width is None else width
    sigma = check_number("width", decades, above=0.0)
    x = even_grid(low, high, sigma, points)
    rows = np.stack([broadened(x, *row, sigma) for row in zip(positions, included, strict=True)])
    density, stderr = mean_and_stderr(rows)
    share = cumulative(nodes, weights, np.array([tau]), exact=exact, psd=True)
    below = SpectrumShare(*(float(part[0]) for part in (share.share, share.low, share.high, share.stderr)))
    stderr = np.zeros_like(density) if exact else stderr
    return LogDensity(10.0**x, density, stderr, sigma, tau, below, len(nodes), exact)


GRID_POINTS = 1024
MARGIN = 5.0  # widths beyond the outermost nodes that the grid covers


def check_grid(grid: int | np.ndarray | None, width: float | None) -> None:
    """Raise unless these are valid grid points (or their number) and a width; None means the default."""
    if isinstance(grid, np.ndarray):
        if grid.ndim != 1 or grid.size == 0 or not np.isfinite(grid).all():
            raise ShapeError(f"expected a grid of finite points (G,), got an array of shape {grid.shape}")
    elif grid is not None:
        check_count("grid", grid, at_least=2)
    if width is not None:
        check_number("width", width, above=0.0)


def check_range(low: float, high: float, width: float) -> None:
    """Raise if the range, or a density of about one over the width, overflows."""
    smallest = 1 / np.finfo(float).max
    if not (width > smallest and np.isfinite(high - low + 2 * MARGIN * width)):
        raise UsageError(
            f"eigenvalues between {low:.2g} and {high:.2g} have no density in float64, because it would "
            f"overflow",
            hint="scale the operator first: 1e100 * op or 1e-100 * op",
        )


def default_width(low: float, high: float, num_steps: int) -> float:
    """Return the range over the number of steps; a thousandth of the eigenvalue if all are equal."""
    largest = max(abs(low), abs(high))
    return (high - low) / num_steps if high - low > 1e-6 * largest else 1e-3 * (largest or 1.0)


def even_grid(low: float, high: float, width: float, points: int = GRID_POINTS) -> np.ndarray:
    """Evenly from five widths below the lowest node to five above the highest."""
    return np.linspace(low - MARGIN * width, high + MARGIN * width, points)


def broadened(
    grid: np.ndarray,
    nodes: np.ndarray,
    weights: np.ndarray,
    width: float,
    *,
    ends: tuple[float, float] | None = None,
) -> np.ndarray:
    """Σ wᵢ N(x; θᵢ, width²) at the points of the grid; `ends` reflect, so that none lies beyond them."""
    return kernel(grid, nodes, width, ends=ends) @ weights


def kernel(
    grid: np.ndarray, centers: np.ndarray, width: float, *, ends: tuple[float, float] | None = None
) -> np.ndarray:
    """N(x; θ, width²) at points x and places θ, (G, N); reflected at the ends if these are given."""
    if ends is None:
        return np.exp(-0.5 * ((grid[:, None] - centers) / width) ** 2) / (width * np.sqrt(2 * np.pi))
    low, high = ends
    span = 2 * (high - low)
    inside = np.clip(centers, low, high)  # rounding may put a node beyond an end
    farthest = int(np.ceil(MARGIN * width / span))
    density = np.zeros((len(grid), len(centers)))
    for image in range(-farthest, farthest + 1):
        density += kernel(grid, inside + image * span, width) + kernel(
            grid, 2 * low - inside + image * span, width
        )
    return np.where(((grid >= low) & (grid <= high))[:, None], density, 0.0)
