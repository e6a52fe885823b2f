"""What engines keep between products: graphs that do not depend on the directions, while memory allows.

One store for all engines of a process, because they share one memory: the entry that was used longest ago
goes first, and an engine's entries go with it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvescope.kernels.backends import casting
from curvescope.operators.memory import free_bytes
from curvescope.problem import Problem

SHARE = 0.5  # of the memory that is free when nothing is kept
T = TypeVar("T")
_alone = RLock()
_store: OrderedDict[tuple[int, Hashable], tuple[Any, int]] = OrderedDict()


class Kept:
    """The entries of one engine. They hold for one state of the parameters and the data.

    Numbers, submodules and hooks that changed are noticed; an attribute of a submodule is not. A copy
    begins empty. Threads take turns: who uses the entries holds the lock.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self._owner = id(self)
        self._places: tuple[Any, ...] = ()
        self._sums: tuple[Tensor, ...] = ()
        self._kept_sums: tuple[Tensor, ...] = ()
        weakref.finalize(self, _forget, self._owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()

    def begin(self, problem: Problem) -> None:
        """Forget everything unless parameters, buffers and data seem to be those of the last call.

        Their sums are only compared in `valid`, so that a GPU does not wait here.
        """
        module = problem.model.module
        numbers = [t.detach() for t in (*module.parameters(), *module.buffers())]
        data = [t for batch in problem.batches for t in batch.tensors()]
        places, sums = _places(problem, [*numbers, *data]), _sums(numbers, data)
        if self._places != places:
            _forget(self._owner)
            self._places, self._kept_sums = places, sums
        self._sums = sums

    def valid(self) -> bool:
        """Whether what was kept is of the numbers seen by `begin`; if not, it is forgotten."""
        if all(torch.equal(now, then) for now, then in zip(self._sums, self._kept_sums, strict=True)):
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
        with _alone:
            if at in _store:
                _store.move_to_end(at)
                return _store[at][0]
        before = _allocated(device)
        try:
            found = build()
        except torch.OutOfMemoryError:
            if not _store:
                raise
            forget_everything()
            before = _allocated(device)
            found = build()
        size = max(_allocated(device) - before, 0) if device.type == "cuda" else size
        with _alone:
            _insert(at, found, size, device)
        return found


def forget_everything() -> None:
    """Free what all engines keep."""
    with _alone:
        _store.clear()


def _insert(at: tuple[int, Hashable], found: Any, size: int, device: torch.device) -> None:
    """Keep an entry if it fits, at the cost of those used longest ago."""
    held = sum(entry[1] for entry in list(_store.values()))
    budget = SHARE * (free_bytes(device) + held + (size if device.type == "cuda" else 0))
    while _store and held + size > budget:
        held -= _store.popitem(last=False)[1][1]
    if size <= budget:
        _store[at] = (found, size)


def _forget(owner: int) -> None:
    with _alone:
        for at in [at for at in list(_store) if at[0] == owner]:
            _store.pop(at, None)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _places(problem: Problem, numbers: list[Tensor]) -> tuple[Any, ...]:
    """Where the numbers are, how often autograd saw them written, and what is done with them."""
    places = tuple((t.data_ptr(), _version(t)) for t in numbers)
    parts = tuple(problem.model.module.modules())
    hooks = tuple((*m._forward_pre_hooks, *m._forward_hooks) for m in parts)
    modes = casting(), torch.get_float32_matmul_precision()
    return parts, hooks, problem.batches, problem.loss, modes, places


@torch.no_grad()
def _sums(numbers: list[Tensor], data: list[Tensor]) -> tuple[Tensor, ...]:
    """Weighted sums over the rows of every tensor, which notice what was written past autograd (`p.data`).

    The weights differ, so that signs and places count. One vector for each device and type; of buffers
    that are no real numbers there is none.
    """
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    real = [t for t in numbers if t.is_floating_point()]
    for t in (*real, *(t.double() for t in data)):
        found.setdefault((t.device, t.dtype), []).append(t)
    return tuple(_row_sums(some) for some in found.values())


def _row_sums(tensors: list[Tensor]) -> Tensor:
    like, rows = tensors[0], [t.flatten(1) if t.dim() > 1 else t.reshape(-1) for t in tensors]
    widest = max(t.shape[1] if t.dim() > 1 else 1 for t in rows)
    weights = torch.arange(1.0, widest + 1, device=like.device).sin().to(like.dtype)
    return torch.cat([t @ weights[: t.shape[1]] if t.dim() > 1 else t for t in rows])


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
