"""GPT-2: learned positions, pre-norm, Q, K and V as columns of one matrix stored inputs × outputs."""

from curvescope.models.adapters.table import (
    Family,
    conv1d_packed,
    linear,
    matrix,
    norm,
    packed_vector,
    places,
    vector,
)

FAMILY = Family(
    base="transformer",
    layer="h.{i}.",
    stem={"E": matrix("wte.weight"), "P": matrix("wpe.weight")},
    roles={
        "W_Q": conv1d_packed("attn.c_attn.weight", 0),
        "b_Q": packed_vector("attn.c_attn.bias", 0),
        "W_K": conv1d_packed("attn.c_attn.weight", 1),
        "b_K": packed_vector("attn.c_attn.bias", 1),
        "W_V": conv1d_packed("attn.c_attn.weight", 2),
        "b_V": packed_vector("attn.c_attn.bias", 2),
        "W_O": matrix("attn.c_proj.weight"),
        "b_O": vector("attn.c_proj.bias"),
        "W_1": matrix("mlp.c_fc.weight"),
        "b_1": vector("mlp.c_fc.bias"),
        "W_2": matrix("mlp.c_proj.weight"),
        "b_2": vector("mlp.c_proj.bias"),
        **norm("ln1", "ln_1"),
        **norm("ln2", "ln_2"),
    },
    end=norm("ln_f", "ln_f"),
    head={"U": linear("lm_head.weight"), "U_class": linear("score.weight")},
    places=places(
        attention="attn", query="attn.c_attn", out="attn.c_proj", ff_in="mlp.c_fc", ff_out="mlp.c_proj"
    ),
    config={"d_ff": "n_inner", "activation": "activation_function"},
)
