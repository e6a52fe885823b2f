"""What engines keep between products: graphs that do not depend on the directions, while memory allows.

One store for all engines of a process, because they share one memory: the entry that was used longest ago
goes first, and an engine's entries go with it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvescope.operators.memory import free_bytes
from curvescope.problem import Problem

SHARE = 0.5  # of the memory that is free when nothing is kept
T = TypeVar("T")
_store: OrderedDict[tuple[int, Hashable], tuple[Any, int]] = OrderedDict()


class Kept:
    """The entries of one engine. They hold for one state of the parameters and the data."""

    def __init__(self) -> None:
        self._owner = id(self)
        self._places: tuple[Any, ...] = ()
        self._sums = self._kept_sums = torch.zeros(0)
        weakref.finalize(self, _forget, self._owner)

    def begin(self, problem: Problem) -> None:
        """Forget everything unless parameters, buffers and data seem to be those of the last call.

        Their sums are only compared in `valid`, so that a GPU does not wait here.
        """
        module = problem.model.module
        numbers = [t.detach() for t in (*module.parameters(), *module.buffers())]
        places, sums = _places(problem, numbers), _sums(problem, numbers)
        if self._places != places:
            _forget(self._owner)
            self._places, self._kept_sums = places, sums
        self._sums = sums

    def valid(self) -> bool:
        """Whether what was kept is of the numbers seen by `begin`; if not, it is forgotten."""
        if torch.equal(self._sums, self._kept_sums):
            return True
        _forget(self._owner)
        self._kept_sums = self._sums
        return False

    def get(self, key: Hashable, build: Callable[[], T], *, device: torch.device, size: int) -> T:
        """The entry, built when it is not there.

        Args:
            size: bytes it is expected to take; on a GPU they are measured instead.
        """
        at = (self._owner, key)
        if at in _store:
            _store.move_to_end(at)
            return _store[at][0]
        before = _allocated(device)
        try:
            found = build()
        except torch.OutOfMemoryError:
            if not _store:
                raise
            _store.clear()
            before = _allocated(device)
            found = build()
        size = max(_allocated(device) - before, 0) if device.type == "cuda" else size
        held = sum(entry[1] for entry in _store.values())
        budget = SHARE * (free_bytes(device) + held + (size if device.type == "cuda" else 0))
        while _store and held + size > budget:
            held -= _store.popitem(last=False)[1][1]
        if size <= budget:
            _store[at] = (found, size)
        return found


def forget_everything() -> None:
    """Free what all engines keep."""
    _store.clear()


def _forget(owner: int) -> None:
    for at in [at for at in _store if at[0] == owner]:
        del _store[at]


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _places(problem: Problem, numbers: list[Tensor]) -> tuple[Any, ...]:
    """Where the numbers are, and how often they were written through autograd's eyes."""
    places = tuple((t.data_ptr(), _version(t)) for t in numbers)
    data = tuple(_version(t) for batch in problem.batches for t in batch.tensors())
    return id(problem.model.module), id(problem.batches), problem.loss, places, data


def _sums(problem: Problem, numbers: list[Tensor]) -> Tensor:
    """Σ|x| of every parameter and buffer, which notice what was written past autograd (`p.data`)."""
    real = [t for t in numbers if t.is_floating_point() and t.numel()]
    with torch.no_grad():
        sums = torch._foreach_norm(real, 1)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack([s if s.dtype == problem.dtype else s.to(problem.dtype) for s in sums])


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
