"""Tiny mixtures of experts and a tiny T5, in float64, and data with positions that do not count."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from adapters_cases import shaken

V, T = 7, 4
_SIZES = {
    "hidden_size": 4,
    "intermediate_size": 3,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "vocab_size": V,
    "max_position_embeddings": 16,
    "num_experts_per_tok": 2,
}
_QWEN = {"num_experts": 3, "moe_intermediate_size": 2}
MIXTURES = {
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 3},
    "qwen3_moe": {**_QWEN, "num_hidden_layers": 2, "mlp_only_layers": [1], "norm_topk_prob": True},
}
_T5 = {
    "d_model": 4,
    "d_kv": 2,
    "d_ff": 2,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "vocab_size": V,
    "relative_attention_num_buckets": 4,
    "relative_attention_max_distance": 8,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}


def mixture(name: str, **changes: Any) -> Any:
    """A fresh module as its library makes it: fused attention, grouped experts."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    config = transformers.CONFIG_MAPPING[name](**{**_SIZES, **MIXTURES[name], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = transformers.AutoModelForCausalLM.from_config(config)
    return shaken(module.double()).eval()


def t5(kind: str = "gated-gelu", **changes: Any) -> Any:
    """A fresh T5 with a head: one layer in the encoder, two in the decoder."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    config = transformers.T5Config(**{**_T5, "feed_forward_proj": kind, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = transformers.T5ForConditionalGeneration(config)
    return shaken(module.double()).eval()


@cache
def tokens() -> tuple[Tensor, Tensor]:
    """Ids and targets (3, T)."""
    source = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, V, (3, T), generator=source) for _ in range(2))
    y[0, 2:] = -100
    return x, y


@cache
def pairs() -> dict[str, Tensor]:
    """Ids (3, 5) with padding behind, and labels (3, T)."""
    source = torch.Generator().manual_seed(2)
    ids, labels = (torch.randint(1, V, (3, n), generator=source) for n in (5, T))
    mask = torch.ones_like(ids)
    mask[1, 3:], labels[0, 3:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
