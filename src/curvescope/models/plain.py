"""Any module: blocks by role where its layers are known by their structure, else its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from curvescope.core.blocks import Block
from curvescope.core.errors import UsageError
from curvescope.models.adapters.build import cut_block, rest
from curvescope.models.adapters.layers import Layer, find_layers
from curvescope.models.adapters.stems import find_stem
from curvescope.models.model import Model
from curvescope.models.running.weights.widening import is_half

_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def plain_model(module: nn.Module, name: str | None = None) -> Model:
    """A model whose blocks have roles where layers are found; other parameters go by their own names.

    A parameter of an `nn.Linear` is stored outputs × inputs, so its block is the transpose.
    """
    check_parameters(module)
    layers = find_layers(module)
    blocks, heads = structural_blocks(module, layers)
    notes = (*mode_notes(module), *_layer_notes(layers))
    return Model(module, name or type(module).__name__, blocks, heads, _facts(layers, blocks), notes)


def structural_blocks(module: nn.Module, layers: list[Layer]) -> tuple[dict[str, Block], dict[str, Block]]:
    """Blocks of a module with these layers, and those of single heads; every parameter is covered once."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    blocks: dict[str, Block] = {}
    singles: dict[str, Block] = {}
    inside = [pair for i, layer in enumerate(layers) for pair in layer.blocks(i, shapes)]
    for block, single in inside:
        (singles if single else blocks)[block.name] = block
    taken = {block.parameter for block in blocks.values()}
    for role, cut in find_stem(module) if layers else ():
        if cut.parameter in shapes and cut.parameter not in taken and role not in blocks:
            blocks[role] = cut_block(role, role, cut, cut.parameter, shapes[cut.parameter], None)
    blocks |= rest(module, {block.parameter for block in blocks.values()})
    order = {name: i for i, name in enumerate(shapes)}
    return dict(sorted(blocks.items(), key=lambda item: order[item[1].parameter])), singles


def _facts(layers: list[Layer], blocks: Mapping[str, Block]) -> dict[str, Any]:
    """Sizes that all layers have in common."""
    if not layers:
        return {}
    heads = {part.heads for layer in layers for part in layer.parts if part.heads is not None}
    widths = {block.shape[0] for name, block in blocks.items() if name.endswith(".W_Q")}
    inner = {block.shape[1] for name, block in blocks.items() if name.endswith(".W_1")}
    facts: dict[str, Any] = {"kind": "layers", "n_layers": len(layers)}
    facts |= {"d_model": widths.pop()} if len(widths) == 1 else {}
    if len(heads) == 1:
        (own,) = heads
        facts |= {"n_heads": own.query, "n_kv_heads": own.key, "d_head": own.size}
    facts |= {"d_ff": inner.pop()} if len(inner) == 1 else {}
    return {**facts, "attention": "softmax"}


def _layer_notes(layers: list[Layer]) -> list[str]:
    """Where the layers are, one word for each row of them."""
    rows: dict[str, list[tuple[int, str]]] = {}
    for i, layer in enumerate(layers):
        rows.setdefault(layer.path.rpartition(".")[0], []).append((i, layer.path or "the module"))
    said = [
        f"L{row[0][0]} is {row[0][1]}" + (f", … L{row[-1][0]} is {row[-1][1]}" if len(row) > 1 else "")
        for row in rows.values()
    ]
    return [f"layers are found by their structure: {'; '.join(said)}"] if said else []


def check_parameters(module: nn.Module) -> None:
    """Raise unless the module has parameters, real ones, of one type, that torch differentiates twice."""
    _check_layers(module)
    parameters = dict(module.named_parameters())
    if not parameters:
        raise UsageError(f"expected a module with parameters, {type(module).__name__} has none")
    for key, p in parameters.items():
        if not p.is_floating_point():
            raise UsageError(
                f"expected real parameters, {key!r} is {p.dtype}", hint="quantised weights have no Hessian"
            )
        if p.is_inference():
            raise UsageError(
                f"expected parameters that can be differentiated, {key!r} was made in inference mode",
                hint="make or load the module outside torch.inference_mode()",
            )
    if len({p.dtype for p in parameters.values()}) > 1 and not is_half(module):
        raise UsageError(
            "expected parameters of one dtype, got several", hint="cs.load(module, dtype=torch.float32)"
        )


def _check_layers(module: nn.Module) -> None:
    """Raise where a layer has no second derivative, or none at other parameters."""
    for name, layer in module.named_modules():
        where = f"{name!r}" if name else "the module"
        if isinstance(layer, torch.jit.ScriptModule):
            raise UsageError(
                f"expected a module of Python, {where} is compiled by torch.jit for its own parameters",
                hint="pass the module that was scripted or traced",
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise UsageError(
                f"expected dense gradients, {where} is an {type(layer).__name__} with sparse=True",
                hint="layer.sparse = False gives the same outputs",
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq:
            raise UsageError(
                f"expected gradients of the loss, {where} scales its own (scale_grad_by_freq=True)",
                hint="layer.scale_grad_by_freq = False gives the same outputs",
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise UsageError(
                f"expected parameters that a forward pass leaves alone, {where} scales rows of its weight "
                f"down (max_norm={layer.max_norm:g})",
                hint="layer.max_norm = None, once its rows have that norm",
            )
        if _has_weight_norm(layer):
            raise UsageError(
                f"expected a Hessian that is symmetric, {where} has weight_norm, whose second derivative in "
                "PyTorch is not",
                hint="remove the norm, or write it out: g * v / v.norm(dim=1, keepdim=True)",
            )


def _has_weight_norm(layer: nn.Module) -> bool:
    """Whether a weight is torch's norm over one axis; over all of it the second derivative is right."""
    hooks = layer._forward_pre_hooks.values()
    norms: list[Any] = [hook for hook in hooks if type(hook).__name__ == "WeightNorm"]
    norms += [layer] if type(layer).__name__ == "_WeightNorm" else []
    return any(norm.dim not in (None, -1) for norm in norms)


def _drop_rate(module: nn.Module) -> float:
    """Probability with which a module of torch's own drops something in train mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0


def mode_notes(module: nn.Module) -> list[str]:
    """What eval mode changes about a module that is in train mode, and what it leaves to the batch."""
    found = []
    if any(m.training and _drop_rate(m) > 0 for m in module.modules()):
        found.append("dropout is switched off: curvature is that of the module in eval mode")
    norms = [m for m in module.modules() if isinstance(m, _BATCH)]
    if any(m.training and m.running_mean is not None for m in norms):
        found.append("batch norm uses its running statistics: curvature is that of the module in eval mode")
    if any(m.running_mean is None for m in norms):
        found.append(
            "batch norm without running statistics uses those of each batch: the loss and its curvature "
            "depend on how the data are cut into batches"
        )
    return found
