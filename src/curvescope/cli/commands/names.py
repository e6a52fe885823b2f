"""Commands that look and compute nothing: names, models, this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from curvescope.cli.typed import completion
from curvescope.cli.typed.options import MODEL, AsJson, Blocks, Revision


def list_names(json: AsJson = False) -> None:
    """What can be named: studies, papers, models, corpora, tasks, losses.

    Examples: curvescope list; curvescope list --json
    """
    from curvescope.cli import catalogue

    catalogue.show(as_json=json)


def info(
    model: Annotated[str, typer.Argument(help=MODEL, autocompletion=completion.models)],
    revision: Revision = None,
    heads: Annotated[
        bool, typer.Option("--heads/--no-heads", help="List the blocks of single heads too.")
    ] = False,
    blocks: Blocks = None,
    json: AsJson = False,
) -> None:
    """What a model is made of: roles, blocks, parameters, what was switched, what to know about it.

    Examples: curvescope info tiny-gpt --revision early; curvescope info tiny-gpt --blocks 'L0.h*.W_Q'
    """
    from curvescope.cli import model_info

    model_info.show(model, revision=revision, heads=heads, blocks=blocks or (), as_json=json)


def doctor(json: AsJson = False) -> None:
    """What is installed, which engines and devices work, whether test models are found.

    Examples: curvescope doctor; curvescope doctor --json
    """
    from curvescope.cli import checkup

    if not checkup.show(as_json=json):
        raise typer.Exit(1)
