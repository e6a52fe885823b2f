"""What the figures of all papers share: settings, claims next to what was measured, studies as figures."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from curvescope.core.config import Config, setting
from curvescope.core.progress import Progress
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Line, Origin, Shown
from curvescope.runs.study import Run, Study
from curvescope.runs.work import State

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Profile = Literal["quick", "full"]
T = TypeVar("T")
F = TypeVar("F", bound="FigureConfig")
S = TypeVar("S", bound=Config)

AGREES, DIFFERS = "agrees", "differs"
AUTHORS_CODE = "authors' code"  # printed by it when it is run, or stored in its result files
OURS: Origin = ("ours", "ours")
Judged = tuple[str, str]
"""What was measured, in words, and the verdict that follows: the third and fourth field of a `Claim`."""


@dataclass(frozen=True)
class FigureConfig(Config):
    """How hard to work, and where. A figure that is exact and quick anyway is the same in both profiles."""

    profile: Profile = setting("quick", "quick takes minutes, full has the paper's own repeats")
    replay: bool = setting(False, "the paper's own random streams, where a figure does not use them anyway")
    device: str = setting("cpu", "cpu, cuda, …")


def with_settings(config: type[F], settings: Callable[[F], S], run: Run[S]) -> Study[F]:
    """A figure that is a study with other settings.

    Args:
        config: The settings of the figure.
        settings: Those of the study, from those of the figure.
        run: The study.
    """

    def figure(cfg: F, *, progress: Progress | None = None, state: State | None = None) -> Shown:
        return run(settings(cfg), progress=progress, state=state)

    return Study(config, figure)


@dataclass(frozen=True)
class Claimed(Shown):
    """The result of a study as a figure of a paper, which adds `claims`."""

    NAME: ClassVar[str]  # of the figure

    measured: Shown

    def summary(self) -> list[Line]:
        """The claims, shorter: label, value, words."""
        return [(claim.claim, claim.verdict, claim.measured) for claim in self.claims()]

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return prefixed(self.NAME, self.measured.captions(), keep=self.NAME)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Those of the study."""
        return prefixed(self.NAME, self.measured.tables(), keep=self.NAME)

    def figures(self) -> dict[str, Figure]:
        """Those of the study."""
        return prefixed(self.NAME, self.measured.figures(), keep=self.NAME)


def prefixed(figure: str, found: dict[str, T], *, keep: str = "") -> dict[str, T]:
    """Put the figure's name before all names but `keep`, because figures of a paper lie in one folder."""
    return {name if name == keep else f"{figure}_{name}": one for name, one in found.items()}


def decided(*, right: bool, wrong: bool) -> str:
    """Verdict on a statement that may be shown to hold, shown to fail, or neither."""
    return HOLDS if right else FAILS if wrong else OPEN


def as_printed(claim: str, published: str, measured: float, *, source: str) -> Claim:
    """A claim whose number is given with a certain number of digits: do all of them come out?"""
    found = like(measured, published)
    return Claim(claim, published, found, AGREES if float(found) == float(published) else DIFFERS, source)


def within(claim: str, published: float, measured: float, *, relative: float, source: str) -> Claim:
    """A claim that agrees if |measured − published| ≤ relative · |published|; it shows the difference."""
    difference = abs(measured - published) / abs(published)
    shown = f"{measured:.9g} (relative difference {difference:.1e})"
    return Claim(claim, f"{published:.9g}", shown, AGREES if difference <= relative else DIFFERS, source)


def like(value: float, text: str) -> str:
    """`value` with the digits and the notation of the number `text`: like(0.00026471, "2.647e-4")."""
    mantissa, exponent, _ = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return f"{value:.{decimals}{'e' if exponent else 'f'}}"


def published_table(paper: str, name: str) -> list[dict[str, str]]:
    """The rows of a table under `published/` of a paper; lines that begin with # are its citation."""
    text = (files(f"curvescope.papers.{paper}") / "published" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
