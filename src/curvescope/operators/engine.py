"""Engines: how the product of one batch is executed. An engine knows nothing of spaces or normalisation.

Every method takes trees: tangents are {parameter: (k, *shape)}, k directions at once, and results are
the same for the parameters in `rows`. A parameter that a result does not depend on may be missing. `index`
counts the batches, so that an engine can keep what does not depend on the directions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

from torch import Tensor

from curvescope.core.errors import UsageError, near_misses
from curvescope.data.batches import Batch
from curvescope.losses.base import Part
from curvescope.problem import Problem

Tree = dict[str, Tensor]
Middle = Callable[[Tensor, Tensor], Tensor]
"""M u for the outputs z and u of shape (k, *z.shape)."""
Work = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
"""A product of one batch: tangents (k, *shape) in the order of the columns to results in that of the rows."""
EngineName = Literal["auto", "autograd", "fast"]


class Engine(ABC):
    """Products of one batch."""

    name: str

    @property
    @abstractmethod
    def lock(self) -> AbstractContextManager[Any]:
        """Held from `begin` until the product has been copied: what an engine keeps is used by one thread."""

    @abstractmethod
    def begin(self, problem: Problem) -> None:
        """Called before the batches of a product: what was kept of other parameters or data is forgotten."""

    @abstractmethod
    def valid(self) -> bool:
        """Called after them: False where something kept was of other parameters after all."""

    @abstractmethod
    def second_derivative(
        self,
        problem: Problem,
        index: int,
        batch: Batch,
        part: Part,
        rows: tuple[str, ...],
        tangents: Mapping[str, Tensor],
    ) -> Tree:
        """∂²s/∂θ_rows ∂θ_cols applied to the tangents (of the parameters cols), s the scalar of `part`."""

    @abstractmethod
    def ggn(
        self,
        problem: Problem,
        index: int,
        batch: Batch,
        rows: tuple[str, ...],
        tangents: Mapping[str, Tensor],
    ) -> Tree:
        """Jᵀ (∂²loss/∂z²) J applied to the tangents."""

    @abstractmethod
    def sandwich(
        self,
        problem: Problem,
        index: int,
        batch: Batch,
        middle: Middle,
        rows: tuple[str, ...],
        tangents: Mapping[str, Tensor],
    ) -> Tree:
        """Jᵀ M J applied to the tangents."""

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


def choose(name: str, *, checkpoint: bool = False) -> Engine:
    """The engine of that name; `auto` is `fast`, or `autograd` for modules that it cannot run.

    Whether it can, and gives the numbers of `autograd`, is found out at first use. With `checkpoint`, layers
    are computed again instead of being kept.
    """
    from curvescope.operators.autograd import AutogradEngine
    from curvescope.operators.fast import FastEngine

    engines: dict[str, Callable[..., Engine]] = {
        "auto": partial(FastEngine, forced=False),
        "fast": FastEngine,
        "autograd": AutogradEngine,
    }
    if name not in engines:
        raise UsageError(f"expected an engine, got {name!r}", hint=near_misses(name, list(engines)))
    return engines[name](checkpoint=checkpoint)
