"""Theorems 3.1 and 3.2 of Ormaniec et al. (2025), line by line: the Hessian of one head in Kronecker form.

The model is F = A X W_V, A = softmax(X W_Q W_Kᵀ Xᵀ / √d_K), without mask, with ℓ = ‖F − Y‖² / (L d_V). vec is
row-major. The printed statement is exact for d ≠ d_V with these corrections and this reading:

1. Query- and key-side identities, and those in Z₁, Z₂, K and R, have the size d of the tokens; the shuffling
   matrix S is then two matrices, S_V for the blocks of W_V and S_Q for the mixed term of H_f(Q, K).
2. The last term of H_f(Q, K) is [R … S] ⊗ I, the bracket closing before the product with I.
3. "Xᵀ" in Z₂ is not the transposed matrix: block i is the column x_i.
4. K_{m,n} is the commutation matrix of column-major vec; so K_{d_K,d} vec_r(W_K) = vec_r(W_Kᵀ).
5. H_f(V, V) is exactly zero.

The theorems omit the blocks of W_K, which follow the same pattern. The matrices have Kronecker size, Z₂ alone
L d⁵ entries. Use them for reading and for tests, and the package `attention` for computations.

Rules of matrix calculus in row-major order: vec_r(A X B) = (A ⊗ Bᵀ) vec_r(X).

∂F/∂X is ∂vec_r F/∂vec_r(X)ᵀ. The theorems of Ormaniec et al. (2025) and of petrov2025 are written with these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvescope.closed_form.block_matrix import Pair
from curvescope.closed_form.softmax import AttentionMoments, attention_moments
from curvescope.core.errors import ShapeError


def khatri_rao(*factors: Tensor) -> Tensor:
    """Return the row-wise Khatri–Rao product ∗ of L row blocks, (L, p, q): block i is ⊗ of the blocks i."""
    return torch.cat([kron(*blocks) for blocks in zip(*factors, strict=True)])


def softmax_derivatives(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return ∂A/∂T, (L², L²), and ∂²A/∂T², (L⁴, L²), of a row-wise softmax at its output A (L, L).

    Row i: ∂A_ij/∂T_il = A_ij (δ_jl − A_il), and ∂²A_ij/∂T_il∂T_im is A_ij times
    2 A_il A_im + δ_jl δ_jm − δ_lm A_il − δ_jl A_im − δ_jm A_il.
    """
    L, delta = A.shape[0], eye(A.shape[0], A)
    first = torch.einsum("ij,ijl->ijl", A, delta[None] - A[:, None, :])
    bracket = (
        2 * A[:, None, :, None] * A[:, None, None, :]
        + delta[None, :, :, None] * delta[None, :, None, :]
        - delta[None, None] * A[:, None, :, None]
        - delta[None, :, :, None] * A[:, None, None, :]
        - delta[None, :, None, :] * A[:, None, :, None]
    )
    second = A[:, :, None, None] * bracket
    first = torch.einsum("ijl,ip->ijpl", first, delta)
    second = torch.einsum("ijlm,ip,ir->ijplrm", second, delta, delta)
    return first.reshape(L**2, L**2), second.reshape(L**4, L**2)


