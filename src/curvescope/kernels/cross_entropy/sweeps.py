"""Sweeps over the logits of a linear head, a slice at a time; `cross_entropy_head.py` has the formulas.

Nothing here is recorded by autograd. Weights stand at h. Sums over terms are accumulated in place in at least
single precision, products are left to the matrix library, and W is used as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.kernels.backends import Tensors
from curvescope.kernels.norms.function import given, widen

SLICE_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}  # a CPU reads a slice again from its cache
ALIGN = 64  # outputs are rounded up to this on a GPU, and so are rows of a slice


class Plan(NamedTuple):
    """How the logits are cut."""

    smoothing: float
    chunk: int
    triton: bool


def make_plan(h: Tensor, W: Tensor, smoothing: float, chunk: int | None, triton: bool) -> Plan:
    """Slices of nearly equal size, none above the size for this kind of device."""
    if chunk is not None:
        if chunk < 1:
            raise UsageError(f"expected a chunk of at least one row, got {chunk}")
        return Plan(smoothing, chunk, triton)
    T = max(h.shape[0], 1)
    size = torch.finfo(widen(h[:0]).dtype).bits // 8
    most = max(SLICE_BYTES.get(h.device.type, 256 * 2**20) // (max(W.shape[0], 1) * size), 1)
    even = -(-T // -(-T // most))
    rounded = -(-even // ALIGN) * ALIGN
    return Plan(smoothing, min(rounded if rounded <= most else even, T), triton)


def sweep(
    plan: Plan, wants: Any, h: Tensor, W: Tensor, b: Tensor | None, targets: Tensor, w: Tensor
) -> Tensors:
    """L, lse (T,), and w∘(D W), Dᵀ(w∘h), Dᵀw, None where not wanted."""
    T = h.shape[0]
    lse, losses = torch.empty_like(w), torch.empty_like(w)
    V, W, b = W.shape[0], given(_padded(W, plan)), _padded(b, plan)
    dh = torch.zeros(h.shape, dtype=w.dtype, device=h.device) if wants[0] else None
    dW = _stack_like(W, 1, w.dtype)[0] if wants[1] else None
    db = w.new_zeros(W.shape[0]) if wants[2] else None
    wh = _weighted(w, h) if wants[1] else None
    buffer = _slice(plan, W, w)
    for rows in _chunks(T, plan.chunk):
        z = buffer[: rows.stop - rows.start]
        _logits(z, h[rows], W, b)
        lse[rows], losses[rows] = _loss_rows(plan, z[:, :V], targets[rows], any(wants))
        if dh is not None:
            _multiply(dh[rows], z, W)
        if dW is not None:
            _multiply(dW, z.t(), given(wh)[rows])
        if db is not None:
            db += z.t() @ w[rows]
    if dh is not None:
        dh.mul_(w[:, None])
    cast = (None if t is None else t.to(h.dtype) for t in (dh, _cut(dW, V), _cut(db, V)))
    return ((w * losses).sum().to(h.dtype), lse, *cast)


@torch.no_grad()
def probabilities(plan: Plan, h: Tensor, W: Tensor, b: Tensor | None, lse: Tensor) -> Tensor | None:
    """p (T, V) to keep between products on a CPU, or None where it is more than one slice."""
    if h.device.type != "cpu" or plan.triton or h.dtype != lse.dtype or h.shape[0] > plan.chunk:
        return None
    z = h @ W.t() if b is None else torch.addmm(b, h, W.t())
    return z.sub_(lse[:, None]).exp_()


def second_products(plan: Plan, part: str, needs: Any, constants: Tensors, directions: Tensors) -> Tensors:
    """hh (k, T, d), hW (k, V, d), hb (k, V), None where not needed; `part` is hessian, functional or ggn."""
    h, W, b, targets, w, lse, p = constants
    h, W, targets, w, lse = given(h), given(W), given(targets), given(w), given(lse)
    k = next(t.shape[0] for t in directions if t is not None)
    V, W, b = W.shape[0], given(_padded(W, plan)), _padded(b, plan)
    gh, gW, gb = directions[0], _padded(directions[1], plan, axis=1), _padded(directions[2], plan, axis=1)
    directions = (gh, gW, gb)
    hh = torch.zeros(k, *h.shape, dtype=w.dtype, device=h.device) if needs[0] else None
    hW = _stack_like(W, k, w.dtype) if needs[1] else None
    hb = w.new_zeros(k, W.shape[0]) if needs[2] else None
    wh = _weighted(w, h) if needs[1] else None
    wgh = _weighted(w, gh) if needs[1] and gh is not None and part != "ggn" else None
    bent = part != "ggn" and ((hh is not None and gW is not None) or wgh is not None)
    buffer, dots = _slice(plan, W, w), _slice(plan, W, w) if part != "functional" else None
    for rows in _chunks(h.shape[0], plan.chunk):
        z = buffer[: rows.stop - rows.start]
        if p is None:
            _logits(z, h[rows], W, b)
        elif bent:
            z.copy_(p[rows])
        else:
            z = p[rows]
        if dots is not None:
            for j in range(k):
                dot = dots[: z.shape[0]]
                _logits_along(dot, [None if t is None else t[j] for t in directions], rows, h, W)
                _curve_rows(plan, z[:, :V], dot[:, :V], lse[rows] if j == 0 and p is None else None)
                _accumulate(j, rows, dot, (hh, hW, hb), W, wh, w)
        elif p is None:
            z[:, :V].sub_(lse[rows, None]).exp_()
        if bent:
            _subtract_targets(plan, z[:, :V], targets[rows])
            for j in range(k):
                left = None if gW is None else gW[j]
                _accumulate(j, rows, z, (hh, hW, None), left, None if wgh is None else wgh[j], w)
    if hh is not None:
        hh.mul_(w[:, None])
    found = (hh, _cut(hW, V, axis=1), _cut(hb, V, axis=1))
    return [None if t is None else t.to(h.dtype) for t in found]


def _accumulate(
    j: int, rows: slice, z: Tensor, into: Tensors, W: Tensor | None, wh: Tensor | None, w: Tensor
) -> None:
    """Add z W, zᵀ wh and zᵀ w to entry j of hh, hW and hb; W or wh may be missing."""
    hh, hW, hb = into
    if hh is not None and W is not None:
        _multiply(hh[j, rows], z, W)
    if hW is not None and wh is not None:
        _multiply(hW[j], z.t(), wh[rows])
    if hb is not None:
        hb[j] += z.t() @ w[rows]


def _logits(z: Tensor, h: Tensor, W: Tensor, b: Tensor | None) -> None:
    """z = h Wᵀ + b, in place."""
    _multiply(z, h, W.t(), add=False)
    if b is not None:
        z.add_(b)


def _logits_along(z: Tensor, direction: Tensors, rows: slice, h: Tensor, W: Tensor) -> None:
    """z = gh Wᵀ + h gWᵀ + gb, in place."""
    gh, gW, gb = direction
    if gh is not None:
        _multiply(z, gh[rows], W.t(), add=False)
    if gW is not None:
        _multiply(z, h[rows], gW.t(), add=gh is not None)
    if gb is not None:
        z.copy_(gb.expand(z.shape)) if gh is None and gW is None else z.add_(gb)


def _loss_rows(plan: Plan, z: Tensor, targets: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """lse and ℓ of each row; with `gradient` z becomes D."""
    if plan.triton:
        from curvescope.kernels.cross_entropy import triton_kernels

        return triton_kernels.loss_rows(z, targets, plan.smoothing, gradient)
    lse = torch.logsumexp(z, 1)
    losses = lse - (1 - plan.smoothing) * z.gather(1, targets[:, None])[:, 0]
    if plan.smoothing:
        losses = losses - plan.smoothing * z.mean(1)
    if gradient:
        z.sub_(lse[:, None]).exp_()
        _subtract_targets(plan, z, targets)
    return lse, losses


def _curve_rows(plan: Plan, z: Tensor, dot: Tensor, lse: Tensor | None) -> None:
    """`dot` becomes p∘(dot − p·dot); with lse, z are logits and become p, without it they are p."""
    if plan.triton:
        from curvescope.kernels.cross_entropy import triton_kernels

        triton_kernels.curve_rows(z, dot, lse)
        return
    if lse is not None:
        z.sub_(lse[:, None]).exp_()
    dot.mul_(z)
    dot.addcmul_(z, dot.sum(1, keepdim=True), value=-1)


def _subtract_targets(plan: Plan, z: Tensor, targets: Tensor) -> None:
    """p becomes D = p − q."""
    z.scatter_add_(1, targets[:, None], z.new_full((z.shape[0], 1), plan.smoothing - 1))
    if plan.smoothing:
        z.sub_(plan.smoothing / z.shape[1])


def _multiply(out: Tensor, A: Tensor, B: Tensor, *, add: bool = True) -> None:
    """out += A B, or out = A B: in B's precision where that is lower, the sum in out's."""
    if out.dtype == A.dtype == B.dtype:
        out.addmm_(A, B, beta=1 if add else 0)
        return
    low = B.dtype if A.dtype == out.dtype else A.dtype
    product = A.to(low) @ B.to(low)
    out.add_(product) if add else out.copy_(product)


def _weighted(w: Tensor, h: Tensor) -> Tensor:
    """w∘h, in the precision of h."""
    return (w[:, None] * h).to(h.dtype)


def _chunks(T: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, T)) for start in range(0, T, chunk))


def _slice(plan: Plan, W: Tensor, w: Tensor) -> Tensor:
    """Room for a slice of logits."""
    return w.new_empty(min(plan.chunk, max(w.shape[0], 1)), W.shape[0])


def _padded(t: Tensor | None, plan: Plan, *, axis: int = 0) -> Tensor | None:
    """With zeros in the place of outputs that do not exist: matrix products of any V then run at full speed.

    Nothing of these outputs is read: their rows of W are zero, and their columns and rows of results are cut.
    On a CPU it does not pay.
    """
    if t is None or not plan.triton or t.shape[axis] % ALIGN == 0:
        return t
    more = -t.shape[axis] % ALIGN
    return F.pad(t, (0, 0) * (t.dim() - 1 - axis) + (0, more))


def _cut(t: Tensor | None, V: int, *, axis: int = 0) -> Tensor | None:
    return None if t is None else t.narrow(axis, 0, V)


def _stack_like(W: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Zeros (k, V, d), each laid in memory as W is."""
    V, d = W.shape
    if W.stride(0) < W.stride(1):
        return torch.zeros(k, d, V, dtype=dtype, device=W.device).transpose(1, 2)
    return torch.zeros(k, V, d, dtype=dtype, device=W.device)
