"""XDiag (Epperly, Tropp and Webber 2024): a diagonal from a sketch, with its error.

With probes Ω (n, m), Y = A Ω = Q R and Z = Aᵀ Q. As in `xtrace`, Q sᵢ is what the range of Y loses without
probe i, where sᵢ is the unit vector along column i of R⁻ᵀ. With Qᵢ Qᵢᵀ = Q (I − sᵢ sᵢᵀ) Qᵀ the estimate from
probe i,

    dᵢ = diag(Qᵢ Qᵢᵀ A) + ωᵢ ∘ (I − Qᵢ Qᵢᵀ) A ωᵢ,

has no bias, because Qᵢ does not depend on ωᵢ. With P = Q S, X = Z S and γᵢ = sᵢᵀ rᵢ, since sᵢ is orthogonal
to all other columns of R,

    dᵢ = diag(Q Zᵀ) + eᵢ,    eᵢ = pᵢ ∘ tᵢ,    tᵢ = γᵢ ωᵢ − xᵢ.

XDiag is the mean over i. For its error, the larger of two variances: that of the scatter of the eᵢ, and that
of the jackknife, which leaves out probe j completely. Their geometric mean, which XTrace uses, is too small
for matrices that are nearly diagonal: its intervals from 20 products held 0.91 of the time. Without i and j
the sketch loses pᵢ and the part of pⱼ beside it, so that with g = sᵢᵀ sⱼ the estimate from probe i becomes

    dᵢ + fᵢⱼ,    fᵢⱼ = − (pⱼ − g pᵢ) ∘ (g tᵢ + xⱼ) / (1 − g²).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import parts
from curvescope.algorithms.columns import column_blocks, summing_dtype
from curvescope.algorithms.estimates.xtrace import left_out, range_sketch
from curvescope.algorithms.vectors import columns_of, fresh
from curvescope.core.operator import LinearOperator
from curvescope.core.seeds import Probe, probes

MIN_INDEPENDENCE = 1e3  # if 1 − g² is at most so many roundings, two probes leave out the same direction


def leave_one_out(op: LinearOperator, count: int, *, kind: Probe, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of the dᵢ from `count` probes, its standard error and norms of rows, (n,) each.

    The norm of row k is the root mean square over i of entry k of (I − Qᵢ Qᵢᵀ) A ωᵢ = γᵢ pᵢ. Few signs may be
    equal in two rows; the sketch then mistakes one row for the other, and the norm is too small. So the norm
    is at least that of entry k of A ωᵢ, but at most that of all rows outside the sketch, √mean(γᵢ²).
    """
    n, eps = op.local_shape[0], torch.finfo(op.dtype).eps
    Q, R, _, scale = range_sketch(op, count, kind=kind, seed=seed)
    Z = fresh(op, n, count)
    for block in column_blocks(op, count):
        Z[:, block] = op.T @ Q[:, block]
    Omega = torch.empty(n, count, dtype=torch.int8 if kind == "rademacher" else op.dtype, device=op.device)
    probes(op.shape[0], count, seed=seed, kind=kind, out=Omega, shard=columns_of(op))
    S, wide = left_out(R, eps), summing_dtype(op.device)
    rotation, triangle, gain, g, a = (
        torch.as_tensor(M).to(wide).to(op.device) for M in (S, R, (S * R).sum(axis=0), *_pairs(S, eps))
    )
    values, stderr, row_norms = (fresh(op, n) for _ in range(3))
    for part in parts(n, op.device, width=4 * count):  # the loop needs about a dozen tables of this size
        q, z, omega = (M[part].to(wide) for M in (Q, Z, Omega))
        mean, error, norm = _rows(q, z * scale, omega, rotation, gain, g, a)
        smallest = (q @ triangle).square().mean(dim=1).clamp_max(gain.square().mean()).sqrt()
        norm = torch.maximum(norm, smallest)
        values[part], stderr[part], row_norms[part] = mean / scale, error / scale, norm / scale
    return values, stderr, row_norms


def _pairs(S: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """g and 1/(1 − g²) for all pairs, (m, m); zero if i = j, or if the pair cannot be distinguished."""
    g = S.T @ S
    independence = 1 - g**2
    distinct = (independence > MIN_INDEPENDENCE * eps) & ~np.eye(len(g), dtype=bool)
    return g, np.divide(1.0, independence, out=np.zeros_like(g), where=distinct)


def _rows(
    q: Tensor, z: Tensor, omega: Tensor, S: Tensor, gain: Tensor, g: Tensor, a: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard error and row norms of some rows (r, m) of Q, Z and Ω: (r,) each."""
    m, P, X = S.shape[0], q @ S, z @ S
    T = gain * omega - X
    E = P * T
    scatter = E.var(dim=1) / m
    # Σᵢ fᵢⱼ for all j, multiplied out
    F = (P * T) @ (a * g**2) + X * (P @ (a * g)) - P * (T @ (a * g)) - P * X * a.sum(dim=0)
    without = (E.sum(dim=1, keepdim=True) - E + F) / (m - 1)
    jackknife = (m - 1) * without.var(dim=1, unbiased=False)
    norm = (gain * P).square().mean(dim=1).sqrt()
    return (q * z).sum(dim=1) + E.mean(dim=1), torch.maximum(jackknife, scatter).sqrt(), norm
