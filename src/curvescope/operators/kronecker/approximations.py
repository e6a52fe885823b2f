"""K-FAC, EK-FAC and Shampoo-like approximations of the curvature of linear layers, as operators.

    KFAC      A ⊗ B, from moments of inputs and of output gradients apart (Martens & Grosse, 2015)
    EKFAC     its eigenvectors, with the curvature's own diagonal in them (George et al., 2018)
    Shampoo   tr(L)^(1−2e) (L ⊗ R)^e with L = (1/N) Σ G Gᵀ, R = (1/N) Σ Gᵀ G (Gupta et al., 2018: e = 1/2)

Each is block-diagonal over layers, a layer a matrix m × n (inputs × outputs), row-major. They are numbers of a
model at its parameters and data: what is kept is looked at before every product and made anew where either has
changed, as with every operator here; `fixed()` is for those who want yesterday's factors.
"""

from __future__ import annotations

import fnmatch
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, final, get_args

from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.engines import Engine
from curvescope.operators.kronecker.cotangents import Curvature, Kind, Terms
from curvescope.operators.kronecker.layers import MAX_SIDE, Found, Layer
from curvescope.operators.kronecker.moments import Pair, Sharing, eigenvalues_in, kfac_factors, shampoo_factors
from curvescope.operators.kronecker.spectral import (
    KroneckerSpectral,
    Spectrum,
    Split,
    check_damping,
    eigen,
    invertible,
    layerwise,
    with_values,
)
from curvescope.operators.kronecker.stream import first_layers
from curvescope.problem import Problem

Bias = Literal["joint", "separate"]


