"""What a model is made of, as plain numbers and words: for `curvescope info`, run folders and the page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from curvescope.core.blocks import Block, by_role
from curvescope.models.choice import frozen, notes_of
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
Description = dict[str, Any]
"""What `describe` gives: text, numbers, lists and dictionaries of them."""


def describe(model: Model, blocks: Iterable[Block] | None = None) -> Description:
    """Name, size, type, facts, notes, roles and blocks of a model.

    Args:
        blocks: those to list; by default the model's own, which cover it once.
    """
    dtype, left = dtype_of(model), frozen(model)
    listed = _blocks(model) if blocks is None else blocks
    return {
        "model": model.name,
        "parameters": model.num_parameters,
        "dtype": dtype,
        "precision": PRECISION.get(dtype, ""),
        "facts": dict(model.facts),
        "notes": [*notes(model), *notes_of(model, left)],
        "roles": roles(model),
        "blocks": [_row(block, model.num_parameters, left) for block in listed],
    }


def dtype_of(model: Model) -> str:
    """`float32`."""
    return str(model.dtype).removeprefix("torch.")


def roles(model: Model) -> list[Description]:
    """Blocks of the same role in all layers, together: `L*.W_Q`."""
    return [
        {
            "role": role,
            "blocks": len(blocks),
            "shape": " or ".join(dict.fromkeys(times(block.shape) for block in blocks)),
            "parameters": sum(block.size for block in blocks),
            "share": sum(block.size for block in blocks) / model.num_parameters,
        }
        for role, blocks in by_role(_blocks(model)).items()
    ]


def _blocks(model: Model) -> list[Block]:
    """Its own; of a model that is spread over ranks, as they are on all of them together."""
    whole = model.blocks if model.sharding is None else model.sharding.blocks
    return [whole[name] for name in model.blocks]


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


def telling_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts of a zoo model that describe it; of others, all that are numbers or words.

    A zoo model that neither reads nor writes tokens has no use for its vocabulary.
    """
    known = {key: facts[key] for key in SHOWN if key in facts}
    if facts.get("kind") in ZOO:
        unused = "tokens" not in (facts.get("inputs", "tokens"), facts.get("outputs", "tokens"))
        return {key: value for key, value in known.items() if not (unused and key == "vocab_size")}
    return known | {k: v for k, v in facts.items() if isinstance(v, bool | int | float | str)}


def times(shape: Iterable[int]) -> str:
    """`64 × 32`."""
    return " × ".join(map(str, shape))


def _row(block: Block, total: int, left: frozenset[str]) -> Description:
    return {
        "block": block.name,
        "shape": list(block.shape),
        "parameters": block.size,
        "share": block.size / total,
        "parameter": block.parameter,
        "frozen": block.parameter in left,
    }
