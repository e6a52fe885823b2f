"""Rounds of solving: the system near one in size, and its residual measured and solved for again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.sums import norms, to_numpy
from curvescope.algorithms.systems.iterations import Multiply, Stop, distance
from curvescope.algorithms.vectors import check_finite, comfortable, on_all
from curvescope.core.operator import LinearOperator

ROUNDS = 10  # solves, each for the residual that the last one left
GAIN = 0.9  # a round must bring some residual below this multiple of itself


def rescale(x: Tensor, factor: float, other: float, tol: float) -> bool:
    """x · factor · other, in place: whether it can be written down, up to the tolerance, in x's dtype."""
    if factor == other == 1.0:
        return True
    first, second = sorted((factor, other))  # what makes x smaller goes first
    before = x.clone()
    x.mul_(first).mul_(second)
    back = x.div(second).div_(first)
    finite = on_all(bool(torch.isfinite(x).all()), x.device)
    return finite and bool(norms(back - before) <= tol * norms(before))


class System:
    """Products with f (A + λ I), where f is a power of two that brings the first of them near one."""

    def __init__(self, op: LinearOperator, damping: float):
        self.op, self.damping, self.factor = op, damping, 0.0

    def __call__(self, V: Tensor) -> Tensor:
        return self._near_one(self.op @ V, V)

    def transposed(self, U: Tensor) -> Tensor:
        """f (Aᵀ + λ I) U."""
        return self._near_one(self.op.T @ U, U)

    def _near_one(self, product: Tensor, V: Tensor) -> Tensor:
        if self.damping:
            product = torch.add(product, V, alpha=self.damping)
        if self.factor == 0.0:
            self.factor = comfortable(product)
        return product if self.factor in (0.0, 1.0) else product * self.factor


Iteration = Callable[[Multiply, Tensor, Tensor, int], tuple[Tensor, Stop, int]]


@dataclass(frozen=True)
class Refined:
    """What the rounds came to."""

    X: Tensor  # (n, k)
    R: Tensor  # (m, k) B − A X
    residual: np.ndarray  # (k,) relative
    reason: str
    used: int  # products
    size: float  # of the operator, as the iteration found it


def refined(iterate: Iteration, system: System, B: Tensor, tol: float, limit: int) -> Refined:
    """Solve, measure the residual, and solve again for it."""
    sizes = norms(B, dim=0)
    safe = torch.where(sizes > 0, sizes, 1)
    X, R, used = B.new_zeros(system.op.local_shape[1], B.shape[1]), B, 0
    residual, reason, size = to_numpy(sizes / safe), f"stopped at max_products = {limit}", 0.0
    for turn in range(ROUNDS):
        if (residual <= tol).all() or used + 2 > limit:
            break
        step, stop, spent = iterate(system, R, 0.5 * tol * sizes, limit - used - 1)
        if turn > 0:
            step.add_(X)
        new_R = torch.empty_like(B)
        new_residual = to_numpy(distance(B, system(step), out=new_R) / safe)
        check_finite(new_residual)
        used, size = used + spent + 1, max(size, stop.size)
        # the first x is kept even if its residual is not below that of zero: CG reduces another norm
        better = (new_residual < residual) | (turn == 0)
        gained = (new_residual < GAIN * residual).any() or used + 2 > limit
        if better.all():
            X, R = step, new_R
        else:
            keep = torch.as_tensor(better).to(B.device)
            X, R = torch.where(keep, step, X), torch.where(keep, new_R, R)
        residual = np.where(better, new_residual, residual)
        if stop.reason or not gained:
            reason = stop.reason or f"rounding keeps the residual above tol = {tol:g}"
            break
    return Refined(X, R, residual, reason, used, size)
