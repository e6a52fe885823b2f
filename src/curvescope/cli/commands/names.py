"""Commands that look and compute nothing: names, models, this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from curvescope.cli import printing
from curvescope.cli.typed import options
from curvescope.cli.typed.options import (
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
    "cross_entropy": "a term is one target that counts",
    "mse": "squared error in the theory's normalization; a term is one sequence",
    "mse_mean": "squared error as a plain mean; a term is one entry",
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
    typer.echo("\nsettings of a study, with defaults and meaning: curvescope run STUDY --settings")


@declares("data tokens tokenizer dtype device checkpoints seed")
def info(
    model: Annotated[str, typer.Argument(help=MODEL, autocompletion=options.models)],
    revision: Revision = None,
    heads: Annotated[
        bool, typer.Option("--heads/--no-heads", help="List the blocks of single heads too.")
    ] = False,
    blocks: Blocks = None,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            help="A study: how long it would take here, with its options as in `run`, and how much memory.",
            autocompletion=options.studies,
        ),
    ] = None,
    config: ConfigFile = None,
    set: Set = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision", help="With --plan: how many tokens the Hessian's numbers need, such as 10%."
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

    Shows roles, blocks, parameters, and notes on how it is measured.

    With --plan STUDY what `curvescope run STUDY MODEL` would take with the same settings, in one process: a
    few products are measured, nothing is written. The exit code is 0 whether it fits or not; --json says
    it in plan.fits. With --precision also how many tokens the trace, the norm and the extreme eigenvalues of
    the Hessian need: predicted from a pilot, and checked on other data.

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
