"""Value, gradient G and Hessian B of a loss in the outputs of the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from curvescope.closed_form.softmax import softmax_along, softmax_covariance
from curvescope.core.errors import ShapeError
from curvescope.core.tensors import IGNORED


@dataclass(frozen=True)
class OutputObjective:
    """A loss at given outputs z, including its normalization."""

    value: Tensor
    gradient: Tensor  # G, in the shape of z
    product: Callable[[Tensor], Tensor]  # u ↦ B u for u of shape (…, *z.shape)

    def to_dense(self) -> Tensor:
        """Return B as a matrix over the entries of z. Small sizes only."""
        n = self.gradient.numel()
        directions = torch.eye(n).to(self.gradient).reshape(n, *self.gradient.shape)
        return self.product(directions).reshape(n, n)


def squared_error_objective(
    outputs: Tensor, targets: Tensor, *, num_terms: float | None = None
) -> OutputObjective:
    """Σ (z − y)² / num_terms; without `num_terms` the mean over all entries."""
    if outputs.shape != targets.shape:
        raise ShapeError(
            f"expected targets of the outputs' shape {tuple(outputs.shape)}, got {tuple(targets.shape)}"
        )
    c = 2 / (outputs.numel() if num_terms is None else num_terms)
    residual = outputs - targets
    return OutputObjective(c / 2 * residual.square().sum(), c * residual, lambda u: c * u)


def cross_entropy_objective(
    outputs: Tensor, targets: Tensor, *, num_terms: float | None = None
) -> OutputObjective:
    """−Σ_t Σ_v y_tv log softmax(z_t)_v / num_terms for outputs (…, V); targets as in `class_targets`.

    G_t = (p_t − y_t)/n and B_t = (diag p_t − p_t p_tᵀ)/n; targets of −100 do not count. Without `num_terms` n
    is the number of targets that count.
    """
    y, weight = class_targets(targets, outputs, num_terms=num_terms)
    log_p = outputs.log_softmax(-1)
    p = log_p.exp()
    value = -(weight * torch.where(y > 0, y * log_p, 0.0)).sum()  # an impossible class has log p = −∞
    return OutputObjective(value, weight * (p - y), lambda u: weight * softmax_along(p, u))


def class_targets(
    targets: Tensor, logits: Tensor, *, num_terms: float | None = None, ignore_index: int = IGNORED
) -> tuple[Tensor, Tensor]:
    """Return the targets of a softmax as probabilities, and the weight of each token in the mean.

    Args:
        targets: classes (…), `ignore_index` for none, or probabilities (…, V), as with smoothed labels.
        logits: (…, V).
        num_terms: divisor of the sum over tokens; by default the number of tokens with a target.
        ignore_index: the class that stands for no target.

    Returns:
        y (…, V), and weights (…, 1): 1/num_terms, or 0 for tokens without a target.
    """
    if targets.shape == logits.shape and _distributions(targets):
        y, counted = targets, torch.ones_like(logits[..., :1])
    elif targets.shape == logits.shape[:-1] and not targets.is_floating_point():
        counted = (targets != ignore_index)[..., None]
        classes = torch.where(counted[..., 0], targets, 0)
        y, counted = torch.nn.functional.one_hot(classes, logits.shape[-1]).to(logits), counted.to(logits)
    else:
        raise ShapeError(
            f"expected classes, that is integer targets {tuple(logits.shape[:-1])}, or probabilities "
            f"{tuple(logits.shape)} that sum to one, got {targets.dtype} {tuple(targets.shape)}"
        )
    if num_terms is None and not bool(counted.any()):
        raise ShapeError("expected at least one token with a target, got none")
    return y, counted / (counted.sum() if num_terms is None else num_terms)


def _distributions(y: Tensor) -> bool:
    """Return True if the last axis holds probabilities; otherwise the formula for B does not hold."""
    if not y.is_floating_point():
        return False
    slack = torch.finfo(y.dtype).eps ** 0.5
    return bool((y >= 0).all()) and bool(((y.sum(-1) - 1).abs() <= slack).all())


class LossDerivatives(NamedTuple):
    """G = ∂ℓ/∂F, shaped like F, and B = ∂²ℓ/∂F²: a number c for c·I, or (…, L, o, o), a matrix per token."""

    G: Tensor
    B: float | Tensor


def squared_error(F: Tensor, Y: Tensor, *, factor: float | None = None) -> LossDerivatives:
    """Derivatives of ℓ = (c/2) ‖F − Y‖²: G = c (F − Y), B = c.

    `factor` is c. Unless given it is 2 / number of entries, which makes ℓ the mean squared error: for F of
    shape (L, d_V) that is 2/(L d_V), the normalization of Ormaniec et al. (2025).
    """
    if F.shape != Y.shape:
        raise ShapeError(f"expected targets shaped like F {tuple(F.shape)}, got {tuple(Y.shape)}")
    c = 2 / F.numel() if factor is None else factor
    return LossDerivatives(c * (F - Y), c)


def cross_entropy(
    F: Tensor, targets: Tensor, U: Tensor, *, b_U: Tensor | None = None, ignore_index: int = IGNORED
) -> LossDerivatives:
    """Derivatives of the mean cross-entropy of logits z = F U + b_U over the tokens that have a target.

    With p = softmax(z) and N tokens: G_z = (p − y)/N, B_z = (diag p − p pᵀ)/N, hence G = G_z Uᵀ and
    B_i = U B_z,i Uᵀ.

    Args:
        F: (…, L, o).
        targets: classes (…, L), `ignore_index` for none, or probabilities (…, L, V), as with smoothed labels.
        U: unembedding (o, V).
        b_U: (V,), if the logits have a bias.
        ignore_index: the class that stands for no target.
    """
    logits = F @ U if b_U is None else F @ U + b_U
    y, weight = class_targets(targets, logits, ignore_index=ignore_index)
    p = torch.softmax(logits, dim=-1)
    return LossDerivatives((weight * (p - y)) @ U.T, weight[..., None] * softmax_covariance(p, U))


def token_curvature(B: float | Tensor, G: Tensor) -> Tensor:
    """Return B as one symmetric matrix for each row of G (N, o): (N, o, o)."""
    N, o = G.shape
    if not isinstance(B, Tensor) or B.dim() == 0:
        return (B * torch.eye(o).to(G)).expand(N, o, o)
    if B.dim() < 3 or B.numel() != N * o * o or B.shape[-2:] != (o, o):
        raise ShapeError(
            f"expected B a number or one {o} × {o} matrix for each of {N} tokens, got {tuple(B.shape)}",
            hint="a loss that couples tokens has no such form; ffn_blocks and attention.blocks take one",
        )
    return B.to(G).reshape(N, o, o)
