"""K-FAC, EK-FAC and Shampoo-like approximations of the curvature of linear layers, as operators.

KFAC      A ⊗ B, from separate moments of inputs and output gradients (Martens & Grosse, 2015)
EKFAC     its eigenvectors, with the curvature's own diagonal in them (George et al., 2018)
Shampoo   tr(L)^(1−2e) (L ⊗ R)^e with L = (1/N) Σ G Gᵀ, R = (1/N) Σ Gᵀ G (Gupta et al., 2018: e = 1/2)
"""

from __future__ import annotations

from typing import final, get_args

from curvescope.core.errors import UsageError
from curvescope.operators.kronecker.base import Bias, KroneckerOperator
from curvescope.operators.kronecker.cotangents import Curvature, Kind, Terms
from curvescope.operators.kronecker.moments import (
    FactorPair,
    Sharing,
    eigenvalues_in,
    kfac_factors,
    shampoo_factors,
)
from curvescope.operators.kronecker.spectral import LayerSpectrum, eigen, with_values
from curvescope.problem import Problem


@final
class KFAC(KroneckerOperator):
    """A ⊗ B for every layer: second moments of its inputs, and of the gradients of its outputs.

    It equals the GGN's blocks if inputs and gradients are independent: for one row of data, and for squared
    error in a deep linear network.

    Args:
        problem: A `cs.Problem`.
        blocks: Names and globs; all blocks without one.
        kind: Gradients: `ggn`, exact; `mc`, at targets drawn from the model; `empirical`, at the data's
            targets; `forward-only`, B = I.
        sharing: `expand` or `reduce` (Eschenhagen et al., 2023): rows of a sequence are data, or are summed.
        bias: `joint` with its weights, as a layer with inputs [a; 1], or `separate`.
        terms: Reverse passes for the terms of a sequence: `separate` or `together`. `auto` means together for
            `mc`, which does not change the expectation, and separate otherwise.
        num_samples: Draws per term.
        seed: Of the draws.
        damping: δ of K + δ I.
    """

    def __init__(
        self,
        problem: Problem,
        *blocks: str,
        kind: Kind = "mc",
        sharing: Sharing = "expand",
        bias: Bias = "joint",
        terms: Terms = "auto",
        num_samples: int = 1,
        seed: int = 0,
        damping: float = 0.0,
    ):
        _check_sharing(sharing)
        self.sharing: Sharing = sharing
        super().__init__(
            problem, blocks, Curvature(kind, terms, num_samples, seed), bias=bias, damping=damping
        )

    def _pairs(self) -> list[FactorPair]:
        return kfac_factors(self.problem, self.layers, self.curvature, self.sharing, joint=self.joint)

    def _spectrum(self, pairs: list[FactorPair]) -> list[LayerSpectrum]:
        return [eigen(pair) for pair in pairs]


@final
class EKFAC(KroneckerOperator):
    """K-FAC's eigenvectors with Λ = (1/N) Σ (Qᵣᵀ G Q_c)², the diagonal of the curvature in them.

    Among the matrices with these eigenvectors, it is closest to the curvature in the Frobenius norm.

    Args:
        problem: A `cs.Problem`.
        blocks: Names and globs; all blocks without one.
        kind: Like in `KFAC`, without `forward-only`.
        sharing: Sharing of the factors for the eigenvectors; Λ is exact for both.
        bias: As in `KFAC`.
        terms: As in `KFAC`.
        num_samples: Draws per term.
        seed: Of the draws.
        damping: δ of K + δ I.
    """

    def __init__(
        self,
        problem: Problem,
        *blocks: str,
        kind: Kind = "mc",
        sharing: Sharing = "expand",
        bias: Bias = "joint",
        terms: Terms = "auto",
        num_samples: int = 1,
        seed: int = 0,
        damping: float = 0.0,
    ):
        _check_sharing(sharing)
        _refuse_forward_only(kind, "EKFAC")
        self.sharing: Sharing = sharing
        super().__init__(
            problem, blocks, Curvature(kind, terms, num_samples, seed), bias=bias, damping=damping
        )

    def _pairs(self) -> list[FactorPair]:
        return kfac_factors(self.problem, self.layers, self.curvature, self.sharing, joint=self.joint)

    def _spectrum(self, pairs: list[FactorPair]) -> list[LayerSpectrum]:
        spectra = [eigen(pair) for pair in pairs]
        bases = [s.vectors for s in spectra]
        values = eigenvalues_in(self.problem, self.layers, self.curvature, bases, joint=self.joint)
        return [with_values(s, diagonal) for s, diagonal in zip(spectra, values, strict=True)]


@final
class Shampoo(KroneckerOperator):
    """tr(L)^(1−2e) (L ⊗ R)^e with L = (1/N) Σ G Gᵀ and R = (1/N) Σ Gᵀ G over gradients G of the terms.

    `exponent=0.5` is Gupta et al. (2018), whose step is K^(−1/2) g = L^(−1/4) G R^(−1/4); `exponent=1` is its
    square, L ⊗ R / tr L, with the curvature's trace (Morwani et al., 2025).

    Args:
        problem: A `cs.Problem`.
        blocks: Names and globs; all blocks without one.
        exponent: e.
        kind: Gradients, like in `KFAC`, without `forward-only`.
        bias: As in `KFAC`.
        terms: `separate`: one G per term; `together`: one G per sequence.
        num_samples: Draws per term.
        seed: Of the draws.
        damping: δ of K + δ I.
    """

    def __init__(
        self,
        problem: Problem,
        *blocks: str,
        exponent: float = 0.5,
        kind: Kind = "empirical",
        bias: Bias = "joint",
        terms: Terms = "auto",
        num_samples: int = 1,
        seed: int = 0,
        damping: float = 0.0,
    ):
        if isinstance(exponent, bool) or not isinstance(exponent, int | float) or not 0 < exponent <= 1:
            raise UsageError(f"expected an exponent in (0, 1], got {exponent!r}")
        _refuse_forward_only(kind, "Shampoo")
        self.exponent = float(exponent)
        super().__init__(
            problem, blocks, Curvature(kind, terms, num_samples, seed), bias=bias, damping=damping
        )

    def _pairs(self) -> list[FactorPair]:
        return shampoo_factors(self.problem, self.layers, self.curvature, joint=self.joint)

    def _spectrum(self, pairs: list[FactorPair]) -> list[LayerSpectrum]:
        spectra, e = [], self.exponent
        for spectrum, pair in zip(map(eigen, pairs), pairs, strict=True):
            trace = float(pair.rows.trace())
            scale = trace ** (1 - 2 * e) if trace > 0 else 1.0
            spectra.append(with_values(spectrum, scale * spectrum.values**e))
        return spectra


def _check_sharing(sharing: Sharing) -> None:
    if sharing not in get_args(Sharing):
        raise UsageError(f"expected sharing='expand' or 'reduce', got {sharing!r}")


def _refuse_forward_only(kind: Kind, name: str) -> None:
    if kind == "forward-only":
        raise UsageError(f"{name} needs gradients, but kind='forward-only' computes none", hint="use cs.KFAC")
