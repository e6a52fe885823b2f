"""`curvescope info`: what a model is made of, and what a study of it would take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from curvescope.cli import printing
from curvescope.cli.typed.settings_parsing import check_options, choose_device, merge, names_of, spoken
from curvescope.core.blocks import Block
from curvescope.core.config import Settings
from curvescope.core.errors import UsageError
from curvescope.models.description import PRECISION, describe, dtype_of, notes, roles, telling_facts, times
from curvescope.models.load import load
from curvescope.models.parameter_selection import frozen, frozen_notes, select
from curvescope.studies import find, run_study
from curvescope.studies.preflight import forecast, sizes, view


def show_model(
    source: str, *, revision: str | None, heads: bool, blocks: Iterable[str] = (), as_json: bool
) -> None:
    """Print what is known of a model, its roles and its blocks.

    Args:
        blocks: globs of the blocks to list; without one, all of them, and single heads if `heads`.
    """
    model = load(source, revision=revision)
    patterns = tuple(blocks)
    listed = select(patterns, model.blocks, model.heads) if patterns else list(model.blocks.values())
    listed += list(model.heads.values()) if heads and not patterns else []
    dtype = dtype_of(model)
    if as_json:
        printing.as_json(describe(model, listed))
        return
    typer.echo(f"{model.name}: {model.num_parameters:,} parameters in {len(model.blocks)} blocks, {dtype}")
    facts = [f"{key}={value}" for key, value in telling_facts(dict(model.facts)).items()]
    if facts:
        typer.echo(", ".join(facts))
    if dtype in PRECISION:
        typer.echo(PRECISION[dtype])
    left = frozen(model)
    for note in [*notes(model), *frozen_notes(model, left)]:
        typer.echo(f"note: {note}")
    if not patterns:
        typer.echo("")
        rows = [
            [r["role"], r["blocks"], r["shape"], f"{r['parameters']:,}", f"{r['share']:.2%}"]
            for r in roles(model)
        ]
        printing.table(["role", "blocks", "shape", "parameters", "share"], rows, right=(1, 3, 4))
    typer.echo("")
    printing.table(
        ["block", "shape", "parameters", "share", "stored in"],
        [
            [b.name, times(b.shape), f"{b.size:,}", f"{b.size / model.num_parameters:.2%}", _stored(b, left)]
            for b in listed
        ],
        right=(2, 3),
    )


def _stored(block: Block, left: frozenset[str]) -> str:
    """The parameter that a block lies in, where that has another name; whether it is `left` out."""
    part = " (part)" if block.narrow else ""
    words = ["" if block.parameter == block.name else block.parameter + part]
    words += ["frozen"] if block.parameter in left else []
    return ", ".join(filter(None, words))


BEGUN = "measuring products of {model} as {study} takes them: 15 s or so, more where one is slow"
MEASURED = "measuring a pilot and other data for a precision of {precision}: about two small runs"


def show_plan(
    study: str,
    config: Path | None,
    pairs: Sequence[str],
    given: Settings,
    *,
    limit: run_study.Limit,
    precision: str | None = None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Print the forecast of `curvescope run STUDY MODEL` with the same options.

    Args:
        config: TOML file with settings.
        pairs: NAME=VALUE of --set.
        given: options by name, the model among them.
        limit: what the run would be given; settings are chosen as it would choose them.
        precision: such as 10%: the data that the Hessian's numbers need for it are predicted too.
    """
    found = find(study)
    wanted = None if precision is None else sizes.precision_of(precision)
    with spoken(study, found.Config):
        check_options(study, found.Config, given)
        settings = merge([found.Config], config, pairs, given)
        if "device" in names_of(found.Config):
            settings = choose_device(settings, lambda line: None if quiet else typer.echo(line, err=True))
        if found.plan is not None and not quiet:
            typer.echo(BEGUN.format(model=given["model"], study=study), err=True)
        chosen = run_study.fitted(found, settings, limit, timed=False)
        if chosen.choice and not quiet:
            typer.echo(chosen.choice, err=True)
        predicted = forecast(study, found, chosen.cfg, model=chosen.model)
        needed = None
        if predicted is not None and found.plan is not None and wanted is not None:
            if not quiet:
                typer.echo(MEASURED.format(precision=precision), err=True)
            model = predicted.problem.model
            needed = sizes.data_needed(study, found.plan, predicted.cfg, wanted, model=model)
    if predicted is None:
        _show_model(study, given, as_json=as_json)
        return
    if as_json:
        sized = {} if needed is None else {"precision": needed.as_dict()}
        plan = {**view.as_dict(predicted), **sized}
        printing.as_json({**describe(predicted.problem.model, ()), "plan": plan})
        return
    for line in view.lines(predicted):
        typer.echo(line)
    if needed is not None:
        typer.echo("")
        printing.table(list(sizes.COLUMNS), needed.rows(), right=(1, 2))
        typer.echo(needed.answer)


def refuse_options(given: Settings) -> None:
    """Raise where an option of a study is given without one."""
    for option, value in given.items():
        if value not in (None, []):
            raise UsageError(
                f"--{option} is an option of a study, and none was named", hint="add --plan STUDY"
            )


def _show_model(study: str, given: Settings, *, as_json: bool) -> None:
    """Describe the model for a study without a plan, and say that there is no plan."""
    model = load(str(given["model"]), revision=str(given["revision"]) if given.get("revision") else None)
    said = view.NO_PLAN.format(study=study)
    if as_json:
        printing.as_json({**describe(model, ()), "plan": None, "note": said})
        return
    for line in [*view.about(model), said]:
        typer.echo(line)
