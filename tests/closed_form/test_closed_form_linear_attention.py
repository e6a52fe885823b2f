"""Linear attention from Σ_XX and Ω_XY alone, against the general closed form."""

import pytest
import torch

from curvescope.closed_form import attention
from curvescope.closed_form.attention import linear as linear_attention
from curvescope.closed_form.objectives import squared_error
from curvescope.core.errors import ShapeError
from curvescope.core.seeds import generator


def make(seed, n=None, L=5, d=3, d_K=2, d_V=4):
    source = generator(seed)
    front = () if n is None else (n,)
    shapes = (*front, L, d), (d, d_K), (d, d_K), (d, d_V), (*front, L, d_V)
    X, W_Q, W_K, W_V, Y = (torch.randn(*s, generator=source, dtype=torch.float64) for s in shapes)
    F = d_K**-0.5 * X @ W_Q @ W_K.T @ X.mT @ X @ W_V
    return X, W_Q, W_K, W_V, Y, F


@pytest.mark.parametrize("n", [None, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_two_matrices_of_the_data_are_enough(seed, n):
    X, W_Q, W_K, W_V, Y, F = make(seed, n)
    G, c = squared_error(F, Y)
    want = attention.curvature(X, W_Q, W_K, W_V, G, c, kind="linear").blocks()
    Omega = linear_attention.residual_covariance(X.mT @ X, X.mT @ Y, W_Q, W_K, W_V)
    torch.testing.assert_close(Omega, X.mT @ (F - Y), rtol=1e-11, atol=1e-12)
    found = linear_attention.blocks(X.mT @ X, Omega, W_Q, W_K, W_V, c=c)
    assert set(found) == set(want)
    largest = max(split.total.abs().max() for split in want.values())
    for pair, split in found.items():
        assert (split.outer - want[pair].outer).abs().max() < 1e-12 * largest
        assert (split.functional - want[pair].functional).abs().max() < 1e-12 * largest


def test_any_scale():
    X, W_Q, W_K, W_V, _, _ = make(9)
    Y = torch.zeros(5, 4, dtype=torch.float64)
    F = 0.3 * X @ W_Q @ W_K.T @ X.T @ X @ W_V
    want = attention.curvature(X, W_Q, W_K, W_V, 0.7 * (F - Y), 0.7, kind="linear", scale=0.3).blocks()
    Omega = linear_attention.residual_covariance(X.T @ X, X.T @ Y, W_Q, W_K, W_V, scale=0.3)
    found = linear_attention.blocks(X.T @ X, Omega, W_Q, W_K, W_V, c=0.7, scale=0.3)
    for pair, split in found.items():
        torch.testing.assert_close(split.total, want[pair].total, rtol=1e-11, atol=1e-11)


def test_shapes_are_checked():
    X, W_Q, W_K, W_V, _, F = make(1)
    with pytest.raises(ShapeError, match="expected Σ_XX"):
        linear_attention.blocks(X @ X.T, X.T @ F, W_Q, W_K, W_V, c=1.0)
