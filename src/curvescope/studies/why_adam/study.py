"""The study `why_adam`: does heterogeneous curvature explain why Adam beats SGD?

Transformers and MLPs on addition, each trained with Adam and with SGD at tuned rates. The gap is
log₁₀ (final loss with SGD / with Adam). Beside it stands how different the curvature of blocks and of entries
is, before training and along it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.progress import Progress
from curvescope.runs.shown import Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.why_adam.analysis import (
    CHOICES,
    EVALUATED,
    HEADS,
    LOOKS,
    MEASURES,
    MOMENTS,
    OPTIMIZERS,
    Measured,
    Size,
    Tuned,
    log_ratio,
    measured,
    tuned,
)

if TYPE_CHECKING:
    pass


def tuning_notes(runs: Mapping[str, Tuned]) -> list[str]:
    """What a reader should know of the runs."""
    found = []
    edge = [name for name, run in runs.items() if run.at_edge]
    if edge:
        found.append(f"the best rate is still the end of the grid for {', '.join(edge)}")
    lost = [name for name, run in runs.items() if np.isinf(run.loss).any()]
    if lost:
        found.append(f"a run at the rate of the other seeds diverged for {', '.join(lost)}")
    return found


class Profile(NamedTuple):
    """What a run of the study has unless a setting says otherwise."""

    size: Size
    seeds: int
    steps: int
    batch_size: int


PROFILES = {
    "quick": Profile(Size(width=16, layers=1, digits=2), seeds=5, steps=400, batch_size=16),
    "full": Profile(Size(width=16, layers=2, digits=3), seeds=8, steps=2000, batch_size=32),
}


@dataclass(frozen=True)
class Config(BaseConfig):
    """What is trained. The defaults take a few minutes on a CPU."""

    scale: Literal["quick", "full"] = setting("quick", "minutes on a CPU; full: deeper, longer, more seeds")
    configurations: tuple[str, ...] = setting(tuple(CHOICES), "of those that are known")
    seeds: int = setting(0, "of weights and batches; 0: the scale's, 5 or 8")
    steps: int = setting(0, "of every run; 0: the scale's, 400 or 2000")
    width: int = setting(0, "of the Transformers' stream, even; MLPs have twice as much; 0: the scale's, 16")
    batch_size: int = setting(0, "sums of a step; 0: the scale's, 16 or 32")
    measured: int = setting(16, "sums whose loss has the curvature that is measured")
    draws: int = setting(2000, "of the bootstrap")
    device: str = setting("cpu", "cpu, cuda, …")
    seed: int = setting(0, "of everything random")

    def __post_init__(self) -> None:
        as_tuples(self, "configurations")
        super().__post_init__()
        at_least(self, 0, "batch_size", "width")
        at_least(self, 2, "measured")
        at_least(self, 50, "draws")
        for name, fewest in {"seeds": 3, "steps": 40}.items():
            if getattr(self, name):
                at_least(self, fewest, name)
        for name in self.configurations:
            if name not in CHOICES:
                raise UsageError(f"configurations: unknown {name!r}", hint=near_misses(name, list(CHOICES)))
        if not self.configurations or len(set(self.configurations)) < len(self.configurations):
            raise UsageError(f"expected some configurations, each once, got {self.configurations}")
        if self.width % HEADS:
            raise UsageError(f"width: expected a multiple of {HEADS}, got {self.width}")
        if self.measured > EVALUATED:
            raise UsageError(f"measured: expected at most {EVALUATED}, got {self.measured}")

    @property
    def profile(self) -> Profile:
        """The scale, with what was set in its place."""
        own = PROFILES[self.scale]
        return Profile(
            replace(own.size, width=self.width or own.size.width),
            self.seeds or own.seeds,
            self.steps or own.steps,
            self.batch_size or own.batch_size,
        )

    def after(self, shares: tuple[float, ...]) -> list[int]:
        """Steps of shares of a run."""
        return [round(share * self.profile.steps) for share in shares]


# ------------------------------------------------------------------------------------------------------ study


@dataclass(frozen=True)
class WhyAdam(Shown):
    """Tuned runs and heterogeneity of every configuration."""

    configurations: list[str]
    steps: int
    batch_size: int
    num_measured: int  # sums of the curvature
    look_steps: list[int]
    runs: dict[str, Tuned]  # by `configuration/optimizer`
    curvature: dict[str, Measured]  # by configuration
    draws: int
    seed: int

    @property
    def num_seeds(self) -> int:
        """S."""
        return len(self.gaps()[0])

    def gap(self, name: str) -> np.ndarray:
        """log₁₀ (final loss with SGD / with Adam) of a configuration, (S,)."""
        return log_ratio(self.runs[f"{name}/sgd"].loss, self.runs[f"{name}/adam"].loss)

    def gaps(self, names: list[str] | None = None) -> np.ndarray:
        """Of several configurations, (C, S)."""
        return np.stack([self.gap(name) for name in (self.configurations if names is None else names)])

    def heterogeneity(self, measure: str, when: str, names: list[str] | None = None) -> np.ndarray:
        """A measure of several configurations, (C, S).

        Args:
            when: `start`, `hessian` (the Hessian's, at the start), a moment such as `sgd 25%`, or `adam` and
                `sgd`: the mean over the checkpoints of these runs. The GGN's but for `hessian`.
        """
        which = list(MEASURES).index(measure)
        found = []
        for name in self.configurations if names is None else names:
            one = self.curvature[name]
            if when == "hessian":
                found.append(one.hessian[:, which])
                continue
            rows = [i for i, moment in enumerate(MOMENTS) if moment == when or moment.split()[0] == when]
            found.append(one.ggn[rows, :, which].mean(axis=0))
        return np.stack(found)

    def group(self, name: str) -> list[str]:
        """Configurations of a kind: all, transformer, mlp, norm, bare."""
        kinds = {one: ("all", CHOICES[one].family, "norm" if CHOICES[one].norm else "bare")
                 for one in self.configurations}  # fmt: skip
        return [one for one in self.configurations if name in kinds[one]]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> WhyAdam:
    """Tune and train every configuration with both optimizers, then measure its curvature.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    pieces = [piece for name in cfg.configurations for piece in _pieces(cfg, name)]
    found = work_through(pieces, progress=progress, state=state)
    runs = {
        f"{name}/{optimizer}": found.take(Tuned, f"{name}.{optimizer}")
        for name in cfg.configurations
        for optimizer in OPTIMIZERS
    }
    return WhyAdam(
        configurations=list(cfg.configurations),
        steps=cfg.profile.steps,
        batch_size=cfg.profile.batch_size,
        num_measured=cfg.measured,
        look_steps=cfg.after(LOOKS),
        runs={key: replace(one, parameters=np.zeros(0)) for key, one in runs.items()},
        curvature={name: found.take(Measured, f"{name}.curvature") for name in cfg.configurations},
        draws=cfg.draws,
        seed=cfg.seed,
        notes=tuning_notes(runs),
    )


def _pieces(cfg: Config, name: str) -> list[Piece]:
    """Two trainings, and the curvature along them."""
    trainings = [
        Piece(
            f"{name}.{optimizer}",
            partial(tuned, cfg, name, optimizer),
            f"{name}: {optimizer}, all seeds and rates",
            kind="trainings",
        )
        for optimizer in OPTIMIZERS
    ]
    needs = tuple(piece.name for piece in trainings)
    look = Piece(f"{name}.curvature", partial(measured, cfg, name), f"{name}: curvature", needs=needs)
    return [*trainings, look]
