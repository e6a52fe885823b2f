"""Operators: Hessian, its two parts, Fishers and the Jacobian, over named blocks, matrix-free."""

from curvescope.operators.activations import ActivationGGN, ActivationHessian, TokenBlocks
from curvescope.operators.curvature import GGN, EmpiricalFisher, FunctionalHessian, Hessian, MonteCarloFisher
from curvescope.operators.diagonals import DiagonalCost, ExactDiagonal, diagonal_cost, exact_diagonal
from curvescope.operators.jacobian import Jacobian
from curvescope.operators.kronecker import EKFAC, KFAC, KFACQuality, KroneckerOperator, Shampoo, kfac_quality
from curvescope.operators.samples.per_sample import PerSample, SampleTraces, per_sample
from curvescope.operators.sources import FunctionalSource, FunctionalSources
from curvescope.operators.taylor import (
    LossLine,
    LossPlane,
    ThirdDerivative,
    loss_line,
    loss_plane,
    third_derivative,
)

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "ActivationGGN",
    "ActivationHessian",
    "DiagonalCost",
    "EmpiricalFisher",
    "ExactDiagonal",
    "FunctionalHessian",
    "FunctionalSource",
    "FunctionalSources",
    "Hessian",
    "Jacobian",
    "KFACQuality",
    "KroneckerOperator",
    "LossLine",
    "LossPlane",
    "MonteCarloFisher",
    "PerSample",
    "SampleTraces",
    "Shampoo",
    "ThirdDerivative",
    "TokenBlocks",
    "diagonal_cost",
    "exact_diagonal",
    "kfac_quality",
    "loss_line",
    "loss_plane",
    "per_sample",
    "third_derivative",
]
