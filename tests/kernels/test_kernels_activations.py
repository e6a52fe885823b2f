"""Activations and gated activations against their own arithmetic, differentiated twice by autograd."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from kernel_checks import DEVICE, agree, draw, leaves, needs_triton, two_derivatives
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.kernels import activations
from curvescope.kernels.activations import activate
from curvescope.kernels.activations.gated import gated

FORMULAS = {
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: x * (x > 0),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
}
SHAPE = (3, 2, 7)


@pytest.fixture(params=[(name, gate) for name in FORMULAS for gate in (False, True)], ids=str)
def case(request: pytest.FixtureRequest):
    name, gate = request.param
    if gate:

        def plain(a: Tensor, b: Tensor) -> Tensor:
            return FORMULAS[name](a) * b

        return partial(gated, activation=name), plain, (SHAPE, SHAPE)
    return partial(activate, name=name), FORMULAS[name], (SHAPE,)


@pytest.mark.parametrize("batched", [False, True])
def test_two_derivatives_are_those_of_the_formula(case, batched):
    ours, plain, shapes = case
    inputs, (g,), directions = leaves(draw(0, *shapes)), draw(1, SHAPE), draw(2, *shapes)
    found = two_derivatives(ours, inputs, g, directions, batched=batched)
    agree(found, two_derivatives(plain, inputs, g, directions, batched=batched), 1e-13)


def test_each_direction_alone(case):
    ours, plain, shapes = case
    inputs, (g,), directions = leaves(draw(0, *shapes)), draw(1, SHAPE), draw(2, *shapes)
    for i, direction in enumerate(directions):
        results = []
        for f in (ours, plain):
            at = g.clone().requires_grad_()
            first = torch.autograd.grad(f(*inputs), inputs, at, create_graph=True)
            results.append(torch.autograd.grad(first[i], [at, *inputs], direction, allow_unused=True))
        agree(*results, 1e-13)


def test_gradgradcheck(case):
    ours, _, shapes = case
    assert torch.autograd.gradgradcheck(ours, leaves(draw(3, *((2, 3),) * len(shapes))))


def test_a_hessian_product_uses_the_backward_twice(case):
    ours, plain, shapes = case
    inputs, directions = leaves(draw(0, *shapes)), draw(2, *shapes)
    results = []
    for f in (ours, plain):
        outer = f(*(2 * x for x in inputs))
        first = torch.autograd.grad(outer.sin().sum(), inputs, create_graph=True)
        both = [torch.autograd.grad(first, inputs, directions, retain_graph=True) for _ in range(2)]
        batch = [torch.stack([v, -v]) for v in directions]
        both.append(torch.autograd.grad(first, inputs, batch, is_grads_batched=True))
        results.append([t for some in both for t in some])
    agree(*results, 1e-12)


def test_without_second_order_only_the_cotangent_is_recorded(case):
    ours, plain, shapes = case
    inputs, (g,), directions = leaves(draw(0, *shapes)), draw(1, SHAPE), draw(2, *shapes)
    g.requires_grad_()
    first = torch.autograd.grad(ours(*inputs, second_order=False), inputs, g, create_graph=True)
    (pushed,) = torch.autograd.grad(first, g, directions, retain_graph=True)
    at = tuple(x.detach() for x in inputs)
    agree([pushed], [torch.func.jvp(plain, at, tuple(directions))[1]], 1e-13)
    assert torch.autograd.grad(first[0], inputs[0], directions[0], allow_unused=True) == (None,)


def test_transforms_of_torch_func(case):
    ours, plain, shapes = case
    inputs, directions = tuple(draw(0, *shapes)), tuple(draw(2, *shapes))
    agree(torch.func.jvp(ours, inputs, directions), torch.func.jvp(plain, inputs, directions), 1e-13)
    agree([torch.vmap(ours)(*inputs)], [plain(*inputs)], 1e-13)
    small = tuple(draw(0, *((3, 4),) * len(shapes)))
    everything = tuple(range(len(small)))

    def curve(f, *at):
        return (f(*at).sin() * torch.arange(12.0, dtype=torch.float64).view(3, 4)).sum()

    first = [torch.func.grad(partial(curve, f), argnums=everything) for f in (plain, ours)]
    want = torch.func.jacfwd(first[0], argnums=everything)(*small)
    for outer in (torch.func.jacfwd, torch.func.jacrev):
        found = outer(first[1], argnums=everything)(*small)
        agree([t for row in found for t in row], [t for row in want for t in row], 1e-12)


def test_batched_first_backward(case):
    ours, plain, shapes = case
    inputs, (g,) = leaves(draw(0, *shapes)), draw(1, (3, *SHAPE))
    results = [torch.autograd.grad(f(*inputs), inputs, g, is_grads_batched=True) for f in (ours, plain)]
    agree(*results, 1e-13)


def test_third_derivative_is_refused(case):
    ours, _, shapes = case
    inputs = leaves(draw(0, *shapes))
    first = torch.autograd.grad(ours(*inputs).pow(2).sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(CurvescopeError, match="differentiate it again"):
        torch.autograd.grad(first.pow(2).sum(), inputs[0], create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORMULAS)
def test_large_inputs_are_finite_and_flat(name, dtype):
    x = torch.tensor([-1e10, -1e4, -60.0, 60.0, 1e4, 1e10], dtype=dtype, requires_grad=True)
    one = torch.ones_like(x)
    y, first, _, second = two_derivatives(partial(activate, name=name), [x], one, [one])
    slope = (x.detach() > 0).to(dtype)
    agree([y, first], [x * slope, slope], 1e-6)
    agree([second], [torch.zeros_like(x)], 1e-6)


def test_named_functions():
    (x,) = draw(0, SHAPE)
    torch.testing.assert_close(activations.gelu(x), FORMULAS["gelu"](x))
    torch.testing.assert_close(activations.gelu(x, "tanh"), FORMULAS["gelu_tanh"](x))
    torch.testing.assert_close(activations.silu(x), FORMULAS["silu"](x))
    torch.testing.assert_close(activations.relu(x), FORMULAS["relu"](x))
    torch.testing.assert_close(activations.quick_gelu(x), FORMULAS["quick_gelu"](x))


def test_wrong_names_and_shapes_are_refused():
    (x,) = draw(0, SHAPE)
    with pytest.raises(CurvescopeError, match="silu"):
        activate(x, "silo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(CurvescopeError, match="approximate"):
        activations.gelu(x, "sigmoid")  # pyright: ignore[reportArgumentType]
    with pytest.raises(CurvescopeError, match="one shape"):
        gated(x, x[:1], "silu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_in_torch(case, dtype):
    ours, plain, shapes = case
    inputs, (g,), directions = leaves(draw(0, *shapes)), draw(1, SHAPE), draw(2, *shapes)
    want = two_derivatives(plain, inputs, g, directions)
    low = [leaves(some, dtype) for some in (inputs, [g], directions)]
    found = two_derivatives(ours, low[0], low[1][0], [v.detach() for v in low[2]])
    agree(found, want, 1e-5 if dtype == torch.float32 else 0.03)


@needs_triton
@pytest.mark.parametrize("batched", [False, True])
def test_triton(case, batched):
    ours, plain, shapes = case
    inputs, (g,), directions = leaves(draw(0, *shapes)), draw(1, SHAPE), draw(2, *shapes)
    want = two_derivatives(plain, inputs, g, directions, batched=batched)
    low = [leaves(some, torch.float32, DEVICE) for some in (inputs, [g], directions)]
    triton = partial(ours, backend="triton")
    found = two_derivatives(triton, low[0], low[1][0], [v.detach() for v in low[2]], batched=batched)
    agree(found, want, 1e-5)


@needs_triton
def test_triton_without_second_order(case):
    ours, plain, shapes = case
    inputs, (g,), directions = leaves(draw(0, *shapes)), draw(1, SHAPE), draw(2, *shapes)
    at, (cotangent,), along = (leaves(some, torch.float32, DEVICE) for some in (inputs, [g], directions))
    first = torch.autograd.grad(
        ours(*at, backend="triton", second_order=False), at, cotangent, create_graph=True
    )
    wanted = torch.func.jvp(plain, tuple(inputs), tuple(directions))[1]
    agree(torch.autograd.grad(first, cotangent, along), [wanted], 1e-5)
