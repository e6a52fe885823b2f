"""What the slides say of attention sinks, by the study `sinks`, on models of several conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from curvescope.core.progress import Progress
from curvescope.papers.claims import Claim
from curvescope.papers.setting import FigureConfig
from curvescope.papers.singh2025.sinks import claims, words
from curvescope.papers.singh2025.sinks.cases import CASES
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import State, work_through
from curvescope.studies import sinks
from curvescope.studies.sinks import Sinks

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Config(FigureConfig):
    """Quick: three texts, five probes, two minutes; full: five texts, eight probes, all ways everywhere."""


@dataclass(frozen=True)
class SinkCases(Shown):
    """The study on every model, by condition."""

    cases: dict[str, Sinks]

    def summary(self) -> list[Line]:
        """The numbers to look at first."""
        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """The study's tables, with the condition as a column."""
        return words.tables(self)

    def figures(self) -> dict[str, Figure]:
        """Figures by name."""
        from curvescope.papers.singh2025.sinks import figures

        return figures.draw(self)

    def claims(self) -> list[Claim]:
        """What the slides say, and what we add, next to what was measured."""
        return claims.of(self)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> SinkCases:
    """Measure all models.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the figure goes, used when it goes on.
    """
    full = cfg.profile == "full"
    settings = {name: case.config(full=full, device=cfg.device) for name, case in CASES.items()}
    sweeps = {
        name: sinks.prepare(case.problem(settings[name]), settings[name], []) for name, case in CASES.items()
    }
    pieces = [piece for name, sweep in sweeps.items() for piece in sweep.pieces(f"{name}.")]
    found = work_through(pieces, progress=progress, state=state)
    return SinkCases(cases={name: sweep.result(found, f"{name}.") for name, sweep in sweeps.items()})
