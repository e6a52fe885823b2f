"""Tables of model families: the role of each parameter. Each family has a table and a line in `FAMILIES`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from curvescope.models.adapters.table import (
    Family,
    ParameterSlice,
    affine,
    conv1d_packed,
    interleaved,
    interleaved_vector,
    linear,
    matrix,
    norm,
    packed,
    packed_vector,
    patches,
    places,
    slab,
    vector,
)
from curvescope.models.running.patching import Change

GPT2 = Family(
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
"""GPT-2: learned positions, pre-norm, Q, K and V as columns of one matrix stored inputs × outputs."""

GPT_NEO = Family(
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
"""GPT-Neo: GPT-2 with linear layers of their own for Q, K and V; every other layer sees a window only."""


def _gpt_neox_facts(config: Any) -> dict[str, Any]:
    """Return if attention and feed-forward read the same stream, x + attn(ln1 x) + ff(ln2 x)."""
    return {"parallel": bool(config.use_parallel_residual)}


GPT_NEOX = Family(
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
    facts=_gpt_neox_facts,
    float32=("the softmax",),
)
"""GPT-NeoX and Pythia: rotary positions, Q, K and V of head 0, then of head 1, … in one matrix."""


def _opt_facts(config: Any) -> dict[str, Any]:
    """Return the position of the norms; only OPT-350m is post-norm."""
    return {"norm": "pre" if config.do_layer_norm_before else "post"}


OPT = Family(
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
    facts=_opt_facts,
    float32=("the softmax",),
    notes=("P has two more rows than there are positions: positions begin at row 2",),
)
"""OPT: GPT-2's shape with ReLU, linear layers and positions that begin at row 2 of their table."""


def _gated(config: Any) -> dict[str, Any]:
    """Return the fact that the feed-forward is gated: (a(x W_g) ∘ x W_u) W_2."""
    return {"gated": True}


LLAMA = Family(
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
    facts=_gated,
    float32=("the norms", "the softmax"),
)
"""Llama, Mistral, Qwen2, Qwen3: rotary positions, RMS norms, gated feed-forward, grouped keys and values."""

_PHI3 = {
    "W_Q": packed("self_attn.qkv_proj.weight", 0),
    "W_K": packed("self_attn.qkv_proj.weight", 1),
    "W_V": packed("self_attn.qkv_proj.weight", 2),
    "W_g": slab("mlp.gate_up_proj.weight", 0, 2),
    "W_u": slab("mlp.gate_up_proj.weight", 1, 2),
}

PHI3 = replace(
    LLAMA,
    roles={**LLAMA.roles, **_PHI3},
    places=places(
        attention="self_attn",
        query="self_attn.qkv_proj",
        out="self_attn.o_proj",
        ff_in="mlp.gate_up_proj",
        ff_out="mlp.down_proj",
    ),
)
"""Phi-3: Llama with Q, K and V stacked in one matrix, gate and up in another."""

_GEMMA_NOTES = ("norms multiply by 1 + g, where g is the parameter", "embeddings are multiplied by √d_model")

GEMMA = replace(LLAMA, notes=_GEMMA_NOTES)
"""Gemma: Llama's layout, a gain of 1 + g in every norm, and embeddings multiplied by √d_model."""

_GEMMA2_ROLES = {
    **GEMMA.roles,
    **norm("ln1_post", "post_attention_layernorm"),
    **norm("ln2", "pre_feedforward_layernorm"),
    **norm("ln2_post", "post_feedforward_layernorm"),
}

GEMMA2 = replace(
    GEMMA,
    roles=_GEMMA2_ROLES,
    config={"activation": "hidden_activation"},
    notes=(*GEMMA.notes, "each sublayer's output is normalized again before it is added"),
)
"""Gemma 2 and 3: Gemma with norms after the sublayers, too, and in Gemma 3 on queries and keys."""

