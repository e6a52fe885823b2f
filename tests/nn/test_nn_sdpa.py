"""Attention with PyTorch's signature: every derivative against plain float64, and PyTorch's own semantics."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import sdpa_grid
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import curvescope as cs
from curvescope.core.errors import CurvescopeError, ShapeError, UsageError
from curvescope.kernels import backends
from curvescope.kernels.attention import blockwise
from curvescope.kernels.attention import sdpa as entry
from curvescope.nn.functional import RelativeBias

ALL = sdpa_grid.cases(2400)
FEW = 200


@pytest.fixture(params=["kernels", "plain", "auto"])
def path(request, monkeypatch) -> str:
    """Both ways to compute attention, whatever the size."""
    monkeypatch.setattr(entry, "PATH", request.param)
    return request.param


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(B=2, H=2, Lq=5, Lk=7, d=4, dv=3) -> list[Tensor]:
    shapes = [(B, H, Lq, d), (B, H, Lk, d), (B, H, Lk, dv)]
    return [draw(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]


@pytest.mark.parametrize("start", range(0, FEW, 25))
def test_derivatives_are_those_of_plain_float64(start, path):
    check(ALL[start : start + 25])


@pytest.mark.slow
@pytest.mark.parametrize("start", range(FEW, len(ALL), 100))
def test_derivatives_are_those_of_plain_float64_on_the_whole_grid(start, path):
    check(ALL[start : start + 100])


def check(cases: list[sdpa_grid.Case]) -> None:
    errors = {str(case): sdpa_grid.error(case) for case in cases}
    bounds = {str(case): sdpa_grid.BOUND[case.dtype] for case in cases}
    assert {name: e for name, e in errors.items() if not e <= bounds[name]} == {}


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": draw(5, 6, seed=7) > -0.5},
    "bool, empty row": {"attn_mask": torch.arange(5)[:, None].ne(2).expand(5, 6)},
    "additive, -inf": {"attn_mask": draw(5, 6, seed=8).masked_fill(draw(5, 6, seed=9) > 0.8, -torch.inf)},
    "key lengths": {"key_lengths": torch.tensor([3])},
    "window": {"window": 2},
    "dropout": {"dropout_p": 0.4},
}
TRAINED = {"attn_mask": (1, 2, 5, 6), "score_bias": (2, 1, 6), "relative": (2, 10)}


@pytest.mark.parametrize("mask", [*MASKS, *TRAINED])
def test_second_derivatives_are_finite_differences_of_first_ones(mask, path):
    x = qkv(B=1, H=2, Lq=5, Lk=6, d=2, dv=1)
    if mask in TRAINED:
        x.append(draw(*TRAINED[mask], seed=5).requires_grad_())

    def f(q, k, v, *trained):
        torch.manual_seed(0)
        named = dict(MASKS.get(mask, {}))
        if mask in TRAINED:
            name = "score_bias" if mask == "relative" else mask
            named[name] = RelativeBias(trained[0]) if mask == "relative" else trained[0]
        return cs.sdpa(q, k, v, **named)

    how = {"check_fwd_over_rev": True, "check_rev_over_rev": True, "fast_mode": True}
    assert torch.autograd.gradcheck(f, x, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, x, **how)


@pytest.mark.parametrize("mask", ["causal", "relative"])
def test_batches_of_cotangents_and_tangents(mask, monkeypatch):
    monkeypatch.setattr(entry, "PATH", "kernels")
    x = qkv(B=1, H=1, Lq=3, Lk=3, d=2, dv=1)
    x += [draw(1, 5, seed=5).requires_grad_()] if mask == "relative" else []

    def f(q, k, v, *table):
        return cs.sdpa(q, k, v, is_causal=not table, score_bias=RelativeBias(*table) if table else None)

    batched = {"check_batched_grad": True}
    assert torch.autograd.gradcheck(f, x, check_forward_ad=True, check_batched_forward_grad=True, **batched)
    assert torch.autograd.gradgradcheck(f, x, check_fwd_over_rev=True, check_rev_over_rev=True, **batched)


SHAPES = {
    "two axes": ((4, 3), (5, 3), (5, 2)),
    "three axes": ((2, 4, 3), (2, 5, 3), (2, 5, 2)),
    "five axes": ((2, 3, 2, 4, 3), (2, 3, 2, 5, 3), (2, 3, 2, 5, 2)),
    "broadcast batch": ((2, 1, 4, 3), (1, 3, 5, 3), (2, 3, 5, 2)),
    "no queries": ((2, 2, 0, 3), (2, 2, 5, 3), (2, 2, 5, 2)),
    "no keys": ((2, 2, 4, 3), (2, 2, 0, 3), (2, 2, 0, 2)),
    "no batch": ((0, 2, 4, 3), (0, 2, 5, 3), (0, 2, 5, 2)),
    "no values": ((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 0)),
}


def torchs(*args, **named) -> Tensor:
    """PyTorch's plain attention: the definition of the semantics."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **named)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_those_of_pytorch(shape, causal, path):
    x = [draw(*s, seed=i).requires_grad_() for i, s in enumerate(SHAPES[shape])]
    found, want = cs.sdpa(*x, is_causal=causal), torchs(*x, is_causal=causal)
    torch.testing.assert_close(found, want)
    given = torch.autograd.grad(found.sum(), x), torch.autograd.grad(want.sum(), x)
    torch.testing.assert_close(*given)


