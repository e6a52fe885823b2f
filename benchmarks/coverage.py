"""Coverage of the stated 95 % intervals over 200 seeds, on blocks with known matrices.

    python benchmarks/coverage.py [--tokens 128] [--seeds 200] > benchmarks/results/coverage.md

The script computes blocks of the bundled model's Hessian, GGN and functional Hessian once in float64, and
replaces operator products by products with these matrices. The table has one row per estimator and number of
probes: the share of intervals that contain the true value (mean over blocks, smallest and largest), and the
share for ± 2 standard errors. Intervals that are not stated (nan: fewer than six equal samples) do not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms import (
    block_norms,
    block_traces,
    diagonal,
    frobenius_norm,
    spectral_density,
    trace,
)
from curvescope.algorithms.blocks.heterogeneity import heterogeneity
from curvescope.algorithms.blocks.probes import own_probes
from curvescope.core.operator import Matrix
from curvescope.core.seeds import Probe, probes
from curvescope.operators import GGN, FunctionalHessian, Hessian
from curvescope.studies.blocks import Config
from curvescope.studies.problem_config import make_problem

BLOCKS = ("L3.ln1.g", "L3.b_V", "L3.b_O", "ln_f.g", "L3.b_1")
POINTS = 12  # points of a density at which its band is checked
Measured = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # value, stderr, low, high
Measure = Callable[[Matrix, int], Measured]
Row = tuple[str, str, Measure, Callable[[Matrix], np.ndarray]]  # estimator, probes, measurement, truth


class Rooted(Matrix):
    """A matrix whose probes are squares of random roots: A = L Lᵀ, (L ε)², as for one sequence of data."""

    def random_squares(self, count: int, *, probe: Probe, seed: int, at_once: int) -> Iterator[Tensor]:
        if not hasattr(self, "root"):
            values, Q = torch.linalg.eigh(self.A)
            self.root = Q * values.clamp(min=0).sqrt()
        yield (self.root @ probes(len(self.root), count, seed=seed, kind=probe)) ** 2


def matrices(tokens: int, blocks: tuple[str, ...]) -> dict[str, Matrix]:
    """Return the blocks as exactly symmetric matrices, and matrices on which few samples mislead."""
    problem = make_problem(Config(tokens=tokens, dtype="float64"))
    by_name = {}
    for letter, make in (("H", Hessian), ("G", GGN), ("F", FunctionalHessian)):
        for name in blocks:
            op = make(problem, name)
            A = op.to_dense()
            if float(A.abs().max()) < 1e-10:  # the loss is linear in the last norm, so this part is zero
                continue
            by_name[f"{letter} {name}"] = Rooted((A + A.T) / 2, symmetric=True, psd=op.psd)
    source = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(96, 96, generator=source, dtype=torch.float64))[0]
    for name, low in (("flat −1…1", -1.0), ("flat 0.5…1", 0.5)):
        A = Q @ torch.diag(torch.linspace(low, 1, 96, dtype=torch.float64)) @ Q.T
        by_name[name] = Rooted((A + A.T) / 2, symmetric=True, psd=low > 0)
    return by_name | misleading(Q)


def misleading(Q: Tensor) -> dict[str, Matrix]:
    """Return 96-row matrices with one dominant eigenvalue, five equal ones, or few off-diagonal entries."""
    n, wide = len(Q), torch.float64
    spectra = {"one outlier": torch.ones(n, dtype=wide), "rank 5": torch.zeros(n, dtype=wide)}
    spectra["one outlier"][0], spectra["rank 5"][:5] = 1000, 1
    matrices_by_name = {name: Q @ values.diag() @ Q.T for name, values in spectra.items()}
    noise = 1e-3 * Q @ torch.linspace(-1, 1, n, dtype=wide).diag() @ Q.T
    matrices_by_name["near-diagonal"] = torch.linspace(1, 2, n, dtype=wide).diag() + noise
    matrices_by_name["one pair"] = matrices_by_name["near-diagonal"].clone()
    matrices_by_name["one pair"][0, 1] = matrices_by_name["one pair"][1, 0] = 1
    return {name: Rooted((A + A.T) / 2, symmetric=True, psd=True) for name, A in matrices_by_name.items()}


def estimators() -> Iterator[Row]:
    """Return all estimators that state an interval."""
    yield from _traces()
    yield from _others()
    for count in (2, 4, 8, 30):
        yield (
            "Frobenius norm",
            str(count),
            lambda A, seed, count=count: _fields(frobenius_norm(A, num_probes=count, seed=seed)),
            _norm,
        )
    for count in (2, 4, 10):
        yield (
            "diagonal",
            str(count),
            lambda A, seed, count=count: _entries(A, count, seed),
            lambda A: np.diag(A.A),
        )
        yield "block map", str(count), lambda A, seed, count=count: _map(A, count, seed), _map_truth
        yield "block traces", str(count), lambda A, seed, count=count: _shared(A, count, seed), _shared_truth
    for count in (4, 8):
        probes = f"{count} + 16 steps"
        yield "trace, own probes", probes, lambda A, seed, count=count: _own(A, count, seed, "trace"), _trace
        yield "norm, own probes", probes, lambda A, seed, count=count: _own(A, count, seed, "norm"), _norm
    yield "λ max, upper end", "16 steps", lambda A, seed: _top(A, seed), lambda A: _eigenvalues(A)[-1]
    for count in (4, 8):
        yield "density, band", str(count), lambda A, seed, count=count: _band(A, count, seed), _band_truth
        yield (
            "divergence, one pair",
            str(count),
            lambda A, seed, count=count: _divergence(A, count, seed),
            _divergence_truth,
        )


def _others() -> Iterator[Row]:
    """Return diagonals by other methods, Gaussian probes, and the share below a threshold."""
    for method, counts in {"xdiag": (4, 6, 8, 12, 24), "roots": (4, 12)}.items():
        for count in counts:
            yield (
                f"diagonal, {method}",
                str(count),
                lambda A, seed, m=method, c=count: _entries(A, c, seed, method=m),
                lambda A: np.diag(A.A),
            )
    for count in (4, 10):
        how = {"num_probes": count, "probe": "gaussian"}
        yield (
            "trace, hutchinson, Gaussian",
            str(count),
            lambda A, seed, how=how: _fields(trace(A, **how, seed=seed)),
            _trace,
        )
        yield (
            "Frobenius norm, Gaussian",
            str(count),
            lambda A, seed, how=how: _fields(frobenius_norm(A, **how, seed=seed)),
            _norm,
        )
        yield (
            "diagonal, Gaussian",
            str(count),
            lambda A, seed, c=count: _entries(A, c, seed, probe="gaussian"),
            lambda A: np.diag(A.A),
        )
        yield (
            "share below a threshold",
            str(count),
            lambda A, seed, c=count: _below(A, c, seed),
            lambda A: np.mean(_eigenvalues(A) <= _threshold(A)),
        )


def _traces() -> Iterator[Row]:
    counts = {"hutchinson": (2, 4, 10, 30), "hutch++": (6, 12, 30), "xtrace": (4, 10, 30)}
    for method, several in counts.items():
        for count in several:
            yield (
                f"trace, {method}",
                str(count),
                lambda A, seed, m=method, c=count: _fields(trace(A, num_probes=c, method=m, seed=seed)),  # pyright: ignore
                _trace,
            )


def _trace(A: Matrix) -> np.ndarray:
    return np.asarray(float(A.A.trace()))


def _norm(A: Matrix) -> np.ndarray:
    return np.asarray(float(A.A.norm()))


def _eigenvalues(A: Matrix) -> np.ndarray:
    return np.linalg.eigvalsh(A.A.numpy())


def _fields(estimate) -> Measured:
    return estimate.value, estimate.stderr, estimate.low, estimate.high


def _own(A: Matrix, count: int, seed: int, name: str) -> Measured:
    estimate = own_probes(A, num_probes=count, num_steps=16, seed=seed)
    return tuple(getattr(estimate, name + end) for end in ("", "_stderr", "_low", "_high"))  # pyright: ignore


def _top(A: Matrix, seed: int) -> Measured:
    ends = own_probes(A, num_probes=1, num_steps=16, seed=seed).ends
    assert ends is not None
    value = ends.values[1]
    return value, ends.residuals[1], value - 1e-9 * abs(value), np.asarray(ends.high)


def _entries(A: Matrix, count: int, seed: int, **how: Any) -> Measured:
    estimate = diagonal(A, num_probes=count, seed=seed, **how)
    low, high = estimate.interval
    if estimate.method == "roots" and not A.psd:  # it has none
        low = high = np.full_like(low, np.nan)
    return estimate.values, estimate.stderr, low, high


def _threshold(A: Matrix) -> float:
    return 0.03 * float(_eigenvalues(A)[-1])


def _below(A: Matrix, count: int, seed: int) -> Measured:
    if not A.psd:
        return (np.asarray(np.nan),) * 4
    density = spectral_density(A, num_probes=count, num_steps=30, seed=seed)
    density = density.on_log_axis(threshold=_threshold(A))
    low, high = density.below_interval
    return (
        np.asarray(density.below.value),
        np.asarray(density.below.stderr),
        np.asarray(low),
        np.asarray(high),
    )


def _halves(A: Matrix) -> dict[str, slice]:
    n = A.shape[0]
    return {"a": slice(0, n // 3), "b": slice(n // 3, n)}


def _map(A: Matrix, count: int, seed: int) -> Measured:
    estimate = block_norms(A, _halves(A), num_probes=count, seed=seed)
    return estimate.frobenius, estimate.stderr, *estimate.interval


def _map_truth(A: Matrix) -> np.ndarray:
    parts = _halves(A).values()
    return np.array([[float(A.A[r, c].norm()) for c in parts] for r in parts])


def _shared(A: Matrix, count: int, seed: int) -> Measured:
    estimate = block_traces(A, _halves(A), num_probes=count, seed=seed)
    return estimate.values, estimate.stderr, *estimate.interval


def _shared_truth(A: Matrix) -> np.ndarray:
    return np.array([float(A.A[r, r].trace()) for r in _halves(A).values()])


def _points(A: Matrix) -> tuple[np.ndarray, float]:
    """Return the points at which the density is checked, and the width of the kernel."""
    values = _eigenvalues(A)
    return np.linspace(max(values[0], 0) if A.psd else values[0], values[-1], POINTS), np.ptp(values) / 20


def _band(A: Matrix, count: int, seed: int) -> Measured:
    grid, width = _points(A)
    density = spectral_density(A, num_probes=count, num_steps=40, grid=grid, width=width, seed=seed)
    _, value, stderr = density.smoothed(grid)
    return value, stderr, *density.band(grid)[2]


def _band_truth(A: Matrix) -> np.ndarray:
    grid, width = _points(A)
    return spectral_density(A, num_steps=A.shape[0], grid=grid, width=width).smoothed(grid)[1]


def _pair(A: Matrix) -> dict[str, Matrix]:
    return {name: Matrix(A.A[rows, rows], symmetric=True) for name, rows in _halves(A).items()}


def _divergence(A: Matrix, count: int, seed: int) -> Measured:
    spectra = {n: spectral_density(B, num_probes=count, num_steps=20, seed=seed) for n, B in _pair(A).items()}
    estimate = heterogeneity(spectra)
    low, high = estimate.interval
    return estimate.divergence[0, 1], estimate.stderr[0, 1], low[0, 1], high[0, 1]


def _divergence_truth(A: Matrix) -> np.ndarray:
    exact = {name: spectral_density(B, num_steps=A.shape[0]) for name, B in _pair(A).items()}
    return heterogeneity(exact).divergence[0, 1]


def coverage(measure: Measure, A: Matrix, right: np.ndarray, seeds: int) -> tuple[float, float]:
    """Return the share of stated intervals with the true value, and the share for ± 2 standard errors."""
    runs = [measure(A, seed) for seed in range(seeds)]
    value, stderr, low, high = (np.array(column) for column in zip(*runs, strict=True))
    stated = np.isfinite(low) & ~np.isnan(high)
    slack = 1e-9 * np.abs(right)  # rounding differences between two ways to compute the same number
    held = (low - slack <= right) & (right <= high + slack)
    if not stated.any():
        return np.nan, np.nan
    return float(held[stated].mean()), float((np.abs(value - right) <= 2 * stderr + slack)[stated].mean())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--blocks", default=",".join(BLOCKS))
    parser.add_argument("--only", default="", help="estimators whose name has one of these, with commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    blocks = matrices(options.tokens, tuple(options.blocks.split(",")))
    print(f"{options.seeds} seeds, blocks {', '.join(blocks)} of tiny-gpt.\n")
    print("| estimator | probes | held (mean) | least | most | ± 2 standard errors (mean) |")
    print("|---|---|---|---|---|---|")
    for name, count, measure, truth in estimators():
        if not any(part in name for part in options.only.split(",")):
            continue
        rates = {block: coverage(measure, A, truth(A), options.seeds) for block, A in blocks.items()}
        rates = {block: rate for block, rate in rates.items() if not np.isnan(rate[0])}
        held, naive = np.array(list(rates.values())).T
        worst = min(rates, key=lambda block: rates[block][0])
        row = f"{held.mean():.3f} | {held.min():.3f} ({worst}) | {held.max():.3f} | {naive.mean():.3f}"
        print(f"| {name} | {count} | {row} |", flush=True)


if __name__ == "__main__":
    main()
