"""Batches for a function of one's own, loss_fn(model, batch): any tree, passed on as it is.

Such a batch is never cut. Here it is one sequence: every tensor in it gets an axis of length one in front,
so that nothing which places, watches or counts data needs to know of it. What is no tensor (words, numbers)
waits in a `Wholes` until the batch is put together again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.data.batches import Batch, Batches
from curvescope.data.checks import refuse_iterator, shuffle_notes

MAX_BYTES = 2**30
Terms = float | Sequence[float] | Callable[[Any], float] | str | None
"""Over how many terms the loss of a batch is a mean: a number, one for each batch, or a function of a batch;
"sum" for a loss that is a sum, of which nothing is divided."""
SUM = "sum"


@dataclass(frozen=True)
class _Slot:
    """Where a tensor was."""

    index: int


@final
class Wholes:
    """What is left of batches without their tensors; `pack` and `unpack` go between both."""

    def __init__(self) -> None:
        self._skeletons: list[Any] = []

    def pack(self, batch: Any) -> dict[str, Tensor]:
        """The tensors of a batch, (1, …) each, behind one entry that says which batch it is."""
        number, found = len(self._skeletons), []
        self._skeletons.append(_taken_apart(batch, found))
        return {f"{number}": torch.zeros(1), **{f"{number}.{i}": t[None] for i, t in enumerate(found)}}

    def unpack(self, inputs: Mapping[str, Tensor]) -> Any:
        """The batch as it was, with these tensors in it."""
        number, *names = inputs
        return _put_together(self._skeletons[int(number)], [inputs[name][0] for name in names])


def whole_batches(data: Any, terms: Terms) -> tuple[Batches, Wholes]:
    """Batches of a function: a list or a loader holds several, a tuple, a dictionary or a tensor is one."""
    found, notes = _read(data)
    counts, wholes = _counted(found, terms), Wholes()
    batches = [
        Batch(wholes.pack(item), torch.zeros(1), torch.tensor([n], dtype=torch.float64))
        for item, n in zip(found, counts, strict=True)
    ]
    return Batches(batches, name="data", notes=notes), wholes


def _read(data: Any) -> tuple[list[Any], list[str]]:
    refuse_iterator(data)
    if isinstance(data, Batches):
        parts = [(b.inputs, b.targets) if b.weights is None else (*_pair(b), b.weights) for b in data]
        return parts, list(data.notes)
    if isinstance(data, list):
        if data and all(isinstance(item, Tensor) for item in data):
            raise UsageError(
                "expected one batch or a list of them, got a list of tensors, which may be either",
                hint="(x, y) is one batch of a loss_fn, [(x, y), …] are several",
            )
        return data, []
    if isinstance(data, tuple | Mapping | Tensor) or not isinstance(data, Iterable):
        return [data], []
    return list(_copies(data)), shuffle_notes(data)


def _pair(batch: Batch) -> tuple[Any, Any]:
    return batch.inputs, batch.targets


def _copies(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches, copied, since it may write every one into the same memory."""
    size = 0
    for item in loader:
        tensors: list[Tensor] = []
        skeleton = _taken_apart(item, tensors)
        size += sum(t.numel() * t.element_size() for t in tensors)
        if size > MAX_BYTES:
            raise UsageError(f"the loader holds more than {MAX_BYTES} bytes", hint="take fewer batches of it")
        yield _put_together(skeleton, [t.detach().clone() for t in tensors])


def _counted(batches: list[Any], terms: Terms) -> list[float]:
    """N_b of every batch."""
    if not batches:
        raise UsageError("expected at least one batch, got none")
    if terms is None and len(batches) > 1:
        raise UsageError(
            f"expected terms beside loss_fn where there are several batches ({len(batches)}): over how many "
            "terms the loss of each is a mean",
            hint="terms=lambda batch: len(batch[0]), a number, one for each batch, or 'sum'",
        )
    if terms is None or (isinstance(terms, str) and terms == SUM):
        return [1.0] * len(batches)
    if callable(terms):
        found: list[Any] = [terms(batch) for batch in batches]
    elif isinstance(terms, Real):
        found = [terms] * len(batches)
    elif isinstance(terms, Sequence) and not isinstance(terms, str) and len(terms) == len(batches):
        found = list(terms)
    else:
        raise UsageError(
            f"expected terms as a number, one for each of {len(batches)} batches, a function of a batch, or "
            f"'sum', got {terms!r:.60}"
        )
    numbers = [float(n) if isinstance(n, Real | Tensor) else float("nan") for n in found]
    if not all(isfinite(n) and n >= 0 for n in numbers):
        raise UsageError(f"expected a number of terms for each batch, got {found!r:.60}")
    return numbers


def _taken_apart(tree: Any, found: list[Tensor]) -> Any:
    """The tree with slots in the place of its tensors, which go to `found`."""
    if isinstance(tree, Tensor):
        found.append(tree)
        return _Slot(len(found) - 1)
    return _mapped(tree, lambda branch: _taken_apart(branch, found))


def _put_together(tree: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(tree, _Slot):
        return tensors[tree.index]
    return _mapped(tree, lambda branch: _put_together(branch, tensors))


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """A container of the same kind, e.g. a BatchEncoding, its entries mapped; anything else itself."""
    if isinstance(tree, Mapping):
        found: Any = copy.copy(tree) if hasattr(tree, "__setitem__") else dict(tree)
        for key, value in tree.items():
            found[key] = function(value)
        return found
    if isinstance(tree, tuple | list):
        branches = [function(branch) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    return tree
