"""Any callable as a loss: it states its sum and its number of terms, autograd does the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvescope.losses.base import Loss

SumFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
CountFunction = Callable[[Tensor, Tensor | None], float]


class CustomLoss(Loss):
    """A loss from two functions: `sum(outputs, targets, weights)` and `count(targets, weights)`.

    `terms`, if given, returns the unweighted loss of every term, one number each, each a function of the
    outputs; the empirical Fisher needs it.
    """

    def __init__(
        self,
        sum: SumFunction,
        count: CountFunction,
        *,
        terms: Callable[[Tensor, Tensor], Tensor] | None = None,
        name: str = "custom",
        convex: bool = False,
    ):
        self._sum, self._count, self._terms, self.name, self.convex = sum, count, terms, name, convex

    def sum(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        return self._sum(outputs, targets, weights)

    def total_weight(self, targets: Tensor, weights: Tensor | None) -> float:
        return float(self._count(targets, weights))

    def gradient(self, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        with torch.enable_grad():
            z = outputs.detach().requires_grad_()
            (found,) = torch.autograd.grad(self._sum(z, targets, weights), z)
        return found

    def hessian_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        with torch.enable_grad():
            z = outputs.detach().requires_grad_()
            (g,) = torch.autograd.grad(self._sum(z, targets, weights), z, create_graph=True)
            if not g.requires_grad:  # a loss that is linear in the outputs
                return torch.zeros_like(direction)
            flat = direction.reshape(-1, *outputs.shape)
            found = [torch.autograd.grad(g, z, u, retain_graph=True)[0] for u in flat]
        return torch.stack(found).reshape(direction.shape)

    def term_outer_product(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, direction: Tensor
    ) -> Tensor:
        if self._terms is None:
            return super().term_outer_product(outputs, targets, weights, direction)
        with torch.enable_grad():
            z = outputs.detach().requires_grad_()
            terms = self._terms(z, targets).reshape(-1)
            rows = [torch.autograd.grad(term, z, retain_graph=True)[0].flatten() for term in terms]
        R = torch.stack(rows)  # (terms, entries of z)
        flat = direction.reshape(-1, outputs.numel())
        inner = flat @ R.T
        if weights is not None:
            inner = inner * weights.reshape(-1).to(inner)
        return (inner @ R).reshape(direction.shape)
