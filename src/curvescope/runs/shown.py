"""What every study and every figure of a paper gives: a result that can be shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
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
    """A claim, of a paper or our own, next to what was measured."""

    claim: str
    published: str
    measured: str
    verdict: str
    source: str = "paper"  # where what is published stands: the paper, its figure, its authors' code
    whose: Whose = "paper"


@dataclass(frozen=True)
class Shown(Result):
    """A result with words, tables and figures, made from its own arrays: showing computes nothing.

    Each method below calls the function of the same name in the module `view` beside the result's own,
    with the result as its only argument; a class may define the method itself instead. A name stands for one
    thing among the tables and one among the figures; a caption belongs to both.
    """

    notes: list[str] = field(default_factory=list, kw_only=True)  # what a reader should know

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Figures have one look, whoever asks for them: the page, files or a notebook."""
        super().__init_subclass__(**kwargs)
        if "figures" in vars(cls):
            cls.figures = style.styled(cls.figures)

    def summary(self) -> list[Line]:
        """The numbers to look at first."""
        return self._shown_by_view("summary")

    def _repr_html_(self) -> str:
        """For a notebook: what the numbers say, those to look at first, the first figure and table."""
        return notebook.result_box(self, self.opening, self.summary, self.figures, self.tables)

    def opening(self) -> str:
        """One or two sentences on what these numbers say, written from them; a page's section begins so.

        A result with claims is introduced by their verdicts; one without says nothing by itself.
        """
        return self._shown_by_view("opening") if self._view("opening") else of_verdicts(self)

    def beside(self) -> dict[str, str]:
        """Openings of what a page shows in other sections than the study's own, by the section's name."""
        return self._shown_by_view("beside", {})

    def subjects(self) -> list[str]:
        """What it is about where that is more than the model of its settings: the sides of a comparison."""
        return self._shown_by_view("subjects", [])

    def captions(self) -> dict[str, str]:
        """What each figure, scene and table shows."""
        return self._shown_by_view("captions")

    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables by name, for CSV files and the report."""
        return self._shown_by_view("tables")

    def figures(self) -> dict[str, Figure]:
        """Figures by name."""
        return style.styled(self._shown_by_view)("figures")

    def scenes(self) -> dict[str, Scene]:
        """Interactive figures; one with the name of a figure takes its place in a browser."""
        return self._shown_by_view("scenes", {})

    def files(self) -> dict[str, str]:
        """Further texts by file name, beside the tables."""
        return self._shown_by_view("files", {})

    def claims(self) -> list[Claim]:
        """Claims next to what was measured; empty for a result that makes none."""
        return self._shown_by_view("claims", [])

    def _view(self, name: str) -> Callable[[Shown], Any] | None:
        """The function of this name in the view beside the class or one of its bases."""
        modules = (_view_beside(cls.__module__) for cls in type(self).__mro__)
        return next((found for module in modules if (found := getattr(module, name, None))), None)

    def _shown_by_view(self, name: str, default: Any = None) -> Any:
        """What the view's function of this name says of the result; the default if there is none."""
        show = self._view(name)
        if show is None and default is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no method {name}, and no view with that function"
            )
        return default if show is None else show(self)


def of_verdicts(result: Shown) -> str:
    """How many claims of a result have which verdict; empty for a result without claims."""
    verdicts = Counter(claim.verdict for claim in result.claims()).most_common()
    if not verdicts:
        return ""
    counts = ", ".join(f"{verdict} {count}" for verdict, count in verdicts)
    return f"Verdicts on {plural(sum(count for _, count in verdicts), 'statement')}: {counts}."


@cache
def _view_beside(module: str) -> ModuleType | None:
    """The module `view` in the package of a module of a study or paper, imported when it is first needed."""
    name = f"{module.rpartition('.')[0]}.view"
    ours = name.startswith(("curvescope.studies.", "curvescope.papers."))
    return import_module(name) if ours and find_spec(name) else None
