"""A study's result as a figure of a paper: the same tables and figures, with claims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from curvescope.runs.shown import Line, Shown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

T = TypeVar("T")


@dataclass(frozen=True)
class Claimed(Shown):
    """What was measured; a figure of a paper adds `claims`."""

    NAME: ClassVar[str]  # of the figure

    measured: Shown

    def summary(self) -> list[Line]:
        """The claims, shorter: label, value, words."""
        return [(claim.claim, claim.verdict, claim.measured) for claim in self.claims()]

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return self._named(self.measured.captions())

    def tables(self) -> dict[str, pd.DataFrame]:
        """Those of the study."""
        return self._named(self.measured.tables())

    def figures(self) -> dict[str, Figure]:
        """Those of the study."""
        return self._named(self.measured.figures())

    def _named(self, found: dict[str, T]) -> dict[str, T]:
        """With the figure's name before each of theirs: others of the paper lie in the same folder."""
        return {name if name == self.NAME else f"{self.NAME}_{name}": one for name, one in found.items()}
