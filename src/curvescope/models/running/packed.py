"""Self-attention with one linear map for queries, keys and values, as vision libraries write it.

    [Q K V] = x W_QKV + b,   y = softmax(scale · QKᵀ) V,   output = y W_O + b_O

A module is taken for one by its parts, `qkv` and `proj` (both `nn.Linear`) and `num_heads`, and only where it
gives what this formula gives. In which order the rows of `qkv` lie is found in the same way.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from curvescope.kernels.attention import attention
from curvescope.models.running.trial import agrees

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
