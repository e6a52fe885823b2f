"""Operators: Hessian, its two parts, Fishers and the Jacobian, over named blocks, matrix-free."""

from curvescope.operators.activations import ActivationGGN, ActivationHessian, TokenBlocks
from curvescope.operators.curvature import GGN, EmpiricalFisher, Functional, Hessian, MonteCarloFisher
from curvescope.operators.diagonals import DiagonalCost, ExactDiagonal, diagonal_cost, exact_diagonal
from curvescope.operators.jacobian import Jacobian
from curvescope.operators.kronecker import EKFAC, KFAC, KFACQuality, KroneckerOperator, Shampoo, kfac_quality
from curvescope.operators.samples.per_sample import PerSample, SampleTraces, per_sample
from curvescope.operators.sources import Source, Sources
from curvescope.operators.taylor import Line, Plane, ThirdDerivative, line, plane, third_derivative

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "ActivationGGN",
    "ActivationHessian",
    "DiagonalCost",
    "EmpiricalFisher",
    "ExactDiagonal",
    "Functional",
    "Hessian",
    "Jacobian",
    "KFACQuality",
    "KroneckerOperator",
    "Line",
    "MonteCarloFisher",
    "PerSample",
    "Plane",
    "SampleTraces",
    "Shampoo",
    "Source",
    "Sources",
    "ThirdDerivative",
    "TokenBlocks",
    "diagonal_cost",
    "exact_diagonal",
    "kfac_quality",
    "line",
    "per_sample",
    "plane",
    "third_derivative",
]
