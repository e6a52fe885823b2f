"""Accuracy and cost of the algorithms on very large operators with known spectra.

    python benchmarks/large_operators.py --rows 1e6 --rows 1e7 --out benchmarks/results/large-operators
    python benchmarks/large_operators.py --rows 1e9 --device cuda --quick

Products are those of a diagonal plus a low rank, in float32: cheap, so that the rest of the time is the
algorithm's own. It is compared with the product of a language model, about 15 ns for each parameter.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from curvescope.algorithms import diagonal, eigsh, frobenius_norm, solve, spectral_density, trace
from curvescope.core.operator import LinearOperator
from curvescope.core.seeds import generator

MODEL_PRODUCT = 15e-9  # seconds per parameter: SmolLM2-135M, 48 tokens, takes about 2 s on two cores
ENDS = {
    "two": np.array([1000.0, -400.0]),
    "eight": np.array([1000.0, 700, 200, 50, 3, -400, -90, -8]),
    "repeated": np.array([30.0, 30, 30, 12, -25, -25]),
}


class Timed(LinearOperator):
    """Operator diag(d) + U diag(λ) Uᵀ, U with disjoint supports, that times its products."""

    symmetric = True

    def __init__(self, n: int, ends: np.ndarray, *, bulk: float, device: str):
        self.shape, self.dtype, self.device = (n, n), torch.float32, torch.device(device)
        self.d = torch.full((n,), bulk, device=device)
        half = len(ends) // 2  # the first half on the diagonal, the others on vectors of a thousand entries
        places = torch.randperm(min(n, 10**6), generator=generator(n))
        self.d[places[:half].to(device)] = torch.as_tensor(ends[:half], dtype=torch.float32).to(device)
        self.rows = places[half : half + 1000 * (len(ends) - half)].view(-1, 1000).to(device)
        signs = torch.where(torch.rand(self.rows.shape, generator=generator(n, 1)) < 0.5, -1.0, 1.0)
        self.U = (signs / 1000**0.5).to(device)
        self.values = torch.as_tensor(ends[half:] - bulk, dtype=torch.float32).to(device)
        self.seconds, self.processor, self.columns = 0.0, 0.0, 0

    def _matmat(self, V: torch.Tensor) -> torch.Tensor:
        start, clock = time.perf_counter(), time.process_time()
        out = self.d[:, None] * V
        inner = torch.einsum("rj,rjk->rk", self.U, V[self.rows]) * self.values[:, None]
        out.index_add_(0, self.rows.reshape(-1), (self.U[:, :, None] * inner[:, None]).flatten(0, 1))
        if V.is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        self.processor += time.process_time() - clock
        self.columns += V.shape[1]
        return out


def wanted(ends: np.ndarray, bulk: float, k: int, which: str) -> np.ndarray:
    """Return the k eigenvalues that `which` selects, in the order of eigsh; by |λ| for LM."""
    ascending = np.sort(np.r_[ends, np.full(12, bulk)])
    if which == "LM":
        return np.sort(np.abs(ascending))[::-1][:k]
    if which == "BE":
        return np.r_[ascending[: k // 2], ascending[len(ascending) - (k - k // 2) :]]
    return ascending[::-1][:k] if which == "LA" else ascending[:k]


def sweep(n: int, device: str, quick: bool) -> dict:
    """Run all cases of eigsh at one size, and count converged and wrong results."""
    kinds, tols = (("two",), (1e-1, 1e-3)) if quick else (tuple(ENDS), (1e-1, 1e-2, 1e-3, 1e-4, 1e-5))
    counts = {"rows": n, "cases": 0, "converged": 0, "wrong": 0, "products": 0}
    for name in kinds:
        op = Timed(n, ENDS[name], bulk=1e-3, device=device)
        for which in ("LA", "SA", "LM", "BE"):
            for k in (1,) if quick else (1, 2, 5, 10):
                for tol in tols:
                    result = eigsh(op, k, which=which, tol=tol, max_basis=max(14, k + 4), vectors=False)
                    values = np.abs(result.values) if which == "LM" else result.values
                    error = np.abs(values - wanted(ENDS[name], 1e-3, k, which)).max()
                    wrong = bool(error > (tol + 1e-6) * np.abs(ENDS[name]).max())
                    counts["cases"] += 1
                    counts["converged"] += result.converged
                    counts["wrong"] += result.converged and wrong
                    counts["products"] += result.num_products
    return counts


def costs(n: int, device: str) -> list[dict]:
    """Return the time of each algorithm outside its products, per product and entry, and as a share."""
    op = Timed(n, ENDS["eight"], bulk=1.0, device=device)
    op.psd = True  # positive for conjugate gradients, which reach the negative end late
    b = torch.ones(n, device=device)
    cases = {
        "eigsh, basis 14": lambda: eigsh(op, 5, tol=1e-3, max_basis=14, vectors=False),
        "density, 8 steps": lambda: spectral_density(op, num_probes=1, num_steps=8, max_gib=64),
        "density, not reorthogonalized": lambda: spectral_density(
            op, num_probes=1, num_steps=8, reorthogonalize=False
        ),
        "minres": lambda: solve(op, b, method="minres", tol=1e-3),
        "cg": lambda: solve(op, b, tol=1e-9, max_products=8),
        "hutchinson": lambda: trace(op, num_probes=4),
        "hutch++": lambda: trace(op, num_probes=6, method="hutch++"),
        "xtrace": lambda: trace(op, num_probes=6, method="xtrace"),
        "frobenius norm": lambda: frobenius_norm(op, num_probes=4),
        "diagonal": lambda: diagonal(op, num_probes=4),
    }
    rows = []
    trace(Timed(10**6, ENDS["eight"], bulk=1.0, device=device), num_probes=4)  # imports and first launches
    for name, run in cases.items():
        op.seconds = op.processor = 0.0
        op.columns, start, clock = 0, time.perf_counter(), time.process_time()
        run()
        overhead = time.perf_counter() - start - op.seconds, time.process_time() - clock - op.processor
        wall, processor = (1e9 * seconds / op.columns / n for seconds in overhead)
        row = {"rows": n, "algorithm": name, "products": op.columns, "own_ns": wall}
        rows.append(row | {"processor_ns": processor, "share": wall / (1e9 * MODEL_PRODUCT)})
        print(rows[-1], flush=True)
    return rows


def bandwidth(device: str, n: int = 30_000_000) -> float:
    """Return the GB/s of the triad a + 2 b → c, the best of five."""
    a, b, c = torch.ones(3, n, device=device)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        torch.add(a, b, alpha=2, out=c)
        if c.is_cuda:
            torch.cuda.synchronize()
        best = max(best, 12 * n / (time.perf_counter() - start) / 1e9)
    return best


def main() -> None:
    """Print both tables, and with --out write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, action="append", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="eight cases instead of 240")
    parser.add_argument("--only", choices=["sweep", "costs"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tables: dict[str, list[dict]] = {"sweep": [], "costs": []}
    for n in map(int, args.rows):
        if args.only != "costs":
            tables["sweep"].append(sweep(n, args.device, args.quick))
            print(tables["sweep"][-1], flush=True)
        if args.only != "sweep":
            tables["costs"] += costs(n, args.device)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        where = {"threads": torch.get_num_threads(), "torch": torch.__version__, "device": args.device}
        where["triad_gb_per_s"] = bandwidth(args.device)
        (args.out / "result.json").write_text(json.dumps(where | tables, indent=1))


if __name__ == "__main__":
    main()
