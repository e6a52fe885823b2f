"""Checks at the edge of the closed forms for attention: shapes that fit together, errors that say how."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError


def check_weights(
    X: Tensor, X_K: Tensor, X_V: Tensor, weights: Mapping[str, Tensor], num_heads: int, num_kv_heads: int
) -> int:
    """The width of a query head; raise unless the weights fit the heads and the inputs (n, ·, ·)."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise UsageError(f"expected num_kv_heads to divide num_heads, got {num_kv_heads} and {num_heads}")
    if {X.dim(), X_K.dim(), X_V.dim()} != {3} or X_K.shape[:2] != X_V.shape[:2] or len(X) != len(X_K):
        raise ShapeError(
            f"expected keys and values on the same tokens, of the same samples as X {tuple(X.shape)}, "
            f"got X_K {tuple(X_K.shape)} and X_V {tuple(X_V.shape)}"
        )
    queries = "Q" if "Q" in weights else "QK"
    width = _check_matrix(queries, weights[queries], X.shape[-1], num_heads)
    width_K = X_K.shape[-1]
    if "K" in weights:
        width_K = _check_matrix("K", weights["K"], X_K.shape[-1], num_kv_heads)
    if width != width_K:
        raise ShapeError(f"expected queries and keys of one width per head, got {width} and {width_K}")
    width_V = _check_matrix("V", weights["V"], X_V.shape[-1], num_kv_heads)
    if "O" in weights:
        _check_matrix("O", weights["O"], num_heads * width_V, 1)
    for bias in ("b_Q", "b_K", "b_V", "b_O"):
        if bias in weights and weights[bias].shape[1] != weights[bias[2:]].shape[1]:
            raise ShapeError(
                f"expected {bias} of {weights[bias[2:]].shape[1]} entries, got {weights[bias].shape[1]}"
            )
    return width


def _check_matrix(name: str, W: Tensor, rows: int, heads: int) -> int:
    if W.dim() != 2 or W.shape[0] != rows or W.shape[1] % heads:
        raise ShapeError(
            f"expected W_{name} with {rows} rows and columns for {heads} equal heads, got {tuple(W.shape)}",
            hint="weights are inputs × outputs; a torch Linear stores the transpose",
        )
    return W.shape[1] // heads


def check_loss(X: Tensor, weights: Mapping[str, Tensor], G: Tensor, B: float | Tensor) -> None:
    """Raise unless G and B are derivatives in the output of the layer."""
    n, L, o = *X.shape[:2], (weights["O"] if "O" in weights else weights["V"]).shape[1]
    if G.shape != (n, L, o):
        raise ShapeError(f"expected G = ∂ℓ/∂F of shape ({n}, {L}, {o}) like F, got {tuple(G.shape)}")
    if isinstance(B, Tensor) and B.shape not in ((n, L, o, o), (n, L, o, L, o)):
        raise ShapeError(
            f"expected B = ∂²ℓ/∂F² as a number, ({n}, {L}, {o}, {o}) or ({n}, {L}, {o}, {L}, {o}), "
            f"got {tuple(B.shape)}",
            hint="the sample axis is there only when X has one",
        )


def check_rope(
    rope: tuple[Tensor, ...] | None, full: tuple[int, int, int, int], width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Cosines and sines of the queries, then of the keys; one table serves both if it is the only one."""
    if rope is None:
        return None
    if len(rope) not in (2, 4):
        raise UsageError(
            f"expected rope as (cos, sin) or (cos, sin, cos_keys, sin_keys), got {len(rope)} tables"
        )
    cos, sin, cos_K, sin_K = (*rope, *rope)[:4]
    for table, tokens in ((cos, full[2]), (sin, full[2]), (cos_K, full[3]), (sin_K, full[3])):
        if width % 2 or table.shape != (tokens, width // 2):
            raise ShapeError(
                f"expected cos and sin of shape ({tokens}, {width}/2), got {tuple(table.shape)}",
                hint="give (cos, sin, cos_keys, sin_keys) when queries and keys are different tokens",
            )
    return cos, sin, cos_K, sin_K


def check_scores(what: str, table: Tensor | None, full: tuple[int, int, int, int]) -> Tensor | None:
    """Raise unless a mask or bias broadcasts to the scores' shape `full`."""
    if table is None:
        return None
    try:
        fits = torch.broadcast_shapes(table.shape, full) == full
    except RuntimeError:
        fits = False
    if not fits or (what == "mask") != (table.dtype == torch.bool):
        raise ShapeError(
            f"expected a {what} that broadcasts to (samples, heads, L, S) = {full}, "
            f"got {table.dtype} {tuple(table.shape)}",
            hint="a mask is boolean, true where a query may look; a bias is added to the scores",
        )
    return table
