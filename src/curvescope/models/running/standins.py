"""What our kernels may stand in for: methods of submodules, with faster second derivatives.

A family declares its stand-ins, each by the end of a class's name; which of them fit a module is found by
`models.fused`, which tries each on numbers of its own.

Self-attention with one linear map for queries, keys and values, as vision libraries write it.

    [Q K V] = x W_QKV + b,   y = softmax(scale · QKᵀ) V,   output = y W_O + b_O

A module is taken for one by its parts, `qkv` and `proj` (both `nn.Linear`) and `num_heads`, and only where it
gives what this formula gives. In which order the rows of `qkv` lie is found in the same way.
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
from curvescope.models.running.trial import agrees
from curvescope.models.zoo.transformer import Record, nowhere

Layout = Literal["stacked", "interleaved"]
LAYOUTS: tuple[Layout, ...] = (
    "stacked",
    "interleaved",
)  # Q of all heads, K, V; or head 0's Q, K, V, head 1's, …


def has_parts(part: Any) -> bool:
    """Whether a module has the parts of the formula, in sizes that fit."""
    qkv, out, h = (getattr(part, name, None) for name in ("qkv", "proj", "num_heads"))
    if not (isinstance(qkv, nn.Linear) and isinstance(out, nn.Linear) and isinstance(h, int)):
        return False
    return h > 0 and qkv.out_features == 3 * out.in_features and out.in_features % h == 0


def packed_attention(
    part: Any, x: Tensor, *, layout: Layout, causal: bool = False, second_order: bool = True
) -> Tensor:
    """The formula at a module's numbers, (B, T, d) to (B, T, d); norms of queries and keys, and of y, too."""
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
    """How the rows of `qkv` lie; None where the module computes something else."""
    for layout in LAYOUTS if has_parts(part) else ():
        for causal in (False, True):
            if agrees(part, partial(packed_attention, part, layout=layout, causal=causal), sequences=True):
                return layout
    return None


def candidates(part: Any) -> list[Any]:
    """What may stand in for a module: each layout, causal or not; called with more than x it is itself."""
    if not has_parts(part):
        return []
    original = part.forward

    def standing_in(layout: Layout, causal: bool) -> Any:
        def forward(x: Tensor, *more: Any, second_order: bool = True, **options: Any) -> Tensor:
            if any(value is not None for value in (*more, *options.values())):
                return original(x, *more, **options)
            return packed_attention(part, x, layout=layout, causal=causal, second_order=second_order)

        return forward

    return [standing_in(layout, causal) for layout in LAYOUTS for causal in (False, True)]


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
    Standin("", candidates, sequences=True),
)
"""For modules of any family: norms, gated layers and packed attention as most of them are written."""
ZOO = (Standin("Norm", _zoo_norms), Standin("Layer", _zoo_attentions, "attend", certain=True))
"""For the zoo's own Transformer."""
