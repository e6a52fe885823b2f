"""Norms, activations and cross-entropy: values of PyTorch, and derivatives in every mode and order."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import curvescope as cs
from curvescope.kernels import backends
from curvescope.nn import functional as ours


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w + b


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w


def tanh_gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def cross_entropy(z: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean over the targets that are not ignored, by exponentials."""
    log_p = z - z.exp().sum(-1, keepdim=True).log()
    counted = TARGETS != -100
    picked = log_p.gather(1, TARGETS.clamp(min=0)[:, None])[:, 0]
    return -(((1 - smoothing) * picked + smoothing * log_p.mean(-1)) * counted).sum() / counted.sum()


TARGETS = torch.tensor([1, 4, -100, 0])
NUMBERS = {"x": draw(4, 3), "w": draw(3, seed=1), "b": draw(3, seed=2), "y": draw(4, 3, seed=3)}
HEAD = {"x": draw(4, 3), "W": draw(5, 3, seed=1), "c": draw(5, seed=2)}
LINEAR = "linear_cross_entropy"
CASES = {  # ours, the definition, and their inputs
    "layer_norm": (lambda x, w, b: ours.layer_norm(x, (3,), w, b, 1e-3), layer_norm, "xwb"),
    "layer_norm, no bias": (
        lambda x: ours.layer_norm(x, (3,), None, None, 1e-3),
        lambda x: layer_norm(x, 1, 0),
        "x",
    ),
    "rms_norm": (lambda x, w: ours.rms_norm(x, (3,), w, 1e-3), rms_norm, "xw"),
    "gelu": (ours.gelu, lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2, "x"),
    "gelu, tanh": (lambda x: ours.gelu(x, approximate="tanh"), tanh_gelu, "x"),
    "silu": (ours.silu, lambda x: x / (1 + torch.exp(-x)), "x"),
    "swiglu": (ours.swiglu, lambda x, y: x / (1 + torch.exp(-x)) * y, "xy"),
    "cross_entropy": (
        lambda x: ours.cross_entropy(x @ HEAD["W"].T, TARGETS),
        lambda x: cross_entropy(x @ HEAD["W"].T),
        "x",
    ),
    LINEAR: (
        lambda x, W, c: ours.linear_cross_entropy(x, W, TARGETS, linear_bias=c, label_smoothing=0.2),
        lambda x, W, c: cross_entropy(x @ W.T + c, 0.2),
        "xWc",
    ),
}


def reverse(f, x, g):
    x = [t.clone().requires_grad_() for t in x]
    return torch.autograd.grad(f(*x), x)


def twice(f, x, g):
    x = [t.clone().requires_grad_() for t in x]
    first = torch.autograd.grad(f(*x), x, create_graph=True)
    return torch.autograd.grad(first, x, g)


def thrice(f, x, g):
    x = [t.clone().requires_grad_() for t in x]
    first = torch.autograd.grad(f(*x), x, create_graph=True)
    second = torch.autograd.grad(first, x, g, create_graph=True)
    return torch.autograd.grad([t.sin().sum() for t in second], x)


def backward_of_dual(f, x, g):
    x = [t.clone().requires_grad_() for t in x]
    with forward_ad.dual_level():
        y = f(*(forward_ad.make_dual(a, b) for a, b in zip(x, g, strict=True)))
        return torch.autograd.grad(forward_ad.unpack_dual(y).tangent, x)


def dual_of_backward(f, x, g):
    x = [t.clone().requires_grad_() for t in x]
    with forward_ad.dual_level():
        made = [forward_ad.make_dual(a, b) for a, b in zip(x, g, strict=True)]
        first = torch.autograd.grad(f(*made), made, create_graph=True)
        return [forward_ad.unpack_dual(t).tangent for t in first]


def along(f, x, g):
    return lambda a: f(*(t + a[i % 2] * s for i, (t, s) in enumerate(zip(x, g, strict=True))))


MODES = {
    "reverse": reverse,
    "reverse of reverse": twice,
    "reverse of reverse of reverse": thrice,
    "backward of dual": backward_of_dual,
    "dual of backward": dual_of_backward,
    "jvp": lambda f, x, g: jvp(f, tuple(x), tuple(g))[1],
    "jvp of jvp": lambda f, x, g: jvp(lambda *x: jvp(f, x, tuple(g))[1], tuple(x), tuple(g))[1],
    "grad of jvp": lambda f, x, g: grad(lambda x: jvp(f, x, tuple(g))[1])(tuple(x)),
    "jvp of grad": lambda f, x, g: jvp(grad(lambda x: f(*x)), (tuple(x),), (tuple(g),))[1],
    "vmap of grad": lambda f, x, g: vmap(grad(lambda x: f(*x)))(tuple(torch.stack([t, 2 * t]) for t in x)),
    "hessian": lambda f, x, g: hessian(along(f, x, g))(torch.zeros(2).double()),
    "jacrev of jacfwd": lambda f, x, g: jacrev(jacfwd(along(f, x, g)))(torch.zeros(2).double()),
    "jacrev of jacrev": lambda f, x, g: jacrev(jacrev(along(f, x, g)))(torch.zeros(2).double()),
    "jacrev of hessian": lambda f, x, g: jacrev(hessian(along(f, x, g)))(torch.zeros(2).double()),
}


