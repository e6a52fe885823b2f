"""The beginning and the end of ranks that torchrun or Slurm have started.

CPU tensors go through gloo and those of CUDA devices through NCCL, one device for each rank of a machine. A
collective operation waits for at most CURVESCOPE_TIMEOUT seconds, by default half an hour; a rank that is
gone is noticed within a minute, or CURVESCOPE_PATIENCE seconds (`heartbeat`).

Ranks that notice when one of them is gone, or has said that it cannot go on; then all of them end.

A rank that is killed cannot say so, and the others may be waiting for it inside a collective operation, where
no Python runs. So each has a thread of its own that counts in the store through which the ranks have met:
rank 0 looks at all counters, the others at that of rank 0 and at whether anybody has ended. One that stands
still for `patience` looks is lost, and the thread ends the process. Everything that a run keeps is written
such that a process may end at any moment, so the same command goes on behind it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, final

import numpy as np
import torch
import torch.distributed as dist

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.ranks.launch import Launch

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


TIMEOUT = "CURVESCOPE_TIMEOUT"
LOOKS = "CURVESCOPE_PATIENCE"
DEFAULT = {TIMEOUT: 1800.0, LOOKS: PATIENCE * SECONDS}
Complain = Callable[[str, str | None], None]
"""Called with a message and a hint for a person."""


def describe(launch: Launch) -> str:
    """How many ranks there are, and how long they wait."""
    silent, busy = _seconds(LOOKS), _seconds(TIMEOUT)
    return (
        f"{launch.ranks} ranks, started by {launch.by}: one that is silent for {silent:.0f} s is lost, and "
        f"one that works is waited for up to {busy:.0f} s"
    )


@contextmanager
def started(launch: Launch, complain: Complain, *, debug: bool = False) -> Iterator[None]:
    """Inside, the ranks of a launch can meet; an error that one of them leaves with ends all processes.

    Of several ranks that leave with an error the first complains.

    Args:
        launch: Which rank this is.
        complain: Says it.
        debug: Whether tracebacks are shown.
    """
    _begin(launch)
    wait = _seconds(LOOKS)
    beat = min(SECONDS, wait / 4)
    heart = Heartbeat(
        _own_store(), launch.rank, launch.ranks, complain, seconds=beat, patience=int(wait / beat)
    )
    dist.barrier()
    heart.start()
    with _terminated(heart):
        try:
            yield
        except SystemExit as leaving:
            if leaving.code:
                heart.ends()
                leave(leaving.code if isinstance(leaving.code, int) else 1)
            _part(heart)
            raise
        except (Exception, KeyboardInterrupt) as error:
            if debug:
                traceback.print_exc()
            heart.ends(*_words(error))
            leave(error.exit_code if isinstance(error, CurvescopeError) else 1)
        _part(heart)


def _begin(launch: Launch) -> None:
    """The process group, and this rank's device."""
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    where = {"MASTER_ADDR": launch.address, "MASTER_PORT": str(launch.port)}
    if launch.by == "Slurm":
        where |= {"RANK": str(launch.rank), "WORLD_SIZE": str(launch.ranks), "LOCAL_RANK": str(launch.local)}
        os.environ.update(where)
    dist.init_process_group(backend, timeout=timedelta(seconds=_seconds(TIMEOUT)))
    seed = torch.tensor(torch.initial_seed() % 2**32)
    dist.broadcast(seed, src=0)  # of what a user's module may draw
    torch.manual_seed(int(seed))
    np.random.seed(int(seed))
    random.seed(int(seed))


def _part(heart: Heartbeat) -> None:
    """All have done their work: nobody is looked at any more, then the store may go with rank 0."""
    dist.barrier()
    heart.stop()
    dist.barrier()
    dist.destroy_process_group()


def _own_store() -> Any:
    """A connection to the store in which the ranks have met; one that waits does not block it."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def _seconds(name: str) -> float:
    """A number from the environment."""
    said = os.environ.get(name, "")
    try:
        found = float(said) if said else DEFAULT[name]
    except ValueError:
        found = 0.0
    if not found > 0:
        raise UsageError(f"expected {name} as a number of seconds, got {said!r}")
    return found


def _words(error: BaseException) -> tuple[str, str | None]:
    """A message and a hint; what a collective operation says of a rank that is gone, in ours."""
    if isinstance(error, CurvescopeError):
        return error.message, error.hint
    if isinstance(error, KeyboardInterrupt):
        return "stopped", GO_ON
    first = str(error).partition("\n")[0]
    if isinstance(error, RuntimeError) and "imed out" in first:
        return f"another rank has not answered for {_seconds(TIMEOUT):.0f} seconds ({TIMEOUT})", GO_ON
    if isinstance(error, RuntimeError) and any(word in first for word in ("gloo", "NCCL", "onnection")):
        return "another rank has ended", GO_ON
    return f"{type(error).__name__}: {first}", GO_ON


@contextmanager
def _terminated(heart: Heartbeat) -> Iterator[None]:
    """SIGTERM, which torchrun sends when another rank has ended, is said in our words."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        heart.ends("stopped by SIGTERM: another rank has ended, or the job was canceled", GO_ON)
        leave(1)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
