"""A vector less its part in a basis, and what is left of that part, in one reading of the basis."""

from curvescope.kernels.projection.function import in_triton, take_out

__all__ = ["in_triton", "take_out"]
