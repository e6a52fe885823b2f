"""What a study is, and a figure of a paper: a configuration, and a function from it to a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, final

from curvescope.core.config import Config, Settings
from curvescope.core.progress import Progress
from curvescope.runs.shown import Shown
from curvescope.runs.work import State

if TYPE_CHECKING:
    from curvescope.problem import Problem

C = TypeVar("C", bound=Config)
Asked = TypeVar("Asked", bound=Config, contravariant=True)


class Run(Protocol[Asked]):
    """Measures what a configuration of its own class says."""

    def __call__(self, cfg: Asked, *, progress: Progress | None = None, state: State | None = None) -> Shown:
        """The result; `progress` hears of each piece of work, `state` keeps the finished ones."""
        ...


@final
@dataclass(frozen=True)
class Study(Generic[C]):
    """A question that can be asked by name; a module that holds one calls it STUDY."""

    Config: type[C]
    run: Run[C]
    plan: Plan[C] | None = None  # where it takes long enough to be made to fit
    full: Settings | None = None  # what the profile full takes in the place of the defaults, where it is more
    on_pieces: bool = False  # whether a model that is spread over ranks has all that it asks of one


def study_in(module: str) -> Study[Config]:
    """The study that a module of this name holds; it is imported now."""
    found = import_module(module).STUDY
    assert isinstance(found, Study), f"{module}.STUDY is no Study"
    return found


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
