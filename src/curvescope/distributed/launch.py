"""The beginning and the end of ranks that torchrun or Slurm have started.

CPU tensors go through gloo and those of CUDA devices through NCCL, one device for each rank of a machine. A
collective operation waits for at most CURVESCOPE_TIMEOUT seconds, by default half an hour; a rank that is
gone is noticed within a minute, or CURVESCOPE_PATIENCE seconds (`heartbeat`).
"""

from __future__ import annotations

import os
import random
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.ranks.launch import Launch
from curvescope.distributed.heartbeat import GO_ON, PATIENCE, SECONDS, Heartbeat, leave

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
