"""Blocks of a feed-forward layer as sums of Kronecker products, with diagonals, traces and norms.

With f a row of x or the number 1 (weight or bias of branch α), z̄ a row of z or 1 (W_2 or b_2), one loss
curvature B_i per token and Ω_i = W_2 B_i W_2ᵀ:

    H(α f, β f′) = Σ_i f_i f′_iᵀ ⊗ C_i,   C_i = D^α_i Ω_i D^β_i + diag(S^{αβ}_i)
    H(α f, W_2)  = Σ_i f_i z̄_iᵀ ⊗ Q_i + δ_pq Σ_i f_ia D^α_ip g_io,   Q_i = D^α_i W_2 B_i
    H(W_2, W_2)  = Σ_i z̄_i z̄_iᵀ ⊗ B_i

H_o consists of the terms with B. The δ term belongs to W_2, not to b_2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.closed_form.block_matrix import BlockMatrix, Pair, symmetric
from curvescope.closed_form.ffn.layer import FeedForwardPoint, features
from curvescope.closed_form.objectives import token_curvature
from curvescope.core.errors import UsageError
from curvescope.core.hessian_terms import Part, check_part


@dataclass(frozen=True)
class _Row:
    """A parameter: the features of its rows, and the branch it feeds (None: W_2 or b_2)."""

    name: str
    features: Tensor  # (L, rows)
    branch: int | None


@dataclass(frozen=True)
class KroneckerBlock:
    """H(row, column) = Σ_i left_i right_iᵀ ⊗ core_i, plus δ_pq Σ_i left_ia tilt_ip g_io if `tilt` is given.

    As an array it is H[a, p, b, q] with features a, b and the indices p, q of the core.
    """

    left: Tensor  # (L, a)
    right: Tensor  # (L, b)
    core: Tensor  # (L, p, q)
    tilt: Tensor | None = None  # (L, p)
    g: Tensor | None = None  # (L, o)

    def to_dense(self) -> Tensor:
        """Return all entries: (a p, b q)."""
        a, b = self.left.shape[1], self.right.shape[1]
        p, q = self.core.shape[1:]
        block = torch.einsum("ia,ib,ipq->apbq", self.left, self.right, self.core)
        if self.tilt is not None:
            block = block + torch.diag_embed(self._extra().permute(0, 2, 1)).permute(0, 2, 3, 1)
        return block.reshape(a * p, b * q)

    def square_norm(self) -> Tensor:
        """‖H‖²_F = Σ_ij ⟨left_i, left_j⟩⟨right_i, right_j⟩⟨core_i, core_j⟩ and the terms of the tilt."""
        flat = self.core.flatten(1)
        grams = (self.left @ self.left.T) * (self.right @ self.right.T)
        square = (grams * (flat @ flat.T)).sum()
        if self.tilt is None or self.g is None:
            return square
        extra = self._extra()
        cross = torch.einsum(
            "ij,jp,ip,ipo,jo->", self.left @ self.left.T, self.tilt, self.right, self.core, self.g
        )
        return square + 2 * cross + extra.square().sum()

    def _extra(self) -> Tensor:
        """Return Σ_i left_ia tilt_ip g_io, the entries at p = q: (a, p, o)."""
        assert self.tilt is not None
        assert self.g is not None
        return torch.einsum("ia,ip,io->apo", self.left, self.tilt, self.g)


def ffn_kronecker_block(
    at: FeedForwardPoint, g: Tensor, B: float | Tensor, names: Pair, *, part: Part = "total"
) -> KroneckerBlock:
    """Return H(a, b) of two parameters, in the layer's order, as a sum of Kronecker products."""
    check_part(part)
    rows = _rows(at)
    for name in names:
        if name not in rows:
            raise UsageError(f"expected parameters of {', '.join(rows)}, got {name!r}")
    order = list(rows)
    if order.index(names[0]) > order.index(names[1]):
        raise UsageError(
            f"expected {names[1]!r} before {names[0]!r}", hint="H(b, a) is the transpose of H(a, b)"
        )
    g = g.reshape(at.x.shape[0], -1)
    return _block(at, g, token_curvature(B, g), (rows[names[0]], rows[names[1]]), part)


