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
from curvescope.algorithms.spectra.subspace_tracking import follow_ends
from curvescope.algorithms.stability.sharpness import quadratic_descent
from curvescope.algorithms.systems.trust_region import trust_step
from curvescope.core.operator import LinearOperator
from curvescope.distributed import DataParallel, divided, share


class Tokens(torch.nn.Module):
    """A Transformer of one layer over tokens, wide enough for torch to divide its sums among threads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 64, padding_idx=0)
        self.layer = torch.nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True)
        self.head = torch.nn.Linear(64, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(x)))


def transformer() -> tuple[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A Transformer and batches of unequal sizes, which ranks have to cut."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 40, (7, 9))
    return Tokens(), [(t[:, :-1], t[:, 1:]) for t in (tokens[5:], tokens[1:5], tokens[:1])]


def network() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A float32 network that is wide enough for torch to divide its sums among threads, and its data."""
    torch.manual_seed(0)
    sizes = ((20, 200), (200, 200), (200, 5))
    layers = [part for n, m in sizes for part in (torch.nn.Linear(n, m), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers[:-1]), (torch.randn(12, 20), torch.randint(0, 5, (12,)))


def results(kind: str) -> Iterator[tuple[str, object]]:
    """Every algorithm's name and numbers."""
    module, data = {"network": network, "transformer": transformer}[kind]()
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
    yield "deflated", cs.trace(cs.deflate(H, b), num_probes=4, seed=0).value
    yield "block norms", cs.block_norms(H, {"a": slice(0, 50), "b": slice(50, 300)}, num_probes=2).frobenius
    yield "block traces", cs.block_traces(H, num_probes=2, seed=0).values
    blocks = cs.block_density(H, {"a": slice(0, 500)}, num_probes=2, num_steps=8, seed=0)
    yield "block density", blocks["a"].nodes
    yield "log det", cs.logdet(G, damping=0.1, num_probes=2, num_steps=10, seed=0).value
    inv = cs.inverse(G, damping=0.1, tol=1e-2)
    yield "inverse", inv @ b
    optimizer = torch.optim.RMSprop(module.parameters(), momentum=0.5)
    for p in module.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(2)) * 1e-3
    optimizer.step()
    yield "sharpness", cs.preconditioned_sharpness(H, optimizer, tol=1e-2, seed=0).value
    rates = [0.01, 0.1, 1.0]
    yield "descent", quadratic_descent(H, b, rates, 8).change
    yield "followed ends", follow_ends(H, top=2, seed=0).values
    if kind == "network":  # K-FAC has no factors for norms
        with G.frozen():
            helper = cs.KFAC(whole).inverse(1e-2)
        yield "helped", cs.solve(G, b, damping=1e-2, tol=1e-5, max_products=20, preconditioner=helper).x
    yield "own products", power_iteration(H, b)
    with divided("auto"):
        D = cs.Hessian(whole)
        yield "divided", cs.eigsh(D, k=2, tol=1e-3, seed=0).vectors
        yield "divided density", cs.spectral_density(D, num_probes=3, num_steps=10, seed=0).nodes
        yield "divided CG", cs.solve(cs.GGN(whole), b, damping=1e-2, tol=1e-3).x
        if kind == "network":
            helper = cs.KFAC(whole).inverse(1e-2)
            yield "K-FAC", helper @ b
            yield (
                "preconditioned",
                cs.solve(cs.GGN(whole), b, damping=1e-2, tol=1e-5, max_products=20, preconditioner=helper).x,
            )


def power_iteration(op: LinearOperator, v: torch.Tensor) -> torch.Tensor:
    """Power iteration of a user, outside any algorithm of the package."""
    with op.frozen():
        for _ in range(8):
            v = op @ v
            v = v / v.norm()
    return v


def main() -> None:
    rank, ranks, threads, meet, kind = (int(word) if word.isdigit() else word for word in sys.argv[1:])
    torch.set_num_threads(threads)
    wait = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks, timeout=wait)
    for name, found in results(kind):
        print(name, hashlib.sha256(np.asarray(found).tobytes()).hexdigest(), flush=True)
    print("threads", "kept" if torch.get_num_threads() == threads else "changed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
