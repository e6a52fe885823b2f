"""Activations, plain and gated, with two derivatives."""

from curvescope.kernels.activations.function import Name, activate, gelu, quick_gelu, relu, silu
from curvescope.kernels.activations.gated import gated

__all__ = ["Name", "activate", "gated", "gelu", "quick_gelu", "relu", "silu"]
