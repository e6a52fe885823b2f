"""nanoGPT: its checkpoints, rebuilt as zoo models, and its live modules.

Live modules of nanoGPT, and of minGPT, which has the same names: roles as in GPT-2, logits everywhere.

Their forward(idx, targets) returns (logits, loss); without targets, nanoGPT returns only the logits of the
last position. They are called with the ids as targets, so that logits of all positions are returned; their
loss is ignored.
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
from curvescope.models.adapters.build import HeadCounts, build_blocks
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
NOTE = "called with targets, so that logits of every position are returned, not only of the last one"


def is_nanogpt(module: nn.Module) -> bool:
    """Return True if a module has nanoGPT's parts and its forward(idx, targets)."""
    names = {name.replace("_orig_mod.", "") for name, _ in module.named_modules()}
    if not set(PARTS) <= names:
        return False
    return list(inspect.signature(_uncompiled(module).forward).parameters)[:2] == ["idx", "targets"]


def adapt_nanogpt(module: nn.Module) -> Model:
    """Return the model of a live module."""
    check_parameters(module)
    inner: Any = _uncompiled(module)
    body = inner.transformer
    attention, table = body.h[0].attn, body.wte
    heads = HeadCounts(attention.n_head, attention.n_head, table.embedding_dim // attention.n_head)
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
        "tied": inner.lm_head.weight is table.weight,
    }
    notes = (NOTE, *mode_notes(module))
    places = places_of(module, FAMILY, len(body.h))
    name = type(inner).__name__
    return Model(module, name, blocks, singles, facts, notes, places=places, call=call_with_targets)


def call_with_targets(module: nn.Module, inputs: Any, options: Mapping[str, Any]) -> Any:
    """Return (logits, loss); the logits are the model's output."""
    return _uncompiled(module)(inputs, inputs.contiguous(), **options)


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile wraps: compiled code has no second derivative."""
    return getattr(module, "_orig_mod", module)


_ARGS = {"n_layers": "n_layer", "n_heads": "n_head", "d_model": "n_embd", "n_ctx": "block_size"}


def read_nanogpt(path: Path) -> Model:
    """Load a nanoGPT checkpoint with `model` (parameters) and `model_args`."""
    checkpoint = read_checkpoint(path)
    if not isinstance(checkpoint, Mapping) or not {"model", "model_args"} <= set(checkpoint):
        content = (
            sorted(map(str, checkpoint))[:4] if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
        )
        raise UsageError(
            f"expected a nanoGPT checkpoint with 'model' and 'model_args' in {path}, got {content}",
            hint="build the module yourself and pass it: cs.load(module)",
        )
    weights = {name.removeprefix("_orig_mod."): w for name, w in checkpoint["model"].items()}
    args = checkpoint["model_args"]
    try:
        cfg = _config(args, weights)
        module = Transformer(cfg)
        parameters = {name: w.float() for name, w in _roles(weights, cfg)}
    except KeyError as error:
        raise CurvescopeError(f"expected a nanoGPT checkpoint, but {path} has no {error.args[0]!r}") from None
    module.load_state_dict(_check_shapes(parameters, module, path))
    return zoo.zoo_model(module, name=path.parent.name if path.stem == "ckpt" else path.stem)


def read_checkpoint(path: Path) -> Any:
    """Read a file of `torch.save` that only has tensors and plain containers; no code in it is run."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CurvescopeError(
            f"expected a checkpoint of tensors only, but {path} has other Python objects, which are never "
            f"loaded",
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
    """Convert nanoGPT's parameters: linear layers are transposed, and Q, K, V are rows of one matrix."""
    parameters = [("E", weights["transformer.wte.weight"]), ("P", weights["transformer.wpe.weight"])]
    d = cfg.d_model
    for i in range(cfg.n_layers):
        at = f"transformer.h.{i}."
        packed = weights[f"{at}attn.c_attn.weight"]
        parameters += [(f"L{i}.W_{x}", packed[j * d : (j + 1) * d].T) for j, x in enumerate("QKV")]
        pairs = {"W_O": "attn.c_proj", "W_1": "mlp.c_fc", "W_2": "mlp.c_proj"}
        parameters += [(f"L{i}.{role}", weights[f"{at}{name}.weight"].T) for role, name in pairs.items()]
        parameters += [(f"L{i}.ln{n}.g", weights[f"{at}ln_{n}.weight"]) for n in (1, 2)]
        if cfg.bias_qkv:
            bias = weights[f"{at}attn.c_attn.bias"]
            parameters += [(f"L{i}.b_{x}", bias[j * d : (j + 1) * d]) for j, x in enumerate("QKV")]
            parameters += [(f"L{i}.b{role[1:]}", weights[f"{at}{name}.bias"]) for role, name in pairs.items()]
        if cfg.bias_norm:
            parameters += [(f"L{i}.ln{n}.b", weights[f"{at}ln_{n}.bias"]) for n in (1, 2)]
    parameters.append(("ln_f.g", weights["transformer.ln_f.weight"]))
    parameters += [("ln_f.b", weights["transformer.ln_f.bias"])] if cfg.bias_norm else []
    return parameters if cfg.tied else [*parameters, ("U", weights["lm_head.weight"].T)]


def _check_shapes(weights: dict[str, Tensor], module: Transformer, path: Path) -> dict[str, Tensor]:
    expected = dict(module.named_parameters())
    mismatched = sorted(set(expected) ^ set(weights)) or [
        k for k in expected if expected[k].shape != weights[k].shape
    ]
    if mismatched:
        raise CurvescopeError(f"the weights in {path} do not fit its model_args: {mismatched[0]!r} differs")
    return weights