_STACKED = {
    "W_g": ParameterSlice("mlp.experts.gate_up_proj", "e po i", part=0, parts=2),
    "W_u": ParameterSlice("mlp.experts.gate_up_proj", "e po i", part=1, parts=2),
    "W_2": ParameterSlice("mlp.experts.down_proj", "e o i"),
}
_SHARED = {
    f"shared.{role}": cut
    for name, letter in {"gate_proj": "g", "up_proj": "u", "down_proj": "2"}.items()
    for role, cut in affine(letter, f"mlp.shared_expert.{name}").items()
}


def _experts_facts(config: Any) -> dict[str, Any]:
    """Return the number of experts per layer, the number per token, and the width of an expert."""
    num = getattr(config, "num_local_experts", None) or config.num_experts
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return {"gated": True, "n_experts": num, "experts_per_token": config.num_experts_per_tok, "d_ff": width}


_NORMS = {role: cut for role, cut in LLAMA.roles.items() if role.startswith("ln")}

EXPERTS = replace(
    LLAMA,
    roles={
        **{role: cut for role, cut in LLAMA.roles.items() if role not in _NORMS},
        "W_router": linear("mlp.gate.weight"),
        **_SHARED,
        "W_shared": linear("mlp.shared_expert_gate.weight"),
        **_NORMS,
    },
    experts=_STACKED,
    places=places(
        attention="self_attn",
        query="self_attn.q_proj",
        out="self_attn.o_proj",
        ff_in="mlp",
        ff_out="mlp",
    ),
    facts=_experts_facts,
    float32=(*LLAMA.float32, "the router"),
)
"""Mixtral, Qwen2-MoE and Qwen3-MoE: Llama with experts and a router; Qwen2 adds a shared expert.

A token x goes to the k experts with the largest entries of p = softmax(x W_router). Their outputs are summed
with those entries as weights, Σ_e p_e (a(x W_g) ∘ x W_u) W_2 with each expert's own matrices. In Mixtral, and
in Qwen with `norm_topk_prob`, the weights are divided by their sum. The shared expert gets every token, with
the weight σ(x W_shared).
"""


def _bert_facts(config: Any) -> dict[str, Any]:
    """Return the number of positions; RoBERTa counts them from the row after the padding row."""
    skipped = config.pad_token_id + 1 if config.model_type == "roberta" else 0
    return {"causal": bool(config.is_decoder), "n_ctx": config.max_position_embeddings - skipped}


BERT = Family(
    layer="encoder.layer.{i}.",
    stem={
        "E": matrix("embeddings.word_embeddings.weight"),
        "P": matrix("embeddings.position_embeddings.weight"),
        "E_type": matrix("embeddings.token_type_embeddings.weight"),
        **norm("ln_e", "embeddings.LayerNorm"),
    },
    roles={
        **affine("Q", "attention.self.query"),
        **affine("K", "attention.self.key"),
        **affine("V", "attention.self.value"),
        **affine("O", "attention.output.dense"),
        **norm("ln1", "attention.output.LayerNorm"),
        **affine("1", "intermediate.dense"),
        **affine("2", "output.dense"),
        **norm("ln2", "output.LayerNorm"),
    },
    end=affine("pool", "pooler.dense"),
    head={
        **affine("mlm", "cls.predictions.transform.dense"),
        **norm("ln_mlm", "cls.predictions.transform.LayerNorm"),
        "U": linear("cls.predictions.decoder.weight"),
        "b_U": vector("cls.predictions.bias"),
        **affine("class", "classifier"),
    },
    places=places(
        attention="attention.self",
        query="attention.self.query",
        out="attention.output.dense",
        ff_in="intermediate.dense",
        ff_out="output.dense",
    ),
    base="bert",
    norm="post",
    causal=False,
    facts=_bert_facts,
)
"""BERT and RoBERTa: post-norm encoders with learned positions and a masked-language-model head."""

