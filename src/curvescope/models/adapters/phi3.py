"""Phi-3: Llama with Q, K and V stacked in one matrix, gate and up in another."""

from dataclasses import replace

from curvescope.models.adapters.llama import FAMILY as LLAMA
from curvescope.models.adapters.table import packed, places, slab

_NEW = {
    "W_Q": packed("self_attn.qkv_proj.weight", 0),
    "W_K": packed("self_attn.qkv_proj.weight", 1),
    "W_V": packed("self_attn.qkv_proj.weight", 2),
    "W_g": slab("mlp.gate_up_proj.weight", 0, 2),
    "W_u": slab("mlp.gate_up_proj.weight", 1, 2),
}

FAMILY = replace(
    LLAMA,
    roles={**LLAMA.roles, **_NEW},
    places=places(
        attention="self_attn",
        query="self_attn.qkv_proj",
        out="self_attn.o_proj",
        ff_in="mlp.gate_up_proj",
        ff_out="mlp.down_proj",
    ),
)
