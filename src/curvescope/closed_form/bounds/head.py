"""Certified bounds on the blocks of an attention head's Hessian and on the full Hessian.

These are a-posteriori bounds, from the per-query matrices of one forward pass. They form no block, and are
typically within a factor of two of the true norm. Bounds from operator norms are in `operator_norms`, bounds
of a complete Transformer block in `block`, and the published bounds in `printed.bounds`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.closed_form.bounds.per_query import HeadFactors, head_locals
from curvescope.closed_form.bounds.sums import (
    ROUNDING,
    head_inputs,
    joint_sum_bound,
    rectangular_sum_bound,
    separable_rayleigh,
    spectral_norm,
    symmetric_sum_bound,
    unit_rows,
)
from curvescope.core.hessian_terms import MatrixName, check_matrix_name
from curvescope.core.result import Result

NAMES = ["Q", "K", "V"]
_MAX_JOINT = 2048  # rows of the Gram matrix that the joint bound of QV and KV may need
_NUM_STEPS = 8  # power steps of a lower bound


@dataclass(frozen=True)
class BlockBounds(Result):
    """Bounds on the spectral norms of the blocks of a Hessian and of the full Hessian."""

    names: list[str]  # of the weights, in order
    upper: np.ndarray  # (b, b) ≥ ‖H_ij‖₂
    whole: float  # ≥ ‖H‖₂: the norm of `upper`
    lower: np.ndarray | None = None  # (b, b) ≤ ‖H_ij‖₂
    whole_lower: float | None = None  # ≤ ‖H‖₂


def block_bounds(
    names: list[str], upper: Tensor, lower: Tensor | None = None, whole_lower: Tensor | None = None
) -> BlockBounds:
    """Return the result for symmetric tables of bounds; ‖H‖ is at most the norm of the blocks' table."""
    return BlockBounds(
        names=list(names),
        upper=upper.numpy(force=True),
        whole=float(spectral_norm(upper)) * (1 + ROUNDING),
        lower=None if lower is None else lower.numpy(force=True),
        whole_lower=None if whole_lower is None else float(whole_lower),
    )


def attention_bounds(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    G: Tensor,
    B: float | Tensor,
    *,
    part: MatrixName = "hessian",
    mask: Tensor | None = None,
    scale: float | None = None,
    lower: bool = True,
) -> BlockBounds:
    """Return a-posteriori bounds for one softmax head F = softmax(s X W_Q W_Kᵀ Xᵀ) X W_V.

    QQ = Σ x_i x_iᵀ ⊗ C_i and KK = Σ q_i q_iᵀ ⊗ D_i by `symmetric_sum_bound`, the off-diagonal blocks by the
    least of their splits, VV like QQ (exactly if B = c I), and the full Hessian by the 3 × 3 matrix of these.
    Lower bounds are norms of products with a unit vector, and hold even if the iteration has not converged.

    Args:
        X: tokens (L, d), or (n, L, d) for a batch.
        W_Q: (d, d_K).
        W_K: (d, d_K).
        W_V: (d, d_V).
        G: gradient of the loss in F, shaped like F.
        B: Hessian of the loss in F: c for c I, or (…, L, d_V, d_V), one symmetric matrix for each token.
        part: the Hessian, its GGN JᵀBJ, or the functional Hessian.
        mask: (L, L), True if a query may attend to a key; or numbers added to the scores.
        scale: s; 1/√d_K by default.
        lower: also compute lower bounds.
    """
    check_matrix_name(part)
    at = head_locals(head_inputs(X, W_Q, W_K, W_V, mask=mask, scale=scale), G, B)
    factors = HeadFactors(at, part != "functional", part != "ggn")
    multiple = not isinstance(B, Tensor) or B.ndim == 0
    upper = upper_bounds(factors, multiple=multiple)
    if not lower:
        return block_bounds(NAMES, upper)
    return block_bounds(NAMES, upper, *_lower(factors))


def upper_bounds(f: HeadFactors, *, multiple: bool = False) -> Tensor:
    """Return upper bounds of the blocks, (3, 3). `multiple`: B is a multiple of the identity."""
    at = f.at
    QQ, KK = symmetric_sum_bound(at.X, f.C), symmetric_sum_bound(at.q, f.D)
    if multiple:
        VV = spectral_norm(at.m) ** 2 * f.B[0, 0, 0].abs() * (1 + ROUNDING)
    else:
        VV = symmetric_sum_bound(at.m, f.B)
    QK = _query_key(f)
    QV = _with_values(f, at.X, f.P @ at.W_K, at.W_K.mT @ f.M)
    KV = _with_values(f, at.q, f.P, f.M)
    if not f.functional and bool((torch.linalg.eigvalsh(f.B)[:, 0] >= 0).all()):
        QK, QV, KV = (
            torch.minimum(b, (i * j).sqrt()) for b, i, j in ((QK, QQ, KK), (QV, QQ, VV), (KV, KK, VV))
        )
    return torch.stack([torch.stack(row) for row in ((QQ, QK, QV), (QK, KK, KV), (QV, KV, VV))])


