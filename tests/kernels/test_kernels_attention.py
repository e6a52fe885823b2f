"""Fused attention and its derivatives against plain softmax attention and autograd's double backward."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from kernels_attention_plain import plain
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from curvescope.core.errors import CurvescopeError, ShapeError, UsageError
from curvescope.kernels.attention import attention, blockwise
from selection import some

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 4},
    "lengths": {"lengths": torch.tensor([0, 7])},
    "causal, lengths": {"causal": True, "lengths": torch.tensor([5, 13])},
    "all": {"causal": True, "window": 3, "lengths": torch.tensor([2, 11])},
}
CUTS = {"one tile": (4 << 20, 64, 64 << 20), "recomputed": (4 << 20, 64, 0), "small": (8 * 2 * 13 * 5, 5, 0)}
CUTS["small, kept"] = (8 * 2 * 13 * 5, 4, 64 << 20)


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch):
    size, rows, keep = CUTS[request.param]
    monkeypatch.setattr(blockwise, "TILE_BYTES", {"cpu": size})
    monkeypatch.setattr(blockwise, "CAUSAL_ROWS", {"cpu": rows})
    monkeypatch.setattr(blockwise, "KEEP_BYTES", keep)
    return request.param


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=source, dtype=torch.float64)


def inputs(B=2, H=4, Hkv=2, Lq=13, Lk=13, d=6, dv=5, scale=1.0) -> list[Tensor]:
    """q, k, v, dO as views that are not contiguous, each a leaf."""
    shapes = [(B, Lq, H, d), (B, Lk, Hkv, d), (B, Lk, Hkv, dv), (B, Lq, H, dv)]
    made = [draw(*s[:3], s[3] + 2, seed=i, scale=scale) for i, s in enumerate(shapes)]
    return [x[..., 1:-1].transpose(1, 2).detach().requires_grad_() for x in made]


def moves(x: list[Tensor], *lead: int) -> list[Tensor]:
    return [draw(*lead, *t.shape, seed=10 + i) for i, t in enumerate(x[:3])]


def all_derivatives(function, x: list[Tensor], g: list[Tensor], **options) -> list[Tensor]:
    """O, dQ, dK, dV, hQ, hK, hV, h_dO."""
    q, k, v, do = x
    o = function(q, k, v, **options)
    first = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
    second = torch.autograd.grad(first, (q, k, v, do), g)
    return [t.detach() for t in (o, *first, *second)]


@pytest.mark.parametrize("mask", MASKS)
def test_derivatives_are_those_of_plain_attention(mask, cut):
    x = inputs()
    expected = all_derivatives(plain, x, moves(x), **MASKS[mask])
    found = all_derivatives(attention, x, moves(x), **MASKS[mask])
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, **TIGHT)


@pytest.mark.parametrize(("H", "Hkv"), [(3, 3), (4, 1), (6, 3)])
def test_groups_of_heads_and_unequal_lengths(H, Hkv, cut):
    x = inputs(H=H, Hkv=Hkv, Lq=9, Lk=14)
    options = {"scale": 0.7, "lengths": torch.tensor([14, 3])}
    found, expected = (all_derivatives(f, x, moves(x), **options) for f in (attention, plain))
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, **TIGHT)


@pytest.mark.parametrize("chosen", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_directions_may_be_missing(chosen, cut):
    x = inputs()
    g = moves(x)

    def some(function):
        o = function(*x[:3], causal=True)
        first = torch.autograd.grad(o, x[:3], x[3], create_graph=True)
        outputs, directions = [first[i] for i in chosen], [g[i] for i in chosen]
        return torch.autograd.grad(outputs, x, directions, materialize_grads=True)

    torch.testing.assert_close(some(attention), some(plain), **TIGHT)


def test_queries_without_keys_give_zero():
    x = inputs()
    found = all_derivatives(attention, x, moves(x), lengths=torch.tensor([0, 4]))
    assert all(bool(torch.isfinite(t).all()) and not t[0].any() for t in found)
    assert all(bool(t[1].any()) for t in found)


def test_large_scores_stay_finite(cut):
    x = inputs(scale=30.0)
    found, expected = (all_derivatives(f, x, moves(x), causal=True) for f in (attention, plain))
    for one, two in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9 * float(two.abs().max()))


@pytest.mark.parametrize("mask", some(["lengths", "causal"], 1))
def test_second_differences(mask):
    x = [t.detach().requires_grad_() for t in inputs(B=2, H=2, Hkv=1, Lq=8, Lk=8, d=2, dv=1)[:3]]
    assert torch.autograd.gradgradcheck(lambda *t: attention(*t, **MASKS[mask]), x)


@pytest.mark.parametrize("mask", MASKS)
def test_directions_together_have_the_bits_of_each_alone(mask, monkeypatch):
    x = inputs()
    g = moves(x, 5)
    first = torch.autograd.grad(attention(*x[:3], **MASKS[mask]), x[:3], x[3], create_graph=True)
    together = torch.autograd.grad(first, x, g, is_grads_batched=True, retain_graph=True)
    monkeypatch.setattr(blockwise, "TOGETHER_BYTES", 0)
    assert all(map(torch.equal, together, torch.autograd.grad(first, x, g, is_grads_batched=True)))


@pytest.mark.parametrize("second_order", [True, False])
def test_many_directions_at_once(second_order, cut):
    x = inputs()
    g = moves(x, 3)
    o = attention(*x[:3], causal=True, second_order=second_order)
    first = torch.autograd.grad(o, x[:3], x[3], create_graph=True)
    into = x if second_order else x[3:]
    found = torch.autograd.grad(first, into, g, is_grads_batched=True, retain_graph=True)
    for j in range(3):
        one = torch.autograd.grad(first, into, [t[j] for t in g], retain_graph=True)
        for many, single in zip(found, one, strict=True):
            torch.testing.assert_close(many[j], single, **TIGHT)
    if second_order:  # only one of the three directions is batched
        half = torch.autograd.grad(first[1], x, g[1], is_grads_batched=True, retain_graph=True)
        one = torch.autograd.grad(first[1], x, g[1][2], retain_graph=True)
        torch.testing.assert_close([t[2] for t in half], list(one), **TIGHT)


def test_many_first_derivatives_at_once():
    x = inputs()
    u = draw(3, *x[3].shape, seed=7)
    found = torch.autograd.grad(attention(*x[:3], causal=True), x[:3], u, is_grads_batched=True)
    expected = torch.autograd.grad(plain(*x[:3], causal=True), x[:3], u, is_grads_batched=True)
    torch.testing.assert_close(found, expected, **TIGHT)


@pytest.mark.parametrize("mask", MASKS)
def test_forward_mode(mask, cut):
    x = tuple(t.detach() for t in inputs()[:3])
    t = tuple(moves(list(x)))
    found = jvp(lambda *y: attention(*y, **MASKS[mask]), x, t)
    expected = jvp(lambda *y: plain(*y, **MASKS[mask]), x, t)
    torch.testing.assert_close(found, expected, **TIGHT)


@pytest.mark.parametrize("outer", [jacfwd, jacrev])
def test_composes_with_function_transforms(outer):
    q, k, v = (t.detach()[:1] for t in inputs(H=2, Hkv=1, Lq=5, Lk=5)[:3])
    many = draw(3, *q.shape, seed=5)

    def curvature(function):
        def loss(t):
            return function(t, k, v, causal=True).square().sum()

        return vmap(outer(grad(loss)))(many)

    torch.testing.assert_close(curvature(attention), curvature(plain), **TIGHT)


def test_forward_over_reverse():
    x = tuple(t.detach() for t in inputs()[:3])
    t = tuple(moves(list(x)))

    def product(function):
        return jvp(grad(lambda *y: function(*y, causal=True).pow(3).sum(), (0, 1, 2)), x, t)[1]

    torch.testing.assert_close(product(attention), product(plain), **TIGHT)


def test_first_order_only_gives_the_jacobian_and_no_graph_to_the_inputs():
    x = inputs()
    g = moves(x)
    u = torch.zeros_like(x[3], requires_grad=True)
    o = attention(*x[:3], causal=True, second_order=False)
    first = torch.autograd.grad(o, x[:3], u, create_graph=True)
    found = torch.autograd.grad(first, [u, *x[:3]], g, allow_unused=True)
    assert found[1:] == (None, None, None)
    tangents = tuple(g)
    expected = jvp(lambda *y: plain(*y, causal=True), tuple(t.detach() for t in x[:3]), tangents)[1]
    torch.testing.assert_close(found[0], expected, **TIGHT)


def test_third_derivative_is_refused():
    x = inputs()
    o = attention(*x[:3])
    first = torch.autograd.grad(o, x[:3], x[3], create_graph=True)
    second = torch.autograd.grad(first, x[:3], moves(x), create_graph=True)
    with pytest.raises(CurvescopeError, match="third derivative"):
        torch.autograd.grad(second[0].sum(), x[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision(dtype):
    x = [t.detach().to(dtype).requires_grad_() for t in inputs()]
    g = [t.to(dtype) for t in moves(x)]
    found = all_derivatives(attention, x, g, causal=True)
    exact = [t.detach().double().requires_grad_() for t in x]
    expected = all_derivatives(plain, exact, [t.double() for t in g], causal=True)
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert (one.double() - two).norm() <= 4 * torch.finfo(dtype).eps * two.norm()


class Largest(TorchDispatchMode):
    """Entries of the largest tensor that any operation makes."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.entries = max(self.entries, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("causal", [True, False])
