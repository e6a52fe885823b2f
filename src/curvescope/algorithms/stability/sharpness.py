"""The sharpness that an optimizer sees, and the learning rate up to which it is stable."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvescope.algorithms.checks import check_number, check_symmetric
from curvescope.algorithms.spectra.lanczos import eigsh
from curvescope.algorithms.stability.descent import Descent
from curvescope.algorithms.stability.optimizers import read_optimizer
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import Diagonal, FunctionOperator, LinearOperator
from curvescope.core.result import Result

Preconditioner = torch.optim.Optimizer | LinearOperator | Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class Sharpness(Result):
    """λ_max of P^(−½) H P^(−½), weight decay included, and the learning rate that it allows."""

    value: float  # λ_max
    residual: float  # the matrix has an eigenvalue within this of the value
    converged: bool  # and none is larger, as `eigsh` says it
    max_learning_rate: float  # up to which steps on the quadratic stay bounded; inf if λ_max is not positive
    learning_rate: float  # the present one; nan where none is known
    formula: str  # of max_learning_rate
    momentum: float  # β
    optimizer: str
    assumed: list[str]  # what the bound takes for granted
    num_products: int
    tol: float
    seed: int

    @property
    def ratio(self) -> float:
        """Present learning rate over the largest stable one: unstable above 1, nan where it is not known."""
        return self.learning_rate / self.max_learning_rate


def preconditioned_sharpness(
    op: LinearOperator,
    optimizer: Preconditioner = None,
    *,
    damping: float = 0.0,
    learning_rate: float | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    tol: float | None = None,
    max_products: int | None = None,
    seed: int = 0,
) -> Sharpness:
    """Sharpness λ_max(P^(−½) H P^(−½)) and the largest stable learning rate, see `descent` for the formulas.

    On the quadratic with Hessian H a descent with the fixed preconditioner P stays bounded if its learning
    rate is below the bound, and diverges above it.

    Args:
        op: H, symmetric: the Hessian, or the GGN for its part of it.
        optimizer: one of torch's, SGD, RMSprop, Adam or AdamW, over the parameters of the operator's model:
            its momentum, weight decay and state are read. Or P itself, an operator with `inverse_root`, as
            `Diagonal` and `KFAC` have; or a function V ↦ P^(−½) V of columns (n, k), symmetric. None is
            P = I.
        damping: δ of P + δ I, for an operator.
        learning_rate: the present one, where no optimizer of torch says it.
        momentum: β of heavy-ball momentum, or Nesterov's, likewise.
        tol: of `eigsh`, relative.
    """
    check_symmetric(op, "preconditioned_sharpness")
    if isinstance(optimizer, torch.optim.Optimizer):
        if learning_rate is not None or momentum or nesterov or damping:
            raise UsageError(
                "damping, learning_rate, momentum and nesterov are those of the optimizer: leave them out"
            )
        descent = read_optimizer(optimizer, *_named(op))
    else:
        descent = _given(op, optimizer, damping, learning_rate, momentum, nesterov=nesterov)
    found = eigsh(
        seen_by(descent, op), 1, which="LA", tol=tol, max_products=max_products, vectors=False, seed=seed
    )
    value, rate = float(found.values[0]), descent.learning_rate
    return Sharpness(
        value=value,
        residual=float(found.residuals[0]),
        converged=found.converged,
        max_learning_rate=descent.threshold / value if value > 0 else math.inf,
        learning_rate=math.nan if rate is None else rate,
        formula=descent.formula,
        momentum=descent.momentum,
        optimizer=descent.name,
        assumed=descent.assumed,
        num_products=found.num_products,
        tol=found.tol,
        seed=seed,
    )


def seen_by(descent: Descent, op: LinearOperator) -> LinearOperator:
    """What a descent sees of H: P^(−½) (H + W) P^(−½) + (1 + β)/g W', W in the gradient and W' beside it."""
    if descent.coupled is not None:
        op = op + Diagonal(descent.coupled)
    root = descent.inverse_root
    if root is not None:
        op = root.T @ op @ root
    if descent.decoupled is not None:
        op = op + Diagonal(descent.decoupled * (1 + descent.momentum) / descent.gain)
    return op


def _given(
    op: LinearOperator,
    P: Any,
    damping: float,
    rate: float | None,
    momentum: float,
    *,
    nesterov: bool,
) -> Descent:
    """A descent with a preconditioner that is no optimizer of torch."""
    rate = None if rate is None else check_number("learning_rate", rate, above=0.0)
    momentum = check_number("momentum", momentum, at_least=0.0)
    if momentum >= 1:
        raise UsageError(f"expected a momentum below 1, got {momentum:g}")
    plain = Descent("gradient descent", None, rate, momentum, nesterov and momentum > 0)
    plain.assumed.append("every step uses the gradient of this operator's data")
    if P is None:
        return plain
    root = _root(op, P, check_number("damping", damping, at_least=0.0))
    if root.shape != op.shape or root.dtype != op.dtype:
        raise ShapeError(
            f"expected an inverse root of {op.shape} in {op.dtype}, got {root!r}",
            hint="both over the same blocks: H.block(names) and P.block(names)",
        )
    if not root.symmetric:
        raise UsageError(f"expected a symmetric inverse root of the preconditioner, got {root!r}")
    name = type(P).__name__ if isinstance(P, LinearOperator) else "a preconditioner of one's own"
    assumed = [*plain.assumed, "the preconditioner stays as it is"]
    return replace(plain, name=name, inverse_root=root, assumed=assumed)


def _root(op: LinearOperator, P: Any, damping: float) -> LinearOperator:
    """(P + δ I)^(−½) of an operator that knows it, or a function that is it."""
    if isinstance(P, LinearOperator):
        root = getattr(P, "inverse_root", None)
        if not callable(root):
            raise UsageError(
                f"expected a preconditioner with inverse_root, {P!r} has none",
                hint="Diagonal(p) has one; a function V ↦ P^(−½) V will do",
            )
        found = root(damping) if damping else root()
        assert isinstance(found, LinearOperator)
        return found
    if not callable(P):
        raise UsageError(f"expected an optimizer of torch, an operator or a function, got {type(P).__name__}")
    if damping:
        raise UsageError("expected no damping with a function that is P^(−½) itself")
    function: Any = P
    return FunctionOperator(function, op.shape, dtype=op.dtype, device=op.device, symmetric=True)


def _named(op: LinearOperator) -> tuple[Mapping[str, Tensor], Any]:
    """The model's parameters by name, and the space of the operator."""
    space, parameters = getattr(op, "space", None), _parameters(op)
    if space is None or parameters is None:
        raise UsageError(
            f"{op!r} has no named parameters to look up in the optimizer",
            hint="pass Diagonal(p) of the optimizer's own P instead",
        )
    return parameters, space


def _parameters(op: LinearOperator) -> Mapping[str, Tensor] | None:
    """Those of the operator, or of the first of its parts that has some."""
    named_parameters = getattr(op, "named_parameters", None)
    if named_parameters is not None:
        return dict(named_parameters())
    parts = (part for part in vars(op).values() if isinstance(part, LinearOperator))
    return next((found for part in parts if (found := _parameters(part)) is not None), None)
