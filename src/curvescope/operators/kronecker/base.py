"""Base class of Kronecker-factored approximations: layers of a problem, their spectra, and functions of them.

Each is block-diagonal over layers, a layer a matrix m × n (inputs × outputs), row-major. Cached factors are
recomputed if the parameters or the data have changed, as in every operator here; `fixed()` returns the matrix
with the current factors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

from torch import Tensor

from curvescope.core.blocks import Block
from curvescope.core.errors import UsageError
from curvescope.engines import Engine
from curvescope.losses.custom import unsplit
from curvescope.operators.kronecker.cotangents import Curvature
from curvescope.operators.kronecker.layers import KroneckerLayer
from curvescope.operators.kronecker.moments import FactorPair
from curvescope.operators.kronecker.spectral import (
    KroneckerMatrix,
    LayerSpectrum,
    check_damping,
    function_of,
)
from curvescope.operators.kronecker.stream import search_layers
from curvescope.problem import Problem

Bias = Literal["joint", "separate"]
MAX_SIDE = 2**14  # largest number of rows of a factor, unless its block is requested by name


class KroneckerOperator(KroneckerMatrix):
    """A symmetric, positive semi-definite matrix over the linear layers of a problem: K + δ I.

    `space` contains the blocks that are matrices or biases of linear maps, including embeddings. `left_out`
    gives the reasons why other selected blocks are missing. A block that is selected by name must have
    factors.
    """

    def __init__(
        self,
        problem: Problem,
        blocks: tuple[str, ...],
        curvature: Curvature,
        *,
        bias: Bias,
        damping: float,
    ):
        if not isinstance(problem, Problem):
            raise UsageError(f"expected a cs.Problem, got {type(problem).__name__}")
        if bias not in get_args(Bias):
            raise UsageError(f"expected bias='joint' or 'separate', got {bias!r}")
        if not problem.loss.has_outputs:
            raise unsplit(type(self).__name__)
        if problem.model.spread is not None:
            raise UsageError("K-FAC's factors do not support a model that is sharded over ranks")
        if problem.model.widening is not None:
            raise UsageError(
                "K-FAC's factors do not support weights stored in half precision",
                hint="cs.load(…, dtype='float32')",
            )
        check_damping(damping, "exact")
        self.problem, self.curvature, self.bias, self.damping = problem, curvature, bias, float(damping)
        self.engine = Engine(problem, "autograd")
        whole = problem.space(*blocks)
        small = [b for b in whole.blocks if b.name in blocks or max(b.shape, default=1) <= MAX_SIDE]
        search = self.engine.consistent(lambda: search_layers(problem, small, curvature, joint=self.joint))
        self.layers, self.left_out = search.layers, search.left_out | _too_large(whole.blocks, small)
        _check_chosen(self.layers, self.left_out, blocks)
        used = {block.name for layer in self.layers for block in layer.blocks}
        self.space = self.columns = whole.only(used)
        self.shape = (self.space.size, self.space.size)
        self.dtype, self.device = problem.dtype, problem.device

    @abstractmethod
    def _pairs(self) -> list[FactorPair]:
        """Factors of every layer at the current parameters."""

    @abstractmethod
    def _spectrum(self, pairs: list[FactorPair]) -> list[LayerSpectrum]:
        """Spectra of every layer from its factors."""

    @property
    def joint(self) -> bool:
        """Return True if a bias shares its factors with its weights."""
        return self.bias == "joint"

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the undamped factors of a block's layer: of rows (inputs), (m, m), and columns, (n, n)."""
        at = [i for i, layer in enumerate(self.layers) if name in [b.name for b in layer.blocks]]
        if not at:
            raise UsageError(
                f"no layer of this operator holds {name!r}", hint=f"there are {_some(self.layers)}"
            )
        rows, columns = self.engine.consistent(self._cached_pairs)[at[0]]
        return rows.clone(), columns.clone()

    def spectra(self) -> Sequence[LayerSpectrum]:
        """Return eigenvectors and eigenvalues of every layer at the current parameters."""
        spectra_ = self.engine.consistent(self._cached_spectra)
        return [function_of(s, s.values + self.damping) for s in spectra_] if self.damping else spectra_

    def _cached_pairs(self) -> list[FactorPair]:
        return self.engine.keep("pairs", self._pairs, self._size())

    def _cached_spectra(self) -> list[LayerSpectrum]:
        return self.engine.keep("spectra", lambda: self._spectrum(self._cached_pairs()), 2 * self._size())

    def _size(self) -> int:
        return sum(m * m + n * n for m, n in (layer.shape for layer in self.layers)) * 8

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Declare the model and the data constant inside; raise at the end if they have changed."""
        with self.engine.frozen():
            yield


def _too_large(blocks: Sequence[Block], small: Sequence[Block]) -> dict[str, str]:
    """Return the reasons why blocks that are not among the small ones are left out."""
    sides = {block.name: max(block.shape) for block in blocks if block not in small}
    return {
        name: f"a factor of it is {n} × {n}; select it by name to include it" for name, n in sides.items()
    }


def _check_chosen(
    layers: tuple[KroneckerLayer, ...], left_out: Mapping[str, str], patterns: tuple[str, ...]
) -> None:
    """Raise if a block that was selected by name has no factors, or if no block has factors."""
    left_out_names = [name for name in patterns if name in left_out]
    if left_out_names:
        raise UsageError(
            f"{left_out_names[0]} has no Kronecker factors: {left_out[left_out_names[0]]}",
            hint="a glob leaves out norms, added positions and the like",
        )
    if not layers:
        selection = ", ".join(patterns) or "the blocks"
        raise UsageError(f"none of {selection} is the matrix or the bias of a linear map")


def _some(layers: tuple[KroneckerLayer, ...]) -> str:
    return ", ".join(layer.name for layer in layers[:4]) + (", …" if len(layers) > 4 else "")
