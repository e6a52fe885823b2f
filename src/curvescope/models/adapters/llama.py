"""Llama, Mistral, Qwen2, Qwen3: rotary positions, RMS norms, gated feed-forward, grouped keys and values."""

from typing import Any

from curvescope.models.adapters.table import Family, affine, linear, matrix, norm, places


def gated(config: Any) -> dict[str, Any]:
    """W_2 (a(x W_g) ∘ x W_u)."""
    return {"gated": True}


FAMILY = Family(
    base="model",
    layer="layers.{i}.",
    stem={"E": matrix("embed_tokens.weight")},
    roles={
        **affine("Q", "self_attn.q_proj"),
        **affine("K", "self_attn.k_proj"),
        **affine("V", "self_attn.v_proj"),
        **affine("O", "self_attn.o_proj"),
        **norm("q_norm", "self_attn.q_norm"),
        **norm("k_norm", "self_attn.k_norm"),
        **affine("g", "mlp.gate_proj"),
        **affine("u", "mlp.up_proj"),
        **affine("2", "mlp.down_proj"),
        **norm("ln1", "input_layernorm"),
        **norm("ln2", "post_attention_layernorm"),
    },
    end=norm("ln_f", "norm"),
    head={"U": linear("lm_head.weight"), "U_class": linear("score.weight")},
    places=places(
        attention="self_attn",
        query="self_attn.q_proj",
        out="self_attn.o_proj",
        ff_in="mlp.gate_proj",
        ff_out="mlp.down_proj",
    ),
    norm_kind="rmsnorm",
    positions="rope",
    facts=gated,
    float32=("the norms", "the softmax"),
)
