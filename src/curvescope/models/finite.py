"""Weights that are no numbers, by the blocks that hold them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.models.model import Model


@torch.no_grad()
def not_finite(model: Model, parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Blocks with NaN or infinite entries, and how many; where all are finite, one sum of each is read."""
    sums = [p.detach().sum() for p in parameters.values()]
    if not sums or bool(torch.isfinite(torch.stack([s.to(sums[0].device) for s in sums])).all()):
        return {}
    doubtful = {
        name: p
        for (name, p), total in zip(parameters.items(), sums, strict=True)
        if not bool(torch.isfinite(total))
    }
    counts = {
        name: int((~torch.isfinite(block.take(doubtful[block.parameter].detach()))).sum())
        for name, block in model.blocks.items()
        if block.parameter in doubtful
    }
    return {name: count for name, count in counts.items() if count}


def words(found: Mapping[str, int]) -> str:
    """`L0.W_Q (3 entries), L1.W_K (1 entry) and 2 more blocks`."""
    named = [f"{name} ({count} {'entry' if count == 1 else 'entries'})" for name, count in found.items()]
    more = len(named) - 3
    said = ", ".join(named[:3])
    return said + (f" and {more} more block{'s' if more > 1 else ''}" if more > 0 else "")


def check_weights(model: Model) -> None:
    """Raise where a parameter is NaN or infinite, or in pieces; the sentence names its blocks."""
    if model.sharding is None and any(hasattr(p, "placements") for p in model.module.parameters()):
        raise UsageError(
            f"expected whole parameters, {model.name!r} has DTensors, as fully_shard leaves them",
            hint="model = cs.distributed.shard(module) takes them as they are",
        )
    found = not_finite(model, dict(model.named_parameters()))
    if found:
        raise UsageError(
            f"expected finite weights, {model.name!r} has NaN or infinite ones in {words(found)}",
            hint="the checkpoint is broken, or training diverged before it was written",
        )
