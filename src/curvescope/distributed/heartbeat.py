"""Ranks that notice when one of them is gone, or has said that it cannot go on; then all of them end.

A rank that is killed cannot say so, and the others may be waiting for it inside a collective operation, where
no Python runs. So each has a thread of its own that counts in the store through which the ranks have met:
rank 0 looks at all counters, the others at that of rank 0 and at whether anybody has ended. One that stands
still for `patience` looks is lost, and the thread ends the process. Everything that a run keeps is written
such that a process may end at any moment, so the same command goes on behind it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, final

SECONDS = 2.0  # between looks
PATIENCE = 30  # looks at a counter that stands still
ENDED, BEATS, COMPLAINTS = "curvescope/ended", "curvescope/beat", "curvescope/complaints"
GO_ON = "what is finished is kept: the same command goes on from there, with any number of ranks"


@final
class Heartbeat:
    """The thread of a rank.

    Args:
        store: A `torch.distributed.Store` of its own: one that waits is not shared.
        rank: Of this process.
        ranks: How many there are.
        complain: Called with a message and a hint for a person, by one of the ranks.
        seconds: Between looks.
        patience: Looks at a counter that stands still, behind which its rank is lost.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        complain: Callable[[str, str | None], None],
        *,
        seconds: float = SECONDS,
        patience: int = PATIENCE,
    ):
        self._store, self._rank, self._ranks, self._complain = store, rank, ranks, complain
        self._seconds, self._patience = seconds, patience
        self._seen: dict[int, tuple[bytes, int]] = {}  # counters, and for how many looks
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="curvescope-heartbeat", daemon=True)
        self._count = 0
        self._beat()

    def start(self) -> None:
        """Begin to look; every rank has made its own by now."""
        self._thread.start()

    def stop(self) -> None:
        """Nobody is looked at any more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def ends(self, message: str = "", hint: str | None = None) -> None:
        """This rank cannot go on: it says so, unless another one was first, and the others will end.

        Without a message it has been said. Whoever calls leaves, with an exit code of its own.
        """
        self._over.set()
        first = self._rank <= 1
        with suppress(Exception):  # the store may be gone with rank 0
            first = self._store.add(COMPLAINTS, 1) == 1
            self._store.set(ENDED, str(self._rank))
        if first and message:
            self._complain(message, hint)
        if self._rank == 0:  # which may have the store: the others should find it
            self._let_others_end()

    def _let_others_end(self) -> None:
        """Wait until all have looked, for a few looks at most."""
        with suppress(Exception):
            for _ in range(10):
                if self._store.add(COMPLAINTS, 0) >= self._ranks:
                    return
                time.sleep(self._seconds / 4)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"{BEATS}/{self._rank}", str(self._count))

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            try:
                self._beat()
                lost = None if self._store.check([ENDED]) else self._lost()
            except Exception:  # the store went with the process that had it
                if not self._over.is_set():
                    self._leave("the process that the ranks meet through is gone")
                return
            if self._over.is_set():
                return
            if lost is not None:
                waited = self._patience * self._seconds
                self._leave(f"rank {lost} has not been heard of for {waited:.0f} seconds")
            if self._store.check([ENDED]) and not self._over.is_set():
                self._leave("another rank has ended")

    def _lost(self) -> int | None:
        """A rank whose counter has stood still for too long."""
        looked_at = range(1, self._ranks) if self._rank == 0 else range(1)
        keys = [f"{BEATS}/{rank}" for rank in looked_at]
        for rank, count in zip(looked_at, self._store.multi_get(keys), strict=True):
            before, looks = self._seen.get(rank, (b"", 0))
            self._seen[rank] = (count, looks + 1 if count == before else 0)
            if self._seen[rank][1] >= self._patience:
                return rank
        return None

    def _leave(self, message: str) -> None:
        """End this process, from a thread that may not be the one which waits."""
        self.ends(message, GO_ON)
        leave(1)


def leave(code: int) -> NoReturn:
    """End the process now: what would wait for other ranks on the way out, does not."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
