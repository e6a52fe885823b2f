"""What a zoo Transformer refuses: impossible configurations and inputs that do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from curvescope.models.zoo.transformer import TransformerConfig


def check_config(cfg: TransformerConfig) -> None:
    """Raise for sizes that are not positive and for settings that contradict each other."""
    sizes = ("d_model", "n_heads", "n_ctx", "vocab_size", "d_head", "d_in", "n_out")
    for name in (*sizes, "image_size", "patch_size", "channels"):
        if getattr(cfg, name) is not None and getattr(cfg, name) < 1:
            raise UsageError(f"{name}: expected a positive number, got {getattr(cfg, name)}")
    for name in ("init_std", "embed_std", "norm_eps"):
        if getattr(cfg, name) is not None and not getattr(cfg, name) >= 0:
            raise UsageError(f"{name}: expected a number of at least 0, got {getattr(cfg, name)}")
    if cfg.n_layers < 0 or cfg.ff_size < 0:
        raise UsageError(f"expected n_layers and d_ff of at least 0, got {cfg.n_layers} and {cfg.d_ff}")
    rules = [
        (
            cfg.d_head is None and cfg.d_model % cfg.n_heads,
            f"d_model={cfg.d_model} is no multiple of n_heads",
        ),
        (
            cfg.kv_heads < 1 or cfg.n_heads % cfg.kv_heads,
            f"n_heads={cfg.n_heads} is no multiple of n_kv_heads",
        ),
        (cfg.positions == "rope" and cfg.head_size % 2, f"rope needs an even head size, got {cfg.head_size}"),
        (cfg.positions == "rope" and cfg.merged_qk, "rope rotates queries and keys; merged_qk has neither"),
        (cfg.merged_qk and cfg.kv_heads != cfg.n_heads, "merged_qk has no keys to share between heads"),
        (cfg.tied and (cfg.inputs != "tokens" or cfg.outputs != "tokens"), "tied needs tokens in and out"),
        (cfg.outputs == "class" and cfg.n_out is None, "outputs='class' needs n_out, the number of classes"),
        (
            cfg.inputs == "patches" and cfg.image_size % cfg.patch_size,
            "image_size is no multiple of patch_size",
        ),
        (
            cfg.inputs == "patches" and (cfg.image_size // cfg.patch_size) ** 2 > cfg.n_ctx,
            f"an image has {(cfg.image_size // cfg.patch_size) ** 2} patches, n_ctx is {cfg.n_ctx}",
        ),
    ]
    for broken, message in rules:
        if broken:
            raise UsageError(message)


def check_inputs(inputs: Tensor, cfg: TransformerConfig) -> None:
    """Raise unless the inputs have the kind, shape and range that the configuration asks for."""
    if torch.compiler.is_compiling():
        return
    tokens, own = (
        cfg.inputs == "tokens",
        {
            "tokens": (),
            "continuous": (cfg.d_in or cfg.d_model,),
            "patches": (cfg.channels, cfg.image_size, cfg.image_size),
        }[cfg.inputs],
    )
    free = ("B",) if cfg.inputs == "patches" else ("B", "T")
    fits = inputs.dim() == len(free + own) and inputs.shape[len(free) :] == own
    if not fits or inputs.is_floating_point() == tokens:
        kind = {"tokens": "integer tokens", "continuous": "real inputs", "patches": "images"}[cfg.inputs]
        axes = ", ".join(map(str, free + own))
        raise ShapeError(f"expected {kind} ({axes}), got {inputs.dtype} {tuple(inputs.shape)}")
    if _inside_vmap(inputs):  # where numbers cannot be looked at
        return
    if tokens and inputs.numel() and not 0 <= int(inputs.min()) <= int(inputs.max()) < cfg.vocab_size:
        raise UsageError(f"expected tokens from 0 to {cfg.vocab_size - 1}, got up to {int(inputs.max())}")


def _inside_vmap(inputs: Tensor) -> bool:
    """Whether a level of vmap holds these inputs, be it below one of grad."""
    levels = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while levels.is_gradtrackingtensor(inputs):
        inputs = levels.get_unwrapped(inputs)
    return levels.is_batchedtensor(inputs)
