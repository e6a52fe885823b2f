"""Theorems 2 and 3 of petrov2025 (arXiv 2510.16927): LayerNorm of a whole matrix in Kronecker form.

X is L × d, LN(X) = P M with M = X − X 11ᵀ/d, P = D⁻¹, D = diag(σ) and σ_i the standard deviation of row i;
no ε, γ or β. Matrices are flattened row by row, ∂F/∂X is ∂vec_r F/∂vec_r(X)ᵀ. These forms are large and here
to be compared with; `curvescope.closed_form.norms.derivatives` holds the ones to compute with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.closed_form.printed.vec_rules import (
    commutation,
    diagonal_derivative,
    eye,
    kron,
    kron_derivatives,
)
from curvescope.core.errors import ShapeError, UsageError


@dataclass(frozen=True)
class _Parts:
    """What the proofs name: LN(X) = P M, ∂P/∂X = A_1 B_1/√d, B_1 = E A_2 N."""

    M: Tensor  # (L, d)
    P: Tensor  # (L, L)
    G: Tensor  # ∂M/∂X, (Ld, Ld)
    E: Tensor  # ∂diag(v)/∂v, (L², L)
    A_1: Tensor  # ∂D⁻¹/∂D = −D⁻¹ ⊗ D⁻ᵀ, (L², L²)
    A_2: Tensor  # diag⁻¹((M∘M 1)^½), (L, L)
    N: Tensor  # (I ⊗ 1ᵀ) diag(vec_r M) G, (L, Ld)

    @property
    def B_1(self) -> Tensor:
        return self.E @ self.A_2 @ self.N

    @property
    def dP(self) -> Tensor:
        """∂P/∂X, (L², Ld)."""
        return self.A_1 @ self.B_1 / self.M.shape[1] ** 0.5


def layernorm_jacobian_theorem2(X: Tensor) -> Tensor:
    """∂LN/∂X = (P ⊗ I_d) G + (I_L ⊗ Mᵀ) ∂P/∂X: (Ld, Ld). Correct as printed.

    The second term is the derivative of the variance; without it the rank is L(d − 1), not L(d − 2).
    """
    parts = _parts(X)
    L, d = X.shape
    I_L, I_d = eye(L, X), eye(d, X)
    return kron(parts.P, I_d) @ parts.G + kron(I_L, parts.M.T) @ parts.dP


def layernorm_second_derivative_theorem3(X: Tensor) -> Tensor:
    """∂²LN/∂X² = ∂vec_r(∂LN/∂X)/∂vec_r(X)ᵀ: (L²d², Ld).

    (I ⊗ Gᵀ) ∂(P ⊗ I_d)/∂X + ((I_L ⊗ Mᵀ) ⊗ I) ∂²P/∂X² + (I ⊗ (∂P/∂X)ᵀ) ∂(I_L ⊗ Mᵀ)/∂X, with the ingredients of
    the proof put right: ∂(P ⊗ I_d)/∂X has K_{d,L} and vec_r I_d, both terms of ∂²P/∂X² carry 1/√d,
    ∂D/∂X = B_1/√d, and ∂A_2/∂X = (∂P/∂X)/√d is supplied.
    """
    return _second_derivative(X, printed=False)


def layernorm_second_derivative_theorem3_as_printed(X: Tensor) -> Tensor:
    """Theorem 3 with the proof's ingredients as printed; it is wrong, and defined for L = d only.

    Printed: 1/√d in front of the first term of ∂²P/∂X² alone, ∂D/∂X = B_1, and K_{L,L} with vec_r I_L in
    ∂(P ⊗ I_d)/∂X, which has the right shape only if L = d.
    """
    if X.shape[0] != X.shape[1]:
        raise ShapeError(
            f"the printed form is conformable for a square X only, got {tuple(X.shape)}",
            hint="layernorm_second_derivative_theorem3 is the corrected form, for any shape",
        )
    return _second_derivative(X, printed=True)


def _second_derivative(X: Tensor, *, printed: bool) -> Tensor:
    parts = _parts(X)
    L, d = X.shape
    I_n = eye(L * d, X)
    first = kron(I_n, parts.G.T) @ kron_derivatives(parts.P, eye(d, X))[0] @ parts.dP
    second = kron(eye(L, X), parts.M.T, I_n) @ _second_of_inverse(parts, printed=printed)
    rows = kron_derivatives(eye(L, X), parts.M.T)[1] @ commutation(d, L, X) @ parts.G  # ∂(I_L ⊗ Mᵀ)/∂X
    return first + second + kron(I_n, parts.dP.T) @ rows


def _second_of_inverse(parts: _Parts, *, printed: bool) -> Tensor:
    """∂²P/∂X² = [(A_1 ⊗ I) ∂B_1/∂X + (I ⊗ B_1ᵀ) ∂A_1/∂X]/√d: (L³d, Ld)."""
    L, d = parts.M.shape
    I_L, I_n = eye(L, parts.M), eye(L * d, parts.M)
    ones = torch.ones(1, d, dtype=parts.M.dtype, device=parts.M.device)
    dN = kron(I_L, ones, parts.G.T) @ diagonal_derivative(L * d, parts.M) @ parts.G
    dA_2 = parts.dP / d**0.5
    dB_1 = kron(parts.E, I_n) @ (kron(parts.A_2, I_n) @ dN + kron(I_L, parts.N.T) @ dA_2)

    dD = parts.B_1 if printed else parts.B_1 / d**0.5
    left, right = kron_derivatives(parts.P, parts.P.T)
    dA_1 = -(left + right @ commutation(L, L, parts.M)) @ parts.A_1 @ dD

    tail = kron(eye(L * L, parts.M), parts.B_1.T) @ dA_1
    return kron(parts.A_1, I_n) @ dB_1 / d**0.5 + (tail if printed else tail / d**0.5)


def _parts(X: Tensor) -> _Parts:
    if X.dim() != 2:
        raise ShapeError(f"expected one matrix of tokens (L, d), got {tuple(X.shape)}")
    L, d = X.shape
    M = X - X.mean(1, keepdim=True)
    lengths = M.square().sum(1).sqrt()
    if not bool((lengths > 0).all()):
        raise UsageError("a row of X has no variance; the theorems assume that every row has")
    ones = torch.ones(d, d, dtype=X.dtype, device=X.device) / d
    G = eye(L * d, X) - kron(eye(L, X), ones)
    P = torch.diag(d**0.5 / lengths)
    column = torch.ones(1, d, dtype=X.dtype, device=X.device)
    N = kron(eye(L, X), column) @ torch.diag(M.reshape(-1)) @ G
    A_1 = -kron(P, P.T)
    return _Parts(M=M, P=P, G=G, E=diagonal_derivative(L, X), A_1=A_1, A_2=torch.diag(1 / lengths), N=N)
