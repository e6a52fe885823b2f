"""XTrace (Epperly, Tropp and Webber 2024) from the small matrices of a sketch, with its error.

With probes Ω (n, m), Y = A Ω = Q R and Z = A Q. The range of Y without some columns J is that of
Q (I − B Bᵀ), where B is an orthonormal basis of the columns J of R⁻ᵀ: each of these is orthogonal to all
other columns of R. With H = Qᵀ Z, W = Qᵀ Ω and u = (I − B Bᵀ) wᵢ, the estimate from probe i in J is

    tr H − tr(Bᵀ H B) + (ωᵢ − Q u)ᵀ A (ωᵢ − Q u).

XTrace is the mean over i with J = {i}. These m estimates share most of their sketches. Write their errors as
a sum of terms that depend on k probes each (Hoeffding): such a term is in k of the m estimates, so their
scatter, as if they were independent, finds 1/k of its variance. The jackknife, which leaves out one probe j
altogether, J = {i, j}, finds k times its variance: (m − 1)/m Σ_j (T_j − T̄)² with T_j the mean over i ≠ j.
The geometric mean of the two variances, which XTrace uses, is right if all terms have the same k. No further
products are needed. On flat spectra, where a sketch does not help, Hutchinson's estimate from as many
products is better.

A sketch of the range of an operator is a basis Q of A Ω, for probes Ω (n, m).

Hutch++, XTrace and XDiag begin with it. Probes are drawn again if they are needed twice, and products reuse
the memory of the basis, so that a sketch takes m vectors and a block of products.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from curvescope.algorithms.accurate_sums import gram, to_numpy
from curvescope.algorithms.columns import column_blocks, column_dots, gather_samples, probe_batches
from curvescope.algorithms.vectors import columns_of, fresh, orthonormalize, safe_vector_scale
from curvescope.core.operator import LinearOperator
from curvescope.core.seeds import Probe, probes


class Sketch(NamedTuple):
    """c A Ω = Q R, for a power of two c that keeps squares in range."""

    Q: Tensor  # (n, m) orthonormal columns
    R: np.ndarray  # (m, m)
    forms: np.ndarray  # (m,) c ωᵢᵀ A ωᵢ
    scale: float  # c


def range_sketch(op: LinearOperator, count: int, *, kind: Probe, seed: int) -> Sketch:
    """Sketch the range with the first `count` probes of a seed; `count` is at most the number of rows."""
    Q, forms = fresh(op, op.local_shape[0], count), []
    blocks = column_blocks(op, count)
    for V in probe_batches(op, count, seed=seed, kind=kind, what="sketch"):
        columns = Q[:, next(blocks)].copy_(op @ V)
        forms.append(column_dots(V, columns))
    scale = safe_vector_scale(Q) or 1.0  # zero for a zero operator
    if scale != 1.0:
        Q.mul_(scale)
    R = orthonormalize(Q)
    return Sketch(Q, to_numpy(R), gather_samples(forms) * scale, scale)


def small_matrices(op: LinearOperator, sketch: Sketch, kind: Probe, seed: int) -> tuple[np.ndarray, ...]:
    """R, Qᵀ Z, Qᵀ Ω, Ωᵀ Z, Qᵀ Y and the forms, for Y = c A Ω and Z = c A Q; see `xtrace`.

    Qᵀ Y is R, and of a symmetric operator Ωᵀ Z is its transpose. For any other all probes are kept.
    """
    Q, m = sketch.Q, sketch.Q.shape[1]
    H, W, ZOmega = np.empty((m, m)), np.empty((m, m)), sketch.R.T.copy()
    options = {"seed": seed, "kind": kind}
    kinds = {"dtype": op.dtype, "device": op.device, "shard": columns_of(op)}
    Omega = None if op.symmetric else probes(op.shape[1], m, **options, **kinds)
    for block in column_blocks(op, m):
        Z = op @ Q[:, block]
        H[:, block] = gram(Q.T, Z.T) * sketch.scale
        if Omega is not None:
            ZOmega[:, block] = gram(Omega.T, Z.T) * sketch.scale
    blocks = column_blocks(op, m)
    for V in probe_batches(op, m, **options, what="sketch"):
        W[:, next(blocks)] = gram(Q.T, V.T)
    return sketch.R, H, W, ZOmega, sketch.R, sketch.forms


ROUNDING = 1e3  # a length below so many roundings of the largest column is zero
MAX_LEFT_OUT = 64  # probes that the jackknife leaves out in turn; each costs m³


def leave_one_out(
    R: np.ndarray,
    H: np.ndarray,
    W: np.ndarray,
    ZOmega: np.ndarray,
    QY: np.ndarray,
    forms: np.ndarray,
    *,
    eps: float,
) -> tuple[np.ndarray, float, float]:
    """The m leave-one-out estimates, the standard error of their mean, and a norm that bounds it.

    The norm is the root mean square of the length of A ωᵢ outside the sketch without probes i and j. Without
    probe i alone, all lengths are small together if the sketch only just misses the range of A. If these
    are zero up to rounding, the estimates are exact, and so is the norm.

    Args:
        ZOmega: Ωᵀ Z.
        QY: Qᵀ Y.
        forms: ωᵢᵀ A ωᵢ, (m,).
    """
    m = len(R)
    S = left_out(R, eps)

    def estimates(D: np.ndarray) -> np.ndarray:
        """Estimate once for each i, without the unit column dᵢ of D, which is orthogonal to sᵢ or zero."""
        U = W - S * (S * W).sum(axis=0) - D * (D * W).sum(axis=0)
        outside = forms - (ZOmega.T * U).sum(axis=0) - (U * QY).sum(axis=0) + (U * (H @ U)).sum(axis=0)
        return np.trace(H) - (S * (H @ S)).sum(axis=0) - (D * (H @ D)).sum(axis=0) + outside

    outside_one = (S * R).sum(axis=0) ** 2  # squared length of A ωᵢ outside the sketch without probe i
    without, lengths = [], []
    for j in range(min(m, MAX_LEFT_OUT)):
        D = S[:, j : j + 1] - S * (S[:, j] @ S)
        length = np.linalg.norm(D, axis=0)
        D = np.divide(D, length, out=np.zeros_like(D), where=length > eps)
        without.append(np.delete(estimates(D), j).mean())
        lengths.append(np.delete(outside_one + (D * R).sum(axis=0) ** 2, j).mean())
    samples = estimates(np.zeros_like(S))
    jackknife, scatter = (m - 1) * np.var(without), np.var(samples, ddof=1) / m
    exact = outside_one.max() <= (ROUNDING * eps) ** 2 * (R**2).sum()
    norm = float(np.sqrt(outside_one.mean() if exact else np.mean(lengths)))
    return samples, float(np.sqrt(np.sqrt(jackknife)) * np.sqrt(np.sqrt(scatter))), norm


def left_out(R: np.ndarray, eps: float) -> np.ndarray:
    """Normalized columns of R⁻ᵀ; a singular R is first perturbed by a rounding."""
    U, sigma, Vt = np.linalg.svd(R)
    floor = eps * sigma[0] if sigma[0] > 0 else 1.0
    S = (U / np.maximum(sigma, floor)) @ Vt
    return S / np.linalg.norm(S, axis=0)
