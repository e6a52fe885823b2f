"""Base classes of results of studies and papers, with tables, figures and captions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec

from curvescope.core.number_format import plural
from curvescope.core.result import Result
from curvescope.viz import notebook, style
from curvescope.viz.interactive import Scene

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

P = ParamSpec("P")
Line = tuple[str, str, str]
"""Line of a summary: label, value, explanation."""


Whose = Literal["paper", "article", "ours"]
"""Origin of a claim: a paper, an article about it, or ourselves."""
Origin = tuple[str, Whose]
"""Location and origin of a claim: the last two fields of a `Claim`."""
HOLDS, FAILS, OPEN = "holds", "fails", "not decided"
"""Verdicts on a statement; numbers have their own verdicts, agrees or differs (`papers.claims`)."""


Tables = dict[str, Any]
"""Tables by name: each a list of rows, a dictionary of columns, a data frame, or a list of frames."""


class Claim(NamedTuple):
    """A claim, of a paper or our own, next to what was measured."""

    claim: str
    published: str
    measured: str
    verdict: str
    source: str = "paper"  # location of the published value: the paper, its figure, its authors' code
    whose: Whose = "paper"


@dataclass(frozen=True)
class Shown(Result):
    """Result with text, tables and figures, made from its own arrays: showing it computes nothing.

    Each method below calls the function of the same name in the module `view` beside the result's own, with
    the result as its only argument; a class may define the method itself instead. A table and a figure may
    share a name; they then share its caption.
    """

    notes: list[str] = field(default_factory=list, kw_only=True)  # remarks for the reader

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap `figures` in the common style and `tables` in data frames, for report, files and notebooks."""
        super().__init_subclass__(**kwargs)
        if "tables" in vars(cls):
            cls.tables = _with_data_frames(cls.tables)
        if "figures" in vars(cls):
            cls.figures = style.styled(cls.figures)

    def summary(self) -> list[Line]:
        """Return the most important numbers."""
        return self._shown_by_view("summary")

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: opening, most important numbers, first figure and table."""
        return notebook.result_box(self, self.opening, self.summary, self.figures, self.tables)

    def opening(self) -> str:
        """Return one or two sentences on what the numbers mean; the report's section begins with them.

        By default the sentences count the verdicts of the claims; without claims there are none.
        """
        return self._shown_by_view("opening") if self._view("opening") else count_verdicts(self)

    def beside(self) -> dict[str, str]:
        """Return openings for parts that the report shows in other sections, by the section's name."""
        return self._shown_by_view("beside", {})

    def subjects(self) -> list[str]:
        """Return the subjects if they are more than the model in the settings: sides of a comparison."""
        return self._shown_by_view("subjects", [])

    def captions(self) -> dict[str, str]:
        """Return the captions of figures, scenes and tables."""
        return self._shown_by_view("captions")

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return tables by name, for CSV files and the report."""
        return _with_data_frames(self._shown_by_view)("tables")

    def figures(self) -> dict[str, Figure]:
        """Return figures by name."""
        return style.styled(self._shown_by_view)("figures")

    def scenes(self) -> dict[str, Scene]:
        """Return interactive figures; one with the name of a figure replaces it in a browser."""
        return self._shown_by_view("scenes", {})

    def files(self) -> dict[str, str]:
        """Return further text files by name, beside the tables."""
        return self._shown_by_view("files", {})

    def claims(self) -> list[Claim]:
        """Return claims next to the measured values; empty for a result without claims."""
        return self._shown_by_view("claims", [])

    def _view(self, name: str) -> Callable[[Shown], Any] | None:
        """Return the function of this name in the view module of the class or of one of its bases."""
        modules = (_import_view(cls.__module__) for cls in type(self).__mro__)
        return next((function for module in modules if (function := getattr(module, name, None))), None)

    def _shown_by_view(self, name: str, default: Any = None) -> Any:
        """Call the view's function of this name on the result; return the default if there is none."""
        show = self._view(name)
        if show is None and default is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no method {name}, and no view with that function"
            )
        return default if show is None else show(self)


def _with_data_frames(make: Callable[P, Tables]) -> Callable[P, dict[str, pd.DataFrame]]:
    """Wrap `make` so that it returns data frames."""

    @wraps(make)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> dict[str, pd.DataFrame]:
        import pandas as pd

        def frame(table: Any) -> pd.DataFrame:
            if isinstance(table, pd.DataFrame):
                return table
            several = isinstance(table, list) and any(isinstance(part, pd.DataFrame) for part in table)
            return pd.concat(table, ignore_index=True) if several else pd.DataFrame(table)

        return {name: frame(table) for name, table in make(*args, **kwargs).items()}

    return wrapper


def count_verdicts(result: Shown) -> str:
    """Count the claims of a result by verdict, in words; empty for a result without claims."""
    verdicts = Counter(claim.verdict for claim in result.claims()).most_common()
    if not verdicts:
        return ""
    counts = ", ".join(f"{verdict} {count}" for verdict, count in verdicts)
    return f"Verdicts on {plural(sum(count for _, count in verdicts), 'statement')}: {counts}."


@cache
def _import_view(module: str) -> ModuleType | None:
    """Import and return the module `view` in the package of a study or paper."""
    name = f"{module.rpartition('.')[0]}.view"
    is_own = name.startswith(("curvescope.studies.", "curvescope.papers."))
    return import_module(name) if is_own and find_spec(name) else None
