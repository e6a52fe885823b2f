"""The sharpness that an optimizer sees, and the learning rate up to which it is stable.

Gradient descent on a quadratic, every step of it, from one Lanczos run.

On q(δ) = gᵀδ + ½ δᵀHδ, descent from δ₀ = 0 with learning rate η has gradients g_k = (I − ηH)^k g, so that

    ‖g_k‖² = Σᵢ wᵢ (1 − ηθᵢ)^{2k},        q(δ_k) = −Σᵢ wᵢ (1 − (1 − ηθᵢ)^{2k}) / (2θᵢ),

over all eigenvalues θᵢ, wᵢ the squared part of g along their eigenvectors. Both are polynomials in H between
two g, of degrees 2k and 2k − 1, and the Gauss quadrature of m Lanczos steps from g is exact up to degree
2m − 1: nodes and weights of k + 1 steps give k steps of descent, whatever the number of parameters and for
every learning rate at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import check_count, check_number, check_symmetric, fixed_operator
from curvescope.algorithms.spectra.krylov import lanczos
from curvescope.algorithms.spectra.lanczos import eigsh
from curvescope.algorithms.stability.optimizers import Descent, read_optimizer
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import Diagonal, FunctionOperator, LinearOperator
from curvescope.core.result import Result, Tabular

Preconditioner = torch.optim.Optimizer | LinearOperator | Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class Sharpness(Result):
    """λ_max of P^(−½) H P^(−½), weight decay included, and the learning rate that it allows."""

    value: float  # λ_max
    residual: float  # the matrix has an eigenvalue within this of the value
    converged: bool  # no eigenvalue is larger, as determined by `eigsh`
    max_learning_rate: float  # steps on the quadratic stay bounded below it; inf if λ_max is not positive
    learning_rate: float  # current learning rate; nan if unknown
    formula: str  # formula for max_learning_rate
    momentum: float  # β
    optimizer: str
    assumed: list[str]  # assumptions of the bound
    num_products: int
    tol: float
    seed: int

    @property
    def ratio(self) -> float:
        """Current learning rate over the largest stable one: unstable above 1, nan if unknown."""
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
        op: H, symmetric, such as the Hessian or the GGN.
        optimizer: SGD, RMSprop, Adam or AdamW of torch, over the parameters of the operator's model: its
            momentum, weight decay and state are read. Or P itself, an operator with `inverse_root`, such as
            `Diagonal` and `KFAC`; or a symmetric function V ↦ P^(−½) V of columns (n, k). None means P = I.
        damping: δ of P + δ I, for an operator.
        learning_rate: Current learning rate, if it does not come from a torch optimizer.
        momentum: β of heavy-ball or Nesterov momentum, if it does not come from a torch optimizer.
        tol: Relative tolerance of `eigsh`.
    """
    check_symmetric(op, "preconditioned_sharpness")
    if isinstance(optimizer, torch.optim.Optimizer):
        if learning_rate is not None or momentum or nesterov or damping:
            raise UsageError(
                "damping, learning_rate, momentum and nesterov are read from the optimizer: do not pass them"
            )
        descent = read_optimizer(optimizer, *_named(op))
    else:
        descent = _given(op, optimizer, damping, learning_rate, momentum, nesterov=nesterov)
    top = eigsh(
        preconditioned(descent, op),
        1,
        which="LA",
        tol=tol,
        max_products=max_products,
        vectors=False,
        seed=seed,
    )
    value, rate = float(top.values[0]), descent.learning_rate
    return Sharpness(
        value=value,
        residual=float(top.residuals[0]),
        converged=top.converged,
        max_learning_rate=descent.threshold / value if value > 0 else math.inf,
        learning_rate=math.nan if rate is None else rate,
        formula=descent.formula,
        momentum=descent.momentum,
        optimizer=descent.name,
        assumed=descent.assumed,
        num_products=top.num_products,
        tol=top.tol,
        seed=seed,
    )


def preconditioned(descent: Descent, op: LinearOperator) -> LinearOperator:
    """P^(−½) (H + W) P^(−½) + (1 + β)/g W', with weight decay W in the gradient and W' outside it."""
    if descent.coupled is not None:
        op = op + Diagonal(descent.coupled).shard_like(op)
    root = descent.inverse_root
    if isinstance(root, Diagonal):
        root = root.shard_like(op)
    if root is not None:
        op = root.T @ op @ root
    if descent.decoupled is not None:
        decay = Diagonal(descent.decoupled * (1 + descent.momentum) / descent.gain)
        op = op + decay.shard_like(op)
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
    """Return a descent with a preconditioner that is not a torch optimizer."""
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
    name = type(P).__name__ if isinstance(P, LinearOperator) else "a custom preconditioner"
    assumed = [*plain.assumed, "the preconditioner is held fixed"]
    return replace(plain, name=name, inverse_root=root, assumed=assumed)


