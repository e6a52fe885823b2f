"""Exact Hessian spectrum of a loss of inner products of weights: a bulk and a few outliers.

If the loss depends on pairs of vectors (w_r, v_r) only through a_r = s_r ⟨w_r, v_r⟩, and on a few more
scalars φ, its Hessian has the bulk values ±b_r, b_r = s_r ∂ℓ/∂a_r, of multiplicity m_r − 1 for each pair, and
2h + p outliers, the eigenvalues of a small symmetric matrix (`reduced_spectrum`), for any loss and data. If
the loss depends on matrices through W Uᵀ, as for queries and keys, the bulk remains (`product_bulk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import ShapeError
from curvescope.core.result import Result


@dataclass(frozen=True)
class ExactSpectrum(Result):
    """All eigenvalues of a Hessian (n rows), from h pairs of vectors and p further scalars."""

    eigenvalues: np.ndarray  # (n,) ascending, each as often as its multiplicity
    bulk: np.ndarray  # (2h,) +b_1, −b_1, …, +b_h, −b_h
    multiplicity: np.ndarray  # (2h,) multiplicity m_r − 1 of each bulk value
    outliers: np.ndarray  # (2h + p,) ascending
    eigenvectors: np.ndarray | None = None  # (n, n) orthonormal columns, in the order of `eigenvalues`


@dataclass(frozen=True)
class ProductBulk(Result):
    """Eigenvalues of every loss of the product W Uᵀ, and their multiplicity."""

    eigenvalues: np.ndarray  # (2k,) +σ_1 … +σ_k, −σ_1 … −σ_k
    multiplicity: int  # lower bound for each eigenvalue; 0 if the statement is empty
    eigenvectors: np.ndarray | None = None  # (n, 2k, multiplicity), over (W, U) row-major


def reduced_spectrum(
    pairs: Sequence[tuple[Tensor, Tensor]],
    gradient: Tensor,
    hessian: Tensor,
    *,
    scales: Sequence[float] | None = None,
    eigenvectors: bool = False,
) -> ExactSpectrum:
    """Return the spectrum of ℓ(a_1, …, a_h, φ), a_r = s_r ⟨w_r, v_r⟩, over (w_1, v_1, …, w_h, v_h, φ).

    With b_r = s_r ∂ℓ/∂a_r, α_r = |w_r + v_r|/√2, β_r = |w_r − v_r|/√2: bulk ±b_r, and the eigenvalues of
    M ∇²ℓ Mᵀ + diag(b_1, −b_1, …, 0), M = blockdiag(s_r (α_r, −β_r)ᵀ, I). The vectors need not be generic:
    parallel, opposite and zero vectors and m_r = 1 are covered.

    Args:
        pairs: the vectors (m_r,), (m_r,).
        gradient: ∂ℓ/∂a, (h,).
        hessian: ∇²ℓ in (a, φ), (h + p, h + p).
        scales: s_r; all 1 by default.
        eigenvectors: also return eigenvectors, which take the memory of the dense Hessian.
    """
    _check_pairs(pairs, gradient, hessian)
    gradient, hessian = gradient.double(), hessian.double()
    pairs = [(w.double(), v.double()) for w, v in pairs]
    s = gradient.new_tensor([1.0] * len(pairs) if scales is None else list(scales))
    b = s * gradient
    small = _reduced_matrix(pairs, s, b, hessian)
    outliers, inner = torch.linalg.eigh((small + small.T) / 2)
    times = torch.tensor([len(w) - 1 for w, _ in pairs]).repeat_interleave(2)
    bulk = torch.stack([b, -b], dim=1).flatten()
    values, order = torch.cat([bulk.repeat_interleave(times.to(bulk.device)), outliers]).sort()
    vectors = _eigenvectors(pairs, inner)[:, order] if eigenvectors else None
    return ExactSpectrum(
        eigenvalues=values.numpy(force=True),
        bulk=bulk.numpy(force=True),
        multiplicity=times.numpy(),
        outliers=outliers.numpy(force=True),
        eigenvectors=None if vectors is None else vectors.numpy(force=True),
    )


def _check_pairs(pairs: Sequence[tuple[Tensor, Tensor]], gradient: Tensor, hessian: Tensor) -> None:
    h = len(pairs)
    for w, v in pairs:
        if w.ndim != 1 or w.shape != v.shape or not len(w):
            raise ShapeError(
                f"expected pairs of vectors of one length, got {tuple(w.shape)} and {tuple(v.shape)}"
            )
    if h == 0 or gradient.shape != (h,):
        raise ShapeError(f"expected the gradient in {h} ≥ 1 inner products, got {tuple(gradient.shape)}")
    if hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1] or hessian.shape[0] < h:
        raise ShapeError(
            f"expected a square Hessian with at least {h} rows, got {tuple(hessian.shape)}",
            hint="rows are the inner products, then the further scalars",
        )


def _reduced_matrix(pairs: list[tuple[Tensor, Tensor]], s: Tensor, b: Tensor, hessian: Tensor) -> Tensor:
    """M ∇²ℓ Mᵀ + diag(b_1, −b_1, …, b_h, −b_h, 0_p): (2h + p, 2h + p)."""
    h, p = len(pairs), len(hessian) - len(pairs)
    M = hessian.new_zeros(2 * h + p, h + p)
    for r, (w, v) in enumerate(pairs):
        M[2 * r, r] = s[r] * torch.linalg.vector_norm(w + v) / 2**0.5
        M[2 * r + 1, r] = -s[r] * torch.linalg.vector_norm(w - v) / 2**0.5
    M[2 * h :, h:] = torch.eye(p).to(M)
    shift = torch.cat([torch.stack([b, -b], dim=1).flatten(), b.new_zeros(p)])
    return M @ hessian @ M.T + torch.diag(shift)


def _eigenvectors(pairs: list[tuple[Tensor, Tensor]], inner: Tensor) -> Tensor:
    """Return the bulk vectors, pair by pair and + before −, then the outliers' from `inner`: (n, n).

    The rotation θ± = (w ± v)/√2 of pair r has an orthonormal basis whose first vector is the direction of
    w ± v. The other vectors are bulk, the first vectors span the outliers.
    """
    h, p = len(pairs), len(inner) - 2 * len(pairs)
    n = sum(2 * len(w) for w, _ in pairs) + p
    bulk, carriers, start = [], inner.new_zeros(n, 2 * h + p), 0
    for r, (w, v) in enumerate(pairs):
        m = len(w)
        for sign, column in ((1.0, 2 * r), (-1.0, 2 * r + 1)):
            basis = _basis_from(w + sign * v)
            embedded = basis.new_zeros(n, m)
            embedded[start : start + m] = basis / 2**0.5
            embedded[start + m : start + 2 * m] = sign * basis / 2**0.5
            carriers[:, column] = embedded[:, 0]
            bulk.append(embedded[:, 1:])
        start += 2 * m
    carriers[start:, 2 * h :] = torch.eye(p).to(inner)
    return torch.cat([*bulk, carriers @ inner], dim=1)


def _basis_from(direction: Tensor) -> Tensor:
    """Return an orthonormal basis (m, m) with ± `direction` first, by a Householder reflection."""
    length = torch.linalg.vector_norm(direction)
    basis = torch.eye(len(direction)).to(direction)
    if length == 0:
        return basis
    mirror = direction / length
    mirror[0] += torch.copysign(torch.ones_like(length), mirror[0])
    mirror = mirror / torch.linalg.vector_norm(mirror)
    reflection = basis - 2 * torch.outer(mirror, mirror)
    return reflection * torch.where(reflection[:, :1].T @ direction < 0, -1.0, 1.0)


def product_bulk(
    Gamma: Tensor, W: Tensor, U: Tensor, *, rank_tolerance: float = 1e-10, eigenvectors: bool = False
) -> ProductBulk:
    """Return the eigenvalues ±σ_i(Γ) of the Hessian of any loss of W Uᵀ, Γ = ∂ℓ/∂(W Uᵀ).

    They have multiplicity at least m − rank [W; U], m the number of columns: eigenvectors δW = p_i uᵀ,
    δU = ± q_i uᵀ, with the singular vectors of Γ and u orthogonal to all rows of W and U. If the rows of
    [W; U] are independent, each has one more, from U u = q_i, W u = ∓ p_i. For one attention head
    W = W_Q, U = W_K, Γ = s Xᵀg, in a network of any depth (with biases as further rows); for f = vᵀWx take Wᵀ
    and vᵀ, Γ = ∂ℓ/∂(Wᵀv).

    Args:
        Gamma: (rows of W, rows of U).
        W: (d_1, m).
        U: (d_2, m).
        rank_tolerance: singular values of [W; U] below this fraction of the largest count as zero.
        eigenvectors: also return them.
    """
    if W.ndim != 2 or U.ndim != 2 or W.shape[1] != U.shape[1] or Gamma.shape != (len(W), len(U)):
        raise ShapeError(
            f"expected Γ (d_1, d_2), W (d_1, m) and U (d_2, m), got {tuple(Gamma.shape)}, {tuple(W.shape)}, "
            f"{tuple(U.shape)}"
        )
    _, sizes, rows = torch.linalg.svd(torch.cat([W, U]).double())
    rank = int((sizes > rank_tolerance * sizes.max()).sum()) if bool(sizes.max() > 0) else 0
    free = rows[rank:]  # (multiplicity, m)
    P, sigma, Qt = torch.linalg.svd(Gamma.double(), full_matrices=False)
    vectors = None
    if eigenvectors:
        dW = torch.einsum("ai,um->amiu", P, free).reshape(W.numel(), len(sigma), len(free))
        dU = torch.einsum("ib,um->bmiu", Qt, free).reshape(U.numel(), len(sigma), len(free))
        both = torch.cat([torch.cat([dW, dW], dim=1), torch.cat([dU, -dU], dim=1)])
        vectors = (both / 2**0.5).numpy(force=True)
    return ProductBulk(torch.cat([sigma, -sigma]).numpy(force=True), len(free), vectors)
