"""Startup and shutdown of ranks that torchrun or Slurm have launched.

CPU tensors use gloo and CUDA tensors NCCL, with one device per rank of a machine. A collective operation
waits for at most CURVESCOPE_TIMEOUT seconds, by default half an hour. A lost rank is detected within a
minute, or within CURVESCOPE_PATIENCE seconds (`Heartbeat`).

All ranks end when one of them is lost or reports that it cannot continue.

A killed rank cannot report its end, and the others may be waiting for it inside a collective operation, where
no Python runs. So each rank has a thread that increments a counter in the rendezvous store. Rank 0 reads all
counters; the others read that of rank 0 and a flag that some rank has ended. If a counter does not change for
`patience` reads, its rank is lost, and the thread ends the process. A run writes its files such that the
process may end at any moment, so the same command resumes it.
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
from curvescope.core.ranks.rank_environment import Launch

SECONDS = 2.0  # seconds between reads
PATIENCE = 30  # reads without a change after which a rank is lost
ENDED, BEATS, COMPLAINTS = "curvescope/ended", "curvescope/beat", "curvescope/complaints"
RESUME_HINT = "finished work is saved: the same command resumes, with any number of ranks"


@final
class Heartbeat:
    """Thread of a rank that detects lost ranks.

    Args:
        store: A separate `torch.distributed.Store` connection, because a waiting one blocks.
        rank: Rank of this process.
        ranks: Number of ranks.
        complain: Called by one of the ranks with a message and a hint for the user.
        seconds: Seconds between reads.
        patience: Reads of an unchanged counter after which its rank is lost.
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
        self._last_counters: dict[
            int, tuple[bytes, int]
        ] = {}  # last counter of each rank, and number of reads since it changed
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="curvescope-heartbeat", daemon=True)
        self._count = 0
        self._beat()

    def start(self) -> None:
        """Start the thread; every rank has created its counter by now."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def ends(self, message: str = "", hint: str | None = None) -> None:
        """Report that this rank cannot continue, unless another rank has reported first; the others will end.

        Without a message the user has been informed already. The caller then exits with its own exit code.
        """
        self._stopped.set()
        is_first = self._rank <= 1
        with suppress(Exception):  # rank 0 may have closed the store
            is_first = self._store.add(COMPLAINTS, 1) == 1
            self._store.set(ENDED, str(self._rank))
        if is_first and message:
            self._complain(message, hint)
        if self._rank == 0:  # rank 0 may host the store, which the others still read
            self._wait_for_others()

    def _wait_for_others(self) -> None:
        """Wait until all ranks have read the flag, for a few reads at most."""
        with suppress(Exception):
            for _ in range(10):
                if self._store.add(COMPLAINTS, 0) >= self._ranks:
                    return
                time.sleep(self._seconds / 4)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"{BEATS}/{self._rank}", str(self._count))

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._beat()
                lost = None if self._store.check([ENDED]) else self._lost()
            except Exception:  # the process that hosts the store has ended
                if not self._stopped.is_set():
                    self._leave("the process that hosts the rendezvous store has ended")
                return
            if self._stopped.is_set():
                return
            if lost is not None:
                waited = self._patience * self._seconds
                self._leave(f"rank {lost} has sent no sign of life for {waited:.0f} seconds")
            if self._store.check([ENDED]) and not self._stopped.is_set():
                self._leave("another rank has ended")

    def _lost(self) -> int | None:
        """Return a rank whose counter has not changed for too long."""
        looked_at = range(1, self._ranks) if self._rank == 0 else range(1)
        keys = [f"{BEATS}/{rank}" for rank in looked_at]
        for rank, count in zip(looked_at, self._store.multi_get(keys), strict=True):
            before, num_reads = self._last_counters.get(rank, (b"", 0))
            self._last_counters[rank] = (count, num_reads + 1 if count == before else 0)
            if self._last_counters[rank][1] >= self._patience:
                return rank
        return None

    def _leave(self, message: str) -> None:
        """End this process, also if its main thread waits in a collective operation."""
        self.ends(message, RESUME_HINT)
        leave(1)


def leave(code: int) -> NoReturn:
    """End the process now, without exit handlers that would wait for other ranks."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


