"""Projection of a vector onto the complement of a basis, with the remaining overlap, in one pass over the
basis.
"""

from curvescope.kernels.projection.function import in_triton, subtract_projection

__all__ = ["in_triton", "subtract_projection"]
