"""OPT: GPT-2's shape with ReLU, linear layers and positions that begin at row 2 of their table."""

from typing import Any

from curvescope.models.adapters.table import Family, affine, linear, matrix, norm, places


def _facts(config: Any) -> dict[str, Any]:
    """The smallest-but-one OPT (350m) is post-norm."""
    return {"norm": "pre" if config.do_layer_norm_before else "post"}


FAMILY = Family(
    base="model",
    layer="decoder.layers.{i}.",
    stem={
        "E": matrix("decoder.embed_tokens.weight"),
        "P": matrix("decoder.embed_positions.weight"),
        "W_in": linear("decoder.project_in.weight"),
    },
    roles={
        **affine("Q", "self_attn.q_proj"),
        **affine("K", "self_attn.k_proj"),
        **affine("V", "self_attn.v_proj"),
        **affine("O", "self_attn.out_proj"),
        **affine("1", "fc1"),
        **affine("2", "fc2"),
        **norm("ln1", "self_attn_layer_norm"),
        **norm("ln2", "final_layer_norm"),
    },
    end={**norm("ln_f", "decoder.final_layer_norm"), "W_out": linear("decoder.project_out.weight")},
    head={"U": linear("lm_head.weight"), "U_class": linear("score.weight")},
    places=places(
        attention="self_attn", query="self_attn.q_proj", out="self_attn.out_proj", ff_in="fc1", ff_out="fc2"
    ),
    config={"d_ff": "ffn_dim", "activation": "activation_function"},
    facts=_facts,
    float32=("the softmax",),
    notes=("P has two rows more than there are positions: they begin at row 2",),
)
