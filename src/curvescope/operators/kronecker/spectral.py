"""Matrices with Kronecker eigenvectors, layer by layer: (Qᵣ ⊗ Q_c) diag(Λ) (Qᵣ ⊗ Q_c)ᵀ.

Functions of such a matrix only change Λ, so inverses, roots, logarithms and damping are exact.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final, get_args

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.operator.index import matching
from curvescope.operators.kronecker.layers import KroneckerLayer
from curvescope.operators.kronecker.moments import FactorPair

Split = Literal["exact", "pi"]


@dataclass(frozen=True)
class LayerSpectrum:
    """Spectrum of one layer: eigenvectors of both sides, (m, m) and (n, n), and eigenvalues Λ (m, n)."""

    vectors: FactorPair
    sides: (
        tuple[Tensor, Tensor] | None
    )  # eigenvalues of the factors, (m,) and (n,); None for a function of the matrix
    values: Tensor

    def times(self, X: Tensor) -> Tensor:
        """Multiply vectors of the layer, given as matrices (m, n, k)."""
        Qr, Qc = self.vectors
        turned = torch.einsum("mi,mnk,nj->ijk", Qr, X, Qc) * self.values[..., None]
        return torch.einsum("mi,ijk,nj->mnk", Qr, turned, Qc)

    def damped(self, damping: float, split: Split) -> Tensor:
        """Λ + δ, or the eigenvalues of (A + π√δ I) ⊗ (B + √δ/π I)."""
        if split == "exact":
            return self.values + damping
        if self.sides is None:
            raise UsageError(
                "split='pi' needs plain factors, not a function of them or damped ones",
                hint="split='exact'",
            )
        a, b = self.sides
        ratio = (float(a.mean()) / float(b.mean())) if float(b.mean()) > 0 < float(a.mean()) else 1.0
        pi, root = ratio**0.5, damping**0.5
        return torch.outer(a + pi * root, b + root / pi)


def eigen(pair: FactorPair) -> LayerSpectrum:
    """Eigenvectors of both factors, and products of their eigenvalues; negative rounding is zero."""
    pairs = [torch.linalg.eigh(factor.double()) for factor in pair]
    values = [w.clamp(min=0).to(pair.rows.dtype) for w, _ in pairs]
    vectors = FactorPair(*(Q.to(pair.rows.dtype) for _, Q in pairs))
    return LayerSpectrum(vectors, (values[0], values[1]), torch.outer(*values))


class KroneckerMatrix(LinearOperator):
    """A symmetric, positive semi-definite matrix over the blocks of some layers, and functions of it.

    Every product calls `spectra`, so the matrix and its functions follow the problem; `fixed()` does not.
    """

    symmetric = psd = True
    space: ParamSpace
    layers: tuple[KroneckerLayer, ...]

    @abstractmethod
    def spectra(self) -> Sequence[LayerSpectrum]:
        """Return current eigenvectors and eigenvalues of every layer, in the order of `layers`."""

    def _matmat(self, V: Tensor) -> Tensor:
        return layerwise(self.spectra(), self.layers, self.space, V)

    def inverse(self, damping: float = 0.0, *, split: Split = "exact") -> KroneckerMatrix:
        """Return (K + δ I)⁻¹, or with split="pi" (A + π√δ I)⁻¹ ⊗ (B + √δ/π I)⁻¹, π² = (tr A/m)/(tr B/n).

        It is symmetric and positive definite, so it can be a preconditioner. It follows the problem, like K.
        """
        return self._function(damping, split, lambda values: 1 / values)

    def inverse_root(
        self, damping: float = 0.0, *, power: float = 2.0, split: Split = "exact"
    ) -> KroneckerMatrix:
        """(K + δ I)^(−1/power)."""
        if not power > 0:
            raise UsageError(f"expected a power above 0, got {power!r}")
        return self._function(damping, split, lambda values: values ** (-1 / power))

    def root(self, *, power: float = 2.0) -> KroneckerMatrix:
        """K^(1/power)."""
        if not power > 0:
            raise UsageError(f"expected a power above 0, got {power!r}")

        def spectra() -> list[LayerSpectrum]:
            return [function_of(s, s.values ** (1 / power)) for s in self.spectra()]

        return KroneckerSpectral(self, spectra, self.space, self.layers)

    def _function(self, damping: float, split: Split, f: Callable[[Tensor], Tensor]) -> KroneckerMatrix:
        check_damping(damping, split)

        def spectra() -> list[LayerSpectrum]:
            pairs = zip(self.layers, self.spectra(), strict=True)
            return [function_of(s, f(invertible(layer, s.damped(damping, split)))) for layer, s in pairs]

        spectra()  # raises now if the matrix has no inverse
        return KroneckerSpectral(self, spectra, self.space, self.layers)

    def fixed(self) -> KroneckerMatrix:
        """Return the current matrix, which does not follow the problem, for use over several steps."""
        spectra = list(self.spectra())
        return KroneckerSpectral(None, lambda: spectra, self.space, self.layers)

    def block(self, blocks: str | Sequence[str]) -> LinearOperator:
        """Return the matrix between the blocks that match names or globs.

        A weight and its bias with joint factors are one layer. Complete layers also have inverses and roots,
        a part of a layer has only products.
        """
        patterns = [blocks] if isinstance(blocks, str) else list(blocks)
        chosen = matching(self.space, patterns)
        at = [i for i, layer in enumerate(self.layers) if chosen.issuperset(b.name for b in layer.blocks)]
        if sum(len(self.layers[i].blocks) for i in at) < len(chosen):
            return self.submatrix(patterns)
        space = self.space.only(chosen).in_blocks()
        return KroneckerSpectral(
            self, lambda: [self.spectra()[i] for i in at], space, tuple(self.layers[i] for i in at)
        )

    def in_blocks(self) -> KroneckerMatrix:
        """Return the same matrix with rows and columns in block order."""
        if not self.space.whole:
            return self
        return KroneckerSpectral(self, self.spectra, self.space.in_blocks(), self.layers)

    def trace(self) -> float:
        """tr K."""
        return math.fsum(float(s.values.sum()) for s in self.spectra())

    def logdet(self, damping: float = 0.0, *, split: Split = "exact") -> float:
        """log det(K + δ I)."""
        check_damping(damping, split)
        pairs = zip(self.layers, self.spectra(), strict=True)
        return math.fsum(
            float(invertible(x, s.damped(damping, split)).double().log().sum()) for x, s in pairs
        )


@final
class KroneckerSpectral(KroneckerMatrix):
    """A matrix from the spectra of its layers.

    `source` is the operator that computes the spectra and is frozen with this one; None if they are fixed.
    """

    def __init__(
        self,
        source: LinearOperator | None,
        spectra: Callable[[], Sequence[LayerSpectrum]],
        space: ParamSpace,
        layers: tuple[KroneckerLayer, ...],
    ):
        self.source, self._spectra = source, spectra
        self.space = self.columns = space
        self.layers = layers
        self.shape = (space.size, space.size)
        self.dtype, self.device = space.dtype, space.device

    def spectra(self) -> Sequence[LayerSpectrum]:
        return self._spectra()


def layerwise(
    spectra: Sequence[LayerSpectrum], layers: tuple[KroneckerLayer, ...], space: ParamSpace, V: Tensor
) -> Tensor:
    """Multiply columns (size, k), layer by layer."""
    product, k = torch.zeros_like(V, memory_format=torch.contiguous_format), V.shape[1]
    for layer, spectrum in zip(layers, spectra, strict=True):
        m, n = layer.shape
        X = torch.cat([space.view(V, block).reshape(block.size, k) for block in layer.blocks])
        parts = spectrum.times(X.view(m, n, k)).reshape(m * n, k).split([b.size for b in layer.blocks])
        for block, part in zip(layer.blocks, parts, strict=True):
            entries = space.view(product, block)
            entries.copy_(part.reshape(entries.shape))
    return product


def with_values(spectrum: LayerSpectrum, values: Tensor) -> LayerSpectrum:
    """Return the same eigenvectors with other eigenvalues."""
    return replace(spectrum, values=values)


def function_of(spectrum: LayerSpectrum, values: Tensor) -> LayerSpectrum:
    """Return the same eigenvectors with eigenvalues that are not products of the factors' eigenvalues."""
    return replace(spectrum, values=values, sides=None)


def check_damping(damping: float, split: Split) -> None:
    """Raise unless the damping is ≥ 0 and the split is known."""
    if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0 <= damping < float("inf"):
        raise UsageError(f"expected a damping of at least 0, got {damping!r}")
    if split not in get_args(Split):
        raise UsageError(f"expected split='exact' or 'pi', got {split!r}")


def invertible(layer: KroneckerLayer, values: Tensor) -> Tensor:
    """Return the values; raise if one of them is zero up to rounding."""
    largest = float(values.max())
    if not float(values.min()) > torch.finfo(values.dtype).eps * largest:
        raise CurvescopeError(
            f"the factors of {layer.name} are singular, so they have no inverse",
            hint="use a damping above 0",
        )
    return values
