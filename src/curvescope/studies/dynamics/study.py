"""Curvature during training, measured by the monitor.

Experiments are deterministic full-batch training runs (`experiments`). Checkpoints of any run are measured
in the same way without training (`sequence`). Every finished run or checkpoint is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from curvescope.core.config import setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.progress import Progress
from curvescope.monitor.result import Monitored
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Shown
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
from curvescope.studies.problem_config import ModelOnData, notes_of

EXPERIMENTS = {
    "edge": "gradient descent: λ_max rises to 2/η and stays there (Cohen et al. 2021)",
    "adam": "Adam: the preconditioned sharpness and its threshold (Cohen et al. 2022)",
    "warmup": "Adam with and without warm-up",
    "spikes": "a learning rate that rises above 2/λ_max, and the signals that warned before the loss rose",
    "grokking": "modular addition: curvature before and after the model generalizes",
}


@dataclass(frozen=True)
class Config(ModelOnData):
    """Models, experiments and lengths of runs. The defaults take about four minutes on one core."""

    model: str = setting(
        SMALL, "small: a Transformer built for the task; else a name, a folder, a hub id, … …"
    )
    data: str = setting(
        AUTO, "a corpus, a file, a folder, task:NAME; auto: task:digits, or sample for a text model"
    )
    experiments: tuple[str, ...] = setting(
        tuple(EXPERIMENTS), f"some of {', '.join(EXPERIMENTS)}", option=True
    )
    checkpoints: tuple[str, ...] = setting(
        (), "measured instead of training: a folder of checkpoints, folders, or revisions of the model"
    )
    num_sequences: int = setting(
        100, "sequences or images of the task that the small model is trained on", least=1
    )
    steps: int = setting(300, "steps of the runs edge and adam", least=2)
    every: int = setting(15, "steps between measurements, in edge and adam", least=1)
    edges: tuple[float, ...] = setting((0.6, 0.9), "2/η of each run of edge, in units of λ_max at the start")
    adam_lr: float = setting(0.002, "η of the run adam")
    beta2: float = setting(0.99, "β₂ of Adam, in adam and warmup")
    warmup_lr: float = setting(0.01, "η of the runs warmup, with and without")
    warmup_steps: int = setting(100, "steps over which η rises to warmup_lr; as many follow", least=2)
    above: float = setting(4.0, "final η of a spikes run above the limit, in units of 2/λ_max at the start")
    below: float = setting(0.4, "final η of a spikes run below the limit, in the same units")
    spike_steps: int = setting(100, "steps of a spikes run; η rises over all of them", least=2)
    num_seeds: int = setting(
        2, "number of networks for spikes; twice as many for warmup, at most two for grokking", least=1
    )
    modulus: int = setting(29, "p of the additions modulo p")
    fraction: float = setting(0.6, "share of the p² pairs used for training")
    grok_lr: float = setting(0.005, "η of AdamW in grokking")
    weight_decay: float = setting(2.0, "weight decay of AdamW in grokking")
    grok_steps: int = setting(700, "steps of a grokking run", least=2)
    blocks: tuple[str, ...] = setting(
        ("*",), "for checkpoints: globs of blocks that are measured individually"
    )
    num_probes: int = setting(4, "of traces", least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = tuple(part for name in self.experiments for part in name.split(","))
        object.__setattr__(self, "experiments", names)
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


@dataclass(frozen=True)
class Dynamics(Shown):
    """Training runs by experiment, or a sequence of checkpoints."""

    model: str
    data: str
    experiments: list[str]
    courses: dict[str, Course]  # by name; the part before the first "-" is the experiment
    sequence: Sequence | None = None

    def of(self, experiment: str, way: str = "") -> list[Course]:
        """Return the runs of an experiment, or of one variant of it."""
        front = f"{experiment}-{way}" if way else experiment
        return [c for name, c in self.courses.items() if name == front or name.startswith(f"{front}-")]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Dynamics:
    """Train and measure, or measure checkpoints."""
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
