"""Live modules of nanoGPT, and of minGPT, which has the same names: roles as in GPT-2, logits everywhere.

Their forward(idx, targets) returns (logits, loss); nanoGPT without targets gives the logits of the last
position alone. They are called with targets, the ids themselves, so that logits are those of all positions;
the loss that comes with them is left.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from curvescope.models.adapters.build import Heads, build_blocks
from curvescope.models.adapters.gpt2 import FAMILY as GPT2
from curvescope.models.adapters.table import Family, affine, linear, norm, packed, packed_vector
from curvescope.models.hf.module import places_of
from curvescope.models.model import Model
from curvescope.models.plain import check_parameters, mode_notes

PARTS = ("transformer.wte", "transformer.wpe", "transformer.h.0.attn.c_attn", "transformer.ln_f", "lm_head")
FAMILY = Family(
    base="transformer",
    layer="h.{i}.",
    stem=GPT2.stem,
    roles={
        **{f"W_{x}": packed("attn.c_attn.weight", i) for i, x in enumerate("QKV")},
        **{f"b_{x}": packed_vector("attn.c_attn.bias", i) for i, x in enumerate("QKV")},
        **affine("O", "attn.c_proj"),
        **affine("1", "mlp.c_fc"),
        **affine("2", "mlp.c_proj"),
        **norm("ln1", "ln_1"),
        **norm("ln2", "ln_2"),
    },
    end=norm("ln_f", "ln_f"),
    head={"U": linear("lm_head.weight")},
    places={name: place for name, place in GPT2.places.items() if name != "attn.pattern"},
)
NOTE = "called with targets, so that logits are those of every position, not of the last one alone"


def is_nanogpt(module: nn.Module) -> bool:
    """Whether a module has nanoGPT's parts and its forward(idx, targets)."""
    names = {name.replace("_orig_mod.", "") for name, _ in module.named_modules()}
    if not set(PARTS) <= names:
        return False
    return list(inspect.signature(_inside(module).forward).parameters)[:2] == ["idx", "targets"]


def adapt_nanogpt(module: nn.Module) -> Model:
    """The model of a live module."""
    check_parameters(module)
    own: Any = _inside(module)
    body = own.transformer
    attention, table = body.h[0].attn, body.wte
    heads = Heads(attention.n_head, attention.n_head, table.embedding_dim // attention.n_head)
    blocks, singles = build_blocks(module, FAMILY, len(body.h), heads)
    facts = {
        "kind": "nanogpt",
        "n_layers": len(body.h),
        "d_model": table.embedding_dim,
        "n_heads": heads.query,
        "n_kv_heads": heads.key,
        "d_head": heads.size,
        "d_ff": body.h[0].mlp.c_fc.out_features,
        "attention": "softmax",
        "causal": True,
        "norm": "pre",
        "norm_kind": "layernorm",
        "positions": "learned",
        "n_ctx": body.wpe.num_embeddings,
        "vocab_size": table.num_embeddings,
        "tied": own.lm_head.weight is table.weight,
    }
    notes = (NOTE, *mode_notes(module))
    places = places_of(module, FAMILY, len(body.h))
    name = type(own).__name__
    return Model(module, name, blocks, singles, facts, notes, places=places, call=call_with_targets)


def call_with_targets(module: nn.Module, inputs: Any, options: Mapping[str, Any]) -> Any:
    """(logits, loss), of which the first are read."""
    return _inside(module)(inputs, inputs.contiguous(), **options)


def _inside(module: nn.Module) -> nn.Module:
    """The module itself where torch.compile, whose code has no second derivative, is around it."""
    return getattr(module, "_orig_mod", module)
