"""Engines: how the product of one batch is executed. An engine knows nothing of spaces or normalisation.

Every method takes trees: tangents are {parameter: (k, *shape)}, k directions at once, and results are
the same for the parameters in `rows`. A parameter that a result does not depend on may be missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from curvescope.core.errors import UsageError, near_misses
from curvescope.data.batches import Batch
from curvescope.problem import Problem

Tree = dict[str, Tensor]
Scalar = Callable[[Tensor], Tensor]
"""A scalar of the outputs, whose second derivative in the parameters is asked for."""
EngineName = Literal["auto", "autograd"]


class Engine(ABC):
    """Products of one batch."""

    name: str

    @abstractmethod
    def second_derivative(
        self,
        problem: Problem,
        batch: Batch,
        scalar: Scalar,
        rows: tuple[str, ...],
        tangents: Mapping[str, Tensor],
    ) -> Tree:
        """∂²s/∂θ_rows ∂θ_cols applied to the tangents (of the parameters cols), s = scalar(outputs(θ))."""

    @abstractmethod
    def jacobian(
        self, problem: Problem, batch: Batch, tangents: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Outputs z, and J applied to the tangents: (k, *z.shape)."""

    @abstractmethod
    def jacobian_transpose(
        self, problem: Problem, batch: Batch, rows: tuple[str, ...], cotangents: Tensor
    ) -> Tree:
        """Jᵀ applied to cotangents (k, *z.shape)."""

    @abstractmethod
    def sandwich(
        self,
        problem: Problem,
        batch: Batch,
        middle: Callable[[Tensor, Tensor], Tensor],
        rows: tuple[str, ...],
        tangents: Mapping[str, Tensor],
    ) -> Tree:
        """Jᵀ M J applied to the tangents, `middle(z, u)` being M u for u of shape (k, *z.shape)."""


def choose(name: str) -> Engine:
    """The engine of that name; `auto` is `autograd`, which takes every module."""
    from curvescope.operators.autograd import AutogradEngine

    engines: dict[str, type[Engine]] = {"auto": AutogradEngine, "autograd": AutogradEngine}
    if name not in engines:
        raise UsageError(f"expected an engine, got {name!r}", hint=near_misses(name, list(engines)))
    return engines[name]()