class KroneckerOperator(LinearOperator):
    """What the approximations share: layers of a problem, their spectra, and functions of them.

    `space` holds the blocks that are matrices or biases of linear maps, embeddings among them; `left_out` says
    why others of the selection are not in it. A block that is asked for by its name must be one.
    """

    symmetric = psd = True

    def __init__(self, problem: Problem, blocks: tuple[str, ...], curvature: Curvature, bias: Bias):
        if not isinstance(problem, Problem):
            raise UsageError(f"expected a cs.Problem, got {type(problem).__name__}")
        if bias not in get_args(Bias):
            raise UsageError(f"expected bias='joint' or 'separate', got {bias!r}")
        self.problem, self.curvature, self.bias = problem, curvature, bias
        self.engine = Engine(problem, "autograd")
        whole = problem.space(*blocks)
        found = self.engine.product(lambda: first_layers(problem, whole.blocks, curvature, joint=self.joint))
        self.layers, self.left_out = _chosen(found, blocks)
        kept = {block.name for layer in self.layers for block in layer.blocks}
        self.space = self.columns = problem.space(*(b.name for b in whole.blocks if b.name in kept))
        self.shape = (self.space.size, self.space.size)
        self.dtype, self.device = problem.dtype, problem.device

    @abstractmethod
    def _pairs(self) -> list[Pair]:
        """Factors of every layer at the problem as it is."""

    @abstractmethod
    def _spectrum(self, pairs: list[Pair]) -> list[Spectrum]:
        """Spectra of every layer from its factors."""

    @property
    def joint(self) -> bool:
        """Whether a bias has its factors with its weights."""
        return self.bias == "joint"

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """The factors of the layer that holds a block: of its rows (inputs), (m, m), and columns, (n, n)."""
        at = [i for i, layer in enumerate(self.layers) if name in [b.name for b in layer.blocks]]
        if not at:
            raise UsageError(f"no layer of this operator holds {name!r}", hint=f"there are {_some(self.layers)}")
        rows, columns = self.engine.product(self._kept_pairs)[at[0]]
        return rows.clone(), columns.clone()

    def spectra(self) -> Sequence[Spectrum]:
        """Eigenvectors and eigenvalues of every layer, at the problem as it is."""
        return self.engine.product(self._kept_spectra)

    def _kept_pairs(self) -> list[Pair]:
        return self.engine.keep("pairs", self._pairs, self._size())

    def _kept_spectra(self) -> list[Spectrum]:
        return self.engine.keep("spectra", lambda: self._spectrum(self._kept_pairs()), 2 * self._size())

    def _size(self) -> int:
        return sum(m * m + n * n for m, n in (layer.shape for layer in self.layers)) * 8

    def _matmat(self, V: Tensor) -> Tensor:
        return layerwise(self.spectra(), self.layers, self.space, V)

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Products inside belong together: an error at the end if the model or the data have changed."""
        with self.engine.steady():
            yield

    def inverse(self, damping: float = 0.0, *, split: Split = "exact") -> LinearOperator:
        """(K + δ I)⁻¹, or with split="pi" (A + π√δ I)⁻¹ ⊗ (B + √δ/π I)⁻¹, π² = (tr A/m)/(tr B/n).

        Symmetric and positive definite: a preconditioner. It follows the problem, as K itself does.
        """
        return self._function(damping, split, lambda values: 1 / values)

    def inverse_root(self, damping: float = 0.0, *, power: float = 2.0, split: Split = "exact") -> LinearOperator:
        """(K + δ I)^(−1/power)."""
        if not power > 0:
            raise UsageError(f"expected a power above 0, got {power!r}")
        return self._function(damping, split, lambda values: values ** (-1 / power))

    def root(self, *, power: float = 2.0) -> LinearOperator:
        """K^(1/power)."""
        if not power > 0:
            raise UsageError(f"expected a power above 0, got {power!r}")

        def spectra() -> list[Spectrum]:
            return [with_values(s, s.values ** (1 / power)) for s in self.spectra()]

        return KroneckerSpectral(self, spectra, self.space, self.layers)

    def _function(self, damping: float, split: Split, f: Callable[[Tensor], Tensor]) -> LinearOperator:
        check_damping(damping, split)

        def spectra() -> list[Spectrum]:
            pairs = zip(self.layers, self.spectra(), strict=True)
            return [with_values(s, f(invertible(layer, s.damped(damping, split)))) for layer, s in pairs]

        spectra()  # a matrix without an inverse is said now
        return KroneckerSpectral(self, spectra, self.space, self.layers)

    def fixed(self) -> LinearOperator:
        """The matrix as it is now, which does not follow the problem: for factors that are kept over steps."""
        spectra = list(self.spectra())
        return KroneckerSpectral(None, lambda: spectra, self.space, self.layers)

    def trace(self) -> float:
        """tr K."""
        return math.fsum(float(s.values.sum()) for s in self.spectra())

    def logdet(self, damping: float = 0.0, *, split: Split = "exact") -> float:
        """log det(K + δ I)."""
        check_damping(damping, split)
        pairs = zip(self.layers, self.spectra(), strict=True)
        return math.fsum(float(invertible(x, s.damped(damping, split)).double().log().sum()) for x, s in pairs)


@final
class KFAC(KroneckerOperator):
    """A ⊗ B for every layer: second moments of its inputs, and of the gradients of its outputs.

    Equal to the GGN's blocks where inputs and gradients are independent: for one row of data, and for squared
    error in a deep linear network.

    Args:
        problem: A `cs.Problem`.
        blocks: Names and globs; all blocks without one.
        kind: Of the gradients: `ggn`, exact; `mc`, targets drawn from the model; `empirical`, the data's own;
            `forward-only`, B = I.
        sharing: `expand` or `reduce` (Eschenhagen et al., 2023): rows of a sequence are data, or are summed.
        bias: `joint` with its weights, a layer of inputs [a; 1], or `separate`.
        terms: Whether the terms of a sequence go back through the network separately or together; `auto` is
            together for `mc`, where both have one expectation, and separately for the rest.
        mc_samples: Draws per term.
        seed: Of the draws.
    """

    def __init__(
        self,
        problem: Problem,
        *blocks: str,
        kind: Kind = "mc",
        sharing: Sharing = "expand",
        bias: Bias = "joint",
        terms: Terms = "auto",
        mc_samples: int = 1,
        seed: int = 0,
    ):
        _check_sharing(sharing)
        self.sharing: Sharing = sharing
        super().__init__(problem, blocks, Curvature(kind, terms, mc_samples, seed), bias)

    def _pairs(self) -> list[Pair]:
        return kfac_factors(self.problem, self.layers, self.curvature, self.sharing, joint=self.joint)

    def _spectrum(self, pairs: list[Pair]) -> list[Spectrum]:
        return [eigen(pair) for pair in pairs]


@final
class EKFAC(KroneckerOperator):
    """K-FAC's eigenvectors with Λ = (1/N) Σ (Qᵣᵀ G Q_c)², the diagonal of the curvature in them.

    Of all matrices with these eigenvectors it is the nearest to the curvature, in the Frobenius norm.

    Args:
        problem: A `cs.Problem`.
        blocks: Names and globs; all blocks without one.
        kind: As in `KFAC`, without `forward-only`.
        sharing: Of the factors whose eigenvectors are taken; Λ is exact for either.
        bias: As in `KFAC`.
        terms: As in `KFAC`.
        mc_samples: Draws per term.
        seed: Of the draws.
    """

    def __init__(
        self,
        problem: Problem,
        *blocks: str,
        kind: Kind = "mc",
        sharing: Sharing = "expand",
        bias: Bias = "joint",
        terms: Terms = "auto",
        mc_samples: int = 1,
        seed: int = 0,
    ):
        _check_sharing(sharing)
        _refuse_forward_only(kind, "EKFAC")
        self.sharing: Sharing = sharing
        super().__init__(problem, blocks, Curvature(kind, terms, mc_samples, seed), bias)

    def _pairs(self) -> list[Pair]:
        return kfac_factors(self.problem, self.layers, self.curvature, self.sharing, joint=self.joint)

    def _spectrum(self, pairs: list[Pair]) -> list[Spectrum]:
        found = [eigen(pair) for pair in pairs]
        bases = [s.vectors for s in found]
        values = eigenvalues_in(self.problem, self.layers, self.curvature, bases, joint=self.joint)
        return [with_values(s, own) for s, own in zip(found, values, strict=True)]


@final
class Shampoo(KroneckerOperator):
    """tr(L)^(1−2e) (L ⊗ R)^e with L = (1/N) Σ G Gᵀ and R = (1/N) Σ Gᵀ G over gradients G of the terms.

    `exponent=0.5` is Gupta et al. (2018), whose step is K^(−1/2) g = L^(−1/4) G R^(−1/4); `exponent=1` is its
    square, L ⊗ R / tr L, with the curvature's trace (Morwani et al., 2024).

    Args:
        problem: A `cs.Problem`.
        blocks: Names and globs; all blocks without one.
        exponent: e.
        kind: Of the gradients, as in `KFAC` without `forward-only`.
        bias: As in `KFAC`.
        terms: `separate`, one G for every term, or `together`, one for every sequence.
        mc_samples: Draws per term.
        seed: Of the draws.
    """

    def __init__(
        self,
        problem: Problem,
        *blocks: str,
        exponent: float = 0.5,
        kind: Kind = "empirical",
        bias: Bias = "joint",
        terms: Terms = "auto",
        mc_samples: int = 1,
        seed: int = 0,
    ):
        if isinstance(exponent, bool) or not isinstance(exponent, int | float) or not 0 < exponent <= 1:
            raise UsageError(f"expected an exponent in (0, 1], got {exponent!r}")
        _refuse_forward_only(kind, "Shampoo")
        self.exponent = float(exponent)
        super().__init__(problem, blocks, Curvature(kind, terms, mc_samples, seed), bias)

    def _pairs(self) -> list[Pair]:
        return shampoo_factors(self.problem, self.layers, self.curvature, joint=self.joint)

    def _spectrum(self, pairs: list[Pair]) -> list[Spectrum]:
        found, e = [], self.exponent
        for spectrum, pair in zip(map(eigen, pairs), pairs, strict=True):
            trace = float(pair.rows.trace())
            scale = trace ** (1 - 2 * e) if trace > 0 else 1.0
            found.append(with_values(spectrum, scale * spectrum.values**e))
        return found


def _chosen(found: Found, patterns: tuple[str, ...]) -> tuple[tuple[Layer, ...], dict[str, str]]:
    """Layers whose factors are of a size that was asked for, and why other blocks are left out."""
    left_out = dict(found.left_out)
    for layer in found.layers:
        if max(layer.shape) > MAX_SIDE and not any(block.name in patterns for block in layer.blocks):
            side = max(layer.shape)
            left_out |= {b.name: f"a factor of it is {side} × {side}; ask for it by name" for b in layer.blocks}
    asked = [name for name in patterns if name in left_out]
    if asked:
        raise UsageError(
            f"{asked[0]} has no Kronecker factors: {left_out[asked[0]]}",
            hint="norms, positions that are added and the like are left out of a glob",
        )
    layers = tuple(layer for layer in found.layers if layer.name not in left_out)
    if not layers:
        raise UsageError(f"none of {', '.join(patterns) or 'the blocks'} is the matrix or bias of a linear map")
    return layers, left_out


def _some(layers: tuple[Layer, ...]) -> str:
    return ", ".join(layer.name for layer in layers[:4]) + (", …" if len(layers) > 4 else "")


def _check_sharing(sharing: Sharing) -> None:
    if sharing not in get_args(Sharing):
        raise UsageError(f"expected sharing='expand' or 'reduce', got {sharing!r}")


def _refuse_forward_only(kind: Kind, name: str) -> None:
    if kind == "forward-only":
        raise UsageError(f"{name} needs gradients, which kind='forward-only' has none of", hint="cs.KFAC takes it")
