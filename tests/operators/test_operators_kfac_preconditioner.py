"""K-FAC as a preconditioner: of systems, and of the sharpness."""

from __future__ import annotations

import pytest
import torch
from packed_net import normal
from torch import nn

import curvescope as cs
from oracles import drawn


def problem() -> cs.Problem:
    """A narrow network with inputs of very different sizes, which K-FAC takes out."""
    module = drawn(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))).double()
    x = normal(40, 6, seed=1) * torch.logspace(-1.5, 1, 6).double()
    return cs.Problem(module, (x, normal(40, 3, seed=2)), "mse_mean")


def test_it_saves_products():
    p = problem()
    G, K, g = cs.GGN(p), cs.KFAC(p), p.gradient()
    assert G.space.blocks == K.space.blocks
    plain = cs.solve(G, g, damping=1e-4)
    helped = cs.solve(G, g, damping=1e-4, preconditioner=K.inverse(1e-4))
    assert plain.converged
    assert helped.converged
    torch.testing.assert_close(
        torch.as_tensor(helped.x), torch.as_tensor(plain.x), rtol=0, atol=1e-4 * abs(plain.x).max()
    )
    assert helped.num_products < 0.7 * plain.num_products


def test_factors_of_other_blocks_are_said():
    own = problem()
    K = cs.KFAC(own, kind="ggn")
    H = cs.Hessian(own, K.space.blocks[0].name)
    with pytest.raises(cs.UsageError, match=r"same blocks: H\.block\(names\) and P\.block\(names\)"):
        cs.preconditioned_sharpness(H, K, damping=0.1)
    layer = [block.name for block in K.layers[0].blocks]
    fitting = cs.preconditioned_sharpness(cs.Hessian(own, *layer), K.block(layer), damping=0.1)
    assert fitting.converged


def test_its_sharpness_is_that_of_the_dense_matrices():
    p = problem()
    H, K = cs.Hessian(p), cs.KFAC(p)
    found = cs.preconditioned_sharpness(H, K, damping=1e-2)
    P = K.to_dense() + 1e-2 * torch.eye(H.shape[0]).double()
    values = torch.linalg.eigvals(torch.linalg.solve(P, H.to_dense())).real
    assert found.value == pytest.approx(float(values.max()), rel=1e-7)
    assert found.max_learning_rate == pytest.approx(2 / found.value)
    assert found.optimizer == "KFAC"
