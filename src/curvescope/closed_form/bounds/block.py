"""Theorem 6 of petrov2025, corrected: bounds of a post-norm Transformer block.

The block is Y = LN(X + F(X)), Z = LN(Y + relu(Y W_1) W_2): one head, no biases, norms without ε, gain or
shift. The published theorem bounds tensors of second derivatives without the gradient of the loss. This
module propagates the gradient back first, so that each term is the norm of a small matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from curvescope.closed_form.bounds.head import BlockBounds, block_bounds, upper_bounds
from curvescope.closed_form.bounds.operator_norms import gradient_norms
from curvescope.closed_form.bounds.per_query import HeadFactors, HeadLocals, head_locals
from curvescope.closed_form.bounds.sums import ROUNDING, HeadInputs, head_inputs, spectral_norm
from curvescope.closed_form.norms import NormPoint, norm_curvature_norm, norm_point
from curvescope.closed_form.objectives import squared_error
from curvescope.core.errors import ShapeError, UsageError

NAMES = ["1", "2", "Q", "K", "V"]


@dataclass(frozen=True)
class BlockPoint:
    """One forward pass of the block, float64; a row is a token."""

    head: HeadInputs  # X (L, d)
    weights: dict[str, Tensor]  # 1, 2
    R: Tensor  # X + F(X), the first norm's input
    S: Tensor  # Y + FFN(Y), the second norm's input
    first: NormPoint  # at R
    second: NormPoint  # at S
    hidden: Tensor  # relu(Y W_1), (L, d_ff)
    active: Tensor  # 1 where Y W_1 > 0

    @property
    def Y(self) -> Tensor:
        """LN(R)."""
        return self.first.x_hat

    @property
    def Z(self) -> Tensor:
        """LN(S), the block's output."""
        return self.second.x_hat


@dataclass(frozen=True)
class _Norms:
    """Norms in the bound of each pair of weights; weights in the order of NAMES."""

    J: Tensor  # (5,) ‖∂Z/∂W_i‖
    B: Tensor  # (5,) ‖∂S/∂W_i‖
    F: Tensor  # (3,) ‖∂F/∂W_k‖
    Y: Tensor  # (3,) ‖∂Y/∂W_k‖
    attention: Tensor  # (3, 3) bounds of the functional Hessian of the attention
    bend_S: Tensor  # largest norm of the second norm's second derivative against the loss gradient
    bend_R: Tensor  # the same for the first norm


def block_forward(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, W_1: Tensor, W_2: Tensor) -> BlockPoint:
    """Run the block at X (L, d); W_Q, W_K (d, d_K), W_V (d, d), W_1 (d, d_ff), W_2 (d_ff, d)."""
    head, W_1, W_2, d = head_inputs(X, W_Q, W_K, W_V), W_1.double(), W_2.double(), X.shape[-1]
    if X.ndim != 2 or W_V.shape != (d, d) or W_1.shape[:1] != (d,) or W_2.shape != (W_1.shape[-1], d):
        raise ShapeError(
            f"expected X (L, d), W_V (d, d), W_1 (d, d_ff), W_2 (d_ff, d), got {tuple(X.shape)}, "
            f"{tuple(W_V.shape)}, {tuple(W_1.shape)}, {tuple(W_2.shape)}"
        )
    R = head.X + head.core().output @ head.W_V
    first = norm_point(R)
    hidden = torch.relu(first.x_hat @ W_1)
    S = first.x_hat + hidden @ W_2
    return BlockPoint(head, {"1": W_1, "2": W_2}, R, S, first, norm_point(S), hidden, (hidden > 0).double())


def theorem6_corrected(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    W_1: Tensor,
    W_2: Tensor,
    *,
    target: Tensor | None = None,
    G: Tensor | None = None,
    curvature: float | None = None,
    measured: bool = True,
) -> BlockBounds:
    """Return bounds for a post-norm block with ReLU, weights 1, 2, Q, K, V: shapes as in `block_forward`.

    b_ij = β‖∂Z/∂W_i‖‖∂Z/∂W_j‖ + h_S‖∂S/∂W_i‖‖∂S/∂W_j‖ + x_ij: the loss Hessian, the second norm's curvature
    against the loss gradient, and the curvature of everything before it. `measured` uses the norms of the
    Jacobians, Ld rows each; otherwise products of operator norms bound them.

    The loss is the mean squared error ‖Z − target‖_F²/(Ld), or any other by its gradient G in Z, (L, d), and
    a bound `curvature` on the norm of its Hessian there (cross-entropy of Z, mean over tokens: 1/(2L)).
    """
    at = block_forward(X, W_Q, W_K, W_V, W_1, W_2)
    G, curvature = _loss(at.Z, target, G, curvature)
    V = at.second.apply(G)  # ∂ℓ/∂S, then ∂ℓ/∂(Y W_1), ∂ℓ/∂Y and ∂ℓ/∂R
    e = (V @ at.weights["2"].mT) * at.active
    W = V + e @ at.weights["1"].mT
    U = at.first.apply(W)
    norms = _measured(at, G, W, U) if measured else _from_operator_norms(at, G, W, U)
    return block_bounds(NAMES, _assemble(at, norms, V, e, curvature) * (1 + ROUNDING))


