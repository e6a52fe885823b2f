"""Norms against their own arithmetic, differentiated twice by autograd."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_checks import DEVICE, agree, draw, leaves, needs_triton, two_derivatives
from torch import Tensor
from torch.autograd import forward_ad

from curvescope.core.errors import CurvescopeError
from curvescope.kernels.norms import layer_norm, rms_norm

EPS = 1e-3
D = 6
SHAPES = ((2, 5, D), (D,), (D,))


def plain_layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    y = centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def plain_rms_norm(x: Tensor, weight: Tensor | None = None, offset: float = 0.0) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y if weight is None else y * (offset + weight)


CASES = {
    "layer": (partial(layer_norm, eps=EPS), plain_layer_norm, 3),
    "layer-no-bias": (partial(layer_norm, eps=EPS), plain_layer_norm, 2),
    "layer-plain": (partial(layer_norm, eps=EPS), plain_layer_norm, 1),
    "rms": (partial(rms_norm, eps=EPS), plain_rms_norm, 2),
    "rms-offset": (partial(rms_norm, eps=EPS, offset=1.0), partial(plain_rms_norm, offset=1.0), 2),
    "rms-plain": (partial(rms_norm, eps=EPS), plain_rms_norm, 1),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest):
    ours, plain, count = CASES[request.param]
    return ours, plain, SHAPES[:count]


@pytest.mark.parametrize("batched", [False, True])
def test_two_derivatives_are_those_of_the_formula(case, batched):
    ours, plain, shapes = case
    inputs, (g,), directions = leaves(draw(0, *shapes)), draw(1, SHAPES[0]), draw(2, *shapes)
    found = two_derivatives(ours, inputs, g, directions, batched=batched)
    agree(found, two_derivatives(plain, inputs, g, directions, batched=batched), 1e-13)


def test_each_direction_alone(case):
    ours, plain, shapes = case
    inputs, (g,), directions = leaves(draw(0, *shapes)), draw(1, SHAPES[0]), draw(2, *shapes)
    for i, direction in enumerate(directions):
        results = []
        for f in (ours, plain):
            at = g.clone().requires_grad_()
            first = torch.autograd.grad(f(*inputs), inputs, at, create_graph=True)
            results.append(torch.autograd.grad(first[i], [at, *inputs], direction, allow_unused=True))
        agree(*results, 1e-13)


def test_gradgradcheck(case):
    ours, _, shapes = case
    assert torch.autograd.gradgradcheck(ours, leaves(draw(3, (3, 4), *((4,),) * (len(shapes) - 1))))


def test_a_graph_is_used_again_and_with_some_inputs_only(case):
    ours, plain, shapes = case
    inputs, (g,), (v,) = draw(0, *shapes), draw(1, SHAPES[0]), draw(2, SHAPES[0])
    results = []
    for f in (ours, plain):
        x = inputs[0].clone().requires_grad_()
        (dx,) = torch.autograd.grad(f(x, *inputs[1:]), x, g, create_graph=True)
        both = [torch.autograd.grad(dx, x, u, retain_graph=True)[0] for u in (v, v * v)]
        results.append(both)
    agree(*results, 1e-13)


def test_without_second_order_only_the_cotangent_is_recorded(case):
    ours, _, shapes = case
    inputs, (g,), directions = leaves(draw(0, *shapes)), draw(1, SHAPES[0]), draw(2, *shapes)
    g.requires_grad_()
    first = torch.autograd.grad(ours(*inputs, second_order=False), inputs, g, create_graph=True)
    (pushed,) = torch.autograd.grad(first, g, directions, retain_graph=True)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), v) for x, v in zip(inputs, directions, strict=True)]
        agree([pushed], [forward_ad.unpack_dual(ours(*duals)).tangent], 1e-13)
    assert torch.autograd.grad(first[0], inputs[0], directions[0], allow_unused=True) == (None,)


def test_forward_mode(case):
    ours, plain, shapes = case
    inputs, (g,), directions = draw(0, *shapes), draw(1, SHAPES[0]), draw(2, *shapes)

    def both(f, *at):
        return torch.func.jvp(f, at, tuple(directions))

    agree(both(ours, *inputs), both(plain, *inputs), 1e-13)
    results = []
    for f in (ours, plain):

        def gradients(*at, f=f):
            return torch.func.vjp(f, *at)[1](g)

        values, tangents = torch.func.jvp(gradients, tuple(inputs), tuple(directions))
        results.append([*values, *tangents])
    agree(*results, 1e-13)


def test_batched_by_torch_vmap(case):
    ours, plain, shapes = case
    inputs, (g,), (v,) = leaves(draw(0, *shapes)), draw(1, SHAPES[0]), draw(2, (3, *SHAPES[0]))
    agree([torch.vmap(ours, (0, *(None,) * (len(shapes) - 1)))(*inputs)], [plain(*inputs)], 1e-13)
    results = []
    for f in (ours, plain):
        at = g.clone().requires_grad_()
        dx = torch.autograd.grad(f(*inputs), inputs, at, create_graph=True)[0]
        pull = partial(torch.autograd.grad, dx, [at, *inputs[:2]], retain_graph=True, allow_unused=True)
        results.append(torch.vmap(pull)(v))
    agree(*results, 1e-13)


def test_batched_first_backward(case):
    ours, plain, shapes = case
    inputs, (g,) = leaves(draw(0, *shapes)), draw(1, (3, *SHAPES[0]))
    results = [torch.autograd.grad(f(*inputs), inputs, g, is_grads_batched=True) for f in (ours, plain)]
    agree(*results, 1e-13)
    with pytest.raises(CurvescopeError, match="one cotangent"):
        torch.autograd.grad(ours(*inputs), inputs, g, is_grads_batched=True, create_graph=True)


def test_third_derivative_is_refused(case):
    ours, _, shapes = case
    inputs = leaves(draw(0, *shapes))
    first = torch.autograd.grad(ours(*inputs).pow(2).sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(CurvescopeError, match="differentiate it again"):
        torch.autograd.grad(first.pow(2).sum(), inputs[0], create_graph=True)


def test_transforms_of_torch_func(case):
    ours, plain, shapes = case
    inputs = draw(0, *((3, 4), (4,), (4,))[: len(shapes)])

    def curve(f, *at):
        return (f(*at).sin() * torch.arange(12.0, dtype=torch.float64).view(3, 4)).sum()

    want = torch.func.jacfwd(torch.func.grad(partial(curve, plain)))(*inputs)
    for outer in (torch.func.jacfwd, torch.func.jacrev):
        agree([outer(torch.func.grad(partial(curve, ours)))(*inputs)], [want], 1e-12)


def test_constant_rows_are_finite(case):
    ours, plain, shapes = case
    inputs, (g,), directions = draw(0, *shapes), draw(1, SHAPES[0]), draw(2, *shapes)
    inputs[0] = torch.full(SHAPES[0], 0.0)
    inputs[0][0] = 3.0
    inputs = leaves([inputs[0].double(), *inputs[1:]])
    found = two_derivatives(ours, inputs, g, directions)
    agree(found, two_derivatives(plain, inputs, g, directions), 1e-12)


def test_wrong_shapes_and_backends_are_refused():
    x, w = draw(0, (2, D), (D - 1,))
    with pytest.raises(CurvescopeError, match="weight"):
        layer_norm(x, w)
    with pytest.raises(CurvescopeError, match="backend"):
        rms_norm(x, backend="fast")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_in_torch(case, dtype):
    ours, plain, shapes = case
    inputs, (g,), directions = leaves(draw(0, *shapes)), draw(1, SHAPES[0]), draw(2, *shapes)
    want = two_derivatives(plain, inputs, g, directions)
    low = [leaves(some, dtype) for some in (inputs, [g], directions)]
    found = two_derivatives(ours, low[0], low[1][0], [v.detach() for v in low[2]])
    assert found[1] is not None
    assert found[1].dtype == dtype
    agree(found, want, 1e-5 if dtype == torch.float32 else 0.03)


@needs_triton
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("d", [5, 33])
def test_triton(case, d, batched):
    ours, plain, shapes = case
    shapes = [(*shape[:-1], d) for shape in shapes]
    inputs, (g,), directions = leaves(draw(0, *shapes)), draw(1, shapes[0]), draw(2, *shapes)
    want = two_derivatives(plain, inputs, g, directions, batched=batched)
    low = [leaves(some, torch.float32, DEVICE) for some in (inputs, [g], directions)]
    triton = partial(ours, backend="triton")
    found = two_derivatives(triton, low[0], low[1][0], [v.detach() for v in low[2]], batched=batched)
    agree(found, want, 1e-5)


@needs_triton
def test_triton_without_second_order_and_for_one_direction(case):
    ours, plain, shapes = case
    inputs, (g,), directions = leaves(draw(0, *shapes)), draw(1, SHAPES[0]), draw(2, *shapes)
    low = [leaves(some, torch.float32, DEVICE) for some in (inputs, [g], directions)]
    for i in range(len(shapes)):
        results = []
        for f, (at, (cotangent,), along) in (
            (partial(ours, backend="triton", second_order=False), low),
            (plain, (inputs, [g.requires_grad_()], directions)),
        ):
            first = torch.autograd.grad(f(*at), at, cotangent, create_graph=True)
            results.append(torch.autograd.grad(first[i], cotangent, along[i].detach()))
        agree(*results, 1e-5)


@pytest.mark.parametrize("second_order", [True, False])
def test_inside_vmap_the_jacobian_is_torchs(second_order):
    x, weight, bias, g, u = draw(5, (3, 4), (4,), (4,), (3, 4), (3, 4))

    def along(norm):
        inputs = leaves([x, weight, bias])
        v = torch.zeros_like(u, requires_grad=True)
        y = torch.vmap(lambda t: norm(t, *inputs[1:]))(inputs[0])
        first = torch.autograd.grad(y, inputs, v, create_graph=True)
        return torch.autograd.grad(first, v, [g, weight, bias])[0]

    found = along(lambda t, w, b: layer_norm(t, w, b, second_order=second_order))
    torch.testing.assert_close(found, along(lambda t, w, b: torch.nn.functional.layer_norm(t, (4,), w, b)))
