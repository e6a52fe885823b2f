"""tr f(A) from random probes: stochastic Lanczos quadrature, with an interval over probes.

Quadrature of f against the measure of a probe uses Gauss's rule and Radau's, which bracket the value.

m steps of Lanczos from q give Gauss's rule for qᵀ f(A) q, whose error is f⁽²ᵐ⁾(ξ) times a positive number.
One more node, fixed at a ≤ λ_min, gives Radau's rule, whose error is f⁽²ᵐ⁺¹⁾(ξ) times a positive number. If
the even derivatives of f above a have one sign and the odd ones the other, as for log, √ and 1/x, the true
value lies between the two rules (Golub and Meurant 2010, chapter 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from curvescope.algorithms.checks import (
    FULL_VECTOR,
    GIB,
    check_count,
    check_number,
    check_symmetric,
    fixed_operator,
    whole_slice,
)
from curvescope.algorithms.columns import columns_at_once, mean_and_stderr
from curvescope.algorithms.estimates.intervals import mean_interval
from curvescope.algorithms.spectra.krylov import lanczos
from curvescope.algorithms.spectra.quadrature import exact_measures
from curvescope.algorithms.vectors import columns_of, vector_bytes
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.result import Tabular
from curvescope.core.seeds import probes
from curvescope.viz import estimates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EARLY_SHARE = 0.75  # share of the steps; the value from these shows how much the last steps changed


@dataclass(frozen=True)
class FunctionTrace(Tabular):
    """tr f(A + λ I): the mean of `samples` over probes, with its standard error (nan for one probe).

    The true value lies between `low` and `high` 95 times in 100 over probes. If `lower` and `upper` are
    known, the interval also covers the error of the quadrature. Otherwise it covers only that of the probes,
    and `last_steps` shows how much the last quadrature steps changed the value.
    """

    value: float
    stderr: float
    low: float
    high: float
    samples: np.ndarray  # (probes,) n Σ wᵢ f(θᵢ) by Gauss's rule; a single one when exact
    lower: np.ndarray | None  # (probes,) bounds of n qᵀ f(A) q for each probe, rounding included
    upper: np.ndarray | None
    last_steps: float  # |value − the value from the first three quarters of the steps|
    exact: bool  # from all eigenvalues
    num_products: int
    function: str
    damping: float
    seed: int

    def table(self) -> Any:
        """One row per sample."""
        return {"sample": np.arange(1, len(self.samples) + 1), "trace": self.samples}

    def plot(self, ax: Axes | None = None) -> Axes:
        """Samples, their mean and its 95 % interval."""
        return estimates.samples(ax, self.samples, self.value, (self.low, self.high), label="tr f(A)")


@fixed_operator
def trace_function(
    op: LinearOperator,
    f: Function | Named,
    *,
    damping: float = 0.0,
    num_probes: int = 16,
    num_steps: int = 50,
    seed: int = 0,
    max_gib: float = 8.0,
) -> FunctionTrace:
    """tr f(A + damping · I) = Σᵢ f(λᵢ + damping) of a symmetric operator.

    It takes num_probes · num_steps products.

    Each Rademacher probe v gives vᵀ f(A) v by Gauss's rule of `num_steps` Lanczos steps (Ubaru, Chen and Saad
    2017). For an operator with no more rows than steps the trace is computed exactly.

    For "log", "inverse" and "sqrt" of an operator that is declared psd, with a damping well above a rounding
    of the largest eigenvalue, Gauss's and Radau's rules bracket the value of each probe. The interval
    includes these bounds and the effect of rounding.

    Memory: num_steps + 1 vectors for each probe that runs at the same time.

    Args:
        f: "log", "inverse", "sqrt" or "exp", or a function of an array of eigenvalues, λᵢ + damping, of its
            shape. It raises if f is not finite at a node.
        max_gib: Memory for bases; probes that do not fit run one after the other.
    """
    check_symmetric(op, "trace_function")
    call, name = _function(f)
    damping = check_number("damping", damping, at_least=0.0)
    num_probes = check_count("num_probes", num_probes, at_least=1)
    num_steps = check_count("num_steps", num_steps, at_least=2)
    max_gib = check_number("max_gib", max_gib, above=0.0)

    def shifted(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(call((np.maximum(x, 0.0) if op.psd else x) + damping), dtype=float)

    if op.shape[0] <= num_steps:
        return _exact(op, shifted, name, damping, seed)
    T = _tridiagonals(op, num_probes, num_steps, seed, max_gib)
    rules = [gauss(alpha, beta[:-1]) for alpha, beta in T]
    samples = op.shape[0] * np.array([_finite(rule, shifted, name) for rule in rules])
    lower, upper = _brackets(T, rules, call, damping, op) if op.psd and name in GAUSS_IS else (None, None)
    low, high = _interval(samples if lower is None else lower, samples if upper is None else upper)
    value, stderr = mean_and_stderr(samples)
    early = op.shape[0] * float(np.mean([_shortened(*tridiagonal).apply(shifted) for tridiagonal in T]))
    return FunctionTrace(
        value=float(value),
        stderr=float(stderr),
        low=low,
        high=high,
        samples=samples,
        lower=lower,
        upper=upper,
        last_steps=abs(float(value) - early),
        exact=False,
        num_products=num_probes * num_steps,
        function=name,
        damping=damping,
        seed=seed,
    )


def _exact(op: LinearOperator, f: Function, name: str, damping: float, seed: int) -> FunctionTrace:
    """Compute the trace from the eigenvalues of the matrix."""
    n = op.shape[0]
    measure = exact_measures(op, whole_slice(op))[FULL_VECTOR]
    value = n * _finite(QuadratureRule(measure.nodes[0], measure.weights[0]), f, name)
    samples = np.array([value])
    return FunctionTrace(value, 0.0, value, value, samples, None, None, 0.0, True, n, name, damping, seed)


def logdet(
    op: LinearOperator,
    *,
    damping: float = 0.0,
    num_probes: int = 16,
    num_steps: int = 50,
    seed: int = 0,
    max_gib: float = 8.0,
) -> FunctionTrace:
    """log det(A + damping · I) = tr log(A + damping · I) of a positive definite system: `trace_function`."""
    options = {"num_probes": num_probes, "num_steps": num_steps, "seed": seed, "max_gib": max_gib}
    return trace_function(op, "log", damping=damping, **options)


def _function(f: Function | Named) -> tuple[Function, str]:
    if isinstance(f, str):
        if f not in FUNCTIONS:
            known = ", ".join(map(repr, get_args(Named)))
            raise UsageError(f"expected a function or one of {known}, got {f!r}")
        return FUNCTIONS[f], f
    if not callable(f):
        raise UsageError(f"expected a function of an array of eigenvalues, got {type(f).__name__}")
    return f, getattr(f, "__name__", "f")


def _finite(rule: QuadratureRule, f: Function, name: str) -> float:
    """Σ wᵢ f(θᵢ), or an error that names an eigenvalue where f is not defined."""
    values = f(rule.nodes)
    if values.shape != rule.nodes.shape:
        raise UsageError(f"expected {name} to give an array of {rule.nodes.shape}, got {values.shape}")
    undefined = ~np.isfinite(values) & (rule.weights > 0)
    if undefined.any():
        raise CurvescopeError(
            f"{name} is not finite at the eigenvalue {float(rule.nodes[undefined][0]):.3g} of the operator",
            hint="damping increases all eigenvalues",
        )
    return rule.apply(f)


Tridiagonal = tuple[np.ndarray, np.ndarray]  # α (m,) and β (m,)


def _tridiagonals(
    op: LinearOperator, num_probes: int, num_steps: int, seed: int, max_gib: float
) -> list[Tridiagonal]:
    """Return one tridiagonal matrix per probe, computed as many at a time as memory allows."""
    n, tridiagonals = op.shape[0], []
    basis = (num_steps + 1) * vector_bytes(op)
    if basis > max_gib * GIB:
        raise UsageError(
            f"the Lanczos basis of one probe takes {basis / GIB:.1f} GiB, more than max_gib = {max_gib:g}",
            hint="raise max_gib or take fewer steps",
        )
    width = min(num_probes, columns_at_once(op), int(max_gib * GIB // basis))
    for first in range(0, num_probes, width):
        count = min(width, num_probes - first)
        options = {"dtype": op.dtype, "device": op.device, "shard": columns_of(op)}
        start = probes(n, count, seed=seed, first=first, **options)
        T = lanczos(op, start, num_steps)
        tridiagonals += [(a[:m], b[:m]) for a, b, m in zip(T.alpha, T.beta, T.lengths, strict=True)]
    return tridiagonals


def _shortened(alpha: np.ndarray, beta: np.ndarray) -> QuadratureRule:
    """Gauss's rule of the first three quarters of the steps."""
    m = max(1, math.ceil(EARLY_SHARE * len(alpha)))
    return gauss(alpha[:m], beta[: m - 1])