def test_memory_is_linear_in_the_length(causal, monkeypatch):
    L, rows = 2048, 64
    monkeypatch.setattr(blockwise, "TILE_BYTES", {"cpu": 4 * rows * L})
    monkeypatch.setattr(blockwise, "KEEP_BYTES", 0)
    x = [draw(1, 1, L, 4, seed=i).float().requires_grad_() for i in range(4)]
    with Largest() as seen:
        all_derivatives(attention, x, [t.detach() for t in x[:3]], causal=causal)
    assert seen.entries <= rows * L


def test_nothing_is_left_behind():
    gc.disable()
    try:
        x = inputs()
        o = attention(*x[:3], causal=True)
        first = torch.autograd.grad(o, x[:3], x[3], create_graph=True)
        second = torch.autograd.grad(first, x[:3], moves(x))
        alive = [weakref.ref(t) for t in (o, *first, *second, *x)]
        del o, first, second, x
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


BAD = [
    ({}, lambda q, k, v: (q[0], k, v), "of shape"),
    ({}, lambda q, k, v: (q, k[:1], v), "same batch"),
    ({}, lambda q, k, v: (q, k, v[:, :, 1:]), "length of k and v"),
    ({}, lambda q, k, v: (q, k[..., 1:], v), "one size"),
    ({}, lambda q, k, v: (q[:, :3], k, v), "key heads divide"),
    ({}, lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), "at least one"),
    ({}, lambda q, k, v: (q, k.float(), v), "one dtype"),
    ({"causal": True}, lambda q, k, v: (q[:, :, 1:], k, v), "as many keys"),
    ({"window": 2}, lambda q, k, v: (q, k, v), "window"),
    ({"window": 0, "causal": True}, lambda q, k, v: (q, k, v), "window"),
    ({"lengths": torch.tensor([1, 2, 3])}, lambda q, k, v: (q, k, v), "lengths"),
    ({"lengths": torch.tensor([1.0, 2.0])}, lambda q, k, v: (q, k, v), "lengths"),
]


