"""Mixtral, Qwen2-MoE and Qwen3-MoE: Llama with experts, a router, and in Qwen2 a shared expert beside them.

A token x goes to the k experts with the largest entries of p = softmax(x W_router), and what they make of it
is added up with those entries as weights, Σ_e p_e (a(x W_g) ∘ x W_u) W_2 with each expert's own matrices. In
Mixtral, and in Qwen where the configuration says so (`norm_topk_prob`), the weights are divided by their sum.
The shared expert sees every token, with the weight σ(x W_shared).
"""

from dataclasses import replace
from typing import Any

from curvescope.models.adapters.llama import FAMILY as LLAMA
from curvescope.models.adapters.table import Cut, affine, linear, places

STACKED = {
    "W_g": Cut("mlp.experts.gate_up_proj", "e po i", part=0, parts=2),
    "W_u": Cut("mlp.experts.gate_up_proj", "e po i", part=1, parts=2),
    "W_2": Cut("mlp.experts.down_proj", "e o i"),
}
SHARED = {
    f"shared.{role}": cut
    for name, letter in {"gate_proj": "g", "up_proj": "u", "down_proj": "2"}.items()
    for role, cut in affine(letter, f"mlp.shared_expert.{name}").items()
}


def _facts(config: Any) -> dict[str, Any]:
    """Experts of a layer, those that one token sees, and the width of one."""
    num = getattr(config, "num_local_experts", None) or config.num_experts
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return {"gated": True, "n_experts": num, "experts_per_token": config.num_experts_per_tok, "d_ff": width}


_NORMS = {role: cut for role, cut in LLAMA.roles.items() if role.startswith("ln")}

FAMILY = replace(
    LLAMA,
    roles={
        **{role: cut for role, cut in LLAMA.roles.items() if role not in _NORMS},
        "W_router": linear("mlp.gate.weight"),
        **SHARED,
        "W_shared": linear("mlp.shared_expert_gate.weight"),
        **_NORMS,
    },
    experts=STACKED,
    places=places(
        attention="self_attn",
        query="self_attn.q_proj",
        out="self_attn.o_proj",
        ff_in="mlp",
        ff_out="mlp",
    ),
    facts=_facts,
    float32=(*LLAMA.float32, "the router"),
)
