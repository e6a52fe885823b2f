"""What a study is, and a figure of a paper: a configuration, and a function from it to a result."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Generic, Protocol, TypeVar, final

from curvescope.core.config import Config, Settings
from curvescope.core.progress import Progress
from curvescope.runs.plan import Plan
from curvescope.runs.shown import Shown
from curvescope.runs.work import State

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
