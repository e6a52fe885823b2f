"""Theorems 2 to 5 of petrov2025 (arXiv 2510.16927) in Kronecker form, corrected, for comparison.

Theorems 4 and 5 are about a post-norm block. Y = LN(X + F(X)), Z = LN(S) with S = Y + ReLU(Y W_1) W_2, F one
attention head; no biases, γ = 1, β = 0, ε = 0. These matrices are huge and serve for comparison only:
`curvescope.closed_form.network.stack` computes the same contracted.

Theorems 2 and 3 are about LayerNorm of a matrix. X is L × d, LN(X) = P M with M = X − X 11ᵀ/d, P = D⁻¹,
D = diag(σ) and σ_i the standard deviation of row i; no ε, γ or β. Matrices are flattened row by row, ∂F/∂X is
∂vec_r F/∂vec_r(X)ᵀ. Use `curvescope.closed_form.norms` for computations.

The module also has the first and second derivatives of one attention head in Kronecker form.

F = A X W_V, A = softmax(X W_Q W_Kᵀ Xᵀ/√d_K), X of L × d, W_Q and W_K of d × d_K, W_V of d × d; no mask, no
bias. Second derivatives are ∂vec_r(∂F/∂W)/∂vec_r(W′)ᵀ: (L d · entries of W, entries of W′). Z_1, Z_2, U and S
are those of `curvescope.closed_form.printed.kronecker`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvescope.closed_form.block_matrix import Pair
from curvescope.closed_form.norms import norm_output, norm_point
from curvescope.closed_form.printed.kronecker import (
    Theorem,
    commutation,
    diagonal_derivative,
    eye,
    kron,
    kron_derivatives,
)
from curvescope.core.errors import ShapeError, UsageError

NAMES = ("W_Q", "W_K", "W_V")


def head(X: Tensor, params: Mapping[str, Tensor]) -> Theorem:
    """Return the head with W_Q, W_K, W_V at tokens X (L, d)."""
    W_Q, W_K, W_V = (params[name] for name in NAMES)
    return Theorem(X, W_Q, W_K, W_V, torch.zeros(len(X), W_V.shape[1]).to(X))


def head_output(at: Theorem) -> Tensor:
    """F = A X W_V: (L, d)."""
    return at.A @ at.X @ at.W_V


def head_jacobians(at: Theorem) -> dict[str, Tensor]:
    """G_V = A X ⊗ I_d and G_Q, G_K = (I_L ⊗ W_Vᵀ) Z_1 U/√d_K: (L d, entries)."""
    L, d, k, _ = at.sizes
    outer = kron(eye(L, at.X), at.W_V.T) / k**0.5
    jacobians = {f"W_{role}": outer @ at.Z1 @ at.U[role] for role in "QK"}
    return jacobians | {"W_V": kron(at.A @ at.X, eye(d, at.X))}


def head_key_jacobian_as_printed(at: Theorem) -> Tensor:
    """G_K with K_{d,d_K} in place of K_{d_K,d}, as in the proof of Theorem 4; wrong unless d = d_K."""
    L, d, k, _ = at.sizes
    U = kron(at.W_Q, eye(d, at.X)) @ commutation(d, k, at.X)
    return kron(eye(L, at.X), at.W_V.T) @ at.Z1 @ U / k**0.5


def head_second_derivatives(at: Theorem) -> dict[Pair, Tensor]:
    """Φ = ∂²F/∂W∂W′ for all nine pairs; the paper prints QQ, VQ and QK.

    Formulas as in `Theorem.second_derivatives`; the other order of a pair is a permutation of rows.
    """
    derivatives = {(f"W_{a}", f"W_{b}"): H for (a, b), H in at.second_derivatives().items()}
    transposed = {(b, a): exchanged(H, at.X.numel()) for (a, b), H in derivatives.items() if a != b}
    return derivatives | transposed


def head_second_derivatives_as_printed(at: Theorem) -> dict[Pair, Tensor]:
    """Φ as in the paper's lemma, which keeps the loss's factor 2/(L d) (its I_{d_V} read as I_L); wrong."""
    L, d, _, _ = at.sizes
    return {pair: 2 / (L * d) * block for pair, block in head_second_derivatives(at).items()}


def exchanged(block: Tensor, num_outputs: int) -> Tensor:
    """∂²F/∂W′∂W from ∂²F/∂W∂W′: rows ((f, w), w′) become ((f, w′), w)."""
    three = block.reshape(num_outputs, -1, block.shape[1])
    return three.transpose(1, 2).reshape(-1, three.shape[1])


WEIGHTS = ("W_1", "W_2", *NAMES)


@dataclass(frozen=True)
class PostNormBlock:
    """The theorems' block at tokens X (L, d), with W_Q, W_K, W_V, W_1, W_2."""

    X: Tensor
    params: Mapping[str, Tensor]

    @cached_property
    def head(self) -> Theorem:
        """The attention head F at X."""
        return head(self.X, self.params)

    @cached_property
    def R(self) -> Tensor:
        """X + F(X), which the first norm reads."""
        return self.X + head_output(self.head)

    @cached_property
    def Y(self) -> Tensor:
        """LN(X + F(X))."""
        return norm_output(norm_point(self.R))

    @cached_property
    def hidden(self) -> Tensor:
        """ReLU(Y W_1): (L, d_ff)."""
        return torch.relu(self.Y @ self.params["W_1"])

    @cached_property
    def S(self) -> Tensor:
        """Y + ReLU(Y W_1) W_2, which the second norm reads."""
        return self.Y + self.hidden @ self.params["W_2"]

    @property
    def output(self) -> Tensor:
        """Z: (L, d)."""
        return norm_output(norm_point(self.S))

    @cached_property
    def D(self) -> Tensor:
        """diag(vec_r 1_{Y W_1 > 0}); the print has 1_{X > 0}."""
        return torch.diag((self.Y @ self.params["W_1"] > 0).to(self.X).reshape(-1))

    @cached_property
    def J_SY(self) -> Tensor:
        """∂S/∂Y = (I_L ⊗ W_2ᵀ) D (I_L ⊗ W_1ᵀ) + I."""
        I_L, W = eye(len(self.X), self.X), self.params
        return kron(I_L, W["W_2"].T) @ self.D @ kron(I_L, W["W_1"].T) + eye(self.X.numel(), self.X)

    @cached_property
    def G(self) -> dict[str, Tensor]:
        """∂Y/∂W = J_Y ∂F/∂W for W_Q, W_K, W_V, J_Y = ∂Y/∂(X + F)."""
        J_Y = layernorm_jacobian_theorem2(self.R)
        return {name: J_Y @ J for name, J in head_jacobians(self.head).items()}

    @cached_property
    def B(self) -> dict[str, Tensor]:
        """∂S/∂W for the five weights: B_1, B_2, and J_SY ∂Y/∂W."""
        I_L, (d, m) = eye(len(self.X), self.X), self.params["W_1"].shape
        jacobians = {
            "W_1": kron(I_L, self.params["W_2"].T) @ self.D @ kron(self.Y, eye(m, self.X)),
            "W_2": kron(self.hidden, eye(d, self.X)),
        }
        return jacobians | {name: self.J_SY @ J for name, J in self.G.items()}


