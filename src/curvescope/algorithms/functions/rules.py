"""Quadrature of f against the measure of a probe: Gauss's rule, and Radau's, which brackets with it.

m steps of Lanczos from q give Gauss's rule for qᵀ f(A) q, wrong by f⁽²ᵐ⁾(ξ) times a positive number. With one
more node, fixed at a ≤ λ_min, it is Radau's, wrong by f⁽²ᵐ⁺¹⁾(ξ) times another. So where the even derivatives
of f beyond a have one sign and the odd ones the other, as those of log, √ and 1/x have, the truth lies
between the two (Golub and Meurant 2010, chapter 6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Function = Callable[[np.ndarray], np.ndarray]
Named = Literal["log", "inverse", "sqrt", "exp"]
FUNCTIONS: dict[str, Function] = {
    "log": np.log,
    "inverse": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "exp": np.exp,
}
GAUSS_IS: dict[str, Literal["upper", "lower"]] = {"log": "upper", "inverse": "lower", "sqrt": "upper"}
"""Whether Gauss's rule is above or below the truth, and Radau's at the left end on the other side."""
ROUNDINGS = 100.0  # eps times the largest node: how far left of zero the node of Radau is put

PRODUCT = 16.0  # eps times the largest node: what products in floating point may change of a Lanczos matrix


@dataclass(frozen=True)
class Rule:
    """Nodes and weights of one probe; the weights sum to one."""

    nodes: np.ndarray
    weights: np.ndarray

    def apply(self, f: Function) -> float:
        """Σ wᵢ f(θᵢ), over nodes of some weight; not finite where f is not."""
        there = self.weights > 0
        with np.errstate(all="ignore"):
            return float((self.weights[there] * np.asarray(f(self.nodes[there]), dtype=float)).sum())


def rounding(rule: Rule, f: Function, eps: float) -> float:
    """What rounding may change of a rule for log, √ or 1/x: h Σ wᵢ |f'(θᵢ)|, and the last digits of the sum.

    The slopes of these functions between two nodes are a positive semi-definite matrix, so that a change of
    the Lanczos matrix by h changes the rule by no more than that, to first order.
    """
    h = PRODUCT * eps * max(float(np.abs(rule.nodes).max()), 0.0)
    moved = Rule(rule.nodes - h, rule.weights)
    return abs(rule.apply(f) - moved.apply(f)) + PRODUCT * eps * rule.apply(lambda x: np.abs(f(x)))


def gauss(alpha: np.ndarray, beta: np.ndarray) -> Rule:
    """Gauss's rule of a tridiagonal matrix (m,) with its off-diagonal (m − 1,)."""
    values, vectors = np.linalg.eigh(np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1))
    return Rule(values, vectors[0] ** 2)


def radau(alpha: np.ndarray, beta: np.ndarray, end: float) -> Rule:
    """The rule of m + 1 nodes with one at `end`, which is left of all eigenvalues; β (m,) has the last too.

    A last β of zero, where the Krylov space is exhausted, leaves Gauss's rule, which is exact.
    """
    m = len(alpha)
    if beta[m - 1] == 0:
        return gauss(alpha, beta[: m - 1])
    T = np.diag(alpha - end) + np.diag(beta[: m - 1], 1) + np.diag(beta[: m - 1], -1)
    right = np.zeros(m)
    right[-1] = beta[m - 1] ** 2
    corner = end + np.linalg.solve(T, right)[-1]
    return gauss(np.append(alpha, corner), beta)
