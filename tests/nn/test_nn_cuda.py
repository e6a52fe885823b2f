"""Functions and models of `curvescope.nn` on a card, against plain formulas in float64.

The grid also runs in Triton's interpreter (TRITON_INTERPRET=1, set before Python starts), without bfloat16.
"""

from __future__ import annotations

import os

import pytest
import sdpa_grid
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, hessian, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import curvescope as cs
from curvescope.kernels.attention import function, sdpa
from curvescope.nn import functional as ours

CARD = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not CARD
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not (CARD or INTERPRETED), reason="needs a CUDA device or TRITON_INTERPRET=1"),
]
needs_card = pytest.mark.skipif(not CARD, reason="needs a CUDA device")
ALL = sdpa_grid.cases(700, seed=1, shapes=list(sdpa_grid.CARD_SHAPES))
BOUND = {"float32": 2e-5, "bfloat16": 5e-2, "float16": 1e-2}
DTYPES = [getattr(torch, name) for name in BOUND]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The interpreter takes tensors of the CPU, and counts by arrays of one entry only with help."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    from curvescope.kernels.attention import blockwise, triton_passes

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    single = torch.float32, torch.float16
    chosen = lambda backend, q, v: triton_passes if q.dtype in single else blockwise  # noqa: E731
    monkeypatch.setattr(function, "_implementation", chosen)


@pytest.mark.parametrize("start", range(0, len(ALL), 20))
def test_derivatives_on_a_card_are_those_of_plain_float64(start, monkeypatch):
    monkeypatch.setattr(
        sdpa, "PATH", "kernels"
    )  # also for sequences so short that plain operations are faster
    some = [case for case in ALL[start : start + 20] if not (INTERPRETED and case.dtype == "bfloat16")]
    errors = {str(case): sdpa_grid.error(case, "cuda" if CARD else "cpu") for case in some}
    bounds = {str(case): sdpa_grid.BOUND[case.dtype] for case in some}
    assert {name: e for name, e in errors.items() if not e <= bounds[name]} == {}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TARGETS = torch.arange(12) % 7
W = draw(7, 24, seed=5)


def _layer_norm(x: Tensor, w: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w


FUNCTIONS = {  # ours, and the definition
    "layer_norm": (lambda x, w: ours.layer_norm(x, (24,), w, None, 1e-3), _layer_norm),
    "rms_norm": (
        lambda x, w: ours.rms_norm(x, (24,), w, 1e-3),
        lambda x, w: x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w,
    ),
    "gelu": (lambda x, w: ours.gelu(x * w), lambda x, w: x * w * (1 + torch.erf(x * w / 2**0.5)) / 2),
    "silu": (lambda x, w: ours.silu(x * w), lambda x, w: x * w / (1 + torch.exp(-x * w))),
    "swiglu": (
        lambda x, w: ours.swiglu(x, w.expand_as(x)),
        lambda x, w: x / (1 + torch.exp(-x)) * w,
    ),
    "linear_cross_entropy": (
        lambda x, w: ours.linear_cross_entropy(x * w, W.to(x), TARGETS.to(x.device)),
        lambda x, w: F.cross_entropy(x * w @ W.to(x).T, TARGETS.to(x.device)),
    ),
}


def _reverse(f, x, g):
    x = [t.clone().requires_grad_() for t in x]
    first = torch.autograd.grad(f(*x), x, create_graph=True)
    return *first, *torch.autograd.grad(first, x, g)


def _forward_of_reverse(f, x, g):
    return jvp(grad(f, argnums=(0, 1)), tuple(x), tuple(g))[1]


def _reverse_of_forward(f, x, g):
    return grad(lambda *x: jvp(f, x, tuple(g))[1], argnums=(0, 1))(*x)


@needs_card
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [_reverse, _forward_of_reverse, _reverse_of_forward])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_second_derivatives(name, way, dtype):
    own, plain = FUNCTIONS[name]
    x, g = [draw(12, 24), draw(24, seed=1)], [draw(12, 24, seed=2), draw(24, seed=3)]
    x, g = ([t.to(dtype).double() for t in some] for some in (x, g))
    scalar = lambda f: lambda *x: f(*x).to(torch.promote_types(x[0].dtype, torch.float32)).sin().sum()  # noqa: E731
    found = way(scalar(own), *([t.to("cuda", dtype) for t in some] for some in (x, g)))
    for a, b in zip(found, way(scalar(plain), x, g), strict=True):
        assert (a.cpu().double() - b).norm() <= BOUND[str(dtype)[6:]] * (1 + b.norm())


