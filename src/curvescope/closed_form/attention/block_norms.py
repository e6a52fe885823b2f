"""Exact norms of the diagonal blocks of one attention head, without forming blocks and without probes.

If the loss is a sum over queries i of functions of the head's own output F_i, as in the last layer of any
Transformer, the block of each weight is a sum over queries of Kronecker products of small matrices. With
p pᵀ on the rows of W_Q, W_V, W_O and on the columns of W_K:

    weight   p           S
    W_Q      x_i         C_i B_i C_iᵀ + Σ_j τ_ij k̃_ij k̃_ijᵀ s²,   C_i = s Σ_j A_ij k̃_ij (v_j W_O)ᵀ
    W_K      q_i         the same with the inputs x_j instead of the keys k_j
    W_V      (A x)_i     W_O B_i W_Oᵀ
    W_O      (A v)_i     B_i

where B_i = ∂²ℓ/∂F_i², k̃ is centered under A (not in linear attention), and τ = ∂ℓ/∂scores, which enters
for softmax only. Then ‖Σ_a p_a p_aᵀ ⊗ S_a‖² = Σ_ab (p_a · p_b)² ⟨S_a, S_b⟩: a Gram matrix over queries.
`hessian.AttentionCurvature.frobenius` does the same for any pair of weights and any number of
heads; this is its fast case.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from curvescope.closed_form.attention.layer import AttentionLayer
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.hessian_terms import Part, check_part

Weight = Literal["Q", "K", "V", "O"]
WEIGHTS: tuple[Weight, ...] = ("Q", "K", "V", "O")
ROWS = 96  # rows of a Gram matrix that are computed at a time


class PartNorms(NamedTuple):
    """Frobenius norms of a block H = H_o + H_f, each a scalar tensor."""

    total: Tensor
    outer: Tensor
    functional: Tensor


@dataclass(frozen=True)
class KroneckerSum:
    """Σ_a p_a p_aᵀ ⊗ S_a over queries a, in two parts; `functional` is None if it is exactly zero.

    The vectors carry the first index of the weight, or the second with `on_columns`.
    """

    vectors: Tensor  # (N, p)
    outer: Tensor  # (N, q, q), symmetric
    functional: Tensor | None
    on_columns: bool = False

    def norms(self) -> PartNorms:
        """Exact Frobenius norms of the sum and of its parts."""
        vectors, *parts = self._merged
        weights = (vectors @ vectors.T).square()
        if self.functional is None:
            norm = _norm(weights, parts[0])
            return PartNorms(norm, norm, torch.zeros_like(norm))
        outer, functional = parts
        return PartNorms(*(_norm(weights, S) for S in (outer + functional, outer, functional)))

    def product(self, V: Tensor, part: Part = "total") -> Tensor:
        """The block times matrices V (k, *shape of the weight): Σ_a p_a (p_aᵀ V) S_a."""
        check_part(part)
        S = self.outer if part != "functional" else torch.zeros_like(self.outer)
        if part != "outer" and self.functional is not None:
            S = S + self.functional
        V = V.mT if self.on_columns else V
        rows = (self.vectors @ V).transpose(0, 1) @ S  # (N, k, q)
        result = (self.vectors.T @ rows.flatten(1)).unflatten(1, rows.shape[1:]).transpose(0, 1)
        return result.mT if self.on_columns else result

    @cached_property
    def _merged(self) -> list[Tensor]:
        """Distinct vectors, and the parts summed over queries with the same vector: (N', q²)."""
        parts = [S.flatten(1) for S in (self.outer, self.functional) if S is not None]
        vectors, index = torch.unique(self.vectors, dim=0, return_inverse=True)
        if len(vectors) == len(self.vectors):
            return [self.vectors, *parts]
        return [vectors, *(S.new_zeros(len(vectors), S.shape[1]).index_add_(0, index, S) for S in parts)]


@final
class HeadNorms:
    """Diagonal blocks of a layer with one head, given the loss derivatives in its output.

    Args:
        layer: softmax or linear, without rotary positions; its G is ∂ℓ/∂F, its B is ignored.
        outer: R (n, L, o, r) with R Rᵀ the GGN part of B with respect to the model's outputs.
        functional: B minus that part, (n, L, o, o), if it is not zero.
    """

    def __init__(self, layer: AttentionLayer, outer: Tensor, functional: Tensor | None = None):
        _check(layer, outer, functional)
        self.layer = layer
        self.R = outer.flatten(0, 1)  # (N, o, r)
        self.K = None if functional is None else functional.flatten(0, 1)

    def block(self, weight: Weight) -> KroneckerSum:
        """Return the block of a weight as a sum over queries."""
        layer = self.layer
        if weight in ("Q", "K"):
            return self._scores(weight)
        W_O = layer.weights.get("O")
        if weight == "V":
            vectors = (layer.A[:, 0] @ layer.X_V).flatten(0, 1)
            R, K = self.R, self.K
            if W_O is not None:
                R, K = W_O @ R, None if K is None else W_O @ K @ W_O.T
        elif weight == "O" and W_O is not None:
            vectors, R, K = layer.heads_out[:, 0].flatten(0, 1), self.R, self.K
        else:
            raise UsageError(f"expected one of {', '.join(layer.weights)}, got {weight!r}")
        return KroneckerSum(vectors, R @ R.mT, K)

    def norms(self, weights: Iterable[Weight] = WEIGHTS) -> dict[Weight, PartNorms]:
        """Return exact norms by weight."""
        return {weight: self.block(weight).norms() for weight in weights}

    @cached_property
    def _values(self) -> Tensor:
        """v_j W_O: (n, S, o)."""
        W_O = self.layer.weights.get("O")
        return self.layer.v[:, 0] if W_O is None else self.layer.v[:, 0] @ W_O

    def _scores(self, weight: Weight) -> KroneckerSum:
        """Return the block of W_Q or W_K, which act through the scores."""
        layer, n, L = self.layer, *self.layer.X.shape[:2]
        feature = layer.scale * (layer.k[:, 0] if weight == "Q" else layer.X_K)
        vectors = (layer.X if weight == "Q" else layer.q[:, 0]).flatten(0, 1)
        A, slope, tau = (t[:, 0] for t in (layer.A, layer.slope, layer.tau))
        if layer.kind == "softmax":
            feature = _centered(A, feature)
        else:
            feature = feature[:, None].expand(-1, L, -1, -1)
        R = self.R.unflatten(0, (n, L))
        half = feature.mT @ (slope[..., None] * (self._values[:, None] @ R))  # (n, L, q, r)
        half, functional = half.flatten(0, 1), None
        if layer.kind == "softmax":
            functional = (feature.mT @ (tau[..., None] * feature)).flatten(0, 1)
        if self.K is not None:
            C = (feature.mT @ (slope[..., None] * self._values[:, None])).flatten(0, 1)
            rest = C @ self.K @ C.mT
            functional = rest if functional is None else functional + rest
        return KroneckerSum(vectors, half @ half.mT, functional, on_columns=weight == "K")


def _centered(A: Tensor, feature: Tensor) -> Tensor:
    """Return f_j − Σ_l A_il f_l for every query, (n, L, S, q), subtracting the most attended key first."""
    feature = feature[:, None].expand(-1, A.shape[1], -1, -1)
    top = A.argmax(-1)[..., None, None].expand(-1, -1, 1, feature.shape[-1])
    feature = feature - feature.gather(2, top)
    return feature - A[:, :, None] @ feature


def _norm(weights: Tensor, S: Tensor) -> Tensor:
    """Return √ Σ_ab weights_ab ⟨S_a, S_b⟩, from bands of the upper triangle of the Gram matrix."""
    total = weights.new_zeros(())
    for start in range(0, len(S), ROWS):
        band = weights[start : start + ROWS, start:] * (S[start : start + ROWS] @ S[start:].T)
        total = total + 2 * band.sum() - band[:, :ROWS].sum()
    return total.clamp_min(0).sqrt()


def _check(layer: AttentionLayer, outer: Tensor, functional: Tensor | None) -> None:
    if layer.num_heads != 1 or layer.rope is not None:
        raise UsageError(
            "expected a layer with one head and without rotary positions",
            hint="AttentionCurvature(layer).frobenius takes every layer",
        )
    n, L, o = layer.G.shape
    if outer.dim() != 4 or outer.shape[:3] != (n, L, o):
        raise ShapeError(f"expected a factor of shape ({n}, {L}, {o}, r), got {tuple(outer.shape)}")
    if functional is not None and functional.shape != (n, L, o, o):
        raise ShapeError(f"expected a matrix per query, ({n}, {L}, {o}, {o}), got {tuple(functional.shape)}")