@pytest.mark.parametrize(
    "shape",
    [(), (6,), (1, 6), (5, 1), (5, 6), (2, 5, 6), (1, 1, 6), (3, 1, 5, 6), (3, 2, 1, 6), (1, 2, 5, 1)],
)
@pytest.mark.parametrize("kind", ["bool", "additive", "trained"])
def test_masks_broadcast_as_in_pytorch(shape, kind, path):
    x = qkv(B=3, H=2, Lq=5, Lk=6)
    mask = draw(*shape, seed=4) if kind != "bool" else draw(*shape, seed=4) > -0.7
    inputs = x + ([mask.requires_grad_()] if kind == "trained" else [])
    found, want = (f(*x, mask) for f in (cs.sdpa, torchs))
    torch.testing.assert_close(found, want)
    given = [torch.autograd.grad(y, inputs, draw(*y.shape, seed=5)) for y in (found, want)]
    torch.testing.assert_close(*given)


def test_a_mask_of_five_axes(path):
    x = [draw(2, 3, 2, 4, 3, seed=i).requires_grad_() for i in range(3)]
    for shape in [(2, 1, 1, 4, 4), (3, 1, 4, 4), (3, 2, 1, 4)]:
        mask = draw(*shape, seed=4).requires_grad_()
        found, want = (torch.autograd.grad(f(*x, mask).sin().sum(), [*x, mask]) for f in (cs.sdpa, torchs))
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("lengths", [(4, 6), (6, 4), (5, 5)])
@pytest.mark.parametrize("kind", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_pytorch_are_masks(kind, lengths, path):
    x, bias = qkv(Lq=lengths[0], Lk=lengths[1]), kind(*lengths)
    mask = torch.ones(lengths, dtype=torch.bool)
    mask = mask.tril() if kind is causal_upper_left else mask.tril(lengths[1] - lengths[0])
    torch.testing.assert_close(cs.sdpa(*x, bias), torchs(*x, mask))


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("empty", [False, True])
def test_a_tangent_under_a_mask_has_finite_derivatives(kind, empty, path):
    """PyTorch's plain path gives NaN here where a row of the mask hides every key."""
    x, t = ([a.detach() for a in qkv(Lq=6, Lk=6)] for _ in range(2))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[3] = mask[3] & (not empty)
    mask = mask if kind == "boolean" else draw(6, 6).masked_fill(~mask, -torch.inf)
    t = tuple(a.flip(0) for a in t)

    def total(*x: Tensor) -> Tensor:
        return jvp(lambda *x: cs.sdpa(*x, attn_mask=mask), x, t)[1].sin().sum()

    found = grad(total, argnums=(0, 1, 2))(*x)
    eps = 1e-5
    moved = lambda s: float(total(*(a + s * eps * b for a, b in zip(x, found, strict=True))))  # noqa: E731
    slope = float(sum(a.square().sum() for a in found))
    assert (moved(1) - moved(-1)) / (2 * eps) == pytest.approx(slope, rel=1e-5)
    t = tuple(a.requires_grad_() for a in t)
    assert all(a.isfinite().all() for a in torch.autograd.grad(total(*x), t))


def test_rows_without_a_key_are_zero_and_so_are_their_derivatives(path):
    x, do = qkv(Lq=4, Lk=4), draw(2, 2, 4, 3, seed=5).requires_grad_()
    hidden = torch.ones(4, 4, dtype=torch.bool)
    hidden[1] = False
    for mask in (hidden, torch.zeros(4, 4).double().masked_fill(~hidden, -torch.inf)):
        o = cs.sdpa(*x, mask)
        assert not o[:, :, 1].any()
        assert torch.equal(o[:, :, 1], torchs(*x, mask)[:, :, 1])
        first = torch.autograd.grad(o, x, do, create_graph=True)
        second = torch.autograd.grad([t.sin().sum() for t in first], [*x, do])
        assert all(t.isfinite().all() for t in (*first, *second))
        assert not any(t[:, :, 1].any() for t in (first[0], second[0], second[3]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows", [slice(2, 3), slice(None)])
def test_a_mask_may_add_the_lowest_number_to_all_keys_of_a_query(rows, dtype, path, monkeypatch):
    """Older models hide keys this way. Such queries see all keys alike."""
    monkeypatch.setattr(blockwise, "KEEP_BYTES", 0)  # long sequences compute their weights again
    mask = torch.zeros(5, 7, dtype=dtype)
    mask[rows] = torch.finfo(torch.float32).min
    x = [t.detach().to(dtype).requires_grad_() for t in qkv()]
    moves = tuple(t.detach().flip(2) for t in x)

    def derivatives(attention) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(attention(*x, mask).sin().sum(), x, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), x)
        return *first, *second, jvp(lambda *x: attention(*x, mask), tuple(t.detach() for t in x), moves)[1]

    for a, b in zip(derivatives(cs.sdpa), derivatives(written), strict=True):
        torch.testing.assert_close(a, b)


def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dropout_draws_what_pytorch_draws(dtype, path):
    x = [t.detach().to(dtype).requires_grad_() for t in qkv()]
    results = []
    for f in (cs.sdpa, torchs):
        torch.manual_seed(3)
        results.append(f(*x, dropout_p=0.5))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), x) for y in results))


