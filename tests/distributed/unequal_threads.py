"""One rank of a test: every algorithm on shares of the data, with a number of threads of its own.

Prints a digest of every result, one line each; started by `test_distributed_threads.py`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

import curvescope as cs
from curvescope.algorithms.estimates.norms import frobenius_norm
from curvescope.algorithms.systems.trust_region import trust_step
from curvescope.core.operator import LinearOperator
from curvescope.distributed import DataParallel, divided, share


def network() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A float32 network that is wide enough for torch to divide its sums among threads, and its data."""
    torch.manual_seed(0)
    sizes = ((20, 200), (200, 200), (200, 5))
    layers = [part for n, m in sizes for part in (torch.nn.Linear(n, m), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers[:-1]), (torch.randn(12, 20), torch.randint(0, 5, (12,)))


def results() -> Iterator[tuple[str, object]]:
    """Every algorithm's name and numbers."""
    module, data = network()
    whole = cs.Problem(module, data)
    own = cs.Problem(module, share(whole.batches))
    H, G = DataParallel(cs.Hessian(own)), DataParallel(cs.GGN(own))
    b = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(1))
    yield "eigsh", cs.eigsh(H, k=4, tol=1e-3, seed=0).vectors
    yield "density", cs.spectral_density(H, num_probes=2, num_steps=20, seed=0).nodes
    for method in ("hutchinson", "hutch++", "xtrace"):
        yield method, cs.trace(H, num_probes=12, method=method, seed=0).value
    yield "spectral norm", cs.spectral_norm(H, tol=1e-2, seed=0).value
    yield "Frobenius", frobenius_norm(H, num_probes=2, seed=0).value
    yield "diagonal", cs.diagonal(H, num_probes=4, seed=0).values
    yield "CG", cs.solve(G, b, damping=1e-2, tol=1e-3).x
    for method in ("minres", "lsmr"):
        yield method, cs.solve(H, b, damping=1e-1, tol=1e-2, max_products=60, method=method).x
    yield "trust region", trust_step(H, b, radius=1.0).step
    yield "own products", followed(H, b)
    with divided("auto"):
        yield "divided", cs.eigsh(cs.Hessian(whole), k=2, tol=1e-3, seed=0).vectors


def followed(op: LinearOperator, v: torch.Tensor) -> torch.Tensor:
    """Power iteration of a user, outside any algorithm of the package."""
    with op.frozen():
        for _ in range(8):
            v = op @ v
            v = v / v.norm()
    return v


def main() -> None:
    rank, ranks, threads, meet = (int(word) if word.isdigit() else word for word in sys.argv[1:])
    torch.set_num_threads(threads)
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks, timeout=wait)
    for name, found in results():
        print(name, hashlib.sha256(np.asarray(found).tobytes()).hexdigest(), flush=True)
    print("threads", "kept" if torch.get_num_threads() == threads else "changed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