TIMEOUT = "CURVESCOPE_TIMEOUT"
PATIENCE_VARIABLE = "CURVESCOPE_PATIENCE"
DEFAULT = {TIMEOUT: 1800.0, PATIENCE_VARIABLE: PATIENCE * SECONDS}
Complain = Callable[[str, str | None], None]
"""Function called with a message and a hint for the user."""


def describe(launch: Launch) -> str:
    """Describe the number of ranks, and how long they wait for each other."""
    silent, busy = _seconds(PATIENCE_VARIABLE), _seconds(TIMEOUT)
    return (
        f"{launch.ranks} ranks, started by {launch.by}: a rank without a sign of life for {silent:.0f} s "
        f"is lost; collective operations wait up to {busy:.0f} s"
    )


@contextmanager
def started(launch: Launch, complain: Complain, *, debug: bool = False) -> Iterator[None]:
    """Run with the process group of a launch; an error that leaves the context on one rank ends all
    processes.

    If several ranks fail, only the first one reports.

    Args:
        launch: Rank and number of ranks.
        complain: Reports the error to the user.
        debug: If True, show tracebacks.
    """
    _begin(launch)
    wait = _seconds(PATIENCE_VARIABLE)
    beat = min(SECONDS, wait / 4)
    heart = Heartbeat(
        _own_store(), launch.rank, launch.ranks, complain, seconds=beat, patience=int(wait / beat)
    )
    dist.barrier()
    heart.start()
    with _handle_sigterm(heart):
        try:
            yield
        except SystemExit as leaving:
            if leaving.code:
                heart.ends()
                leave(leaving.code if isinstance(leaving.code, int) else 1)
            _shut_down(heart)
            raise
        except (Exception, KeyboardInterrupt) as error:
            if debug:
                traceback.print_exc()
            heart.ends(*_describe_error(error))
            leave(error.exit_code if isinstance(error, CurvescopeError) else 1)
        _shut_down(heart)


def _begin(launch: Launch) -> None:
    """Create the process group and select this rank's device."""
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    variables = {"MASTER_ADDR": launch.address, "MASTER_PORT": str(launch.port)}
    if launch.by == "Slurm":
        variables |= {
            "RANK": str(launch.rank),
            "WORLD_SIZE": str(launch.ranks),
            "LOCAL_RANK": str(launch.local),
        }
        os.environ.update(variables)
    dist.init_process_group(backend, timeout=timedelta(seconds=_seconds(TIMEOUT)))
    seed = torch.tensor(torch.initial_seed() % 2**32)
    dist.broadcast(seed, src=0)  # the user's module may draw random numbers
    torch.manual_seed(int(seed))
    np.random.seed(int(seed))
    random.seed(int(seed))


def _shut_down(heart: Heartbeat) -> None:
    """Wait for all ranks and stop the heartbeats, so that rank 0 may close the store."""
    dist.barrier()
    heart.stop()
    dist.barrier()
    dist.destroy_process_group()


def _own_store() -> Any:
    """Open a separate connection to the rendezvous store, so that a waiting one does not block it."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def _seconds(name: str) -> float:
    """Read a number of seconds from the environment."""
    text = os.environ.get(name, "")
    try:
        seconds = float(text) if text else DEFAULT[name]
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"expected {name} as a number of seconds, got {text!r}")
    return seconds


def _describe_error(error: BaseException) -> tuple[str, str | None]:
    """Return a message and a hint, in plain words for collective operations that lost a rank."""
    if isinstance(error, CurvescopeError):
        return error.message, error.hint
    if isinstance(error, KeyboardInterrupt):
        return "stopped", RESUME_HINT
    first_line = str(error).partition("\n")[0]
    if isinstance(error, RuntimeError) and "imed out" in first_line:
        return f"another rank has not answered for {_seconds(TIMEOUT):.0f} seconds ({TIMEOUT})", RESUME_HINT
    if isinstance(error, RuntimeError) and any(word in first_line for word in ("gloo", "NCCL", "onnection")):
        return "another rank has ended", RESUME_HINT
    return f"{type(error).__name__}: {first_line}", RESUME_HINT


@contextmanager
def _handle_sigterm(heart: Heartbeat) -> Iterator[None]:
    """Handle SIGTERM, which torchrun sends when another rank has ended, with a clear message."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        heart.ends("stopped by SIGTERM: another rank has ended, or the job was canceled", RESUME_HINT)
        leave(1)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