def block_jacobians_theorem4(block: PostNormBlock) -> dict[str, Tensor]:
    """∂Z/∂W = J_Z B for the five weights: (L d, entries of W)."""
    J_Z = layernorm_jacobian_theorem2(block.S)
    return {name: J_Z @ B for name, B in block.B.items()}


def block_second_derivatives_theorem5(block: PostNormBlock) -> dict[Pair, Tensor]:
    """∂²Z/∂W∂W′ = (J_Z ⊗ I) ξ + (I ⊗ B_Wᵀ) H_Z B_W′ for all 25 pairs: (L d · entries of W, entries of W′).

    ξ = ∂B_W/∂W′ is the theorem's table with swapped, missing and non-conformable entries corrected.
    """
    return _second_derivatives(block, inner_second_derivatives(block))


def block_second_derivatives_theorem5_as_printed(block: PostNormBlock) -> dict[Pair, Tensor]:
    """Theorem 5 for (W_1, W_2) with the ξ printed for it, which is ∂B_2/∂W_1; wrong.

    The printed formulas for (W_2, W_1) and (W_1, attention) have inconsistent shapes, so they have no value.
    """
    printed: dict[Pair, Tensor] = {("W_1", "W_2"): inner_second_derivatives(block)["W_2", "W_1"]}
    return _second_derivatives(block, printed)


def block_functional_theorem5(block: PostNormBlock, target: Tensor) -> dict[Pair, Tensor]:
    """Functional Hessian of ‖Z − target‖²/(L d): (∂ℓ/∂Z ⊗ I) ∂²Z/∂W∂W′, ∂ℓ/∂Z = 2 (Z − target)/(L d)."""
    g = 2 / block.X.numel() * (block.output - target).reshape(-1)
    return _contracted(block, g)