def _query_key(f: HeadFactors) -> Tensor:
    """Bound QK by its sum over queries plus the mixed term, or by the Frobenius norm of both."""
    at = f.at
    separate = rectangular_sum_bound(at.X, f.N, at.q) + spectral_norm(f.Gamma)
    # N_i includes the lengths of x_i and q_i before the division: if one of them is zero, N_i alone may be so
    # much larger than the unit that its square overflows.
    N = f.N * (at.X.norm(dim=1) * at.q.norm(dim=1))[:, None, None]
    unit = torch.maximum(torch.linalg.matrix_norm(N).max(), spectral_norm(f.Gamma))
    if unit == 0:
        return unit
    X, q, N, Gamma = unit_rows(at.X), unit_rows(at.q), N / unit, f.Gamma / unit
    flat = N.flatten(1)
    gram = (X @ X.mT) * (q @ q.mT) * (flat @ flat.mT)
    crossed = ((X @ Gamma) * (N.mT @ q[:, :, None])[:, :, 0]).sum(1)
    mixed = at.q.shape[1] * (Gamma**2).sum()
    room = gram.abs().sum() + 2 * crossed.abs().sum() + mixed
    square = (gram.sum() + 2 * crossed.sum() + mixed).clamp(min=0)
    eps = torch.finfo(gram.dtype).eps
    return torch.minimum(separate, unit * (square + 8 * flat.shape[1] * eps * room).sqrt()) * (1 + ROUNDING)


def _with_values(f: HeadFactors, rows: Tensor, P: Tensor, M: Tensor) -> Tensor:
    """Bound Σ rows_i (P_i m_i + M_i G_i), that is QV or KV, by its two terms or as one wide term."""
    at = f.at
    separate = rectangular_sum_bound(rows, P.mT, at.m) + rectangular_sum_bound(rows, M, at.G)
    wide = M.shape[2] * at.G.shape[1]
    if min(wide, M.shape[0] * M.shape[1]) > _MAX_JOINT:
        return separate
    joint = torch.einsum("iwc,ib->icbw", P, at.m) + torch.einsum("icb,iw->icbw", M, at.G)
    return torch.minimum(separate, joint_sum_bound(rows, joint.flatten(2)))


def _lower(f: HeadFactors) -> tuple[Tensor, Tensor]:
    """Return lower bounds of the blocks (3, 3) and of the full Hessian."""
    starts = _starts(f)
    table = f.at.X.new_zeros(3, 3)
    for i, one in enumerate(NAMES):
        for j, two in enumerate(NAMES[: i + 1]):
            value = _block_lower(f, one, two, starts[two])
            table[i, j] = table[j, i] = value
    whole = torch.maximum(table.max(), _whole_lower(f, starts))
    return table * (1 - ROUNDING), whole * (1 - ROUNDING)


def _starts(f: HeadFactors) -> dict[str, Tensor]:
    """Return for each weight a unit matrix on which its diagonal block is nearly largest."""
    at = f.at
    q, k, v = separable_rayleigh(at.X, f.C), separable_rayleigh(at.q, f.D), separable_rayleigh(at.m, f.at.B)
    return {"Q": torch.outer(q.a, q.c), "K": torch.outer(k.c, k.a), "V": torch.outer(v.a, v.c)}


def _block_lower(f: HeadFactors, one: str, two: str, start: Tensor) -> Tensor:
    """Return ‖H_ij v‖ for a unit v, after power steps with H_ji H_ij from `start`."""
    best, v = start.new_zeros(()), start
    for _ in range(_NUM_STEPS):
        image = f.matvec(one + two, v)
        best = torch.maximum(best, image.norm())
        v = f.matvec(two + one, image)
        if v.norm() == 0:
            break
        v = v / v.norm()
    return best


def _whole_lower(f: HeadFactors, starts: dict[str, Tensor]) -> Tensor:
    """Return ‖Hv‖ for a unit v, after power steps from the best combination of the blocks' starts."""
    table = torch.stack(
        [torch.stack([(starts[i] * f.matvec(i + j, starts[j])).sum() for j in NAMES]) for i in NAMES]
    )
    values, vectors = torch.linalg.eigh((table + table.mT) / 2)
    weights = vectors[:, values.abs().argmax()]
    v = {name: w * starts[name] for name, w in zip(NAMES, weights, strict=True)}
    best = values.abs().max()
    for _ in range(_NUM_STEPS):
        image = {i: sum((f.matvec(i + j, v[j]) for j in NAMES), torch.zeros_like(v[i])) for i in NAMES}
        length = torch.stack([part.norm() for part in image.values()]).norm()
        best = torch.maximum(best, length)
        if length == 0:
            break
        v = {name: part / length for name, part in image.items()}
    return best
