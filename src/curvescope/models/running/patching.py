"""Temporary patches of the user's module: one lock per module, one way to restore it.

A product runs the user's own module in eval mode, with other parameters and with our kernels inside. A
`Change` replaces one attribute for that time. `patched` applies changes and undoes them, in any order of
nested blocks, also after errors and interrupts. `locked` makes threads take turns with a module and with
every module that shares a part with it.
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

PATIENCE = 0.1  # seconds between checks for Ctrl-C while a thread waits for another
_ABSENT = object()
_patch_lock = RLock()
_held_by_thread = local()  # the modules that this thread has locked
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
    """Lock the module and all of its parts against other threads; the same thread may enter again."""
    entered = _held_by_thread.__dict__.setdefault("modules", [])
    if any(module is other for other in entered):
        yield
        return
    with uninterrupted(), _patch_lock:
        all_locks = {_locks.setdefault(part, (next(_numbers), RLock())) for part in module.modules()}
    locks, held = [lock for _, lock in sorted(all_locks, key=lambda entry: entry[0])], []
    try:
        while not _take_all(locks, held):
            pass
        entered.append(module)
        yield
    finally:
        try:
            _unlock(module, entered, held)
        finally:  # repeated, in case an interrupt came before the first call
            _unlock(module, entered, held)


def _take_all(locks: list[Any], held: list[Any]) -> bool:
    """Take all locks and append them to `held`; take none if another thread keeps one of them.

    Interrupts are delayed, so that every lock taken is in `held`.
    """
    with uninterrupted():
        for lock in locks:
            if not lock.acquire(timeout=PATIENCE):
                _release(held)
                return False
            held.append(lock)
    return True


def _unlock(module: nn.Module, entered: list[nn.Module], held: list[Any]) -> None:
    with uninterrupted():
        entered[:] = [other for other in entered if other is not module]
        _release(held)


def _release(held: list[Any]) -> None:
    while held:
        held.pop().release()


def evaluation(module: nn.Module) -> list[Change]:
    """Return changes that put every submodule into eval mode."""
    return [Change(vars(part), "training", False) for part in module.modules() if part.training]


def parameters_at(module: nn.Module, values: Mapping[str, Tensor]) -> list[Change]:
    """Return changes that replace the named parameters wherever the module registers them."""
    if not values:
        return []
    parameters = dict(module.named_parameters())
    new = {id(parameters[name]): value for name, value in values.items()}
    changes = [
        Change(part._parameters, name, new[id(p)])
        for part in module.modules()
        for name, p in part._parameters.items()
        if id(p) in new
    ]
    recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    return changes + [change for part in recurrent for change in _listed(part, new)]


def note_rewritten(part: nn.Module, name: str) -> None:
    """Record a buffer, or a tensor in an attribute, that a submodule writes to in its forward pass."""
    _written_to.setdefault(part, set()).add(name)


def rewritten(module: nn.Module, *, copied: bool) -> list[Change]:
    """Return changes that detach the tensors that a forward pass writes to from the graph of the pass before.

    Args:
        module: The user's module.
        copied: Copy the tensors, so that the graph of each pass keeps its own values.
    """
    changes = []
    for part in module.modules() if _written_to else ():
        for name in _written_to.get(part, ()):
            holder = part._buffers if name in part._buffers else vars(part)
            if isinstance(value := holder.get(name), Tensor):
                changes.append(Change(holder, name, value.detach().clone() if copied else value.detach()))
    return changes


def _listed(part: nn.RNNBase, new: Mapping[int, Tensor]) -> list[Change]:
    """Return changes of the lists in which a recurrent layer of torch also holds its parameters."""
    weights = [getattr(part, name, None) for name in part._flat_weights_names]
    flat = [w if w is None else new.get(id(w), w) for w in weights]
    refs = [None if w is None else ref(w) for w in flat]
    return [Change(vars(part), "_flat_weights", flat), Change(vars(part), "_flat_weight_refs", refs)]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Lock the module and put it into eval mode inside; restore every submodule's mode afterwards."""
    with locked(module), patched(evaluation(module)):
        yield


# ------------------------------------------------------------------------------------------------- patches


class _PatchedItem:
    """Value of an attribute before it was patched, and the values of the patches, the last one on top."""

    def __init__(self, before: Any):
        self.before = before
        self.layers: list[tuple[object, Any]] = []


_patched_items: dict[tuple[int, str], _PatchedItem] = {}


@contextmanager
def patched(changes: Iterable[Change]) -> Iterator[None]:
    """Apply all changes inside. If two changes have the same target, the later one counts.

    An attribute is restored when the last block that changed it ends, unless other code wrote to it.
    """
    owner, pending = object(), list(changes)
    if not pending:
        yield
        return
    try:
        with uninterrupted(), _patch_lock:
            for change in pending:
                _apply(owner, change)
        yield
    finally:
        try:
            _undo(owner, pending)
        finally:  # repeated, in case an interrupt came before the first call
            _undo(owner, pending)


def _apply(owner: object, change: Change) -> None:
    holder, name, value = change
    item = _patched_items.setdefault((id(holder), name), _PatchedItem(holder.get(name, _ABSENT)))
    item.layers.append((owner, value))
    holder[name] = value


def _undo(owner: object, changes: list[Change]) -> None:
    """Undo the changes, and empty the list of changes."""
    if not changes:
        return
    with uninterrupted(), _patch_lock:
        for holder, name, _ in changes:
            item = _patched_items.get((id(holder), name))
            if item is None:
                continue
            is_ours = any(value is holder.get(name, _ABSENT) for _, value in item.layers)
            item.layers = [layer for layer in item.layers if layer[0] is not owner]
            value = item.layers[-1][1] if item.layers else item.before
            if is_ours and value is _ABSENT:
                del holder[name]
            elif is_ours:
                holder[name] = value
            if not item.layers:
                del _patched_items[id(holder), name]
        changes.clear()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, which must be short.

    Signals only reach the main thread, so other threads need nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    signals: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: signals.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if signals:
        handler(*signals[0])


@contextmanager
def thawed(frozen: list[Tensor]) -> Iterator[None]:
    """Set `requires_grad` of frozen parameters inside, and freeze them again, also after interrupts."""
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        try:
            _freeze(frozen)
        finally:  # repeated, in case an interrupt came before the first call
            _freeze(frozen)


def _freeze(parameters: list[Tensor]) -> None:
    with uninterrupted():
        for p in parameters:
            p.requires_grad_(False)
