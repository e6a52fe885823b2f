"""Algorithms on linear operators: eigenpairs, densities, traces, diagonals, norms and linear systems.

They take an operator, know nothing about networks, and return frozen results with their uncertainty.
"""

from curvescope.algorithms.blocks.block_norms import BlockNorms, block_norms
from curvescope.algorithms.blocks.equal_size_blocks import EqualBlocks, equal_blocks
from curvescope.algorithms.estimates.diagonal import DiagonalEstimate, diagonal
from curvescope.algorithms.estimates.norms import FrobeniusNorm, SpectralNorm, frobenius_norm, spectral_norm
from curvescope.algorithms.estimates.trace import BlockTraces, TraceEstimate, block_traces, trace
from curvescope.algorithms.estimates.trace_function import FunctionTrace, logdet, trace_function
from curvescope.algorithms.spectra.density import SpectralDensity, block_density, spectral_density
from curvescope.algorithms.spectra.lanczos import Eigenpairs, Tridiagonals, deflate, eigsh, lanczos
from curvescope.algorithms.stability.sharpness import (
    QuadraticDescent,
    Sharpness,
    preconditioned_sharpness,
    quadratic_descent,
)
from curvescope.algorithms.systems.inverse import Inverse, inverse
from curvescope.algorithms.systems.solve import Solution, solve

__all__ = [
    "BlockNorms",
    "BlockTraces",
    "DiagonalEstimate",
    "Eigenpairs",
    "EqualBlocks",
    "FrobeniusNorm",
    "FunctionTrace",
    "Inverse",
    "QuadraticDescent",
    "Sharpness",
    "Solution",
    "SpectralDensity",
    "SpectralNorm",
    "TraceEstimate",
    "Tridiagonals",
    "block_density",
    "block_norms",
    "block_traces",
    "deflate",
    "diagonal",
    "eigsh",
    "equal_blocks",
    "frobenius_norm",
    "inverse",
    "lanczos",
    "logdet",
    "preconditioned_sharpness",
    "quadratic_descent",
    "solve",
    "spectral_density",
    "spectral_norm",
    "trace",
    "trace_function",
]
