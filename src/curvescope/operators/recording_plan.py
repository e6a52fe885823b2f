"""The steps of a recording, and what is decided about them once: where results lie, how sums are made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten
_INTO = {  # products, and the same added to what is there
    _aten.mm.default: _aten.addmm_.default,
    _aten.bmm.default: _aten.baddbmm_.default,
    _aten.mul.Tensor: _aten.addcmul_.default,
}


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


def sums_in_place(steps: Sequence[Step], results: Sequence[Any]) -> tuple[list[Step], Sequence[Any]]:
    """X + a b, where nobody else wants X or a b, as X += a b: one operation adds while it multiplies.

    X may be an input, whose place is filled anew for every replay.

    Args:
        results: The places of what the work returns; entries that are none stay as they are.
    """
    written = [_written(step) for step in steps]
    if any(s is None for some in written for s in some):
        return list(steps), results  # something from outside is written
    sums = _Sums(list(steps), results, written)
    for k in range(len(steps)):
        sums.look_at(k)
    return [step for step in sums.steps if step is not None], [sums.now(r) for r in results]


class _Sums:
    """The steps while sums among them are moved into one of their terms."""

    def __init__(self, steps: list[Any], results: Sequence[Any], written: list[set[Any]]):
        self.steps, self._written = steps, written
        touched = [*(step.storages() for step in steps), storages(results)]
        self._uses = Counter(s for some in touched for s in some)
        self._last = {s: i for i, some in enumerate(touched) for s in some}
        self._maker = {place.storage: i for i, step in enumerate(steps) for place in step.made if place}
        self._moved: dict[int, int] = {}

    def now(self, x: Any) -> Any:
        """Where x is, if it lay in a sum that has moved."""
        moved = isinstance(x, Place) and x.storage in self._moved
        return replace(x, storage=self._moved[x.storage]) if moved else x

    def look_at(self, k: int) -> None:
        """Move step k if it is a sum that can be."""
        step = self.steps[k]
        args, kwargs = mapped(self.now, step.args), mapped(self.now, step.kwargs)
        self.steps[k] = step = replace(step, args=args, kwargs=kwargs)
        if step.op is not _aten.add.Tensor or kwargs or not all(isinstance(x, Place) for x in args):
            return
        X, Y = args
        Z = step.made[0]
        if all(_layout(x) == _layout(Z) for x in (X, Y)) and not self._move(k, X, Y, Z):
            self._move(k, Y, X, Z)

    def _move(self, k: int, X: Place, Y: Place, Z: Place) -> bool:
        """Whether Y is a product that could be added to X in place; then Z is where X was.

        Z was made by the sum and is dense, so X and Y, which are laid out like it, are too.
        """
        j = self._maker.get(Y.storage)
        product = None if j is None else self.steps[j]
        if j is None or product is None or product.op not in _INTO:
            return False
        made, operands = product.made[0], product.storages()
        if (
            self._uses[Y.storage] != 2
            or X.storage in operands
            or any(getattr(x, "dtype", None) != X.dtype for x in product.args)
            or self._last[X.storage] != k
            or any(self._written[i] & operands for i in range(j + 1, k))
            or math.prod(Y.shape) != math.prod(made.shape)
        ):
            return False
        into = replace(made, storage=X.storage)
        self.steps[j], self.steps[k] = None, Step(_INTO[product.op], (into, *product.args), {}, ())
        self._written[k] = {X.storage}
        self._moved[Z.storage] = X.storage
        self._last[X.storage] = self._last[Z.storage]
        self._uses[X.storage] += self._uses[Z.storage]
        return True


def _written(step: Step) -> set[int | None]:
    """Storages that an operation writes into, beside those it makes; None for one from outside."""
    arguments = step.op._schema.arguments
    given = {a.name: x for a, x in zip(arguments, step.args, strict=False)} | step.kwargs
    writes = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    found = [x for name in writes for x in leaves(given[name])]
    return {x.storage if isinstance(x, Place) else None for x in found}


def _layout(x: Place) -> tuple[Any, ...]:
    return x.shape, x.stride, x.offset, x.dtype
