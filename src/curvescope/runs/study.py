"""Studies and figures of papers: a configuration, and a function from it to a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, final

from curvescope.core.config import Config, Settings
from curvescope.core.progress import Progress
from curvescope.runs.resumable_loop import State
from curvescope.runs.study_result import Shown

if TYPE_CHECKING:
    from curvescope.problem import Problem

C = TypeVar("C", bound=Config)
FEWEST_SEQUENCES = 4  # sequences: fewer cannot be split into quarters, and show no trend
Asked = TypeVar("Asked", bound=Config, contravariant=True)


class Run(Protocol[Asked]):
    """Function that runs a study with a configuration of the study's own class."""

    def __call__(self, cfg: Asked, *, progress: Progress | None = None, state: State | None = None) -> Shown:
        """Return the result; `progress` is called for each piece of work, `state` stores finished pieces."""
        ...


@final
@dataclass(frozen=True)
class Study(Generic[C]):
    """Named study: a configuration and a function that runs it; its module exports it as STUDY."""

    Config: type[C]
    run: Run[C]
    plan: Plan[C] | None = None  # None for short studies, which need no plan to fit a time budget
    full: Settings | None = None  # settings of the profile `full` that exceed the defaults
    on_pieces: bool = False  # True if the study supports sharded models


def load_study(module: str) -> Study[Config]:
    """Import a module and return its study."""
    study = import_module(module).STUDY
    assert isinstance(study, Study), f"{module}.STUDY is not a Study"
    return study


class Step(NamedTuple):
    """Products of one kind that a study computes, and the memory that they need besides.

    An algorithm with a basis stores `basis` vectors for each of its `columns`, and orthogonalizes each
    product against the stored ones.
    """

    what: str
    kind: str  # hessian, ggn, functional, sources, source, gradient or loss
    products: float  # expected number, one vector each
    most: float = 0.0  # upper limit if convergence decides; 0: exactly `products`
    columns: int = 1  # vectors per product
    basis: int = 0
    spaces: tuple[tuple[str, ...], ...] = ((),)  # globs of parameters per operator; none: all
    made: int = 0  # how often these operators are created; 0: reused from earlier steps
    alone: bool = False  # True if caches of other operators are freed before these are created
    share: float = 1.0  # share of the data per product; above 1 if samples are processed singly
    pieces: tuple[str, ...] = ("*",)  # globs of the pieces of work with these products


class Selection(NamedTuple):
    """Reduced study for times in which even its smallest settings are too slow."""

    settings: Settings  # settings that leave something out
    words: str  # text on what remains


@final
@dataclass(frozen=True)
class Plan(Generic[C]):
    """Steps of a study, and how to make it fit into a time budget.

    Attributes:
        steps: Function that lists the products of a configuration on a problem; budgets and forecasts both
            count these.
        ladder: Settings to use instead of the study's own, each rung cheaper than the one before. Tokens are
            not among them: they are lowered after the last rung, to at least `sequences` sequences.
        blocks: Globs of the parameters that most products use; by default all.
        seconds: Time of a configuration for work that does not depend on its model.
        sequences: Fewest sequences that its verdicts need.
        selections: Reduced studies for a time too short for the last rung, the largest first.
    """

    steps: Callable[[C, Problem], list[Step]]
    ladder: tuple[Settings, ...]
    blocks: Callable[[C], tuple[str, ...]] = lambda cfg: ("*",)
    seconds: Callable[[C], float] = lambda cfg: 0.0
    sequences: int = FEWEST_SEQUENCES
    selections: tuple[Selection, ...] = ()
