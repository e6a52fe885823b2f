"""Rules of matrix calculus in row-major order: vec_r(A X B) = (A ⊗ Bᵀ) vec_r(X).

∂F/∂X is ∂vec_r F/∂vec_r(X)ᵀ. The theorems of Ormaniec et al. (2025) and of petrov2025 are written with these.
"""

from __future__ import annotations

import torch
from torch import Tensor


def eye(n: int, like: Tensor) -> Tensor:
    """I_n in the dtype and on the device of `like`."""
    return torch.eye(n, dtype=like.dtype, device=like.device)


def kron(*factors: Tensor) -> Tensor:
    """A ⊗ B ⊗ …, always contiguous (`torch.kron` refuses some transposed factors)."""
    found = factors[0]
    for B in factors[1:]:
        rows, columns = found.shape[0] * B.shape[0], found.shape[1] * B.shape[1]
        found = (found[:, None, :, None] * B[None, :, None, :]).reshape(rows, columns)
    return found


def vec(A: Tensor) -> Tensor:
    """vec_r(A) as a column: (mn, 1)."""
    return A.reshape(-1, 1)


def commutation(m: int, n: int, like: Tensor | None = None) -> Tensor:
    """K_{m,n}, (mn, mn): K vec_r(N) = vec_r(Nᵀ) for N of n × m, so K vec_c(M) = vec_c(Mᵀ) for M of m × n.

    In the dtype and on the device of `like`; float64 without.
    """
    like = torch.zeros((), dtype=torch.float64) if like is None else like
    order = torch.arange(m * n, device=like.device).reshape(n, m).T.reshape(-1)
    return eye(m * n, like)[order]


swap = commutation  # its second name


def diagonal_derivative(n: int, like: Tensor) -> Tensor:
    """∂diag(v)/∂v = [e_1 ⊗ e_1, …, e_n ⊗ e_n]: (n², n)."""
    found = torch.zeros(n, n, n, dtype=like.dtype, device=like.device)
    index = torch.arange(n, device=like.device)
    found[index, index, index] = 1
    return found.reshape(n * n, n)


def kron_derivatives(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """∂(A ⊗ B)/∂A and ∂(A ⊗ B)/∂B for A of n × q, B of p × r.

    (I_n ⊗ K_{p,q} ⊗ I_r)(I_{nq} ⊗ vec_r B) and (I_n ⊗ K_{p,q} ⊗ I_r)(vec_r A ⊗ I_{pr}).
    """
    (n, q), (p, r) = A.shape, B.shape
    shuffle = kron(eye(n, A), commutation(p, q, A), eye(r, A))
    return shuffle @ kron(eye(n * q, A), vec(B)), shuffle @ kron(vec(A), eye(p * r, A))