ROBERTA = replace(
    BERT,
    base="roberta",
    head={
        **affine("mlm", "lm_head.dense"),
        **norm("ln_mlm", "lm_head.layer_norm"),
        "U": linear("lm_head.decoder.weight"),
        "b_U": vector("lm_head.bias"),
        **affine("class_hidden", "classifier.dense"),
        **affine("class", "classifier.out_proj"),
    },
    notes=("tokens equal to the padding id all have the same position",),
)
"""RoBERTa: BERT's body with another head; positions are counted from the row after the padding row."""

DISTILBERT = Family(
    base="distilbert",
    layer="transformer.layer.{i}.",
    stem={
        "E": matrix("embeddings.word_embeddings.weight"),
        "P": matrix("embeddings.position_embeddings.weight"),
        **norm("ln_e", "embeddings.LayerNorm"),
    },
    roles={
        **affine("Q", "attention.q_lin"),
        **affine("K", "attention.k_lin"),
        **affine("V", "attention.v_lin"),
        **affine("O", "attention.out_lin"),
        **norm("ln1", "sa_layer_norm"),
        **affine("1", "ffn.lin1"),
        **affine("2", "ffn.lin2"),
        **norm("ln2", "output_layer_norm"),
    },
    head={
        **affine("mlm", "vocab_transform"),
        **norm("ln_mlm", "vocab_layer_norm"),
        "U": linear("vocab_projector.weight"),
        "b_U": vector("vocab_projector.bias"),
        **affine("class_hidden", "pre_classifier"),
        **affine("class", "classifier"),
    },
    places=places(
        attention="attention",
        query="attention.q_lin",
        out="attention.out_lin",
        ff_in="ffn.lin1",
        ff_out="ffn.lin2",
    ),
    norm="post",
    causal=False,
    config={"d_ff": "hidden_dim", "activation": "activation"},
)
"""DistilBERT: BERT without token types and pooler."""


def _t5_attention(module: str, front: str = "") -> dict[str, ParameterSlice]:
    return {f"{front}W_{role}": linear(f"{module}.{role.lower()}.weight") for role in "QKVO"}


def _t5_own_attention() -> dict[str, ParameterSlice]:
    """Return the roles of self-attention and its norm."""
    bias = matrix("0.SelfAttention.relative_attention_bias.weight")
    return {**_t5_attention("0.SelfAttention"), "P_rel": bias, **norm("ln1", "0.layer_norm")}


def _t5_feed_forward(module: str) -> dict[str, ParameterSlice]:
    names = {"W_1": "wi", "W_g": "wi_0", "W_u": "wi_1", "W_2": "wo"}
    roles = {role: linear(f"{module}.DenseReluDense.{name}.weight") for role, name in names.items()}
    return {**roles, **norm("ln2", f"{module}.layer_norm")}


def _t5_facts(config: Any) -> dict[str, Any]:
    """Return the number of layers of both stacks, and whether the feed-forward is gated."""
    encoder, decoder = config.num_layers, config.num_decoder_layers if config.is_encoder_decoder else 0
    layers = {"n_layers": encoder + decoder, "n_encoder_layers": encoder}
    return {**layers, **({"gated": True} if config.is_gated_act else {})}


T5 = Family(
    layer="encoder.block.{i}.layer.",
    stem={"E": matrix("shared.weight")},
    roles={**_t5_own_attention(), **_t5_feed_forward("1")},
    decoder="decoder.block.{i}.layer.",
    decoder_roles={
        **_t5_own_attention(),
        **_t5_attention("1.EncDecAttention", "cross_"),
        **norm("ln_cross", "1.layer_norm"),
        **_t5_feed_forward("2"),
    },
    end={**norm("ln_enc", "encoder.final_layer_norm"), **norm("ln_f", "decoder.final_layer_norm")},
    head={"U": linear("lm_head.weight")},
    norm_kind="rmsnorm",
    positions="relative",
    causal=False,
    config={"d_ff": "d_ff", "activation": "dense_act_fn"},
    facts=_t5_facts,
    float32=("the norms",),
)
"""T5: an encoder and a decoder that attends to it, RMS norms, a bias of scores by relative position.

Layers are numbered through the whole module, the encoder's first. All layers of a stack share the score bias
of its first layer; scores are not scaled.
"""


