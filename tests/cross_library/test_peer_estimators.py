"""Our estimators beside those of curvlinops from the same probes, and exact diagonals beside BackPACK's."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

import curvescope as cs
import oracles
from curvescope.core.operator import Matrix
from curvescope.core.seeds import generator, probes
from oracles import relative_error

pytestmark = pytest.mark.cross_library

AGREE = 1e-8


def decaying(n: int = 40) -> torch.Tensor:
    """A symmetric matrix with a few large eigenvalues."""
    Q = torch.linalg.qr(torch.randn(n, n, generator=generator(1), dtype=torch.float64))[0]
    values = 2.0 ** -torch.arange(n, dtype=torch.float64)
    return (Q * values) @ Q.T


ESTIMATORS = {
    "hutchinson_trace": ("trace.hutchinson", lambda A, **how: cs.trace(A, **how).value),
    "hutchpp_trace": ("trace.meyer2020hutch", lambda A, **how: cs.trace(A, method="hutch++", **how).value),
    "xtrace": ("trace.epperly2024xtrace", lambda A, **how: cs.trace(A, method="xtrace", **how).value),
    "hutchinson_diag": ("diagonal.hutchinson", lambda A, **how: cs.diagonal(A, **how).values),
    "xdiag": ("diagonal.epperly2024xtrace", lambda A, **how: cs.diagonal(A, method="xdiag", **how).values),
}


@pytest.mark.parametrize("probe", ["rademacher", "gaussian"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_same_probes_give_the_same_estimate(name, probe, monkeypatch):
    pytest.importorskip("curvlinops")
    if (name, probe) in (("xdiag", "gaussian"), ("hutchinson_diag", "gaussian")):
        pytest.skip("the peer's takes signs only, or does not divide by Σ v ∘ v")
    module, ours = ESTIMATORS[name]
    peer, A = import_module(f"curvlinops.{module}"), decaying()
    drawn = iter(probes(len(A), 12, seed=4, kind=probe).T)
    monkeypatch.setattr(peer, "random_vector", lambda *_: next(drawn))
    theirs = getattr(peer, name)(A, num_matvecs=12)
    found = ours(Matrix((A + A.T) / 2, symmetric=True), num_probes=12, seed=4, probe=probe)
    np.testing.assert_allclose(found, theirs.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_exact_diagonals_are_backpacks(loss):
    peer = pytest.importorskip("backpack")
    extensions = import_module("backpack.extensions")
    net = oracles.shaken(oracles.drawn(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))))
    source = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, generator=source, dtype=torch.float64)
    if loss == "cross_entropy":
        y, criterion = torch.randint(0, 4, (7,), generator=source), nn.CrossEntropyLoss()
    else:
        y, criterion = torch.randn(7, 4, generator=source, dtype=torch.float64), nn.MSELoss()
    problem = cs.Problem(net, cs.Batches([cs.Batch(x, y)]), loss)
    space = problem.space()
    ggn, fisher = (
        cs.exact_diagonal(F(problem), method="outputs").values for F in (cs.GGN, cs.EmpiricalFisher)
    )
    extended = peer.extend(net)
    with peer.backpack(extensions.DiagGGNExact(), extensions.SumGradSquared()):
        peer.extend(criterion)(extended(x), y).backward()
    names = dict(extended.named_parameters())
    theirs = space.gather({name: p.diag_ggn_exact for name, p in names.items()})
    squares = space.gather({name: p.sum_grad_squared for name, p in names.items()})
    assert relative_error(torch.as_tensor(ggn), theirs) < AGREE
    assert relative_error(torch.as_tensor(fisher), squares * len(x)) < AGREE
