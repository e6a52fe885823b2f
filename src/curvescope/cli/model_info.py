"""`curvescope info`: describe a model, and predict time and memory of a study of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from curvescope.cli import printing
from curvescope.cli.arguments.settings_parsing import (
    check_options,
    choose_device,
    merge,
    names_of,
    with_option_hints,
)
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
    """Print facts about a model, its roles and its blocks.

    Args:
        blocks: globs of the blocks to list. By default all blocks, and single heads if `heads`.
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
    frozen_parameters = frozen(model)
    for note in [*notes(model), *frozen_notes(model, frozen_parameters)]:
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
            [
                b.name,
                times(b.shape),
                f"{b.size:,}",
                f"{b.size / model.num_parameters:.2%}",
                _stored(b, frozen_parameters),
            ]
            for b in listed
        ],
        right=(2, 3),
    )


def _stored(block: Block, frozen_parameters: frozenset[str]) -> str:
    """Return the parameter that stores a block, if its name differs, and whether it is frozen."""
    part = " (part)" if block.narrow else ""
    words = ["" if block.parameter == block.name else block.parameter + part]
    words += ["frozen"] if block.parameter in frozen_parameters else []
    return ", ".join(filter(None, words))


MEASURING_PRODUCTS = (
    "measuring the products that {study} needs on {model}: about 15 s, more if products are slow"
)
MEASURING_PRECISION = (
    "measuring a pilot and other data for a precision of {precision}: takes about two small runs"
)


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
        given: options by name, including the model.
        limit: profile and time limit of the run, which determine the settings that are left out.
        precision: relative precision such as 10%. If given, also predict the tokens that the Hessian's
            numbers need for it.
    """
    study_module = find(study)
    target_precision = None if precision is None else sizes.precision_of(precision)
    with with_option_hints(study, study_module.Config):
        check_options(study, study_module.Config, given)
        settings = merge([study_module.Config], config, pairs, given)
        if "device" in names_of(study_module.Config):
            settings = choose_device(settings, lambda line: None if quiet else typer.echo(line, err=True))
        if study_module.plan is not None and not quiet:
            typer.echo(MEASURING_PRODUCTS.format(model=given["model"], study=study), err=True)
        chosen = run_study.fitted(study_module, settings, limit, timed=False)
        if chosen.choice and not quiet:
            typer.echo(chosen.choice, err=True)
        prediction = forecast(study, study_module, chosen.cfg, model=chosen.model)
        needed = None
        if prediction is not None and study_module.plan is not None and target_precision is not None:
            if not quiet:
                typer.echo(MEASURING_PRECISION.format(precision=precision), err=True)
            model = prediction.problem.model
            needed = sizes.data_needed(
                study, study_module.plan, prediction.cfg, target_precision, model=model
            )
    if prediction is None:
        _show_model(study, given, as_json=as_json)
        return
    if as_json:
        data_sizes = {} if needed is None else {"precision": needed.as_dict()}
        plan = {**view.as_dict(prediction), **data_sizes}
        printing.as_json({**describe(prediction.problem.model, ()), "plan": plan})
        return
    for line in view.lines(prediction):
        typer.echo(line)
    if needed is not None:
        typer.echo("")
        printing.table(list(sizes.COLUMNS), needed.rows(), right=(1, 2))
        typer.echo(needed.answer)


def refuse_options(given: Settings) -> None:
    """Raise UsageError if an option of a study is given without --plan."""
    for option, value in given.items():
        if value not in (None, []):
            raise UsageError(f"expected --plan STUDY with --{option}, got no study", hint="add --plan STUDY")


def _show_model(study: str, given: Settings, *, as_json: bool) -> None:
    """Describe the model and print that the study has no plan."""
    model = load(str(given["model"]), revision=str(given["revision"]) if given.get("revision") else None)
    note = view.NO_PLAN.format(study=study)
    if as_json:
        printing.as_json({**describe(model, ()), "plan": None, "note": note})
        return
    for line in [*view.about(model), note]:
        typer.echo(line)
