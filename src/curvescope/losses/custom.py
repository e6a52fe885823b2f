"""Custom losses: any function of outputs and targets, and the loss that a model returns.

A function defines the sum and another one the number of terms; autograd computes the derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.tensors import Tree
from curvescope.losses.base import Loss, expand_weights

SumFunction = Callable[[Tensor, Tree, Tensor | None], Tensor]
CountFunction = Callable[[Tree, Tensor | None], float]


class CustomLoss(Loss):
    """Loss from two functions: `sum(outputs, targets, weights)` and `count(targets, weights)`.

    `terms`, if given, returns the unweighted loss of every term as a function of the outputs; the empirical
    Fisher needs it.
    """

    def __init__(
        self,
        sum: SumFunction,
        count: CountFunction,
        *,
        terms: Callable[[Tensor, Tree], Tensor] | None = None,
        name: str = "custom",
        convex: bool = False,
    ):
        if not callable(sum) or not callable(count):
            raise UsageError(
                "expected two functions, sum(outputs, targets, weights) and count(targets, weights)"
            )
        self._sum, self._count, self._terms, self.name, self.convex = sum, count, terms, name, convex

    @property
    def options(self) -> dict[str, Any]:
        return {"convex": self.convex}

    def sum(self, outputs: Tensor, targets: Tree, weights: Tensor | None) -> Tensor:
        total = self._sum(outputs, targets, weights)
        if not isinstance(total, Tensor) or total.numel() != 1:
            what = (
                f"a tensor {tuple(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
            )
            raise ShapeError(
                f"expected the sum of the loss {self.name!r} as a tensor of one number, got {what}"
            )
        return total

    def total_weight(self, targets: Tree, weights: Tensor | None) -> float:
        count = float(self._count(targets, weights))
        if not isfinite(count) or count < 0:
            raise UsageError(f"expected a number of terms from the loss {self.name!r}, got {count}")
        return count

    def gradient(self, outputs: Tensor, targets: Tree, weights: Tensor | None) -> Tensor:
        with torch.enable_grad():
            z = outputs.detach().requires_grad_()
            total = self.sum(z, targets, weights)
            return torch.autograd.grad(total, z)[0] if total.requires_grad else torch.zeros_like(z)

    def hessian_product(
        self, outputs: Tensor, targets: Tree, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        with torch.enable_grad():
            z = outputs.detach().requires_grad_()
            total = self.sum(z, targets, weights)
            if not total.requires_grad:  # a loss that does not depend on the outputs
                return torch.zeros_like(direction)
            (g,) = torch.autograd.grad(total, z, create_graph=True)
            if not g.requires_grad:  # a loss that is linear in the outputs
                return torch.zeros_like(direction)
            flat = direction.reshape(-1, *outputs.shape)
            products = [torch.autograd.grad(g, z, u, retain_graph=True)[0] for u in flat]
        return torch.stack(products).reshape(direction.shape)

    def term_outer_product(
        self, outputs: Tensor, targets: Tree, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        if self._terms is None:
            return super().term_outer_product(outputs, targets, weights, direction)
        with torch.enable_grad():
            z = outputs.detach().requires_grad_()
            terms = self._terms(z, targets)
            rows = [
                torch.autograd.grad(term, z, retain_graph=True)[0].flatten() for term in terms.reshape(-1)
            ]
        R = torch.stack(rows)  # (terms, entries of z)
        flat = direction.reshape(-1, outputs.numel())
        inner = flat @ R.T
        if weights is not None:
            one_per_term = weights.numel() == terms.numel()
            w = weights if one_per_term else expand_weights(weights, terms)  # one per term, or per sequence
            inner = inner * w.reshape(-1).to(inner)
        return (inner @ R).reshape(direction.shape)


@dataclass(frozen=True)
class ModelLoss(Loss):
    """L = (1/N) Σ_b N_b f_b, N = Σ_b N_b, for outputs f_b (1,) and weights N_b; or the sum of f_b."""

    is_mean: bool = True
    name = "loss_fn"
    has_outputs = False
    convex = False

    @property
    def options(self) -> dict[str, Any]:
        return {"divided": self.is_mean}

    def sum(self, outputs: Tensor, targets: Tree, weights: Tensor | None) -> Tensor:
        return outputs.sum() if weights is None else (outputs * weights.to(outputs)).sum()

    def total_weight(self, targets: Tree, weights: Tensor | None) -> float:
        return float(len(targets)) if weights is None else float(weights.sum(dtype=torch.float64))

    def gradient(self, outputs: Tensor, targets: Tree, weights: Tensor | None) -> NoReturn:
        raise unsplit("the functional Hessian")

    def hessian_product(
        self, outputs: Tensor, targets: Tree, weights: Tensor | None, direction: Tensor
    ) -> NoReturn:
        raise unsplit("the GGN")


def unsplit(what: str) -> UsageError:
    """Return the error for a method that needs outputs if only their loss is known."""
    return UsageError(
        f"{what} needs the model's outputs separate from the loss, which loss_fn(model, batch) does not give",
        hint="pass the loss of the outputs: cs.Problem(model, data, loss=…), e.g. a cs.CustomLoss",
    )
