"""Algorithms on linear operators: eigenpairs, densities, traces, diagonals, norms and linear systems.

They take an operator and nothing about networks, and return frozen results that say how sure they are.
"""

from curvescope.algorithms.block_map import BlockMap, block_map
from curvescope.algorithms.density import SpectralDensity, block_density, spectral_density
from curvescope.algorithms.diagonal import DiagonalEstimate, diagonal
from curvescope.algorithms.lanczos import Eigenpairs, Tridiagonals, eigsh, lanczos
from curvescope.algorithms.norms import FrobeniusNorm, SpectralNorm, frobenius_norm, spectral_norm
from curvescope.algorithms.solve import Solution, solve
from curvescope.algorithms.trace import BlockTraces, TraceEstimate, block_traces, trace

__all__ = [
    "BlockMap",
    "BlockTraces",
    "DiagonalEstimate",
    "Eigenpairs",
    "FrobeniusNorm",
    "Solution",
    "SpectralDensity",
    "SpectralNorm",
    "TraceEstimate",
    "Tridiagonals",
    "block_density",
    "block_map",
    "block_traces",
    "diagonal",
    "eigsh",
    "frobenius_norm",
    "lanczos",
    "solve",
    "spectral_density",
    "spectral_norm",
    "trace",
]
