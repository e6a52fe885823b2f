"""nanoGPT's `ckpt.pt`: read without running any code, rebuilt as a zoo Transformer."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.models.model import Model
from curvescope.models.zoo import folder as zoo
from curvescope.models.zoo.transformer import Transformer, TransformerConfig

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
