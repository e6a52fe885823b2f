"""What a study is, and a figure of a paper: a configuration, and a function from it to a result."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, final

from curvescope.core.config import Config
from curvescope.core.progress import Progress
from curvescope.runs.shown import Shown
from curvescope.runs.work import State


class Run(Protocol):
    """Measures what a configuration of its own class says."""

    def __call__(self, cfg: Any, *, progress: Progress | None = None, state: State | None = None) -> Shown:
        """The result; `progress` hears of each piece of work, `state` keeps the finished ones."""
        ...


@final
@dataclass(frozen=True)
class Study:
    """A question that can be asked by name."""

    Config: type[Config]
    run: Run


def study_in(module: str) -> Study:
    """The study that a module of this name holds: its `Config` and its `run`."""
    found = import_module(module)
    assert issubclass(found.Config, Config), f"{module}.Config is no Config"
    return Study(found.Config, found.run)
