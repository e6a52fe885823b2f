"""TransformerLens's HookedTransformer as a model."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from curvescope.models.adapters.build import HeadCounts, build_blocks
from curvescope.models.adapters.table import ActivationPlace, Family, ParameterSlice, matrix, vector
from curvescope.models.hf.module import places_of
from curvescope.models.model import Model
from curvescope.models.plain import check_parameters
from curvescope.tokenizers import HFTokenizer

_NORMS = {"LN": "layernorm", "LNPre": "layernorm", "RMS": "rmsnorm", "RMSPre": "rmsnorm", None: "none"}
_POSITIONS = {"standard": "learned", "rotary": "rope"}


def is_hooked(module: Any) -> bool:
    """Return True if a module is a HookedTransformer, without importing transformer_lens."""
    return any(c.__name__ == "HookedTransformer" for c in type(module).__mro__)


def adapt_hooked(module: Any, *, name: str | None = None) -> Model:
    """Return the model of a HookedTransformer; its attention is differentiable already."""
    check_parameters(module)
    cfg = module.cfg
    family = _family(cfg)
    kv = cfg.n_key_value_heads or cfg.n_heads
    blocks, singles = build_blocks(module, family, cfg.n_layers, HeadCounts(cfg.n_heads, kv, cfg.d_head))
    folded = str(cfg.normalization_type).endswith("Pre")
    facts = {
        "kind": "hooked_transformer",
        "n_layers": cfg.n_layers,
        "d_model": cfg.d_model,
        "n_heads": cfg.n_heads,
        "n_kv_heads": kv,
        "d_head": cfg.d_head,
        "d_ff": cfg.d_mlp or 0,
        "n_ctx": cfg.n_ctx,
        "vocab_size": cfg.d_vocab,
        "attention": "softmax",
        "activation": cfg.act_fn,
        "gated": bool(cfg.gated_mlp),
        "causal": cfg.attention_dir == "causal",
        "norm": "none" if cfg.normalization_type is None else "pre",
        "norm_kind": _NORMS.get(cfg.normalization_type, cfg.normalization_type),
        "positions": _POSITIONS.get(cfg.positional_embedding_type, cfg.positional_embedding_type),
        "tied": False,
    }
    notes = ("norms are folded into the matrices after them and have no parameters",) if folded else ()
    if cfg.num_experts:
        notes += (f"a mixture of {cfg.num_experts} experts: curvature is that of the routing here",)
    label = name or cfg.model_name or type(module).__name__
    places = places_of(module, family, cfg.n_layers)
    return Model(module, label, blocks, singles, facts, notes, _tokenizer(module), places=places)


def move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a copy on another device or in another dtype, with the configuration changed, too."""
    module = copy.deepcopy(module)
    nn.Module.to(
        module, device=device, dtype=dtype
    )  # HookedTransformer.to takes only one of the two, and prints
    cfg: Any = module.cfg
    cfg.dtype, cfg.device = dtype, str(device)
    return module


def _tokenizer(module: Any) -> Any:
    return None if module.tokenizer is None else HFTokenizer(module.tokenizer)


_PLACES = {
    "attn.in": ActivationPlace("ln1", "output"),
    "attn.pattern": ActivationPlace("attn.hook_pattern", "output"),
    "attn.heads": ActivationPlace("attn.hook_z", "output"),
    "attn.out": ActivationPlace("hook_attn_out", "output"),
    "ff.in": ActivationPlace("ln2", "output"),
    "ff.out": ActivationPlace("hook_mlp_out", "output"),
}

HOOKED = Family(
    layer="blocks.{i}.",
    stem={
        "E": matrix("embed.W_E"),
        "P": matrix("pos_embed.W_pos"),
        "ln_e.g": vector("embed.ln.w"),
        "ln_e.b": vector("embed.ln.b"),
    },
    roles={
        "W_Q": ParameterSlice("attn.W_Q", "h i k"),
        "b_Q": ParameterSlice("attn.b_Q", "h k"),
        "W_K": ParameterSlice("attn.W_K", "h i k"),
        "b_K": ParameterSlice("attn.b_K", "h k"),
        "W_V": ParameterSlice("attn.W_V", "h i k"),
        "b_V": ParameterSlice("attn.b_V", "h k"),
        "W_O": ParameterSlice("attn.W_O", "h k o"),
        "b_O": vector("attn.b_O"),
        "W_1": matrix("mlp.W_in"),
        "b_1": vector("mlp.b_in"),
        "W_2": matrix("mlp.W_out"),
        "b_2": vector("mlp.b_out"),
        "ln1.g": vector("ln1.w"),
        "ln1.b": vector("ln1.b"),
        "ln2.g": vector("ln2.w"),
        "ln2.b": vector("ln2.b"),
        "ln1_post.g": vector("ln1_post.w"),
        "ln2_post.g": vector("ln2_post.w"),
        "q_norm.g": vector("attn.q_norm.w"),
        "k_norm.g": vector("attn.k_norm.w"),
        "ln_mid.g": vector("mlp.ln.w"),
        "ln_mid.b": vector("mlp.ln.b"),
    },
    end={"ln_f.g": vector("ln_final.w"), "ln_f.b": vector("ln_final.b")},
    head={"U": matrix("unembed.W_U"), "b_U": vector("unembed.b_U")},
    places=_PLACES,
)
"""TransformerLens's HookedTransformer: heads are an axis of their own, weights are inputs × outputs."""

_GROUPED = {
    "W_K": ParameterSlice("attn._W_K", "h i k"),
    "b_K": ParameterSlice("attn._b_K", "h k"),
    "W_V": ParameterSlice("attn._W_V", "h i k"),
    "b_V": ParameterSlice("attn._b_V", "h k"),
}
_GATED = {"W_g": matrix("mlp.W_gate"), "W_u": matrix("mlp.W_in"), "b_u": vector("mlp.b_in")}


def _family(cfg: Any) -> Family:
    """Return the table for a configuration; grouped keys and values, and gated layers, have other names."""
    roles = dict(HOOKED.roles)
    if cfg.n_key_value_heads is not None:
        roles.update(_GROUPED)
    if cfg.gated_mlp:
        del roles["W_1"], roles["b_1"]
        roles.update(_GATED)
    return replace(HOOKED, roles=roles)
