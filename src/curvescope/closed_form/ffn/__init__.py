"""Feed-forward layers, plain and gated: derivatives, every block, and statistics of blocks."""

from curvescope.closed_form.ffn.layer import (
    Branch,
    FeedForwardPoint,
    apply_output_curvature,
    features,
    ffn_blocks,
    ffn_curvature,
    ffn_jacobian,
    ffn_output,
    ffn_point,
    sum_branches,
)

__all__ = [
    "Branch",
    "FeedForwardPoint",
    "apply_output_curvature",
    "features",
    "ffn_blocks",
    "ffn_curvature",
    "ffn_jacobian",
    "ffn_output",
    "ffn_point",
    "sum_branches",
]
