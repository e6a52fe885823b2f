"""Study `why_adam`: does heterogeneous curvature explain why Adam beats SGD?

Transformers and MLPs are trained on addition with Adam and with SGD, each at a tuned learning rate. The gap
is log₁₀ (final loss with SGD / with Adam). The study compares it with the heterogeneity of curvature between
and within blocks, before and during training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import at_least, setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.progress import Progress
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Shown
from curvescope.studies.why_adam import analysis


def tuning_notes(runs: Mapping[str, analysis.TunedRuns]) -> list[str]:
    """Return notes on the tuning of the runs."""
    texts = []
    edge = [name for name, run in runs.items() if run.at_edge]
    if edge:
        texts.append(f"the best rate is at the end of the grid for {', '.join(edge)}")
    lost = [name for name, run in runs.items() if np.isinf(run.loss).any()]
    if lost:
        texts.append(f"a run at the rate selected by the other seeds diverged for {', '.join(lost)}")
    return texts


class ScaleProfile(NamedTuple):
    """Defaults of a scale."""

    size: analysis.NetworkSize
    seeds: int
    steps: int
    batch_size: int


PROFILES = {
    "quick": ScaleProfile(
        analysis.NetworkSize(width=16, layers=1, digits=2), seeds=5, steps=400, batch_size=16
    ),
    "full": ScaleProfile(
        analysis.NetworkSize(width=16, layers=2, digits=3), seeds=8, steps=2000, batch_size=32
    ),
}


@dataclass(frozen=True)
class Config(BaseConfig):
    """Networks and training. The defaults take a few minutes on a CPU."""

    scale: Literal["quick", "full"] = setting(
        "quick", "quick takes minutes on a CPU; full has deeper networks, longer runs and more seeds"
    )
    configurations: tuple[str, ...] = setting(tuple(analysis.CHOICES), "configurations to train")
    seeds: int = setting(0, "seeds of weights and batches; 0: the default of the scale, 5 or 8")
    steps: int = setting(0, "steps of every run; 0: the default of the scale, 400 or 2000")
    width: int = setting(
        0,
        "width of the Transformers, an even number; MLPs have twice as much; 0: the default of the scale, 16",
        least=0,
    )
    batch_size: int = setting(0, "sums per training step; 0: the default of the scale, 16 or 32", least=0)
    measured: int = setting(16, "sums whose loss has the curvature that is measured", least=2)
    draws: int = setting(2000, "bootstrap samples", least=50)
    device: str = setting("cpu", "device: cpu, cuda, …")
    seed: int = setting(0, "seed of everything random")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, fewest in {"seeds": 3, "steps": 40}.items():
            if getattr(self, name):
                at_least(self, fewest, name)
        for name in self.configurations:
            if name not in analysis.CHOICES:
                raise UsageError(
                    f"configurations: unknown {name!r}", hint=near_misses(name, list(analysis.CHOICES))
                )
        if not self.configurations or len(set(self.configurations)) < len(self.configurations):
            raise UsageError(
                f"expected at least one configuration, each only once, got {self.configurations}"
            )
        if self.width % analysis.HEADS:
            raise UsageError(f"width: expected a multiple of {analysis.HEADS}, got {self.width}")
        if self.measured > analysis.EVALUATED:
            raise UsageError(f"measured: expected at most {analysis.EVALUATED}, got {self.measured}")

    @property
    def profile(self) -> ScaleProfile:
        """Defaults of the scale, replaced by the settings that are given."""
        own = PROFILES[self.scale]
        return ScaleProfile(
            replace(own.size, width=self.width or own.size.width),
            self.seeds or own.seeds,
            self.steps or own.steps,
            self.batch_size or own.batch_size,
        )

    def after(self, shares: tuple[float, ...]) -> list[int]:
        """Steps at the given shares of a run."""
        return [round(share * self.profile.steps) for share in shares]


@dataclass(frozen=True)
class WhyAdam(Shown):
    """Tuned runs and heterogeneity of every configuration."""

    configurations: list[str]
    steps: int
    batch_size: int
    num_measured: int  # number of sums on which curvature is measured
    look_steps: list[int]
    runs: dict[str, analysis.TunedRuns]  # by `configuration/optimizer`
    curvature: dict[str, analysis.CurvatureMeasures]  # by configuration
    draws: int
    seed: int

    @property
    def num_seeds(self) -> int:
        """S."""
        return len(self.gaps()[0])

    def gap(self, name: str) -> np.ndarray:
        """log₁₀ (final loss with SGD / with Adam) of a configuration: (S,)."""
        return analysis.log_ratio(self.runs[f"{name}/sgd"].loss, self.runs[f"{name}/adam"].loss)

    def gaps(self, names: list[str] | None = None) -> np.ndarray:
        """Gaps of several configurations: (C, S)."""
        return np.stack([self.gap(name) for name in (self.configurations if names is None else names)])

    def heterogeneity(self, measure: str, when: str, names: list[str] | None = None) -> np.ndarray:
        """A measure of heterogeneity for several configurations: (C, S).

        Args:
            when: `start`, `hessian` (of the Hessian at the start), a moment such as `sgd 25%`, or `adam` and
                `sgd`: the mean over the checkpoints of these runs. All but `hessian` are of the GGN.
        """
        which = list(analysis.MEASURES).index(measure)
        values = []
        for name in self.configurations if names is None else names:
            one = self.curvature[name]
            if when == "hessian":
                values.append(one.hessian[:, which])
                continue
            rows = [
                i for i, moment in enumerate(analysis.MOMENTS) if moment == when or moment.split()[0] == when
            ]
            values.append(one.ggn[rows, :, which].mean(axis=0))
        return np.stack(values)

    def group(self, name: str) -> list[str]:
        """Return the configurations of a kind: all, transformer, mlp, norm, bare."""
        kinds = {one: ("all", analysis.CHOICES[one].family, "norm" if analysis.CHOICES[one].norm else "bare")
                 for one in self.configurations}  # fmt: skip
        return [configuration for configuration in self.configurations if name in kinds[configuration]]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> WhyAdam:
    """Tune and train every configuration with both optimizers, then measure its curvature."""
    pieces = [piece for name in cfg.configurations for piece in _pieces(cfg, name)]
    found = work_through(pieces, progress=progress, state=state)
    runs = {
        f"{name}/{optimizer}": found.take(analysis.TunedRuns, f"{name}.{optimizer}")
        for name in cfg.configurations
        for optimizer in analysis.OPTIMIZERS
    }
    return WhyAdam(
        configurations=list(cfg.configurations),
        steps=cfg.profile.steps,
        batch_size=cfg.profile.batch_size,
        num_measured=cfg.measured,
        look_steps=cfg.after(analysis.LOOKS),
        runs={key: replace(one, parameters=np.zeros(0)) for key, one in runs.items()},
        curvature={
            name: found.take(analysis.CurvatureMeasures, f"{name}.curvature") for name in cfg.configurations
        },
        draws=cfg.draws,
        seed=cfg.seed,
        notes=tuning_notes(runs),
    )


def _pieces(cfg: Config, name: str) -> list[Piece]:
    """Return two trainings, and the measurement of curvature along them."""
    trainings = [
        Piece(
            f"{name}.{optimizer}",
            partial(analysis.tuned, cfg, name, optimizer),
            f"{name}: {optimizer}, all seeds and rates",
            kind="trainings",
        )
        for optimizer in analysis.OPTIMIZERS
    ]
    needs = tuple(piece.name for piece in trainings)
    look = Piece(
        f"{name}.curvature", partial(analysis.measured, cfg, name), f"{name}: curvature", needs=needs
    )
    return [*trainings, look]
