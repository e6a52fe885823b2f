"""The curvature of a scan, by the product rule, is that of automatic differentiation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd

from curvescope.closed_form.network import scan as closed


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def value(a: Tensor, b: Tensor, g: Tensor) -> Tensor:
    h, total = torch.zeros_like(b[0]), torch.zeros((), dtype=torch.float64)
    for a_t, b_t, g_t in zip(a, b, g, strict=True):
        h = a_t * h + b_t
        total = total + (g_t * h).sum()
    return total


CASES = {
    "one step": (drawn(1, 2), drawn(1, 2, seed=1), drawn(1, 2, seed=2)),
    "plain": (drawn(5, 2).sigmoid(), drawn(5, 2, seed=1), drawn(5, 2, seed=2)),
    "forgets": (drawn(5, 1).relu().sign() * 0.9, drawn(5, 1, seed=1), drawn(5, 1, seed=2)),  # some a are 0
    "grows": (2 + drawn(4, 1).abs(), drawn(4, 1, seed=1), drawn(4, 1, seed=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_and_hessian_of_a_scan(name: str):
    a, b, g = CASES[name]
    ga, gb = closed.scan_gradient(a, b, g)
    torch.testing.assert_close(ga, grad(value)(a, b, g))
    torch.testing.assert_close(gb, grad(value, argnums=1)(a, b, g))
    truth = jacfwd(grad(value, argnums=(0, 1)), argnums=(0, 1))(a, b, g)
    aa, ab = closed.scan_hessian(a, b, g)
    for c in range(a.shape[1]):  # channels do not see each other
        torch.testing.assert_close(aa[..., c], truth[0][0][:, c, :, c])
        torch.testing.assert_close(ab[..., c], truth[0][1][:, c, :, c])
    assert float(truth[1][1].abs().max()) == 0
    da, db = drawn(*a.shape, seed=3), drawn(*a.shape, seed=4)
    found = closed.scan_product(a, b, g, da, db)
    along_a = torch.tensordot(truth[0][0], da) + torch.tensordot(truth[0][1], db)
    along_b = torch.tensordot(truth[1][0], da) + torch.tensordot(truth[1][1], db)
    torch.testing.assert_close(found[0], along_a)
    torch.testing.assert_close(found[1], along_b)


@pytest.mark.parametrize("decay", [0.5, 3.0])
def test_a_selective_scan_in_its_input(decay: float):
    x, g = drawn(6, 2, seed=5), drawn(6, 2, seed=6)

    def of_input(x: Tensor) -> Tensor:
        step = torch.nn.functional.softplus(x)
        return value((-decay * step).exp(), step * x, g)

    truth = jacfwd(grad(of_input))(x)
    found = closed.scan_input_hessian(closed.selective(x, decay=decay), g)
    for c in range(2):
        torch.testing.assert_close(found[..., c], truth[:, c, :, c], rtol=1e-10, atol=1e-12)
