"""The user's module, exchanged in part while it runs: one lock for a module, one way to put things back.

A product runs the user's own module, in eval mode, at leaves of its own and with our kernels inside. What
stands in a module's places for that time is a `Change`; `exchanged` puts changes in place and takes them
back, in whatever order such blocks are left, after errors and interrupts too. `locked` makes threads take
turns with a module and with every module that shares a part with it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from threading import RLock, local
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

PATIENCE = 0.1  # seconds: Ctrl-C is heard after that where a thread waits for another
_ABSENT = object()
_alone = RLock()
_mine = local()  # the modules that this thread holds
_numbers = count()
_locks: WeakKeyDictionary[nn.Module, tuple[int, Any]] = WeakKeyDictionary()
_written_to: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


class Change(NamedTuple):
    """A value for one item of a dictionary; an attribute is one of `vars(object)`."""

    holder: dict[str, Any]
    name: str
    value: Any


@contextmanager
def locked(module: nn.Module) -> Iterator[None]:
    """Nobody else works with the module, or with a part of it; the same thread may enter again."""
    mine = _mine.__dict__.setdefault("modules", [])
    if any(module is other for other in mine):
        yield
        return
    with uninterrupted(), _alone:
        found = {_locks.setdefault(part, (next(_numbers), RLock())) for part in module.modules()}
    locks, held = [lock for _, lock in sorted(found, key=lambda entry: entry[0])], []
    try:
        while not _taken(locks, held):
            pass
        mine.append(module)
        yield
    finally:
        try:
            _let_go(module, mine, held)
        finally:  # again, for an interrupt that came before the first had begun
            _let_go(module, mine, held)


def _taken(locks: list[Any], held: list[Any]) -> bool:
    """Take all locks, noted in `held`, or none if another thread has one of them for a while.

    No interrupt comes between the taking of a lock and its being noted.
    """
    with uninterrupted():
        for lock in locks:
            if not lock.acquire(timeout=PATIENCE):
                _release(held)
                return False
            held.append(lock)
    return True


def _let_go(module: nn.Module, mine: list[nn.Module], held: list[Any]) -> None:
    with uninterrupted():
        mine[:] = [other for other in mine if other is not module]
        _release(held)


def _release(held: list[Any]) -> None:
    while held:
        held.pop().release()


def evaluation(module: nn.Module) -> list[Change]:
    """Eval mode for every submodule that is not in it."""
    return [Change(vars(part), "training", False) for part in module.modules() if part.training]


def parameters_at(module: nn.Module, values: Mapping[str, Tensor]) -> list[Change]:
    """Other tensors in the place of the named parameters, wherever the module holds them."""
    if not values:
        return []
    own = dict(module.named_parameters())
    new = {id(own[name]): value for name, value in values.items()}
    changes = [
        Change(part._parameters, name, new[id(p)])
        for part in module.modules()
        for name, p in part._parameters.items()
        if id(p) in new
    ]
    recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    return changes + [change for part in recurrent for change in _listed(part, new)]


def note_rewritten(part: nn.Module, name: str) -> None:
    """Note a buffer, or a tensor in an attribute, that a submodule writes to in its forward pass."""
    _written_to.setdefault(part, set()).add(name)


def rewritten(module: nn.Module, *, copied: bool) -> list[Change]:
    """The tensors that a forward pass writes to, without the graph of the pass before.

    Args:
        module: The user's.
        copied: Copies in their place, so that the graph of each pass keeps its own numbers.
    """
    found = []
    for part in module.modules() if _written_to else ():
        for name in _written_to.get(part, ()):
            holder = part._buffers if name in part._buffers else vars(part)
            if isinstance(value := holder.get(name), Tensor):
                found.append(Change(holder, name, value.detach().clone() if copied else value.detach()))
    return found


def _listed(part: nn.RNNBase, new: Mapping[int, Tensor]) -> list[Change]:
    """The lists in which a recurrent layer of torch holds its parameters once more."""
    own = [getattr(part, name, None) for name in part._flat_weights_names]
    flat = [w if w is None else new.get(id(w), w) for w in own]
    refs = [None if w is None else ref(w) for w in flat]
    return [Change(vars(part), "_flat_weights", flat), Change(vars(part), "_flat_weight_refs", refs)]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in eval mode inside, every submodule back in its own mode after; threads take turns."""
    with locked(module), exchanged(evaluation(module)):
        yield


# ------------------------------------------------------------------------------------------------- places


class _Place:
    """What a place held before anybody exchanged it, and the values put there since, the last one on top."""

    def __init__(self, before: Any):
        self.before = before
        self.layers: list[tuple[object, Any]] = []


_places: dict[tuple[int, str], _Place] = {}


@contextmanager
def exchanged(changes: Iterable[Change]) -> Iterator[None]:
    """All changes in place inside. Of two changes of one place the later counts.

    A place is put back when the last block that changed it is left, unless somebody else wrote to it.
    """
    owner, found = object(), list(changes)
    if not found:
        yield
        return
    try:
        with uninterrupted(), _alone:
            for change in found:
                _put(owner, change)
        yield
    finally:
        try:
            _take_back(owner, found)
        finally:  # again, for an interrupt that came before the first try had begun
            _take_back(owner, found)


def _put(owner: object, change: Change) -> None:
    holder, name, value = change
    place = _places.setdefault((id(holder), name), _Place(holder.get(name, _ABSENT)))
    place.layers.append((owner, value))
    holder[name] = value


def _take_back(owner: object, changes: list[Change]) -> None:
    """Put back what was changed; nothing is left of the list of changes then."""
    if not changes:
        return
    with uninterrupted(), _alone:
        for holder, name, _ in changes:
            place = _places.get((id(holder), name))
            if place is None:
                continue
            ours = any(value is holder.get(name, _ABSENT) for _, value in place.layers)
            place.layers = [layer for layer in place.layers if layer[0] is not owner]
            value = place.layers[-1][1] if place.layers else place.before
            if ours and value is _ABSENT:
                del holder[name]
            elif ours:
                holder[name] = value
            if not place.layers:
                del _places[id(holder), name]
        changes.clear()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C is heard at the end of the block; only what takes no time belongs inside.

    Signals reach the main thread alone, so elsewhere there is nothing to do.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    heard: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if heard:
        handler(*heard[0])


@contextmanager
def thawed(frozen: list[Tensor]) -> Iterator[None]:
    """Frozen parameters are seen in a graph that is made inside, and frozen again after interrupts too."""
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        try:
            _freeze(frozen)
        finally:  # again, for an interrupt that came before the first had begun
            _freeze(frozen)


def _freeze(parameters: list[Tensor]) -> None:
    with uninterrupted():
        for p in parameters:
            p.requires_grad_(False)
