"""Matrices with Kronecker eigenvectors, layer by layer: (Qᵣ ⊗ Q_c) diag(Λ) (Qᵣ ⊗ Q_c)ᵀ.

All functions of such a matrix change Λ alone: inverses, roots and logarithms are exact, damping too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final, get_args

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.operator import LinearOperator
from curvescope.operators.kronecker.layers import Layer
from curvescope.operators.kronecker.moments import Pair

Split = Literal["exact", "pi"]


@dataclass(frozen=True)
class Spectrum:
    """Of one layer: eigenvectors of both sides, (m, m) and (n, n), and eigenvalues Λ (m, n)."""

    vectors: Pair
    sides: tuple[Tensor, Tensor]  # eigenvalues of the factors, (m,) and (n,)
    values: Tensor

    def times(self, X: Tensor) -> Tensor:
        """The matrix on vectors of the layer as matrices: (m, n, k)."""
        Qr, Qc = self.vectors
        turned = torch.einsum("mi,mnk,nj->ijk", Qr, X, Qc) * self.values[..., None]
        return torch.einsum("mi,ijk,nj->mnk", Qr, turned, Qc)

    def damped(self, damping: float, split: Split) -> Tensor:
        """Λ + δ, or the eigenvalues of (A + π√δ I) ⊗ (B + √δ/π I)."""
        if split == "exact":
            return self.values + damping
        a, b = self.sides
        ratio = (float(a.mean()) / float(b.mean())) if float(b.mean()) > 0 < float(a.mean()) else 1.0
        pi, root = ratio**0.5, damping**0.5
        return torch.outer(a + pi * root, b + root / pi)


def eigen(pair: Pair) -> Spectrum:
    """Eigenvectors of both factors, and products of their eigenvalues; negative rounding is zero."""
    found = [torch.linalg.eigh(factor.double()) for factor in pair]
    values = [w.clamp(min=0).to(pair.rows.dtype) for w, _ in found]
    vectors = Pair(*(Q.to(pair.rows.dtype) for _, Q in found))
    return Spectrum(vectors, (values[0], values[1]), torch.outer(*values))


@final
class KroneckerSpectral(LinearOperator):
    """A symmetric matrix over the blocks of some layers, from the spectra of its layers.

    `source` is asked at every product, so that the spectra are those of the problem as it is.
    """

    symmetric = psd = True

    def __init__(
        self,
        source: LinearOperator | None,
        spectra: Callable[[], Sequence[Spectrum]],
        space: ParamSpace,
        layers: tuple[Layer, ...],
    ):
        self.source, self._spectra = source, spectra  # `source` is kept steady with this operator
        self.space = self.columns = space
        self.layers = layers
        self.shape = (space.size, space.size)
        self.dtype, self.device = space.dtype, space.device

    def spectra(self) -> Sequence[Spectrum]:
        """Of every layer, in the order of `layers`."""
        return self._spectra()

    def _matmat(self, V: Tensor) -> Tensor:
        return layerwise(self.spectra(), self.layers, self.space, V)


def layerwise(spectra: Sequence[Spectrum], layers: tuple[Layer, ...], space: ParamSpace, V: Tensor) -> Tensor:
    """The product with columns (size, k), layer by layer."""
    found, slices, k = torch.zeros_like(V), space.slices, V.shape[1]
    for layer, spectrum in zip(layers, spectra, strict=True):
        m, n = layer.shape
        at = [slices[block.name] for block in layer.blocks]
        X = torch.cat([V[s] for s in at]).reshape(m, n, k)
        done = spectrum.times(X).reshape(m * n, k).split([s.stop - s.start for s in at])
        for s, part in zip(at, done, strict=True):
            found[s] = part
    return found


def with_values(spectrum: Spectrum, values: Tensor) -> Spectrum:
    """The same eigenvectors with other eigenvalues."""
    return replace(spectrum, values=values)


def check_damping(damping: float, split: Split) -> None:
    """Raise unless these are a number ≥ 0 and a way to add it."""
    if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0 <= damping < float("inf"):
        raise UsageError(f"expected a damping of at least 0, got {damping!r}")
    if split not in get_args(Split):
        raise UsageError(f"expected split='exact' or 'pi', got {split!r}")


def invertible(layer: Layer, values: Tensor) -> Tensor:
    """The values; raise where one of them is zero to rounding."""
    largest = float(values.max())
    if not float(values.min()) > torch.finfo(values.dtype).eps * largest:
        raise CurvescopeError(
            f"the factors of {layer.name} are singular, so that they have no inverse",
            hint="give a damping above 0",
        )
    return values
