"""The linear map: derivatives in any order of asking are those of autograd's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from curvescope.core.errors import CurvescopeError
from curvescope.kernels.linear import linear


def leaves(bias: bool, *, transposed: bool = False) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=source, dtype=torch.float64)  # noqa: E731
    W = draw(7, 4).t() if transposed else draw(4, 7)
    return [t.requires_grad_() for t in (draw(2, 5, 7), W, *([draw(4)] if bias else []))]


def second(f, at, directions, *, batched=False):
    y = f(*at)
    first = torch.autograd.grad((y.tanh() ** 2).sum(), at, create_graph=True)
    return torch.autograd.grad(first, at, directions, is_grads_batched=batched)


@pytest.mark.parametrize("numbers", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_second_derivatives_are_those_of_autograd(bias, transposed, numbers):
    at = leaves(bias, transposed=transposed)
    source = torch.Generator().manual_seed(1)
    v = [torch.randn(3, *t.shape, generator=source, dtype=torch.float64) for t in at]
    ours = second(lambda *a: linear(*a, numbers=numbers), at, v, batched=True)
    for x, y in zip(ours, second(F.linear, at, v, batched=True), strict=True):
        torch.testing.assert_close(x, y)
    one = second(lambda *a: linear(*a, numbers=numbers), at, [t[1] for t in v])
    for x, y in zip(one, ours, strict=True):
        torch.testing.assert_close(x, y[1])


@pytest.mark.parametrize("bias", [True, False])
def test_derivatives_are_finite_differences(bias):
    at = leaves(bias)
    assert torch.autograd.gradcheck(linear, at)
    assert torch.autograd.gradgradcheck(linear, at)


@pytest.mark.parametrize("which", range(3))
def test_a_direction_along_one_factor_alone(which):
    at, found = leaves(True), []
    for f in (linear, F.linear):
        first = torch.autograd.grad((f(*at).tanh() ** 2).sum(), at, create_graph=True)
        found.append(torch.autograd.grad(first[which], at, torch.ones_like(at[which])))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_jacobian_products_through_the_transpose():
    at = leaves(True)
    y = linear(*at, second_order=False, numbers=False)
    u = torch.zeros_like(y, requires_grad=True)
    pulled = torch.autograd.grad(y, at, u, create_graph=True)
    v = [torch.ones_like(t) for t in at]
    (Jv,) = torch.autograd.grad(pulled, u, v)
    x, W, _ = at
    torch.testing.assert_close(Jv, F.linear(v[0], W) + F.linear(x, v[1]) + v[2])


def test_without_numbers_the_derivative_of_the_input_is_right():
    at = leaves(True)
    y = linear(*at, numbers=False)
    dx, dW, _ = torch.autograd.grad(y.square().sum(), at, create_graph=True)
    torch.testing.assert_close(dx, 2 * y @ at[1])
    assert dW.shape == at[1].shape
    assert not dW.any()
    plain = torch.autograd.grad(linear(*at, numbers=False).square().sum(), at)  # no graph: all numbers
    torch.testing.assert_close(plain[1], torch.einsum("btv,btd->vd", 2 * y, at[0]))


def test_a_third_derivative_is_refused():
    at = leaves(False)
    first = torch.autograd.grad((linear(*at) ** 3).sum(), at, create_graph=True)
    with pytest.raises(CurvescopeError, match="second derivative"):
        torch.autograd.grad(first[0].sum(), at, create_graph=True)


def test_transforms_and_forward_mode_take_torchs_own():
    at = [t.detach() for t in leaves(True)]
    J = torch.func.jacrev(lambda x: linear(x, *at[1:]))(at[0])
    torch.testing.assert_close(J, torch.func.jacrev(lambda x: F.linear(x, *at[1:]))(at[0]))
    assert linear(*at).grad_fn is None
