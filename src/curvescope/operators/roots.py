"""Columns r_k of roots of matrices in the outputs, M = Σ_k r_k r_kᵀ, for the diagonal of Jᵀ M J.

cross-entropy, GGN     √(w_t p_c) (e_c − p_t) at position t, for every position and class
diagonal losses, GGN   √(w_i ℓ_i'') e_i for every entry
other roots, GGN       R e_i for every entry, with a root R of M from the loss (`Loss.root`)
empirical Fisher       √w_t ∂ℓ_t/∂z for every term t
anything else          unit vectors e_i with M e_i: diag(Jᵀ M J) = Σ_i (Jᵀ e_i) ∘ (Jᵀ M e_i)

The columns of different sequences are independent, so column k contains one column for each sequence:
(k, B, …). A few columns are made at a time, because all of them would be as large as M.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from curvescope.data.batches import Batch
from curvescope.losses import CrossEntropy, Loss
from curvescope.losses.base import TermLayout


class RootColumns(NamedTuple):
    """Columns in the space of outputs, and their number."""

    number: int
    make: Callable[[slice], Tensor]  # returns the chosen columns, (k, *outputs)
    times: Callable[[Tensor], Tensor] | None = None  # M r for unit columns r; None for roots


def ggn_columns(loss: Loss, z: Tensor, batch: Batch) -> RootColumns:
    """Columns of a root of ∂²(sum)/∂z²."""
    z = z.detach()
    if isinstance(loss, CrossEntropy) and loss.has_root:
        return _softmax_columns(z, loss.layout(z), *loss.root_columns(z, batch.targets, batch.weights))
    if loss.has_root and loss.diagonal:
        root = loss.root(z, batch.targets, batch.weights, torch.ones_like(z))
        return _term_columns(z, TermLayout(z[0].numel()), root)
    if loss.has_root:
        units = _unit_columns(z)
        return RootColumns(units.number, lambda k: loss.root(z, batch.targets, batch.weights, units.make(k)))
    return _unit_columns(z, lambda u: loss.hessian_product(z, batch.targets, batch.weights, u))


def fisher_columns(loss: Loss, z: Tensor, batch: Batch) -> RootColumns:
    """Columns of a root of Σ_t w_t r_t r_tᵀ, with r_t = ∂ℓ_t/∂z at the batch's targets."""
    z = z.detach()
    layout = loss.layout(z)
    if layout is not None:
        return _term_columns(z, layout, loss.root_gradient(z, batch.targets, batch.weights))
    return _unit_columns(z, lambda u: loss.term_outer_product(z, batch.targets, batch.weights, u))


def mean_of_columns(columns: list[RootColumns]) -> RootColumns:
    """Columns of the mean of several matrices: all their roots, or unit columns times the mean."""
    matrices = [matrix.times for matrix in columns if matrix.times is not None]
    if matrices:
        example = columns[0]
        return RootColumns(
            example.number, example.make, lambda u: torch.stack([M(u) for M in matrices]).mean(dim=0)
        )
    scale = len(columns) ** -0.5
    sources = [(matrix, i) for matrix in columns for i in range(matrix.number)]

    def make(chosen: slice) -> Tensor:
        return scale * torch.cat([matrix.make(slice(i, i + 1)) for matrix, i in sources[chosen]])

    return RootColumns(len(sources), make)


def _softmax_columns(z: Tensor, layout: TermLayout, p: Tensor, w: Tensor) -> RootColumns:
    """√(w_t p_c) (e_c − p_t), position by position, for p (B, T, C) and weights w (B, T).

    Positions without weight have no columns.
    """
    B, T, C = p.shape
    positions = (w != 0).any(dim=0).nonzero()[:, 0]

    def make(chosen: slice) -> Tensor:
        index = torch.arange(chosen.start, chosen.stop, device=z.device)
        t, c, k = positions[index // C], index % C, torch.arange(len(index), device=z.device)
        rows = -p[:, t]
        rows[:, k, c] += 1
        rows *= (w[:, t] * p[:, t, c]).sqrt()[..., None]
        out = z.new_zeros(len(index), B, T, C)
        out[k, :, t] = rows.transpose(0, 1)
        return layout.join(out, z.shape)

    return RootColumns(len(positions) * C, make)


def _term_columns(z: Tensor, layout: TermLayout, values: Tensor) -> RootColumns:
    """One column for each term that is not zero: its values in a tensor like z, zeros elsewhere."""
    G = layout.split(values)
    terms = (G != 0).any(dim=2).any(dim=0).nonzero()[:, 0]

    def make(chosen: slice) -> Tensor:
        t = terms[chosen]
        out = G.new_zeros(len(t), *G.shape)
        out[torch.arange(len(t), device=G.device), :, t] = G[:, t].transpose(0, 1)
        return layout.join(out, z.shape)

    return RootColumns(len(terms), make)


def _unit_columns(z: Tensor, times: Callable[[Tensor], Tensor] | None = None) -> RootColumns:
    """Unit vectors e_i for every entry of a sequence's outputs."""
    entries = prod(z.shape[1:])

    def make(chosen: slice) -> Tensor:
        index = torch.arange(entries, device=z.device)
        eye = (index[chosen, None] == index).to(z.dtype)
        return eye[:, None].expand(-1, len(z), -1).reshape(-1, *z.shape)

    return RootColumns(entries, make, times)
