"""GPT-NeoX and Pythia: rotary positions, Q, K and V of head 0, then of head 1, … in one matrix."""

from typing import Any

from curvescope.models.adapters.table import (
    Family,
    affine,
    interleaved,
    interleaved_vector,
    linear,
    matrix,
    norm,
    places,
)


def _facts(config: Any) -> dict[str, Any]:
    """Whether attention and feed-forward read the same stream, x + attn(ln1 x) + ff(ln2 x)."""
    return {"parallel": bool(config.use_parallel_residual)}


FAMILY = Family(
    base="gpt_neox",
    layer="layers.{i}.",
    stem={"E": matrix("embed_in.weight")},
    roles={
        "W_Q": interleaved("attention.query_key_value.weight", 0),
        "b_Q": interleaved_vector("attention.query_key_value.bias", 0),
        "W_K": interleaved("attention.query_key_value.weight", 1),
        "b_K": interleaved_vector("attention.query_key_value.bias", 1),
        "W_V": interleaved("attention.query_key_value.weight", 2),
        "b_V": interleaved_vector("attention.query_key_value.bias", 2),
        **affine("O", "attention.dense"),
        **affine("1", "mlp.dense_h_to_4h"),
        **affine("2", "mlp.dense_4h_to_h"),
        **norm("ln1", "input_layernorm"),
        **norm("ln2", "post_attention_layernorm"),
    },
    end=norm("ln_f", "final_layer_norm"),
    head={"U": linear("lm_head.weight"), "U_class": linear("score.weight")},
    places=places(
        attention="attention",
        query="attention.query_key_value",
        out="attention.dense",
        ff_in="mlp.dense_h_to_4h",
        ff_out="mlp.dense_4h_to_h",
    ),
    positions="rope",
    facts=_facts,
    float32=("the softmax",),
)
