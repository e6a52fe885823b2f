"""The Triton kernels of attention against plain attention in float64.

They run on a CUDA device, or with TRITON_INTERPRET=1 (set before Python starts) by Triton's interpreter.
"""

from __future__ import annotations

import os

import pytest
import torch
from kernels_attention_plain import plain
from torch import Tensor

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

from curvescope.kernels.attention import attention, triton_tiles  # noqa: E402

pytestmark = pytest.mark.cuda
DEVICE = "cpu" if INTERPRETED else "cuda"
BOUND = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
CASES = {  # options, then B, H, Hkv, Lq, Lk, d, d_v
    "full": ({}, (2, 2, 2, 40, 55, 16, 16)),
    "causal": ({"causal": True}, (1, 2, 2, 70, 70, 16, 16)),
    "odd sizes": ({"causal": True, "scale": 0.4}, (1, 2, 1, 45, 45, 20, 12)),
    "groups": ({"causal": True}, (1, 4, 2, 41, 41, 16, 32)),
    "window": ({"causal": True, "window": 20}, (1, 2, 2, 70, 70, 16, 16)),
    "lengths": ({"lengths": torch.tensor([0, 37])}, (2, 2, 1, 40, 50, 16, 16)),
    "all": ({"causal": True, "window": 9, "lengths": torch.tensor([5, 40])}, (2, 1, 1, 50, 50, 16, 16)),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Loop bounds are arrays of one entry, which Triton 3.6's interpreter and NumPy 2.4 cannot count by."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(params=[(32, 16), (16, 32)])
def tiles(request, monkeypatch):
    """Tiles so small that every loop takes several turns."""
    small = triton_tiles.Tile(*request.param, 4, 1)
    made = {name: dict.fromkeys(table, small) for name, table in triton_tiles.TILES.items()}
    monkeypatch.setattr(triton_tiles, "TILES", made)


def inputs(B, H, Hkv, Lq, Lk, d, dv) -> list[Tensor]:
    """q, k, v, dO, gQ, gK, gV, laid out by token as in a model."""
    source = torch.Generator().manual_seed(0)
    shapes = [(B, Lq, H, d), (B, Lk, Hkv, d), (B, Lk, Hkv, dv), (B, Lq, H, dv)]
    shapes += shapes[:3]
    return [torch.randn(s, generator=source, dtype=torch.float64).transpose(1, 2) for s in shapes]


def derivatives(function, made: list[Tensor], dtype, device, chosen=(0, 1, 2), **options) -> list[Tensor]:
    q, k, v, do, *g = [x.to(device, dtype) for x in made]
    leaves = [x.requires_grad_() for x in (q, k, v, do)]
    o = function(q, k, v, **options)
    first = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
    outputs, directions = [first[i] for i in chosen], [g[i] for i in chosen]
    second = torch.autograd.grad(outputs, leaves, directions, materialize_grads=True)
    return [x.detach().double().cpu() for x in (o, *first, *second)]


def fused(*args, **options) -> Tensor:
    options = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in options.items()}
    return attention(*args, backend="triton", **options)


def check(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for one, two in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        assert (one - two).norm() <= bound * max(float(two.norm()), 1e-3)


@pytest.mark.parametrize("case", CASES)
def test_derivatives_in_single_precision(case, tiles):
    options, shape = CASES[case]
    made = [x.float().double() for x in inputs(*shape)]
    expected = derivatives(plain, made, torch.float64, "cpu", **options)
    check(derivatives(fused, made, torch.float32, DEVICE, **options), expected, BOUND[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_derivatives_in_half_precision(dtype, tiles):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no products in bfloat16")
    made = [x.to(dtype).double() for x in inputs(1, 2, 1, 41, 41, 16, 16)]
    expected = derivatives(plain, made, torch.float64, "cpu", causal=True)
    check(derivatives(fused, made, dtype, DEVICE, causal=True), expected, BOUND[dtype])


@pytest.mark.parametrize("chosen", [(0,), (1,), (2,), (0, 2)])
def test_directions_may_be_missing(chosen, tiles):
    made = inputs(1, 2, 1, 35, 35, 16, 16)
    expected = derivatives(plain, made, torch.float64, "cpu", chosen, causal=True)
    check(derivatives(fused, made, torch.float32, DEVICE, chosen, causal=True), expected, 1e-5)


def test_many_directions_at_once(tiles):
    made = [x.to(DEVICE, torch.float32) for x in inputs(1, 2, 1, 35, 35, 16, 16)]
    leaves = [x.requires_grad_() for x in made[:4]]
    g = [torch.stack([x, x.flip(3)]) for x in made[4:]]
    first = torch.autograd.grad(fused(*leaves[:3], causal=True), leaves[:3], leaves[3], create_graph=True)
    many = torch.autograd.grad(first, leaves, g, is_grads_batched=True, retain_graph=True)
    for j in range(2):
        one = torch.autograd.grad(first, leaves, [x[j] for x in g], retain_graph=True)
        torch.testing.assert_close([x[j] for x in many], list(one))


def test_forward_mode_and_first_order_only(tiles):
    made = inputs(1, 2, 2, 35, 35, 16, 16)
    expected = torch.func.jvp(lambda *y: plain(*y, causal=True), tuple(made[:3]), tuple(made[4:]))[1]
    x, t = ([y.to(DEVICE, torch.float32) for y in part] for part in (made[:3], made[4:]))
    found = torch.func.jvp(lambda *y: fused(*y, causal=True), tuple(x), tuple(t))[1]
    u = torch.zeros_like(found, requires_grad=True)
    leaves = [y.requires_grad_() for y in x]
    first = torch.autograd.grad(fused(*leaves, causal=True, second_order=False), leaves, u, create_graph=True)
    (again,) = torch.autograd.grad(first, u, t)
    check([found.double().cpu(), again.double().cpu()], [expected, expected], 1e-5)


def test_every_head_size_has_a_tile():
    for name in triton_tiles.TILES:
        for dtype in BOUND:
            for head in (1, 16, 40, 64, 80, 128, 192, 256):
                tile = triton_tiles.tile_of(name, dtype, head)
                assert min(tile.rows, tile.cols) >= 16


def test_double_precision_falls_back():
    x = inputs(1, 1, 1, 5, 5, 3, 3)[:3]
    torch.testing.assert_close(attention(*x, backend="triton"), plain(*x))
