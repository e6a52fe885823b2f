"""Gemma 2 and 3: Gemma with norms behind the sublayers too, and in Gemma 3 on queries and keys."""

from dataclasses import replace

from curvescope.models.adapters.gemma import FAMILY as GEMMA
from curvescope.models.adapters.table import norm

ROLES = {
    **GEMMA.roles,
    **norm("ln1_post", "post_attention_layernorm"),
    **norm("ln2", "pre_feedforward_layernorm"),
    **norm("ln2_post", "post_feedforward_layernorm"),
}

FAMILY = replace(
    GEMMA,
    roles=ROLES,
    config={"activation": "hidden_activation"},
    notes=(*GEMMA.notes, "each sublayer's output is normed again before it is added"),
)
