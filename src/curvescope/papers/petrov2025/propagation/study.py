"""How curvature propagates: across depth, norm placement, width and training, and with parts switched off.

Every number is of second derivatives: the exact split of `operators.sources`, Lanczos for eigenvalues and,
where a component is switched off, all eigenvalues of a Hessian that is written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.config import setting
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.models.zoo.names import REVISIONS
from curvescope.operators import Hessian
from curvescope.papers.claims import Claim
from curvescope.papers.petrov2025.propagation import claims, variants, words
from curvescope.papers.setting import FigureConfig
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies import propagation
from curvescope.studies.propagation import Propagation
from curvescope.studies.setting import make_problem

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

ZERO = 1e-12  # of the largest: an eigenvalue or a block that is below it is rounding


@dataclass(frozen=True)
class Config(FigureConfig):
    """How many models. Quick: depths up to 8 and 2 seeds, about two minutes; full: up to 24 and 5 seeds."""

    seeds: int | None = setting(None, "models of each kind; 2 in the profile quick, 5 in full")
    steps: int = setting(200, "of training, where components are switched off")
    tokens: int = setting(128, "of the text for the bundled model's checkpoints")

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of layers."""
        return (1, 2, 4, 8) if self.profile == "quick" else (1, 2, 4, 8, 16, 24)

    @property
    def count(self) -> int:
        """Seeds of each kind."""
        return self.seeds or (2 if self.profile == "quick" else 5)


@dataclass(frozen=True)
class Spectrum(Result):
    """A Hessian that was written out: its eigenvalues, and the norms of its blocks."""

    values: np.ndarray  # (n,) ascending
    names: list[str]  # of B blocks
    norms: np.ndarray  # (B, B)
    loss: float

    @property
    def condition(self) -> float:
        """λ_max over the least eigenvalue that is positive beyond rounding."""
        top = float(self.values[-1])
        return top / float(self.values[self.values > ZERO * top].min())


@dataclass(frozen=True)
class Sweeps(Shown):
    """All models, by what was changed."""

    seeds: int
    depths: list[int]
    steps: int
    measured: dict[str, Propagation]  # by depth, width and σ, and of the bundled checkpoints
    spectra: dict[str, Spectrum]  # of components

    def summary(self) -> list[Line]:
        """The numbers to look at first."""
        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """One row a model, and the table with and without each component."""
        return words.tables(self)

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.papers.petrov2025.propagation import figures

        return figures.draw(self)

    def claims(self) -> list[Claim]:
        """What the paper and the article around it say, next to what was measured."""
        return claims.of(self)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Sweeps:
    """Measure all models.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the figure goes, used when it goes on.
    """
    models = (
        variants.by_depth(cfg.depths, cfg.count) | variants.by_width(cfg.count) | variants.by_sigma(cfg.count)
    )
    written = variants.by_component(cfg.steps, cfg.count)
    pieces = [
        Piece(name, partial(_measure, variant, ends=not name.startswith("sigma.")))
        for name, variant in models.items()
    ]
    pieces += [Piece(name, partial(_write_out, variant)) for name, variant in written.items()]
    pieces += [Piece(f"training.{name}", partial(_checkpoint, name, cfg)) for name in REVISIONS]
    found = work_through(pieces, progress=progress, state=state)
    return _result(cfg, found, [*models, *(f"training.{name}" for name in REVISIONS)], list(written))


def _measure(variant: variants.Variant, *, ends: bool = True) -> Propagation:
    """Shares of all sources, and where asked for the ends of the spectra of H and the GGN."""
    cfg = propagation.Config(
        num_probes=6, num_steps=12, eigenvalues=("H", "GGN") if ends else (), num_map_probes=0, max_exact=0,
        seed=variant.seed,
    )  # fmt: skip
    return propagation.measure(variant.problem(), cfg, [])


def _checkpoint(revision: str, cfg: Config) -> Propagation:
    settings = propagation.Config(
        model="tiny-gpt", revision=revision, tokens=cfg.tokens, num_probes=4, num_steps=10,
        eigenvalues=("H", "GGN"), num_map_probes=0, device=cfg.device,
    )  # fmt: skip
    return propagation.measure(make_problem(settings), settings, [])


def _write_out(variant: variants.Variant) -> Spectrum:
    problem = variant.problem()
    H = Hessian(problem).in_blocks().to_dense().double().cpu().numpy()
    where = problem.space().in_blocks().slices
    norms = np.array([[np.linalg.norm(H[r, c]) for c in where.values()] for r in where.values()])
    return Spectrum(np.linalg.eigvalsh((H + H.T) / 2), list(where), norms, problem.loss_value())


def _result(cfg: Config, found: Finished, measured: list[str], written: list[str]) -> Sweeps:
    return Sweeps(
        seeds=cfg.count,
        depths=list(cfg.depths),
        steps=cfg.steps,
        measured={name: found.take(Propagation, name) for name in measured},
        spectra={name: found.take(Spectrum, name) for name in written},
    )
