"""GPT-Neo: GPT-2 with linear layers of their own for Q, K and V; every other layer sees a window only."""

from curvescope.models.adapters.table import Family, affine, linear, matrix, norm, places

FAMILY = Family(
    base="transformer",
    layer="h.{i}.",
    stem={"E": matrix("wte.weight"), "P": matrix("wpe.weight")},
    roles={
        **affine("Q", "attn.attention.q_proj"),
        **affine("K", "attn.attention.k_proj"),
        **affine("V", "attn.attention.v_proj"),
        **affine("O", "attn.attention.out_proj"),
        **affine("1", "mlp.c_fc"),
        **affine("2", "mlp.c_proj"),
        **norm("ln1", "ln_1"),
        **norm("ln2", "ln_2"),
    },
    end=norm("ln_f", "ln_f"),
    head={"U": linear("lm_head.weight"), "U_class": linear("score.weight")},
    places=places(
        attention="attn.attention",
        query="attn.attention.q_proj",
        out="attn.attention.out_proj",
        ff_in="mlp.c_fc",
        ff_out="mlp.c_proj",
    ),
    config={"activation": "activation_function"},
    float32=("the attention scores",),
    notes=("attention scores are not divided by √d_head",),
)
