"""One step of Gram–Schmidt in one pass over the basis.

For rows Q (m, n), coefficients c (m,) and a vector w (n,),

    x = w − Qᵀ c,     ‖x‖²,     Q x.

A tile's part of these sums needs only the entries of x in the tile. So each tile of Q is read from memory
once, and a second time from the cache. Parts are summed pairwise within a tile in float32, and over tiles in
float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError
from curvescope.kernels.backends import Backend, use_triton


def in_triton(w: Tensor, *rows: Tensor | None) -> bool:
    """Return True if a pass over these rows runs in Triton: float32 vectors on a GPU."""
    return w.dtype == torch.float32 and use_triton("auto", w, *rows)


def subtract_projection(
    w: Tensor, near: Tensor, far: Tensor | None, c: Tensor, *, out: Tensor, backend: Backend = "auto"
) -> Tensor:
    """out = w − Qᵀ c for the rows Q of `near` (m₁, n), then of `far` (m₂, n): (‖out‖², Q out) in float64.

    Args:
        w: (n,), of any stride; `out`, contiguous, may be its memory.
        near, far: Contiguous rows in float32 or bfloat16; the two may differ.
    """
    m = len(near) + (0 if far is None else len(far))
    if c.shape != (m,) or out.stride(0) != 1 or any(q.stride(1) != 1 for q in (near, far) if q is not None):
        raise ShapeError(f"expected {m} coefficients and contiguous rows, got {tuple(c.shape)}")
    if use_triton(backend, w, near, far, out):
        from curvescope.kernels.projection import triton_kernels

        return triton_kernels.subtract_projection(w, near, far, c, out)
    rows = near if far is None else torch.cat([near.to(w.dtype), far.to(w.dtype)])
    rows = rows.to(w.dtype)
    out.copy_(w - rows.T @ c.to(w.dtype))
    wide = out.double()
    return torch.cat([wide.square().sum()[None], rows.double() @ wide])
