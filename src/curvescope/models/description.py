"""Description of a model in plain numbers and words, for `curvescope info`, run folders and the page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from curvescope.core.blocks import Block, by_role
from curvescope.models.model import Model
from curvescope.models.parameter_selection import frozen, frozen_notes

PRECISION = {
    "float32": "float32: a product with a second derivative has a relative error of about 1e-5; "
    "eigenvalues below 1e-5 of the largest are noise. Studies accept --dtype float64",
    "float64": "float64: a product with a second derivative has a relative error of about 1e-14",
}
ZOO = ("transformer", "mlp")
ZOO_FACTS = (
    "kind", "task", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff", "n_ctx", "vocab_size",
    "attention", "causal", "norm", "norm_kind", "activation", "positions", "tied", "depth", "d_hidden",
)  # fmt: skip
Description = dict[str, Any]
"""Result of `describe`: text, numbers, lists and dictionaries of them."""


def describe(model: Model, blocks: Iterable[Block] | None = None) -> Description:
    """Return name, size, dtype, facts, notes, roles and blocks of a model.

    Args:
        blocks: Blocks to list; by default the model's own, which cover it once.
    """
    dtype, frozen_names = dtype_of(model), frozen(model)
    listed = _blocks(model) if blocks is None else blocks
    return {
        "model": model.name,
        "parameters": model.num_parameters,
        "dtype": dtype,
        "precision": PRECISION.get(dtype, ""),
        "facts": dict(model.facts),
        "notes": [*notes(model), *frozen_notes(model, frozen_names)],
        "roles": roles(model),
        "blocks": [_row(block, model.num_parameters, frozen_names) for block in listed],
    }


def dtype_of(model: Model) -> str:
    """Return the name of the model's dtype, such as `float32`."""
    return str(model.dtype).removeprefix("torch.")


def roles(model: Model) -> list[Description]:
    """Return one entry for each role in all layers: `L*.W_Q`."""
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
    """Return the model's blocks; for a sharded model, the blocks of the unsharded parameters."""
    full_blocks = model.blocks if model.sharding is None else model.sharding.blocks
    return [full_blocks[name] for name in model.blocks]


def notes(model: Model) -> list[str]:
    """Return the model's notes, and notes that follow from its facts."""
    text, facts = " ".join(model.notes).lower(), model.facts
    lines = list(model.notes)
    dropout = facts.get("dropout")
    if isinstance(dropout, float) and dropout > 0 and "dropout" not in text:
        lines.append(f"dropout ({dropout:g}) is switched off: curvature is that of the model in eval mode")
    if facts.get("tied") and "tied" not in text and "unembedding" not in text:
        lines.append("tied weights: the unembedding is the embedding, and one block holds both")
    experts = facts.get("num_experts", facts.get("n_experts"))
    if experts and "expert" not in text:
        lines.append(f"mixture of {experts} experts: curvature is that of the routing at these parameters")
    return lines


def telling_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that describe a zoo model; for other models, all facts that are numbers or words.

    The vocabulary size is left out if a zoo model neither reads nor writes tokens.
    """
    known = {key: facts[key] for key in ZOO_FACTS if key in facts}
    if facts.get("kind") in ZOO:
        unused = "tokens" not in (facts.get("inputs", "tokens"), facts.get("outputs", "tokens"))
        return {key: value for key, value in known.items() if not (unused and key == "vocab_size")}
    return known | {k: v for k, v in facts.items() if isinstance(v, bool | int | float | str)}


def times(shape: Iterable[int]) -> str:
    """Format a shape: `64 × 32`."""
    return " × ".join(map(str, shape))


def _row(block: Block, total: int, frozen_names: frozenset[str]) -> Description:
    return {
        "block": block.name,
        "shape": list(block.shape),
        "parameters": block.size,
        "share": block.size / total,
        "parameter": block.parameter,
        "frozen": block.parameter in frozen_names,
    }
