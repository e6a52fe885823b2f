"""Papers whose figures and tables are measured again, with published and measured values side by side.

This module imports none of them. A paper is a package here with `FIGURES` and `MORE`, which describe each
figure in a line. It may have `UNCLEAR`: names of settings that it refuses, with a hint for each. A figure has
the parts of a study: a frozen `Config` and `run(cfg, *, progress=None, state=None) -> Shown`, called `STUDY`
in a module with the figure's name. Figures that are studies with other settings are in the module `figures`,
as its `STUDIES`. Results also have `claims`, and `reproduce` writes everything into one folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import NamedTuple

from curvescope.core.config import Config
from curvescope.core.errors import UsageError, near_misses
from curvescope.runs.study import Study, load_study


class Paper(NamedTuple):
    """Description and citation of a paper."""

    words: str
    citation: str


PAPERS = {
    "ormaniec2025": Paper(
        "every figure of 'What Does It Mean to Be a Transformer?', and a check of its statements",
        "Weronika Ormaniec, Felix Dangel, Sidak Pal Singh: What Does It Mean to Be a Transformer? Insights "
        "from a Theoretical Hessian Analysis. ICLR 2025. Code: github.com/dalab/transformer-hessian, f0d73f7",
    ),
    "petrov2025": Paper(
        "'Closing the Curvature Gap' and the article around it: measured versions of its figures",
        "Closing the Curvature Gap. arXiv 2510.16927, 2025; its precursor: arXiv 2409.11995, 2024",
    ),
    "singh2025": Paper(
        "a check of the statements in 'Cracking the Hessian': exact spectra, the GGN, weight norms, sinks",
        "Sidak Pal Singh, Weronika Ormaniec, Thomas Hofmann: Cracking the Hessian. Slides, 2025",
    ),
    "molina2023": Paper(
        "the geometry of 'Traveling Words' on any language model: norms, embeddings, heads, trajectories",
        "Raul Molina: Traveling Words: A Geometric Interpretation of Transformers. arXiv 2309.07315, 2023. "
        "Code: github.com/santiag0m/traveling-words, 137aa60",
    ),
}


def figures_of(paper: str, *, more: bool = False) -> dict[str, str]:
    """Return the figures of a paper with a line on each; `more` adds figures that the paper does not have."""
    if paper not in PAPERS:
        raise UsageError(f"expected a paper, got {paper!r}", hint=near_misses(paper, list(PAPERS)))
    package = import_module(f"curvescope.papers.{paper}")
    return {**package.FIGURES, **(package.MORE if more else {})}


def check_settings(paper: str, names: Iterable[str]) -> None:
    """Raise an error if a setting is ambiguous for this paper (see `UNCLEAR`)."""
    unclear: dict[str, str] = getattr(import_module(f"curvescope.papers.{paper}"), "UNCLEAR", {})
    for name in names:
        if name in unclear:
            raise UsageError(f"{name!r} could mean several things for {paper}", hint=unclear[name])


def find_figure(paper: str, figure: str) -> Study[Config]:
    """Import and return a figure of a paper."""
    known = figures_of(paper, more=True)
    if figure not in known:
        raise UsageError(
            f"expected a figure of {paper}, got {figure!r}", hint=near_misses(figure, list(known))
        )
    package = f"curvescope.papers.{paper}"
    try:
        return load_study(f"{package}.{figure}")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.{figure}":  # an import inside the figure failed
            raise
    return import_module(f"{package}.figures").STUDIES[figure]
