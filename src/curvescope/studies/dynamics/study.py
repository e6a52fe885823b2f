"""A training run seen through the monitor: what curvature does while a model learns.

Experiments are runs of their own (`experiments`), deterministic and on all the data at once; checkpoints of
any run are measured in the same way without training (`sequence`). Every run and every checkpoint is a piece
that is kept as it is done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.monitor.result import Monitored
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Claim, Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.dynamics import checkpoint_figures, claims, tables, words
from curvescope.studies.dynamics.course import Course
from curvescope.studies.dynamics.experiments import planned
from curvescope.studies.dynamics.networks import problem_of
from curvescope.studies.dynamics.sequence import (
    Sequence,
    batches_of,
    contents_of,
    find_points,
    load_point,
    measure_point,
)
from curvescope.studies.dynamics.settings import Config
from curvescope.studies.dynamics.networks import AUTO, SAMPLE, SMALL
from curvescope.studies.setting import notes_of
from curvescope.viz.interactive import Scene

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Dynamics(Shown):
    """Runs by experiment, or a sequence of checkpoints."""

    model: str
    data: str
    experiments: list[str]
    courses: dict[str, Course]  # by name; that of an experiment is in front of the first "-"
    sequence: Sequence | None = None

    def of(self, experiment: str, way: str = "") -> list[Course]:
        """The runs of an experiment, and of one way of it."""
        front = f"{experiment}-{way}" if way else experiment
        return [c for name, c in self.courses.items() if name == front or name.startswith(f"{front}-")]

    def summary(self) -> list[Line]:
        """The numbers to look at first."""
        return words.summary(self)

    def opening(self) -> str:
        """What these numbers say: of checkpoints, or of the claims about runs."""
        return super().opening() if self.sequence is None else words.over_checkpoints(self.sequence)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Runs, measurements, alarms, claims; of checkpoints their numbers and those of their blocks."""
        return tables.of(self)

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.studies.dynamics import figures

        return figures.draw(self)

    def scenes(self) -> dict[str, Scene]:
        """Scenes by name, with switches."""
        return {} if self.sequence is None else checkpoint_figures.scenes(self.sequence)

    def claims(self) -> list[Claim]:
        """What papers say next to what was measured."""
        return claims.claims(self)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Dynamics:
    """Train and watch, or measure checkpoints.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    if cfg.checkpoints:
        return _of_checkpoints(cfg, progress, state)
    if not cfg.experiments:
        raise UsageError("experiments: expected at least one")
    runs, contents, notes = planned(cfg), "", []
    if cfg.model != SMALL:
        problem = problem_of(cfg)
        contents = fingerprint(problem.model, problem.batches)
        notes = notes_of(replace(cfg, data=SAMPLE if cfg.data == AUTO else cfg.data), problem)
    pieces = [Piece(run.name, run.work, run.name, kind=f"runs of {run.experiment}") for run in runs]
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    courses = {run.name: found.take(Course, run.name) for run in runs}
    first = next(iter(courses.values())).seen
    return Dynamics(first.model, first.data, list(dict.fromkeys(cfg.experiments)), courses, notes=notes)


def _of_checkpoints(cfg: Config, progress: Progress | None, state: State | None) -> Dynamics:
    points = find_points(cfg)
    first = load_point(cfg, points[0])
    batches = batches_of(cfg, first)
    pieces = [
        Piece(
            f"checkpoint{i}", partial(measure_point, cfg, point, i, batches), point.name, kind="checkpoints"
        )
        for i, point in enumerate(points)
    ]
    contents = contents_of(cfg, points, batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    seen = [found.take(Monitored, piece.name) for piece in pieces]
    numbered = all(point.step is not None for point in points)
    steps = np.array([point.step if numbered else i for i, point in enumerate(points)], float)
    sequence = Sequence([point.name for point in points], steps, numbered, seen)
    name = points[0].model if points[0].revision else first.name
    return Dynamics(name, batches.name, [], {}, sequence, notes=list(dict.fromkeys(seen[0].notes)))
