"""Operators: Hessian, its two parts, Fishers and the Jacobian, over named blocks, matrix-free."""

from curvescope.operators.curvature import GGN, EmpiricalFisher, Functional, Hessian, MonteCarloFisher
from curvescope.operators.jacobian import Jacobian

__all__ = ["GGN", "EmpiricalFisher", "Functional", "Hessian", "Jacobian", "MonteCarloFisher"]
