"""`curvescope list`: names that other commands take. Imports no torch."""

from __future__ import annotations

import typer

from curvescope.cli import printing
from curvescope.data.corpora import CORPORA
from curvescope.data.task_names import TASKS
from curvescope.models.zoo.names import BUNDLED
from curvescope.papers import PAPERS
from curvescope.studies import STUDIES

LOSSES = {
    "cross_entropy": "a term is one target that counts",
    "mse": "squared error in the theory's normalization; a term is one sequence",
    "mse_mean": "squared error as a plain mean; a term is one entry",
}


def show(*, as_json: bool) -> None:
    """Print every group of names."""
    groups = {
        "studies": STUDIES,
        "papers": {name: paper.words for name, paper in PAPERS.items()},
        "models": BUNDLED,
        "corpora": CORPORA,
        "tasks": {name: entry.description for name, entry in TASKS.items()},
        "losses": LOSSES,
    }
    if as_json:
        printing.as_json(groups)
        return
    for title, names in groups.items():
        typer.echo(f"{title}")
        for name, words in names.items():
            typer.echo(f"  {name:<20} {words}")
    typer.echo("\nsettings of a study, with defaults and meaning: curvescope run STUDY --settings")
