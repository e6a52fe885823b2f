"""`curvescope info`: a model's roles and blocks, and what a reader should know about it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import typer

from curvescope.cli import printing
from curvescope.core.blocks import Block
from curvescope.models.choice.choosing import frozen, notes_of
from curvescope.models.choice.selecting import select
from curvescope.models.load import load
from curvescope.models.model import Model

PRECISION = {
    "float32": "float32: a product with a second derivative has a relative error of about 1e-5; "
    "eigenvalues below 1e-5 of the largest are noise. Studies take --dtype float64",
    "float64": "float64: a product with a second derivative has a relative error of about 1e-14",
}
ZOO = ("transformer", "mlp")
SHOWN = (
    "kind", "task", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff", "n_ctx", "vocab_size",
    "attention", "causal", "norm", "norm_kind", "activation", "positions", "tied", "depth", "d_hidden",
)  # fmt: skip


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
    dtype = str(model.dtype).removeprefix("torch.")
    if as_json:
        printing.as_json(_as_dict(model, listed, dtype))
        return
    typer.echo(f"{model.name}: {model.num_parameters:,} parameters in {len(model.blocks)} blocks, {dtype}")
    facts = [f"{key}={value}" for key, value in _facts(model).items()]
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
            [b.name, _times(b.shape), f"{b.size:,}", f"{b.size / model.num_parameters:.2%}", _stored(b, left)]
            for b in listed
        ],
        right=(2, 3),
    )


def roles(model: Model) -> list[dict[str, Any]]:
    """Blocks of the same role in all layers, together: `L*.W_Q`."""
    found: dict[str, list[Block]] = {}
    for block in model.blocks.values():
        found.setdefault(re.sub(r"^L\d+\.(expert\d+\.)?", _starred, block.name), []).append(block)
    return [
        {
            "role": role,
            "blocks": len(blocks),
            "shape": " or ".join(dict.fromkeys(_times(block.shape) for block in blocks)),
            "parameters": sum(block.size for block in blocks),
            "share": sum(block.size for block in blocks) / model.num_parameters,
        }
        for role, blocks in found.items()
    ]


def _starred(front: re.Match[str]) -> str:
    """`L*.` for `L3.`, `L*.expert*.` for `L3.expert5.`."""
    return "L*.expert*." if front[1] else "L*."


def notes(model: Model) -> list[str]:
    """What was switched and what to know: the model's own notes, and what its facts say beyond them."""
    said, facts = " ".join(model.notes).lower(), model.facts
    found = list(model.notes)
    dropout = facts.get("dropout")
    if isinstance(dropout, float) and dropout > 0 and "dropout" not in said:
        found.append(f"dropout ({dropout:g}) is switched off: curvature is that of the model in eval mode")
    if facts.get("tied") and "tied" not in said and "unembedding" not in said:
        found.append("tied weights: the unembedding is the embedding, and one block holds both")
    experts = facts.get("num_experts", facts.get("n_experts"))
    if experts and "expert" not in said:
        found.append(f"mixture of {experts} experts: curvature is that of the routing at these parameters")
    return found


def _facts(model: Model) -> dict[str, Any]:
    """The facts of a zoo model that describe it; of others, all that are numbers or words."""
    known = {key: model.facts[key] for key in SHOWN if key in model.facts}
    if model.facts.get("kind") in ZOO:
        return known
    return known | {k: v for k, v in model.facts.items() if isinstance(v, bool | int | float | str)}


def _as_dict(model: Model, listed: list[Block], dtype: str) -> dict[str, Any]:
    total, left = model.num_parameters, frozen(model)
    rows = [
        {
            "block": b.name,
            "shape": list(b.shape),
            "parameters": b.size,
            "share": b.size / total,
            "parameter": b.parameter,
            "frozen": b.parameter in left,
        }
        for b in listed
    ]
    return {
        "model": model.name,
        "parameters": total,
        "dtype": dtype,
        "precision": PRECISION.get(dtype, ""),
        "facts": dict(model.facts),
        "notes": [*notes(model), *notes_of(model, left)],
        "roles": roles(model),
        "blocks": rows,
    }


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def _stored(block: Block, left: frozenset[str]) -> str:
    """The parameter that a block lies in, where that has another name; whether it is `left` out."""
    part = " (part)" if block.narrow else ""
    words = ["" if block.parameter == block.name else block.parameter + part]
    words += ["frozen"] if block.parameter in left else []
    return ", ".join(filter(None, words))
