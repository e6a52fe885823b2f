"""Curvature of attention, for one head, several heads or a model's layer: blocks, factors and products."""

from curvescope.closed_form.attention.hessian import AttentionCurvature, BlockParts
from curvescope.closed_form.attention.layer import AttentionOptions, rope_table
from curvescope.closed_form.attention.model_layer import attention_curvature as from_model
from curvescope.closed_form.attention.one_head import curvature, merged_curvature

__all__ = [
    "AttentionCurvature",
    "AttentionOptions",
    "BlockParts",
    "curvature",
    "from_model",
    "merged_curvature",
    "rope_table",
]
