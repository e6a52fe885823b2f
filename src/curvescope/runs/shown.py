"""What every study and every figure of a paper gives: a result that can be shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from curvescope.core.numbers import plural
from curvescope.core.result import Result
from curvescope.viz import notebook, style
from curvescope.viz.interactive import Scene

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Line = tuple[str, str, str]
"""A line of a summary: label, value, words."""


Whose = Literal["paper", "article", "ours"]
"""Whose words a claim is in: a paper's, those of an article about it, or ours about its subject."""
Origin = tuple[str, Whose]
"""Where a claim stands, and whose words it is in: the last two fields of a `Claim`."""
HOLDS, FAILS, OPEN = "holds", "fails", "not decided"
"""Verdicts on a statement, where no finer one is needed; a number agrees or differs (`papers.claims`)."""


class Claim(NamedTuple):
    """A claim of a paper next to what was measured."""

    claim: str
    published: str
    measured: str
    verdict: str
    source: str = "paper"  # where what is published stands: the paper, its figure, its authors' code
    whose: Whose = "paper"


@dataclass(frozen=True)
class Shown(Result, ABC):
    """A result with words, tables and figures, made from its own arrays: showing computes nothing.

    A name stands for one thing among the tables and one among the figures; a caption belongs to both.
    """

    notes: list[str] = field(default_factory=list, kw_only=True)  # what a reader should know

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Figures have one look, whoever asks for them: the page, files or a notebook."""
        super().__init_subclass__(**kwargs)
        if "figures" in vars(cls):
            cls.figures = style.styled(cls.figures)

    @abstractmethod
    def summary(self) -> list[Line]:
        """The numbers to look at first."""

    def _repr_html_(self) -> str:
        """For a notebook: what the numbers say, those to look at first, the first figure and table."""
        return notebook.result_box(self, self.opening, self.summary, self.figures, self.tables)

    def opening(self) -> str:
        """One or two sentences on what these numbers say, written from them; a page's section begins so.

        A result with claims is introduced by their verdicts; one without says nothing by itself.
        """
        verdicts = Counter(claim.verdict for claim in self.claims()).most_common()
        if not verdicts:
            return ""
        counts = ", ".join(f"{verdict} {count}" for verdict, count in verdicts)
        return f"Verdicts on {plural(sum(count for _, count in verdicts), 'statement')}: {counts}."

    def beside(self) -> dict[str, str]:
        """Openings of what a page shows in other sections than the study's own, by the section's name."""
        return {}

    def subjects(self) -> list[str]:
        """What it is about where that is more than the model of its settings: the sides of a comparison."""
        return []

    @abstractmethod
    def captions(self) -> dict[str, str]:
        """What each figure, scene and table shows."""

    @abstractmethod
    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables by name, for CSV files and the report."""

    @abstractmethod
    def figures(self) -> dict[str, Figure]:
        """Figures by name."""

    def scenes(self) -> dict[str, Scene]:
        """Interactive figures; one with the name of a figure takes its place in a browser."""
        return {}

    def files(self) -> dict[str, str]:
        """Further texts by file name, beside the tables."""
        return {}

    def claims(self) -> list[Claim]:
        """What a paper says next to what was measured; empty for a study."""
        return []
