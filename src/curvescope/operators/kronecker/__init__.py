"""Kronecker-factored curvature: K-FAC, EK-FAC and Shampoo-like factors of linear layers."""

from curvescope.operators.kronecker.approximations import EKFAC, KFAC, KroneckerOperator, Shampoo

__all__ = ["EKFAC", "KFAC", "KroneckerOperator", "Shampoo"]
