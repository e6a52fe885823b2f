"""What engines keep between products: graphs that do not depend on the directions, while memory allows.

One store for all engines of a process, because they share one memory: the entry that was used longest ago
goes first, and an engine's entries go with it. Ranks that hold pieces of a model build together, so each of
them keeps what all of them keep.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any, TypeVar, final

import torch

from curvescope.core.ranks.spread import Spread
from curvescope.engines.memory import free_bytes

SHARE = 0.5  # of the memory that is free when nothing is kept
SHARE_ON_RANKS = 0.25  # where nothing that is kept can make room again
T = TypeVar("T")
_alone = RLock()
_store: OrderedDict[tuple[int, Hashable], tuple[Any, int]] = OrderedDict()


@final
class Kept:
    """The entries of one engine. They hold while the engine does not forget them.

    Attributes:
        refused: Whether the last one that was built is larger than all that may be kept.
    """

    def __init__(self) -> None:
        self._owner, self.refused = id(self), False
        weakref.finalize(self, _forget, self._owner)

    def forget(self) -> None:
        """Free all entries: they are of another state."""
        _forget(self._owner)

    def get(self, key: Hashable, build: Callable[[], T], *, device: torch.device, size: int) -> T:
        """The entry, built when it is not there.

        Args:
            size: bytes it is expected to take; on a GPU they are measured instead.
        """
        at = (self._owner, key)
        with _alone:
            if at in _store:
                _store.move_to_end(at)
                self.refused = False
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
            self.refused = not _insert(at, found, size, device)
        return found


@final
class KeptByAll:
    """The entries of an engine whose model is spread over ranks: each is kept by all ranks, or by none.

    Nothing goes to make room, since the other ranks would not know of it. What does not fit on one rank is
    built anew by all of them whenever it is asked for.
    """

    def __init__(self, spread: Spread) -> None:
        self._spread, self.refused = spread, False
        self._entries: dict[Hashable, Any] = {}
        self._held = 0

    def forget(self) -> None:
        """Free all entries; every rank does."""
        self._entries.clear()
        self._held = 0

    def get(self, key: Hashable, build: Callable[[], T], *, device: torch.device, size: int) -> T:
        """As that of `Kept`, on all ranks together."""
        if key in self._entries:
            return self._entries[key]
        before = _allocated(device)
        found = build()
        size = max(_allocated(device) - before, 0) if device.type == "cuda" else size
        budget = SHARE_ON_RANKS * (free_bytes(device) + self._held + (size if device.type == "cuda" else 0))
        if self._spread.all(self._held + size <= budget, device):
            self._entries[key] = found
            self._held += size
        return found


def forget_everything() -> bool:
    """Free what all engines keep; whether there was anything."""
    with _alone:
        held = bool(_store)
        _store.clear()
    return held


def _insert(at: tuple[int, Hashable], found: Any, size: int, device: torch.device) -> bool:
    """Keep an entry if it fits, at the cost of those used longest ago; whether it does."""
    held = sum(entry[1] for entry in list(_store.values()))
    budget = SHARE * (free_bytes(device) + held + (size if device.type == "cuda" else 0))
    while _store and held + size > budget:
        held -= _store.popitem(last=False)[1][1]
    if size <= budget:
        _store[at] = (found, size)
    return size <= budget


def _forget(owner: int) -> None:
    with _alone:
        for at in [at for at in list(_store) if at[0] == owner]:
            _store.pop(at, None)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
