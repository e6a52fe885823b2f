"""Who removes weights of a block: with its GGN written out, or, where that is too large, by products.

Both damp by λ = damping · mean diagonal. The GGN is positive semi-definite; for cross-entropy it is the
Fisher with targets drawn from the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.estimates.diagonal import diagonal
from curvescope.algorithms.surgery.matrix_free import remove_by_products
from curvescope.algorithms.surgery.removal import Removal, damped_inverse, eliminate, remove, saliencies
from curvescope.core.result import Result
from curvescope.operators import GGN, KFAC, EmpiricalFisher, exact_diagonal
from curvescope.operators.kronecker.spectral import Spectrum
from curvescope.problem import Problem

NUM_ROOTS = 32  # random squares, for a diagonal that is not written out
MOST_LEFT = 3000  # weights whose inverse is written out
DENSE, PRODUCTS = "dense", "products"


@dataclass(frozen=True)
class DenseBlock(Result):
    """The GGN of a block, or of some of its weights."""

    matrix: np.ndarray  # (n, n)


def dense_block(op: GGN, left: Tensor | None = None) -> DenseBlock:
    """Written out; with `left`, a mask (n,), over these weights alone."""
    G = (op if left is None else op.submatrix(left)).to_dense().cpu().numpy()
    return DenseBlock((G + G.T) / 2)


class Surgeon(ABC):
    """Removes weights of one block at one point."""

    how: str
    diagonal: Tensor  # (n,) of the GGN
    damping: float  # λ

    @abstractmethod
    def saliencies(self, w: Tensor) -> Tensor:
        """w_q² / (2 [H⁻¹]_qq): (n,)."""

    @abstractmethod
    def remove(self, w: Tensor, removed: Tensor) -> tuple[Removal, float]:
        """The change that takes these weights to zero, and the relative residual of its system."""

    def order(self, w: Tensor, count: int) -> Tensor | None:
        """The first weights to go, one after the other; None where that takes too long."""
        return None


@final
class DenseSurgeon(Surgeon):
    """With the inverse of the block."""

    how = DENSE

    def __init__(self, G: Tensor, damping: float):
        self.inverse, self.damping = damped_inverse(G, damping)
        self.diagonal = G.diagonal().clone()

    def saliencies(self, w: Tensor) -> Tensor:
        return saliencies(w, self.inverse.diagonal())

    def remove(self, w: Tensor, removed: Tensor) -> tuple[Removal, float]:
        return remove(w, self.inverse, removed), 0.0

    def order(self, w: Tensor, count: int) -> Tensor | None:
        return eliminate(w, self.inverse, count).order


@final
class ProductSurgeon(Surgeon):
    """Saliencies from the inverse of K-FAC, removal by conjugate gradients with the GGN itself.

    With K = A ⊗ B = Q diag(Λ) Qᵀ, Q = Qᵣ ⊗ Q_c, the diagonal of (K + λ I)⁻¹ is
    (Qᵣ∘Qᵣ) (1/(Λ + λ)) (Q_c∘Q_c)ᵀ. Where only some weights are left, at most `MOST_LEFT`, the inverse is that
    of K over these, written out. For more of them it is an approximation, from the inverse over all weights,
    as if those that are gone could still make up for others: saliencies come out too small.
    """

    how = PRODUCTS

    def __init__(self, op: GGN, damping: float, seed: int, left: Tensor | None = None):
        self.op = op if left is None else op.submatrix(left)
        whole = diagonal(op, num_probes=NUM_ROOTS, method="roots", seed=seed).values
        self.diagonal = whole if left is None else whole[left]
        self.damping = damping * float(self.diagonal.mean())
        self._whole, self._left, self._seed = op, left, seed

    def saliencies(self, w: Tensor) -> Tensor:
        (block,) = self._whole.space
        K = KFAC(self._whole.problem, block.name, bias="separate", seed=self._seed)
        (spectrum,), (layer,) = K.spectra(), K.layers
        own = K.space.positions(layer.blocks[0]).to(w.device)  # of the layer's entries, inputs × outputs
        found = w.new_empty(len(own))
        if self._left is not None and len(w) <= MOST_LEFT:
            left = self._left[own]
            found[own[left]] = _inverse_diagonal(_entries(spectrum, left), self.damping)
        else:
            Qr, Qc = spectrum.vectors
            found[own] = (Qr.square() @ (1 / (spectrum.values + self.damping)) @ Qc.square().T).flatten()
        return saliencies(w, found if self._left is None else found[self._left])

    def remove(self, w: Tensor, removed: Tensor) -> tuple[Removal, float]:
        return remove_by_products(w, self.op, removed, damping=self.damping)


def _entries(spectrum: Spectrum, left: Tensor) -> Tensor:
    """K over weights that are left, a mask (m n,): A_ik B_jl for the weights (i, j) and (k, l)."""
    assert spectrum.sides is not None, "factors as they are have eigenvalues of their own"
    A, B = ((Q * side) @ Q.T for Q, side in zip(spectrum.vectors, spectrum.sides, strict=True))
    i, j = left.view(len(A), len(B)).nonzero(as_tuple=True)
    return A[i][:, i] * B[j][:, j]


def _inverse_diagonal(K: Tensor, shift: float) -> Tensor:
    """Of (K + λ I)⁻¹."""
    system = K + shift * torch.eye(len(K), dtype=K.dtype, device=K.device)
    return torch.cholesky_inverse(torch.linalg.cholesky(system)).diagonal()


def fisher_diagonal(problem: Problem, block: str) -> Tensor:
    """The diagonal of the empirical Fisher, exactly: (n,)."""
    return exact_diagonal(EmpiricalFisher(problem, block), way="outputs").values
