"""Forms of products: the computation that the engine sums over batches for an operator.

`apply` computes the product on one batch, using the engine's cache, and passes on the result parameter by
parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

from torch import Tensor

from curvescope.data.batches import Batch
from curvescope.engines import batch_products
from curvescope.engines.batch_products import Names, required
from curvescope.engines.vjp import Linearized, Receive, ReversePass
from curvescope.losses.base import Part

if TYPE_CHECKING:
    from curvescope.engines.engine import Engine

Tree = dict[str, Tensor]
Middle = Callable[[int, Batch, Tensor, Tensor], Tensor]
"""Function of the batch's number, the batch, outputs z, and u (k, *z.shape) that returns M u."""


class ProductForm(ABC):
    """Computation that a product applies to every batch."""

    @abstractmethod
    def apply(
        self, engine: Engine, index: int, batch: Batch, rows: Names, tangents: Tree, receive: Receive
    ) -> None:
        """Apply the sum over one batch's terms to tangents; it is not divided.

        Args:
            engine: Executes the product and caches graphs that do not depend on the tangents.
            index: Number of the batch.
            batch: A batch on the model's device.
            rows: Parameters for which results are computed.
            tangents: {parameter: (k, *shape)} for k directions.
            receive: Function that receives each result and must copy it, because the buffer is reused.
                Parameters with a zero result may be missing; results with the same name must be added.
        """


@final
@dataclass(frozen=True)
class SecondDerivative(ProductForm):
    """∂²s/∂θ_rows ∂θ_cols, s the loss or the scalar of its functional Hessian."""

    part: Part

    def apply(
        self, engine: Engine, index: int, batch: Batch, rows: Names, tangents: Tree, receive: Receive
    ) -> None:
        engine.refuse_wrong(second=True)
        columns = tuple(tangents)
        arguments = engine.problem, engine.runner, batch, self.part, rows, columns
        build = partial(batch_products.second_derivative, *arguments)
        engine.cached_product((index, self.part, rows, columns), build, batch, tangents, receive)


@final
@dataclass(frozen=True)
class GaussNewton(ProductForm):
    """Jᵀ (∂²loss/∂z²) J."""

    def apply(
        self, engine: Engine, index: int, batch: Batch, rows: Names, tangents: Tree, receive: Receive
    ) -> None:
        columns = tuple(tangents)
        build = partial(batch_products.ggn, engine.problem, engine.runner, batch, rows, columns)
        engine.cached_product((index, "ggn", rows, columns), build, batch, tangents, receive)


@final
@dataclass(frozen=True)
class Sandwich(ProductForm):
    """Jᵀ M J, with M between the outputs."""

    middle: Middle

    def apply(
        self, engine: Engine, index: int, batch: Batch, rows: Names, tangents: Tree, receive: Receive
    ) -> None:
        columns, group = tuple(tangents), engine.caching.directions(batch, tangents)
        arguments = engine.problem, engine.runner, batch, rows, columns
        build = partial(batch_products.linearized, *arguments, lazy=False)
        graph: Linearized = engine.caching.graph((index, "sandwich", rows, columns), build, batch)
        (z,), (Jv,) = graph.outputs, graph.push(list(tangents.values()), group)
        back = ReversePass([z], rows, [graph.leaves[name] for name in rows])
        back([self.middle(index, batch, required(z).detach(), Jv)], group, receive)


@final
@dataclass(frozen=True)
class SourceTerm(ProductForm):
    """The part of one source in the functional Hessian."""

    source: str

    def apply(
        self, engine: Engine, index: int, batch: Batch, rows: Names, tangents: Tree, receive: Receive
    ) -> None:
        results = engine.sources(index, batch, rows, tangents, [self.source])
        for name, x in results[self.source].items():
            receive(name, x)
