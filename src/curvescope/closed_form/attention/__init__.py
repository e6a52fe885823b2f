"""The curvature of attention: one head, several, or a layer of a model; whole, split, factored or applied."""

from curvescope.closed_form.attention.hessian import AttentionCurvature, Split
from curvescope.closed_form.attention.layer import AttentionOptions, rope_table
from curvescope.closed_form.attention.model_layer import attention_curvature as from_model
from curvescope.closed_form.attention.one_head import curvature, merged_curvature

__all__ = [
    "AttentionCurvature",
    "AttentionOptions",
    "Split",
    "curvature",
    "from_model",
    "merged_curvature",
    "rope_table",
]
