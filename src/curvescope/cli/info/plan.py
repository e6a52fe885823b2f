"""`curvescope info MODEL --plan STUDY`: what a run would take here, before it is begun."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from curvescope.cli import printing
from curvescope.cli.typed.asking import check_options, choose_device, merge, names_of, spoken
from curvescope.core.config import Settings
from curvescope.core.errors import UsageError
from curvescope.models.description import describe
from curvescope.models.load import load
from curvescope.studies import find, folder
from curvescope.studies.preflight import forecast, view

BEGUN = "measuring products of {model} as {study} takes them: 15 s or so, more where one is slow"


def show(
    study: str,
    config: Path | None,
    pairs: Sequence[str],
    given: Settings,
    *,
    limit: folder.Limit,
    quiet: bool,
    as_json: bool,
) -> None:
    """Print the forecast of `curvescope run STUDY MODEL` with the same options.

    Args:
        config: TOML file with settings.
        pairs: NAME=VALUE of --set.
        given: options by name, the model among them.
        limit: what the run would be given; settings are chosen as it would choose them.
    """
    found = find(study)
    with spoken(study, found.Config):
        check_options(study, found.Config, given)
        settings = merge([found.Config], config, pairs, given)
        if "device" in names_of(found.Config):
            settings = choose_device(settings, lambda line: None if quiet else typer.echo(line, err=True))
        if found.plan is not None and not quiet:
            typer.echo(BEGUN.format(model=given["model"], study=study), err=True)
        chosen = folder.fitted(found, settings, limit, timed=False)
        if chosen.choice and not quiet:
            typer.echo(chosen.choice, err=True)
        predicted = forecast(study, found, chosen.cfg, model=chosen.model)
    if predicted is None:
        _show_model(study, given, as_json=as_json)
    elif as_json:
        printing.as_json({**describe(predicted.problem.model, ()), "plan": view.as_dict(predicted)})
    else:
        for line in view.lines(predicted):
            typer.echo(line)


def refuse_options(given: Settings) -> None:
    """Raise where an option of a study is given without one."""
    for option, value in given.items():
        if value not in (None, []):
            raise UsageError(
                f"--{option} is an option of a study, and none was named", hint="add --plan STUDY"
            )


def _show_model(study: str, given: Settings, *, as_json: bool) -> None:
    """Of a study without a plan what is known of the model, and that there is none."""
    model = load(str(given["model"]), revision=str(given["revision"]) if given.get("revision") else None)
    said = view.NO_PLAN.format(study=study)
    if as_json:
        printing.as_json({**describe(model, ()), "plan": None, "note": said})
        return
    for line in [*view.about(model), said]:
        typer.echo(line)
