"""What a study costs in products, and how it does with fewer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, final

from curvescope.core.config import Config, Settings

if TYPE_CHECKING:
    from curvescope.problem import Problem

C = TypeVar("C", bound=Config)


class Cost(NamedTuple):
    """At most so many products with one vector, each over all parameters, in so many pieces."""

    pieces: int  # as the progress counts them
    products: float
    graphs: int | None = None  # of operators that are built; None: one in each piece
    seconds: float = 0.0  # of work that does not grow with the model


class Step(NamedTuple):
    """Products of one kind that a study takes, and what is in memory beside them.

    An algorithm with a basis keeps `basis` vectors for each of its `columns`, and makes each product
    orthogonal to those that are there.
    """

    what: str
    kind: str  # hessian, ggn, functional, sources, source, gradient or loss
    products: float  # with one vector each, as many as are expected
    most: float = 0.0  # where convergence decides: never more; 0: exactly as many
    columns: int = 1  # vectors that one product takes at once
    basis: int = 0
    spaces: tuple[tuple[str, ...], ...] = ((),)  # globs of each operator's parameters; none: all that varies
    made: int = 0  # how often these operators are made anew; 0: they are those of earlier steps
    alone: bool = False  # of those that are made anew: what other operators kept was freed before


@final
@dataclass(frozen=True)
class Plan(Generic[C]):
    """How a study is made to fit into a time.

    Attributes:
        blocks: globs of the parameters that a product is over.
        cost: of a configuration, on a problem.
        ladder: settings to take instead of the study's own, each rung cheaper than the one before.
        steps: what a configuration takes on a problem, step by step; without, it is told by the cost alone.
    """

    blocks: Callable[[C], tuple[str, ...]]
    cost: Callable[[C, Problem], Cost]
    ladder: tuple[Settings, ...]
    steps: Callable[[C, Problem], list[Step]] | None = None
