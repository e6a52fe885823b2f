"""What our kernels may stand in for: methods of submodules, with faster second derivatives.

A family declares its stand-ins, each by the end of a class's name; which of them fit a module is found by
`models.fused`, which tries each on numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvescope.kernels import activations, norms
from curvescope.kernels.activations import Name, gated
from curvescope.kernels.attention import attention
from curvescope.models.running import packed
from curvescope.models.zoo.transformer import Record, nowhere

GATES: tuple[Name, ...] = ("silu", "gelu_tanh", "gelu")
Ours = Callable[..., Tensor]
"""What is called in place of the method; it takes the keyword `second_order` too."""


@dataclass(frozen=True)
class Standin:
    """For a method of the classes whose names end so; the first of the candidates that agrees is taken.

    `certain` ones are made for a class of this package, and are not tried; others are tried on rows, or on
    `sequences` of them.
    """

    ending: str
    candidates: Callable[[Any], list[Ours]]
    method: str = "forward"
    certain: bool = False
    sequences: bool = False


def _rms_norms(part: Any) -> list[Ours]:
    eps = "variance_epsilon" if hasattr(part, "variance_epsilon") else "eps"
    if isinstance(part, nn.RMSNorm) or not hasattr(part, eps) or not hasattr(part, "weight"):
        return []
    return [partial(_rms_norm, part, eps, offset=offset) for offset in (0.0, 1.0)]


def _rms_norm(norm: Any, eps: str, x: Tensor, *, offset: float, second_order: bool = True) -> Tensor:
    return norms.rms_norm(x, norm.weight, getattr(norm, eps), offset=offset, second_order=second_order)


def _gates(part: Any) -> list[Ours]:
    if not all(hasattr(part, child) for child in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return []
    return [partial(_gated, part, activation=kind) for kind in GATES if _is_activation(part.act_fn, kind)]


def _gated(mlp: Any, x: Tensor, *, activation: Name, second_order: bool = True) -> Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    return mlp.down_proj(gated(gate, up, activation, second_order=second_order))


def _is_activation(act_fn: Any, kind: Name) -> bool:
    """Whether an activation is that one; in double precision, where all of them differ."""
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    try:
        error = (act_fn(x) - activations.activate(x, kind)).abs().max()
    except Exception:  # it is something else
        return False
    return float(error) < 1e-6


def _gelus(part: Any) -> list[Ours]:
    return [partial(activations.gelu, approximate="tanh")]


def _zoo_norms(part: Any) -> list[Ours]:
    return [partial(_zoo_norm, part)]


def _zoo_norm(norm: Any, x: Tensor, *, second_order: bool = True) -> Tensor:
    if norm.center:
        return norms.layer_norm(x, norm.g, norm.b, norm.eps, second_order=second_order)
    return norms.rms_norm(x, norm.g, norm.eps, second_order=second_order)


def _zoo_attentions(layer: Any) -> list[Ours]:
    """Softmax attention whose scores are products of queries and keys, and nothing more."""
    cfg, original = layer.cfg, layer.attend
    if cfg.attention != "softmax" or cfg.merged_qk or cfg.score_bias != "none":
        return []

    def attend(x: Tensor, record: Record, *, second_order: bool = True) -> Tensor:
        if record is not nowhere:  # somebody wants to see the pattern
            return original(x, record)
        Q, K = layer.queries_and_keys(x)
        F = attention(Q, K, layer.values(x), causal=cfg.causal, second_order=second_order)
        return layer.project(F.transpose(1, 2).flatten(2))

    return [attend]


GENERIC = (
    Standin("RMSNorm", _rms_norms),
    Standin("", _gates),
    Standin("NewGELUActivation", _gelus),
    Standin("", packed.candidates, sequences=True),
)
"""For modules of any family: norms, gated layers and packed attention as most of them are written."""
ZOO = (Standin("Norm", _zoo_norms), Standin("Layer", _zoo_attentions, "attend", certain=True))
"""For the zoo's own Transformer."""
