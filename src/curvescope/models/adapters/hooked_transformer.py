"""TransformerLens's HookedTransformer: heads are an axis of their own, weights are inputs × outputs."""

from dataclasses import replace
from typing import Any

from curvescope.models.adapters.table import Cut, Family, Place, matrix, vector

_PLACES = {
    "attn.in": Place("ln1", "output"),
    "attn.pattern": Place("attn.hook_pattern", "output"),
    "attn.heads": Place("attn.hook_z", "output"),
    "attn.out": Place("hook_attn_out", "output"),
    "ff.in": Place("ln2", "output"),
    "ff.out": Place("hook_mlp_out", "output"),
}

FAMILY = Family(
    layer="blocks.{i}.",
    stem={
        "E": matrix("embed.W_E"),
        "P": matrix("pos_embed.W_pos"),
        "ln_e.g": vector("embed.ln.w"),
        "ln_e.b": vector("embed.ln.b"),
    },
    roles={
        "W_Q": Cut("attn.W_Q", "h i k"),
        "b_Q": Cut("attn.b_Q", "h k"),
        "W_K": Cut("attn.W_K", "h i k"),
        "b_K": Cut("attn.b_K", "h k"),
        "W_V": Cut("attn.W_V", "h i k"),
        "b_V": Cut("attn.b_V", "h k"),
        "W_O": Cut("attn.W_O", "h k o"),
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

_GROUPED = {
    "W_K": Cut("attn._W_K", "h i k"),
    "b_K": Cut("attn._b_K", "h k"),
    "W_V": Cut("attn._W_V", "h i k"),
    "b_V": Cut("attn._b_V", "h k"),
}
_GATED = {"W_g": matrix("mlp.W_gate"), "W_u": matrix("mlp.W_in"), "b_u": vector("mlp.b_in")}


def family(cfg: Any) -> Family:
    """The table for a configuration: grouped keys and values, and gated feed-forward, have other names."""
    roles = dict(FAMILY.roles)
    if cfg.n_key_value_heads is not None:
        roles.update(_GROUPED)
    if cfg.gated_mlp:
        del roles["W_1"], roles["b_1"]
        roles.update(_GATED)
    return replace(FAMILY, roles=roles)
