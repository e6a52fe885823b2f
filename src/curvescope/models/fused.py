"""A model with our kernels inside: the same function, with faster second derivatives.

Each replacement is tried once on numbers of its own and taken only where it gives the same result, so a class
with a familiar name and another meaning stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from curvescope.core.seeds import generator
from curvescope.kernels import activations, norms
from curvescope.kernels.activations import Name
from curvescope.kernels.activations.gated import gated
from curvescope.kernels.attention import attention
from curvescope.kernels.attention.hf import NAME, differentiated, register_hf
from curvescope.kernels.backends import casting
from curvescope.models.hf_module import is_transformers, rounding, small_outputs
from curvescope.models.model import Model
from curvescope.models.transformer import Layer, Norm, Record, nowhere

LOG = logging.getLogger("curvescope")
GATES: tuple[Name, ...] = ("silu", "gelu_tanh", "gelu")


@dataclass(frozen=True)
class Replacement:
    """A method of a submodule and what stands in for it; `ours` takes the keyword second_order too."""

    module: nn.Module
    method: str
    ours: Callable[..., Tensor]


@contextmanager
def fused(model: Model, *, second_order: bool) -> Iterator[None]:
    """Our kernels inside the module's own code, unless autocast is on; as it was after.

    Args:
        second_order: False where only first derivatives, and J v through Jᵀu, will be asked for.
    """
    replacements, configs = ([], []) if casting() else _prepared(model.module)
    with ExitStack() as undo:
        undo.enter_context(differentiated(second_order=second_order))
        for r in replacements:
            undo.callback(_put_back, r.module, r.method, vars(r.module).get(r.method))
            setattr(r.module, r.method, partial(r.ours, second_order=second_order))
        for config in configs:
            undo.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            config._attn_implementation = NAME
        yield


def _put_back(module: nn.Module, method: str, own: Any) -> None:
    """The method as it was: the module's own attribute, or that of its class."""
    if own is None:
        delattr(module, method)
    else:
        setattr(module, method, own)


_known: WeakKeyDictionary[nn.Module, tuple[list[nn.Module], list[Replacement], list[Any]]]
_known = WeakKeyDictionary()


def _prepared(module: nn.Module) -> tuple[list[Replacement], list[Any]]:
    """What is replaced in a module, found once for the submodules that it has."""
    parts = list(module.modules())[1:]
    if module not in _known or _known[module][0] != parts:
        with torch.no_grad():
            found = [r for part in module.modules() for r in _replacements(part)]
            _known[module] = (parts, found, _configs(module))
    return _known[module][1:]


def _replacements(part: nn.Module) -> list[Replacement]:
    if isinstance(part, Layer):
        return _zoo_attention(part)
    candidates: list[Callable[..., Tensor]] = []
    name = type(part).__name__
    if isinstance(part, Norm):
        candidates = [partial(_zoo_norm, part)]
    elif name.endswith("RMSNorm") and not isinstance(part, nn.RMSNorm):
        candidates = [partial(_rms_norm, part, offset=offset) for offset in (0.0, 1.0)]
    elif name == "NewGELUActivation":
        candidates = [partial(activations.gelu, approximate="tanh")]
    elif all(hasattr(part, child) for child in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        candidates = [partial(_gated, part, activation=k) for k in GATES if _same_activation(part, k)]
    taken = next((ours for ours in candidates if _agrees(part, ours)), None)
    return [] if taken is None else [Replacement(part, "forward", taken)]


def _agrees(part: nn.Module, ours: Callable[..., Tensor]) -> bool:
    """Whether both give the same on a few random rows."""
    like = next(part.parameters(), None)
    width = _width(part)
    dtype, device = (torch.float64, "cpu") if like is None else (like.dtype, like.device)
    x = torch.randn(3, width, generator=generator(0), dtype=torch.float64).to(device, dtype)
    try:
        theirs, found = part(x), ours(x)
    except Exception:  # it has another form, or expects other inputs
        return False
    error = float((theirs - found).abs().max()) / max(float(theirs.abs().max()), 1e-30)
    return error <= rounding(theirs)


def _same_activation(part: Any, kind: Name) -> bool:
    """Whether the activation of a gated part is that one; in double precision, where all of them differ."""
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    try:
        error = (part.act_fn(x) - activations.activate(x, kind)).abs().max()
    except Exception:  # it is something else
        return False
    return float(error) < 1e-6


def _width(part: nn.Module) -> int:
    first = next(part.parameters(), None)
    return 8 if first is None else first.shape[-1]


# ----------------------------------------------------------------------------------------------- stand-ins


def _zoo_norm(norm: Norm, x: Tensor, *, second_order: bool = True) -> Tensor:
    if norm.centre:
        return norms.layer_norm(x, norm.g, norm.b, norm.eps, second_order=second_order)
    return norms.rms_norm(x, norm.g, norm.eps, second_order=second_order)


def _rms_norm(norm: Any, x: Tensor, *, offset: float, second_order: bool = True) -> Tensor:
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return norms.rms_norm(x, norm.weight, eps, offset=offset, second_order=second_order)


def _gated(mlp: Any, x: Tensor, *, activation: Name, second_order: bool = True) -> Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    return mlp.down_proj(gated(gate, up, activation, second_order=second_order))


def _zoo_attention(layer: Layer) -> list[Replacement]:
    """Softmax attention whose scores are products of queries and keys, and nothing more."""
    cfg = layer.cfg
    if cfg.attention != "softmax" or cfg.merged_qk or cfg.score_bias != "none":
        return []
    original = layer.attend

    def attend(x: Tensor, record: Record, *, second_order: bool = True) -> Tensor:
        if record is not nowhere:  # somebody wants to see the pattern
            return original(x, record)
        Q, K = layer.queries_and_keys(x)
        F = attention(Q, K, layer.values(x), causal=cfg.causal, second_order=second_order)
        return layer.project(F.transpose(1, 2).flatten(2))

    return [Replacement(layer, "attend", attend)]


def _configs(module: nn.Module) -> list[Any]:
    """The configurations through which a transformers module is told to use our attention."""
    if not is_transformers(module) or not getattr(module, "_supports_attention_backend", False):
        return []
    register_hf()
    parts: dict[int, Any] = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    configs = [c for c in parts.values() if getattr(c, "_attn_implementation", None) == "eager"]
    before = small_outputs(module)
    if before is None:
        return []
    for config in configs:
        config._attn_implementation = NAME
    try:
        after = small_outputs(module)
        error = torch.inf if after is None else float((before - after).abs().max())
    except Exception as error_:  # whatever a family does with a name it does not know
        LOG.debug("our attention does not fit %s: %s", type(module).__name__, error_)
        error = torch.inf
    finally:
        for config in configs:
            config._attn_implementation = "eager"
    scale = max(float(before.abs().max()), 1e-30)
    return configs if error <= rounding(before) * scale else []