@pytest.mark.filterwarnings("ignore:a third derivative")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_those_of_the_definition(name, mode):
    function, definition, letters = CASES[name]
    numbers = HEAD if letters == "xWc" else NUMBERS
    x = [numbers[letter] for letter in letters]
    g = [draw(*t.shape, seed=7 + i) for i, t in enumerate(x)]
    found, want = (MODES[mode](lambda *x, f=f: f(*x).sin().sum(), x, g) for f in (function, definition))
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms_over_several_axes_are_pytorchs(name):
    x, w = draw(2, 3, 4, seed=5).requires_grad_(), draw(3, 4, seed=6).requires_grad_()
    found, want = (getattr(source, name)(x, (3, 4), w) for source in (ours, F))
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), [x, w]) for y in (found, want)))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("targets", ["classes", "probabilities", "maps", "one"])
def test_cross_entropy_of_dual_numbers_has_the_options_of_pytorch(targets, weighted, reduction, smoothing):
    shape = {"maps": (4, 5, 2), "one": (5,)}.get(targets, (4, 5))
    z, t = draw(*shape, seed=3), draw(*shape, seed=4)
    target = {
        "classes": TARGETS,
        "probabilities": draw(4, 5, seed=5).softmax(1),
        "maps": torch.tensor([[0, 1], [4, -100], [2, 2], [3, 0]]),
        "one": torch.tensor(2),
    }[targets]
    named = {"weight": draw(5, seed=6).abs() if weighted else None, "reduction": reduction}
    named["label_smoothing"] = smoothing
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(ours.cross_entropy(forward_ad.make_dual(z, t), target, **named))
    want = jvp(lambda z: F.cross_entropy(z, target, **named), (z,), (t,))
    torch.testing.assert_close(tuple(found), want)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.3},
        {"weight": draw(5, seed=9).abs()},
        {"ignore_index": 4},
        {"linear_bias": draw(5, seed=8)},
    ],
)
def test_linear_cross_entropy_has_the_options_of_pytorch(options):
    x, W = HEAD["x"].clone().requires_grad_(), HEAD["W"].clone().requires_grad_()
    target = TARGETS.clamp(min=0) if "ignore_index" in options else TARGETS
    bias = options.get("linear_bias")
    rest = {name: value for name, value in options.items() if name != "linear_bias"}
    found = ours.linear_cross_entropy(x, W, target, **options)
    want = F.cross_entropy(F.linear(x, W, bias), target, **rest)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), [x, W]) for y in (found, want)))


def test_linear_cross_entropy_of_one_example():
    x, W = draw(3, seed=5), HEAD["W"]
    found = ours.linear_cross_entropy(x, W, torch.tensor(2))
    torch.testing.assert_close(found, F.cross_entropy(x @ W.T, torch.tensor(2)))


def test_third_derivatives_warn_once(monkeypatch):
    monkeypatch.setattr(backends, "_warned", set())
    x, g = [NUMBERS["x"]], [NUMBERS["y"]]
    with pytest.warns(UserWarning, match="third derivative of gelu"):
        thrice(lambda x: ours.gelu(x).sum(), x, g)


def test_pytorchs_layer_norm_is_wrong_where_ours_is_right():
    """A reason to have this package: it goes when PyTorch is mended."""
    x, g = NUMBERS["x"], NUMBERS["y"]
    wrong, right = (
        grad(lambda x, f=f: jvp(lambda x: f(x).sin().sum(), (x,), (g,))[1])(x)
        for f in (lambda x: F.layer_norm(x, (3,), eps=1e-3), lambda x: layer_norm(x, 1, 0))
    )
    assert float((wrong - right).norm() / right.norm()) > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["eager", "recorded", "jvp", "module"])
def test_rms_norm_of_half_precision_has_the_epsilon_of_pytorch(way, dtype):
    x, module = (3e-3 * draw(4, 8)).to(dtype), torch.nn.RMSNorm(8, dtype=dtype)
    want = F.rms_norm(x, (8,))
    if way == "module":
        with cs.twice_differentiable(module):
            found = module(x)
    elif way == "jvp":
        found = torch.func.jvp(lambda x: ours.rms_norm(x, (8,)), (x,), (x,))[0]
    else:
        found = ours.rms_norm(x.requires_grad_(way == "recorded"), (8,)).detach()
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_tangents_of_norms_of_half_precision_are_computed_in_single(norm):
    eps = 1e-5 if norm == "layer_norm" else torch.finfo(torch.float32).eps

    def definition(x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if norm == "layer_norm" else x
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    for size in (3e-3, 300.0):  # 1/σ³ or x² is beyond the largest number of float16
        x, t = (size * draw(4, 8)).half(), draw(4, 8, seed=1).half()
        found = torch.func.jvp(lambda x: getattr(ours, norm)(x, (8,), eps=eps), (x,), (t,))
        want = torch.func.jvp(definition, (x.double(),), (t.double(),))
        for a, b in zip(found, want, strict=True):
            assert a.dtype == torch.float16
            torch.testing.assert_close(a.double(), b, rtol=2e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:a third derivative")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_third_derivatives_of_gelu_vanish_far_from_zero(dtype):
    def value(x: Tensor) -> Tensor:
        return ours.gelu(x, approximate="tanh")

    x = torch.tensor([-1e3, -30.0, 30.0, 1e3], dtype=dtype, requires_grad=True)
    y = value(x)
    for _ in range(3):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    pushed = torch.func.vmap(torch.func.grad(torch.func.grad(torch.func.grad(value))))(x.detach())
    assert (y.abs() < 1e-30).all()
    assert (pushed.abs() < 1e-30).all()


def test_layer_norm_may_have_a_bias_alone():
    x, b = draw(3, 4).requires_grad_(), draw(4, seed=1).requires_grad_()

    def both(norm) -> Tensor:
        first = torch.autograd.grad(norm().pow(3).sum(), (x, b), create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, b))
        return torch.cat([g.flatten() for g in (*first, *second)])

    torch.testing.assert_close(
        both(lambda: ours.layer_norm(x, (4,), None, b)),
        both(lambda: ours.layer_norm(x, (4,), torch.ones(4, dtype=x.dtype), b)),
    )
