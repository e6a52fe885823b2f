"""The steps of a recording, and where their results lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: in which of the storages made during the recording, and how."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Step:
    """One operation. Tensors made during the recording are places, all others are themselves."""

    op: Any
    args: Any
    kwargs: Any
    made: tuple[Place | None, ...]  # its results in new storages, in the order of all its results

    def storages(self) -> set[int]:
        """All that it reads or writes."""
        return storages((self.args, self.kwargs, self.made))


def storages(tree: Any) -> set[int]:
    """Those of all places in a tree."""
    return {x.storage for x in leaves(tree) if isinstance(x, Place)}


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of lists, tuples and dictionaries with its leaves changed (torch's own is ten times slower)."""
    if isinstance(tree, tuple | list):
        return [mapped(change, x) for x in tree]
    if isinstance(tree, dict):
        return {key: mapped(change, x) for key, x in tree.items()}
    return change(tree)


def leaves(tree: Any) -> list[Any]:
    """What is in a tree that is no list, tuple or dictionary."""
    found: list[Any] = []
    mapped(found.append, tree)
    return found


class Pool:
    """Memory for recordings that never run at the same time: each may use all of it."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def plan(self, sizes: Sequence[int], used: Sequence[set[int]]) -> dict[int, Tensor]:
        """A block for each storage, from the first step that uses it to the last.

        Of the blocks left by others the smallest that is large enough is taken; of those of one size, the
        one left last, which the cache may still hold.
        """
        last = {s: i for i, some in enumerate(used) for s in some}
        free, found = list(self._blocks), {}
        for i, some in enumerate(used):
            for s in sorted(some - found.keys()):
                fitting = [b for b in reversed(free) if sizes[s] <= b.numel() <= 2 * sizes[s]]
                block = min(fitting, key=Tensor.numel, default=None)
                if block is None:
                    block = torch.empty(sizes[s], dtype=torch.uint8, device="cpu")
                    self._blocks.append(block)
                found[s], free = block, [b for b in free if b is not block]
            free += [found[s] for s in sorted(some) if last[s] == i]
        return found
