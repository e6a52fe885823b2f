"""Norms as spheres: projection, radius, folding, the ellipsoid and what is attainable on it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.geometry import (
    StreamNorm,
    attainable,
    ellipsoid,
    fold,
    normalize,
    project,
    radius,
    support,
    unscale,
)

D = 9
KINDS = ["layernorm", "rmsnorm"]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_projector(kind: str, d: int = D) -> torch.Tensor:
    eye = torch.eye(d, dtype=torch.float64)
    return eye - torch.ones(d, d, dtype=torch.float64) / d if kind == "layernorm" else eye


@pytest.mark.parametrize("kind", KINDS)
def test_the_sphere_has_radius_root_d(kind):
    x = 3 * draw(20, D) + 1
    n, P = normalize(x, kind=kind), dense_projector(kind)
    want = math.sqrt(D) * (x @ P) / (x @ P).norm(dim=1, keepdim=True)
    torch.testing.assert_close(n, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(n.norm(dim=1), torch.full((20,), math.sqrt(D)).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(project(x, kind=kind), x @ P, rtol=0, atol=1e-12)
    if kind == "layernorm":
        assert float(n.sum(1).abs().max()) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_radius_with_epsilon(kind):
    x, eps = draw(20, D), 0.3
    size = (x @ dense_projector(kind)).norm(dim=1)
    want = math.sqrt(D) * size / (size**2 + D * eps).sqrt()
    torch.testing.assert_close(radius(x, kind=kind, eps=eps), want)
    torch.testing.assert_close(normalize(x, kind=kind, eps=eps).norm(dim=1), want)


def test_the_layernorm_of_torch():
    x, g, b = draw(4, D), draw(D, seed=1), draw(D, seed=2)
    want = torch.nn.functional.layer_norm(x, (D,), g, b, eps=1e-3)
    torch.testing.assert_close(StreamNorm("layernorm", g, b, 1e-3)(x), want)
    torch.testing.assert_close(
        StreamNorm("rmsnorm", g, None, 1e-3)(x), torch.nn.functional.rms_norm(x, (D,), g, eps=1e-3)
    )


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_folding_is_exact(kind):
    x, g, b = draw(6, D), draw(D, seed=1), draw(D, seed=2)
    W, c = draw(D, 4, seed=3), draw(4, seed=4)
    norm = StreamNorm(kind, g, b, 1e-4) if kind != "none" else StreamNorm("none")
    folded, shift = fold(W, c, gamma=g, beta=b, kind=kind)
    torch.testing.assert_close(norm.sphere(x) @ folded + shift, norm(x) @ W + c, rtol=0, atol=1e-12)
    if kind == "layernorm":
        assert float(folded.sum(0).abs().max()) < 1e-13


@pytest.mark.parametrize("zeros", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_unscale_finds_what_folded_weights_need(kind, zeros):
    x, g, b, W = draw(6, D), draw(D, seed=1), draw(D, seed=2), draw(D, 4, seed=3)
    g[:zeros] = 0
    norm = StreamNorm(kind, g, b, 1e-4)
    n = unscale(norm(x), gamma=g, beta=b, kind=kind)
    folded, shift = fold(W, None, gamma=g, beta=b, kind=kind)
    torch.testing.assert_close(n @ folded + shift, norm(x) @ W, rtol=0, atol=1e-11)
    if not zeros:
        torch.testing.assert_close(n, norm.sphere(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ellipsoid(kind):
    g, b = draw(D, seed=1), draw(D, seed=2)
    y = StreamNorm(kind, g, b, 0.0)(draw(50, D))
    found = ellipsoid(g, b, kind=kind, name="ln_f")
    away = y.numpy() - found.center
    assert found.name == "ln_f"
    np.testing.assert_allclose(((away / g.numpy()) ** 2).sum(1), D, rtol=1e-12)
    inside = away @ found.axes / found.semi_axes
    np.testing.assert_allclose(
        (inside**2).sum(1), 1, rtol=1e-10
    )  # points lie on the ellipsoid with these axes
    dense = torch.linalg.svdvals(torch.diag(g) @ dense_projector(kind))
    count = D - 1 if kind == "layernorm" else D
    np.testing.assert_allclose(found.semi_axes, math.sqrt(D) * dense[:count], rtol=1e-12)
    np.testing.assert_allclose(found.axes.T @ found.axes, np.eye(count), atol=1e-12)
    if kind == "layernorm":
        np.testing.assert_allclose(away @ found.normal, 0, atol=1e-11)  # the hyperplane
    else:
        assert found.normal is None


def test_a_gain_of_zero_flattens_the_ellipsoid():
    g = torch.tensor([1.0, 0.0, 2.0, 3.0], dtype=torch.float64)
    found = ellipsoid(g)
    assert found.normal is None
    assert len(found.semi_axes) == 3
    assert len(ellipsoid(g, kind="rmsnorm").semi_axes) == 3
    assert len(ellipsoid(d=5).semi_axes) == 4
    with pytest.raises(CurvescopeError, match="γ or β or d"):
        ellipsoid()


@pytest.mark.parametrize("kind", KINDS)
def test_the_support_function_is_a_bound_and_attained(kind):
    g, b, a = draw(D, seed=1), draw(D, seed=2), draw(7, D, seed=3)
    norm = StreamNorm(kind, g, b, 0.0)
    low, high = attainable(a, gamma=g, beta=b, kind=kind)
    torch.testing.assert_close(support(a, gamma=g, beta=b, kind=kind), high)
    products = norm(draw(5000, D, seed=4)) @ a.T
    assert bool((products <= high + 1e-12).all())
    assert bool((products >= low - 1e-12).all())
    best = norm(norm.direction(a))  # the state that points along P(γ ∘ a)
    torch.testing.assert_close((best * a).sum(1), high, rtol=0, atol=1e-12)
    worst = norm(-norm.direction(a))
    torch.testing.assert_close((worst * a).sum(1), low, rtol=0, atol=1e-12)


def test_nothing_is_attainable_without_a_norm():
    with pytest.raises(UsageError, match="no greatest value"):
        attainable(draw(2, D), kind="none")
