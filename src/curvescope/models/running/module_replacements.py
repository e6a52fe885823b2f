"""Methods of submodules that our kernels can replace, with faster second derivatives.

A family declares its replacements, each by the ending of a class name. `models.running.fused` tests on random
numbers which of them fit a module. One of them is self-attention with one linear map for queries, keys and
values, as in vision libraries:

    [Q K V] = x W_QKV + b,   y = softmax(scale · QKᵀ) V,   output = y W_O + b_O

A module matches if it has the parts `qkv` and `proj` (both `nn.Linear`) and `num_heads`, and gives the same
outputs as this formula. The order of the rows of `qkv` is found in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvescope.kernels import activations, norms
from curvescope.kernels.activations import Name, gated
from curvescope.kernels.attention import attention
from curvescope.models.running.equivalence_check import agrees
from curvescope.models.zoo.transformer import Record, no_record

Layout = Literal["stacked", "interleaved"]
# rows of all heads of Q, then K, then V; or head 0's Q, K, V, then head 1's, …
LAYOUTS: tuple[Layout, ...] = ("stacked", "interleaved")


def has_parts(part: Any) -> bool:
    """Return True if a module has the parts of the formula, in sizes that fit."""
    qkv, out, h = (getattr(part, name, None) for name in ("qkv", "proj", "num_heads"))
    if not (isinstance(qkv, nn.Linear) and isinstance(out, nn.Linear) and isinstance(h, int)):
        return False
    return h > 0 and qkv.out_features == 3 * out.in_features and out.in_features % h == 0


def packed_attention(
    part: Any, x: Tensor, *, layout: Layout, causal: bool = False, second_order: bool = True
) -> Tensor:
    """Evaluate the formula at a module's parameters, with its norms: (B, T, d) to (B, T, d)."""
    h = part.num_heads
    heads = part.qkv(x).unflatten(-1, (3, h, -1) if layout == "stacked" else (h, 3, -1))
    axis = 2 if layout == "stacked" else 3
    q, k, v = (t.transpose(1, 2) for t in heads.unbind(axis))  # (B, h, T, k)
    q, k = (norm(t) if isinstance(norm, nn.Module) else t for norm, t in _with_norms(part, q, k))
    y = attention(q, k, v, causal=causal, scale=getattr(part, "scale", None), second_order=second_order)
    y = y.transpose(1, 2).flatten(2)
    norm = getattr(part, "norm", None)
    return part.proj(norm(y) if isinstance(norm, nn.Module) else y)


def _with_norms(part: Any, q: Tensor, k: Tensor) -> list[tuple[Any, Tensor]]:
    return [(getattr(part, "q_norm", None), q), (getattr(part, "k_norm", None), k)]


def layout_of(part: nn.Module) -> Layout | None:
    """Return the layout of the rows of `qkv`; None if the module computes something else."""
    for layout in LAYOUTS if has_parts(part) else ():
        for causal in (False, True):
            if agrees(part, partial(packed_attention, part, layout=layout, causal=causal), sequences=True):
                return layout
    return None


def candidates(part: Any) -> list[Any]:
    """Return the replacements to try. With more arguments than x they call the module itself."""
    if not has_parts(part):
        return []
    original = part.forward

    def replacement_forward(layout: Layout, causal: bool) -> Any:
        def forward(x: Tensor, *more: Any, second_order: bool = True, **options: Any) -> Tensor:
            if any(value is not None for value in (*more, *options.values())):
                return original(x, *more, **options)
            return packed_attention(part, x, layout=layout, causal=causal, second_order=second_order)

        return forward

    return [replacement_forward(layout, causal) for layout in LAYOUTS for causal in (False, True)]


GATES: tuple[Name, ...] = ("silu", "gelu_tanh", "gelu")
ReplacementFunction = Callable[..., Tensor]
"""Function that is called instead of the method; it also takes the keyword `second_order`."""


@dataclass(frozen=True)
class MethodReplacement:
    """Replacement of a method in classes whose names have this ending: the first candidate that agrees.

    Candidates that are `certain` belong to a class of this package and are not tested. Others are tested on
    rows, or on `sequences` of rows.
    """

    ending: str
    candidates: Callable[[Any], list[ReplacementFunction]]
    method: str = "forward"
    certain: bool = False
    sequences: bool = False


def _rms_norms(part: Any) -> list[ReplacementFunction]:
    eps = "variance_epsilon" if hasattr(part, "variance_epsilon") else "eps"
    if isinstance(part, nn.RMSNorm) or not hasattr(part, eps) or not hasattr(part, "weight"):
        return []
    return [partial(_rms_norm, part, eps, offset=offset) for offset in (0.0, 1.0)]


def _rms_norm(norm: Any, eps: str, x: Tensor, *, offset: float, second_order: bool = True) -> Tensor:
    return norms.rms_norm(x, norm.weight, getattr(norm, eps), offset=offset, second_order=second_order)


def _gates(part: Any) -> list[ReplacementFunction]:
    if not all(hasattr(part, child) for child in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return []
    return [partial(_gated, part, activation=kind) for kind in GATES if _is_activation(part.act_fn, kind)]


def _gated(mlp: Any, x: Tensor, *, activation: Name, second_order: bool = True) -> Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    return mlp.down_proj(gated(gate, up, activation, second_order=second_order))


def _is_activation(act_fn: Any, kind: Name) -> bool:
    """Return True if an activation is of this kind, tested in float64."""
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    try:
        error = (act_fn(x) - activations.activate(x, kind)).abs().max()
    except Exception:  # the activation may raise anything
        return False
    return float(error) < 1e-6


def _gelus(part: Any) -> list[ReplacementFunction]:
    return [partial(activations.gelu, approximate="tanh")]


def _zoo_norms(part: Any) -> list[ReplacementFunction]:
    return [partial(_zoo_norm, part)]


def _zoo_norm(norm: Any, x: Tensor, *, second_order: bool = True) -> Tensor:
    if norm.center:
        return norms.layer_norm(x, norm.g, norm.b, norm.eps, second_order=second_order)
    return norms.rms_norm(x, norm.g, norm.eps, second_order=second_order)


def _zoo_attentions(layer: Any) -> list[ReplacementFunction]:
    """Return the replacement for softmax attention whose scores are only products of queries and keys."""
    cfg, original = layer.cfg, layer.attend
    if cfg.attention != "softmax" or cfg.merged_qk or cfg.score_bias != "none":
        return []

    def attend(x: Tensor, record: Record, *, second_order: bool = True) -> Tensor:
        if record is not no_record:  # the caller records the pattern
            return original(x, record)
        Q, K = layer.queries_and_keys(x)
        F = attention(Q, K, layer.values(x), causal=cfg.causal, second_order=second_order)
        return layer.project(F.transpose(1, 2).flatten(2))

    return [attend]


GENERIC = (
    MethodReplacement("RMSNorm", _rms_norms),
    MethodReplacement("", _gates),
    MethodReplacement("NewGELUActivation", _gelus),
    MethodReplacement("", candidates, sequences=True),
)
"""Replacements for modules of any family: norms, gated layers and packed attention in their usual form."""
ZOO = (
    MethodReplacement("Norm", _zoo_norms),
    MethodReplacement("Layer", _zoo_attentions, "attend", certain=True),
)
"""Replacements for the zoo's Transformer."""
