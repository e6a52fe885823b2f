"""Curvature of a small network written out, and its approximations as block-diagonal matrices.

With rows r of all terms (one for every class), scaled so that the GGN is G = Σ r rᵀ, and X the part of r in a
block as a matrix, inputs × outputs:

    identity         (tr G / n) I
    diagonal         diag(G)
    block-diagonal   G_bb, block by block
    kfac, ekfac      cs.KFAC, cs.EKFAC of the GGN, sharing "expand"
    shampoo          (L ⊗ R)^½, L = Σ X Xᵀ, R = Σ Xᵀ X; shampoo-squared is L ⊗ R / tr L
    ggn              G itself

Nothing is drawn at random: what is far is far because of its form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from curvescope.operators import EKFAC, KFAC, Shampoo
from curvescope.operators.kronecker.base import KroneckerOperator
from curvescope.operators.kronecker.moments import whole_gradients
from curvescope.operators.kronecker.stream import pieces
from curvescope.problem import Problem

CHUNK = 128  # columns of the Hessian at once
IDENTITY, DIAGONAL, BLOCKS, GGN = "identity", "diagonal", "block-diagonal", "ggn"
KFAC_NAME, EKFAC_NAME = "kfac", "ekfac"


class Blocked(NamedTuple):
    """A symmetric matrix that is zero outside its diagonal blocks: where they lie, and what they are."""

    slices: list[slice]
    parts: list[Tensor]

    @property
    def mean_diagonal(self) -> float:
        """tr A / n."""
        return sum(float(part.trace()) for part in self.parts) / sum(map(len, self.parts))

    def block(self, place: slice) -> Blocked:
        """The matrix between the parameters of one block."""
        if place in self.slices:
            return whole(self.parts[self.slices.index(place)])
        return whole(self.parts[0][place, place])


def whole(A: Tensor) -> Blocked:
    """Any matrix, as one block."""
    return Blocked([slice(0, len(A))], [A])


class Loss:
    """L(θ) of a problem with one batch, as a plain function of a vector, with its derivatives.

    Vectors of this study have one block after the other.
    """

    def __init__(self, problem: Problem):
        (self._batch,) = problem.placed_batches("loss")
        self._problem, self._space, self._total = problem, problem.space().in_blocks(), problem.num_terms

    def __call__(self, theta: Tensor) -> Tensor:
        """L(θ), to be differentiated any number of times."""
        problem, batch = self._problem, self._batch
        outputs = functional_call(problem.model.module, self._space.scatter(theta), (batch.inputs,))
        return problem.loss.sum(outputs, batch.targets, batch.weights) / self._total

    def value(self, theta: Tensor) -> float:
        """L(θ)."""
        with torch.no_grad():
            return float(self(theta))

    def gradient(self, theta: Tensor) -> tuple[float, Tensor]:
        """L(θ) and ∇L(θ)."""
        leaf = theta.detach().requires_grad_()
        value = self(leaf)
        return float(value.detach()), torch.autograd.grad(value, leaf)[0]

    def hessian(self, theta: Tensor) -> Tensor:
        """∇²L(θ): (n, n), forward over reverse, some columns at a time."""
        eye = torch.eye(len(theta), dtype=theta.dtype, device=theta.device)
        slope = grad(self)
        columns = vmap(lambda v: jvp(slope, (theta,), (v,))[1])
        H = torch.cat([columns(some) for some in eye.split(CHUNK)])
        return (H + H.T) / 2


def ggn_rows(problem: Problem) -> Tensor:
    """Rows r with G = Σ r rᵀ: (terms × classes, n)."""
    K = KFAC(problem, kind="ggn")
    found: list[list[Tensor]] = [[] for _ in K.layers]
    for piece in pieces(problem, K.layers, "rows", joint=True):
        inputs = [piece.inputs(layer) for layer in K.layers]
        for outputs in piece.gradients(K.curvature):
            for rows, a, g in zip(found, inputs, outputs, strict=True):
                rows += [X.flatten(0, 1).flatten(1) for X in whole_gradients(a, g)]
    return torch.cat([torch.cat(rows) for rows in found], dim=1) / problem.num_terms**0.5


def places(problem: Problem) -> dict[str, slice]:
    """Where the blocks lie in a vector, by name."""
    return problem.space().in_blocks().slices


def approximation(name: str, problem: Problem, rows: Tensor | None = None) -> Blocked:
    """One of APPROXIMATIONS at a problem's parameters; `rows` are `ggn_rows`, if they are there already."""
    return APPROXIMATIONS[name](problem, rows)


def _identity(problem: Problem, rows: Tensor | None) -> Blocked:
    R = ggn_rows(problem) if rows is None else rows
    mean, sizes = float(R.square().sum()) / R.shape[1], [s.stop - s.start for s in _slices(problem)]
    return Blocked(_slices(problem), [mean * torch.eye(size).to(R) for size in sizes])


def _diagonal(problem: Problem, rows: Tensor | None) -> Blocked:
    R = ggn_rows(problem) if rows is None else rows
    diagonal = R.square().sum(0)
    return Blocked(_slices(problem), [diagonal[s].diag() for s in _slices(problem)])


def _blocks(problem: Problem, rows: Tensor | None) -> Blocked:
    R = ggn_rows(problem) if rows is None else rows
    return Blocked(_slices(problem), [R[:, s].T @ R[:, s] for s in _slices(problem)])


def _ggn(problem: Problem, rows: Tensor | None) -> Blocked:
    R = ggn_rows(problem) if rows is None else rows
    return whole(R.T @ R)


def _slices(problem: Problem) -> list[slice]:
    return list(places(problem).values())


def _written_out(K: KroneckerOperator) -> Blocked:
    """A Kronecker-factored operator, block by block."""
    at = K.space.in_blocks().slices
    parts = []
    for layer, spectrum in zip(K.layers, K.spectra(), strict=True):
        m, n = layer.shape
        eye = torch.eye(m * n, dtype=K.dtype, device=K.device).reshape(m, n, m * n)
        parts.append(spectrum.times(eye).reshape(m * n, m * n))
    return Blocked([at[layer.name] for layer in K.layers], parts)


def _factored(make: Callable[[Problem], KroneckerOperator]) -> Callable[[Problem, Tensor | None], Blocked]:
    return lambda problem, rows: _written_out(make(problem))


APPROXIMATIONS: dict[str, Callable[[Problem, Tensor | None], Blocked]] = {
    IDENTITY: _identity,
    DIAGONAL: _diagonal,
    KFAC_NAME: _factored(lambda problem: KFAC(problem, kind="ggn")),
    EKFAC_NAME: _factored(lambda problem: EKFAC(problem, kind="ggn")),
    "shampoo": _factored(lambda problem: Shampoo(problem, kind="ggn")),
    "shampoo-squared": _factored(lambda problem: Shampoo(problem, kind="ggn", exponent=1.0)),
    BLOCKS: _blocks,
    GGN: _ggn,
}
"""By name: a function of a problem and of `ggn_rows`, where these are known."""
