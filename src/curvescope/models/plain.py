"""Models of any module: blocks by role if its layers are recognized, else its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from curvescope.core.blocks import Block
from curvescope.core.errors import UsageError
from curvescope.models.adapters.build import cut_block, rest
from curvescope.models.adapters.layers import DetectedLayer, find_layers, find_stem, own_stem
from curvescope.models.model import Model
from curvescope.models.running.weights.widening import is_half

MANY_LINEAR = 3  # linear layers that make a repeated layer likely to contain attention
_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def plain_model(module: nn.Module, name: str | None = None) -> Model:
    """Return a model whose blocks have roles if layers are found; other parameters keep their names.

    A parameter of an `nn.Linear` is stored outputs × inputs, so its block is the transpose.
    """
    check_parameters(module)
    layers = find_layers(module)
    blocks, heads = structural_blocks(module, layers)
    notes = (*mode_notes(module), *(_layer_notes(layers) if layers else _no_layer_notes(module)))
    return Model(module, name or type(module).__name__, blocks, heads, _facts(layers, blocks), notes)


def structural_blocks(
    module: nn.Module, layers: list[DetectedLayer]
) -> tuple[dict[str, Block], dict[str, Block]]:
    """Return the blocks of a module with these layers, which cover it once, and blocks of single heads."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    blocks: dict[str, Block] = {}
    singles: dict[str, Block] = {}
    inside = [pair for i, layer in enumerate(layers) for pair in layer.blocks(i, shapes)]
    for block, single in inside:
        (singles if single else blocks)[block.name] = block
    taken = {block.parameter for block in blocks.values()}
    stem = [*find_stem(module), *own_stem(module, layers)] if layers else []
    for role, cut in stem:
        if cut.parameter in shapes and cut.parameter not in taken and role not in blocks:
            blocks[role] = cut_block(role, role, cut, cut.parameter, shapes[cut.parameter], None)
    blocks |= rest(module, {block.parameter for block in blocks.values()})
    order = {name: i for i, name in enumerate(shapes)}
    return dict(sorted(blocks.items(), key=lambda item: order[item[1].parameter])), singles


def _facts(layers: list[DetectedLayer], blocks: Mapping[str, Block]) -> dict[str, Any]:
    """Return the sizes that all layers share."""
    if not layers:
        return {}
    heads = {part.heads for layer in layers for part in layer.parts if part.heads and part.certain}
    widths = {block.shape[0] for name, block in blocks.items() if name.endswith(".W_Q")}
    inner = {block.shape[1] for name, block in blocks.items() if name.endswith(".W_1")}
    facts: dict[str, Any] = {"kind": "layers", "n_layers": len(layers)}
    facts |= {"d_model": widths.pop()} if len(widths) == 1 else {}
    if len(heads) == 1:
        (counts,) = heads
        facts |= {"n_heads": counts.query, "n_kv_heads": counts.key, "d_head": counts.size}
    facts |= {"d_ff": inner.pop()} if len(inner) == 1 else {}
    return facts if any(layer.by_names for layer in layers) else {**facts, "attention": "softmax"}


def _layer_notes(layers: list[DetectedLayer]) -> list[str]:
    """Return notes on where the layers were found, one entry per list of layers."""
    rows: dict[str, list[tuple[int, str]]] = {}
    for i, layer in enumerate(layers):
        rows.setdefault(layer.path.rpartition(".")[0], []).append((i, layer.path or "the module"))
    places = [
        f"L{row[0][0]} is {row[0][1]}" + (f", … L{row[-1][0]} is {row[-1][1]}" if len(row) > 1 else "")
        for row in rows.values()
    ]
    notes = [f"layers were recognized by their structure: {'; '.join(places)}"] if places else []
    if any(layer.by_names for layer in layers):
        parts = [part for layer in layers for part in layer.parts]
        roles = ", ".join(dict.fromkeys(part.front + part.role for part in parts if part.role[:2] == "W_"))
        heads = "" if any(p.heads and p.certain for p in parts) else "; the layout of heads is unknown"
        notes.append(
            f"roles were recognized by the names and shapes of linear layers: {roles}{heads}; "
            "cs.load(module, roles={…}) overrides them"
        )
    return notes


def _no_layer_notes(module: nn.Module) -> list[str]:
    """Return notes on how to name the roles of a module whose repeated layers have no known attention."""
    holders = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    sizes = [sum(isinstance(m, nn.Linear) for m in layer.modules()) for holder in holders for layer in holder]
    if max(sizes, default=0) < MANY_LINEAR:
        return []
    return [
        "no attention was found in the layers, so blocks have the names of parameters; cs.load(module, "
        "roles={…}) assigns roles"
    ]


