"""Power laws q ∝ xᵅ over a grid, and whether the grid supports one at all.

With x the variable (parameters N or tokens D) and z the other one, the line

    log q = c_z + α log x

has a constant of its own for every z, so that α says what x does at fixed z. A law is supported if

- α is not zero: F-test against the constants alone, p < 5 %;
- the line is not bent: F-test of a further term γ (log x)², p ≥ 5 %;
- α does not depend on z: F-test of a further term log x · log z, p ≥ 5 %;
- what is left over is small: root mean square of the residuals at most RESIDUAL, in units of log q;

and there are at least three values of x, since two of them lie on a line whatever the truth is. The interval
of α is that of the bootstrap: cells are drawn with replacement, and seeds within each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvescope.core.result import Result

LEVEL = 0.05  # of all tests
RESIDUAL = 0.3  # a factor of 1.35
FEWEST = 3  # values of a variable that can contradict a line


@dataclass(frozen=True)
class Law(Result):
    """An exponent, its 95 % interval, and the tests; nan where a fit was not possible."""

    quantity: str
    variable: str
    exponent: float
    low: float
    high: float
    residual: float  # root mean square, of log q
    p_constant: float  # of data like these if α were zero
    p_bend: float  # if γ were zero
    p_other: float  # if α did not depend on the other variable
    first: float  # the exponent between the two least values of x
    last: float  # and between the two largest
    supported: bool
    words: str


def fit_law(
    quantity: str,
    variable: str,
    x: np.ndarray,
    z: np.ndarray,
    q: np.ndarray,
    *,
    draws: int = 1000,
    seed: int = 0,
) -> Law:
    """The law of q (R,) over x at fixed z, from one row per cell and seed."""
    if not (np.isfinite(q).all() and (q > 0).all()):
        return _no_law(quantity, variable, "not positive everywhere: no power law can be fitted")
    y, levels = np.log(q), np.unique(x)
    X, Z = (np.log(v) - np.log(v).mean() for v in (x, z))
    groups = (z[:, None] == np.unique(z)).astype(float)
    line = np.column_stack([groups, X])
    left, found = _fit(line, y)
    tests = _tests(groups, X, Z, y)
    residual = math.sqrt(left / max(len(y) - line.shape[1], 1))
    low, high = _bootstrap(X, groups, y, cells=_cells(x, z), draws=draws, seed=seed)
    first, last = (_slope(line, y, np.isin(x, some)) for some in (levels[:2], levels[-2:]))
    words = _words(variable, tests, residual, (first, last), levels=len(levels))
    return Law(
        quantity=quantity,
        variable=variable,
        exponent=float(found[-1]),
        low=low,
        high=high,
        residual=residual,
        p_constant=tests[0],
        p_bend=tests[1],
        p_other=tests[2],
        first=first,
        last=last,
        supported=not words,
        words=words or "supported",
    )


def _no_law(quantity: str, variable: str, words: str) -> Law:
    nan = math.nan
    return Law(quantity, variable, nan, nan, nan, nan, nan, nan, nan, nan, nan, supported=False, words=words)


def _tests(groups: np.ndarray, X: np.ndarray, Z: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """p of a constant, of no bend, and of an exponent that is the same for all z; nan where not testable."""
    line = np.column_stack([groups, X])
    left, degrees = _fit(line, y)[0], len(y) - line.shape[1]
    constant = _f_test(_fit(groups, y)[0], left, degrees)
    bend, other = (
        _f_test(left, _fit(np.column_stack([line, further]), y)[0], degrees - 1) for further in (X**2, X * Z)
    )
    enough, several = len(np.unique(X)) >= FEWEST, groups.shape[1] > 1
    return constant, bend if enough else math.nan, other if several else math.nan


def _fit(A: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """The sum of squared residuals and the coefficients of least squares."""
    found = np.linalg.lstsq(A, y, rcond=None)[0]
    return float(((y - A @ found) ** 2).sum()), found


def _slope(line: np.ndarray, y: np.ndarray, rows: np.ndarray) -> float:
    """The exponent of some rows alone."""
    return float(_fit(line[rows], y[rows])[1][-1])


def _f_test(less: float, more: float, degrees: int) -> float:
    """p of the F-test of one further term: residual sums of squares without it and with it."""
    from scipy.special import fdtrc

    if degrees < 1:
        return math.nan
    if more <= 1e-24 * max(less, 1e-300):
        return 0.0 if less > more else 1.0
    return float(fdtrc(1, degrees, max(less - more, 0.0) / (more / degrees)))


def _cells(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """The number of the cell of each row, (R,)."""
    return np.unique(np.column_stack([x, z]), axis=0, return_inverse=True)[1].reshape(-1)


def _bootstrap(
    X: np.ndarray, groups: np.ndarray, y: np.ndarray, *, cells: np.ndarray, draws: int, seed: int
) -> tuple[float, float]:
    """Ends of the 95 % interval of α: quantiles over draws of cells, and of seeds within them."""
    W = _weights(cells, draws, seed)  # (draws, R)
    total = W @ groups
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.nan_to_num((W * X) @ groups / total), np.nan_to_num((W * y) @ groups / total)
        dx, dy = X - means[0] @ groups.T, y - means[1] @ groups.T
        spread = (W * dx * dx).sum(axis=1)
        alpha = (W * dx * dy).sum(axis=1) / spread
    alpha = alpha[spread > 1e-12]
    if len(alpha) < draws / 2:
        return math.nan, math.nan
    low, high = np.quantile(alpha, [0.025, 0.975])
    return float(low), float(high)


def _weights(cells: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """How often each row is drawn, (draws, R): cells with replacement, then rows of each cell."""
    source = np.random.default_rng(seed & 0xFFFFFFFF)
    count = int(cells.max()) + 1
    times = source.multinomial(count, np.full(count, 1 / count), size=draws)  # (draws, cells)
    W = np.zeros((draws, len(cells)))
    for cell in range(count):
        rows = np.flatnonzero(cells == cell)
        W[:, rows] = source.multinomial(times[:, cell] * len(rows), np.full(len(rows), 1 / len(rows)))
    return W


def _words(
    variable: str,
    tests: tuple[float, float, float],
    residual: float,
    slopes: tuple[float, float],
    *,
    levels: int,
) -> str:
    """Why a law is not supported; empty if it is."""
    constant, bend, other = tests
    found = []
    if levels < FEWEST:
        found.append(f"only {levels} values of {variable}: any two points lie on a line")
    if not constant < LEVEL:
        found.append(f"not told from a constant (p = {constant:.2g})")
    if bend < LEVEL:
        ends = f"from {slopes[0]:+.2f} to {slopes[1]:+.2f}"
        found.append(f"bent (p = {bend:.1g}): the exponent goes {ends} over the grid")
    if other < LEVEL:
        found.append(f"the exponent depends on the other variable (p = {other:.1g})")
    if residual > RESIDUAL:
        found.append(f"scatter of a factor of {math.exp(residual):.2f} around the line")
    return "; ".join(found)
