"""LayerNorm and RMSNorm with two derivatives."""

from curvescope.kernels.norms.function import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
