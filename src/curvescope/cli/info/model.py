"""`curvescope info`: a model's roles and blocks, and what a reader should know about it."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from curvescope.cli import printing
from curvescope.core.blocks import Block
from curvescope.models.choice import frozen, notes_of, select
from curvescope.models.description import PRECISION, describe, dtype_of, notes, roles, telling_facts, times
from curvescope.models.load import load


def show(
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
    for note in [*notes(model), *notes_of(model, left)]:
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