@dataclass(frozen=True)
class Theorem:
    """Ingredients of the two theorems for one sample, and the resulting blocks."""

    X: Tensor  # (L, d)
    W_Q: Tensor  # (d, d_K)
    W_K: Tensor  # (d, d_K)
    W_V: Tensor  # (d, d_V)
    Y: Tensor  # (L, d_V)

    def __post_init__(self) -> None:
        if self.Y.shape != (self.X.shape[0], self.W_V.shape[1]) or self.W_Q.shape != self.W_K.shape:
            raise ShapeError(
                f"expected Y (L, d_V) and W_Q, W_K of one shape, got {tuple(self.Y.shape)}, "
                f"{tuple(self.W_Q.shape)} and {tuple(self.W_K.shape)}"
            )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """L, d, d_K, d_V."""
        return self.X.shape[0], self.X.shape[1], self.W_Q.shape[1], self.W_V.shape[1]

    @cached_property
    def A(self) -> Tensor:
        """Attention weights (L, L)."""
        return torch.softmax(self.X @ self.W_Q @ self.W_K.T @ self.X.T / self.sizes[2] ** 0.5, dim=-1)

    @cached_property
    def moments(self) -> AttentionMoments:
        """M₁ (L, d), M₂ (L, d, d), M₃ (L, d, d, d)."""
        return attention_moments(self.A, self.X)

    @cached_property
    def Z1(self) -> Tensor:
        """Z₁ = X ∗ M₂, (L d, d²): block i is x_iᵀ ⊗ M₂,i. Equals (I ⊗ Xᵀ)(∂A/∂T)(X ⊗ X)."""
        return khatri_rao(self.X[:, None, :], self.moments.M2)

    @cached_property
    def Z2(self) -> Tensor:
        """Z₂ = (I_L ⊗ K_{d,d} ⊗ I_d)(X ∗ Xᵀ ∗ M₃), (L d³, d²). Equals (I ⊗ Xᵀ ⊗ Xᵀ ⊗ Xᵀ)(∂²A/∂T²)(X ⊗ X)."""
        L, d, _, _ = self.sizes
        M3 = self.moments.M3.reshape(L, d * d, d)
        product = khatri_rao(self.X[:, None, :], self.X[:, :, None], M3)
        return kron(eye(L, self.X), commutation(d, d, self.X), eye(d, self.X)) @ product

    def S(self, size: int) -> Tensor:
        """(I_p ⊗ K_{d,p})(vec I_p ⊗ I_d), (p² d, d): S_V for p = d_V, S_Q for p = d."""
        d, one = self.sizes[1], eye(size, self.X)
        return kron(one, commutation(d, size, self.X)) @ kron(vec(one), eye(d, self.X))

    def R(self, m: int) -> Tensor:
        """R_m = vec(F − Y)ᵀ ⊗ I_m, (m, m L d_V)."""
        return kron((self.moments.M1 @ self.W_V - self.Y).reshape(1, -1), eye(m, self.X))

    @cached_property
    def U(self) -> dict[str, Tensor]:
        """∂vec(W_Q W_Kᵀ)/∂vec(W): I ⊗ W_K for W_Q, (W_Q ⊗ I) K_{d_K,d} for W_K; (d², d d_K)."""
        _, d, d_K, _ = self.sizes
        commute = commutation(d_K, d, self.X)
        return {"Q": kron(eye(d, self.X), self.W_K), "K": kron(self.W_Q, eye(d, self.X)) @ commute}

    def outer(self) -> dict[Pair, Tensor]:
        """Return the blocks of H_o by Theorem 3.1 as matrices, with V first in its pairs as in the paper.

        (α, β): c/d_K U_αᵀ Z₁ᵀ (I ⊗ W_V W_Vᵀ) Z₁ U_β; (V, α): c/√d_K (M₁ᵀ ⊗ W_Vᵀ) Z₁ U_α;
        (V, V): c M₁ᵀ M₁ ⊗ I; c = 2/(L d_V).
        """
        L, _, d_K, d_V = self.sizes
        c, M1 = 2 / (L * d_V), self.moments.M1
        middle = self.Z1.T @ kron(eye(L, self.X), self.W_V @ self.W_V.T) @ self.Z1
        blocks: dict[Pair, Tensor] = {("V", "V"): c * kron(M1.T @ M1, eye(d_V, self.X))}
        for one in "QK":
            blocks["V", one] = c / d_K**0.5 * kron(M1.T, self.W_V.T) @ self.Z1 @ self.U[one]
            for two in "QK":
                blocks[one, two] = c / d_K * self.U[one].T @ middle @ self.U[two]
        return blocks

    def second_derivatives(self) -> dict[Pair, Tensor]:
        """∂²F/∂W∂W′ = ∂vec(∂F/∂W)/∂vec(W′)ᵀ, V first in its pairs and Q before K.

        (α, β): (I ⊗ W_Vᵀ ⊗ U_αᵀ) Z₂ U_β/d_K, for (Q, K) plus `bilinear` ⊗ I_{d_K}/√d_K;
        (V, α): (I ⊗ S_V) Z₁ U_α/√d_K; (V, V): 0.

        Returns:
            One matrix (L d_V · entries of W, entries of W′) for each pair.
        """
        L, d, d_K, d_V = self.sizes
        I_L, root = eye(L, self.X), d_K**0.5
        derivatives: dict[Pair, Tensor] = {("V", "V"): self.X.new_zeros(L * d_V * d * d_V, d * d_V)}
        for one, two in ("QQ", "QK", "KK"):
            derivatives[one, two] = kron(I_L, self.W_V.T, self.U[one].T) @ self.Z2 @ self.U[two] / d_K
        derivatives["Q", "K"] = derivatives["Q", "K"] + kron(self.bilinear, eye(d_K, self.X)) / root
        for one in "QK":
            derivatives["V", one] = kron(I_L, self.S(d_V)) @ self.Z1 @ self.U[one] / root
        return derivatives

    def functional(self) -> dict[Pair, Tensor]:
        """Return the blocks of H_f by Theorem 3.2 as matrices, c R ∂²F/∂W∂W′, with V first in its pairs.

        (α, β): c/d_K R_{d d_K} (I ⊗ W_Vᵀ ⊗ U_αᵀ) Z₂ U_β, plus the mixed term if α ≠ β;
        (V, α): c/√d_K R_{d d_V} (I ⊗ S_V) Z₁ U_α; (V, V): 0.
        """
        L, _, _, d_V = self.sizes
        num = L * d_V
        blocks = {pair: 2 / num * self.R(len(H) // num) @ H for pair, H in self.second_derivatives().items()}
        return blocks | {("K", "Q"): blocks["Q", "K"].T}

    @cached_property
    def bilinear(self) -> Tensor:
        """(I ⊗ W_Vᵀ ⊗ I_d)(Z₁ ⊗ I_d) S_Q, (L d_V d, d): ∂² of the scores, which only (Q, K) has."""
        L, d, _, _ = self.sizes
        return kron(eye(L, self.X), self.W_V.T, eye(d, self.X)) @ kron(self.Z1, eye(d, self.X)) @ self.S(d)

    @cached_property
    def mixed(self) -> Tensor:
        """c/√d_K [R_d (I ⊗ W_Vᵀ ⊗ I_d)(Z₁ ⊗ I_d) S_Q] ⊗ I_{d_K}: ∂² of the scores, indefinite."""
        L, d, d_K, d_V = self.sizes
        return 2 / (L * d_V * d_K**0.5) * kron(self.R(d) @ self.bilinear, eye(d_K, self.X))


def eye(n: int, like: Tensor) -> Tensor:
    """Return I_n in the dtype and on the device of `like`."""
    return torch.eye(n, dtype=like.dtype, device=like.device)


def kron(*factors: Tensor) -> Tensor:
    """Return A ⊗ B ⊗ …, always contiguous (`torch.kron` raises for some transposed factors)."""
    product = factors[0]
    for B in factors[1:]:
        rows, columns = product.shape[0] * B.shape[0], product.shape[1] * B.shape[1]
        product = (product[:, None, :, None] * B[None, :, None, :]).reshape(rows, columns)
    return product


def vec(A: Tensor) -> Tensor:
    """Return vec_r(A) as a column: (mn, 1)."""
    return A.reshape(-1, 1)


def commutation(m: int, n: int, like: Tensor | None = None) -> Tensor:
    """K_{m,n}, (mn, mn): K vec_r(N) = vec_r(Nᵀ) for N of n × m, so K vec_c(M) = vec_c(Mᵀ) for M of m × n.

    It has the dtype and device of `like`; float64 by default.
    """
    like = torch.zeros((), dtype=torch.float64) if like is None else like
    order = torch.arange(m * n, device=like.device).reshape(n, m).T.reshape(-1)
    return eye(m * n, like)[order]


def diagonal_derivative(n: int, like: Tensor) -> Tensor:
    """∂diag(v)/∂v = [e_1 ⊗ e_1, …, e_n ⊗ e_n]: (n², n)."""
    derivative = torch.zeros(n, n, n, dtype=like.dtype, device=like.device)
    index = torch.arange(n, device=like.device)
    derivative[index, index, index] = 1
    return derivative.reshape(n * n, n)


def kron_derivatives(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """∂(A ⊗ B)/∂A and ∂(A ⊗ B)/∂B for A of n × q, B of p × r.

    (I_n ⊗ K_{p,q} ⊗ I_r)(I_{nq} ⊗ vec_r B) and (I_n ⊗ K_{p,q} ⊗ I_r)(vec_r A ⊗ I_{pr}).
    """
    (n, q), (p, r) = A.shape, B.shape
    shuffle = kron(eye(n, A), commutation(p, q, A), eye(r, A))
    return shuffle @ kron(eye(n * q, A), vec(B)), shuffle @ kron(vec(A), eye(p * r, A))
