"""Small models of every kind whose paths are followed, with their inputs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import curvescope as cs
from curvescope.data.batches import IGNORED, Batches

V, T = 11, 6
SMALL: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 8,
    "n_heads": 2,
    "vocab_size": V,
    "n_ctx": 8,
    "init": "scaled",
}
ZOO: dict[str, dict[str, Any]] = {
    "pre": {"bias_u": True},
    "tied": {"tied": True},
    "rmsnorm": {"norm_kind": "rmsnorm", "positions": "rope"},
    "no weights in norms": {"norm_affine": False},
    "post": {"norm": "post"},
    "no norm": {"norm": "none"},
    "attention only": {"d_ff": 0},
    "odd width": {"d_model": 9, "n_heads": 3},
    "scaled skip": {"residual_scale": 0.5},
    "no skip, no norm": {"norm": "none", "residual": False},
}
HF: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8},
    "llama": {"hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gemma2": {
        "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4,
    },
    "gpt_neox": {"hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2},
    "bert": {"hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2},
}  # fmt: skip
NAMES = [*ZOO, *HF]


@cache
def model_of(name: str) -> cs.Model:
    if name in HF:
        return cs.load(hf_module(name))
    model = cs.load(cs.TransformerConfig(**{**SMALL, **ZOO[name]}), dtype="float64")
    return _shaken(model)


def hf_module(name: str) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    config = transformers.CONFIG_MAPPING[name](**HF[name], vocab_size=V, pad_token_id=0)
    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _shake(kind.from_config(config, attn_implementation="eager").double().eval())


def _shaken(model: cs.Model) -> cs.Model:
    _shake(model.module)
    return model


def _shake(module: Any) -> Any:
    """Gains and biases away from 1 and 0, matrices of some size."""
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=source, dtype=torch.float64)
            p.copy_(0.4 * noise if p.dim() > 1 else p + 0.3 * noise)
    return module


def inputs(count: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, V, (count, T), generator=torch.Generator().manual_seed(seed))


def data(count: int = 5, batch_size: int = 5, seed: int = 0) -> Batches:
    x = inputs(count, seed)
    y = inputs(count, seed + 1)
    y[0, 4:], y[-1, 0] = IGNORED, IGNORED
    return Batches.from_tensors(x, y, batch_size=batch_size)
