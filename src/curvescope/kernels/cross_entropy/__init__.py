"""A linear head and its cross-entropy as one function with two derivatives."""

from curvescope.kernels.cross_entropy.function import HeadCurvature, cross_entropy_head, log_partition

__all__ = ["HeadCurvature", "cross_entropy_head", "log_partition"]