def ffn_parameter_blocks(
    at: FeedForwardPoint, g: Tensor, B: float | Tensor, *, part: Part = "total"
) -> BlockMatrix:
    """Return all parameter blocks, summed from Kronecker products; B is a number or a matrix per token."""
    blocks = {pair: ffn_kronecker_block(at, g, B, pair, part=part).to_dense() for pair in _pairs(at)}
    return symmetric(blocks, {name: at.sizes[name] for name in at.parameters}, at.x)


def ffn_diagonal(
    at: FeedForwardPoint, g: Tensor, B: float | Tensor, *, part: Part = "total"
) -> dict[str, Tensor]:
    """Return the diagonal of the Hessian, by parameter: (rows, columns), a bias as one row.

    Σ_i f_ia² (D_ip² (Ω_i)_pp + S_ip) for a branch's parameters, Σ_i z̄_ip² (B_i)_oo for W_2 and b_2.
    """
    check_part(part)
    g = g.reshape(at.x.shape[0], -1)
    per_token, R = token_curvature(B, g), g @ at.W_2.mT
    outer, functional = float(part != "functional"), float(part != "outer")
    omega = torch.einsum("po,iow,pw->ip", at.W_2, per_token, at.W_2)
    diagonals = {}
    for row in _rows(at).values():
        if row.branch is None:
            local = outer * per_token.diagonal(dim1=1, dim2=2)
        else:
            slope, bend = at.branches[row.branch].slope, at.bend(row.branch, row.branch)
            local = outer * slope**2 * omega + functional * R * bend
        diagonals[row.name] = torch.einsum("ia,ip->ap", row.features**2, local)
    return diagonals


def ffn_trace(
    at: FeedForwardPoint, g: Tensor, B: float | Tensor, *, part: Part = "total"
) -> dict[str, Tensor]:
    """Return the trace of each parameter's own block."""
    return {name: diagonal.sum() for name, diagonal in ffn_diagonal(at, g, B, part=part).items()}


def ffn_frobenius(
    at: FeedForwardPoint, g: Tensor, B: float | Tensor, *, part: Part = "total"
) -> dict[Pair, Tensor]:
    """Return the Frobenius norm of every block H(a, b), at a cost of L² times the size of a core."""
    return {
        pair: ffn_kronecker_block(at, g, B, pair, part=part).square_norm().clamp(min=0).sqrt()
        for pair in _pairs(at)
    }


def _block(at: FeedForwardPoint, g: Tensor, B: Tensor, pair: tuple[_Row, _Row], part: Part) -> KroneckerBlock:
    row, column = pair
    outer, functional = float(part != "functional"), float(part != "outer")
    if row.branch is None:
        return KroneckerBlock(row.features, column.features, outer * B)
    slope = at.branches[row.branch].slope
    if column.branch is None:
        core = outer * slope[:, :, None] * (at.W_2 @ B)
        tilt = functional * slope if column.name == "W_2" else None
        return KroneckerBlock(row.features, column.features, core, tilt, g)
    other = at.branches[column.branch].slope
    omega = at.W_2 @ B @ at.W_2.mT
    bend = (g @ at.W_2.mT) * at.bend(row.branch, column.branch)
    core = outer * slope[:, :, None] * omega * other[:, None, :] + functional * torch.diag_embed(bend)
    return KroneckerBlock(row.features, column.features, core)


def _rows(at: FeedForwardPoint) -> dict[str, _Row]:
    rows = [_Row(name, f, k) for k, branch in enumerate(at.branches) for name, f in features(at, branch)]
    rows.append(_Row("W_2", at.z, None))
    if at.b_2 is not None:
        rows.append(_Row("b_2", torch.ones_like(at.z[:, :1]), None))
    return {row.name: row for row in rows}


def _pairs(at: FeedForwardPoint) -> list[Pair]:
    names = list(_rows(at))
    return [(a, b) for i, a in enumerate(names) for b in names[i:]]
