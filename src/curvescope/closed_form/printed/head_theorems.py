"""First and second derivatives of one attention head in Kronecker form, as petrov2025 needs them.

F = A X W_V, A = softmax(X W_Q W_Kᵀ Xᵀ/√d_K), X of L × d, W_Q and W_K of d × d_K, W_V of d × d; no mask, no
bias. Second derivatives are ∂vec_r(∂F/∂W)/∂vec_r(W′)ᵀ: (L d · entries of W, entries of W′). Z_1, Z_2, U and S
are those of `curvescope.closed_form.printed.kronecker`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvescope.closed_form.block_matrix import Pair
from curvescope.closed_form.printed.kronecker import Theorem
from curvescope.closed_form.printed.vec_rules import commutation, eye, kron

NAMES = ("W_Q", "W_K", "W_V")


def head(X: Tensor, params: Mapping[str, Tensor]) -> Theorem:
    """The head with W_Q, W_K, W_V at tokens X (L, d)."""
    W_Q, W_K, W_V = (params[name] for name in NAMES)
    return Theorem(X, W_Q, W_K, W_V, torch.zeros(len(X), W_V.shape[1]).to(X))


def head_output(at: Theorem) -> Tensor:
    """F = A X W_V: (L, d)."""
    return at.A @ at.X @ at.W_V


def head_jacobians(at: Theorem) -> dict[str, Tensor]:
    """G_V = A X ⊗ I_d and G_Q, G_K = (I_L ⊗ W_Vᵀ) Z_1 U/√d_K: (L d, entries)."""
    L, d, k, _ = at.sizes
    outer = kron(eye(L, at.X), at.W_V.T) / k**0.5
    found = {f"W_{role}": outer @ at.Z1 @ at.U[role] for role in "QK"}
    return found | {"W_V": kron(at.A @ at.X, eye(d, at.X))}


def head_key_jacobian_as_printed(at: Theorem) -> Tensor:
    """G_K with K_{d,d_K} in place of K_{d_K,d}, as in the proof of Theorem 4; wrong unless d = d_K."""
    L, d, k, _ = at.sizes
    U = kron(at.W_Q, eye(d, at.X)) @ commutation(d, k, at.X)
    return kron(eye(L, at.X), at.W_V.T) @ at.Z1 @ U / k**0.5


def head_second_derivatives(at: Theorem) -> dict[Pair, Tensor]:
    """Φ = ∂²F/∂W∂W′ for all nine pairs; the paper prints QQ, VQ and QK.

    Formulas as in `Theorem.second_derivatives`; the other order of a pair is a permutation of rows.
    """
    found = {(f"W_{a}", f"W_{b}"): H for (a, b), H in at.second_derivatives().items()}
    turned = {(b, a): exchanged(H, at.X.numel()) for (a, b), H in found.items() if a != b}
    return found | turned


def head_second_derivatives_as_printed(at: Theorem) -> dict[Pair, Tensor]:
    """Φ as in the paper's lemma, which keeps the loss's factor 2/(L d) (its I_{d_V} read as I_L); wrong."""
    L, d, _, _ = at.sizes
    return {pair: 2 / (L * d) * block for pair, block in head_second_derivatives(at).items()}


def exchanged(block: Tensor, num_outputs: int) -> Tensor:
    """∂²F/∂W′∂W from ∂²F/∂W∂W′: rows ((f, w), w′) become ((f, w′), w)."""
    three = block.reshape(num_outputs, -1, block.shape[1])
    return three.transpose(1, 2).reshape(-1, three.shape[1])
