"""`curvescope info`: a model's blocks and what is known about it."""

from __future__ import annotations

import typer

from curvescope.cli import printing
from curvescope.models.load import load


def show(source: str, *, revision: str | None, heads: bool, as_json: bool) -> None:
    """Print the table of blocks."""
    model = load(source, revision=revision)
    total = model.num_parameters
    blocks = {**model.blocks, **(model.heads if heads else {})}
    rows = [
        {"block": b.name, "shape": list(b.shape), "parameters": b.size, "share": b.size / total}
        for b in blocks.values()
    ]
    if as_json:
        facts = dict(model.facts)
        dtype = str(model.dtype).removeprefix("torch.")
        printing.as_json(
            {
                "model": model.name,
                "parameters": total,
                "dtype": dtype,
                "facts": facts,
                "notes": list(model.notes),
                "blocks": rows,
            }
        )
        return
    typer.echo(f"{model.name}: {total:,} parameters in {len(model.blocks)} blocks, {model.dtype}")
    facts = [f"{k}={v}" for k, v in model.facts.items() if k in SHOWN]
    if facts:
        typer.echo(", ".join(facts))
    for note in model.notes:
        typer.echo(f"note: {note}")
    typer.echo("")
    cells = [
        [row["block"], " × ".join(map(str, row["shape"])), f"{row['parameters']:,}", f"{row['share']:.2%}"]
        for row in rows
    ]
    printing.table(["block", "shape", "parameters", "share"], cells, right=(2, 3))


SHOWN = (
    "kind", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff", "n_ctx", "vocab_size",
    "attention", "causal", "norm", "norm_kind", "activation", "positions", "tied", "depth", "d_hidden",
)  # fmt: skip