@pytest.mark.parametrize("moving", [(0,), (1,), (2,), (1, 2)])
def test_some_inputs_may_be_dual_numbers_whose_tangents_require_a_gradient(moving, path):
    x, t = ([a.detach() for a in qkv()] for _ in range(2))
    t = [a.flip(2).requires_grad_() for a in t]

    def gradients(attention) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            made = [forward_ad.make_dual(x[i], t[i]) if i in moving else x[i] for i in range(3)]
            tangent = forward_ad.unpack_dual(attention(*made)).tangent
            return torch.autograd.grad(tangent.sin().sum(), [t[i] for i in moving])

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.exp(q @ k.mT * q.shape[-1] ** -0.5)
        return weights / weights.sum(-1, keepdim=True) @ v

    torch.testing.assert_close(gradients(cs.sdpa), gradients(plain))


@pytest.mark.parametrize("masked", [False, True])
def test_query_key_and_value_may_be_one_tensor(masked, path):
    x = draw(2, 2, 5, 4).requires_grad_()
    mask = draw(5, 5, seed=3) if masked else torch.zeros(5, 5).double()

    def derivatives(attention) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(attention(x, x, x).sin().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        tangent = jvp(
            lambda x: jvp(lambda x: attention(x, x, x), (x,), (x.cos(),))[1],
            (x.detach(),),
            (x.detach().sin(),),
        )
        return first, second, *tangent

    found = derivatives(lambda *x: cs.sdpa(*x, mask if masked else None))
    for a, b in zip(found, derivatives(lambda *x: written(*x, mask)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 1, 7), (2, 2, 5, 1), (1, 2, 1, 1)])
def test_derivatives_under_masks_of_short_sequences(shape, kind):
    """These masks take the path of few operations."""
    mask = draw(*shape, seed=4)
    if kind == "boolean":
        mask = mask > -0.5
        mask[..., 0] = True
    x = qkv()
    found = second(cs.sdpa(*x, mask), x)
    added = mask if kind == "additive" else torch.zeros(shape).double().masked_fill(~mask, -torch.inf)
    want = second(written(*x, added), x)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


