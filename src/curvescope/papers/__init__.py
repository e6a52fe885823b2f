"""Papers: their figures and tables measured again, published next to measured. Imports none of them.

A paper is a package here with `FIGURES`, a line on each. A figure is a module in it with a frozen `Config`
and `run(cfg, *, progress=None, state=None) -> Result`; the result has what that of a study has (`summary`,
`captions`, `tables`, `figures`) and `claims`, and `reproduce` writes all of it into one folder.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from curvescope.core.errors import UsageError, near_misses


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
    "molina2023": Paper(
        "the geometry of 'Traveling Words' on any language model: norms, embeddings, heads, trajectories",
        "Raul Molina: Traveling Words: A Geometric Interpretation of Transformers. arXiv 2309.07315, 2023. "
        "Code: github.com/santiag0m/traveling-words, 137aa60",
    ),
}


def find(paper: str) -> ModuleType:
    """The package of a paper."""
    if paper not in PAPERS:
        raise UsageError(f"expected a paper, got {paper!r}", hint=near_misses(paper, list(PAPERS)))
    return import_module(f"curvescope.papers.{paper}")


def find_figure(paper: str, figure: str) -> ModuleType:
    """The module of a figure of a paper."""
    package = find(paper)
    known = [*package.FIGURES, *getattr(package, "MORE", ())]
    if figure not in known:
        raise UsageError(f"expected a figure of {paper}, got {figure!r}", hint=near_misses(figure, known))
    return import_module(f"curvescope.papers.{paper}.{figure}")
