"""Kronecker-factored curvature: K-FAC, EK-FAC and Shampoo-like factors of linear layers."""

from curvescope.operators.kronecker.approximations import EKFAC, KFAC, Shampoo
from curvescope.operators.kronecker.base import KroneckerOperator
from curvescope.operators.kronecker.quality import KFACQuality, kfac_quality

__all__ = ["EKFAC", "KFAC", "KFACQuality", "KroneckerOperator", "Shampoo", "kfac_quality"]