class Layer(nn.Module):
    """Attention, norms, an activation and cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, activation="gelu"), 2
        )
        self.out = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.arange(x.shape[0] * x.shape[1], device=x.device) % 7
        return F.cross_entropy(self.out(self.layers(x)).flatten(0, 1), targets)


def _penalty(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
    return list(torch.autograd.grad(slope.square().sum() * 100, model.parameters()))


def _hessian_vector(model: nn.Module, x: Tensor) -> list[Tensor]:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda weights: torch.func.functional_call(model, weights, (x,))  # noqa: E731
    return list(jvp(grad(loss), (weights,), (weights,))[1].values())


@needs_card
@pytest.mark.parametrize("product", [_penalty, _hessian_vector])
@pytest.mark.parametrize("length", [17, 300])
def test_a_model_has_second_derivatives(length, product):
    torch.manual_seed(0)
    model, x = Layer(), draw(3, length, 32)
    with sdpa_kernel(SDPBackend.MATH):
        exact = product(cs.make_twice_differentiable(model.double()), x)
    found = product(cs.make_twice_differentiable(model.float().cuda()), x.float().cuda())
    for a, b in zip(found, exact, strict=True):
        assert (a.cpu().double() - b).norm() <= 1e-4 * max(float(b.norm()), 1e-3)


@needs_card
@pytest.mark.parametrize("length", [64, 300])
def test_a_model_under_autocast_has_second_derivatives(length):
    torch.manual_seed(0)
    model, x = cs.make_twice_differentiable(Layer().cuda()), draw(3, length, 32).float().cuda()
    exact = torch.cat([t.flatten() for t in _penalty(model, x)])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = torch.cat([t.flatten() for t in _penalty(model, x)])
    assert found.dtype == torch.float32
    assert (found - exact).norm() < 0.1 * exact.norm()


def qkv(L: int = 64) -> list[Tensor]:
    return [draw(2, 2, L, 16, seed=i).float().cuda().requires_grad_() for i in range(3)]


@needs_card
@pytest.mark.parametrize("length", [64, 600])
def test_dropout_draws_what_pytorch_draws_on_a_card(length):
    x, results = qkv(length), []
    for f in (cs.sdpa, F.scaled_dot_product_attention):
        torch.manual_seed(3)
        with sdpa_kernel(SDPBackend.MATH):
            o = f(*x, dropout_p=0.4)
        results.append((o, *torch.autograd.grad(o.sin().sum(), x)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@needs_card
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 600])
def test_dropout_is_the_same_without_a_graph(length, dtype):
    x, results = [t.detach().to(dtype) for t in qkv(length)], []
    for needs in (False, True):
        torch.manual_seed(3)
        results.append(cs.sdpa(*(t.requires_grad_(needs) for t in x), dropout_p=0.4).detach())
    torch.testing.assert_close(*results)


@needs_card
@pytest.mark.parametrize("length", [64, 600])
def test_a_double_backward_goes_through_a_checkpoint_on_a_card(length):
    x = qkv(length)

    def penalty(f):
        first = torch.autograd.grad(f(*x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in first), x)

    again = penalty(lambda *x: checkpoint(lambda *x: cs.sdpa(*x, is_causal=True), *x, use_reentrant=False))
    torch.testing.assert_close(again, penalty(lambda *x: cs.sdpa(*x, is_causal=True)), rtol=1e-4, atol=1e-4)


@needs_card
def test_per_example_hessians_by_vmap_on_a_card():
    x = [t.detach() for t in qkv(16)]

    def f(a: Tensor, *x: Tensor) -> Tensor:
        return cs.sdpa(x[0] * a[0], x[1] * a[1], x[2] * a[2], is_causal=True).sin().sum()

    a = torch.ones(3, device="cuda")
    found = vmap(hessian(f), in_dims=(None, 0, 0, 0))(a, *x)
    want = [hessian(f)(a.double().cpu(), *(t[i].double().cpu() for t in x)) for i in range(2)]
    torch.testing.assert_close(found.cpu().double(), torch.stack(want), rtol=1e-3, atol=1e-3)


@needs_card
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", ["by head", "by token"])
def test_compile_keeps_one_graph_on_a_card(backend, layout, monkeypatch):
    monkeypatch.setattr(sdpa, "PATH", "kernels")
    x = qkv()
    if layout == "by token":
        x = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in x]
    loss = lambda *x: cs.sdpa(*x, is_causal=True).sin().sum()  # noqa: E731
    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend=backend)(*x), x)
    torch.testing.assert_close(found, torch.autograd.grad(loss(*x), x), rtol=1e-4, atol=1e-4)


@needs_card
def test_memory_is_linear_in_the_length():
    peaks = []
    for length in (4096, 16384):
        x = [torch.randn(1, 1, length, 64, device="cuda", requires_grad=True) for _ in range(3)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        first = torch.autograd.grad(cs.sdpa(*x, is_causal=True).sum(), x, create_graph=True)
        torch.autograd.grad(first[0].sum(), x)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del x, first
    assert peaks[1] < 5 * peaks[0]
