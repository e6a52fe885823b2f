"""Spectra that are known exactly: attention on scalars and two-layer networks, and how far their lessons go.

Every eigenvalue in closed form stands next to that of a dense Hessian, degenerate cases included. Sweeps move
one thing at a time. Gauss–Newton matrices of attention are compared with those of networks without it that
have as many parameters. The pairing of eigenvalues is followed from networks where it is exact to the bundled
model. Nothing is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from curvescope.core.config import Config as Settings
from curvescope.core.config import at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.exact_spectra import bundled, gauss_newton, ladder, sweeps, words
from curvescope.studies.exact_spectra.cases import Compared, compare
from curvescope.studies.exact_spectra.gauss_newton import Gaps
from curvescope.studies.exact_spectra.ladder import Pairings
from curvescope.studies.exact_spectra.sweeps import Sweeps

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MOST_UNITS = 200  # d_K of a Hessian that is written out
NUM_TOKENS = 8  # of the cases


@dataclass(frozen=True)
class Config(Settings):
    """How many draws. The defaults take under a minute on a CPU."""

    head_size: int = setting(8, "d_K of attention, and neurons of the two-layer networks")
    num_seeds: int = setting(8, "draws of tokens and targets at every value that is varied")
    num_draws: int = setting(40, "draws of weights and data where λ_max of H and the GGN are compared")
    num_rung_draws: int = setting(16, "draws of weights and data on every rung of the pairing")
    bundled_tokens: int = setting(64, "of the sample text, for the bundled model's rungs; 0: without them")
    seed: int = setting(0, "of the first draw; the others follow")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 2, "head_size", "num_seeds", "num_draws", "num_rung_draws")
        at_least(self, 0, "bundled_tokens")
        if self.head_size > MOST_UNITS:
            raise UsageError(f"head_size: expected at most {MOST_UNITS}, got {self.head_size}")
        if 0 < self.bundled_tokens < bundled.SEQUENCE:
            raise UsageError(
                f"bundled_tokens: expected 0 or at least {bundled.SEQUENCE}, got {self.bundled_tokens}"
            )


@dataclass(frozen=True)
class ExactSpectra(Shown):
    """What is known exactly, and what is left of it."""

    spectra: Compared
    sweeps: Sweeps
    gaps: Gaps
    pairings: Pairings

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Every eigenvalue, the agreement of each case, sweeps, gaps of λ_max, and pairing."""
        import pandas as pd

        return {
            "spectra": self.spectra.to_frame(),
            "agreement": pd.DataFrame(self.spectra.errors().items(), columns=["case", "error"]),
            "sweeps": self.sweeps.to_frame(),
            "ggn_gap": self.gaps.to_frame(),
            "pairing": self.pairings.to_frame(),
        }

    def figures(self) -> dict[str, Figure]:
        """Figures by name."""
        from curvescope.studies.exact_spectra import figures

        return figures.draw(self)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> ExactSpectra:
    """Compute everything, pieces of `state` excepted.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    first = [Piece("spectra", partial(compare, cfg.seed, d_K=cfg.head_size, num_tokens=NUM_TOKENS))]
    seeds = range(cfg.seed, cfg.seed + cfg.num_seeds)
    moved = [
        Piece(f"sweep of {name}", partial(sweeps.sweep, name, d_K=cfg.head_size, seeds=seeds), kind="sweeps")
        for name in sweeps.AXES
    ]
    gaps = [
        Piece(
            f"λ_max of the GGN, {match}",
            partial(gauss_newton.measure_all, match, num_draws=cfg.num_draws, seed=cfg.seed),
        )
        for match in gauss_newton.MATCHES
    ]
    rungs = _rungs(cfg)
    found = work_through(
        [*first, *moved, *gaps, *rungs], contents=_contents(cfg), progress=progress, state=state
    )
    return ExactSpectra(
        spectra=found.take(Compared, first[0].name),
        sweeps=sweeps.joined([found.take(Sweeps, piece.name) for piece in moved]),
        gaps=gauss_newton.joined([found.take(Gaps, piece.name) for piece in gaps]),
        pairings=ladder.joined([found.take(Pairings, piece.name) for piece in rungs]),
        notes=[words.CONTROL_NOTE],
    )


def _rungs(cfg: Config) -> list[Piece]:
    """Small networks, the control, and parts of the bundled model."""
    small = [
        Piece(f"pairing, {name}", partial(ladder.climb, name, num_draws=cfg.num_rung_draws, seed=cfg.seed))
        for name in (ladder.CONTROL, *ladder.rungs())
    ]
    if not cfg.bundled_tokens:
        return small
    real = [
        Piece(
            f"pairing, {bundled.rung_name(revision, part)}",
            partial(bundled.climb_bundled, revision, part, num_tokens=cfg.bundled_tokens, seed=cfg.seed),
        )
        for revision in bundled.REVISIONS
        for part in bundled.PARTS
    ]
    return small + real


def _contents(cfg: Config) -> str:
    """Of the bundled model and the sample, where they are used."""
    if not cfg.bundled_tokens:
        return ""
    used = [bundled.bundled(revision, cfg.bundled_tokens) for revision in bundled.REVISIONS]
    return fingerprint(*(part for both in used for part in both))
