"""The head with its loss against z = h Wᵀ + b and the cross-entropy of those logits, differentiated twice."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import BACKENDS, DEVICE, agree, draw, leaves, needs_triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from curvescope.core.errors import CurvescopeError
from curvescope.kernels.cross_entropy import HeadCurvature, cross_entropy_head, log_partition, rows, sweeps
from curvescope.losses.cross_entropy import CrossEntropy

T, D, V = 7, 4, 9
SHAPES = ((T, D), (V, D), (V,))


def targets_of(T: int, V: int, device: str = "cpu") -> Tensor:
    y = torch.arange(T, device=device) * 5 % V
    if T > 3:
        y[2] = -100
    return y


def weights_of(T: int) -> Tensor:
    return torch.linspace(-0.5, 2.0, T, dtype=torch.float64)


def plain(h, W, b, targets, weights=None, *, label_smoothing=0.0, part="hessian") -> Tensor:
    z = h @ W.T if b is None else h @ W.T + b
    loss = CrossEntropy(label_smoothing)
    if part == "hessian":
        return loss.sum(z, targets, weights)
    D0 = loss.gradient(z.detach(), targets, weights)
    return (D0 * z).sum()  # the same first two derivatives as the functional Hessian


CASES = {
    "plain": {},
    "weights": {"weights": weights_of(T)},
    "smoothing": {"label_smoothing": 0.2},
    "both": {"label_smoothing": 0.2, "weights": weights_of(T)},
    "functional": {"part": "functional", "weights": weights_of(T), "label_smoothing": 0.1},
}


def two_derivatives(f, inputs, directions, *, scale=0.7, batched=False, **options):
    """Gradients, and the second derivative along the directions, also in a factor of the loss."""
    c = torch.tensor(scale, dtype=inputs[0].dtype, device=inputs[0].device, requires_grad=True)
    first = torch.autograd.grad(f(*inputs, **options), inputs, c, create_graph=True)
    if batched:
        directions = [torch.stack([v, -2 * v, v * v]) for v in directions]
    second = torch.autograd.grad(first, [c, *inputs], directions, is_grads_batched=batched, allow_unused=True)
    return [*first, *second]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 3, 50])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_two_derivatives_are_those_of_the_logits(options, chunk, batched):
    inputs, directions, y = leaves(draw(0, *SHAPES)), draw(1, *SHAPES), targets_of(T, V)
    ours = partial(cross_entropy_head, targets=y, chunk=chunk)
    found = two_derivatives(ours, inputs, directions, batched=batched, **options)
    want = two_derivatives(partial(plain, targets=y), inputs, directions, batched=batched, **options)
    agree(found, want, 1e-13)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_value_is_the_loss_of_the_losses(options):
    (h, W, b), y = draw(0, *SHAPES), targets_of(T, V)
    options = {**options, "part": "hessian"}
    torch.testing.assert_close(cross_entropy_head(h, W, b, y, **options), plain(h, W, b, y, **options))


@pytest.mark.parametrize("T", [1, 2])
def test_few_terms(T):
    (h, W), v = leaves(draw(0, (T, D), (V, D))), draw(1, (T, D), (V, D))
    results = [
        two_derivatives(lambda h, W, f=f: f(h, W, None, targets_of(T, V)), (h, W), v)
        for f in (cross_entropy_head, plain)
    ]
    agree(*results, 1e-13)


@pytest.mark.parametrize("kept", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
@pytest.mark.parametrize("part", ["hessian", "functional"])
def test_some_inputs_only(kept, part):
    values, v, y = draw(0, *SHAPES), draw(1, *SHAPES), targets_of(T, V)
    results = []
    for f in (cross_entropy_head, plain):
        inputs = [x.clone().requires_grad_(i in kept) for i, x in enumerate(values)]
        some = [inputs[i] for i in kept]
        first = torch.autograd.grad(f(*inputs, y, part=part), some, create_graph=True)
        found = list(first)
        for g, i in zip(first, kept, strict=True):
            if g.requires_grad:
                found += torch.autograd.grad(g, some, v[i], retain_graph=True, materialize_grads=True)
            else:  # the plain functional Hessian has no graph where it is zero
                found += [torch.zeros_like(x) for x in some]
        results.append(found)
    agree(*results, 1e-13)


def test_each_direction_alone():
    inputs, v, y = leaves(draw(0, *SHAPES)), draw(1, *SHAPES), targets_of(T, V)
    results = []
    for f in (cross_entropy_head, plain):
        first = torch.autograd.grad(f(*inputs, y), inputs, create_graph=True)
        results.append(
            [
                t
                for g, u in zip(first, v, strict=True)
                for t in torch.autograd.grad(g, inputs, u, retain_graph=True)
            ]
        )
    agree(*results, 1e-13)


def test_weights_may_be_a_transposed_view_and_tied():
    (E, other), y = draw(0, (V, D), (D, V)), targets_of(T, V)
    tokens = torch.arange(T) % V
    U = other.clone().requires_grad_()
    leaf = E.clone().requires_grad_()
    results = []
    for f in (cross_entropy_head, plain):
        h = F.embedding(tokens, leaf).sin()
        L = f(h, leaf, None, y) + f(h, U.T, None, y)
        first = torch.autograd.grad(L, (leaf, U), create_graph=True)
        second = torch.autograd.grad(first, (leaf, U), (E * E, other.cos()))
        results.append([*first, *second])
    assert results[0][1].is_contiguous()  # laid as U is, through the view
    agree(*results, 1e-13)


def test_gradgradcheck():
    inputs, y = leaves(draw(3, (3, 2), (4, 2), (4,))), torch.tensor([0, 3, -100])
    f = partial(cross_entropy_head, targets=y, label_smoothing=0.1, chunk=2)
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


def test_a_graph_can_be_built_again_and_walked_without_one():
    inputs, y = leaves(draw(0, *SHAPES)), targets_of(T, V)
    L = cross_entropy_head(*inputs, y)
    results = [torch.autograd.grad(L, inputs, create_graph=graph, retain_graph=True) for graph in (1, 1, 0)]
    for found in results:
        agree(found, torch.autograd.grad(plain(*inputs, y), inputs), 1e-13)


def test_hessian_is_the_gauss_newton_and_the_functional_part():
    inputs, v, y = leaves(draw(0, *SHAPES)), draw(1, *SHAPES), targets_of(T, V)
    w, scaled = weights_of(T), {"weights": weights_of(T), "scale": 1.0}
    whole, rest = (
        two_derivatives(partial(cross_entropy_head, targets=y, part=part), inputs, v, **scaled)[4:]
        for part in ("hessian", "functional")
    )
    lse = log_partition(*inputs)
    torch.testing.assert_close(lse, torch.logsumexp(inputs[0] @ inputs[1].T + inputs[2], 1))
    several = [torch.stack([2 * t, t]) for t in v]
    ggn = [t[1] for t in HeadCurvature(*inputs, y, w, chunk=3).times(*several)]
    assert not any(t.requires_grad for t in ggn)
    agree([a + b for a, b in zip(ggn, rest, strict=True)], whole, 1e-13)


def test_gauss_newton_with_some_of_everything():
    (h, W, b), (h_dot, W_dot, _), y = draw(0, *SHAPES), draw(1, *SHAPES), targets_of(T, V)
    z = h @ W.T + b

    def product(dot: Tensor) -> Tensor:
        return CrossEntropy().hessian_product(z, y, None, dot)

    curvature = HeadCurvature(h, W, b, y)
    found = curvature.times(h_dot[None], None, None, rows=("W",))
    assert found[0] is None
    assert found[2] is None
    agree([found[1][0]], [product(h_dot @ W.T).T @ h], 1e-13)
    found = curvature.times(None, W_dot[None], None, rows=("h", "b"))
    inner = product(h @ W_dot.T)
    agree([found[0][0], found[2][0]], [inner @ W, inner.sum(0)], 1e-13)
    assert HeadCurvature(h, W, None, y).times(None, None, None) == (None, None, None)


def test_forward_modes_and_transforms():
    inputs, v, y = draw(0, *SHAPES), draw(1, *SHAPES), targets_of(T, V)
    ours, want = (partial(f, targets=y, label_smoothing=0.1) for f in (cross_entropy_head, plain))
    agree(torch.func.jvp(ours, tuple(inputs), tuple(v)), torch.func.jvp(want, tuple(inputs), tuple(v)), 1e-13)
    results = []
    for f in (ours, want):
        gradient = torch.func.grad(f, argnums=(0, 1, 2))
        results.append(list(torch.func.jvp(gradient, tuple(inputs), tuple(v))[1]))
        results[-1].append(torch.func.jacrev(torch.func.grad(f, argnums=1))(*inputs))
    agree(*results, 1e-13)


def test_without_second_order_only_the_factor_is_recorded():
    inputs, v, y = leaves(draw(0, *SHAPES)), draw(1, *SHAPES), targets_of(T, V)
    c = torch.ones((), dtype=torch.float64, requires_grad=True)
    first = torch.autograd.grad(
        cross_entropy_head(*inputs, y, second_order=False), inputs, c, create_graph=True
    )
    found = torch.autograd.grad(first, [c, *inputs], v, allow_unused=True)
    assert found[1:] == (None, None, None)
    at = tuple(x.detach() for x in inputs)
    agree(found[:1], [torch.func.jvp(partial(plain, targets=y), at, tuple(v))[1]], 1e-13)


def test_third_derivative_is_refused():
    inputs, y = leaves(draw(0, *SHAPES)), targets_of(T, V)
    first = torch.autograd.grad(cross_entropy_head(*inputs, y), inputs[0], create_graph=True)[0]
    with pytest.raises(CurvescopeError, match="differentiate it again"):
        torch.autograd.grad(first.pow(2).sum(), inputs[0], create_graph=True)


def test_slices_are_bounded_and_even(monkeypatch):
    monkeypatch.setattr(sweeps, "SLICE_BYTES", {"cpu": 100 * 1000 * 8})
    h, W = torch.empty(330, 2).double(), torch.empty(1000, 2).double()
    assert sweeps.make_plan(h, W, 0.0, None, False).chunk == 83  # four slices, not of 100
    assert sweeps.make_plan(h[:120], W, 0.0, None, False).chunk == 64  # aligned where it fits
    assert sweeps.make_plan(h[:3], W, 0.0, None, False).chunk == 3


def test_wrong_inputs_are_refused():
    (h, W, b), y = draw(0, *SHAPES), targets_of(T, V)
    with pytest.raises(CurvescopeError, match="h of shape"):
        cross_entropy_head(h, W.T, b, y)
    with pytest.raises(CurvescopeError, match="below 9"):
        cross_entropy_head(h, W, b, y + 1)
    with pytest.raises(CurvescopeError, match="chunk"):
        cross_entropy_head(h, W, b, y, chunk=0)
    with pytest.raises(CurvescopeError, match="part"):
        cross_entropy_head(h, W, b, y, part="ggn")  # pyright: ignore[reportArgumentType]
    with pytest.raises(CurvescopeError, match="constant weights"):
        cross_entropy_head(h, W, b, y, torch.ones(T, requires_grad=True))
    with pytest.raises(CurvescopeError, match="integer"):
        cross_entropy_head(h, W, b, y.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_in_torch(dtype):
    inputs, v, y = leaves(draw(0, *SHAPES)), draw(1, *SHAPES), targets_of(T, V)
    want = two_derivatives(partial(plain, targets=y), inputs, v)
    low, along = leaves(inputs, dtype), [u.to(dtype) for u in v]
    found = two_derivatives(partial(cross_entropy_head, targets=y), low, along)
    agree(found, want, 1e-5 if dtype == torch.float32 else 0.03)


@needs_triton
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_triton(options, batched):
    shapes, y = ((T, D), (37, D), (37,)), targets_of(T, 37)
    inputs, v = leaves(draw(0, *shapes)), draw(1, *shapes)
    want = two_derivatives(partial(plain, targets=y), inputs, v, batched=batched, **options)
    low, along = leaves(inputs, torch.float32, DEVICE), [u.to(DEVICE, torch.float32) for u in v]
    placed = {k: x.to(DEVICE) if isinstance(x, Tensor) else x for k, x in options.items()}
    ours = partial(cross_entropy_head, targets=y.to(DEVICE), backend="triton", chunk=3)
    agree(two_derivatives(ours, low, along, batched=batched, **placed), want, 1e-5)
    if options.get("part") != "functional":
        value = plain(*inputs, y, **options)
        agree([cross_entropy_head(*low, y.to(DEVICE), backend="triton", **placed)], [value], 1e-5)


@needs_triton
def test_triton_with_several_blocks_and_large_logits(monkeypatch):
    from curvescope.kernels.cross_entropy import triton_kernels

    monkeypatch.setattr(triton_kernels, "_shape", lambda z: {"NUM": 5, "BLOCK": 8, "num_warps": 1})
    shapes, y = ((T, D), (37, D)), targets_of(T, 37)
    inputs, v = leaves([40 * x for x in draw(0, *shapes)]), draw(1, *shapes)
    want = two_derivatives(lambda h, W: plain(h, W, None, y), inputs, v)
    low, along = leaves(inputs, torch.float32, DEVICE), [u.to(DEVICE, torch.float32) for u in v]
    found = two_derivatives(
        lambda h, W: cross_entropy_head(h, W, None, y.to(DEVICE), backend="triton"), low, along
    )
    agree(found, want, 1e-4)


def sure(T: int, V: int, above: float) -> tuple[list[Tensor], Tensor]:
    """h, W and targets of a head that is sure: the largest logit is so far above the others, in float32."""
    h, W = draw(0, (T, V), (V, V), dtype=torch.float32)
    y = torch.arange(T) * 5 % V
    return [0.1 * h + above * F.one_hot(y, V), torch.eye(V) + 0.01 * W], y


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", ["hessian", "functional"])
@pytest.mark.parametrize("above", [3.0, 9.0, 14.0])
@pytest.mark.parametrize("wrong", [False, True])
def test_float32_is_right_where_the_model_is_sure(wrong, above, part, backend):
    """Errors are relative to what is left, not to one; one term may be sure and wrong."""
    V = 37
    inputs, y = sure(T, V, above)
    y[0] = (y[0] + wrong) % V
    v = [t.float() for t in draw(1, (T, V), (V, V))]
    device = DEVICE if backend == "triton" else "cpu"

    def product(dtype: torch.dtype, on: str, **options) -> list[Tensor]:
        h, W = leaves(inputs, dtype, on)
        found = cross_entropy_head(h, W, None, y.to(on), part=part, **options)
        first = torch.autograd.grad(found, (h, W), create_graph=True)
        along = [t.to(on, dtype) for t in v]
        return [found, *first, *torch.autograd.grad(first, (h, W), along)]

    for found, want in zip(
        product(torch.float32, device, backend=backend), product(torch.float64, "cpu"), strict=True
    ):
        assert (found.cpu().double() - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gauss_newton_part_too(backend):
    inputs, y = sure(T, 37, 14.0)
    device = DEVICE if backend == "triton" else "cpu"
    along = [t[None] for t in draw(1, (T, 37), (37, 37))]
    want = HeadCurvature(*(t.double() for t in inputs), None, y).times(*along, None)
    low = [t.to(device) for t in inputs]
    found = HeadCurvature(*low, None, y.to(device), backend=backend).times(
        *(t.float().to(device) for t in along), None
    )
    for a, b in zip(found[:2], want[:2], strict=True):
        assert (a.cpu().double() - b).norm() < 1e-5 * b.norm()


@needs_triton
def test_the_largest_logit_is_found_wherever_it_is(monkeypatch):
    """Blocks are narrower than a row: the largest, ties, and what is left of the others."""
    from curvescope.kernels.cross_entropy import triton_kernels

    monkeypatch.setattr(triton_kernels, "_shape", lambda z: {"NUM": 5, "BLOCK": 8, "num_warps": 1})
    z = torch.randn(37, 37, generator=torch.Generator().manual_seed(0)) + 9 * torch.eye(37)
    z[3] = 1.0  # all alike
    z[4, [2, 30]] = 20.0  # a tie
    y = torch.arange(37)
    want = rows.loss_rows(z.double(), y, 0.1, gradient=False, triton=False)
    found = rows.loss_rows(z.clone().to(DEVICE), y.to(DEVICE), 0.1, gradient=False, triton=True)
    torch.testing.assert_close(found[0].cpu().double(), want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1].lse.cpu().double(), want[1].lse, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1].slope.cpu().double(), want[1].slope, rtol=1e-5, atol=1e-7)
    at = z.gather(1, found[1].top.cpu()[:, None])[:, 0]
    assert torch.equal(at, z.amax(1))


@needs_triton
@pytest.mark.parametrize("V", [37, 64, 128 + 5])
@pytest.mark.parametrize("turned", [False, True])
def test_any_number_of_outputs(V, turned):
    """Those that a matrix product likes, and those that are left; W may be a transposed view."""
    shapes, y = ((T, D), (D, V) if turned else (V, D), (V,)), targets_of(T, V)
    inputs, v = leaves(draw(0, *shapes)), draw(1, *shapes)

    def twice(f, inputs, v):
        h, W, b = inputs
        first = torch.autograd.grad(f(h, W.T if turned else W, b), inputs, create_graph=True)
        return [*first, *torch.autograd.grad(first, inputs, v)]

    want = twice(partial(plain, targets=y), inputs, v)
    low, along = leaves(inputs, torch.float32, DEVICE), [u.to(DEVICE, torch.float32) for u in v]
    ours = partial(cross_entropy_head, targets=y.to(DEVICE), backend="triton", chunk=3)
    agree(twice(ours, low, along), want, 1e-5)


class Largest(TorchDispatchMode):
    """Counts the results of operations that have as many entries as a tensor, views apart."""

    def __init__(self, like: Tensor):
        super().__init__()
        self.like, self.made = like, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not func.is_view and "_" not in func.overloadpacket.__name__[-1:]:
            self.made += found.shape[-2:].numel() >= self.like.numel() and found.dim() >= 2
        return found


@needs_triton
def test_the_head_s_matrix_is_not_copied():
    """One result of its size: the product itself. Two copies with rows of zeros were there before."""
    V = 2 * 64 + 5
    (h, W), y = (
        leaves(draw(0, (2, 40), (V, 40), dtype=torch.float32), device=DEVICE),
        torch.tensor([3, 130]).to(DEVICE),
    )
    first = torch.autograd.grad(
        cross_entropy_head(h, W, None, y, backend="triton"), (h, W), create_graph=True
    )
    along = [torch.randn_like(h), torch.randn_like(W)]
    with Largest(W) as seen:
        torch.autograd.grad(first, (h, W), along)
    assert seen.made == 1
