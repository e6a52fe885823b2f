"""How often the stated 95 % intervals hold, over 200 seeds, on blocks whose matrices are written out.

    python benchmarks/coverage.py [--tokens 128] [--seeds 200] > benchmarks/results/coverage.md

Each block of the bundled model's Hessian, GGN and functional part is written out once in float64; products
with the matrix then stand for those of the operator. One row per estimator and number of probes: the share
of intervals that hold the truth (the mean over blocks, the smallest and the largest), and what ± 2 standard
errors would have held.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np
import torch

from curvescope.algorithms import block_map, diagonal, frobenius_norm, trace
from curvescope.algorithms.blocks.probes import own_probes
from curvescope.core.operator import Matrix
from curvescope.operators import GGN, Functional, Hessian
from curvescope.studies.blocks import Config
from curvescope.studies.setting import make_problem

BLOCKS = ("L3.ln1.g", "L3.b_V", "L3.b_O", "ln_f.g")
Measured = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # value, stderr, low, high


def matrices(tokens: int) -> dict[str, Matrix]:
    """The blocks as matrices, symmetric to the last digit."""
    problem = make_problem(Config(tokens=tokens, dtype="float64"))
    found = {}
    for letter, make in (("H", Hessian), ("G", GGN), ("F", Functional)):
        for name in BLOCKS:
            op = make(problem, name)
            A = op.dense()
            if float(A.abs().max()) < 1e-10:  # the loss is linear in the last norm: nothing to estimate
                continue
            found[f"{letter} {name}"] = Matrix((A + A.T) / 2, symmetric=True, psd=op.psd)
    return found


def estimators() -> Iterator[tuple[str, int, Callable[[Matrix, int], Measured], Callable]]:
    """Name, probes, measurement, truth."""

    def by_trace(method: str, count: int) -> Callable[[Matrix, int], Measured]:
        return lambda A, seed: _fields(trace(A, num_probes=count, method=method, seed=seed))  # pyright: ignore

    for method, counts in {
        "hutchinson": (2, 4, 10, 30),
        "hutch++": (6, 12, 30),
        "xtrace": (4, 10, 30),
    }.items():
        for count in counts:
            yield f"trace, {method}", count, by_trace(method, count), lambda A: float(A.A.trace())
    for count in (2, 4, 8, 30):
        yield (
            "Frobenius norm",
            count,
            lambda A, seed, count=count: _fields(frobenius_norm(A, num_probes=count, seed=seed)),
            lambda A: float(A.A.norm()),
        )
    for count in (2, 4, 10):
        yield "diagonal", count, lambda A, seed, count=count: _entries(A, count, seed), lambda A: np.diag(A.A)
        yield "block map", count, lambda A, seed, count=count: _map(A, count, seed), _map_truth
    yield "trace, own probes", 4, _own, lambda A: float(A.A.trace())


def _fields(found) -> Measured:
    return found.value, found.stderr, found.low, found.high


def _own(A: Matrix, seed: int) -> Measured:
    found = own_probes(A, num_probes=4, seed=seed)
    return found.trace, found.trace_stderr, found.trace_low, found.trace_high  # pyright: ignore


def _entries(A: Matrix, count: int, seed: int) -> Measured:
    found = diagonal(A, num_probes=count, seed=seed)
    return found.values, found.stderr, *found.interval


def _halves(A: Matrix) -> dict[str, slice]:
    n = A.shape[0]
    return {"a": slice(0, n // 3), "b": slice(n // 3, n)}


def _map(A: Matrix, count: int, seed: int) -> Measured:
    found = block_map(A, _halves(A), num_probes=count, seed=seed)
    return found.frobenius, found.stderr, *found.interval


def _map_truth(A: Matrix) -> np.ndarray:
    parts = _halves(A).values()
    return np.array([[float(A.A[r, c].norm()) for c in parts] for r in parts])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    blocks = matrices(options.tokens)
    print(f"{options.seeds} seeds, blocks {', '.join(blocks)} of tiny-gpt.\n")
    print("| estimator | probes | held (mean) | least | most | ± 2 standard errors (mean) |")
    print("|---|---|---|---|---|---|")
    for name, count, measure, truth in estimators():
        held, naive = [], []
        for A in blocks.values():
            right = truth(A)
            runs = [measure(A, seed) for seed in range(options.seeds)]
            value, stderr, low, high = (np.array(column) for column in zip(*runs, strict=True))
            held.append(((low <= right) & (right <= high)).mean())
            naive.append((np.abs(value - right) <= 2 * stderr).mean())
        row = f"{np.mean(held):.3f} | {min(held):.3f} | {max(held):.3f} | {np.mean(naive):.3f}"
        print(f"| {name} | {count} | {row} |", flush=True)


if __name__ == "__main__":
    main()
