"""The study `why_adam`: does heterogeneous curvature explain why Adam beats SGD?

Transformers and MLPs on addition, each trained with Adam and with SGD at tuned rates. The gap is
log₁₀ (final loss with SGD / with Adam). Beside it stands how different the curvature of blocks and of entries
is, before training and along it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.progress import Progress
from curvescope.runs.shown import Claim, Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.why_adam import claims, tables, words
from curvescope.studies.why_adam.curvature import MEASURES
from curvescope.studies.why_adam.networks import CHOICES
from curvescope.studies.why_adam.settings import LOOKS, Config
from curvescope.studies.why_adam.tuning import Tuned, log_ratio
from curvescope.studies.why_adam.work import MOMENTS, OPTIMIZERS, Measured, measured, tuned

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


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

    def claims(self) -> list[Claim]:
        """What heterogeneity says of the gap, and what changes it."""
        return claims.judge(self)

    def opening(self) -> str:
        """What heterogeneity says of the gap, in a few sentences."""
        return words.opening(self)

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Gaps, correlations, paired changes, heterogeneity, blocks and rates."""
        return tables.frames(self)

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.studies.why_adam import figures

        return figures.draw(self)


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
        notes=words.notes(runs),
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
