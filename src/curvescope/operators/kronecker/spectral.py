"""Matrices with Kronecker eigenvectors, layer by layer: (Qᵣ ⊗ Q_c) diag(Λ) (Qᵣ ⊗ Q_c)ᵀ.

All functions of such a matrix change Λ alone: inverses, roots and logarithms are exact, damping too.
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
from curvescope.operators.kronecker.moments import Pair

Split = Literal["exact", "pi"]


@dataclass(frozen=True)
class Spectrum:
    """Spectrum of one layer: eigenvectors of both sides, (m, m) and (n, n), and eigenvalues Λ (m, n)."""

    vectors: Pair
    sides: (
        tuple[Tensor, Tensor] | None
    )  # eigenvalues of the factors, (m,) and (n,); None of a function of them
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
        if self.sides is None:
            raise UsageError(
                "split='pi' is for factors as they are, not for a function of them or damped ones",
                hint="split='exact'",
            )
        a, b = self.sides
        ratio = (float(a.mean()) / float(b.mean())) if float(b.mean()) > 0 < float(a.mean()) else 1.0
        pi, root = ratio**0.5, damping**0.5
        return torch.outer(a + pi * root, b + root / pi)


def eigen(pair: Pair) -> Spectrum:
    """Eigenvectors of both factors, and products of their eigenvalues; negative rounding is zero."""
    pairs = [torch.linalg.eigh(factor.double()) for factor in pair]
    values = [w.clamp(min=0).to(pair.rows.dtype) for w, _ in pairs]
    vectors = Pair(*(Q.to(pair.rows.dtype) for _, Q in pairs))
    return Spectrum(vectors, (values[0], values[1]), torch.outer(*values))


class KroneckerMatrix(LinearOperator):
    """A symmetric, positive semi-definite matrix over the blocks of some layers, and functions of it.

    `spectra` is asked at every product; functions follow it. `fixed()` is the matrix of this moment.
    """

    symmetric = psd = True
    space: ParamSpace
    layers: tuple[KroneckerLayer, ...]

    @abstractmethod
    def spectra(self) -> Sequence[Spectrum]:
        """Eigenvectors and eigenvalues of every layer, in the order of `layers`, as they are now."""

    def _matmat(self, V: Tensor) -> Tensor:
        return layerwise(self.spectra(), self.layers, self.space, V)

    def inverse(self, damping: float = 0.0, *, split: Split = "exact") -> KroneckerMatrix:
        """(K + δ I)⁻¹, or with split="pi" (A + π√δ I)⁻¹ ⊗ (B + √δ/π I)⁻¹, π² = (tr A/m)/(tr B/n).

        Symmetric and positive definite: a preconditioner. It follows the problem, as K itself does.
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

        def spectra() -> list[Spectrum]:
            return [function_of(s, s.values ** (1 / power)) for s in self.spectra()]

        return KroneckerSpectral(self, spectra, self.space, self.layers)

    def _function(self, damping: float, split: Split, f: Callable[[Tensor], Tensor]) -> KroneckerMatrix:
        check_damping(damping, split)

        def spectra() -> list[Spectrum]:
            pairs = zip(self.layers, self.spectra(), strict=True)
            return [function_of(s, f(invertible(layer, s.damped(damping, split)))) for layer, s in pairs]

        spectra()  # a matrix without an inverse is said now
        return KroneckerSpectral(self, spectra, self.space, self.layers)

    def fixed(self) -> KroneckerMatrix:
        """The matrix as it is now, which does not follow the problem: factors to be kept over steps."""
        spectra = list(self.spectra())
        return KroneckerSpectral(None, lambda: spectra, self.space, self.layers)

    def block(self, blocks: str | Sequence[str]) -> LinearOperator:
        """The matrix between the blocks that match names or globs.

        A weight and its bias with joint factors are one layer: of whole layers inverses and roots are known
        too, of a part of one only products.
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
        """The same matrix with rows and columns one block after the other."""
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

    `source` is what the spectra come from, frozen with this operator; None where they are fixed.
    """

    def __init__(
        self,
        source: LinearOperator | None,
        spectra: Callable[[], Sequence[Spectrum]],
        space: ParamSpace,
        layers: tuple[KroneckerLayer, ...],
    ):
        self.source, self._spectra = source, spectra
        self.space = self.columns = space
        self.layers = layers
        self.shape = (space.size, space.size)
        self.dtype, self.device = space.dtype, space.device

    def spectra(self) -> Sequence[Spectrum]:
        return self._spectra()


def layerwise(
    spectra: Sequence[Spectrum], layers: tuple[KroneckerLayer, ...], space: ParamSpace, V: Tensor
) -> Tensor:
    """The product with columns (size, k), layer by layer."""
    product, k = torch.zeros_like(V, memory_format=torch.contiguous_format), V.shape[1]
    for layer, spectrum in zip(layers, spectra, strict=True):
        m, n = layer.shape
        X = torch.cat([space.view(V, block).reshape(block.size, k) for block in layer.blocks])
        parts = spectrum.times(X.view(m, n, k)).reshape(m * n, k).split([b.size for b in layer.blocks])
        for block, part in zip(layer.blocks, parts, strict=True):
            place = space.view(product, block)
            place.copy_(part.reshape(place.shape))
    return product


def with_values(spectrum: Spectrum, values: Tensor) -> Spectrum:
    """The same eigenvectors with other eigenvalues."""
    return replace(spectrum, values=values)


def function_of(spectrum: Spectrum, values: Tensor) -> Spectrum:
    """The same eigenvectors with eigenvalues that are not products of those of the factors."""
    return replace(spectrum, values=values, sides=None)


def check_damping(damping: float, split: Split) -> None:
    """Raise unless these are a number ≥ 0 and a way to add it."""
    if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0 <= damping < float("inf"):
        raise UsageError(f"expected a damping of at least 0, got {damping!r}")
    if split not in get_args(Split):
        raise UsageError(f"expected split='exact' or 'pi', got {split!r}")


def invertible(layer: KroneckerLayer, values: Tensor) -> Tensor:
    """The values; raise where one of them is zero to rounding."""
    largest = float(values.max())
    if not float(values.min()) > torch.finfo(values.dtype).eps * largest:
        raise CurvescopeError(
            f"the factors of {layer.name} are singular, so that they have no inverse",
            hint="give a damping above 0",
        )
    return values
