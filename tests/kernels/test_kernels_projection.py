"""One pass of Gram–Schmidt in one reading of the basis, against float64."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, draw, needs_triton

from curvescope.core.errors import ShapeError
from curvescope.kernels.projection import in_triton, subtract_projection

SHAPES = [(1000, 1, 0), (1000, 40, 0), (777, 33, 5), (130, 3, 64), (5, 2, 0)]


def given(n: int, near: int, far: int, device: str = "cpu"):
    """A strided vector, rows with a gap between them, rows in bfloat16, and coefficients."""
    W, Q, F, c = draw(0, (n, 2), (near, n + 3), (far, n), (near + far,))
    rows = F.to(device, torch.bfloat16) if far else None
    return W.to(device, torch.float32)[:, 1], Q.to(device, torch.float32)[:, :n], rows, c.to(device)


def check(w, near, far, c, out, sums) -> None:
    """What was found is what float64 finds, to rounding in float32."""
    Q = near.double() if far is None else torch.cat([near.double(), far.double()])
    x = w.double() - Q.T @ c
    size = float(w.double().norm() + (Q * c[:, None]).norm())
    assert float((out - x).norm()) < 1e-6 * size
    assert float(sums[0]) == pytest.approx(float(x.square().sum()), rel=1e-5)
    assert float((sums[1:] - Q @ x).abs().max()) < 1e-6 * size * float(Q.norm(dim=1).max())
    assert sums.dtype == torch.float64


@pytest.mark.parametrize(("n", "near", "far"), SHAPES)
def test_in_torch(n, near, far):
    w, Q, F, c = given(n, near, far)
    out = torch.empty(n)
    check(w, Q, F, c, out, subtract_projection(w, Q, F, c, out=out))
    assert not in_triton(w, Q)


@needs_triton
@pytest.mark.parametrize(("n", "near", "far"), SHAPES)
def test_triton(n, near, far):
    w, Q, F, c = given(n, near, far, DEVICE)
    out = torch.empty(n, device=DEVICE)
    sums = subtract_projection(w, Q, F, c, out=out, backend="triton")
    check(w, Q, F, c, out, sums)
    own = w.clone()
    assert torch.equal(
        subtract_projection(own, Q, F, c, out=own, backend="triton"), sums
    )  # in place, and the same bits
    assert torch.equal(own, out)


def test_wrong_coefficients_and_rows():
    w, Q, _, c = given(20, 3, 0)
    with pytest.raises(ShapeError, match="3 coefficients"):
        subtract_projection(w, Q, None, c[:2], out=torch.empty(20))
    with pytest.raises(ShapeError, match="contiguous rows"):
        subtract_projection(w, torch.ones(20, 3).T, None, c, out=torch.empty(20))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("m", "far"), [(1, 0), (100, 0), (300, 0), (7, 60)])
def test_long_rows_on_the_card(m, far):
    n = 2**23 + 16 * 1001 + 5
    source = torch.Generator("cuda").manual_seed(0)
    Q = torch.randn(m, n, generator=source, device="cuda").div_(n**0.5)
    F = torch.randn(far, n, generator=source, device="cuda").div_(n**0.5).bfloat16() if far else None
    w = torch.randn(n, generator=source, device="cuda").div_(n**0.5)
    rows = [*Q, *([] if F is None else F)]
    c = torch.stack([q.double() @ w.double() for q in rows])
    out = torch.empty_like(w)
    sums = subtract_projection(w, Q, F, c, out=out)
    x = w.double()
    for q, by in zip(rows, c, strict=True):
        x = x - by * q.double()
    assert float((out - x).norm()) < 1e-6
    assert float(sums[0]) == pytest.approx(float(x.square().sum()), rel=1e-6)
    want = torch.stack([q.double() @ out.double() for q in rows])
    assert float((sums[1:] - want).abs().max()) < 1e-8
