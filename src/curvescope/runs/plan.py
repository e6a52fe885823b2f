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


@final
@dataclass(frozen=True)
class Plan(Generic[C]):
    """How a study is made to fit into a time.

    Attributes:
        blocks: globs of the parameters that a product is over.
        cost: of a configuration, on a problem.
        ladder: settings to take instead of the study's own, each rung cheaper than the one before.
    """

    blocks: Callable[[C], tuple[str, ...]]
    cost: Callable[[C, Problem], Cost]
    ladder: tuple[Settings, ...]