def _vit_facts(config: Any) -> dict[str, Any]:
    """Return the number of positions: one per patch, and one for the class token."""
    return {
        "n_ctx": (config.image_size // config.patch_size) ** 2 + 1,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "channels": config.num_channels,
        "vocab_size": None,
    }


VIT = Family(
    base="vit",
    layer="layers.{i}.",
    stem={
        "E": patches("embeddings.patch_embeddings.projection.weight"),
        "b_E": vector("embeddings.patch_embeddings.projection.bias"),
        "E_class": ParameterSlice("embeddings.cls_token", "1 1 o"),
        "P": ParameterSlice("embeddings.position_embeddings", "1 i o"),
    },
    roles={
        **affine("Q", "attention.q_proj"),
        **affine("K", "attention.k_proj"),
        **affine("V", "attention.v_proj"),
        **affine("O", "attention.o_proj"),
        **affine("1", "mlp.fc1"),
        **affine("2", "mlp.fc2"),
        **norm("ln1", "layernorm_before"),
        **norm("ln2", "layernorm_after"),
    },
    end={**norm("ln_f", "layernorm"), **affine("pool", "pooler.dense")},
    head={"U": linear("classifier.weight"), "b_U": vector("classifier.bias")},
    places=places(
        attention="attention",
        query="attention.q_proj",
        out="attention.o_proj",
        ff_in="mlp.fc1",
        ff_out="mlp.fc2",
    ),
    causal=False,
    facts=_vit_facts,
    float32=("the softmax",),
)
"""ViT: image patches and one class token, pre-norm; the output is read at the class token."""

MAMBA = Family(
    norm_kind="rmsnorm",
    positions="none",
    float32=("the norms", "the scan"),
    notes=("a state-space model has no heads, no attention pattern and no Q, K, V",),
)
"""Mamba: a state-space model; its blocks are its parameters."""


def _rwkv_as_trained(module: Any) -> list[Change]:
    """Return changes that switch off RWKV's division by powers of 2, unless weights are already divided."""
    body = getattr(module, "rwkv", module)
    if body.layers_are_rescaled or not body.config.rescale_every:
        return []
    return [Change(vars(body.config), "rescale_every", 0), Change(vars(body), "layers_are_rescaled", True)]


RWKV = Family(
    positions="none",
    float32=("the recurrence",),
    settings=_rwkv_as_trained,
    notes=(
        "a recurrence has no heads, no attention pattern and no Q, K, V",
        "the weights are used as they are: as trained, or, after a pass in eval mode, divided for half "
        "precision by 2^(layer // rescale_every)",
    ),
)
"""RWKV: linear attention as a recurrence; its blocks are its parameters."""

FAMILIES = {
    "bert": BERT,
    "distilbert": DISTILBERT,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2,
    "gpt2": GPT2,
    "gpt_neo": GPT_NEO,
    "gpt_neox": GPT_NEOX,
    "llama": LLAMA,
    "mamba": MAMBA,
    "mistral": LLAMA,
    "mixtral": EXPERTS,
    "opt": OPT,
    "phi3": PHI3,
    "qwen2": LLAMA,
    "qwen2_moe": EXPERTS,
    "qwen3": LLAMA,
    "qwen3_moe": EXPERTS,
    "roberta": ROBERTA,
    "rwkv": RWKV,
    "t5": T5,
    "vit": VIT,
}
"""Table of each `model_type` of a configuration."""


def family_of(model_type: str | None) -> Family | None:
    """Return the table of a model type, or None if there is none."""
    return None if model_type is None else FAMILIES.get(model_type)
