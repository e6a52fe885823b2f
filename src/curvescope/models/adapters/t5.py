"""T5: an encoder and a decoder that attends to it, RMS norms, a bias of scores by relative position.

Layers are counted through the whole module, those of the encoder first. The bias of the first layer of either
serves all of its layers; scores are not scaled.
"""

from typing import Any

from curvescope.models.adapters.table import Cut, Family, linear, matrix, norm


def _attention(module: str, front: str = "") -> dict[str, Cut]:
    return {f"{front}W_{role}": linear(f"{module}.{role.lower()}.weight") for role in "QKVO"}


def _own_attention() -> dict[str, Cut]:
    """Attention of a stack to itself, and its norm."""
    bias = matrix("0.SelfAttention.relative_attention_bias.weight")
    return {**_attention("0.SelfAttention"), "P_rel": bias, **norm("ln1", "0.layer_norm")}


def _feed_forward(module: str) -> dict[str, Cut]:
    names = {"W_1": "wi", "W_g": "wi_0", "W_u": "wi_1", "W_2": "wo"}
    found = {role: linear(f"{module}.DenseReluDense.{name}.weight") for role, name in names.items()}
    return {**found, **norm("ln2", f"{module}.layer_norm")}


def _facts(config: Any) -> dict[str, Any]:
    """Layers of both stacks, and whether the feed-forward is W_2 (a(x W_g) ∘ x W_u)."""
    encoder, decoder = config.num_layers, config.num_decoder_layers if config.is_encoder_decoder else 0
    layers = {"n_layers": encoder + decoder, "n_encoder_layers": encoder}
    return {**layers, **({"gated": True} if config.is_gated_act else {})}


FAMILY = Family(
    layer="encoder.block.{i}.layer.",
    stem={"E": matrix("shared.weight")},
    roles={**_own_attention(), **_feed_forward("1")},
    decoder="decoder.block.{i}.layer.",
    decoder_roles={
        **_own_attention(),
        **_attention("1.EncDecAttention", "cross_"),
        **norm("ln_cross", "1.layer_norm"),
        **_feed_forward("2"),
    },
    end={**norm("ln_enc", "encoder.final_layer_norm"), **norm("ln_f", "decoder.final_layer_norm")},
    head={"U": linear("lm_head.weight")},
    norm_kind="rmsnorm",
    positions="relative",
    causal=False,
    config={"d_ff": "d_ff", "activation": "dense_act_fn"},
    facts=_facts,
    float32=("the norms",),
)
