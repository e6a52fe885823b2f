"""Hessians and Gauss–Newton matrices written out by automatic differentiation, many instances at once.

An instance is a row of θ (R, n). Instances do not know of each other, so one backward pass gives one row of
the Hessian of each of them. Second derivatives are double backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def hessians(loss: Function, theta: Tensor) -> Tensor:
    """∇²ℓ_r of the losses ℓ (R,) at θ (R, n), each of its own row: (R, n, n)."""
    theta = theta.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss(theta).sum(), theta, create_graph=True)
    return _rows(slope, theta)


def jacobians(outputs: Function, theta: Tensor) -> Tensor:
    """∂f_r/∂θ_r of the outputs f (R, N): (R, N, n)."""
    theta = theta.detach().requires_grad_()
    return _rows(outputs(theta), theta)


def _rows(values: Tensor, theta: Tensor) -> Tensor:
    """Derivative of each column of values (R, m), a backward pass for each: (R, m, n)."""
    if not values.requires_grad:
        return theta.new_zeros(*values.shape, theta.shape[1])
    rows = [
        torch.autograd.grad(column.sum(), theta, retain_graph=True, materialize_grads=True)[0]
        for column in values.unbind(1)
    ]
    return torch.stack(rows, dim=1)


def both_parts(outputs: Function, loss: Function, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Hessian and GGN JᵀBJ of loss(outputs(θ)): (R, n, n) each.

    Args:
        outputs: θ (R, n) to f (R, N).
        loss: f (R, N) to ℓ (R,).
    """
    H = hessians(lambda one: loss(outputs(one)), theta)
    J, B = jacobians(outputs, theta), hessians(loss, outputs(theta))
    return H, J.mT @ B @ J


def eigenvalues(A: Tensor) -> Tensor:
    """Ascending eigenvalues of symmetric matrices, whose rounding is taken off: (R, n)."""
    return torch.linalg.eigvalsh((A + A.mT) / 2)