def _brackets(
    T: list[Tridiagonal], rules: list[QuadratureRule], f: Function, damping: float, op: LinearOperator
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return n times the bounds of each probe, from Gauss's and Radau's rules and the effect of rounding.
    Radau's node lies some roundings left of zero; the bounds are None if f is undefined there.
    """
    largest, eps = max(float(rule.nodes.max()) for rule in rules), torch.finfo(op.dtype).eps
    end = -ROUNDINGS * eps * max(largest, 0.0)
    if damping + end < damping / 2 or damping == 0:
        return None, None

    def shifted(x: np.ndarray) -> np.ndarray:
        return f(np.maximum(x, end) + damping)

    radau_rules = [radau(alpha, beta, end) for alpha, beta in T]
    values = np.array(
        [[rule.apply(shifted) for rule in pair] for pair in zip(rules, radau_rules, strict=True)]
    )
    slack = np.array([rounding(rule, shifted, eps) for rule in rules])
    if not (np.isfinite(values).all() and np.isfinite(slack).all()):
        return None, None
    n = op.shape[0]
    return n * (values.min(axis=1) - slack), n * (values.max(axis=1) + slack)


def _interval(lower: np.ndarray, upper: np.ndarray) -> tuple[float, float]:
    """Interval from the low end of the mean of the lower bounds to the high end of that of the upper
    bounds.
    """
    low = mean_interval(*mean_and_stderr(lower), len(lower) - 1)[0]
    return float(low), float(mean_interval(*mean_and_stderr(upper), len(upper) - 1)[1])


Function = Callable[[np.ndarray], np.ndarray]
Named = Literal["log", "inverse", "sqrt", "exp"]
FUNCTIONS: dict[str, Function] = {
    "log": np.log,
    "inverse": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "exp": np.exp,
}
GAUSS_IS: dict[str, Literal["upper", "lower"]] = {"log": "upper", "inverse": "lower", "sqrt": "upper"}
"""Functions with known sides: True if Gauss's rule is above the true value; Radau's rule at the left end is
on the other side.
"""
ROUNDINGS = 100.0  # distance of Radau's node left of zero, in eps times the largest node

PRODUCT_ROUNDING = 16.0  # rounding of a Lanczos matrix, in eps times the largest node


@dataclass(frozen=True)
class QuadratureRule:
    """Nodes and weights of one probe; the weights sum to one."""

    nodes: np.ndarray
    weights: np.ndarray

    def apply(self, f: Function) -> float:
        """Return Σ wᵢ f(θᵢ) over nodes of positive weight; not finite if f is not."""
        has_weight = self.weights > 0
        with np.errstate(all="ignore"):
            return float(
                (self.weights[has_weight] * np.asarray(f(self.nodes[has_weight]), dtype=float)).sum()
            )


def rounding(rule: QuadratureRule, f: Function, eps: float) -> float:
    """Effect of rounding on a rule for log, √ or 1/x: h Σ wᵢ |f'(θᵢ)|, and the last digits of the sum.

    The divided differences of these functions at the nodes form a positive semi-definite matrix. So a change
    of the Lanczos matrix by h changes the rule by at most this, to first order.
    """
    h = PRODUCT_ROUNDING * eps * max(float(np.abs(rule.nodes).max()), 0.0)
    shifted = QuadratureRule(rule.nodes - h, rule.weights)
    return abs(rule.apply(f) - shifted.apply(f)) + PRODUCT_ROUNDING * eps * rule.apply(lambda x: np.abs(f(x)))


def gauss(alpha: np.ndarray, beta: np.ndarray) -> QuadratureRule:
    """Return Gauss's rule of a tridiagonal matrix with diagonal (m,) and off-diagonal (m − 1,)."""
    values, vectors = np.linalg.eigh(np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1))
    return QuadratureRule(values, vectors[0] ** 2)


def radau(alpha: np.ndarray, beta: np.ndarray, end: float) -> QuadratureRule:
    """Return Radau's rule of m + 1 nodes with one at `end`, left of all eigenvalues; β (m,) includes the last
    one. If the last β is zero, the Krylov space is exhausted, and Gauss's rule, which is exact, is returned.
    """
    m = len(alpha)
    if beta[m - 1] == 0:
        return gauss(alpha, beta[: m - 1])
    T = np.diag(alpha - end) + np.diag(beta[: m - 1], 1) + np.diag(beta[: m - 1], -1)
    right = np.zeros(m)
    right[-1] = beta[m - 1] ** 2
    corner = end + np.linalg.solve(T, right)[-1]
    return gauss(np.append(alpha, corner), beta)
