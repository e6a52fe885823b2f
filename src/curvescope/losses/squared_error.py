"""Squared error, in the theory's normalisation and as a plain mean."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.losses.base import Loss, check_one_tensor, expand_weights


@dataclass(frozen=True)
class SquaredError(Loss):
    """ℓ_n = c ‖z_n − y_n‖² for sequence n, with outputs and targets of the same shape (B, …).

    `theory`: a term is one sequence and c = 1/(L d_V), the number of entries of a sequence. `mean`: every
    entry is a term with c = 1. Divided by the number of terms both are the mean over entries
    unless weights differ between sequences; they differ in what an empirical Fisher calls a term.
    """

    normalisation: Literal["theory", "mean"] = "theory"

    def __post_init__(self) -> None:
        if self.normalisation not in ("theory", "mean"):
            raise UsageError(f"expected 'theory' or 'mean', got {self.normalisation!r}")

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As in `Problem(loss=…)`."""
        return "mse" if self.normalisation == "theory" else "mse_mean"

    def sum(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        return (self._scale(outputs, targets, weights) * (outputs - targets) ** 2).sum()

    def total_weight(self, targets: Tensor, weights: Tensor | None) -> float:
        check_one_tensor(targets)
        if self.normalisation == "theory":
            return float(targets.shape[0] if weights is None else weights.sum(dtype=torch.float64))
        if weights is None:
            return float(targets.numel())
        return float(expand_weights(weights, targets).sum(dtype=torch.float64))

    def gradient(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """2 c w_n (z − y)."""
        return 2 * self._scale(outputs, targets, weights) * (outputs - targets)

    def hessian_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        """2 c w_n u."""
        return 2 * self._scale(outputs, targets, weights) * direction

    def term_outer_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        c = 1 / _entries(outputs) if self.normalisation == "theory" else 1.0
        r = 2 * c * (outputs - targets)
        inner = r * direction
        if self.normalisation == "theory":
            own = tuple(range(-outputs.dim() + 1, 0))  # the axes of one sequence
            inner = inner.sum(own, keepdim=True) if own else inner
        return r * inner * self._scale(outputs, targets, weights) / c

    @property
    def rooted(self) -> bool:
        """Always."""
        return True

    def root(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, noise: Tensor) -> Tensor:
        """√(2 c w_n) ε."""
        return self.hessian_product(outputs, targets, weights, torch.ones_like(outputs)).sqrt() * noise

    def slots(self, outputs: Tensor) -> int:
        """One for each sequence, or for each entry."""
        return 1 if self.normalisation == "theory" else outputs[0].numel()

    def sample_targets(self, outputs: Tensor, targets: Tensor, source: torch.Generator) -> Tensor:
        """z + σ ξ with σ² = 1/(2c): the Gaussian whose negative log-likelihood is ℓ."""
        c = 1 / _entries(outputs) if self.normalisation == "theory" else 1.0
        noise = torch.randn(outputs.shape, generator=source, dtype=torch.float64)
        return outputs.detach() + noise.to(outputs) * (2 * c) ** -0.5

    def _scale(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor | float:
        """c w_n, broadcastable to the outputs."""
        check_one_tensor(targets)
        if outputs.shape != targets.shape or not targets.is_floating_point():
            raise ShapeError(
                f"expected real targets of the outputs' shape {tuple(outputs.shape)}, "
                f"got {str(targets.dtype).removeprefix('torch.')} {tuple(targets.shape)}"
            )
        c = 1 / _entries(outputs) if self.normalisation == "theory" else 1.0
        if weights is None:
            return c
        if self.normalisation == "theory" and weights.dim() != 1:
            raise ShapeError(
                f"expected one weight per sequence, ({outputs.shape[0]},), got {tuple(weights.shape)}",
                hint="a term of the squared error is one sequence; 'mse_mean' takes a weight per entry",
            )
        return c * expand_weights(weights, outputs).to(outputs.dtype)


def _entries(outputs: Tensor) -> int:
    """L d_V: entries of one sequence."""
    return max(prod(outputs.shape[1:]), 1)
