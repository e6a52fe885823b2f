"""Inverses as operators: a product with one solves a linear system."""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor

from curvescope.algorithms.checks import (
    check_choice,
    check_number,
    check_operator,
    check_square,
    relative_tolerance,
)
from curvescope.algorithms.systems.solve import Method, Solution, solve
from curvescope.core.errors import CurvescopeError
from curvescope.core.operator import LinearOperator
from curvescope.core.operator.kinds import named_space


class Inverse(LinearOperator):
    """(A + λ I)⁻¹ by products with A, or the pseudo-inverse for `method="lsmr"`; made by `inverse`.

    `last` is the `Solution` of the last product, with its residuals, number of products and convergence.
    Products are correct up to the tolerance, so algorithms see a matrix with noise of that size.
    """

    def __init__(self, op: LinearOperator, *, inexact: bool, **options: Any):
        self.op, self.inexact, self.options = op, inexact, options
        self.preconditioner = options["preconditioner"]
        self.shape = (op.shape[1], op.shape[0])
        self.dtype, self.device, self.symmetric = op.dtype, op.device, op.symmetric
        self.psd = op.psd
        self.last: Solution | None = None
        self.num_products = 0  # with A, of all products so far
        for side, other in (("space", "columns"), ("columns", "space")):
            if (space := named_space(op, other)) is not None:
                setattr(self, side, space)

    def _matmat(self, V: Tensor) -> Tensor:
        return self._solved(self.op, V)

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self._solved(self.op.T, U)

    def _solved(self, op: LinearOperator, V: Tensor) -> Tensor:
        if V.shape[1] == 0:
            return V.new_zeros(op.shape[1], 0)
        solution = self.last = solve(op, V, **self.options)
        self.num_products += solution.num_products
        if not (solution.converged or self.inexact):
            raise CurvescopeError(
                f"the inverse was not found to tol = {solution.tol:g}: the residual is "
                f"{float(solution.residual.max()):.2g} of b, {solution.reason}",
                hint="inexact=True accepts the result; inverse(…).last has its residual",
            )
        return solution.x


def inverse(
    op: LinearOperator,
    *,
    method: Method = "cg",
    damping: float = 0.0,
    tol: float | None = None,
    max_products: int | None = None,
    preconditioner: LinearOperator | None = None,
    scale: float | None = None,
    inexact: bool = False,
) -> Inverse:
    """(A + damping · I)⁻¹ as an operator: each product calls `solve` with these arguments.

    `inv @ b` is x, the same kind of vector as b; `inv.last` is the `Solution` of that product.

    Args:
        method: Like in `solve`; "lsmr" gives the pseudo-inverse of operators that are not symmetric or not
            square.
        inexact: If True, accept a product that misses the tolerance; otherwise raise.
    """
    check_choice("method", method, get_args(Method))
    (check_operator if method == "lsmr" else check_square)(op, "inverse")
    check_number("damping", damping, at_least=0.0)
    relative_tolerance(tol, op.dtype)
    return Inverse(
        op,
        inexact=inexact,
        method=method,
        damping=damping,
        tol=tol,
        max_products=max_products,
        preconditioner=preconditioner,
        scale=scale,
    )
