"""Numbers of threads: the same on every rank where ranks repeat a computation, and whether several help.

Ranks that run one algorithm on whole vectors compute its inner products and its small dense matrices each for
itself, and decide by them. The order of a sum depends on the number of threads, so ranks with unequal numbers
would round differently, drift apart, and stop after different numbers of steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from threadpoolctl import threadpool_limits

NUM_TIMED = 30  # matrix products that `thread_slowdown` times with each number of threads
_own: ContextVar[int | None] = ContextVar("curvescope_own_threads", default=None)  # None: nothing is limited


@contextmanager
def same_threads(least_of_ranks: Callable[[float], float]) -> Iterator[None]:
    """Inside, torch, numpy and scipy compute with the smallest number of threads that any rank has.

    Nothing changes if all ranks have the same number. All ranks enter this together.

    Args:
        least_of_ranks: Returns the smallest of the numbers that the ranks give.
    """
    own = torch.get_num_threads()
    least, most = int(least_of_ranks(own)), -int(least_of_ranks(-own))
    if least == most:
        yield
        return
    token = _own.set(own if _own.get() is None else _own.get())
    try:
        with threadpool_limits(limits=least, user_api="blas"):  # of numpy and scipy
            torch.set_num_threads(least)
            yield
    finally:
        torch.set_num_threads(own)
        _own.reset(token)


@contextmanager
def own_threads() -> Iterator[None]:
    """Inside, this rank computes its part of a product with its own number of threads."""
    own = _own.get()
    if own is None:
        yield
        return
    limited = torch.get_num_threads()
    torch.set_num_threads(own)
    try:
        yield
    finally:
        torch.set_num_threads(limited)


def thread_slowdown() -> float:
    """Time of a small matrix product with torch's number of threads, divided by that with one thread.

    A number far above 1 says that the machine is busy: threads wait for each other. Takes milliseconds on an
    idle machine.
    """
    num_threads = torch.get_num_threads()
    shared = _product_seconds()
    try:
        torch.set_num_threads(1)
        return shared / _product_seconds()
    finally:
        torch.set_num_threads(num_threads)


def _product_seconds() -> float:
    """The median seconds of a small matrix product."""
    A, taken = torch.ones(256, 256), []
    for _ in range(NUM_TIMED):
        start = time.perf_counter()
        torch.mm(A, A)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
