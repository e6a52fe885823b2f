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

from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.progress import Progress
from curvescope.monitor.result import Monitored
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.dynamics.analysis import (
    AUTO,
    SAMPLE,
    SMALL,
    Course,
    Sequence,
    batches_of,
    contents_of,
    find_points,
    load_point,
    measure_point,
    planned,
    problem_of,
)
from curvescope.studies.setting import ModelOnData, notes_of

if TYPE_CHECKING:
    pass

EXPERIMENTS = {
    "edge": "gradient descent: λ_max rises to 2/η and stays there (Cohen et al. 2021)",
    "adam": "Adam: the preconditioned sharpness and its threshold (Cohen et al. 2022)",
    "warmup": "Adam with a warm-up and without it",
    "spikes": "a learning rate that rises above the ceiling, and what warned before the loss rose",
    "grokking": "modular addition: curvature before and after the model generalizes",
}


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to train, and how long. The defaults take about four minutes of one core."""

    model: str = setting(SMALL, "small: a Transformer made for the task; else a name, a folder, a hub id, …")
    data: str = setting(
        AUTO, "a corpus, a file, a folder, task:NAME; auto: task:digits, of a text model sample"
    )
    experiments: tuple[str, ...] = setting(tuple(EXPERIMENTS), f"of {', '.join(EXPERIMENTS)}")
    checkpoints: tuple[str, ...] = setting(
        (), "measured in the place of training: a folder of checkpoints, folders, or revisions of the model"
    )
    num_sequences: int = setting(100, "sequences or pictures of a task that the small model is trained on")
    steps: int = setting(300, "of the runs edge and adam")
    every: int = setting(15, "steps from one measurement to the next, in edge and adam")
    edges: tuple[float, ...] = setting((0.6, 0.9), "2/η of each run of edge, in units of λ_max at the start")
    adam_lr: float = setting(0.002, "η of the run adam")
    beta2: float = setting(0.99, "β₂ of Adam, in adam and warmup")
    warmup_lr: float = setting(0.01, "η of the runs warmup, with and without")
    warmup_steps: int = setting(100, "over which η rises to it; as many follow")
    above: float = setting(4.0, "η at the end of a run of spikes that goes above, of 2/λ_max at the start")
    below: float = setting(0.4, "likewise, of one that stays below")
    spike_steps: int = setting(100, "of a run of spikes, over all of which η rises")
    num_seeds: int = setting(2, "networks of spikes, of warmup twice as many, of grokking at most two")
    modulus: int = setting(29, "p of the additions modulo p")
    fraction: float = setting(0.6, "of the p² pairs that are trained on")
    grok_lr: float = setting(0.005, "η of AdamW in grokking")
    weight_decay: float = setting(2.0, "of AdamW in grokking")
    grok_steps: int = setting(700, "of a run of grokking")
    blocks: tuple[str, ...] = setting(("*",), "of checkpoints: globs of blocks that are measured one by one")
    num_probes: int = setting(4, "of traces")

    def __post_init__(self) -> None:
        as_tuples(self, "experiments", "checkpoints", "edges", "blocks")
        super().__post_init__()
        at_least(self, 2, "steps", "warmup_steps", "spike_steps", "grok_steps", "num_probes")
        at_least(self, 1, "every", "num_seeds", "num_sequences")
        for name in self.experiments:
            if name not in EXPERIMENTS:
                raise UsageError(
                    f"experiments: expected some of {', '.join(EXPERIMENTS)}, got {name!r}",
                    hint=near_misses(name, list(EXPERIMENTS)),
                )
        rates = {"edges": min(self.edges, default=1.0), "above": self.above, "below": self.below}
        rates |= {name: getattr(self, name) for name in ("adam_lr", "warmup_lr", "grok_lr")}
        for name, value in rates.items():
            if not value > 0:
                raise UsageError(f"{name}: expected a number above 0, got {value}")


# ------------------------------------------------------------------------------------------------------ study


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
