"""Any module: its blocks are its parameters, until an adapter knows better."""

from __future__ import annotations

import torch
from torch import nn

from curvescope.core.errors import UsageError
from curvescope.models.adapters.build import rest
from curvescope.models.model import Model

_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def plain_model(module: nn.Module, name: str | None = None) -> Model:
    """A model whose blocks are the module's parameters under their own names.

    A parameter of an `nn.Linear` is stored outputs × inputs, so its block is the transpose.
    """
    check_parameters(module)
    return Model(module, name or type(module).__name__, rest(module, set()), notes=tuple(mode_notes(module)))


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
    if len({p.dtype for p in parameters.values()}) > 1:
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


def _drop_rate(module: nn.Module) -> float:
    """Probability with which a module of torch's own drops something in train mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0


def mode_notes(module: nn.Module) -> list[str]:
    """What eval mode changes about a module that is in train mode."""
    found = []
    if any(m.training and _drop_rate(m) > 0 for m in module.modules()):
        found.append("dropout is switched off: curvature is that of the module in eval mode")
    if any(m.training and isinstance(m, _BATCH) for m in module.modules()):
        found.append("batch norm uses its running statistics: curvature is that of the module in eval mode")
    return found
