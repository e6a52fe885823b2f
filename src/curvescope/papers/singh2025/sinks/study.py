"""What the slides say of attention sinks, by the study `sinks`, on models of several conditions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from curvescope.core.config import setting
from curvescope.core.progress import Progress
from curvescope.papers.claims import Claim
from curvescope.papers.setting import FigureConfig
from curvescope.papers.singh2025.sinks import claims, words
from curvescope.papers.singh2025.sinks.cases import CASES, Case
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import State, work_through
from curvescope.studies import sinks
from curvescope.studies.sinks import Sinks

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

COUNTS = ("texts", "tokens", "num_probes", "num_steps")


@dataclass(frozen=True)
class Config(FigureConfig):
    """Quick: three texts, five probes, two minutes; full: five texts, eight probes, all ways everywhere."""

    texts: int = setting(0, "disjoint parts of each model's data; 0: those of the profile, 3 and 5")
    tokens: int = setting(0, "of all texts of the bundled model; 0: those of the profile, 144 and 960")
    num_probes: int = setting(0, "random vectors on each text; 0: those of the profile, 5 and 8")
    num_steps: int = setting(0, "Lanczos steps of each; 0: those of the profile, 10 and 24")
    threshold: float = setting(0.2, "τ of outliers, of the largest |λ| of the unchanged model on a text")
    seed: int = setting(0, "of the texts and of all probes")

    def of_study(self, case: Case) -> sinks.Config:
        """The settings for a model: those of the profile, where no others are given."""
        own = case.config(full=self.profile == "full", device=self.device)
        given = {name: getattr(self, name) for name in COUNTS if getattr(self, name)}
        return replace(own, **given, threshold=self.threshold, seed=self.seed)

    def __post_init__(self) -> None:
        super().__post_init__()
        for case in CASES.values():
            self.of_study(case)  # raises what the study does


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
    settings = {name: cfg.of_study(case) for name, case in CASES.items()}
    sweeps = {
        name: sinks.prepare(case.problem(settings[name]), settings[name], []) for name, case in CASES.items()
    }
    pieces = [piece for name, sweep in sweeps.items() for piece in sweep.pieces(f"{name}.")]
    found = work_through(pieces, progress=progress, state=state)
    return SinkCases(cases={name: sweep.result(found, f"{name}.") for name, sweep in sweeps.items()})
