"""Eigenpairs from a space that was found, or from the matrix itself, with residuals that are measured."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.columns import columns_at_once
from curvescope.algorithms.spectra.restart import Search, Which, choose
from curvescope.algorithms.sums import gram, norms, to_numpy
from curvescope.algorithms.vectors import check_finite, orthogonalize, own_entries, random_vector, rotate
from curvescope.core.operator import LinearOperator


class Found(NamedTuple):
    """Eigenpairs, wanted ones first, with what is known of them."""

    values: np.ndarray  # (k,)
    Y: Tensor  # (k, n)
    residuals: np.ndarray  # (k,) measured
    scale: float  # largest |eigenvalue| seen
    verified: bool  # nothing was found that belongs before them
    products: int
    reason: str = ""  # why they are not what was looked for


def solved_directly(op: LinearOperator, k: int, which: Which) -> Found:
    """From the matrix itself, in float64; residuals with the rounding of vectors in the operator's type."""
    A = to_numpy(op.to_dense())
    check_finite(A)
    theta, S = np.linalg.eigh((A + A.T) / 2)
    best = choose(theta, k, which)
    best = np.sort(best) if which == "BE" else best
    values, S = theta[best], S[:, best]
    scale = float(np.abs(theta).max())
    residuals = np.linalg.norm(A @ S - S * values, axis=0) + torch.finfo(op.dtype).eps * scale
    Y = own_entries(op, torch.as_tensor(S)).T.to(op.dtype, copy=True).contiguous()
    return Found(values, Y, residuals, scale, True, op.shape[0])


def filled(search: Search) -> Tensor:
    """The locked vectors (k, n), made up to k with random ones if the products did not suffice."""
    Y, index = search.rows[: search.k], search.sweeps
    for have in range(len(search.locked), search.k):
        rest = 0.0
        while rest == 0.0:
            random_vector(search.op, seed=search.seed, index=index, out=Y[have])
            rest = orthogonalize(Y[:have], Y[have]).norm
            Y[have] /= rest or 1.0
            index += 1
    return Y


def measured(search: Search) -> Found:
    """Rayleigh–Ritz on the span of the k vectors of a search.

    The products go where the basis was; k further vectors only if it was shorter than 2k.
    """
    Y, k, factor = filled(search), search.k, search.factor or 1.0
    room = search.rows[k : 2 * k] if len(search.rows) >= 2 * k else None
    values, residuals = rayleigh_ritz(search.op, Y, search.which, factor=factor, room=room)
    return Found(values, Y, residuals, search.scale / factor, search.verified, search.products + k)


def rayleigh_ritz(
    op: LinearOperator, Y: Tensor, which: Which, *, factor: float = 1.0, room: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Ritz values and residuals (k,) of an operator on the rows of Y (k, n), which become the Ritz vectors.

    Args:
        factor: what products are multiplied by, to bring them near one.
        room: memory for the products, (k, n).
    """
    P, k = torch.empty_like(Y) if room is None else room, len(Y)
    width = columns_at_once(op)
    for start in range(0, k, width):
        P[start : start + width] = (op @ Y[start : start + width].T).T
    if factor != 1.0:
        P *= factor
    H, L = gram(Y, P), np.linalg.cholesky(gram(Y, Y))  # the rows of Y are orthonormal up to float32
    check_finite(H)
    H = np.linalg.solve(L, np.linalg.solve(L, (H + H.T) / 2).T)
    theta, S = np.linalg.eigh((H + H.T) / 2)
    S = np.linalg.solve(L.T, S)
    order = np.arange(k) if which == "BE" else choose(theta, k, which)
    values, S = theta[order], S[:, order]
    rotate(Y, S)
    rotate(P, S)
    for value, vector, product in zip(values, Y, P, strict=True):
        product.sub_(vector, alpha=float(value))
    return values / factor, to_numpy(norms(P, dim=1)) / factor