def check_parameters(module: nn.Module) -> None:
    """Raise unless the module has real parameters of one dtype that torch differentiates twice."""
    _check_layers(module)
    parameters = dict(module.named_parameters())
    if not parameters:
        raise UsageError(f"expected a module with parameters, but {type(module).__name__} has none")
    for key, p in parameters.items():
        _check_values(key, p)
        if p.is_inference():
            raise UsageError(
                f"expected parameters that can be differentiated, but {key!r} was made in inference mode",
                hint="make or load the module outside torch.inference_mode()",
            )
    if len({p.dtype for p in parameters.values()}) > 1 and not is_half(module):
        raise UsageError(
            "expected parameters of one dtype, got several", hint="cs.load(module, dtype=torch.float32)"
        )
    devices = sorted({str(p.device) for p in parameters.values()})
    if len(devices) > 1:
        raise UsageError(
            f"expected parameters on one device, got {' and '.join(devices)}",
            hint="module.to(device), or cs.distributed.shard(module) over several ranks",
        )


def _check_values(key: str, p: Tensor) -> None:
    """Raise unless a parameter is a dense real tensor that holds values."""
    if p.is_meta or isinstance(p, FakeTensor) or isinstance(p.data, FakeTensor):
        kind = "on the meta device" if p.is_meta else "a fake tensor"
        raise UsageError(
            f"expected parameters with values, but {key!r} is {kind}",
            hint="module.to_empty(device='cpu') and load_state_dict, or make the module without "
            "init_empty_weights, torch.device('meta') or FakeTensorMode",
        )
    if p.layout != torch.strided:
        name = str(p.layout).removeprefix("torch.")
        raise UsageError(
            f"expected dense parameters, but {key!r} is {name}", hint="nn.Parameter(p.to_dense())"
        )
    if p.is_complex():
        raise UsageError(
            f"expected real parameters, {key!r} is {p.dtype}",
            hint="store torch.view_as_real(p) as the parameter, and use torch.view_as_complex on it",
        )
    if not p.is_floating_point():
        raise UsageError(
            f"expected real parameters, {key!r} is {p.dtype}", hint="quantized weights have no Hessian"
        )


def check_initialized(module: nn.Module) -> None:
    """Raise if a lazy layer has not been called yet: its parameters have no shape."""
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(p):
            raise UsageError(
                f"expected initialized parameters, got the uninitialized {name!r} of a lazy layer",
                hint="run one forward pass first: model(inputs)",
            )


def _check_layers(module: nn.Module) -> None:
    """Raise if a layer has no second derivative, or cannot be evaluated at other parameters."""
    for name, layer in module.named_modules():
        where = f"{name!r}" if name else "the module"
        if isinstance(layer, torch.jit.ScriptModule):
            raise UsageError(
                f"expected a Python module, but {where} is compiled by torch.jit with fixed parameters",
                hint="pass the module before it was scripted or traced",
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise UsageError(
                f"expected dense gradients, but {where} is an {type(layer).__name__} with sparse=True",
                hint="layer.sparse = False gives the same outputs",
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq:
            raise UsageError(
                f"expected unscaled gradients, but {where} scales them (scale_grad_by_freq=True)",
                hint="layer.scale_grad_by_freq = False gives the same outputs",
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise UsageError(
                f"expected parameters that a forward pass does not change, but {where} rescales rows of "
                f"its weight (max_norm={layer.max_norm:g})",
                hint="layer.max_norm = None, once its rows have that norm",
            )
        if _has_weight_norm(layer):
            raise UsageError(
                f"expected a symmetric Hessian, but {where} has weight_norm, whose second derivative in "
                f"PyTorch is not symmetric",
                hint="remove the norm, or write it out: g * v / v.norm(dim=1, keepdim=True)",
            )


def _has_weight_norm(layer: nn.Module) -> bool:
    """Return True if a weight is normalized over one axis; over all axes torch's derivatives are right."""
    hooks = layer._forward_pre_hooks.values()
    norms: list[Any] = [hook for hook in hooks if type(hook).__name__ == "WeightNorm"]
    norms += [layer] if type(layer).__name__ == "_WeightNorm" else []
    return any(norm.dim not in (None, -1) for norm in norms)


def _drop_rate(module: nn.Module) -> float:
    """Return the dropout probability of one of torch's modules in train mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0


def mode_notes(module: nn.Module) -> list[str]:
    """Return notes on what eval mode changes about a module in train mode, and what depends on the batch."""
    notes = []
    if any(m.training and _drop_rate(m) > 0 for m in module.modules()):
        notes.append("dropout is switched off: curvature is that of the module in eval mode")
    norms = [m for m in module.modules() if isinstance(m, _BATCH)]
    if any(m.training and m.running_mean is not None for m in norms):
        notes.append("batch norm uses its running statistics: curvature is that of the module in eval mode")
    if any(m.running_mean is None for m in norms):
        notes.append(
            "batch norm without running statistics uses those of each batch: the loss and its curvature "
            "depend on how the data are split into batches"
        )
    return notes
