"""Theorems 4 and 5 of petrov2025 (arXiv 2510.16927): a post-norm block in Kronecker form, put right.

Y = LN(X + F(X)), Z = LN(S) with S = Y + ReLU(Y W_1) W_2, F one attention head; no biases, γ = 1, β = 0,
ε = 0. These matrices are huge and here to be compared with: `curvescope.closed_form.network.stack` computes
the same contracted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvescope.closed_form.block_matrix import Pair
from curvescope.closed_form.norms.derivatives import norm_output, norm_point
from curvescope.closed_form.printed.head_theorems import (
    NAMES,
    exchanged,
    head,
    head_jacobians,
    head_output,
    head_second_derivatives,
)
from curvescope.closed_form.printed.kronecker import Theorem
from curvescope.closed_form.printed.norm_theorems import (
    layernorm_jacobian_theorem2,
    layernorm_second_derivative_theorem3,
)
from curvescope.closed_form.printed.vec_rules import commutation, eye, kron, kron_derivatives

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
        found = {
            "W_1": kron(I_L, self.params["W_2"].T) @ self.D @ kron(self.Y, eye(m, self.X)),
            "W_2": kron(self.hidden, eye(d, self.X)),
        }
        return found | {name: self.J_SY @ J for name, J in self.G.items()}


def block_jacobians_theorem4(block: PostNormBlock) -> dict[str, Tensor]:
    """∂Z/∂W = J_Z B for the five weights: (L d, entries of W)."""
    J_Z = layernorm_jacobian_theorem2(block.S)
    return {name: J_Z @ B for name, B in block.B.items()}


def block_second_derivatives_theorem5(block: PostNormBlock) -> dict[Pair, Tensor]:
    """∂²Z/∂W∂W′ = (J_Z ⊗ I) ξ + (I ⊗ B_Wᵀ) H_Z B_W′ for all 25 pairs: (L d · entries of W, entries of W′).

    ξ = ∂B_W/∂W′ is the table of the theorem with its swapped, missing and non-conformable entries put right.
    """
    return _second_derivatives(block, inner_second_derivatives(block))


def block_second_derivatives_theorem5_as_printed(block: PostNormBlock) -> dict[Pair, Tensor]:
    """Theorem 5 for (W_1, W_2) with the ξ printed for it, which is ∂B_2/∂W_1; wrong.

    What is printed for (W_2, W_1) and (W_1, attention) has shapes that do not fit, so it has no value.
    """
    printed: dict[Pair, Tensor] = {("W_1", "W_2"): inner_second_derivatives(block)["W_2", "W_1"]}
    return _second_derivatives(block, printed)


def block_functional_theorem5(block: PostNormBlock, target: Tensor) -> dict[Pair, Tensor]:
    """Functional Hessian of ‖Z − target‖²/(L d): (∂ℓ/∂Z ⊗ I) ∂²Z/∂W∂W′, ∂ℓ/∂Z = 2 (Z − target)/(L d)."""
    g = 2 / block.X.numel() * (block.output - target).reshape(-1)
    return _contracted(block, g)


def block_functional_theorem5_as_printed(block: PostNormBlock, target: Tensor) -> dict[Pair, Tensor]:
    """As printed, with R^tr = vec_r(Z − target)ᵀ ⊗ I: the loss's factor 2/(L d) is lost."""
    return _contracted(block, (block.output - target).reshape(-1))


def _contracted(block: PostNormBlock, g: Tensor) -> dict[Pair, Tensor]:
    found = block_second_derivatives_theorem5(block)
    return {
        pair: torch.einsum("f,fij->ij", g, H.reshape(len(g), -1, H.shape[1])) for pair, H in found.items()
    }


def _second_derivatives(block: PostNormBlock, xi: Mapping[Pair, Tensor]) -> dict[Pair, Tensor]:
    J_Z, H_Z = layernorm_jacobian_theorem2(block.S), layernorm_second_derivative_theorem3(block.S)
    I_n, found = eye(block.X.numel(), block.X), {}
    for (a, b), inner in xi.items():
        I_a = eye(block.params[a].numel(), block.X)
        found[a, b] = kron(J_Z, I_a) @ inner + kron(I_n, block.B[a].T) @ H_Z @ block.B[b]
    return found


def inner_second_derivatives(block: PostNormBlock) -> dict[Pair, Tensor]:
    """ξ = ∂B_W/∂W′ = ∂²S/∂W∂W′ for all pairs: (L d · entries of W, entries of W′)."""
    n = block.X.numel()
    found = _xi_ffn(block) | _xi_attention(block)
    for name in NAMES:
        for first in ("W_1", "W_2"):
            found[name, first] = exchanged(found[first, name], n)
    return {(a, b): found[a, b] for a in WEIGHTS for b in WEIGHTS}


def _xi_ffn(block: PostNormBlock) -> dict[Pair, Tensor]:
    """The pairs with W_1 or W_2 first. ξ_11 = ξ_22 = 0 (their second derivatives are not: H_Z)."""
    W_1, W_2, Y, X = block.params["W_1"], block.params["W_2"], block.Y, block.X
    (L, d), m, n = X.shape, W_1.shape[1], X.numel()
    I_L = eye(L, X)
    from_Y = kron(Y, eye(m, X))  # ∂(Y W_1)/∂W_1
    spread = kron_derivatives(block.hidden, eye(d, X))[0]  # ∂(ReLU ⊗ I_d)/∂ReLU
    zero = torch.zeros(n * d * m, d * m).to(X)
    out = kron_derivatives(I_L, W_2.T)[1] @ commutation(d, m, X)  # ∂(I_L ⊗ W_2ᵀ)/∂W_2
    found = {
        ("W_1", "W_1"): zero,
        ("W_2", "W_2"): zero,
        ("W_2", "W_1"): spread @ block.D @ from_Y,
        ("W_1", "W_2"): kron(eye(n, X), from_Y.T @ block.D) @ out,
    }
    inner = kron(kron(I_L, W_2.T) @ block.D, eye(d * m, X)) @ kron_derivatives(Y, eye(m, X))[0]
    for name in NAMES:
        found["W_1", name] = inner @ block.G[name]
        found["W_2", name] = spread @ block.D @ kron(I_L, W_1.T) @ block.G[name]
    return found


def _xi_attention(block: PostNormBlock) -> dict[Pair, Tensor]:
    """(J_SY ⊗ I)[(I ⊗ F_kᵀ) H_Y F_l + (J_Y ⊗ I) Φ_kl] for k, l of W_Q, W_K, W_V, with F_k = ∂F/∂W_k."""
    X, F, phi = block.X, head_jacobians(block.head), head_second_derivatives(block.head)
    J_Y, H_Y = layernorm_jacobian_theorem2(block.R), layernorm_second_derivative_theorem3(block.R)
    I_n, found = eye(X.numel(), X), {}
    for (a, b), second in phi.items():
        I_a = eye(block.params[a].numel(), X)
        inner = kron(I_n, F[a].T) @ H_Y @ F[b] + kron(J_Y, I_a) @ second
        found[a, b] = kron(block.J_SY, I_a) @ inner
    return found