def _root(op: LinearOperator, P: Any, damping: float) -> LinearOperator:
    """Return (P + δ I)^(−½) of an operator with `inverse_root`, or the given function."""
    if isinstance(P, LinearOperator):
        root = getattr(P, "inverse_root", None)
        if not callable(root):
            raise UsageError(
                f"expected a preconditioner with inverse_root, {P!r} has none",
                hint="Diagonal(p) has one; a function V ↦ P^(−½) V will do",
            )
        root = root(damping) if damping else root()
        assert isinstance(root, LinearOperator)
        return root
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
    """Return the parameters of the operator, or of its first part that has some."""
    named_parameters = getattr(op, "named_parameters", None)
    if named_parameters is not None:
        return dict(named_parameters())
    parts = (part for part in vars(op).values() if isinstance(part, LinearOperator))
    return next((found for part in parts if (found := _parameters(part)) is not None), None)


@dataclass(frozen=True)
class QuadraticDescent(Tabular):
    """Losses of gradient descent on a quadratic, for R learning rates and K steps."""

    learning_rates: np.ndarray  # (R,)
    change: np.ndarray  # (R, K + 1) q(δ_k), the change of the loss; zero at the start
    gradient_norm: np.ndarray  # (R, K + 1) ‖g_k‖
    nodes: np.ndarray  # (m,) Ritz values of H in the Krylov space of g
    weights: np.ndarray  # (m,) shares of ‖g‖² at them
    num_products: int

    def table(self) -> Any:
        """One row per learning rate and step."""
        R, K = self.change.shape
        return {
            "learning_rate": np.repeat(self.learning_rates, K),
            "step": np.tile(np.arange(K), R),
            "change": self.change.ravel(),
            "gradient_norm": self.gradient_norm.ravel(),
        }


@fixed_operator
def quadratic_descent(
    op: LinearOperator, gradient: Tensor, learning_rates: Sequence[float], num_steps: int
) -> QuadraticDescent:
    """Losses and gradient norms of gradient descent on gᵀδ + ½ δᵀHδ from δ = 0, exactly in exact arithmetic.

    It takes num_steps + 1 products, fewer if g lies in a smaller invariant subspace, and as many vectors in
    memory. With negative curvature the quadratic has no minimum, and the loss decreases without bound.

    Args:
        op: H, symmetric.
        gradient: g at the start, (n,).
        learning_rates: η, above 0.
        num_steps: K.
    """
    check_symmetric(op, "quadratic_descent")
    steps = check_count("num_steps", num_steps, at_least=1)
    rates = np.asarray(learning_rates, dtype=float)
    if rates.ndim != 1 or not len(rates) or not (np.isfinite(rates) & (rates > 0)).all():
        raise UsageError(f"expected learning rates above 0, got {learning_rates!r}")
    if gradient.shape != (op.shape[0],):
        raise ShapeError(f"expected a gradient of {op.shape[0]} entries, got {tuple(gradient.shape)}")
    tridiagonals = lanczos(op, gradient[:, None], steps + 1)
    nodes, weights = (x[0, : tridiagonals.lengths[0]] for x in tridiagonals.quadrature())
    square = float(gradient.double() @ gradient.double())
    k = np.arange(steps + 1)[:, None]  # over steps, then nodes
    change, norms = [], []
    for rate in rates:
        power, x = np.abs(1 - rate * nodes) ** (2 * k), rate * nodes
        with np.errstate(divide="ignore", invalid="ignore"):
            logarithm = np.where(x < 0.5, np.log1p(-np.minimum(x, 0.5)), np.log(np.abs(1 - x)))
            fallen = -np.expm1(2 * k * logarithm) / (2 * nodes)
        fallen = np.where(nodes == 0, k * rate, np.where(k == 0, 0.0, fallen))
        change.append(-square * (fallen @ weights))
        norms.append(np.sqrt(square * (power @ weights)))
    return QuadraticDescent(
        learning_rates=rates,
        change=np.array(change),
        gradient_norm=np.array(norms),
        nodes=nodes,
        weights=weights,
        num_products=tridiagonals.num_products,
    )
