"""Memory of the algorithms is what their docstrings say: the most bytes of tensors that live at one time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import curvescope as cs
from curvescope.algorithms import diagonal, eigsh, frobenius_norm, solve, spectral_density, trace
from curvescope.core.operator import FunctionOperator
from selection import most

n = 1_000_000
PAIR = 2  # columns of this length that a product gets
PARTS = 0.3  # vectors: buffers for parts of vectors, which do not grow with n


# vectors by the formulas, with the one that a product of the operator below returns for each column
CASES = {
    "eigsh": (10 + 1 + 2, lambda A, b: eigsh(A, 2, max_basis=10, tol=1e-2, vectors=False)),
    "eigsh, vectors": (8 + 1 + 4, lambda A, b: eigsh(A, 4, max_basis=8, tol=1e-2)),
    "density": (6 + 1 + 1, lambda A, b: spectral_density(A, num_probes=1, num_steps=6)),
    "density, two probes": (
        2 * (6 + 1) + 2 + 2,
        lambda A, b: spectral_density(A, num_probes=2, num_steps=6),
    ),
    "density, short": (
        2 + 1,
        lambda A, b: spectral_density(A, num_probes=1, num_steps=6, reorthogonalize=False),
    ),
    "hutchinson": (2 * PAIR, lambda A, b: trace(A, num_probes=8)),
    "hutch++": (3 + 2 * PAIR, lambda A, b: trace(A, num_probes=9, method="hutch++")),
    "xtrace": (3 + 2 * PAIR, lambda A, b: trace(A, num_probes=6, method="xtrace")),
    "frobenius": (2 * PAIR + 3, lambda A, b: frobenius_norm(A, num_probes=8)),
    "diagonal": (2 * 2 + 2 * PAIR, lambda A, b: diagonal(A, num_probes=8)),  # two in float64
    "xdiag": (6 + 3 + 1, lambda A, b: diagonal(A, num_probes=6, method="xdiag")),  # three of the result
    "cg": (5 + 1, lambda A, b: solve(A, b, tol=1e-3)),
    "minres": (6 + 1, lambda A, b: solve(A, b, tol=1e-3, method="minres")),
}


@pytest.mark.parametrize(
    "name",
    most(
        list(CASES), but=["eigsh, vectors", "density, two probes", "density, short", "frobenius", "hutch++"]
    ),
)
def test_peak_memory_is_what_the_docstrings_say(name):
    d = torch.full((n,), 1e-2, dtype=torch.float32)
    d[:4] = torch.tensor([100.0, 50, 20, 3])
    op = FunctionOperator(lambda V: d[:, None] * V, (n, n), dtype=torch.float32, symmetric=True, psd=True)
    b = torch.ones(n, dtype=torch.float32)
    vectors, algorithm = CASES[name]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        algorithm(op, b)
    assert vectors <= peak(recorded) / (4 * n) <= vectors + PARTS


def test_a_trace_of_a_network_takes_five_vectors():
    """At the most; most of it while the first product and the recording are compared."""
    width = 1500  # one column at a time on a CPU
    module = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
    problem = cs.Problem(module, (torch.ones(4, width), torch.zeros(4).long()))
    size = problem.model.num_parameters
    G = cs.GGN(problem)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        trace(G, num_probes=16)
    assert peak(recorded) / (4 * size) < 5.4
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        _ = cs.GGN(problem, engine="autograd") @ torch.ones(G.shape[0])
    assert peak(recorded) / (4 * size) < 4.2  # the vector itself, what is kept, and the product twice


def peak(recorded: profile) -> int:
    """Most bytes that tensors took at one time, by PyTorch's own record of what it allocated and freed."""
    events = recorded.profiler.kineto_results.events()
    live = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most