def _loss(
    Z: Tensor, target: Tensor | None, G: Tensor | None, curvature: float | None
) -> tuple[Tensor, float]:
    """Return the gradient of the loss in Z and a bound on its Hessian."""
    given = [value is not None for value in (target, G, curvature)]
    if given not in ([True, False, False], [False, True, True]):
        raise UsageError("expected either a target, or both G and a curvature")
    for tensor in (target, G):
        if tensor is not None and tensor.shape != Z.shape:
            raise ShapeError(f"expected the shape of the outputs {tuple(Z.shape)}, got {tuple(tensor.shape)}")
    if G is not None and curvature is not None:
        return G.double(), curvature
    assert target is not None
    G, c = squared_error(Z, target.double())
    return G, float(c)


def _assemble(at: BlockPoint, norms: _Norms, V: Tensor, e: Tensor, curvature: float) -> Tensor:
    """Return the table b_ij: (5, 5)."""
    rest = V.new_zeros(5, 5)
    v = spectral_norm(V)
    rest[0, 1] = rest[1, 0] = spectral_norm(at.Y) * v
    rest[0, 2:] = rest[2:, 0] = spectral_norm(e) * norms.Y
    rest[1, 2:] = rest[2:, 1] = v * spectral_norm(at.weights["1"]) * norms.Y
    rest[2:, 2:] = norms.bend_R * torch.outer(norms.F, norms.F) + norms.attention
    return curvature * torch.outer(norms.J, norms.J) + norms.bend_S * torch.outer(norms.B, norms.B) + rest


def _measured(at: BlockPoint, G: Tensor, W: Tensor, U: Tensor) -> _Norms:
    """Return the norms of the Jacobians, and a-posteriori bounds for the attention."""
    weights = at.weights
    head = head_locals(at.head, U, 0.0)
    eye = torch.eye(at.R.shape[1]).to(at.R)
    through = eye + torch.einsum("ha,th,bh->tab", weights["2"], at.active, weights["1"])  # ∂S/∂Y
    F = _attention_jacobians(head)
    Y = [at.first.jacobian @ jacobian for jacobian in F]
    first = torch.einsum("ha,th,tp->taph", weights["2"], at.active, at.Y).flatten(2)
    second = torch.einsum("th,ab->tahb", at.hidden, eye).flatten(2)
    B = [first, second, *(through @ jacobian for jacobian in Y)]
    return _Norms(
        J=_sizes([at.second.jacobian @ jacobian for jacobian in B]),
        B=_sizes(B),
        F=_sizes(F),
        Y=_sizes(Y),
        attention=upper_bounds(HeadFactors(head, outer=False, functional=True)),
        bend_S=norm_curvature_norm(at.second, G).max(),
        bend_R=norm_curvature_norm(at.first, W).max(),
    )


def _from_operator_norms(at: BlockPoint, G: Tensor, W: Tensor, U: Tensor) -> _Norms:
    """Bound the norms by products: ‖J_LN‖ ≤ 1/σ, ‖J_SY‖ ≤ 1 + ‖W_1‖‖W_2‖, a-priori for the attention."""
    weights, d = at.weights, at.R.shape[1]
    head = gradient_norms(at.head, U)
    first, second = spectral_norm(weights["1"]), spectral_norm(weights["2"])
    jacobians = torch.stack([head.J_Q, head.J_K, head.J_V])
    Y = jacobians / at.first.sigma.min()
    B = torch.cat(
        [torch.stack([second * spectral_norm(at.Y), spectral_norm(at.hidden)]), (1 + first * second) * Y]
    )
    return _Norms(
        J=B / at.second.sigma.min(),
        B=B,
        F=jacobians,
        Y=Y,
        attention=head.table(0.0),
        bend_S=(sqrt(2 / d) * G.norm(dim=1) / at.second.sigma[:, 0] ** 2).max(),
        bend_R=(sqrt(2 / d) * W.norm(dim=1) / at.first.sigma[:, 0] ** 2).max(),
    )


def _attention_jacobians(head: HeadLocals) -> list[Tensor]:
    """∂F/∂W for Q, K, V: (L, d, entries of W) each."""
    E = head.scale * head.W_V.mT @ head.M2
    eye = torch.eye(head.W_V.shape[1]).to(E)
    return [
        torch.einsum("ta,tvc->tvac", head.X, E @ head.W_K).flatten(2),
        torch.einsum("tva,tc->tvac", E, head.q).flatten(2),
        torch.einsum("ta,vw->tvaw", head.m, eye).flatten(2),
    ]


def _sizes(jacobians: list[Tensor]) -> Tensor:
    return torch.stack([spectral_norm(jacobian.flatten(0, 1)) for jacobian in jacobians])
