"""What the reviewers of the paper asked, each question answered by a measurement with a verdict.

The public reviews asked about deeper models, the term that the O-notation drops, other architectures, the
range of σ, one query-key matrix against two, the gradient, and by how much softmax reduces the query blocks.
Each question is a file here: what it measures (`pieces`) and what follows (`answers`). Second derivatives are
exact, in float64, on networks so small that their matrices are written out; intervals are over seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.papers.ormaniec2025.reviewers import words
from curvescope.papers.ormaniec2025.reviewers.answers import Answer
from curvescope.papers.ormaniec2025.reviewers.measure import Sweep
from curvescope.papers.ormaniec2025.reviewers.questions import (
    architectures,
    depth,
    dropped,
    gradient,
    merged,
    regimes,
    softmax,
)
from curvescope.papers.ormaniec2025.reviewers.questions.softmax import Heads
from curvescope.papers.ormaniec2025.reviewers.setting import Config
from curvescope.runs.shown import Claim, Line, Shown
from curvescope.runs.work import Piece, State, work_through

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Reviewers(Shown):
    """All that was measured, by name of its piece."""

    settings: dict[str, Any]
    seeds: int
    found: dict[str, Result]

    def of(self, kind: type[R], prefix: str = "") -> dict[str, R]:
        """The pieces of a kind whose names begin so."""
        return {
            name: one for name, one in self.found.items() if isinstance(one, kind) and name.startswith(prefix)
        }

    def answers(self) -> list[Answer]:
        """Every row, question by question."""
        sweeps = self.of(Sweep)
        return [
            *depth.answers(sweeps),
            *dropped.answers(sweeps),
            *architectures.answers(sweeps),
            *regimes.answers(sweeps),
            *merged.answers(self.found),
            *gradient.answers(sweeps),
            *softmax.answers(self.of(Heads)),
        ]

    def claims(self) -> list[Claim]:
        """What was asked, next to what was measured."""
        return [row.as_claim() for row in self.answers()]

    def summary(self) -> list[Line]:
        """A line for each question."""
        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows, on which data, with which networks."""
        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """All answers, every norm, the regimes, and the blocks over temperature."""
        return words.tables(self)

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing measures nothing."""
        from curvescope.papers.ormaniec2025.reviewers import figures

        return figures.draw(self)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Reviewers:
    """Measure everything, those pieces of `state` excepted."""
    todo = {
        **depth.pieces(cfg), **dropped.pieces(cfg), **architectures.pieces(cfg), **regimes.pieces(cfg),
        **merged.pieces(cfg), **softmax.pieces(cfg),
    }  # fmt: skip
    found = work_through([Piece(name, work) for name, work in todo.items()], progress=progress, state=state)
    return Reviewers(cfg.to_dict(), cfg.count, {name: found.take(Result, name) for name in todo})
