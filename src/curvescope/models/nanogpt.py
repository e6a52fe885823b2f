"""nanoGPT: its checkpoints, rebuilt as zoo models, and its live modules.

Live modules of nanoGPT, and of minGPT, which has the same names: roles as in GPT-2, logits everywhere.

Their forward(idx, targets) returns (logits, loss); nanoGPT without targets gives the logits of the last
position alone. They are called with targets, the ids themselves, so that logits are those of all positions;
the loss that comes with them is left.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.models.adapters.build import Heads, build_blocks
from curvescope.models.adapters.families import GPT2
from curvescope.models.adapters.table import Family, affine, linear, norm, packed, packed_vector
from curvescope.models.hf.module import places_of
from curvescope.models.model import Model
from curvescope.models.plain import check_parameters, mode_notes
from curvescope.models.zoo import folder as zoo
from curvescope.models.zoo.transformer import Transformer, TransformerConfig

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


_ARGS = {"n_layers": "n_layer", "n_heads": "n_head", "d_model": "n_embd", "n_ctx": "block_size"}


def read_nanogpt(path: Path) -> Model:
    """The model of a checkpoint that holds `model` (parameters) and `model_args`, as nanoGPT writes it."""
    checkpoint = read_checkpoint(path)
    if not isinstance(checkpoint, Mapping) or not {"model", "model_args"} <= set(checkpoint):
        found = (
            sorted(map(str, checkpoint))[:4] if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
        )
        raise UsageError(
            f"expected a nanoGPT checkpoint with 'model' and 'model_args' in {path}, got {found}",
            hint="build the module yourself and pass it: cs.load(module)",
        )
    weights = {name.removeprefix("_orig_mod."): w for name, w in checkpoint["model"].items()}
    args = checkpoint["model_args"]
    try:
        cfg = _config(args, weights)
        module = Transformer(cfg)
        found = {name: w.float() for name, w in _roles(weights, cfg)}
    except KeyError as error:
        raise CurvescopeError(f"expected a nanoGPT checkpoint, {path} has no {error.args[0]!r}") from None
    module.load_state_dict(_fitting(found, module, path))
    return zoo.zoo_model(module, name=path.parent.name if path.stem == "ckpt" else path.stem)


def read_checkpoint(path: Path) -> Any:
    """What `torch.save` wrote, tensors and plain containers only: nothing in the file is executed."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CurvescopeError(
            f"expected a checkpoint of tensors only, {path} holds other Python objects, which are never run",
            hint="save its state_dict, or convert it to safetensors",
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CurvescopeError(f"expected a checkpoint of torch.save, could not read {path}") from error


def _config(args: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerConfig:
    bias = "transformer.h.0.attn.c_attn.bias" in weights
    tied = torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
    sizes: dict[str, Any] = {ours: int(args[theirs]) for ours, theirs in _ARGS.items()}
    return TransformerConfig(
        **sizes,
        vocab_size=weights["transformer.wte.weight"].shape[0],
        activation="gelu",
        bias_qkv=bias,
        bias_o=bias,
        bias_ff=bias,
        bias_norm="transformer.ln_f.bias" in weights,
        tied=tied,
    )


def _roles(weights: Mapping[str, Tensor], cfg: TransformerConfig) -> list[tuple[str, Tensor]]:
    """The zoo's parameters from nanoGPT's: linear layers are transposed, Q, K, V are rows of one matrix."""
    found = [("E", weights["transformer.wte.weight"]), ("P", weights["transformer.wpe.weight"])]
    d = cfg.d_model
    for i in range(cfg.n_layers):
        at = f"transformer.h.{i}."
        packed = weights[f"{at}attn.c_attn.weight"]
        found += [(f"L{i}.W_{x}", packed[j * d : (j + 1) * d].T) for j, x in enumerate("QKV")]
        pairs = {"W_O": "attn.c_proj", "W_1": "mlp.c_fc", "W_2": "mlp.c_proj"}
        found += [(f"L{i}.{role}", weights[f"{at}{name}.weight"].T) for role, name in pairs.items()]
        found += [(f"L{i}.ln{n}.g", weights[f"{at}ln_{n}.weight"]) for n in (1, 2)]
        if cfg.bias_qkv:
            bias = weights[f"{at}attn.c_attn.bias"]
            found += [(f"L{i}.b_{x}", bias[j * d : (j + 1) * d]) for j, x in enumerate("QKV")]
            found += [(f"L{i}.b{role[1:]}", weights[f"{at}{name}.bias"]) for role, name in pairs.items()]
        if cfg.bias_norm:
            found += [(f"L{i}.ln{n}.b", weights[f"{at}ln_{n}.bias"]) for n in (1, 2)]
    found.append(("ln_f.g", weights["transformer.ln_f.weight"]))
    found += [("ln_f.b", weights["transformer.ln_f.bias"])] if cfg.bias_norm else []
    return found if cfg.tied else [*found, ("U", weights["lm_head.weight"].T)]


def _fitting(found: dict[str, Tensor], module: Transformer, path: Path) -> dict[str, Tensor]:
    own = dict(module.named_parameters())
    odd = sorted(set(own) ^ set(found)) or [k for k in own if own[k].shape != found[k].shape]
    if odd:
        raise CurvescopeError(f"the weights in {path} do not fit its model_args: {odd[0]!r} differs")
    return found
