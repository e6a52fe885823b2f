"""What a loss contributes: its value, gradient G and Hessian B in the outputs of the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError

IGNORED = -100
"""A target that does not count."""


@dataclass(frozen=True)
class Objective:
    """A loss at given outputs z: all normalisation is inside."""

    value: Tensor
    gradient: Tensor  # G, in the shape of z
    product: Callable[[Tensor], Tensor]  # u ↦ B u for u of shape (…, *z.shape)

    def dense(self) -> Tensor:
        """B as a matrix over the entries of z. Small sizes only."""
        n = self.gradient.numel()
        directions = torch.eye(n).to(self.gradient).reshape(n, *self.gradient.shape)
        return self.product(directions).reshape(n, n)


def squared_error_objective(outputs: Tensor, targets: Tensor, *, num_terms: float | None = None) -> Objective:
    """Σ (z − y)² / num_terms; without `num_terms` the mean over all entries."""
    if outputs.shape != targets.shape:
        raise ShapeError(
            f"expected targets of the outputs' shape {tuple(outputs.shape)}, got {tuple(targets.shape)}"
        )
    c = 2 / (outputs.numel() if num_terms is None else num_terms)
    residual = outputs - targets
    return Objective(c / 2 * residual.square().sum(), c * residual, lambda u: c * u)


def cross_entropy_objective(outputs: Tensor, targets: Tensor, *, num_terms: float | None = None) -> Objective:
    """−Σ_t log softmax(z_t)[y_t] / num_terms for outputs (…, V) and integer targets (…).

    G_t = (p_t − onehot(y_t))/n and B_t = (diag p_t − p_t p_tᵀ)/n; targets of −100 do not count. Without
    `num_terms` n is the number of targets that count.
    """
    if targets.is_floating_point() or outputs.shape[:-1] != targets.shape:
        raise ShapeError(
            f"expected integer targets of shape {tuple(outputs.shape[:-1])}, "
            f"got {targets.dtype} {tuple(targets.shape)}"
        )
    counted = (targets != IGNORED).to(outputs.dtype)
    weight = counted[..., None] / (counted.sum() if num_terms is None else num_terms)
    log_p = outputs.log_softmax(-1)
    one_hot = torch.nn.functional.one_hot(targets.clamp(min=0), outputs.shape[-1]).to(outputs.dtype)
    p = log_p.exp()

    def product(u: Tensor) -> Tensor:
        return weight * p * (u - (p * u).sum(-1, keepdim=True))

    return Objective(-(weight * one_hot * log_p).sum(), weight * (p - one_hot), product)
