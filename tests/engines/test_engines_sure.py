"""A model that has learned its data by heart: what is left of its curvature is right in float32 too."""

import copy

import pytest
import torch

import curvescope as cs
from dense import relative_error

OPERATORS = {
    "hessian": cs.Hessian,
    "ggn": cs.GGN,
    "functional": cs.FunctionalHessian,
    "fisher": cs.EmpiricalFisher,
}


@pytest.fixture(scope="module")
def sure() -> tuple[cs.Transformer, torch.Tensor, torch.Tensor]:
    """A model with p > 0.99 on every token that it was trained on."""
    torch.manual_seed(0)
    module = cs.Transformer(cs.TransformerConfig(n_layers=1, d_model=16, n_heads=2, n_ctx=6, vocab_size=8))
    x, y = torch.randint(8, (2, 6, 6))
    x[:, 0] = torch.arange(6)
    steps = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(1500):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(module(x).flatten(0, 1), y.flatten()).backward()
        steps.step()
    module.requires_grad_(True).eval()
    return module, x, y


@pytest.mark.parametrize("engine", ["fast", "autograd"])
@pytest.mark.parametrize("name", OPERATORS)
def test_products_in_float32_are_those_in_float64(name, engine, sure):
    module, x, y = sure
    operator = OPERATORS[name]
    single = cs.Problem(module, (x, y), loss="cross_entropy")
    double = cs.Problem(copy.deepcopy(module).double(), (x, y), loss="cross_entropy")
    assert double.loss_value() < 1e-4
    assert single.loss_value() == pytest.approx(double.loss_value(), rel=1e-4)
    v = torch.randn(operator(single).shape[0], generator=torch.Generator().manual_seed(1))
    found = operator(single, engine=engine) @ v
    limit = 2e-4 if name == "fisher" else 2e-5  # of squared slopes
    assert relative_error(found.double(), operator(double, engine="autograd") @ v.double()) < limit
