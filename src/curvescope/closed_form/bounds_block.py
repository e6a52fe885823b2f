"""Theorem 6 of petrov2025 with its errors mended: bounds of a post-norm Transformer block.

The block is Y = LN(X + F(X)), Z = LN(Y + relu(Y W_1) W_2): one head, no biases, norms without ε, gain or
shift. The published theorem bounds tensors of second derivatives before they meet the gradient of the loss;
here the gradient is carried back first, so that each term is the norm of a small matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from curvescope.closed_form.bound_locals import HeadFactors, HeadLocals, attention_weights, head_locals
from curvescope.closed_form.bound_sums import ROUNDING, spectral_norm
from curvescope.closed_form.bounds import BlockBounds, block_bounds, upper_bounds
from curvescope.closed_form.bounds_corrected import gradient_norms
from curvescope.core.errors import ShapeError, UsageError

NAMES = ["1", "2", "Q", "K", "V"]


@dataclass(frozen=True)
class BlockPoint:
    """One forward pass of the block, float64; a row is a token."""

    X: Tensor  # (L, d)
    weights: dict[str, Tensor]  # Q, K, V, 1, 2
    R: Tensor  # X + F(X), the first norm's input
    Y: Tensor
    S: Tensor  # Y + FFN(Y), the second norm's input
    Z: Tensor
    hidden: Tensor  # relu(Y W_1), (L, d_ff)
    active: Tensor  # 1 where Y W_1 > 0

    @property
    def sigma_R(self) -> Tensor:
        """Standard deviation of each row of R: (L,)."""
        return self.R.std(1, correction=0)

    @property
    def sigma_S(self) -> Tensor:
        """Standard deviation of each row of S: (L,)."""
        return self.S.std(1, correction=0)


@dataclass(frozen=True)
class _Norms:
    """What the bound of each pair of weights is made of, weights in the order of NAMES."""

    J: Tensor  # (5,) ‖∂Z/∂W_i‖
    B: Tensor  # (5,) ‖∂S/∂W_i‖
    G: Tensor  # (3,) ‖∂F/∂W_k‖
    Y: Tensor  # (3,) ‖∂Y/∂W_k‖
    attention: Tensor  # (3, 3) bounds of the functional part of the attention
    bend_S: Tensor  # largest norm of the second norm's second derivative against the loss gradient
    bend_R: Tensor  # the same of the first norm


def block_forward(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, W_1: Tensor, W_2: Tensor) -> BlockPoint:
    """The block's activations at X (L, d); W_Q, W_K (d, d_K), W_V (d, d), W_1 (d, d_ff), W_2 (d_ff, d)."""
    X, W_Q, W_K, W_V, W_1, W_2 = (tensor.double() for tensor in (X, W_Q, W_K, W_V, W_1, W_2))
    d = X.shape[-1]
    if X.ndim != 2 or W_V.shape != (d, d) or W_1.shape[:1] != (d,) or W_2.shape != (W_1.shape[-1], d):
        raise ShapeError(
            f"expected X (L, d), W_V (d, d), W_1 (d, d_ff), W_2 (d_ff, d), got {tuple(X.shape)}, "
            f"{tuple(W_V.shape)}, {tuple(W_1.shape)}, {tuple(W_2.shape)}"
        )
    R = X + attention_weights(X, W_Q, W_K, None, W_Q.shape[1] ** -0.5) @ X @ W_V
    Y = _norm(R)
    hidden = torch.relu(Y @ W_1)
    S = Y + hidden @ W_2
    weights = {"Q": W_Q, "K": W_K, "V": W_V, "1": W_1, "2": W_2}
    return BlockPoint(X, weights, R, Y, S, _norm(S), hidden, (Y @ W_1 > 0).double())


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
    """Bounds for a post-norm block with ReLU, weights 1, 2, Q, K, V: shapes as in `block_forward`.

    b_ij = β‖∂Z/∂W_i‖‖∂Z/∂W_j‖ + h_S‖∂S/∂W_i‖‖∂S/∂W_j‖ + x_ij: the loss Hessian, the second norm's curvature
    against the loss gradient, and the curvature of everything before it. `measured` takes the norms of the
    Jacobians themselves, Ld rows each; otherwise they are products of operator norms.

    Args:
        X: (L, d).
        W_Q: (d, d_K).
        W_K: (d, d_K).
        W_V: (d, d).
        W_1: (d, d_ff).
        W_2: (d_ff, d).
        target: mean squared error ‖Z − target‖_F²/(Ld).
        G: instead of a target, the gradient of any loss in Z, (L, d); and
        curvature: a bound on the norm of its Hessian in Z (cross-entropy of Z, mean over tokens: 1/(2L)).
        measured: see above.
    """
    at = block_forward(X, W_Q, W_K, W_V, W_1, W_2)
    G, curvature = _loss(at.Z, target, G, curvature)
    V = _pull(at.S, G)
    e = (V @ at.weights["2"].mT) * at.active
    W = V + e @ at.weights["1"].mT
    U = _pull(at.R, W)
    norms = _measured(at, G, W, U) if measured else _from_operator_norms(at, G, W, U)
    return block_bounds(NAMES, _assemble(at, norms, V, e, curvature) * (1 + ROUNDING))