def test_everything_may_be_dropped(path):
    x = qkv()
    o = cs.sdpa(*x, dropout_p=1.0)
    assert not o.any()
    assert not any(t.any() for t in torch.autograd.grad(o.sum(), x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_own_precision(dtype, path):
    x = [t.detach().float().requires_grad_() for t in qkv()]
    with torch.autocast("cpu", dtype=dtype):
        o = cs.sdpa(*x, is_causal=True)
        want = torchs(*x, is_causal=True)
        first = torch.autograd.grad(o.float().sin().sum(), x, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), x)
    assert o.dtype == want.dtype == dtype
    torch.testing.assert_close(o, want, rtol=2e-2, atol=2e-2)
    assert all(t.dtype == torch.float32 for t in (*first, *second))
    exact = torch.autograd.grad(torchs(*x, is_causal=True).sin().sum(), x, create_graph=True)
    torch.testing.assert_close(first, exact, rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(second, torch.autograd.grad(exact[0].square().sum(), x), rtol=8e-2, atol=8e-2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_draw_the_same_dropout_again(reentrant, path):
    x = qkv()

    def loss(*x):
        return cs.sdpa(*x, dropout_p=0.5).sin().sum()

    results = []
    for f in (loss, lambda *x: checkpoint(loss, *x, use_reentrant=reentrant)):
        torch.manual_seed(1)
        results.append(torch.autograd.grad(f(*x), x) if not reentrant else _grads(f(*x), x))
    torch.testing.assert_close(*results)


def _grads(loss: Tensor, x: list[Tensor]) -> tuple[Tensor, ...]:
    for t in x:
        t.grad = None
    loss.backward()
    return tuple(t.grad for t in x)


def test_a_double_backward_goes_through_a_checkpoint(path):
    x = qkv()

    def penalty(f):
        first = torch.autograd.grad(f(*x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in first), x)

    plain = penalty(lambda *x: cs.sdpa(*x, is_causal=True))
    again = penalty(lambda *x: checkpoint(lambda *x: cs.sdpa(*x, is_causal=True), *x, use_reentrant=False))
    torch.testing.assert_close(again, plain)


def third(third_order: str) -> tuple[Tensor, ...]:
    x, g = qkv(B=1, H=1, Lq=3, Lk=4), [draw(*t.shape, seed=9) for t in qkv(B=1, H=1, Lq=3, Lk=4)]
    first = torch.autograd.grad(
        cs.sdpa(*x, is_causal=True, third_order=third_order).sin().sum(), x, create_graph=True
    )
    second = torch.autograd.grad(first, x, g, create_graph=True)
    return torch.autograd.grad([t.sin().sum() for t in second], x)


def test_third_derivatives_are_plain_and_warn_once(monkeypatch):
    monkeypatch.setattr(entry, "PATH", "plain")
    want = third("error")
    monkeypatch.setattr(entry, "PATH", "kernels")
    monkeypatch.setattr(backends, "_warned", set())
    with pytest.warns(UserWarning, match="third derivative"):
        found = third("warn")
    with warnings.catch_warnings(action="error"):
        third("warn")
    torch.testing.assert_close(found, want)
    with pytest.raises(CurvescopeError, match="third derivative"):
        third("error")
    monkeypatch.setattr(entry, "PATH", "auto")
    torch.testing.assert_close(third("error"), want)


THIRD = {
    "grad of hessian": lambda f: grad(lambda a: hessian(f)(a).sin().sum()),
    "jvp of jvp of grad": lambda f: lambda a: jvp(lambda b: jvp(grad(f), (b,), (a,))[1], (a,), (a,))[1],
    "jvp of jvp of jvp": lambda f: (
        lambda a: jvp(lambda b: jvp(lambda c: jvp(f, (c,), (a,))[1], (b,), (a,))[1], (a,), (a,))[1]
    ),
    "grad of jvp of jvp": lambda f: grad(
        lambda a: jvp(lambda b: jvp(f, (b,), (torch.ones(2, dtype=a.dtype),))[1], (a,), (a,))[1]
    ),
    "jacfwd thrice": lambda f: jacfwd(jacfwd(jacfwd(f))),
    "jacrev thrice": lambda f: jacrev(jacrev(jacrev(f))),
}


@pytest.mark.filterwarnings("ignore:a third derivative")
@pytest.mark.parametrize("extra", ["causal", "relative"])
@pytest.mark.parametrize("name", THIRD)
def test_third_derivatives_in_every_mode(name, extra, monkeypatch):
    x, g = qkv(B=1, H=2, Lq=3, Lk=4), [draw(*t.shape, seed=9) for t in qkv(B=1, H=2, Lq=3, Lk=4)]
    x, along = [t.detach() for t in x], draw(2, 6, seed=3)

    def f(a):
        table = RelativeBias(a[0] * along) if extra == "relative" else None
        o = cs.sdpa(*(t + a[i % 2] * s for i, (t, s) in enumerate(zip(x, g, strict=True))), score_bias=table)
        return o.sin().sum()

    results = []
    for way in ("kernels", "plain"):
        monkeypatch.setattr(entry, "PATH", way)
        results.append(THIRD[name](f)(torch.tensor([0.3, -0.2], dtype=torch.float64)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mask", ["causal", "trained", "dropout", "key lengths"])
def test_compile_keeps_one_graph(mask, backend, path):
    x = [*qkv(Lq=6, Lk=6), draw(6, 6, seed=6).requires_grad_()]
    options = {"is_causal": mask == "causal", "dropout_p": 0.5 * (mask == "dropout")}
    if mask == "key lengths":
        options["key_lengths"] = torch.tensor([2, 6])

    def loss(q, k, v, bias):
        o = cs.sdpa(q, k, v, bias if mask == "trained" else None, **options)
        return o.sin().sum() + bias.square().sum()

    torch._dynamo.reset()
    results = []
    for f in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        torch.manual_seed(2)
        first = torch.autograd.grad(f(*x), x, create_graph=backend == "eager")
        results.append(first)
        if backend == "eager":  # AOTAutograd, behind all others, has no double backward
            results[-1] += torch.autograd.grad(sum(t.square().sum() for t in first), x)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["jvp", "grad of grad", "jvp of grad"])
def test_transforms_inside_of_compile(name, path):
    x = tuple(t.detach() for t in qkv())

    def f(*x):
        return cs.sdpa(*x).sin().sum()

    made = {
        "jvp": lambda *x: jvp(f, x, x)[1],
        "grad of grad": grad(lambda *x: grad(f)(*x).square().sum()),
        "jvp of grad": lambda *x: jvp(grad(f), x, x)[1],
    }[name]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(made, fullgraph=True, backend="aot_eager")(*x), made(*x))


def test_operators_pass_the_checks_of_pytorch():
    q, k, v = qkv(B=1, H=2, Lq=3, Lk=4)
    bias = draw(1, 2, 3, 4, seed=4).requires_grad_()
    options = (None, False, None, 0.5, 0.0)
    given = q, k, v, bias, None, None, None
    torch.library.opcheck(torch.ops.curvescope.attention, (*given, *options))
    o, lse = (t.detach() for t in torch.ops.curvescope.attention(*given, *options))
    do = draw(*o.shape, seed=6).requires_grad_()
    wants = [True, False]
    torch.library.opcheck(torch.ops.curvescope.attention_backward, (*given, o, lse, do, *options, wants))


def test_per_example_derivatives_by_vmap_have_their_own_bias(path):
    x, bias = [t.detach() for t in qkv(B=4, H=2, Lq=5, Lk=6)], draw(5, 6, seed=8)

    def loss(q, k, v, bias):
        return cs.sdpa(q, k, v, bias).sin().sum()

    found = vmap(grad(loss, argnums=3), in_dims=(0, 0, 0, None))(*x, bias)
    want = torch.stack([grad(loss, argnums=3)(*(t[i] for t in x), bias) for i in range(4)])
    torch.testing.assert_close(found, want)


def test_a_mask_and_lengths_may_be_batched_by_vmap(path):
    x = [t.detach() for t in qkv(B=3, H=2, Lq=5, Lk=6)]
    mask, lengths = draw(3, 2, 5, 6, seed=8) > 0, torch.tensor([6, 2, 4])
    found = vmap(lambda q, k, v, m, n: cs.sdpa(q, k, v, m, key_lengths=n))(*x, mask, lengths)
    torch.testing.assert_close(found, cs.sdpa(*x, mask, key_lengths=lengths))


def test_grouped_heads_may_differ_for_keys_and_values(path):
    q, k, v = draw(2, 6, 4, 3), draw(2, 3, 5, 3, seed=1), draw(2, 2, 5, 3, seed=2)
    x = [t.requires_grad_() for t in (q, k, v)]
    found, want = (torch.autograd.grad(f(*x, enable_gqa=True).sin().sum(), x) for f in (cs.sdpa, torchs))
    torch.testing.assert_close(found, want)


def test_long_sequences_never_hold_all_scores(monkeypatch):
    """4,096 queries and keys: scores would be 64 MiB, and no single tensor that is made has 8."""
    x = [draw(1, 1, 4096, 8, seed=i).float().requires_grad_() for i in range(3)]
    table = draw(1, 8191, seed=4).float().requires_grad_()
    with Largest() as made:
        o = cs.sdpa(*x, is_causal=True, score_bias=RelativeBias(table))
        first = torch.autograd.grad(o.sum(), [*x, table], create_graph=True)
        torch.autograd.grad(first[0].sum() + first[3].sum(), [*x, table])
        jvp(lambda *x: jvp(cs.sdpa, x, x)[1], tuple(t.detach() for t in x), tuple(t.detach() for t in x))
    assert made.bytes < 8 << 20


class Largest(TorchDispatchMode):
    """The largest tensor that an operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(found):
            if isinstance(t, Tensor) and t._base is None:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"third_order": "no"}, UsageError, "'no'"),
        ({"dropout_p": 1.5}, UsageError, "1.5"),
        ({"window": 0}, UsageError, "window"),
        ({"is_causal": True, "attn_mask": torch.zeros(5, 7)}, RuntimeError, "is_causal"),
        ({"attn_mask": torch.zeros(3, 4)}, ShapeError, r"\(3, 4\)"),
        ({"score_bias": RelativeBias(torch.zeros(1, 3))}, ShapeError, r"\(1, 3\)"),
        ({"key_lengths": torch.tensor([0.5, 1.0])}, ShapeError, "float"),
        ({"attn_mask": torch.ones(5, 7).long()}, RuntimeError, "int64"),
        ({"key": torch.zeros(2, 2, 7, 9).double()}, ShapeError, "9"),
        ({"key": torch.zeros(2, 2, 7, 4)}, ShapeError, "float32"),
        ({"query": torch.zeros(4).double()}, ShapeError, r"\(4,\)"),
    ],
)
def test_calls_that_do_not_fit_say_so(change, error, match):
    named = dict(zip(("query", "key", "value"), qkv(), strict=True))
    with pytest.raises(error, match=match):
        cs.sdpa(**(named | change))


def test_two_ranks_train_as_one():
    script = Path(__file__).parent / "sdpa_ranks.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines == [f"{wrap} {penalty} 8 True" for wrap in ("ddp", "fsdp2") for penalty in (False, True)], (
        done.stderr
    )


@pytest.mark.parametrize("causal", [False, True])
def test_a_derivative_that_is_recorded_once_is_that_of_every_direction(causal, path):
    x, t = (tuple(t.detach() for t in qkv(B=b)) for b in (2, 2))
    _, linear = torch.func.linearize(lambda *x: cs.sdpa(*x, is_causal=causal), *x)
    t = tuple(s.flip(0) for s in t)
    torch.testing.assert_close(linear(*t), jvp(lambda *x: torchs(*x, is_causal=causal), x, t)[1])


@pytest.mark.parametrize("layout", ["contiguous", "flipped"])
@pytest.mark.parametrize("shape", [(2, 1, 3, 5, 4, 3), (1, 2, 17, 8, 1, 1)])
def test_dual_numbers_go_through_a_backward_in_every_layout(shape, layout, path):
    B, H, Lq, Lk, d, dv = shape
    x = [t.detach() for t in qkv(B, H, Lq, Lk, d, dv)]
    x = [t.mT.contiguous().mT.requires_grad_() if layout == "flipped" else t.requires_grad_() for t in x]
    do, moves = draw(B, H, Lq, dv, seed=5), [draw(*t.shape, seed=6) for t in x]
    with forward_ad.dual_level():
        made = [forward_ad.make_dual(*pair) for pair in zip(x, moves, strict=True)]
        first = torch.autograd.grad(cs.sdpa(*made, is_causal=True), made, do, create_graph=True)
        found = [forward_ad.unpack_dual(t).tangent for t in first]
    pull = lambda *x: torch.func.vjp(lambda *x: torchs(*x, is_causal=True), *x)[1](do)  # noqa: E731
    torch.testing.assert_close(tuple(found), jvp(pull, tuple(x), tuple(moves))[1])


def test_an_output_may_be_changed_in_place():
    x = [t.detach().float().requires_grad_() for t in qkv()]
    o = cs.sdpa(*x, window=3)
    residual = o.detach().clone()
    o += residual
    torch.testing.assert_close(o, 2 * residual)


def test_tensors_without_numbers_have_shapes(path):
    x = [torch.empty(t.shape, device="meta", requires_grad=True) for t in qkv()]
    o = cs.sdpa(*x)
    assert [t.shape for t in torch.autograd.grad(o, x, o)] == [t.shape for t in x]


def test_heads_of_width_zero_take_the_mean_of_the_values(path):
    x = [draw(1, 2, 3, 0), draw(1, 2, 5, 0), draw(1, 2, 5, 3)]
    torch.testing.assert_close(cs.sdpa(*x), torchs(*x))
    torch.testing.assert_close(cs.sdpa(*x), x[2].mean(2, keepdim=True).expand(1, 2, 3, 3))


@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize("changed", range(4))
def test_an_input_that_is_changed_before_the_backward_never_gives_a_wrong_number(changed, order, path):
    x = [*qkv(Lk=5), draw(5, 5, seed=8).requires_grad_()]

    def derivatives(attention) -> tuple[Tensor, ...]:
        made = [t * 1 for t in x]
        first = torch.autograd.grad(attention(*made).pow(2).sum(), x, create_graph=order == "second")
        if order == "first":
            return first
        return torch.autograd.grad(sum(t.pow(2).sum() for t in first), x)

    def changing(*made: Tensor) -> Tensor:
        o = cs.sdpa(*made)
        with torch.no_grad():
            made[changed].add_(1)
        return o

    with contextlib.suppress(RuntimeError):  # most often a tensor is missed: that is an error, and no number
        torch.testing.assert_close(derivatives(changing), derivatives(torchs))


def test_key_lengths_may_be_counted_up_before_the_backward(monkeypatch):
    monkeypatch.setattr(entry, "PATH", "kernels")
    monkeypatch.setattr(blockwise, "KEEP_BYTES", 0)  # long sequences make their weights again
    x, lengths = qkv(), torch.tensor([3, 5])
    want = second(cs.sdpa(*x, key_lengths=lengths.clone()), x)
    o = cs.sdpa(*x, key_lengths=lengths)
    lengths += 2
    for a, b in zip(second(o, x), want, strict=True):
        torch.testing.assert_close(a, b)


def second(o: Tensor, x: list[Tensor]) -> tuple[Tensor, ...]:
    first = torch.autograd.grad(o.pow(2).sum(), x, create_graph=True)
    return *first, *torch.autograd.grad(sum(g.pow(2).sum() for g in first), x)


@pytest.mark.filterwarnings("ignore:a third derivative")
@pytest.mark.parametrize("moved", [(0,), (0, 1), (2,), (0, 1, 2)])
@pytest.mark.parametrize("mask", [{}, {"score_bias": draw(2, 1, 7, seed=4)}])
def test_third_derivatives_where_not_all_inputs_require_a_gradient(moved, mask, path):
    x = [t.detach() for t in qkv()]
    some = [x[i].requires_grad_() for i in moved]

    def third(attention) -> Tensor:
        y = attention().pow(3).sum()
        for power in (2, 1):
            y = sum(g.pow(power).sum() for g in torch.autograd.grad(y, some, create_graph=True))
        return torch.cat([g.flatten() for g in torch.autograd.grad(y, some)])

    added = mask.get("score_bias", torch.zeros(()).double())
    torch.testing.assert_close(third(lambda: cs.sdpa(*x, **mask)), third(lambda: written(*x, added)))
