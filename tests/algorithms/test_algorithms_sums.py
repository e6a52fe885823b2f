"""Sums over entries: float32 vectors of any make, against float64."""

from __future__ import annotations

import pytest
import torch

from curvescope.algorithms.accurate_sums import CPU_CHUNK, column_dots, dots, inner, norms
from curvescope.algorithms.vectors import orthogonalize
from curvescope.core.seeds import generator

n = 5 * CPU_CHUNK + 77
EPS = torch.finfo(torch.float32).eps
MAKES = {  # entries of one size, of very different ones, falling off, of one sign, few beside many
    "normal": lambda x: x,
    "heavy": lambda x: x * torch.exp(4 * x.flip(0)),
    "falling": lambda x: x * torch.logspace(0, -9, n)[:, None],
    "positive": lambda x: x.abs(),
    "few": lambda x: x * torch.where(torch.arange(n) % 30_011 == 7, 1e4, 1e-3)[:, None],
}


def columns(make: str, k: int) -> torch.Tensor:
    return MAKES[make](torch.randn(n, k, generator=generator(3)))


@pytest.mark.parametrize("make", MAKES)
def test_inner_products_of_float32_vectors_are_right_to_a_rounding(make):
    X, Y = columns(make, 3), columns(make, 3).flip(1).contiguous()
    x, y = X[:, 0].contiguous(), Y[:, 0].contiguous()
    sizes = (X.double() * Y.double()).abs().sum(dim=0)
    exact = (X.double() * Y.double()).sum(dim=0)
    assert bool(((column_dots(X, Y) - exact).abs() <= EPS * sizes).all())
    assert abs(inner(x, y) - exact[0]) <= EPS * sizes[0]
    assert abs(inner(x, x).sqrt() / x.double().norm() - 1) <= 0.5 * EPS
    assert inner(x, y).dtype == torch.float64


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_norms_of_any_size(size):
    X = size * columns("heavy", 2).clamp(-1e6, 1e6)
    exact = X.double().norm(dim=0).float()
    torch.testing.assert_close(norms(X, dim=0), exact, rtol=2 * EPS, atol=0)
    torch.testing.assert_close(norms(X.T, dim=1), exact, rtol=2 * EPS, atol=0)
    torch.testing.assert_close(norms(X), X.double().norm().float(), rtol=2 * EPS, atol=0)


@pytest.mark.parametrize("make", MAKES)
def test_what_is_left_of_a_long_vector_is_orthogonal_to_a_few_roundings(make):
    """The overlap that is said to be left is there, and small: dot products in float32 are too rough."""
    basis = torch.linalg.qr(columns(make, 4).double())[0].T.float().contiguous()
    w = columns(make, 5)[:, 4] + 1e3 * columns("positive", 1)[:, 0] * columns(make, 1)[:, 0]
    rest = orthogonalize(basis, w)
    left = basis.double() @ w.double()
    assert float(left.norm()) <= 6 * EPS * rest.norm
    assert float((left - torch.as_tensor(rest.overlap)).norm()) <= 2 * EPS * rest.norm
    torch.testing.assert_close(rest.norm, float(w.double().norm()), rtol=EPS, atol=0)
    assert dots(basis, w).dtype == torch.float64
