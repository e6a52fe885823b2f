"""TransformerLens's HookedTransformer as a model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from curvescope.models.adapters import hooked_transformer
from curvescope.models.adapters.build import Heads, build_blocks
from curvescope.models.hf.module import places_of
from curvescope.models.model import Model
from curvescope.models.plain import check_parameters
from curvescope.tokenizers import HFTokenizer

_NORMS = {"LN": "layernorm", "LNPre": "layernorm", "RMS": "rmsnorm", "RMSPre": "rmsnorm", None: "none"}
_POSITIONS = {"standard": "learned", "rotary": "rope"}


def is_hooked(module: Any) -> bool:
    """Whether a module is a HookedTransformer, without importing transformer_lens."""
    return any(c.__name__ == "HookedTransformer" for c in type(module).__mro__)


def adapt_hooked(module: Any, *, name: str | None = None) -> Model:
    """The model of a HookedTransformer; its attention is plain already."""
    check_parameters(module)
    cfg = module.cfg
    family = hooked_transformer.family(cfg)
    kv = cfg.n_key_value_heads or cfg.n_heads
    blocks, singles = build_blocks(module, family, cfg.n_layers, Heads(cfg.n_heads, kv, cfg.d_head))
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
    notes = ("norms are folded into the matrices behind them: they have no parameters",) if folded else ()
    if cfg.num_experts:
        notes += (f"a mixture of {cfg.num_experts} experts: curvature is that of the routing here",)
    label = name or cfg.model_name or type(module).__name__
    places = places_of(module, family, cfg.n_layers)
    return Model(module, label, blocks, singles, facts, notes, _tokenizer(module), places=places)


def move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A copy in another type or place; the configuration, which the forward pass reads, follows."""
    module = copy.deepcopy(module)
    nn.Module.to(module, device=device, dtype=dtype)  # HookedTransformer.to takes one of them and prints
    cfg: Any = module.cfg
    cfg.dtype, cfg.device = dtype, str(device)
    return module


def _tokenizer(module: Any) -> Any:
    return None if module.tokenizer is None else HFTokenizer(module.tokenizer)
