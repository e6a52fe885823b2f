"""The Hessian of an attention layer in its weights: dense blocks, factored blocks and products.

The product with a direction needs no moments and no blocks: one forward pass with tangents, then one backward
pass. H_o pulls B dF back, and the functional Hessian differentiates the pull-back of a fixed G. The module
`core` covers the map from queries, keys and values to the heads' outputs. This module adds the projections
around it, with rotations and shared heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvescope.closed_form.attention.core import (
    CorePoint,
    Triple,
    core_curve,
    core_push,
    core_vjp,
    merge_heads,
)
from curvescope.closed_form.attention.head import AttentionHead, OutputJacobian, outer_term
from curvescope.closed_form.attention.layer import ROLE, AttentionLayer
from curvescope.closed_form.attention.terms import FactoredTerm, dense_sum, frobenius_squared
from curvescope.closed_form.block_matrix import BlockMatrix, slices
from curvescope.core.errors import ShapeError, UsageError, near_misses
from curvescope.core.hessian_terms import Part, check_part

Pair = tuple[str, str]
ORDER = "QKVO"


@dataclass(frozen=True)
class BlockParts:
    """A block H[a, c, b, e] = ∂²ℓ/∂W_ac ∂W'_be in two parts; `.reshape(W.numel(), W'.numel())` is the matrix.

    `outer` is JᵀBJ (generalized Gauss–Newton), `functional` is Σ_iv G_iv ∂²F_iv.
    """

    outer: Tensor
    functional: Tensor

    @property
    def total(self) -> Tensor:
        """The block of the Hessian itself."""
        return self.outer + self.functional

    @property
    def T(self) -> BlockParts:
        """The block with its two weights exchanged."""
        return BlockParts(self.outer.permute(2, 3, 0, 1), self.functional.permute(2, 3, 0, 1))


class AttentionCurvature:
    """∂²ℓ of an attention layer in its weights, H = JᵀBJ + Σ G ∂²F.

    Two weights name a block, ("Q", "K"), and "outer", "functional" or "total" names a part of it. Only
    `to_dense`, `split`, `blocks` and `hessian` form blocks. The other methods use cached sums over queries of
    small matrices, except `product`, which needs neither.
    """

    def __init__(self, layer: AttentionLayer):
        self.layer = layer
        self.names = tuple(layer.weights)
        self.shapes = {name: (W.shape[0], W.shape[1]) for name, W in layer.weights.items()}
        self._jacobians: dict[tuple[str, int], OutputJacobian] = {}
        self._terms: dict[tuple[Pair, str, int, int], list[FactoredTerm]] = {}

    @cached_property
    def heads(self) -> list[AttentionHead]:
        """The query heads."""
        return [AttentionHead(self.layer, index) for index in range(self.layer.num_heads)]

    def to_dense(self, pair: Pair, part: Part = "total") -> Tensor:
        """Return the block as an array [a, c, b, e], in any memory order; a zero block takes no memory."""
        one, two = self._check(pair)
        pieces = list(self._pieces(pair, part))
        if len(pieces) == self._layout(one)[1] * self._layout(two)[1] == 1:
            return dense_sum(pieces[0][2])
        shape = (*self.shapes[one], *self.shapes[two])
        if not pieces:
            return self.layer.G.new_zeros(()).expand(shape)
        block = self.layer.G.new_zeros(shape)
        for i, j, terms in pieces:
            block[(*self._place(one, i), *self._place(two, j))] = dense_sum(terms)
        return block

    def matvec(self, pair: Pair, V: Tensor, part: Part = "total") -> Tensor:
        """Return the block times V, shaped like the second weight; the result is shaped like the first."""
        one, two = self._check(pair)
        if V.shape != self.shapes[two]:
            raise ShapeError(
                f"expected a matrix shaped like W_{two} {self.shapes[two]}, got {tuple(V.shape)}"
            )
        result = torch.zeros(self.shapes[one], dtype=V.dtype, device=V.device)
        for i, j, terms in self._pieces(pair, part):
            target, piece = result[self._place(one, i)], V[self._place(two, j)]
            for term in terms:
                target += term.matvec(piece)
        return result

    def diagonal(self, pair: Pair, part: Part = "total") -> Tensor:
        """Return H[a, c, a, c], shaped like the weight; two weights must share shape and layout."""
        one, _ = self._check_aligned(pair)
        result = self.layer.G.new_zeros(self.shapes[one])
        for slot in range(self._layout(one)[1]):
            for term in self.terms(pair, part, slots=(slot, slot)):
                result[self._place(one, slot)] += term.diagonal()
        return result

    def trace(self, pair: Pair, part: Part = "total") -> Tensor:
        """Σ_ac H[a, c, a, c]."""
        one, _ = self._check_aligned(pair)
        total = self.layer.G.new_zeros(())
        for slot in range(self._layout(one)[1]):
            for term in self.terms(pair, part, slots=(slot, slot)):
                total = total + term.trace()
        return total

    def frobenius(self, pair: Pair, part: Part = "total") -> Tensor:
        """Frobenius norm of the block."""
        one, two = self._check(pair)
        total = self.layer.G.new_zeros(())
        for i, j, terms in self._pieces(pair, part):
            if one == two and i > j:
                continue  # the transpose of a piece that is already counted
            weight = 2 if one == two and i < j else 1
            total = total + weight * frobenius_squared(terms, total)
        return total.clamp_min(0).sqrt()

    def product(self, directions: Mapping[str, Tensor], part: Part = "total") -> dict[str, Tensor]:
        """Return the full Hessian times a direction, by weight; absent weights have a zero direction.

        The cost is a few products of L × S matrices with heads, for any number of weights.
        """
        for name, V in directions.items():
            self._check((name, name))
            if V.shape != self.shapes[name]:
                raise ShapeError(f"expected direction {name} of {self.shapes[name]}, got {tuple(V.shape)}")
        return product(self.layer, directions, part=part)

    def split(self, pair: Pair) -> BlockParts:
        """Return both parts of a block, dense."""
        return BlockParts(self.to_dense(pair, "outer"), self.to_dense(pair, "functional"))

    def blocks(self) -> dict[Pair, BlockParts]:
        """Return all blocks, dense; pairs of different weights also in exchanged order, as a view."""
        all_blocks: dict[Pair, BlockParts] = {}
        for i, one in enumerate(self.names):
            for two in self.names[i:]:
                all_blocks[one, two] = self.split((one, two))
                if one != two:
                    all_blocks[two, one] = all_blocks[one, two].T
        return all_blocks

    def hessian(self, part: Part = "total") -> BlockMatrix:
        """Return all blocks in one matrix: `H["Q", "K"]`, or `H.matrix` in the order of `names`."""
        sizes = {name: rows * columns for name, (rows, columns) in self.shapes.items()}
        H, positions = self.layer.G.new_empty(sum(sizes.values()), sum(sizes.values())), slices(sizes)
        for i, one in enumerate(self.names):
            for two in self.names[i:]:
                target, block = H[positions[one], positions[two]], self.to_dense((one, two), part)
                target.unflatten(1, block.shape[2:]).unflatten(0, block.shape[:2]).copy_(block)
                if one != two:
                    H[positions[two], positions[one]] = target.T
        return BlockMatrix(H, sizes)

    def terms(
        self, pair: Pair, part: Part = "total", *, slots: tuple[int, int] = (0, 0)
    ) -> list[FactoredTerm]:
        """Return the factored terms of a block between two slots of the stacked weights."""
        check_part(part)
        if part == "total":
            return self.terms(pair, "outer", slots=slots) + self.terms(pair, "functional", slots=slots)
        one, two = pair
        if ORDER.index(ROLE[one]) > ORDER.index(ROLE[two]):
            return [term.T for term in self.terms((two, one), part, slots=(slots[1], slots[0]))]
        key = (pair, part, *slots)
        if key not in self._terms:
            self._terms[key] = self._make_terms(pair, part, slots)
        return self._terms[key]

    def _make_terms(self, pair: Pair, part: Part, slots: tuple[int, int]) -> list[FactoredTerm]:
        terms: list[FactoredTerm] = []
        for h in self._heads_at(pair[0], slots[0]):
            for g in self._heads_at(pair[1], slots[1]):
                if part == "outer":
                    terms.append(
                        outer_term(self.layer, self._jacobian(pair[0], h), self._jacobian(pair[1], g))
                    )
                elif g == h:
                    terms.extend(self.heads[h].functional(*pair))
        return terms

    def _pieces(self, pair: Pair, part: Part) -> Iterator[tuple[int, int, list[FactoredTerm]]]:
        """Iterate over the terms of all pairs of slots; different heads are coupled in H_o only."""
        for i in range(self._layout(pair[0])[1]):
            for j in range(self._layout(pair[1])[1]):
                terms = self.terms(pair, part, slots=(i, j))
                if terms:
                    yield i, j, terms

    def _jacobian(self, name: str, head: int) -> OutputJacobian:
        if (name, head) not in self._jacobians:
            self._jacobians[name, head] = self.heads[head].jacobian(name)
        return self._jacobians[name, head]

    def _heads_at(self, name: str, slot: int) -> range:
        """Return the query heads that use a slot of a stacked weight: several if they share it."""
        share = self.layer.num_heads // self.layer.num_kv_heads if ROLE[name] in "KV" else 1
        return range(slot * share, (slot + 1) * share)

    def _layout(self, name: str) -> tuple[int, int]:
        """Return the axis of a stacked weight that the heads divide, and the number of slots."""
        if name == "b_O":
            return 1, 1
        return int(name != "O"), self.layer.num_kv_heads if ROLE[name] in "KV" else self.layer.num_heads

    def _place(self, name: str, slot: int) -> tuple[slice, slice]:
        axis, num = self._layout(name)
        size = self.shapes[name][axis] // num
        cut = slice(slot * size, (slot + 1) * size)
        return (slice(None), cut) if axis == 1 else (cut, slice(None))

    def _check(self, pair: Pair) -> Pair:
        for name in pair:
            if name not in self.names:
                raise UsageError(f"no weight is called {name!r}", hint=near_misses(name, list(self.names)))
        return pair

    def _check_aligned(self, pair: Pair) -> Pair:
        one, two = self._check(pair)
        if (self.shapes[one], self._layout(one)) != (self.shapes[two], self._layout(two)):
            raise UsageError(
                f"the block of W_{one} {self.shapes[one]} and W_{two} {self.shapes[two]} has no diagonal",
                hint="both weights must have the same shape, cut into heads in the same way",
            )
        return pair


def product(
    layer: AttentionLayer, directions: Mapping[str, Tensor], *, part: str = "total"
) -> dict[str, Tensor]:
    """Return H, JᵀBJ or ΣG∂²F times a direction, as one matrix per weight."""
    check_part(part)
    at = CorePoint(layer.q, layer.k, layer.v, layer.A, layer.slope, layer.scale, layer.kind == "softmax")
    tangent = core_push(at, _projections(layer, directions))
    U = torch.zeros_like(layer.G)
    if part != "functional":
        U = layer.curve_loss(_output_tangent(layer, directions, tangent.dO)[..., None])[..., 0]
    dG = layer.pull_output(U, layer.weights.get("O"))
    if part == "outer":
        return _collect(layer, core_vjp(at, dG)) | _output_weights(layer, U, None)
    if "O" in directions:
        dG = dG + layer.pull_output(layer.G, directions["O"])
    cotangents = core_curve(at, layer.G_heads, tangent, dG)
    return _collect(layer, cotangents) | _output_weights(layer, U, tangent.dO)


def _projections(layer: AttentionLayer, directions: Mapping[str, Tensor]) -> Triple:
    """Tangents of rotated queries, rotated keys and values."""
    dq, dk, dv = (layer.project(role, directions) for role in "QKV")
    return (
        torch.zeros_like(layer.q) if dq is None else layer.rotate_queries(dq),
        torch.zeros_like(layer.k) if dk is None else layer.rotate_keys(dk),
        torch.zeros_like(layer.v) if dv is None else dv,
    )


def _output_tangent(layer: AttentionLayer, directions: Mapping[str, Tensor], dO: Tensor) -> Tensor:
    """dF = Σ_h dO_h W_O^h + O_h dW_O^h + db_O: (n, L, o)."""
    W_O = layer.weights.get("O")
    dF = dO[:, 0] if W_O is None else merge_heads(dO) @ W_O
    if "O" in directions:
        dF = dF + merge_heads(layer.heads_out) @ directions["O"]
    return dF + directions["b_O"] if "b_O" in directions else dF


def _output_weights(layer: AttentionLayer, U: Tensor, dO: Tensor | None) -> dict[str, Tensor]:
    """Return Σ O_hᵀ U + dO_hᵀ G for W_O and Σ U for b_O, if the layer has them."""
    gradients = {
        "b_O": U.sum((0, 1))[None],
        "O": merge_heads(layer.heads_out).flatten(0, 1).T @ U.flatten(0, 1),
    }
    if dO is not None:
        gradients["O"] = gradients["O"] + merge_heads(dO).flatten(0, 1).T @ layer.G.flatten(0, 1)
    return {name: gradients[name] for name in layer.weights if name in gradients}


def _collect(layer: AttentionLayer, cotangents: Triple) -> dict[str, Tensor]:
    """Return featureᵀ · cotangent for each weight, summed over heads that share keys and values."""
    hq, hk, hv = cotangents
    share = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
    by_role = {
        "Q": layer.rotate_queries(hq, back=True),
        "K": layer.rotate_keys(hk, back=True).unflatten(1, share).sum(2),
        "V": hv.unflatten(1, share).sum(2),
    }
    return {
        name: layer.feature(name).flatten(0, 1).T @ merge_heads(by_role[ROLE[name]]).flatten(0, 1)
        for name in layer.weights
        if ROLE[name] != "O"
    }
