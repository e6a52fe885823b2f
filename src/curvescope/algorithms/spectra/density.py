"""Spectral densities by stochastic Lanczos quadrature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, get_args

import numpy as np

from curvescope.algorithms.checks import (
    FULL_VECTOR,
    block_sizes,
    check_choice,
    check_count,
    check_number,
    check_slices,
    check_symmetric,
    fixed_operator,
    whole_slice,
)
from curvescope.algorithms.columns import mean_and_stderr
from curvescope.algorithms.estimates.intervals import positive_interval, student
from curvescope.algorithms.krylov_storage import Where
from curvescope.algorithms.spectra.distribution import (
    Cumulative,
    Outliers,
    SpectrumShare,
    cumulative,
    outliers,
    resolved,
    share_within,
)
from curvescope.algorithms.spectra.log_density import (
    GRID_POINTS,
    LogDensity,
    broadened,
    check_grid,
    check_range,
    default_width,
    even_grid,
    kernel,
    log_density,
)
from curvescope.algorithms.spectra.quadrature import Measure, exact_measures, lanczos_measures
from curvescope.core.errors import UsageError
from curvescope.core.number_format import rounded
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Tabular
from curvescope.core.seeds import Probe
from curvescope.viz import spectrum

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = 3.5e-4  # root of a float32 rounding: smaller overlaps do not affect Ritz values
MAX_BOUND_WIDTH = 0.2  # if the bounds of a share differ by more, they say little
MAX_BOUND_RATIO = 4.0  # ratio of certain bounds up to which a density counts as known
REPORTED_SHARE = 0.9  # share of eigenvalues whose range is reported if the bounds say little


@dataclass(frozen=True)
class SpectralDensity(Tabular):
    """Density of the eigenvalues of a symmetric operator, broadened by a Gaussian.

    Each probe gives a probability measure Σ wᵢ δ(λ − θᵢ) whose expectation is the distribution of the
    eigenvalues; errors are standard errors over probes (nan for one probe, zero when `exact`).
    """

    grid: np.ndarray  # (G,)
    density: np.ndarray  # (G,) mean over probes; integrates to one
    stderr: np.ndarray  # (G,)
    width: float  # standard deviation of the Gaussian
    nodes: np.ndarray  # (probes, steps) Ritz values; (1, n) eigenvalues when exact
    weights: np.ndarray  # like nodes; each row sums to one
    moments: np.ndarray  # (4,) tr(Aᵖ) / n for p = 1, …, 4
    moments_stderr: np.ndarray  # (4,)
    extremes: np.ndarray  # (2,) smallest and largest Ritz value: inside the spectrum, up to rounding
    size: int  # n
    exact: bool  # nodes are all the eigenvalues
    num_products: int
    seed: int
    psd: bool = False  # True if the operator is declared positive semi-definite
    probe: str = "rademacher"
    orthogonality: float = float("nan")  # largest |qᵢ · qⱼ| that was measured; 0 if exact, nan if none was

    def cumulative(self, x: np.ndarray | None = None) -> Cumulative:
        """Share of the eigenvalues up to each x, by default all nodes, with certain bounds and errors."""
        x = np.unique(self.nodes[self.weights > 0]) if x is None else x
        return cumulative(self.nodes, self.weights, x, exact=self.exact, psd=self.psd)

    def share_near_zero(self, limit: float | None = None) -> SpectrumShare:
        """Share of the eigenvalues with |λ| < limit; by default a thousandth of the largest |node|.

        If all nodes are zero the default limit is the smallest positive number, and the share is one.
        """
        smallest = float(np.finfo(float).tiny)
        limit = max(1e-3 * float(np.abs(self.extremes).max()), smallest) if limit is None else limit
        return share_within(
            self.nodes,
            self.weights,
            check_number("limit", limit, at_least=0.0),
            exact=self.exact,
            psd=self.psd,
        )

    def outliers(self) -> Outliers:
        """Eigenvalues at either end that stand apart by a gap this density resolves, see `outliers`."""
        return outliers(self.nodes, self.weights, self.size, width=self.width, exact=self.exact)

    def smoothed(
        self,
        grid: np.ndarray | None = None,
        width: float | None = None,
        *,
        ends: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Grid, density and standard error, (G,) each, inside the ends of the spectrum.

        The part of a Gaussian beyond an end is reflected, so that all mass lies inside.

        Args:
            ends: eigenvalues known from elsewhere, such as the extreme ones of `cs.eigsh`; the ends are the
                smallest and the largest of these and of the nodes, and zero for λ ≥ 0.
        """
        sigma = self.width if width is None else check_number("width", width, above=0.0)
        low, high = self.ends(ends)
        points = np.linspace(low, high, len(self.grid)) if grid is None else np.asarray(grid, dtype=float)
        return points, *_mean_broadened(
            points, self.nodes, self.weights, sigma, exact=self.exact, ends=(low, high)
        )

    def ends(self, further: np.ndarray | None = None) -> tuple[float, float]:
        """Return the smallest and the largest known eigenvalue.

        Args:
            further: More known eigenvalues.
        """
        extremes = np.concatenate([self.extremes, np.ravel([] if further is None else further)])
        low, high = float(extremes.min()), float(extremes.max())
        low = 0.0 if self.psd else low
        if high - low < self.width:  # a single eigenvalue gets the width of the kernel
            low, high = (0.0 if self.psd else low - self.width), high + self.width
        return low, high

    def certain_bounds(
        self, grid: np.ndarray | None = None, *, ends: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Certain bounds of the smoothed density of the probes' mean, (G,) each.

        For a kernel K and a distribution F between certain bounds L and U, ∫ K dF = K(b) − ∫ K′ F lies
        between the values with U where K rises and L where it falls, and the other way round.
        """
        low, high = self.ends(ends)
        points = np.linspace(low, high, len(self.grid)) if grid is None else np.asarray(grid, dtype=float)
        positions = np.concatenate([[low, high], points, self.nodes[self.weights > 0]])
        positions = np.unique(np.clip(positions, low, high))
        c = self.cumulative((positions[1:] + positions[:-1]) / 2)
        K = kernel(points, positions, self.width, ends=(low, high))
        rises, falls = np.maximum(np.diff(K, axis=1), 0.0), np.maximum(-np.diff(K, axis=1), 0.0)
        smallest = K[:, -1] - rises @ c.high + falls @ c.low
        return np.maximum(smallest, 0.0), K[:, -1] - rises @ c.low + falls @ c.high

    @property
    def resolved(self) -> float:
        """Share of the eigenvalues at which the density has the shape of the data, not of the kernel."""
        is_resolved = resolved(self.nodes, self.weights, self.width)
        return float(np.where(is_resolved, self.weights, 0.0).sum() / len(self.nodes))

    def known(self, grid: np.ndarray, ends: np.ndarray | None = None) -> np.ndarray:
        """Return a mask (G,): True if most of the density is from resolved nodes and its certain bounds are
        close.

        Args:
            grid: Points, (G,).
            ends: Eigenvalues known from elsewhere, see `smoothed`.
        """
        shown = np.where(resolved(self.nodes, self.weights, self.width), self.weights, 0.0)
        options = {"exact": True, "ends": self.ends(ends)}
        resolved_density, full_density = (
            _mean_broadened(grid, self.nodes, w, self.width, **options)[0] for w in (shown, self.weights)
        )
        low, high = self.certain_bounds(grid, ends=ends)
        return (resolved_density >= full_density / 2) & (high <= MAX_BOUND_RATIO * low)

    def with_width(self, width: float, *, grid: np.ndarray | None = None) -> Self:
        """Return the same nodes and weights broadened by another Gaussian, without further products.

        Args:
            grid: points; by default as many as now, evenly over the nodes with five widths on either side.
        """
        check_grid(grid, width)
        low, high = (float(end) for end in self.extremes)
        check_range(low, high, float(width))
        points = even_grid(low, high, width, len(self.grid)) if grid is None else grid
        density, stderr = _mean_broadened(points, self.nodes, self.weights, width, exact=self.exact)
        return replace(self, grid=points, density=density, stderr=stderr, width=float(width))

    def on_log_axis(
        self, *, threshold: float | None = None, width: float | None = None, points: int = 512
    ) -> LogDensity:
        """Density of log₁₀ λ of a positive semi-definite operator, and the share below a threshold.

        Args:
            threshold: eigenvalues up to here are counted, not drawn; by default 1e-7 of the largest node.
            width: of the Gaussian, in decades; by default the decades of the nodes over their number.
        """
        if not self.psd:
            raise UsageError(
                "a logarithmic axis needs an operator without negative eigenvalues, declared psd",
                hint="cs.GGN and the Fishers are; plot_cumulative has an axis for both signs",
            )
        return log_density(
            self.nodes, self.weights, exact=self.exact, threshold=threshold, width=width, points=points
        )

    def cdf(self, x: np.ndarray | float) -> np.ndarray:
        """Share of the eigenvalues up to x, from the nodes and weights, without broadening."""
        order = np.argsort(self.nodes, axis=None)
        shares = np.concatenate([[0.0], np.cumsum(self.weights.ravel()[order])]) / len(self.nodes)
        return shares[np.searchsorted(self.nodes.ravel()[order], x, side="right")]

    def wasserstein(self, eigenvalues: np.ndarray) -> float:
        """Distance ∫ |F(x) − G(x)| dx between this distribution F and that of given eigenvalues, G."""
        from scipy.stats import wasserstein_distance

        return float(
            wasserstein_distance(self.nodes.ravel(), np.asarray(eigenvalues), u_weights=self.weights.ravel())
        )

    def table(self) -> Any:
        """One row per point of the grid."""
        return {"eigenvalue": self.grid, "density": self.density, "stderr": self.stderr}

    def band(
        self, grid: np.ndarray | None = None, *, ends: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Grid, `smoothed` density and the ends of its 95 % interval at each point; nan for one probe."""
        grid, density, stderr = self.smoothed(grid, ends=ends)
        degrees = 1 if self.exact else len(self.nodes) - 1
        return grid, density, positive_interval(density, stderr, degrees)

    @property
    def words(self) -> str:
        """Return notes for the figure: the kernel, its resolution, the share near zero, the probes."""
        kernel_words = f"kernel width {rounded(self.width, 2)}"
        lines = [f"{kernel_words}; resolved: {_percent(self.resolved)} of eigenvalues"]
        lines += [self._near_zero()]
        lines += [] if self.exact or len(self.nodes) > 1 else ["one probe: its error is unknown, no band"]
        overlapping = self.orthogonality > ROOT
        lines += [f"Lanczos vectors overlap by {self.orthogonality:.1g}"] if overlapping else []
        return "\n".join(filter(None, lines))

    def _near_zero(self) -> str:
        """Describe the share near zero; if its bounds say little, give the range of most eigenvalues."""
        limit = 1e-3 * float(np.abs(self.extremes).max())
        share = self.share_near_zero(limit)
        if share.high - share.low > MAX_BOUND_WIDTH:
            size = self.within(REPORTED_SHARE)
            words = f"{_percent(REPORTED_SHARE)} of eigenvalues or more: |λ| ≤ {rounded(size, 2)}"
            return words if np.isfinite(size) else ""
        half = 0.0 if self.exact else student(len(self.nodes) - 1) * share.stderr
        text = f"|λ| < {limit:.2g}: {100 * share.value:.3g} % of eigenvalues\n"
        text += f"({100 * max(share.low, 0):.3g} to {100 * share.high:.3g} % for these probes"
        return text + (f", ± {100 * half:.2g} % over probes, numerical only)" if half > 0 else ")")

    def within(self, share: float) -> float:
        """Return the smallest r such that this share of the eigenvalues has |λ| ≤ r.

        It is certain for the probes' mean if no eigenvalue lies beyond the `ends`.
        """
        low, high = self.ends()
        sizes = np.unique(np.abs(self.nodes[self.weights > 0]))
        bounds = self.cumulative(np.concatenate([-sizes[::-1], sizes]))
        most_below = np.where(-sizes <= low, 0.0, bounds.high[: len(sizes)][::-1])
        least_up_to = np.where(sizes >= high, 1.0, bounds.low[len(sizes) :])
        return float(min(sizes[least_up_to - most_below >= share], default=np.inf))

    def _steps(self) -> tuple[np.ndarray, Cumulative, tuple[np.ndarray, np.ndarray]]:
        """Edges (E + 1,), shares from edge to edge, and bounds with the error of the probes, (E,) each."""
        edges = np.unique(self.nodes[self.weights > 0])
        if len(edges) == 1:
            edges = edges + np.array([-1, 1]) * self.width
        c = self.cumulative((edges[1:] + edges[:-1]) / 2)
        half = 0.0 if self.exact else student(len(self.nodes) - 1) * c.stderr
        return edges, c, (np.maximum(c.low - half, 0.0), np.minimum(c.high + half, 1.0))

    def shares(self) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Edges (E + 1,), share of the eigenvalues up to λ from edge to edge, and ends of it, (E,) each.

        The ends are the bounds that are certain for the probes, with a 95 % interval over probes.
        """
        edges, c, ends = self._steps()
        return edges, c.share, ends

    def plot(
        self,
        ax: Axes | None = None,
        *,
        log_y: bool = True,
        label: str | None = None,
        eigenvalues: np.ndarray | None = None,
        note: bool = True,
    ) -> Axes:
        """Plot density against eigenvalue with a 95 % band over probes; gray shows the uncertainty from few
        steps.

        The line is dotted where it only shows the kernel, or where its certain bounds are far apart. If the
        kernel hides the shape for most eigenvalues, a bar at the bottom shows the range of 90 % of them.

        Args:
            eigenvalues: extreme ones, marked by ticks; by default the outliers.
            note: If True, state the width of the kernel and its resolution in a corner.
        """
        grid, density, band = self.band(ends=eigenvalues)
        bounds = None if self.exact else self.certain_bounds(grid, ends=eigenvalues)
        reliable, is_new = self.known(grid, eigenvalues), ax is None
        marks = self.outliers().values if eigenvalues is None else eigenvalues
        ax = spectrum.density(
            ax, grid, density, band, sure=bounds, known=reliable, nodes=marks, log_y=log_y, label=label
        )
        size = self.within(REPORTED_SHARE)
        if self.resolved < 1 - REPORTED_SHARE and np.isfinite(size):
            low, high = self.ends(eigenvalues)
            spectrum.extent(ax, max(low, -size), min(high, size))
        if note and is_new:
            spectrum.make_room(ax)
            spectrum.note(ax, self.words, where="right")
        return ax

    def plot_cumulative(self, ax: Axes | None = None, *, color: str | None = None) -> Axes:
        """Plot the share of eigenvalues up to λ: certain bounds of the probes' mean, and lighter with their
        error.
        """
        edges, c, wider = self._steps()
        linear = 1e-3 * float(np.abs(self.extremes).max()) or 1.0
        return spectrum.cumulative(
            ax, edges, (c.low, c.high), wider, linear=linear, nodes=self.outliers().values, color=color
        )


@fixed_operator
def spectral_density(
    op: LinearOperator,
    *,
    num_probes: int = 8,
    num_steps: int = 60,
    grid: int | np.ndarray | None = None,
    width: float | None = None,
    seed: int = 0,
    probe: Probe = "rademacher",
    reorthogonalize: bool = True,
    max_gib: float | None = None,
    basis: Where = "auto",
) -> SpectralDensity:
    """Density of the eigenvalues, from `num_probes` Lanczos runs of `num_steps` steps in lock step.

    For an operator with no more rows than `num_steps`, all eigenvalues are computed, and the density is
    exact.

    Memory: num_steps + 1 vectors (2 without `reorthogonalize`) for each concurrent probe; for several probes
        one more each for the columns of a product; and the memory of a product. If a basis exceeds the GPU, a
        part is in host memory, in bfloat16 from 2²⁴ rows on. The error of an inner product is then about 2⁻⁹
        / √n (`krylov_storage`).

    Args:
        num_steps: at least 3, so that the first four moments of each probe are exact.
        grid: points, or how many, evenly over the range of the nodes with five widths on either side;
            1024 by default.
        width: standard deviation of the Gaussian; by default the range of the nodes over `num_steps`,
            about the distance of neighboring nodes.
        reorthogonalize: store each probe's basis of num_steps + 1 vectors and orthogonalize against all of
            it; without, two vectors suffice and eigenvalues found early get several nodes.
        max_gib: Device memory for bases; probes that do not fit run in groups, one after the other. By
            default 8, or on a GPU half of the free memory if a single probe needs more than 8.
        basis: Storage of a basis that exceeds `max_gib`. "host": three of its vectors are on the device and
            the others in host memory. "device": raise. "auto": on a GPU, store as much as does not fit in
            host memory; elsewhere raise.
    """
    check_symmetric(op, "spectral_density")
    options = {"num_probes": num_probes, "num_steps": num_steps, "grid": grid, "width": width, "seed": seed}
    options |= {"probe": probe, "reorthogonalize": reorthogonalize, "max_gib": max_gib, "basis": basis}
    return block_density(op, whole_slice(op), **options)[FULL_VECTOR]


@fixed_operator
def block_density(
    op: LinearOperator,
    slices: Mapping[str, slice] | None = None,
    *,
    num_probes: int = 8,
    num_steps: int = 60,
    grid: int | np.ndarray | None = None,
    width: float | None = None,
    seed: int = 0,
    probe: Probe = "rademacher",
    reorthogonalize: bool = True,
    max_gib: float | None = None,
    basis: Where = "auto",
) -> dict[str, SpectralDensity]:
    """`spectral_density` of diagonal blocks of `op`, all blocks in lock step.

    Each column of a product lies in one block, so one product with many columns serves many blocks. The
    results are those of `spectral_density` of each block alone, with the same probes.

    Args:
        slices: rows of each block by name; by default the blocks of `op.space`.
    """
    check_symmetric(op, "block_density")
    check_count("num_probes", num_probes, at_least=1)
    check_count("num_steps", num_steps, at_least=3)
    max_gib = None if max_gib is None else check_number("max_gib", max_gib, above=0.0)
    check_choice("basis", basis, get_args(Where))
    check_choice("probe", probe, get_args(Probe))
    check_grid(grid, width)
    op, blocks = check_slices(op, slices)
    sizes = block_sizes(op, blocks)
    small = {name: rows for name, rows in blocks.items() if sizes[name] <= num_steps}
    large = {name: rows for name, rows in blocks.items() if name not in small}
    options = {"num_probes": num_probes, "num_steps": num_steps, "probe": probe, "seed": seed}
    measures = exact_measures(op, small) if small else {}
    if large:
        options |= {"reorthogonalize": reorthogonalize, "max_gib": max_gib, "basis": basis}
        measures |= lanczos_measures(op, large, **options)
    common = {"seed": seed, "probe": probe, "psd": op.psd}
    return {
        name: _density(measures[name], size, num_steps, grid, width, **common) for name, size in sizes.items()
    }


def _density(
    measure: Measure,
    size: int,
    num_steps: int,
    grid: int | np.ndarray | None,
    width: float | None,
    *,
    seed: int,
    probe: Probe,
    psd: bool,
) -> SpectralDensity:
    """The measures on a grid, with their moments and errors."""
    low, high = float(measure.nodes.min()), float(measure.nodes.max())
    sigma = default_width(low, high, num_steps) if width is None else float(width)
    check_range(low, high, sigma)
    points = grid if isinstance(grid, np.ndarray) else even_grid(low, high, sigma, grid or GRID_POINTS)
    density, stderr = _mean_broadened(points, measure.nodes, measure.weights, sigma, exact=measure.exact)
    moments, moments_stderr = _moments(measure)
    if measure.exact:
        moments_stderr = np.zeros_like(moments)
    return SpectralDensity(
        grid=points,
        density=density,
        stderr=stderr,
        width=sigma,
        nodes=measure.nodes,
        weights=measure.weights,
        moments=moments,
        moments_stderr=moments_stderr,
        extremes=np.array([low, high]),
        size=size,
        exact=measure.exact,
        num_products=measure.num_products,
        seed=seed,
        psd=psd,
        probe=probe,
        orthogonality=measure.orthogonality,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _mean_broadened(
    grid: np.ndarray,
    nodes: np.ndarray,
    weights: np.ndarray,
    width: float,
    *,
    exact: bool,
    ends: tuple[float, float] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The mean over probes of their broadened measures, and its standard error: (G,) each."""
    rows = [broadened(grid, *row, width, ends=ends) for row in zip(nodes, weights, strict=True)]
    density, stderr = mean_and_stderr(np.stack(rows))
    return density, np.zeros_like(density) if exact else stderr


def _moments(measure: Measure) -> tuple[np.ndarray, np.ndarray]:
    """tr(Aᵖ) / n for p = 1, …, 4 with standard errors; powers of numbers near one, and then of their size."""
    size = float(np.abs(measure.nodes).max()) or 1.0
    scaled = measure.nodes / size
    powers = np.stack([(measure.weights * scaled**p).sum(axis=1) for p in range(1, 5)], axis=1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # 0 · ∞ counts as zero
        sizes = np.float64(size) ** np.arange(1, 5)
        moments = [np.where(x == 0, 0.0, x * sizes) for x in mean_and_stderr(powers)]
    return moments[0], moments[1]
