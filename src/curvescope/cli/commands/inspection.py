"""Commands `list`, `info` and `doctor`: describe names, models and this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from curvescope.cli import printing
from curvescope.cli.arguments import options
from curvescope.cli.arguments.options import (
    MODEL,
    AsJson,
    Blocks,
    Budget,
    ConfigFile,
    Profile,
    Quiet,
    Revision,
    Set,
    declares,
)
from curvescope.core.config import Value
from curvescope.data.corpora import CORPORA
from curvescope.data.task_names import TASKS
from curvescope.models.zoo import BUNDLED
from curvescope.papers import PAPERS
from curvescope.studies import STUDIES

LOSSES = {
    "cross_entropy": "cross-entropy; a term is one target that is not ignored",
    "mse": "squared error, normalized as in the theory; a term is one sequence",
    "mse_mean": "mean squared error; a term is one entry",
}


def list_names(json: AsJson = False) -> None:
    """List studies, papers, models, data and losses.

    Examples: curvescope list; curvescope list --json
    """
    groups = {
        "studies": STUDIES,
        "papers": {name: paper.words for name, paper in PAPERS.items()},
        "models": BUNDLED,
        "corpora": CORPORA,
        "tasks": {name: entry.description for name, entry in TASKS.items()},
        "losses": LOSSES,
    }
    if json:
        printing.as_json(groups)
        return
    for title, names in groups.items():
        typer.echo(f"{title}")
        for name, words in names.items():
            typer.echo(f"  {name:<20} {words}")
    typer.echo("\nTo list the settings of a study: curvescope run STUDY --settings")


@declares("data tokens tokenizer dtype device checkpoints seed")
def info(
    model: Annotated[str, typer.Argument(help=MODEL, autocompletion=options.complete_models)],
    revision: Revision = None,
    heads: Annotated[
        bool, typer.Option("--heads/--no-heads", help="List the blocks of single heads too.")
    ] = False,
    blocks: Blocks = None,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            help="Predict time and memory of this study, with options as in `run`.",
            autocompletion=options.complete_studies,
        ),
    ] = None,
    config: ConfigFile = None,
    set: Set = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision", help="With --plan: predict the tokens needed for this precision, such as 10%."
        ),
    ] = None,
    profile: Profile = None,
    budget: Budget = None,
    json: AsJson = False,
    quiet: Quiet = False,
    *,
    given: dict[str, Value],
) -> None:
    """Describe a model, or plan a study of it.

    Shows roles, blocks, parameters, and notes on how curvescope measures the model.

    --plan STUDY predicts the time and memory of `curvescope run STUDY MODEL` with the same settings in one
    process. It measures a few products and writes nothing. The exit code is 0 even if the study does not fit
    into memory; with --json, plan.fits tells. --precision also predicts how many tokens the trace, the norm
    and the extreme eigenvalues of the Hessian need, from a pilot that is checked on other data.

    Examples: curvescope info tiny-gpt --revision early; curvescope info tiny-gpt --blocks 'L0.h*.W_Q';
    curvescope info tiny-gpt --plan spectrum --tokens 128; curvescope info tiny-gpt --plan spectrum
    --precision 10%
    """
    from curvescope.cli import model_info
    from curvescope.studies.run_study import Limit

    if plan is None:
        others = {"config": config and str(config), "set": set, "profile": profile, "budget": budget}
        others |= {"precision": precision}
        model_info.refuse_options({**given, **others})
        model_info.show_model(model, revision=revision, heads=heads, blocks=blocks or (), as_json=json)
        return
    given |= {"model": model, "revision": revision, "blocks": blocks}
    limit = Limit(profile, budget)
    model_info.show_plan(
        plan, config, set or [], given, limit=limit, precision=precision, quiet=quiet, as_json=json
    )


def doctor(json: AsJson = False) -> None:
    """Check packages, engines, devices and test models.

    Examples: curvescope doctor; curvescope doctor --json
    """
    from curvescope.cli import doctor as check

    if not check.show(as_json=json):
        raise typer.Exit(1)
