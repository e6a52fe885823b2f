"""Papers: their figures and tables measured again, published next to measured. Imports none of them.

A paper is a package here with `FIGURES` and `MORE`, a line on each, and may have `UNCLEAR`: names of
settings that it refuses, with what to say instead. A figure is all that a study is: a frozen `Config` and
`run(cfg, *, progress=None, state=None) -> Shown`, called `STUDY` in a module of the figure's name. Figures
that are studies with settings of their own are together in the module `figures`, as its `STUDIES`. Results
have `claims` too, and `reproduce` writes everything into one folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import NamedTuple

from curvescope.core.config import Config
from curvescope.core.errors import UsageError, near_misses
from curvescope.runs.study import Study, study_in


class Paper(NamedTuple):
    """What is said about a paper."""

    words: str
    citation: str


PAPERS = {
    "ormaniec2025": Paper(
        "every figure of 'What Does It Mean to Be a Transformer?', and its statements checked",
        "Weronika Ormaniec, Felix Dangel, Sidak Pal Singh: What Does It Mean to Be a Transformer? Insights "
        "from a Theoretical Hessian Analysis. ICLR 2025. Code: github.com/dalab/transformer-hessian, f0d73f7",
    ),
    "petrov2025": Paper(
        "'Closing the Curvature Gap' and the article around it: honest versions of all that was promised",
        "Closing the Curvature Gap. arXiv 2510.16927, 2025; its precursor: arXiv 2409.11995, 2024",
    ),
    "singh2025": Paper(
        "the statements of 'Cracking the Hessian' checked: exact spectra, the GGN, norms of weights, sinks",
        "Sidak Pal Singh, Weronika Ormaniec, Thomas Hofmann: Cracking the Hessian. Slides, 2025",
    ),
    "molina2023": Paper(
        "the geometry of 'Traveling Words' on any language model: norms, embeddings, heads, trajectories",
        "Raul Molina: Traveling Words: A Geometric Interpretation of Transformers. arXiv 2309.07315, 2023. "
        "Code: github.com/santiag0m/traveling-words, 137aa60",
    ),
}


def figures_of(paper: str, *, more: bool = False) -> dict[str, str]:
    """The figures of a paper with a line on each; with those it does not have itself if `more`."""
    if paper not in PAPERS:
        raise UsageError(f"expected a paper, got {paper!r}", hint=near_misses(paper, list(PAPERS)))
    package = import_module(f"curvescope.papers.{paper}")
    return {**package.FIGURES, **(package.MORE if more else {})}


def check_settings(paper: str, names: Iterable[str]) -> None:
    """Raise where one of the settings would mean something else for every figure: `UNCLEAR` of the paper."""
    unclear: dict[str, str] = getattr(import_module(f"curvescope.papers.{paper}"), "UNCLEAR", {})
    for name in names:
        if name in unclear:
            raise UsageError(f"{name!r} could mean several things for {paper}", hint=unclear[name])


def find_figure(paper: str, figure: str) -> Study[Config]:
    """A figure of a paper; its module is imported now."""
    known = figures_of(paper, more=True)
    if figure not in known:
        raise UsageError(
            f"expected a figure of {paper}, got {figure!r}", hint=near_misses(figure, list(known))
        )
    package = f"curvescope.papers.{paper}"
    try:
        return study_in(f"{package}.{figure}")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.{figure}":  # something that the figure imports
            raise
    return import_module(f"{package}.figures").STUDIES[figure]