def block_functional_theorem5_as_printed(block: PostNormBlock, target: Tensor) -> dict[Pair, Tensor]:
    """Evaluate the printed formula with R^tr = vec_r(Z − target)ᵀ ⊗ I, which lacks the factor 2/(L d)."""
    return _contracted(block, (block.output - target).reshape(-1))


def _contracted(block: PostNormBlock, g: Tensor) -> dict[Pair, Tensor]:
    derivatives = block_second_derivatives_theorem5(block)
    return {
        pair: torch.einsum("f,fij->ij", g, H.reshape(len(g), -1, H.shape[1]))
        for pair, H in derivatives.items()
    }


def _second_derivatives(block: PostNormBlock, xi: Mapping[Pair, Tensor]) -> dict[Pair, Tensor]:
    J_Z, H_Z = layernorm_jacobian_theorem2(block.S), layernorm_second_derivative_theorem3(block.S)
    I_n, derivatives = eye(block.X.numel(), block.X), {}
    for (a, b), inner in xi.items():
        I_a = eye(block.params[a].numel(), block.X)
        derivatives[a, b] = kron(J_Z, I_a) @ inner + kron(I_n, block.B[a].T) @ H_Z @ block.B[b]
    return derivatives


def inner_second_derivatives(block: PostNormBlock) -> dict[Pair, Tensor]:
    """ξ = ∂B_W/∂W′ = ∂²S/∂W∂W′ for all pairs: (L d · entries of W, entries of W′)."""
    n = block.X.numel()
    derivatives = _xi_ffn(block) | _xi_attention(block)
    for name in NAMES:
        for first in ("W_1", "W_2"):
            derivatives[name, first] = exchanged(derivatives[first, name], n)
    return {(a, b): derivatives[a, b] for a in WEIGHTS for b in WEIGHTS}


def _xi_ffn(block: PostNormBlock) -> dict[Pair, Tensor]:
    """The pairs with W_1 or W_2 first. ξ_11 = ξ_22 = 0 (their second derivatives are not: H_Z)."""
    W_1, W_2, Y, X = block.params["W_1"], block.params["W_2"], block.Y, block.X
    (L, d), m, n = X.shape, W_1.shape[1], X.numel()
    I_L = eye(L, X)
    from_Y = kron(Y, eye(m, X))  # ∂(Y W_1)/∂W_1
    spread = kron_derivatives(block.hidden, eye(d, X))[0]  # ∂(ReLU ⊗ I_d)/∂ReLU
    zero = torch.zeros(n * d * m, d * m).to(X)
    out = kron_derivatives(I_L, W_2.T)[1] @ commutation(d, m, X)  # ∂(I_L ⊗ W_2ᵀ)/∂W_2
    xi = {
        ("W_1", "W_1"): zero,
        ("W_2", "W_2"): zero,
        ("W_2", "W_1"): spread @ block.D @ from_Y,
        ("W_1", "W_2"): kron(eye(n, X), from_Y.T @ block.D) @ out,
    }
    inner = kron(kron(I_L, W_2.T) @ block.D, eye(d * m, X)) @ kron_derivatives(Y, eye(m, X))[0]
    for name in NAMES:
        xi["W_1", name] = inner @ block.G[name]
        xi["W_2", name] = spread @ block.D @ kron(I_L, W_1.T) @ block.G[name]
    return xi


def _xi_attention(block: PostNormBlock) -> dict[Pair, Tensor]:
    """(J_SY ⊗ I)[(I ⊗ F_kᵀ) H_Y F_l + (J_Y ⊗ I) Φ_kl] for k, l of W_Q, W_K, W_V, with F_k = ∂F/∂W_k."""
    X, F, phi = block.X, head_jacobians(block.head), head_second_derivatives(block.head)
    J_Y, H_Y = layernorm_jacobian_theorem2(block.R), layernorm_second_derivative_theorem3(block.R)
    I_n, xi = eye(X.numel(), X), {}
    for (a, b), second in phi.items():
        I_a = eye(block.params[a].numel(), X)
        inner = kron(I_n, F[a].T) @ H_Y @ F[b] + kron(J_Y, I_a) @ second
        xi[a, b] = kron(block.J_SY, I_a) @ inner
    return xi


@dataclass(frozen=True)
class _Parts:
    """Quantities of the proofs: LN(X) = P M, ∂P/∂X = A_1 B_1/√d, B_1 = E A_2 N."""

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
    the proof corrected: ∂(P ⊗ I_d)/∂X has K_{d,L} and vec_r I_d, both terms of ∂²P/∂X² have the factor 1/√d,
    ∂D/∂X = B_1/√d, and ∂A_2/∂X = (∂P/∂X)/√d is added.
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
