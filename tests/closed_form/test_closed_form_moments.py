"""Attention moments against their definition and against derivatives of the log-partition function."""

import numpy as np
import pytest
import torch
from torch.func import grad, jacfwd, vmap

from curvescope.closed_form.softmax import attention_moments, third_moment_along
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.seeds import generator


def draw(seed, *shape):
    return torch.randn(*shape, generator=generator(seed, len(shape)), dtype=torch.float64)


def test_moments_are_derivatives_of_the_log_partition_function():
    X, U = draw(0, 6, 3), draw(1, 5, 3)
    moments = attention_moments(torch.softmax(U @ X.T, -1), X)

    def kappa(u):
        return torch.logsumexp(X @ u, 0)

    torch.testing.assert_close(moments.M1, vmap(grad(kappa))(U))
    torch.testing.assert_close(moments.M2, vmap(jacfwd(grad(kappa)))(U))
    torch.testing.assert_close(moments.M3, vmap(jacfwd(jacfwd(grad(kappa))))(U))


def test_heads_and_samples_are_leading_axes():
    A, X = torch.softmax(draw(2, 2, 3, 4, 5), -1), draw(3, 2, 5, 3)
    many = attention_moments(A, X[:, None])
    one = attention_moments(A[1, 2], X[1])
    assert many.M3.shape == (2, 3, 4, 3, 3, 3)
    for name in ("M1", "M2", "M3"):
        torch.testing.assert_close(getattr(many, name)[1, 2], getattr(one, name), rtol=1e-13, atol=1e-14)


def test_third_moment_along_a_vector_contracts_the_third_moment():
    A, X, U = torch.softmax(draw(4, 4, 5), -1), draw(5, 5, 3), draw(6, 4, 3)
    want = torch.einsum("iabc,ia->ibc", attention_moments(A, X).M3, U)
    torch.testing.assert_close(third_moment_along(A, X, U), want)


def test_concentrated_attention_keeps_its_digits():
    X, T = draw(7, 6, 3), 25 * draw(8, 20, 6)
    A = torch.softmax(T, -1)
    found = attention_moments(A, X)
    a, x = A.numpy().astype(np.longdouble), X.numpy().astype(np.longdouble)
    a = a / a.sum(1, keepdims=True)
    deviation = x[None] - (a @ x)[:, None]
    for got, want in (
        (found.M2, np.einsum("ij,ija,ijb->iab", a, deviation, deviation)),
        (found.M3, np.einsum("ij,ija,ijb,ijc->iabc", a, deviation, deviation, deviation)),
    ):
        axes = tuple(range(1, got.dim()))
        size = np.abs(want).max(axes)
        assert (np.abs(got.numpy() - want).max(axes) < 1e-12 * size).all()
        assert (size < 1e-6).any()  # nearly one-hot: an uncentered sum would have few digits left


def test_a_query_that_sees_nothing_has_no_moments():
    A = torch.softmax(draw(9, 3, 4), -1)
    A[1] = 0
    found = attention_moments(A, draw(10, 4, 2))
    assert not found.M1[1].any()
    assert not found.M2[1].any()
    assert not found.M3[1].any()


def test_what_is_not_attention_is_refused():
    A, X = torch.softmax(draw(11, 3, 4), -1), draw(12, 4, 2)
    with pytest.raises(ShapeError, match="expected weights"):
        attention_moments(A, X.T)
    with pytest.raises(UsageError, match="sum to one"):
        attention_moments(2 * A, X)
    with pytest.raises(UsageError, match="non-negative"):
        attention_moments(torch.tensor([[2.0, -1.0]]), torch.ones(2, 2))
