"""Sweeps over the logits of a linear head, a slice at a time; `function.py` has the formulas.

Autograd records nothing in this module. Weights multiply h. Sums over terms are accumulated in place in at
least single precision, products are left to the matrix library, and W is used as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.kernels.backends import Tensors
from curvescope.kernels.cross_entropy.rows import (
    RowStatistics,
    curve_rows,
    loss_rows,
    softmax_rows,
    subtract_targets,
)
from curvescope.kernels.tensors import given, widen

SLICE_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}  # on a CPU a slice fits into the cache
ALIGN = 64  # outputs are rounded up to this on a GPU, and so are rows of a slice


class SlicePlan(NamedTuple):
    """Division of the logits into slices, and the backend of each slice."""

    smoothing: float
    chunk: int
    triton: bool

    def slices(self, T: int) -> list[slice]:
        """Rows of each slice."""
        return [slice(start, min(start + self.chunk, T)) for start in range(0, T, self.chunk)]

    def buffer(self, W: Tensor, w: Tensor) -> Tensor:
        """Buffer for the logits of one slice, (rows, V); on a GPU its row stride is a multiple of `ALIGN`."""
        rows, V = min(self.chunk, max(w.shape[0], 1)), W.shape[0]
        return w.new_empty(rows, V + (-V % ALIGN if self.triton else 0))[:, :V]

    def laid_out(self, t: Tensor | None) -> Tensor | None:
        """Make the rows of t, (V, d) or (V,), contiguous within `parts`; on a CPU return t unchanged."""
        return t.contiguous() if self.triton and t is not None else t

    def parts(self, V: int) -> list[slice]:
        """Split the outputs on a GPU into a multiple of `ALIGN` and the remaining ones.

        With other numbers a matrix product has a third of the speed. Zero padding would have the same effect,
        but need the memory of W twice: for W and for its direction.
        """
        cut = V // ALIGN * ALIGN if self.triton else V
        return [part for part in (slice(0, cut), slice(cut, V)) if part.start < part.stop]


def make_plan(h: Tensor, W: Tensor, smoothing: float, chunk: int | None, triton: bool) -> SlicePlan:
    """Plan slices of nearly equal size, up to the limit for this kind of device."""
    if chunk is not None:
        if chunk < 1:
            raise UsageError(f"expected a chunk of at least one row, got {chunk}")
        return SlicePlan(smoothing, chunk, triton)
    T = max(h.shape[0], 1)
    size = torch.finfo(widen(h[:0]).dtype).bits // 8
    max_rows = max(SLICE_BYTES.get(h.device.type, 256 * 2**20) // (max(W.shape[0], 1) * size), 1)
    num_rows = -(-T // -(-T // max_rows))
    rounded = -(-num_rows // ALIGN) * ALIGN
    return SlicePlan(smoothing, min(rounded if rounded <= max_rows else num_rows, T), triton)


class Sums:
    """Sums over slices Z (C, V), for k directions: Z A in its rows (k, T, d), Zᵀ B (k, V, d), Zᵀ c (k, V).

    `selected` tells which of the three are computed.
    """

    def __init__(self, plan: SlicePlan, k: int, selected: Sequence[bool], h: Tensor, W: Tensor, w: Tensor):
        self._parts = plan.parts(W.shape[0])
        self.Z_A = torch.zeros(k, *h.shape, dtype=w.dtype, device=h.device) if selected[0] else None
        self.Zt_B = _zeros_like(W, k, w.dtype) if selected[1] else None
        self.Zt_c = w.new_zeros(k, W.shape[0]) if selected[2] else None

    def add(
        self, j: int, rows: slice, Z: Tensor, A: Tensor | None, B: Tensor | None, c: Tensor | None
    ) -> None:
        """Add one slice of direction j; a factor of None adds nothing."""
        for part in self._parts:
            if self.Z_A is not None and A is not None:
                _multiply(self.Z_A[j, rows], Z[:, part], A[part])
            if self.Zt_B is not None and B is not None:
                _multiply(self.Zt_B[j, part], Z[:, part].t(), B[rows])
        if self.Zt_c is not None and c is not None:
            self.Zt_c[j].add_(Z.t() @ c[rows])

    def weighted(self, w: Tensor, dtype: torch.dtype) -> list[Tensor | None]:
        """Return w∘(Z A), Zᵀ B, Zᵀ c; None if not selected."""
        if self.Z_A is not None:
            self.Z_A.mul_(w[:, None])
        return [None if t is None else t.to(dtype) for t in (self.Z_A, self.Zt_B, self.Zt_c)]


def sweep(
    plan: SlicePlan, wants: Sequence[bool], h: Tensor, W: Tensor, b: Tensor | None, targets: Tensor, w: Tensor
) -> Tensors:
    """Return L, three statistics of the rows, and w∘(D W), Dᵀ(w∘h), Dᵀw; None if not selected."""
    W = given(plan.laid_out(W))
    losses, buffer = torch.empty_like(w), plan.buffer(W, w)
    statistics = RowStatistics(
        torch.empty_like(w), torch.empty_like(w, dtype=torch.int64), torch.empty_like(w)
    )
    sums, wh = Sums(plan, 1, wants, h, W, w), _weighted(w, h) if wants[1] else None
    for rows in plan.slices(h.shape[0]):
        z = _logits(plan, buffer, rows, [(h, W)], b)
        losses[rows], slice_statistics = loss_rows(
            z, targets[rows], plan.smoothing, gradient=any(wants), triton=plan.triton
        )
        for statistic, part in zip(statistics, slice_statistics, strict=True):
            statistic[rows] = part
        sums.add(0, rows, z, W, wh, w)
    gradients = (None if t is None else t[0] for t in sums.weighted(w, h.dtype))
    return ((w * losses).sum().to(h.dtype), *statistics, *gradients)


@torch.no_grad()
def probabilities(plan: SlicePlan, h: Tensor, W: Tensor, b: Tensor | None, lse: Tensor) -> Tensor | None:
    """Return p (T, V) to cache between products on a CPU, or None if it exceeds one slice."""
    if h.device.type != "cpu" or plan.triton or h.dtype != lse.dtype or h.shape[0] > plan.chunk:
        return None
    z = h @ W.t() if b is None else torch.addmm(b, h, W.t())
    return z.sub_(lse[:, None]).exp_()


def second_products(
    plan: SlicePlan, part: str, needs: Sequence[bool], constants: Tensors, directions: Tensors
) -> Tensors:
    """hh (k, T, d), hW (k, V, d), hb (k, V), None where not needed; `part` is hessian, functional or ggn."""
    h, W, b, targets, w, lse, top, slope, p = constants
    h, W, targets, w, lse, top, slope = map(given, (h, W, targets, w, lse, top, slope))
    W = given(plan.laid_out(W))
    along, curved = _one_by_one(plan, directions), part != "functional"
    sums, wh = Sums(plan, len(along), needs, h, W, w), _weighted(w, h) if needs[1] and curved else None
    bends = _bends(needs, w, along) if part != "ggn" else []
    room, dot_room = plan.buffer(W, w), plan.buffer(W, w) if curved else None
    for rows in plan.slices(h.shape[0]):
        if p is None:
            z = _logits(plan, room, rows, [(h, W)], b)
        else:
            z = room.copy_(p) if bends else p
        if dot_room is not None:
            for j, (gh, gW, gb) in enumerate(along):
                dot = _logits(plan, dot_room, rows, [(gh, W), (h, gW)], gb)
                fresh = lse[rows] if j == 0 and p is None else None
                curve_rows(z, dot, top[rows], fresh, triton=plan.triton)
                sums.add(j, rows, dot, W, wh, w)
        elif p is None:
            softmax_rows(z, lse[rows])
        if bends:
            subtract_targets(z, targets[rows], slope[rows], plan.smoothing)
        for j, (gW, wgh) in enumerate(bends):
            sums.add(j, rows, z, gW, wgh, None)
    return sums.weighted(w, h.dtype)


def _one_by_one(plan: SlicePlan, directions: Tensors) -> list[Tensors]:
    """gh (T, d), gW (V, d), gb (V,) of each of the k directions."""
    k = next(t.shape[0] for t in directions if t is not None)
    each = zip(*([None] * k if t is None else t.unbind() for t in directions), strict=True)
    return [(gh, plan.laid_out(gW), gb) for gh, gW, gb in each]


def _bends(needs: Sequence[bool], w: Tensor, along: list[Tensors]) -> list[Tensors]:
    """gW and w∘gh of each direction, by which D is multiplied for hh and hW; [] if neither is needed."""
    found: list[Tensors] = [
        (gW if needs[0] else None, _weighted(w, gh) if needs[1] and gh is not None else None)
        for gh, gW, _ in along
    ]
    return found if any(t is not None for t in found[0]) else []


def _logits(
    plan: SlicePlan,
    room: Tensor,
    rows: slice,
    products: Sequence[tuple[Tensor | None, Tensor | None]],
    b: Tensor | None,
) -> Tensor:
    """z = Σ x Aᵀ + b for some rows of the x, over pairs (x, A), written into `room`; None counts as zero."""
    z, begun = room[: rows.stop - rows.start], False
    for x, A in products:
        if x is not None and A is not None:
            for part in plan.parts(z.shape[1]):
                _multiply(z[:, part], x[rows], A[part].t(), add=begun)
            begun = True
    if b is not None:
        z.add_(b) if begun else z.copy_(b)
    return z


def _multiply(out: Tensor, A: Tensor, B: Tensor, *, add: bool = True) -> None:
    """out += A B, or out = A B: the product in B's precision if that is lower, the sum in out's."""
    if out.dtype == A.dtype == B.dtype:
        out.addmm_(A, B, beta=1 if add else 0)
        return
    low = B.dtype if A.dtype == out.dtype else A.dtype
    product = A.to(low) @ B.to(low)
    out.add_(product) if add else out.copy_(product)


def _weighted(w: Tensor, h: Tensor) -> Tensor:
    """w∘h, in the precision of h."""
    return (w[:, None] * h).to(h.dtype)


def _zeros_like(W: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Zeros (k, V, d), each laid in memory as W is."""
    V, d = W.shape
    if W.stride(0) < W.stride(1):
        return torch.zeros(k, d, V, dtype=dtype, device=W.device).transpose(1, 2)
    return torch.zeros(k, V, d, dtype=dtype, device=W.device)
