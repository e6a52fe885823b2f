"""The linear map: derivatives in any order of asking are those of autograd's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("batched", [False, True])
def test_a_map_whose_output_has_no_cotangent(batched):
    """The loss is linear in y: nothing of the gradient depends on y, but on x, through W."""
    (x, W), found = leaves(False), []
    C = torch.linspace(-1, 1, 40, dtype=torch.float64).view(2, 5, 4)
    A = torch.stack([torch.ones_like(W), W.detach().cos()])
    for f in (linear, F.linear):
        (dW,) = torch.autograd.grad((C * f(x.sin(), W)).sum(), W, create_graph=True)
        found.append(torch.autograd.grad(dW, x, A if batched else A[1], is_grads_batched=batched)[0])
    torch.testing.assert_close(*found)
    assert float(found[1].norm()) > 0.1


def test_two_gradients_of_one_map():
    at, found = leaves(True), []
    for f in (linear, F.linear):
        y = f(at[0].sin(), *at[1:])
        ends = (y.tanh().sum(), y.square().sum())
        firsts = [torch.autograd.grad(s, at, create_graph=True, retain_graph=True) for s in ends]
        v = [t.detach().cos() for t in at]
        found.append(torch.autograd.grad([*firsts[0], *firsts[1]], at, [*v, *(2 * t for t in v)]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_pass_that_is_broken_off_leaves_nothing_behind():
    """Between the derivative of a map and the map itself something raises; later passes are right."""

    class Raises(torch.autograd.Function):
        armed = False

        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, g):
            if Raises.armed:
                raise RuntimeError("broken off")
            return g * 1

    at = leaves(True)
    y = linear(at[0].sin(), *at[1:])
    s = (Raises.apply(y).tanh() ** 2).sum()
    first = torch.autograd.grad(s, at, create_graph=True)
    plain = [g.detach() for g in first]
    along = [torch.ones_like(t) for t in at]
    want = torch.autograd.grad(first, at, along, retain_graph=True)
    Raises.armed = True
    with pytest.raises(RuntimeError, match="broken off"):
        torch.autograd.grad(first, at, along, retain_graph=True)
    Raises.armed = False
    for ours, theirs in zip(torch.autograd.grad(s, at, retain_graph=True), plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(torch.autograd.grad(first, at, along), want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_nothing_of_the_size_of_x_waits_for_the_way_back():
    """While derivatives of a chain of maps are pulled back, no product g A is there before it is added."""
    x = torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    Ws = [torch.eye(6, dtype=torch.float64).requires_grad_() for _ in range(8)]

    def waiting(f) -> int:
        h = x
        for W in Ws:
            h = f(h.sin(), W)
        first = torch.autograd.grad(h.square().sum(), Ws, create_graph=True)
        with Alive(x.nbytes) as seen:
            torch.autograd.grad(first, Ws, [torch.ones_like(W) for W in Ws])
        return seen.most

    assert waiting(linear) <= waiting(F.linear) - 6


class Alive(TorchDispatchMode):
    """How many tensors of some size, made inside, are alive at once."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.most, self._made = size, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self._made = {key: ref for key, ref in self._made.items() if not ref.expired()}
        if (
            isinstance(found, torch.Tensor)
            and not func.is_view
            and found.untyped_storage().nbytes() == self.size
        ):
            ref = StorageWeakRef(found.untyped_storage())
            self._made[ref.cdata] = ref
        self.most = max(self.most, len(self._made))
        return found
