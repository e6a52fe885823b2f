"""A new user's script: a PyTorch model, a double backward of one's own, flat vectors that go both ways."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import curvescope as cs


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(40, 5, generator=source).double(), torch.randint(0, 3, (40,), generator=source)


def test_a_first_script(model, data):
    x, y = data
    loss_fn = nn.CrossEntropyLoss()
    params = list(model.parameters())

    # a double backward of one's own
    loss = loss_fn(model(x), y)
    g = parameters_to_vector(torch.autograd.grad(loss, params, create_graph=True))
    v = torch.randn(len(g), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    Hv = parameters_to_vector(torch.autograd.grad(g @ v, params)).detach()
    g = g.detach()

    problem = cs.Problem(model, (x, y), loss_fn)
    H, G = cs.Hessian(problem), cs.GGN(problem, damping=0.1)
    torch.testing.assert_close(H @ v, Hv)
    torch.testing.assert_close(problem.gradient(), g)

    # a natural gradient step from a gradient that was computed elsewhere
    step = cs.solve(G, g, tol=1e-10)
    assert step.converged
    assert isinstance(step.x, torch.Tensor)
    assert (step.x.dtype, step.x.device) == (H.dtype, H.device)
    torch.testing.assert_close(G @ step.x, g, rtol=1e-7, atol=1e-9)
    theta = parameters_to_vector(params).detach()
    vector_to_parameters(theta - step.x, model.parameters())
    assert loss_fn(model(x), y).item() < loss.item()

    # an eigenvector, written into the model: the loss is that of the parabola along it
    vector_to_parameters(theta, model.parameters())
    top = cs.eigsh(H, k=1)
    u = top.vectors[:, 0]
    t = 1e-2
    vector_to_parameters(theta + t * u, model.parameters())
    ahead = loss_fn(model(x), y).item()
    vector_to_parameters(theta - t * u, model.parameters())
    behind = loss_fn(model(x), y).item()
    assert (ahead - 2 * loss.item() + behind) / t**2 == pytest.approx(float(top.values[0]), rel=1e-3)
    assert all(p.is_contiguous() for p in model.parameters())


def test_what_comes_out_is_of_the_kind_that_went_in(model, data, tmp_path):
    problem = cs.Problem(model.float(), (data[0].float(), data[1]))
    H, G, n = cs.Hessian(problem), cs.GGN(problem), cs.Hessian(problem).shape[0]
    b = problem.gradient()
    pairs = cs.eigsh(H, k=2)
    for vector in (
        H @ b,
        b,
        cs.solve(G, b, damping=0.1).x,
        pairs.vectors,
        cs.eigsh(H, k=2, v0=b).vectors,
        cs.diagonal(H, num_probes=4).values,
        cs.diagonal(H, num_probes=4).stderr,
        cs.diagonal(H, num_probes=4).interval[0],
        cs.diagonal(H, num_probes=4, method="xdiag").values,
        cs.exact_diagonal(G).values,
        cs.third_derivative(problem, b).vector,
    ):
        assert isinstance(vector, torch.Tensor)
        assert (len(vector), vector.dtype, vector.device) == (n, H.dtype, H.device)
    for array in (
        H @ b.numpy(),
        cs.solve(G, b.numpy(), damping=0.1).x,
        cs.eigsh(H, k=2, v0=b.numpy()).vectors,
        pairs.values,
        pairs.residuals,
    ):
        assert isinstance(array, np.ndarray)

    read = type(pairs).load(pairs.save(tmp_path))
    assert isinstance(read.values, np.ndarray)
    assert isinstance(read.vectors, torch.Tensor)
    assert torch.equal(read.vectors, pairs.vectors)
    cs.eigsh(H, k=2, v0=read.vectors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_flat_vectors_go_both_ways_in_every_precision(model, data, dtype):
    module, (x, y) = model.to(dtype), (data[0].to(dtype), data[1])
    problem = cs.Problem(module, (x, y), nn.CrossEntropyLoss())
    wide = copy.deepcopy(module).double()
    params = list(wide.parameters())
    loss = nn.CrossEntropyLoss()(wide(x.double()), y)
    g = parameters_to_vector(torch.autograd.grad(loss, params, create_graph=True))
    v = torch.randn(len(g), generator=torch.Generator().manual_seed(2)).to(dtype)
    Hv = parameters_to_vector(torch.autograd.grad(g @ v.double(), params))

    H = cs.Hessian(problem)
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype != torch.float64 else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close((H @ v).double(), Hv, **close)
    torch.testing.assert_close(problem.gradient().double(), g.detach(), **close)
    theta = parameters_to_vector(module.parameters()).detach()
    step = cs.solve(cs.GGN(problem, damping=0.1), theta)
    assert step.converged
    assert step.x.dtype == H.dtype
    vector_to_parameters(theta - 0.1 * step.x.to(theta), module.parameters())
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert float((H @ v).double().sub(Hv).norm()) > 0  # the product is that of the new parameters
