"""Selection of rows or columns of an operator by numbers, slices, masks, or block names."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import UsageError, near_misses

Index = slice | int | Tensor | np.ndarray | str | Sequence[int] | Sequence[str]


def positions(n: int, index: Any) -> Tensor:
    """The chosen ones of n entries, as numbers from zero, in the order they are given in."""
    if isinstance(index, slice):
        chosen = range(n)[index]
        return torch.arange(chosen.start, chosen.stop, chosen.step)
    try:
        found = torch.as_tensor(np.ascontiguousarray(index) if isinstance(index, np.ndarray) else index).cpu()
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0, 0)
    if found.dtype == torch.bool and found.shape == (n,):
        return found.nonzero()[:, 0]
    found = found.reshape(1) if found.dim() == 0 else found
    whole = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if found.dim() != 1 or not (whole or found.numel() == 0):
        raise UsageError(
            f"expected a slice, whole numbers or a mask of {n} booleans to choose entries, "
            f"got {type(index).__name__}",
            hint="names of blocks choose them where an operator has blocks",
        )
    found = found.long()
    outside = found[(found < -n) | (found >= n)]
    if len(outside):
        raise UsageError(f"expected entries from {-n} to {n - 1}, got {int(outside[0])}")
    return torch.where(found < 0, found + n, found)


def named_rows(who: str, space: ParamSpace | None, patterns: list[str]) -> Tensor:
    """Entries of the blocks of a space that match one of the globs, in its order."""
    if space is None:
        raise UsageError(f"{who} has no named blocks to choose {patterns[0]!r} from", hint="use numbers")
    chosen = matching(space, patterns)
    return torch.cat([space.positions(block) for block in space if block.name in chosen])


def matching(space: ParamSpace, patterns: Sequence[str]) -> set[str]:
    """Names of the blocks of a space that match one of the globs; each of them has to match some."""
    chosen: set[str] = set()
    for pattern in patterns:
        matched = [block.name for block in space if fnmatch.fnmatchcase(block.name, pattern)]
        if not matched:
            names = [block.name for block in space]
            raise UsageError(f"no block matches {pattern!r}", hint=near_misses(pattern, names))
        chosen.update(matched)
    return chosen
