"""Settings, claims and helpers shared by the figures of all papers."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from curvescope.core.config import Config, setting
from curvescope.core.progress import Progress
from curvescope.runs.resumable_loop import State
from curvescope.runs.study import Run, Study
from curvescope.runs.study_result import FAILS, HOLDS, OPEN, Claim, Line, Origin, Shown, Tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Profile = Literal["quick", "full"]
T = TypeVar("T")
F = TypeVar("F", bound="FigureConfig")
S = TypeVar("S", bound=Config)

AGREES, DIFFERS = "agrees", "differs"
AUTHORS_CODE = "authors' code"  # printed by the authors' code, or stored in its result files
OURS: Origin = ("ours", "ours")
Judged = tuple[str, str]
"""The measured value in words, and the verdict: the third and fourth field of a `Claim`."""


@dataclass(frozen=True)
class FigureConfig(Config):
    """Settings that all figures share. An exact and fast figure is the same in both profiles."""

    profile: Profile = setting("quick", "quick takes minutes; full has the number of repeats of the paper")
    replay: bool = setting(False, "use the paper's own random numbers, if the figure does not always do so")
    device: str = setting("cpu", "device: cpu, cuda, …")


def with_settings(config: type[F], settings: Callable[[F], S], run: Run[S]) -> Study[F]:
    """Return a figure that is a study with other settings.

    Args:
        config: Settings of the figure.
        settings: Function that maps them to the settings of the study.
        run: Function that runs the study.
    """

    def figure(cfg: F, *, progress: Progress | None = None, state: State | None = None) -> Shown:
        return run(settings(cfg), progress=progress, state=state)

    return Study(config, figure)


@dataclass(frozen=True)
class Claimed(Shown):
    """Result of a study as a figure of a paper, with `claims`."""

    NAME: ClassVar[str]  # name of the figure

    measured: Shown

    def summary(self) -> list[Line]:
        """Return the claims, verdicts and measured values."""
        return [(claim.claim, claim.verdict, claim.measured) for claim in self.claims()]

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table."""
        return prefixed(self.NAME, self.measured.captions(), keep=self.NAME)

    def tables(self) -> Tables:
        """Return the tables of the study."""
        return prefixed(self.NAME, self.measured.tables(), keep=self.NAME)

    def figures(self) -> dict[str, Figure]:
        """Return the figures of the study."""
        return prefixed(self.NAME, self.measured.figures(), keep=self.NAME)


def prefixed(figure: str, items: dict[str, T], *, keep: str = "") -> dict[str, T]:
    """Prefix all names except `keep` with the figure's name, because figures of a paper share a folder."""
    return {name if name == keep else f"{figure}_{name}": item for name, item in items.items()}


def decided(*, right: bool, wrong: bool) -> str:
    """Return the verdict on a statement that can be shown right, shown wrong, or neither."""
    return HOLDS if right else FAILS if wrong else OPEN


def as_printed(claim: str, published: str, measured: float, *, source: str) -> Claim:
    """Compare with a number that is printed with a fixed number of digits: all digits must agree."""
    rounded = like(measured, published)
    return Claim(claim, published, rounded, AGREES if float(rounded) == float(published) else DIFFERS, source)


def within(claim: str, published: float, measured: float, *, relative: float, source: str) -> Claim:
    """Compare with a number: the claim agrees if |measured − published| ≤ relative · |published|."""
    difference = abs(measured - published) / abs(published)
    shown = f"{measured:.9g} (relative difference {difference:.1e})"
    return Claim(claim, f"{published:.9g}", shown, AGREES if difference <= relative else DIFFERS, source)


def like(value: float, text: str) -> str:
    """Format `value` with the digits and the notation of the number `text`: like(0.00026471, "2.647e-4")."""
    mantissa, exponent, _ = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return f"{value:.{decimals}{'e' if exponent else 'f'}}"


def published_table(paper: str, name: str) -> list[dict[str, str]]:
    """Read the rows of a table under `published/` of a paper; lines that begin with # are its citation."""
    text = (files(f"curvescope.papers.{paper}") / "published" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