@pytest.mark.parametrize(("options", "change", "words"), BAD)
def test_bad_shapes_are_refused(options, change, words):
    with pytest.raises(ShapeError, match=words):
        attention(*change(*inputs()[:3]), **options)


def test_unknown_backend_is_refused():
    with pytest.raises(UsageError, match="backend"):
        attention(*inputs()[:3], backend="cuda")


@pytest.mark.parametrize("how", ["none", "causal", "bool mask", "added mask", "grouped", "scaled"])
def test_plain_attention_is_pytorchs_own(how):
    """The form that is differentiated twice gives what `sdpa_kernel(MATH)` and the fused forms give."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from curvescope.kernels.function_mode import PlainAttention

    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8, generator=source).double() for _ in range(3))
    seen = torch.rand(2, 1, 6, 6, generator=source) < 0.6
    seen[..., 0] = True
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "bool mask": {"attn_mask": seen},
        "added mask": {"attn_mask": torch.randn(6, 6, generator=source).double()},
        "grouped": {"enable_gqa": True},
        "scaled": {"scale": 0.7},
    }[how]
    if how == "grouped":
        k, v = k[:, :2], v[:, :2]
    attend = torch.nn.functional.scaled_dot_product_attention
    fused = attend(q, k, v, **options)
    with sdpa_kernel(SDPBackend.MATH):
        plain = attend(q, k, v, **options)
    with PlainAttention():
        ours = attend(q, k, v, **options)
    assert torch.equal(ours, plain)
    torch.testing.assert_close(ours, fused)