def _loss(
    Z: Tensor, target: Tensor | None, G: Tensor | None, curvature: float | None
) -> tuple[Tensor, float]:
    """Gradient of the loss in Z and a bound on its Hessian there."""
    given = [value is not None for value in (target, G, curvature)]
    if given not in ([True, False, False], [False, True, True]):
        raise UsageError("expected either a target, or both G and a curvature")
    for tensor in (target, G):
        if tensor is not None and tensor.shape != Z.shape:
            raise ShapeError(f"expected the shape of the outputs {tuple(Z.shape)}, got {tuple(tensor.shape)}")
    if G is not None and curvature is not None:
        return G.double(), curvature
    assert target is not None
    c = 2 / Z.numel()
    return c * (Z - target.double()), c


def _assemble(at: BlockPoint, norms: _Norms, V: Tensor, e: Tensor, curvature: float) -> Tensor:
    """The table b_ij: (5, 5)."""
    rest = V.new_zeros(5, 5)
    v = spectral_norm(V)
    rest[0, 1] = rest[1, 0] = spectral_norm(at.Y) * v
    rest[0, 2:] = rest[2:, 0] = spectral_norm(e) * norms.Y
    rest[1, 2:] = rest[2:, 1] = v * spectral_norm(at.weights["1"]) * norms.Y
    rest[2:, 2:] = norms.bend_R * torch.outer(norms.G, norms.G) + norms.attention
    return curvature * torch.outer(norms.J, norms.J) + norms.bend_S * torch.outer(norms.B, norms.B) + rest


def _measured(at: BlockPoint, G: Tensor, W: Tensor, U: Tensor) -> _Norms:
    """Norms of the Jacobians as they are; of the attention by its a-posteriori bounds."""
    weights = at.weights
    head = head_locals(at.X, weights["Q"], weights["K"], weights["V"], U, 0.0)
    J_R, J_S = _norm_jacobian(at.R), _norm_jacobian(at.S)
    through = torch.eye(at.X.shape[1]).to(at.X) + torch.einsum(
        "ha,th,bh->tab", weights["2"], at.active, weights["1"]
    )
    F = _attention_jacobians(head)
    Y = [torch.einsum("tab,tbk->tak", J_R, jacobian) for jacobian in F]
    first = torch.einsum("ha,th,tp->taph", weights["2"], at.active, at.Y).flatten(2)
    second = torch.einsum("th,ab->tahb", at.hidden, torch.eye(at.X.shape[1]).to(at.X)).flatten(2)
    B = [first, second, *(torch.einsum("tab,tbk->tak", through, jacobian) for jacobian in Y)]
    return _Norms(
        J=_sizes([torch.einsum("tab,tbk->tak", J_S, jacobian) for jacobian in B]),
        B=_sizes(B),
        G=_sizes(F),
        Y=_sizes(Y),
        attention=upper_bounds(HeadFactors(head, outer=False, functional=True)),
        bend_S=spectral_norm(_norm_curvature(at.S, G)).max(),
        bend_R=spectral_norm(_norm_curvature(at.R, W)).max(),
    )


def _from_operator_norms(at: BlockPoint, G: Tensor, W: Tensor, U: Tensor) -> _Norms:
    """Norms as products: ‖J_LN‖ ≤ 1/σ, ‖J_SY‖ ≤ 1 + ‖W_1‖‖W_2‖, and the attention's a-priori ones."""
    weights, d = at.weights, at.X.shape[1]
    head = gradient_norms(
        at.X, weights["Q"], weights["K"], weights["V"], U, scale=weights["Q"].shape[1] ** -0.5
    )
    first, second = spectral_norm(weights["1"]), spectral_norm(weights["2"])
    jacobians = torch.stack([head.J_Q, head.J_K, head.J_V])
    Y = jacobians / at.sigma_R.min()
    B = torch.cat(
        [torch.stack([second * spectral_norm(at.Y), spectral_norm(at.hidden)]), (1 + first * second) * Y]
    )
    return _Norms(
        J=B / at.sigma_S.min(),
        B=B,
        G=jacobians,
        Y=Y,
        attention=head.table(0.0),
        bend_S=(sqrt(2 / d) * G.norm(dim=1) / at.sigma_S**2).max(),
        bend_R=(sqrt(2 / d) * W.norm(dim=1) / at.sigma_R**2).max(),
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


def _norm(R: Tensor) -> Tensor:
    """Layer norm of each row without ε."""
    sigma = R.std(1, correction=0)
    if not bool((sigma > 0).all()):
        raise UsageError("expected a positive variance in each row that is normalised, got a constant row")
    return (R - R.mean(1, keepdim=True)) / sigma[:, None]


def _projector(R: Tensor) -> Tensor:
    """I − 11ᵀ/d − yyᵀ/d for each row, y its norm: (L, d, d)."""
    d, y = R.shape[1], _norm(R)
    return torch.eye(d).to(R) - 1 / d - y[:, :, None] * y[:, None] / d


def _norm_jacobian(R: Tensor) -> Tensor:
    """Jacobian of the layer norm at each row: (L, d, d), symmetric."""
    return _projector(R) / R.std(1, correction=0)[:, None, None]


def _pull(R: Tensor, g: Tensor) -> Tensor:
    """Loss gradient in R from that in LN(R)."""
    return (_norm_jacobian(R) @ g[:, :, None])[:, :, 0]


def _norm_curvature(R: Tensor, g: Tensor) -> Tensor:
    """Second derivative of ⟨g, LN(R)⟩ at each row: −[(Qg)yᵀ + y(Qg)ᵀ + (g·y)Q]/(dσ²), (L, d, d)."""
    y, Q = _norm(R), _projector(R)
    crossed = (Q @ g[:, :, None]) * y[:, None]
    bend = crossed + crossed.mT + (g * y).sum(1)[:, None, None] * Q
    return -bend / (R.shape[1] * R.var(1, correction=0)[:, None, None])
