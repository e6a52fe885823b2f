"""A density from nodes and weights: a Gaussian around each node, on a grid."""

from __future__ import annotations

import numpy as np

from curvescope.algorithms.checks import check_count, check_number
from curvescope.core.errors import ShapeError, UsageError

GRID_POINTS = 1024
MARGIN = 5.0  # widths beyond the outermost nodes that the grid covers


def check_grid(grid: int | np.ndarray | None, width: float | None) -> None:
    """Raise unless these are points, or how many, and a width; None is one's own choice."""
    if isinstance(grid, np.ndarray):
        if grid.ndim != 1 or grid.size == 0 or not np.isfinite(grid).all():
            raise ShapeError(f"expected a grid of finite points (G,), got an array of shape {grid.shape}")
    elif grid is not None:
        check_count("grid", grid, at_least=2)
    if width is not None:
        check_number("width", width, above=0.0)


def check_range(low: float, high: float, width: float) -> None:
    """Raise where a density, which is about one over the width, or the range is no number."""
    smallest = 1 / np.finfo(float).max
    if not (width > smallest and np.isfinite(high - low + 2 * MARGIN * width)):
        raise UsageError(
            f"eigenvalues between {low:.2g} and {high:.2g} have no density in float64: numbers end there",
            hint="take it of a multiple of the operator, 1e100 * op or 1e-100 * op",
        )


def default_width(low: float, high: float, num_steps: int) -> float:
    """The range over the number of steps; a thousandth of the eigenvalue where they are all the same."""
    largest = max(abs(low), abs(high))
    return (high - low) / num_steps if high - low > 1e-6 * largest else 1e-3 * (largest or 1.0)


def even_grid(low: float, high: float, width: float, points: int = GRID_POINTS) -> np.ndarray:
    """Evenly from five widths below the lowest node to five above the highest."""
    return np.linspace(low - MARGIN * width, high + MARGIN * width, points)


def broadened(
    grid: np.ndarray, nodes: np.ndarray, weights: np.ndarray, width: float, *, reflected: bool = False
) -> np.ndarray:
    """Σ wᵢ N(x; θᵢ, width²) at the points of the grid; `reflected` at zero, so that none is below it."""
    z = (grid[:, None] - nodes) / width
    found = np.exp(-0.5 * z**2) @ weights / (width * np.sqrt(2 * np.pi))
    if not reflected:
        return found
    return np.where(grid >= 0, found + broadened(-grid, nodes, weights, width), 0.0)
