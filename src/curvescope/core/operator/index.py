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
    """Convert a selection of n entries to numbers from zero, in the given order."""
    if isinstance(index, slice):
        chosen = range(n)[index]
        return torch.arange(chosen.start, chosen.stop, chosen.step)
    try:
        numbers = torch.as_tensor(
            np.ascontiguousarray(index) if isinstance(index, np.ndarray) else index
        ).cpu()
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0, 0)
    if numbers.dtype == torch.bool and numbers.shape == (n,):
        return numbers.nonzero()[:, 0]
    numbers = numbers.reshape(1) if numbers.dim() == 0 else numbers
    integers = not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)
    if numbers.dim() != 1 or not (integers or numbers.numel() == 0):
        raise UsageError(
            f"expected a slice, whole numbers or a mask of {n} booleans to choose entries, "
            f"got {type(index).__name__}",
            hint="names of blocks choose them where an operator has blocks",
        )
    numbers = numbers.long()
    outside = numbers[(numbers < -n) | (numbers >= n)]
    if len(outside):
        raise UsageError(f"expected entries from {-n} to {n - 1}, got {int(outside[0])}")
    return torch.where(numbers < 0, numbers + n, numbers)


def named_rows(operator_name: str, space: ParamSpace | None, patterns: list[str]) -> Tensor:
    """Positions of the entries of all blocks that match one of the globs, in the order of the space."""
    if space is None:
        raise UsageError(
            f"{operator_name} has no named blocks to choose {patterns[0]!r} from", hint="use numbers"
        )
    chosen = matching(space, patterns)
    return torch.cat([space.positions(block) for block in space if block.name in chosen])


def matching(space: ParamSpace, patterns: Sequence[str]) -> set[str]:
    """Names of the blocks of a space that match one of the globs; raise if a glob matches none."""
    chosen: set[str] = set()
    for pattern in patterns:
        matched = [block.name for block in space if fnmatch.fnmatchcase(block.name, pattern)]
        if not matched:
            names = [block.name for block in space]
            raise UsageError(f"no block matches {pattern!r}", hint=near_misses(pattern, names))
        chosen.update(matched)
    return chosen
